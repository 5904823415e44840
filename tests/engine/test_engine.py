"""The engine on a toy whose next token hashes the whole context: every slip of the cache would change the output."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.config import EngineConfig
from paceline.engine.engine import Engine
from paceline.engine.policy import DraftPlan
from paceline.errors import InvalidParameter, InvalidPrompt
from paceline.sampling_params import SamplingParams
from paceline.testing import HashModel, context_logits, toy_config
from tests.helpers.contract_toys import ByRequest
from tests.helpers.fakes import (
    ChainDrafter,
    DrawnChainDrafter,
    DrawnTreeDrafter,
    NaNDrafter,
    NarrowDrafter,
    RaisingDrafter,
    TapDrafter,
    TooManyNodesDrafter,
    TreeDrafter,
    requests_strategy,
)

VOCAB = 11


def greedy_alone(prompt, max_tokens, eos=()):
    """The answer by definition, without any engine."""
    context = list(prompt)
    for _ in range(max_tokens):
        logits = context_logits(context, VOCAB)
        context.append(max(range(VOCAB), key=logits.__getitem__))
        if context[-1] in eos:
            break
    return context[len(prompt) :]


def make_engine(*, eos=(), drafters=(), policy=None, **config):
    defaults = {"block_size": 4, "num_blocks": 64, "max_num_seqs": 8, "max_num_batched_tokens": 32}
    model = HashModel(toy_config(VOCAB, eos_token_ids=eos))
    return Engine(model, EngineConfig(**{**defaults, **config}), drafters=drafters, policy=policy)


def params(**kwargs):
    return SamplingParams(**kwargs).resolve({})


def run(engine, requests, cancel=()):
    """requests: (arrival step, id, prompt, params); cancel: (step, id). Returns the sequences by request id."""
    sequences, pending = {}, sorted(requests, key=lambda request: request[0])
    for step in itertools.count():
        while pending and (pending[0][0] <= step or not engine.has_work):
            _, name, prompt, wanted = pending.pop(0)
            sequences[name] = engine.add_request(name, prompt, wanted)
        for at, name in cancel:
            if at == step:
                engine.cancel(name)
                engine.blocks.check(engine.scheduler.sequences())
        if not engine.has_work and not pending:
            return sequences
        engine.step()
        engine.blocks.check(engine.scheduler.sequences())
        assert step < 5000, "the engine does not finish"
    raise AssertionError("unreachable")


def prompt_of(shared: int, length: int) -> list[int]:
    return [(shared * 5 + at * at) % VOCAB for at in range(length)]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    requests_strategy(
        st.sampled_from(["none", "chain", "tree", "drawn", "tapped"]), st.integers(0, 6)
    ),  # method, max_nodes
    st.integers(14, 40),  # blocks: two of the longest sequences never fit together at the low end
    st.integers(4, 40),  # tokens per step
    st.booleans(),
)
def test_every_request_gets_the_tokens_it_gets_alone(wanted, num_blocks, step_tokens, prefix_caching):
    choices = {
        str(i): DraftPlan(method, max_nodes) for i, (*_, method, max_nodes) in enumerate(wanted) if method != "none"
    }
    engine = make_engine(
        num_blocks=num_blocks,
        max_num_seqs=4,
        max_num_batched_tokens=step_tokens,
        prefix_caching=prefix_caching,
        drafters=[ChainDrafter("chain"), TreeDrafter("tree"), DrawnChainDrafter("drawn"), TapDrafter()],
        policy=ByRequest(choices),
    )
    requests, cancel = [], []
    for i, (arrival, shared, length, max_tokens, seed, cancelled, _, _) in enumerate(wanted):
        sampling = params(max_tokens=max_tokens, **({} if seed is None else {"seed": seed, "temperature": 0.8}))
        requests.append((arrival, str(i), prompt_of(shared, length), sampling))
        if cancelled < 20:
            cancel.append((cancelled, str(i)))
    sequences = run(engine, requests, cancel)
    for _, name, prompt, sampling in requests:
        (sequence,) = sequences[name]
        if sampling.seed is None:
            expected = greedy_alone(prompt, sampling.max_tokens)
        else:
            lone = make_engine(prefix_caching=False)
            expected = run(lone, [(0, "0", prompt, sampling)])["0"][0].output_tokens
        if sequence.finish_reason == "abort":
            assert sequence.output_tokens == expected[: sequence.num_output]
        else:
            assert sequence.output_tokens == expected
            assert sequence.finish_reason == "length"
    assert engine.blocks.num_free == num_blocks
    assert engine.drafters.failures == 0


def test_a_cache_too_small_for_all_preempts_the_youngest_and_loses_nothing():
    engine = make_engine(num_blocks=10, max_num_seqs=4)
    requests = [(0, str(i), prompt_of(i, 6), params(max_tokens=24)) for i in range(4)]
    sequences = run(engine, requests)
    for _, name, prompt, _ in requests:
        assert sequences[name][0].output_tokens == greedy_alone(prompt, 24)
    assert sequences["0"][0].num_preemptions == 0, "the oldest is never preempted"
    assert sum(sequences[str(i)][0].num_preemptions for i in range(4)) > 0


def test_long_prompts_are_computed_in_chunks_beside_decodes():
    engine = make_engine(max_num_batched_tokens=8)
    engine.add_request("short", [1, 2], params(max_tokens=20))
    engine.step()
    engine.add_request("long", prompt_of(1, 30), params(max_tokens=3))
    (long,) = [s for s in engine.scheduler.waiting if s.request_id == "long"]
    decoded = 0
    while long.num_output == 0:
        decoded += any(sequence.request_id == "short" for sequence in engine.step().sequences)
    assert decoded >= 4, "the short request decodes while the long prompt is computed"
    assert max(engine.model.rows_per_pass) <= 8
    while engine.has_work:
        engine.step()
    assert long.output_tokens == greedy_alone(prompt_of(1, 30), 3)


def test_a_shared_beginning_is_computed_once():
    engine = make_engine()
    prompt = prompt_of(0, 22)
    run(engine, [(0, "a", prompt, params(max_tokens=4))])
    engine.model.rows_per_pass.clear()
    (again,) = run(engine, [(0, "b", [*prompt, 3], params(max_tokens=4))])["b"]
    assert again.num_cached_prompt == 20
    assert engine.model.rows_per_pass[0] == 3
    assert again.output_tokens == greedy_alone([*prompt, 3], 4)


def test_after_every_step_no_sequence_holds_more_than_its_tokens_need_and_full_blocks_are_shared():
    engine = make_engine(drafters=[ChainDrafter("chain")], policy=ByRequest({"a": DraftPlan("chain", 6)}))
    sequences = [engine.add_request(name, prompt_of(i, 5), params(max_tokens=21))[0] for i, name in enumerate("ab")]
    while engine.has_work:
        engine.step()
        for sequence in sequences:
            assert len(sequence.blocks) == (0 if sequence.finished else engine.blocks.blocks_for(len(sequence.tokens)))
    for name, before in zip("cd", sequences, strict=True):  # an answer is a beginning, too
        (after,) = run(engine, [(0, name, [*before.tokens, 1], params(max_tokens=2))])[name]
        assert after.num_cached_prompt == (len(before.tokens) - 1) // 4 * 4


def test_cancellation_frees_blocks_at_once():
    engine = make_engine()
    engine.add_request("a", prompt_of(0, 9), params(max_tokens=50))
    engine.step()
    assert engine.blocks.num_free < 64
    (sequence,) = engine.cancel("a")
    assert engine.blocks.num_free == 64
    assert sequence.finish_reason == "abort"
    assert not engine.has_work
    assert engine.cancel("a") == []


def test_n_answers_share_the_prompt_and_differ_by_sub_seed():
    engine = make_engine()
    answers = run(engine, [(0, "a", prompt_of(0, 17), params(max_tokens=12, n=3, seed=4, temperature=1.0))])["a"]
    assert len({tuple(answer.output_tokens) for answer in answers}) == 3
    assert [answer.num_cached_prompt for answer in answers] == [0, 16, 16]
    lone = run(make_engine(), [(0, "a", prompt_of(0, 17), params(max_tokens=12, seed=4, temperature=1.0))])["a"]
    assert answers[0].output_tokens == lone[0].output_tokens


def test_a_batch_mixes_methods_and_a_row_without_draft():
    node_limits = {"chain": 5, "tree": 7, "drawn": 4, "tapped": 2}
    engine = make_engine(
        drafters=[ChainDrafter("chain"), TreeDrafter("tree"), DrawnChainDrafter("drawn"), TapDrafter()],
        policy=ByRequest({name: DraftPlan(name, max_nodes) for name, max_nodes in node_limits.items()}),
        num_blocks=128,
    )
    names = [*node_limits, "plain"]
    sequences = run(engine, [(0, name, prompt_of(i, 5 + i), params(max_tokens=40)) for i, name in enumerate(names)])
    for i, name in enumerate(names):
        assert sequences[name][0].output_tokens == greedy_alone(prompt_of(i, 5 + i), 40)
    stats = {name: sequences[name][0].stats for name in names}
    assert stats["plain"].num_drafts == 0
    assert stats["plain"].mean_acceptance_length == 1.0
    for name in ("chain", "tree", "drawn"):
        assert 0 < stats[name].num_accepted_tokens < stats[name].num_draft_tokens, "accepts and rejects both occur"
        assert stats[name].mean_acceptance_length > 1.0
        assert stats[name].num_committed_tokens == 40


@pytest.mark.parametrize("broken", [RaisingDrafter, NaNDrafter, TooManyNodesDrafter, NarrowDrafter])
def test_a_broken_drafter_costs_the_speculation_never_the_answer(broken):
    engine = make_engine(
        drafters=[broken("broken"), ChainDrafter("chain")],
        policy=ByRequest({"a": DraftPlan("broken", 3), "b": DraftPlan("chain", 3)}),
    )
    sequences = run(engine, [(0, name, prompt_of(0, 6), params(max_tokens=20)) for name in "ab"])
    assert sequences["a"][0].output_tokens == sequences["b"][0].output_tokens == greedy_alone(prompt_of(0, 6), 20)
    assert engine.drafters.failures > 0
    assert sequences["a"][0].stats.num_drafts == 0
    assert sequences["b"][0].stats.num_drafts > 0


def test_a_tree_that_carries_q_is_refused_and_the_answer_stands(caplog):
    engine = make_engine(drafters=[DrawnTreeDrafter("trees")], policy=ByRequest({"a": DraftPlan("trees", 4)}))
    (sequence,) = run(engine, [(0, "a", prompt_of(0, 6), params(max_tokens=20))])["a"]
    assert sequence.output_tokens == greedy_alone(prompt_of(0, 6), 20)
    assert engine.drafters.failures > 0
    assert "row 0: a tree carries q" in caplog.text


@pytest.mark.parametrize("verb", ["index_prompt", "admit", "release"])
def test_a_drafter_that_fails_at_bookkeeping_is_switched_off_and_the_answer_stands(verb):
    class Forgetful(ChainDrafter):
        calls = 0

    def fail(self, *arguments):
        self.calls += 1
        if self.calls == 2:
            raise KeyError("lost")

    setattr(Forgetful, verb, fail)
    engine = make_engine(
        drafters=[Forgetful("lost"), TreeDrafter("tree")],
        policy=ByRequest({"a": DraftPlan("lost", 3), "b": DraftPlan("tree", 3)}),
    )
    requests = [(4 * i, name, prompt_of(0, 6), params(max_tokens=12)) for i, name in enumerate("abc")]
    sequences = run(engine, requests)
    for name in "abc":
        assert sequences[name][0].output_tokens == greedy_alone(prompt_of(0, 6), 12)
    assert engine.drafters.failures == 1


@pytest.mark.parametrize("capacity", [6, 500])
def test_a_tapped_drafter_survives_chunked_prefill_prefix_hits_and_preemption(capacity):
    drafter = TapDrafter(capacity)
    choices = {str(i): DraftPlan("tapped", 2) for i in range(6)}
    engine = make_engine(
        num_blocks=12, max_num_batched_tokens=9, max_num_seqs=4, drafters=[drafter], policy=ByRequest(choices)
    )
    requests = [(2 * i, str(i), prompt_of(0, 16 + i), params(max_tokens=14)) for i in range(6)]
    sequences = run(engine, requests)
    for _, name, prompt, _ in requests:
        assert sequences[name][0].output_tokens == greedy_alone(prompt, 14)
    assert drafter.checked_slots > 100
    assert sum(s.num_preemptions for (s,) in sequences.values()) > 0
    assert drafter.prefix_slots > 0, "own K/V were reused from shared blocks"
    assert engine.drafters.failures == 0


@pytest.mark.parametrize("capacity", [4, 500])
def test_a_drafter_that_lost_context_starts_with_what_it_has(capacity):
    """A request that excluded it published blocks that it never saw; a later hit must not trust them."""
    drafter = TapDrafter(capacity)
    engine = make_engine(drafters=[drafter], policy=ByRequest({"a": DraftPlan("tapped", 1)}), num_blocks=128)
    run(engine, [(0, "b", prompt_of(0, 24), params(max_tokens=2, speculation="none"))])
    (sequence,) = run(engine, [(0, "a", prompt_of(0, 26), params(max_tokens=12))])["a"]
    assert sequence.num_cached_prompt == 24
    assert sequence.output_tokens == greedy_alone(prompt_of(0, 26), 12)
    assert drafter.late_starts > 0
    assert drafter.checked_slots > 0
    assert engine.drafters.failures == 0


def test_eos_inside_an_accepted_run_ends_the_answer_there():
    for eos in range(VOCAB):
        engine = make_engine(
            eos=(eos,), drafters=[ChainDrafter("chain")], policy=ByRequest({"a": DraftPlan("chain", 6)}), num_blocks=128
        )
        (sequence,) = run(engine, [(0, "a", prompt_of(0, 5), params(max_tokens=60))])["a"]
        expected = greedy_alone(prompt_of(0, 5), 60, eos=(eos,))
        assert sequence.output_tokens == expected
        assert sequence.finish_reason == ("stop" if eos in expected else "length")
        assert sequence.stats.num_committed_tokens == len(expected)
        assert sequence.stats.num_accepted_tokens <= len(expected)


def test_every_remainder_of_max_tokens_is_met_exactly():
    for max_tokens in range(1, 16):
        engine = make_engine(
            drafters=[TreeDrafter("tree")], policy=ByRequest({"a": DraftPlan("tree", 9)}), num_blocks=128
        )
        (sequence,) = run(engine, [(0, "a", prompt_of(0, 5), params(max_tokens=max_tokens))])["a"]
        assert sequence.output_tokens == greedy_alone(prompt_of(0, 5), max_tokens)


def test_without_max_tokens_it_runs_to_the_end_of_the_context():
    engine = make_engine(
        max_model_len=30, drafters=[ChainDrafter("chain")], policy=ByRequest({"a": DraftPlan("chain", 6)})
    )
    (sequence,) = run(engine, [(0, "a", prompt_of(0, 9), params())])["a"]
    assert len(sequence.tokens) == 30
    assert sequence.finish_reason == "length"
    assert sequence.output_tokens == greedy_alone(prompt_of(0, 9), 21)


def test_stop_beats_the_length_limit_and_min_tokens_delays_both():
    answer = greedy_alone(prompt_of(0, 5), 10)
    stop = answer[4]
    first = answer.index(stop)
    (sequence,) = run(make_engine(), [(0, "a", prompt_of(0, 5), params(max_tokens=first + 1, stop_token_ids=[stop]))])[
        "a"
    ]
    assert sequence.finish_reason == "stop"
    assert sequence.stop_reason == stop
    assert sequence.output_tokens == answer[: first + 1]
    (sequence,) = run(
        make_engine(eos=(stop,)), [(0, "a", prompt_of(0, 5), params(max_tokens=30, min_tokens=first + 2))]
    )["a"]
    assert stop not in sequence.output_tokens[: first + 1]


@pytest.mark.parametrize(
    ("prompt", "problem"),
    [([], "empty"), ([1] * 256, "length is 256"), ([1, 99], "99 is outside"), ([-1], "-1")],
)
def test_bad_prompts_are_refused(prompt, problem):
    engine = make_engine()
    with pytest.raises(InvalidPrompt, match=problem):
        engine.add_request("a", prompt, params(max_tokens=2))
    assert not engine.has_work


def test_settings_that_cannot_work_are_refused():
    for field, config in (
        ("max_model_len", {"max_model_len": 10_000}),
        ("kv_cache_bytes", {"num_blocks": 1}),
        ("max_num_batched_tokens", {"max_num_batched_tokens": 2}),
    ):
        with pytest.raises(InvalidParameter) as refused:
            make_engine(**config)
        assert refused.value.field == field
    engine = make_engine()
    engine.add_request("a", [1], params(max_tokens=5))
    with pytest.raises(InvalidParameter) as refused:
        engine.add_request("a", [1], params(max_tokens=5))
    assert refused.value.field == "request_id"


def test_torch_is_set_up_once_for_the_steps_of_a_stretch_and_left_as_it_was():
    engine = make_engine()
    engine.model.torch_threads = 1
    engine.add_request("a", [1, 2, 3], params(max_tokens=8))
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        engine.step()
        assert (torch.is_inference_mode_enabled(), torch.get_num_threads()) == (False, 2)
        with engine.at_work():
            for _ in range(3):
                engine.step()
                assert (torch.is_inference_mode_enabled(), torch.get_num_threads()) == (True, 1)
        engine.step()
        assert (torch.is_inference_mode_enabled(), torch.get_num_threads()) == (False, 2)
    finally:
        torch.set_num_threads(threads)


def test_without_drafters_a_step_is_its_own_measure_of_plain_decoding():
    engine = make_engine()
    (sequence,) = engine.add_request("a", [1, 2, 3], params(max_tokens=20))
    while engine.has_work:
        engine.step()
    assert sequence.stats.plain_s == sequence.stats.spent_s > 0
