"""The contract of every entry of the METHODS table: speculation changes when tokens come, never which.

A new method joins by being in the table; `contract_toys.MAKERS` makes it for the toy target.
"""

from __future__ import annotations

import collections
import gc
import random
import sys
import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.config import EngineConfig, SpeculationConfig
from paceline.core.rng import Lane, coin_of
from paceline.core.verdict import TokenKind
from paceline.drafters import METHODS as TABLE
from paceline.drafters import DrafterContext
from paceline.drafters.heads.medusa import MedusaDrafter
from paceline.drafters.model.draft_model import DraftModelDrafter
from paceline.drafters.model.layer_skip import SkipDrafter
from paceline.drafters.tapped import likely_nodes
from paceline.engine.engine import Engine
from paceline.engine.policy import DraftPlan
from paceline.engine.policy.adaptive import AdaptivePolicy
from paceline.models.load.open_model import load_model
from paceline.native.library import library_status, load_library
from paceline.testing import toy_config
from tests.drafters.block.dspark_reference import knowing
from tests.drafters.block.dspark_reference import make as make_block_drafter
from tests.drafters.eagle.eagles import fitted
from tests.drafters.overfit import overfit_heads, taps_of
from tests.helpers.contract_toys import (
    AHEAD,
    EARLY,
    MAKERS,
    NATIVE,
    NATIVE_EARLY,
    OTHER,
    PLAIN,
    TAPPED,
    TAUGHT,
    VOCAB,
    ByRequest,
    FunctionModel,
    Letters,
    NowAndThen,
    Stumbling,
    ToyGrammar,
    answers,
    contrary,
    exact_joint,
    exercised,
    g_test,
    make_drafter,
    make_engine,
    params,
    plain,
    prompt_of,
    repeating,
    run,
)
from tests.helpers.errors import refused
from tests.helpers.fakes import requests_strategy

METHODS = list(TABLE)
WAYS = [*METHODS, TAPPED, TAUGHT, AHEAD, *EARLY, *PLAIN, *NATIVE, *NATIVE_EARLY, *OTHER]
DEVICE = {AHEAD, *EARLY, *NATIVE_EARLY}  # ways that run ahead of the host
# Ways with dspark's and eagle3's classes, or right about one text alone: long tables of parameters run without these.
TWINS = {"dflash", "eagle", "dflash, native", "dspark, native int8, overfit"}
AS_NATIVE = {"dspark": "dspark, native int8", "dflash": "dflash, native"}  # what a CPU has in place of torch's
FALSE_ALARM = 1e-6  # of each statistical test


def every(requests):
    return [(0, str(i), prompt, wanted) for i, (prompt, wanted) in enumerate(requests)]


def check(method, requests, *, k=4, drafter=None, **options):
    """Speculative equals plain, token for token, and both accepts and rejects occurred. Returns the sequences."""
    engine = make_engine([drafter or make_drafter(method)], k=k, ahead=method in DEVICE, **options)
    sequences, outputs = run(engine, requests)
    own = {name: value for name, value in options.items() if name in ("eos", "max_model_len")}
    for name, alone in plain(requests, **own).items():
        assert sequences[name].output_tokens == alone.output_tokens, name
        assert sequences[name].finish_reason == alone.finish_reason
        assert sequences[name].stop_reason == alone.stop_reason
        assert sequences[name].text == alone.text
        assert sequences[name].stats.num_committed_tokens == alone.num_output
    assert engine.drafters.failures == 0
    assert engine.blocks.num_free == engine.blocks.num_blocks
    return sequences, outputs


