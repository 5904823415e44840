"""Passes begun by native code before they are asked for: the same answers, whatever becomes of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.drafters import DRAFTERS
from paceline.engine.adaptive import AdaptivePolicy
from paceline.engine.batch import Batch, Row
from paceline.engine.policy import Choice
from paceline.models.graphs import PassGraphs
from paceline.testing import context_logits, toy_config
from tests.drafters.contract_toys import (
    CAN_HAND_OVER,
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

pytestmark = pytest.mark.skipif(not CAN_HAND_OVER, reason="there is no native library here, or no triton")
METHODS = ["ngram", "suffix"]
REQUESTS = [(0, str(i), prompt_of(i, 5 + 3 * i), params(max_tokens=40)) for i in range(3)]


def relayed(method, policy=None, k=5, eos=(), **config):
    model = PlacedModel(repeating, toy_config(VOCAB, eos_token_ids=eos))
    return make_engine([make_drafter(method)], k=k, policy=policy, model=model, ahead=True, **config)


def to_the_end(engine, check=lambda: ()):
    while engine.has_work:
        engine.step()
        assert all(check())


def taken_in(state):
    if hasattr(state, "index"):
        return state.index.tokens().tolist()
    return state.tokens[: state.view.length].tolist()


def told(state):
    """The text in native memory is that of the sequence, as far as it was taken in."""
    text = taken_in(state)
    return text == state.sequence.tokens[: len(text)] and len(text) >= len(state.sequence.tokens) - 8


def in_vain(engine):
    return len(engine.model.rows_per_pass) - engine.stats.num_steps


def check(engine, requests=REQUESTS):
    sequences, _ = run(engine, requests)
    for name, alone in plain(requests).items():
        assert sequences[name].output_tokens == alone.output_tokens, name
    assert engine.blocks.num_free == engine.blocks.num_blocks
    assert engine.drafters.failures == 0
    return sequences


@pytest.mark.parametrize("method", [*METHODS, "auto"])
def test_the_policy_of_users_hands_over_where_k_is_fixed(method):
    drafters = [make_drafter(name) for name in METHODS if method in (name, "auto")]
    policy = AdaptivePolicy(drafters, method, 4)
    engine = make_engine(drafters, policy=policy, model=PlacedModel(repeating), ahead=True)
    check(engine)
    assert all(drafter.states == {} for drafter in drafters)
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
    assert not engine.runner.relay.works
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
    assert taken_in(states[sequence.key]) != sequence.tokens, "the case in question"
    to_the_end(engine, lambda: [told(state) for state in states.values()])
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
        ("auto", 4, None, ("suffix", [4, 4])),
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


@pytest.mark.parametrize("method", METHODS)
def test_who_may_end_is_not_handed_over(method):
    """Its end is seen before the pass after it is begun."""
    drafter, eos = make_drafter(method), 5
    model = PlacedModel(repeating, toy_config(VOCAB, eos_token_ids=(eos,)))
    engine = make_engine([drafter], k=4, model=model, ahead=True)
    requests = [(0, str(i), prompt_of(i, 9), params(max_tokens=12 + i, stop_token_ids=[7])) for i in range(6)]
    sequences, _ = run(engine, requests)
    for name, alone in plain(requests, eos=(eos,)).items():
        assert sequences[name].output_tokens == alone.output_tokens
    assert {one.finish_reason for one in sequences.values()} == {"stop", "length"}
    assert in_vain(engine) == 0


def test_a_pass_begun_is_over_once_another_was_run():
    """Its logits and what it wrote to the cache stand no longer."""
    engine = relayed("ngram")
    graphs, taken = engine.model.graphs, []
    begin = graphs.begin

    def beginning(*given):
        began = begin(*given)
        if began:
            graphs.run(graphs._begun.of)
            taken.append(graphs._begun)
        return began

    graphs.begin = beginning
    check(engine)
    assert taken
    assert set(taken) == {None}
    assert in_vain(engine) >= 2 * len(taken) - 1


def test_of_rows_that_take_several_tiles_nothing_is_begun():
    config = replace(toy_config(VOCAB), num_heads=32, num_kv_heads=1)
    engine = make_engine([make_drafter("ngram")], k=12, model=PlacedModel(repeating, config), ahead=True)
    check(engine)
    assert engine.runner.relay.begun < engine.stats.num_steps / 2, "only short drafts"
    assert in_vain(engine) == 0


def chaos(context, vocab_size):
    """Some copy for ever, and the others never."""
    if context[0] == 1:
        return [9.0 * (token == context[-1] % 3 + 1) for token in range(vocab_size)]
    return context_logits(context, vocab_size, "chaos")


def crowded(relays, num_blocks, requests, block_size):
    config = toy_config(499)
    drafter = DRAFTERS["ngram"](context_for(config, ngram_min=3, ngram_max=3))
    policy = AdaptivePolicy([drafter], "ngram", 64)
    engine = make_engine(
        [drafter],
        policy=policy,
        model=PlacedModel(chaos, config),
        ahead=True,
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_batched_tokens=1024,
        prefix_caching=False,
    )
    engine.runner.relay.works = relays
    sequences, _ = run(engine, requests)
    return engine.stats.num_steps, {name: (one.num_preemptions, one.output_tokens) for name, one in sequences.items()}


@pytest.mark.parametrize("new", [150, 170, 190])
def test_room_that_others_hold_is_nobody_elses(new):
    """Deep drafts of one leave all with much room; a newcomer then finds next to none."""
    requests = [(0, f"{i}", [5 + (7 * i + j * j) % 400 for j in range(8)], params(max_tokens=220)) for i in range(2)]
    requests.append((0, "copies", [1, 2, 3] * 4, params(max_tokens=131)))
    requests.append((3, "new", [5 + (j**3 + 5) % 400 for j in range(new)], params(max_tokens=60)))
    assert crowded(True, 120, requests, 4)[1] == crowded(False, 120, requests, 4)[1]


@pytest.mark.parametrize("arrival", [12, 20])
def test_room_that_drafts_do_not_take_is_given_back_at_once(arrival):
    requests = [(0, f"{i}", [5 + (7 * i + j * j) % 400 for j in range(8)], params(max_tokens=60)) for i in range(6)]
    requests.append((arrival, "new", [5 + (j**3 + 5) % 400 for j in range(210)], params(max_tokens=40)))
    assert crowded(True, 42, requests, 16) == crowded(False, 42, requests, 16)


def test_what_one_holds_too_much_does_not_hide_what_another_lacks():
    engine = relayed("ngram", num_blocks=24)
    for name in "ab":
        engine.add_request(name, prompt_of(0, 6), params(max_tokens=30))
    while any(sequence.num_output < 2 for sequence in engine.scheduler.sequences()):
        engine.step()
    one, other = engine.scheduler.running
    batch = Batch([Row(sequence, len(sequence.tokens) - 1, 1, True, "ngram", 4) for sequence in (one, other)])
    assert engine.scheduler.make_room(batch, 5, [4, 4]) is not None
    engine.blocks.trim(other, len(other.tokens))
    engine.blocks.allocate(one, 4 * (len(one.blocks) + engine.blocks.num_free))
    assert engine.scheduler.make_room(batch, 5, [4, 4]) is None
    engine.blocks.check([one, other])
