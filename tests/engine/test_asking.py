"""Who is asked what it knows, who speaks for whom, and how long what was worked out serves."""

from __future__ import annotations

import pytest

from paceline.engine.adaptive import AdaptivePolicy
from paceline.engine.budget import Budget, Terms
from paceline.engine.cost import CostModel
from paceline.engine.offers import KEPT
from paceline.engine.policy import StepReport
from paceline.models.pass_prior import GPU
from tests.drafters.contract_toys import make_drafter, make_engine, params, plain, prompt_of
from tests.engine.test_policy import FLAT, Guesser, sequence, simulate, timeless


class Wide(Guesser):
    covers = ("narrow",)


class Model(Guesser):
    """Casts no shadow."""

    def __init__(self, name, alpha, **options):
        super().__init__(name, alpha, shadow=False, **options)
        self.questions = 0

    def evidence(self, sequence):
        self.questions += 1
        return super().evidence(sequence)


def methods_of(policy, sequences):
    return {choice.method for choice in policy.plan(sequences, 0, False) if choice.budget}


@pytest.mark.parametrize("many", [2, 12])
def test_a_method_that_another_covers_drafts_only_for_those_that_name_it(many):
    both = [Guesser("narrow", 0.9), Wide("wide", 0.8)]
    policy = timeless(both, "auto")
    anyone = [sequence(f"s{i}") for i in range(many)]
    simulate(policy, both, FLAT, anyone, 60)
    assert methods_of(policy, anyone) == {"wide"}
    mixed = [*anyone, sequence("n", speculation="narrow"), sequence("k", speculation={"method": "narrow", "k": 3})]
    simulate(policy, both, FLAT, mixed, 60)
    choices = policy.plan(mixed, 0, False)
    assert [choice.method for choice in choices[many:]] == ["narrow", "narrow"]
    assert choices[-1].budget == 3
    assert {choice.method for choice in choices[:many] if choice.budget} == {"wide"}


@pytest.mark.parametrize("many", [2, 12])
def test_the_covered_method_serves_once_the_other_has_failed(many):
    both = [Guesser("narrow", 0.9), Wide("wide", 0.9)]
    policy, sequences = timeless(both, "auto"), [sequence(f"s{i}") for i in range(many)]
    simulate(policy, both, FLAT, sequences, 40)
    policy.plan(sequences, 0, False)
    policy.observe(StepReport(many, many, 0.02, {}, [], retired=frozenset({"wide"})))
    simulate_without(policy, both, sequences)
    assert methods_of(policy, sequences) == {"narrow"}


def simulate_without(policy, guessers, sequences):
    """Steps of which each says that the second has failed."""
    observe = policy.observe

    def observed(report):
        observe(StepReport(**{**vars(report), "retired": frozenset({guessers[1].name})}))

    policy.observe = observed
    simulate(policy, guessers, FLAT, sequences, 60)


def test_a_covered_lookup_takes_nothing_in_until_it_is_asked_and_then_knows_as_much():
    ngram, suffix, eager = make_drafter("ngram"), make_drafter("suffix"), make_drafter("ngram")
    engine = make_engine([ngram, suffix], policy=AdaptivePolicy([ngram, suffix], "auto"))
    request = (0, "a", prompt_of(0, 9), params(max_tokens=30))
    (first,) = engine.add_request(*request[1:])
    engine.step()
    while engine.has_work:
        assert ngram.idle
        assert not ngram.states
        engine.step()
    assert first.output_tokens == plain([request])["a"].output_tokens
    assert ngram.look([first]) == eager.look([first]), "it takes in what it is asked about"
    ngram.release(first)
    AdaptivePolicy([ngram, suffix], "ngram")
    assert not ngram.idle, "here it is the one that is asked"
    AdaptivePolicy([ngram, suffix], "auto")
    alone = (0, "b", prompt_of(1, 9), params(max_tokens=20))
    (second,) = engine.add_request(*alone[1:3], params(max_tokens=20, speculation={"method": "ngram", "k": 4}))
    methods = set()
    while engine.has_work:
        methods |= {output.method for output in engine.step() if output.drafted}
    assert methods == {"ngram"}
    assert second.output_tokens == plain([alone])["b"].output_tokens


def test_all_of_a_few_are_asked_where_somebody_drafts_and_some_of_many():
    asked: dict[int, int] = {}
    for many in (4, 40):
        guesser = Guesser("g", 0.9)
        policy, sequences = timeless([guesser], "auto"), [sequence(f"s{i}") for i in range(many)]
        simulate(policy, [guesser], FLAT, sequences, 40)
        policy._lead.now, policy._since_plain = {sequences[0].key: "g"}, 0  # only the first drafted
        policy._asking.purse.empty()
        policy._asking.purse.pay(1.0)
        policy.plan(sequences, 0, False)
        asked[many] = len(policy._made.evidence)
    assert asked == {4: 4, 40: 1}