@pytest.mark.parametrize("way", NATIVE)
def test_a_native_way_drafts_by_native_calls_alone(way):
    drafter, calls = make_drafter(way), []
    engine = make_engine([drafter], k=4)
    draft = drafter._native.draft
    drafter._native.draft = lambda *given: (calls.append(1), draft(*given))[1]
    (sequence,) = run(engine, every([(prompt_of(0, 12), params(max_tokens=30))]))[0].values()
    assert len(calls) == sequence.stats.num_drafts > 2
    assert engine.drafters.failures == 0


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("method", [TAUGHT, TAPPED])
def test_feedback_on_every_verified_row_is_of_the_raw_logits(method, ahead):
    """Under penalties and grammars, in plain and drafted steps, with prompts in chunks, preemption and cancellation.
    A drafter whose check fails is counted as failed."""
    drafter = make_drafter(method)
    wishes = [{}, WISHES["all"], WISHES["grammar"], {"temperature": 0.8, "seed": 3}, {"max_tokens": 3}]
    requests = [
        (i % 3, str(i), prompt_of(i, 5 + 3 * i), params(**{"max_tokens": 26, **wish})) for i, wish in enumerate(wishes)
    ]
    engine = make_engine(
        [drafter],
        policy=NowAndThen(drafter.name, range(1, 6), 0.6),
        ahead=ahead,
        num_blocks=22,
        max_num_seqs=4,
        max_num_batched_tokens=12,
    )
    passes = engine.model.rows_per_pass
    sequences, _ = run(engine, requests, cancel=[(15, "3")])
    assert engine.drafters.failures == 0
    assert sum(one.num_preemptions for one in sequences.values()) > 0
    drafted = sum(one.stats.num_draft_tokens for one in sequences.values())
    assert 0.8 * drafted < drafter.rows_checked <= sum(passes)


def test_feedback_of_a_wrong_row_is_noticed():
    drafter = make_drafter(TAUGHT)
    drafter.logits_of = contrary
    engine = make_engine([drafter])
    run(engine, every([(prompt_of(0, 9), params(max_tokens=6))]))
    assert engine.drafters.failures == 1
    assert drafter.rows_checked == 0


def test_no_feedback_is_computed_where_no_drafter_asks_for_it():
    engine, calls = make_engine([make_drafter("ngram")]), []
    engine.runner.sampler.top_tokens = lambda *given: calls.append(given)
    run(engine, every([(prompt_of(0, 9), params(max_tokens=6))]))
    assert not calls


def test_every_method_can_be_made():
    assert set(TABLE) <= set(MAKERS), "give contract_toys.MAKERS an entry for every method of the table"


@pytest.mark.parametrize(("kind", "k"), [("greedy", 1), ("greedy", 8), ("seeded", 1), ("seeded", 4)])
@pytest.mark.parametrize("method", WAYS)
def test_greedy_and_seeded_output_is_the_plain_one(method, kind, k):
    seeds = [{"temperature": 0.7, "seed": i} if kind == "seeded" else {} for i in range(4)]
    requests = every([(prompt_of(i, 3 + 4 * i), params(max_tokens=40, **one)) for i, one in enumerate(seeds)])
    drafter = make_drafter(method)
    sequences, _ = check(method, requests, k=k, drafter=drafter)
    assert exercised(sequences.values())
    if method == AHEAD:
        assert len(drafter.model.ahead) > 2, "drafts were begun behind steps under way"


WISHES = {
    "repetition": {"repetition_penalty": 1.3},
    "presence": {"presence_penalty": 0.7},
    "frequency": {"frequency_penalty": 0.4},
    "bias": {"logit_bias": {3: 2.5, 4: -100, 0: 1.0}},
    "bad_words": {"bad_words": ["cd", "e", "aba"]},
    "allowed": {"allowed_token_ids": [1, 2, 3, 5, 8]},
    "min_tokens": {"min_tokens": 12},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.2},
    "logprobs": {"logprobs": 4},
    "all": {
        "repetition_penalty": 1.2,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.1,
        "logit_bias": {2: 1.0},
        "allowed_token_ids": [0, 1, 2, 3, 4, 6, 7, 8, 9],
        "bad_words": ["ab"],
        "min_tokens": 12,
        "top_k": 6,
        "top_p": 0.9,
        "min_p": 0.02,
        "logprobs": 2,
    },
    "grammar": {"structured_outputs": {"regex": "toy"}, "ignore_eos": False},
}


