"""Offers: which drafters are asked, and those that fail to answer."""

from __future__ import annotations

import pytest

from paceline.engine.block_manager import BlockManager
from paceline.engine.drafter_set import DrafterSet
from paceline.engine.policy import DraftPlan
from paceline.engine.policy.adaptive import AdaptivePolicy
from tests.engine.policy.simulation import FLAT, Lookup, Model, plan, sequence, simulate, two_plans
from tests.helpers.contract_toys import make_drafter, make_engine, params, plain, prompt_of
from tests.helpers.results import rows_of


class Narrow(Lookup):
    only_by_name = True


@pytest.mark.parametrize("many", [2, 12])
def test_a_method_that_is_chosen_by_name_drafts_for_requests_that_name_it_alone(many):
    both = [Narrow("narrow", 0.9), Lookup("wide", 0.8)]
    policy = AdaptivePolicy("auto")
    mixed = [*(sequence(f"s{i}") for i in range(many)), sequence("n", speculation="narrow")]
    simulate(policy, both, FLAT, mixed, 100)
    methods = [choice.method for choice in max(two_plans(policy, both, mixed), key=str)]
    assert methods == ["wide"] * many + ["narrow"]


def test_ngram_takes_nothing_in_until_a_request_names_it():
    ngram, suffix = make_drafter("ngram"), make_drafter("suffix")
    engine = make_engine([ngram, suffix], policy=AdaptivePolicy("auto"))
    request = (0, "a", prompt_of(0, 9), params(max_tokens=30))
    (first,) = engine.add_request(*request[1:])
    engine.step()
    while engine.has_work:
        assert not ngram.states
        engine.step()
    assert first.output_tokens == plain([request])["a"].output_tokens
    engine.add_request("b", prompt_of(1, 9), params(max_tokens=20, speculation={"method": "ngram", "k": 4}))
    methods = set()
    while engine.has_work:
        methods |= {output.method for output in rows_of(engine.step()) if output.drafted}
    assert methods == {"ngram"}


def test_a_drafter_that_cannot_answer_warns_once_and_silences_no_other_row(caplog):
    sequences = [sequence(f"s{i}") for i in range(3)]

    class Partly(Lookup):
        def levels(self, sequences):
            return [4]  # for three

        def level(self, one):
            return 4 if one is not sequences[1] else 1 // 0

    policy, drafters = AdaptivePolicy("g", 3), DrafterSet([Partly("g", 0.9)], 100, BlockManager(1, 1))
    for _ in range(3):
        plans = policy.plan(sequences, drafters.offers(sequences), 0, False)
        assert [plan.max_nodes for plan in plans] == [3, 0, 3]
    assert len([record for record in caplog.records if "failed to say" in record.message]) == 2, "one for each cause"


def test_the_first_tokens_of_an_answer_do_not_wait_for_a_model_that_must_read_the_prompt():
    model, new = Model("model", 0.9), sequence("s")
    model.unread_tokens = lambda sequence: 4000
    policy = AdaptivePolicy("model", 4)
    del new.tokens[2:]
    assert plan(policy, [model], [new]) == [DraftPlan()]
    new.tokens.append(1)
    assert plan(policy, [model], [new]) == [DraftPlan("model", 4)]