def test_an_outlook_serves_for_some_steps_and_not_for_others():
    guesser = Guesser("g", 0.6)
    policy, sequences = timeless([guesser], "auto"), [sequence(f"s{i}") for i in range(3)]
    simulate(policy, [guesser], FLAT, sequences, 200)
    seen = []
    for _ in range(3 * KEPT):
        simulate(policy, [guesser], FLAT, sequences, 1)
        seen.append(policy._outlook)
    assert 3 <= len({id(one) for one in seen}) <= 4, "made anew every few steps"
    last = policy._outlook
    last.left = KEPT
    simulate(policy, [guesser], FLAT, sequences[:2], 3)  # a plain one among them
    assert policy._outlook is not last, "somebody left"
    last = policy._outlook
    last.left = KEPT
    fresh = sequence("s1")  # of the same name
    simulate(policy, [guesser], FLAT, [sequences[0], fresh], 2)
    assert policy._outlook is not last
    policy.load(policy.state())
    assert policy._outlook is None


def test_a_model_is_asked_again_as_soon_as_lookups_draft():
    lookup, model = Guesser("lookup", 0.5), Model("model", 0.9)
    policy = AdaptivePolicy([lookup, model], "auto", None, GPU, lambda: 0.0)
    sequences = [sequence(f"s{i}") for i in range(12)]
    simulate(policy, [lookup, model], FLAT, sequences, 80)
    policy._standing = None
    policy._lead.now = {one.key: "lookup" for one in sequences}
    policy._asking.purse.empty()
    policy._asking.purse.pay(1.0)  # there is no time for questions
    model.questions = 0
    policy.plan(sequences, 0, False)
    assert model.questions >= len(sequences)


def test_a_trial_that_took_longer_puts_the_next_one_off_and_a_shorter_one_brings_it_forward():
    cost = CostModel()
    cost.observe(4, 0.03)
    terms = Terms(cost, 4, 0.03, 4, 4.0, 0.0, cost.seconds_with_few(4, 8), {})
    expected = terms.with_nodes[5]
    allowed = {}
    for taken in (0.8 * expected, expected, 1.2 * expected, 9 * expected):
        budget = Budget()
        budget._allowance = 0.6
        budget.settle(terms, 6, taken)
        allowed[taken] = budget._allowance
    assert list(allowed.values()) == sorted(allowed.values(), reverse=True)
    assert allowed[expected] == pytest.approx(0.6)
    assert allowed[9 * expected] == pytest.approx(0.1), "one slow step says more about the machine"
    untouched = Budget()
    untouched.settle(terms, 0, 9.0)
    assert untouched._allowance == 0.0, "nothing was drafted after all"


def test_a_cost_that_still_moves_is_still_a_guess():
    steady, moving = CostModel(), CostModel()
    for cost in (steady, moving):
        cost.observe(4, 0.03)
    for _ in range(4):
        steady.observe(64, steady.seconds_with_few(63, 1)[0], drafted=True)
        moving.observe(64, 0.2 * moving.seconds_with_few(63, 1)[0], drafted=True)
    assert steady.sure_of(64)
    assert not moving.sure_of(64)
    for _ in range(8):
        moving.observe(64, 0.5 * moving.seconds_with_few(63, 1)[0], drafted=True)
    assert moving.sure_of(64), "not for ever"


def test_trials_are_settled_by_what_they_took_without_the_drafting():
    guesser = Guesser("g", 0.9, seconds=0.0001)
    policy, sequences, seen = timeless([guesser], "auto"), [sequence(f"s{i}") for i in range(4)], []
    settle, observe = policy._budget.settle, policy.observe
    reports = []
    policy.observe = lambda report: (reports.append(report), observe(report))
    policy._budget.settle = lambda terms, nodes, taken: (
        seen.append((terms.base + nodes, taken)),
        settle(terms, nodes, taken),
    )
    simulate(policy, [guesser], FLAT, sequences, 300)
    took = {(report.rows, report.step_s - sum(s for _, s in report.draft_s.values())) for report in reports}
    assert len(seen) > 3
    assert took.issuperset(seen)


def test_what_must_read_before_it_drafts_is_taken_for_a_model():
    class Reader(Guesser):
        def lag(self, sequence):
            asked.append(sequence.key)
            return 4000

    asked: list[str] = []
    both = [Guesser("lookup", 0.5), Reader("reader", 0.9)]
    policy = timeless(both, "auto")
    assert not policy._methods.look_up
    simulate(policy, both, FLAT, [sequence("a")], 20)
    assert asked
    assert timeless(both[:1], "auto")._methods.look_up


def test_questions_for_rows_whose_k_is_fixed_are_not_charged_to_the_others():
    class Slow(Guesser):
        def look(self, sequences):
            if any(one.params.speculation for one in sequences):
                now[0] += 2e-3
            return [self.evidence(one) for one in sequences]

    each = []
    for beside in ([], [sequence("f", speculation={"method": "g", "k": 3})]):
        now, guesser = [0.0], Slow("g", 0.9)
        policy = AdaptivePolicy([guesser], "auto", clock=lambda now=now: now[0])
        simulate(policy, [guesser], FLAT, [sequence("a"), *beside], 30)
        each.append(policy._asking.each_s("g"))
    assert each[0] == each[1]


@pytest.mark.parametrize(("many", "most"), [(4, 1), (16, 4)])
def test_a_few_cast_one_shadow_a_step(many, most):
    guesser = Guesser("g", 0.0, evidence=0)
    policy, sequences, counts = timeless([guesser], "auto"), [sequence(f"s{i}") for i in range(many)], []
    cast = policy._known._cast_shadows
    policy._known._cast_shadows = lambda output: (counts.append(1), cast(output))
    simulate(policy, [guesser], FLAT, sequences, 10)
    assert len(counts) == 9 * most, "the last step is not learnt from yet"