@pytest.mark.parametrize("wish", WISHES)
@pytest.mark.parametrize("method", [way for way in WAYS if way not in TWINS])
def test_each_sampling_parameter_under_speculation_is_a_loop_of_single_tokens(method, wish):
    """`plain` decodes one token a pass, through the same parameters."""
    samplings = [{}, {"temperature": 0.8, "seed": 5}, {}, {"temperature": 0.4, "seed": 7}]
    wished = {"ignore_eos": "min_tokens" not in WISHES[wish], **WISHES[wish]}
    requests = every([(prompt_of(i, 12), params(max_tokens=18, **wished, **s)) for i, s in enumerate(samplings)])
    sequences, _ = check(method, requests, eos=(7,))
    if wish == "allowed":
        assert {t for one in sequences.values() for t in one.output_tokens} <= set(WISHES[wish]["allowed_token_ids"])
    if wish == "grammar":
        for one in sequences.values():
            output = one.output_tokens
            assert all(ToyGrammar.allows(output[:at], token) for at, token in enumerate(output))
    if wish == "logprobs":
        for name, alone in plain(requests, eos=(7,)).items():
            assert sequences[name].logprobs == alone.logprobs
    assert sum(sequence.stats.num_accepted_tokens for sequence in sequences.values()) > 0


SAMPLED = {
    "temperature": {"temperature": 2.5},
    "grammar": {"temperature": 2.5, "structured_outputs": {"regex": "toy"}},
    "filters": {"temperature": 2.0, "top_p": 0.9, "min_p": 0.1},
    "allowed": {"temperature": 2.5, "allowed_token_ids": [0, 2]},
    "all": {
        "temperature": 2.0,
        "top_p": 0.9,
        "min_p": 0.1,
        "repetition_penalty": 1.4,
        "frequency_penalty": 0.5,
        "logit_bias": {1: 0.7},
    },
}


@pytest.mark.parametrize(
    ("method", "wish"),
    [(method, "temperature") for method in (*METHODS, *NATIVE, *OTHER)]
    + [(method, "all") for method in (*METHODS, *NATIVE, *OTHER) if method not in TWINS]
    + [(method, wish) for method in ("suffix", "draft-model", *OTHER) for wish in ("allowed", "grammar")]
    + [(AHEAD, "filters")],
)
def test_unseeded_output_is_distributed_as_the_target(method, wish):
    """A false alarm once in a million times."""
    drafter = make_drafter(method, toy_config(3))
    if method == AHEAD:
        drafter.model.most_rows = 100
    assert likelihood(drafter, SAMPLED[wish], ahead=method == AHEAD) > FALSE_ALARM
    if method == AHEAD:
        assert drafter.model.sampled > 5
        assert len(drafter.model.ahead) > 5


def likelihood(drafter, wish, *, k=2, min_node_probability=0.0, ahead=False):
    """The joint of five tokens (three steps at least) of many answers against the target's own, all of it and each pair
    of neighbours, in which a small bias gathers in fewer cells: the lowest p-value.

    `min_node_probability`: as in `Policy`.
    """
    vocab, length, answered = 3, 5, 1200
    prompt, policy = [0, 1, 2, 0, 1, 2, 0, 1], ByRequest({}, DraftPlan(drafter.name, k))
    policy.min_node_probability = min_node_probability
    engine = make_engine(
        [drafter],
        policy=policy,
        ahead=ahead,
        model=FunctionModel(repeating, toy_config(vocab)),
        num_blocks=600,
        max_num_seqs=100,
        max_num_batched_tokens=512,
    )
    wanted = params(max_tokens=length, **wish)
    sequences = [engine.add_request(str(i), prompt, wanted)[0] for i in range(answered)]
    nodes = collections.Counter()
    while engine.has_work:
        nodes.update(drafted for _, drafted, *_ in engine.step().drafts.values())
    assert engine.drafters.failures == 0
    assert exercised(sequences)
    if min_node_probability:
        assert sum(seen > 100 for seen in nodes.values()) > 1, "trees of several sizes"
    exact = exact_joint(repeating, vocab, prompt, wanted, length)
    seen_outputs = collections.Counter(tuple(sequence.output_tokens) for sequence in sequences)
    found = [g_test(seen_outputs, exact)]
    for first in range(length - 1):
        pairs, expected = collections.Counter(), collections.defaultdict(float)
        for tokens, count in seen_outputs.items():
            pairs[tokens[first : first + 2]] += count
        for tokens, mass in exact.items():
            expected[tokens[first : first + 2]] += mass
        found.append(g_test(pairs, expected))
    return min(found)


