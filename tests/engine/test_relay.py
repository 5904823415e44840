"""Passes begun by native code before they are asked for: the same answers, whatever becomes of them."""

from __future__ import annotations

import pytest

from paceline.drafters import DRAFTERS
from paceline.engine.adaptive import AdaptivePolicy
from paceline.engine.policy import Choice
from paceline.models.graphs import PassGraphs
from paceline.testing import toy_config
from tests.drafters.contract_toys import (
    VOCAB,
    ByRequest,
    PlacedModel,
    context_for,
    make_drafter,
    make_engine,
    params,
    plain,
    prompt_of,
    repeating,
    run,
)

METHODS = ["ngram", "suffix"]
REQUESTS = [(0, str(i), prompt_of(i, 5 + 3 * i), params(max_tokens=40)) for i in range(3)]


def relayed(method, policy=None, k=5, eos=(), **config):
    model = PlacedModel(repeating, toy_config(VOCAB, eos_token_ids=eos))
    return make_engine([make_drafter(method)], k=k, policy=policy, model=model, ahead=True, **config)


def to_the_end(engine, check=lambda: ()):
    while engine.has_work:
        engine.step()
        assert all(check())


def in_vain(engine):
    return len(engine.model.rows_per_pass) - engine.stats.num_steps


def check(engine, requests=REQUESTS):
    sequences, _ = run(engine, requests)
    for name, alone in plain(requests).items():
        assert sequences[name].output_tokens == alone.output_tokens, name
    assert engine.blocks.num_free == engine.blocks.num_blocks
    assert engine.drafters.failures == 0
    return sequences


@pytest.mark.parametrize("method", METHODS)
def test_the_policy_of_users_hands_over_where_k_is_fixed(method):
    drafter = make_drafter(method)
    policy = AdaptivePolicy([drafter], method, 4)
    engine = make_engine([drafter], policy=policy, model=PlacedModel(repeating), ahead=True)
    check(engine)
    assert engine.runner.relay.begun > 15
    assert in_vain(engine) == 0


def test_trees_are_written_as_they_are_laid_out():
    engine, trees = relayed("suffix", k=8), []
    forward = engine.model.forward

    def passing(tokens, plan, *rest):
        trees.append(plan.host.path.shape[1])
        return forward(tokens, plan, *rest)

    engine.model.forward = passing
    requests = [(0, str(i), prompt_of(i, 12) * 3, params(max_tokens=60)) for i in range(3)]
    check(engine, requests)
    assert sum(width > 0 for width in trees) > 5, "some drafts branch"
    assert engine.runner.relay.begun > 10
    assert in_vain(engine) == 0


class Open(ByRequest):
    """Does not say beforehand what it will plan."""

    def settled(self, sequences):
        return None


@pytest.mark.parametrize("method", METHODS)
def test_a_pass_that_is_planned_is_begun_before_it_is_laid_out(method):
    choices = {"0": Choice(method, 6), "1": Choice(method, 2), "2": Choice()}
    engine = relayed(method, Open(choices))
    check(engine)
    assert engine.runner.relay.begun > 15
    assert in_vain(engine) == 0


def test_several_lookups_may_draft_for_one_pass():
    drafters = [make_drafter(name) for name in METHODS]
    policy = ByRequest({str(at): Choice(METHODS[at % 2], 4 + at) for at in range(3)})
    engine = make_engine(drafters, policy=policy, model=PlacedModel(repeating), ahead=True)
    sequences = check(engine)
    assert {method for one in sequences.values() for method in one.stats.drafts_by_method} == set(METHODS)
    assert engine.runner.relay.begun > 15
    assert in_vain(engine) == 0


def test_beside_a_drafter_of_another_kind_nothing_is_begun():
    drafters = [make_drafter("ngram"), make_drafter("draft-model")]
    policy = ByRequest({"0": Choice("ngram", 4)}, Choice("draft-model", 3))
    engine = make_engine(drafters, policy=policy, model=PlacedModel(repeating), ahead=True)
    check(engine, REQUESTS[:2])
    assert in_vain(engine) == 0


class Fickle(ByRequest):
    """Says that it will draft further than it does."""

    def settled(self, sequences):
        method, budgets = super().settled(sequences)
        return method, [budget + 2 for budget in budgets]


@pytest.mark.parametrize("method", METHODS)
def test_a_pass_that_is_not_asked_for_changes_nothing(method):
    engine = relayed(method, Fickle({}, Choice(method, 3)))
    check(engine)
    assert in_vain(engine) > 5


@pytest.mark.parametrize("method", METHODS)
def test_a_handing_over_that_fails_is_not_tried_again(method, monkeypatch, caplog):
    engine, calls = relayed(method), []

    def fail(*_):
        calls.append(1)
        raise MemoryError("no room")

    monkeypatch.setattr(PassGraphs, "begin", fail)
    check(engine)
    assert engine.runner.relay is None
    assert len(calls) == 1
    assert "no longer begun" in caplog.text


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("where", ["_begin", "collect"])
def test_what_an_interrupted_step_had_not_said_is_forgotten(method, where, monkeypatch):
    """Coins are thrown again, so other tokens may come: what was taken in of the first is no part of the text."""
    engine = relayed(method)
    relay = engine.runner.relay
    owner = engine.committer if where == "collect" else relay
    work, calls = getattr(owner, where), []

    def interrupted(*args):
        calls.append(relay._step.found == 0)  # else the step before is told already
        if calls[-1] and sum(calls) == 9:
            raise KeyboardInterrupt
        return work(*args)

    monkeypatch.setattr(owner, where, interrupted)
    wanted = params(max_tokens=50, temperature=0.7)
    (sequence,) = engine.add_request("a", prompt_of(1, 9), wanted)
    states = engine.drafters.drafters[0].states
    with pytest.raises(KeyboardInterrupt):
        to_the_end(engine)
    assert states[sequence.key].indexed > len(sequence.tokens), "the case in question"
    to_the_end(engine, lambda: [state.indexed <= len(state.sequence.tokens) for state in states.values()])
    assert sequence.num_output == 50
    assert engine.blocks.num_free == engine.blocks.num_blocks


def test_nothing_is_handed_over_without_recorded_passes_or_native_lookups():
    drafter = DRAFTERS["ngram"](context_for(toy_config(VOCAB)), native=False)
    assert make_engine([drafter], model=PlacedModel(repeating), ahead=True).runner.relay is None
    assert make_engine([make_drafter("ngram")], ahead=True).runner.relay is None


@pytest.mark.parametrize(
    ("method", "k", "own", "settled"),
    [
        ("ngram", 4, None, ("ngram", [4, 4])),
        ("ngram", None, None, None),
        ("auto", 4, None, None),
        ("ngram", 4, {"method": "suffix", "k": 2}, None),
        ("ngram", 4, {"k": 2}, ("ngram", [4, 2])),
        ("ngram", 4, "none", None),
    ],
)
def test_what_the_next_plan_will_be_is_said_only_where_nothing_is_open(method, k, own, settled):
    drafters = [make_drafter(name) for name in METHODS]
    policy = AdaptivePolicy(drafters, method, k)
    engine = make_engine(drafters, policy=policy)
    (first,) = engine.add_request("a", prompt_of(0, 5), params(max_tokens=5))
    (second,) = engine.add_request("b", prompt_of(0, 5), params(max_tokens=5, speculation=own))
    assert policy.settled([first, second]) == settled