# Ways whose trees are cut by their own scores, and where.
CUT = dict.fromkeys(("dspark", "eagle3", *(way for way in NATIVE if way.startswith("dspark"))), 0.2)


@pytest.mark.parametrize("method", CUT)
def test_trees_that_are_cut_where_the_drafter_is_unsure_keep_the_distribution(method):
    drafter = make_drafter(method, toy_config(3))
    assert likelihood(drafter, SAMPLED["temperature"], k=4, min_node_probability=CUT[method]) > FALSE_ALARM


@pytest.mark.parametrize("method", CUT)
def test_trees_that_are_cut_change_no_greedy_or_seeded_answer(method):
    samplings, drafted = [{}, {"temperature": 0.7, "seed": 3}], {}
    requests = every([(prompt_of(i, 9), params(max_tokens=40, **one)) for i, one in enumerate(samplings)])
    for least in (0.0, CUT[method], 1.0):
        drafter = make_drafter(method)
        policy = ByRequest({}, DraftPlan(drafter.name, 6))
        policy.min_node_probability = least
        stats = [one.stats for one in check(method, requests, drafter=drafter, policy=policy)[0].values()]
        drafted[least] = sum(one.num_draft_tokens for one in stats) / sum(one.num_drafts for one in stats)
    assert drafted[0.0] > drafted[CUT[method]] > drafted[1.0] == 1, "nodes are left out, but never the likeliest"


@pytest.mark.parametrize("method", ["dspark", "eagle3", "dspark, native"])
def test_a_cut_that_looks_at_the_targets_draw_is_noticed(method, monkeypatch):
    """It leaves a node out where the coin behind it is high: tokens behind nodes that stay come of low coins alone."""

    def by_coin(scores, rows, counts):
        counts = likely_nodes(scores, rows, counts)  # native code grows no others

        def kept(row, count):
            given = row.sequence.noise_key, len(row.sequence.tokens)
            return next((node for node in range(count) if coin_of(Lane.WALK, *given, node) > 0.5), count)

        return [kept(row, count) for row, count in zip(rows, counts, strict=True)]

    drafter = make_drafter(method, toy_config(3))
    monkeypatch.setattr(sys.modules[type(drafter).__module__], "likely_nodes", by_coin)
    assert likelihood(drafter, SAMPLED["temperature"], k=4, min_node_probability=CUT[method]) < FALSE_ALARM


def test_the_distribution_test_would_notice_a_bias():
    """0.08 of total variation, moved from the likeliest pair of tokens to the next."""
    exact = exact_joint(repeating, 3, [0, 1, 2, 0, 1, 2, 0, 1], params(temperature=2.5), 2)
    first, second, *_ = sorted(exact, key=exact.get, reverse=True)
    biased = {**exact, first: exact[first] - 0.08, second: exact[second] + 0.08}
    counts = {outcome: round(1200 * mass) for outcome, mass in biased.items()}
    assert g_test(counts, exact) < FALSE_ALARM


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("native", [False, True])
def test_methods_and_numbers_of_nodes_mix_in_one_batch_with_a_plain_row(native, ahead):
    choices = {f"{method} {k}": DraftPlan(method, k) for method in METHODS for k in (1, 5)}
    drafters = [make_drafter(AS_NATIVE.get(method, method) if native else method) for method in METHODS]
    engine = make_engine(drafters, policy=ByRequest(choices), max_num_seqs=16, ahead=ahead)
    requests = []
    for i, name in enumerate(["plain", *choices]):
        sampling = {"temperature": 0.7, "seed": i} if i % 2 else {}
        requests.append((i % 3, name, prompt_of(i, 6 + i), params(max_tokens=30, **sampling)))
    sequences, _ = run(engine, requests)
    for name, alone in plain(requests).items():
        assert sequences[name].output_tokens == alone.output_tokens, name
    assert sequences["plain"].stats.num_drafts == 0
    for method in METHODS:
        assert exercised([sequences[f"{method} 5"], sequences[f"{method} 1"]]), method
    assert engine.drafters.failures == 0


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("method", ["draft-model", "dspark"])
def test_two_drafters_of_one_method_serve_one_batch(method, ahead):
    """Beside a lookup; requests name a drafter, or the method and leave the choice of its drafters to the policy."""
    drafters = [make_drafter(way) for way in (AHEAD if method == "draft-model" else method, method, "ngram")]
    one, other = (f"{method}:{name}" for name in ("one", "other"))
    drafters[0].name, drafters[1].name = one, other
    drafters[1].version += "'"
    engine = make_engine(drafters, policy=AdaptivePolicy("auto", 4), ahead=ahead)
    wishes = [one, other, method, None, "ngram", "none"]
    requests = [
        (i % 2, str(i), prompt_of(i % 3, 9), params(max_tokens=30, speculation=wish, temperature=0.7, seed=i))
        for i, wish in enumerate(wishes)
    ]
    sequences, _ = run(engine, requests)
    for name, alone in plain(
        [(at, i, prompt, replace(of, speculation=None)) for at, i, prompt, of in requests]
    ).items():
        assert sequences[name].output_tokens == alone.output_tokens, name
    used = [set(sequences[str(i)].stats.drafts_by_method) for i in range(len(wishes))]
    assert (used[0], used[1], used[5]) == ({one}, {other}, set())
    assert used[2] <= {one, other}
    assert used[2]
    assert engine.drafters.failures == 0
    assert engine.blocks.num_free == engine.blocks.num_blocks
    with refused("speculation"):
        engine.add_request("x", [1], params(speculation=f"{method}:third"))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    requests_strategy(st.sampled_from(["none", *METHODS]), st.integers(1, 6), longest=24, max_size=6),  # and max_nodes
    st.integers(13, 40),  # blocks: two of the longest sequences never fit together at the low end
    st.integers(4, 40),  # tokens per step
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_arrivals_cancellations_and_preemption_in_mid_draft_change_nothing(
    wanted, num_blocks, step_tokens, caching, ahead, native
):
    engine = make_engine(
        [make_drafter(AS_NATIVE.get(method, method) if native else method) for method in METHODS],
        policy=ByRequest(
            {str(i): DraftPlan(method, k) for i, (*_, method, k) in enumerate(wanted) if method != "none"}
        ),
        num_blocks=num_blocks,
        max_num_seqs=4,
        max_num_batched_tokens=step_tokens,
        prefix_caching=caching,
        ahead=ahead,
    )
    requests, cancel = [], []
    for i, (arrival, which, length, max_tokens, seed, cancelled, _, _) in enumerate(wanted):
        sampling = params(max_tokens=max_tokens, **({} if seed is None else {"seed": seed, "temperature": 0.8}))
        requests.append((arrival, str(i), prompt_of(which, length), sampling))
        if cancelled < 20:
            cancel.append((cancelled, str(i)))
    sequences, _ = run(engine, requests, cancel)
    for name, alone in plain(requests).items():
        result = sequences[name].output_tokens
        assert result == (
            alone.output_tokens[: len(result)] if sequences[name].finish_reason == "abort" else alone.output_tokens
        )
    assert engine.blocks.num_free == num_blocks
    assert engine.drafters.failures == 0


@pytest.mark.parametrize("method", WAYS)
def test_preemption_in_mid_draft_loses_nothing(method):
    requests = every([(prompt_of(i, 6), params(max_tokens=26)) for i in range(4)])
    sequences, _ = check(method, requests, num_blocks=12, max_num_seqs=4)
    assert sum(sequence.num_preemptions for sequence in sequences.values()) > 0
    assert exercised(sequences.values())


def test_no_sequence_is_preempted_for_the_draft_of_another():
    """Answers end long before their limit, so without drafts there is room for all."""
    requests = every([(prompt_of(i, 9), params(max_tokens=120, temperature=0.5, seed=i)) for i in range(8)])
    for choice in (DraftPlan(), DraftPlan("ngram", 12)):
        policy = ByRequest({}, choice)
        engine = make_engine([make_drafter("ngram")], policy=policy, eos=(7,), max_num_seqs=4, num_blocks=28)
        assert [one.num_preemptions for one in run(engine, requests)[0].values()] == [0] * 8, choice


@pytest.mark.parametrize("method", WAYS)
def test_cancelling_in_mid_draft_frees_everything_and_changes_no_other_answer(method):
    requests = every([(prompt_of(i, 9), params(max_tokens=30)) for i in range(3)])
    alone = {name: sequence.output_tokens for name, sequence in plain(requests).items()}
    engine = make_engine([make_drafter(method)], ahead=method in DEVICE)
    for step in (7, 5, 3, 1):  # the same names anew each time
        result = answers(engine, requests, cancel=[(step, "1")])
        assert (result["0"], result["2"]) == (alone["0"], alone["2"])
        assert result["1"] == alone["1"][: len(result["1"])]
        assert len(result["1"]) < 30, "it was cancelled before its end"
        assert engine.blocks.num_free == engine.blocks.num_blocks
    assert answers(engine, requests) == alone
    assert engine.drafters.failures == 0


@pytest.mark.parametrize("method", [*METHODS, *NATIVE, *OTHER])
def test_a_prefix_hit_changes_nothing(method):
    engine = make_engine([make_drafter(method)])
    asked = {"first": prompt_of(0, 22), "longer": prompt_of(0, 30), "same": prompt_of(0, 22), "other": prompt_of(1, 9)}
    for name, prompt in asked.items():
        for sampling in ({}, {"temperature": 0.7, "seed": 3}):
            request = (0, name, prompt, params(max_tokens=20, **sampling))
            sequence = run(engine, [request])[0][name]
            assert sequence.output_tokens == plain([request])[name].output_tokens
            assert (sequence.num_cached_prompt > 0) == (name in ("longer", "same") or bool(sampling))
    assert engine.drafters.failures == 0


@pytest.mark.parametrize("method", WAYS)
def test_a_stop_token_inside_an_accepted_run_ends_the_answer_there(method):
    inside = 0
    for which, wish in ((0, {}), (2, {"min_tokens": 15})):
        stopping = [params(max_tokens=40, stop_token_ids=[stop], **wish) for stop in range(VOCAB)]
        sequences, outputs = check(method, every([(prompt_of(which, 12), one) for one in stopping]), k=6)
        for stop, name in enumerate(sequences):
            inside += sequences[name].stop_reason == stop and outputs[name][-1].kinds[-1] == TokenKind.DRAFTED
    assert inside > 0, "no stop token was ever drafted"


@pytest.mark.parametrize("method", WAYS)
def test_eos_inside_an_accepted_run_ends_the_answer_there(method):
    inside = 0
    for eos in range(VOCAB):
        kinds = (False, True) if eos < 3 else (False,)  # a row alone, and two that end apart
        requests = every([(prompt_of(0, 12), params(max_tokens=40, ignore_eos=ignore)) for ignore in kinds])
        sequences, outputs = check(method, requests, k=6, eos=(eos,))
        inside += sequences["0"].finish_reason == "stop" and outputs["0"][-1].kinds[-1] == TokenKind.DRAFTED
    assert inside > 0, "EOS was never drafted"


@pytest.mark.parametrize("method", WAYS)
def test_a_stop_string_inside_an_accepted_run_ends_the_text_there(method):
    request = (prompt_of(0, 12), params(max_tokens=40))
    text = Letters().decode(plain(every([request]))["0"].output_tokens)
    for include in (False, True):
        stops = [text[first : first + 3] for first in range(0, 30, 5)]
        wishes = [{"stop": [stop, "zz"], "include_stop_str_in_output": include} for stop in stops]
        sequences, _ = check(method, every([(request[0], params(max_tokens=40, **wish)) for wish in wishes]), k=6)
        for stop, sequence in zip(stops, sequences.values(), strict=True):
            assert sequence.finish_reason == "stop"
            assert sequence.text == text[: text.index(stop) + 3 * include]


@pytest.mark.parametrize("method", WAYS)
def test_every_remainder_of_max_tokens_is_met_exactly(method):
    wanted = range(1, 16)
    requests = every([(prompt_of(0, 12), params(max_tokens=max_tokens)) for max_tokens in wanted])
    sequences, _ = check(method, requests, k=5)
    assert [sequence.num_output for sequence in sequences.values()] == [*wanted]


@pytest.mark.parametrize("method", WAYS)
def test_a_full_context_ends_the_answer(method):
    for length in range(25, 29):  # each place of the last token in its block
        sequences, _ = check(method, every([(prompt_of(0, 9), params())]), k=6, max_model_len=length)
        assert len(sequences["0"].tokens) == length
        assert sequences["0"].finish_reason == "length"


@pytest.mark.parametrize("method", WAYS)
def test_a_prompt_of_one_token(method):
    check(method, every([([token], params(max_tokens=20)) for token in range(4)]))


@pytest.mark.parametrize("method", WAYS)
def test_a_drafter_that_raises_now_and_then_costs_speculation_never_the_answer(method):
    drafter, calls, chance = make_drafter(method), [0, 0], random.Random(1)
    propose = drafter.propose

    def unreliable(rows, *after):
        calls[0] += 1
        before = chance.random() < 0.2
        if before:
            calls[1] += 1
            raise RuntimeError("no ideas")
        draft = propose(rows, *after)
        if chance.random() < 0.2:  # all its work is done, and lost
            calls[1] += 1
            raise RuntimeError("forgot what it wanted to say")
        return draft

    drafter.propose = unreliable
    requests = every([(prompt_of(i, 9), params(max_tokens=40)) for i in range(3)])
    engine = make_engine([drafter], ahead=method in DEVICE)
    sequences, _ = run(engine, requests)
    for name, alone in plain(requests).items():
        assert sequences[name].output_tokens == alone.output_tokens
    assert engine.drafters.failures == calls[1] > 0
    assert exercised(sequences.values())


@pytest.mark.parametrize("method", WAYS)
def test_steps_without_speculation_in_between_change_nothing(method):
    drafter = make_drafter(method)

    requests = every([(prompt_of(i, 20), params(max_tokens=40)) for i in range(3)])
    sequences, _ = check(method, requests, drafter=drafter, policy=NowAndThen(drafter.name, range(1, 6), 0.4))
    assert exercised(sequences.values())


@pytest.mark.parametrize("method", WAYS)
def test_a_closed_engine_holds_no_memory(method):
    """Reference counts alone free it: on a GPU the next engine would find the memory still taken."""
    drafter = make_drafter(method)
    engine = make_engine([drafter], ahead=method in DEVICE)
    for _ in range(2):
        engine.add_request("0", prompt_of(0, 9), params(max_tokens=20))
        for _ in range(4):  # a request, and a draft begun behind a step, are under way
            engine.step()
        engine.cancel("0")
    gc.collect()
    gc.disable()
    try:
        kept = [weakref.ref(part) for cache in engine.runner.cache.layers for part in (cache.k, cache.v)]
        kept += [weakref.ref(drafter), weakref.ref(engine)]
        engine.close()
        engine.close()  # twice is once
        del engine, drafter
        assert [of() for of in kept if of() is not None] == []
    finally:
        gc.enable()


def make_real(method, llm, texts):
    """The table's way to load a model or heads is tested on tiny ones."""
    if method == "draft-model":
        return DraftModelDrafter(Stumbling(llm.loaded.decoder, lambda positions: positions % 4 == 3))
    if method == "skip":
        decoder = llm.loaded.decoder
        layers = range(decoder.config.num_layers)
        return SkipDrafter(decoder.with_layers, tuple(layer for layer in layers if layer not in (4, 5, 6)))
    if method == "medusa":
        decoder = llm.loaded.decoder
        return MedusaDrafter(overfit_heads(decoder, texts), llm.config.vocab_size, kernels=decoder.kernels)
    if method in ("eagle3", "eagle"):
        return fitted(llm.loaded.decoder, texts, taps_of, fused=method == "eagle3")
    if method == "mtp":
        return fitted(llm.loaded.decoder, texts, taps_of, fused=False, mtp=True, norm_output=True)
    if method in ("dspark", "dflash"):
        decoder = llm.loaded.decoder
        changes = {} if method == "dspark" else {"markov_rank": 0, "sample_from_anchor": False}
        config, tensors = knowing(llm.config, decoder.embedding, texts, taps=(1, 15, 30), **changes)
        return make_block_drafter(config, tensors, decoder.embedding, kernels=decoder.kernels)
    return TABLE[method].make(
        DrafterContext(
            config=llm.config,
            device=llm.loaded.decoder.device,
            speculation=SpeculationConfig(method=method),
            encode=llm.tokenizer.encode,
            token_texts=llm.tokenizer.token_text,
        )
    )


ITEM = {"type": "object", "properties": {"name": {"enum": ["red", "green"]}, "hue": {"type": "integer"}}}
SCHEMA = {"type": "array", "items": {**ITEM, "required": ["name", "hue"]}, "minItems": 2}
REAL = (
    ("Repeat after me: one two three four. one two three four. one two", {}),
    ("The list of colours is red, green, blue. Again, the list of colours is", {"temperature": 0.6, "seed": 11}),
    ("def add(a, b):\n    return a + b\n\ndef add3(a, b, c):\n    return", {"repetition_penalty": 1.1}),
    ("Two of the colours, as JSON: ", {"structured_outputs": {"json": SCHEMA}}),
)


def real_answers_of(llm):
    requests = [
        (0, str(i), llm.tokenizer.encode(text), params(max_tokens=20, **wish)) for i, (text, wish) in enumerate(REAL)
    ]
    engine = Engine(llm.loaded.decoder, EngineConfig(num_blocks=64), tokenizer=llm.tokenizer)
    return requests, answers(engine, requests)


@pytest.fixture(scope="module")
def real_answers(smollm2):
    return real_answers_of(smollm2)


@pytest.fixture(scope="module", params=["bfloat16", "int8"])
def rounded(request, smollm2, smollm2_path):
    """The model with K and V of another dtype, and its own plain answers."""
    if load_library() is None:
        pytest.skip(library_status())
    loaded = load_model(smollm2_path, device="cpu", kv_dtype=request.param)
    llm = SimpleNamespace(loaded=loaded, config=smollm2.config, tokenizer=smollm2.tokenizer)
    return llm, real_answers_of(llm)


def check_real(method, llm, requests, expected):
    engine = Engine(
        llm.loaded.decoder,
        EngineConfig(num_blocks=64),
        tokenizer=llm.tokenizer,
        drafters=[make_real(method, llm, [[*prompt, *expected[name]] for _, name, prompt, _ in requests])],
        policy=ByRequest({"2": DraftPlan(method, 6)}, DraftPlan(method, 3)),
    )
    sequences, _ = run(engine, requests)
    assert {name: sequence.output_tokens for name, sequence in sequences.items()} == expected
    assert exercised(sequences.values())
    assert engine.drafters.failures == 0


@pytest.mark.parametrize("method", METHODS)
def test_a_real_model_answers_the_same(method, smollm2, real_answers):
    check_real(method, smollm2, *real_answers)


@pytest.mark.parametrize("method", ["suffix", "draft-model", "dspark"])
def test_rounded_keys_and_values_give_the_same_answers_plain_and_drafted(method, rounded):
    llm, expected = rounded
    check_real(method, llm, *expected)
