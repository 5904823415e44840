"""A model as drafter: its K/V, its unread tokens, its q. The contract suite shows that it changes no output."""

from __future__ import annotations

import functools
import random
from dataclasses import replace

import pytest
import torch

from paceline.config import EngineConfig, SpeculationConfig
from paceline.core.rng import Lane, coin
from paceline.core.sequence import Sequence
from paceline.drafters import METHODS, DrafterContext, DraftRequest
from paceline.drafters.model import by_passes
from paceline.drafters.model.draft_model import DraftModelDrafter
from paceline.drafters.model.vocabulary import load_beside
from paceline.engine.engine import Engine
from paceline.engine.policy import DraftPlan
from paceline.errors import ModelNotFound
from paceline.models.kernels import FLOAT32, INT8, kernels_for
from paceline.models.kv_cache import KVCache
from paceline.models.load.open_model import load_model
from paceline.models.plan import PassPlan
from paceline.testing import toy_config
from paceline.verify import Nodes, probabilities, process, propose
from paceline.verify.metadata import SamplingMetadataBuilder
from tests.helpers.contract_toys import (
    VOCAB,
    ByRequest,
    FunctionModel,
    NowAndThen,
    Stumbling,
    contrary,
    exercised,
    imitating,
    make_engine,
    params,
    plain,
    prompt_of,
    repeating,
    run,
)
from tests.helpers.errors import refused
from tests.helpers.tiny import save_tiny

SAMPLINGS = {"greedy": {}, "seeded": {"temperature": 0.8, "seed": 3}, "sampled": {"temperature": 0.8, "top_p": 0.9}}


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("k", [1, 3, 6])
def test_a_drafter_that_is_the_target_has_everything_accepted(k, sampling):
    steps = 4
    engine = make_engine([DraftModelDrafter(FunctionModel(repeating))], k=k)
    wanted = params(max_tokens=1 + steps * (k + 1), **SAMPLINGS[sampling])
    sequences, _ = run(engine, [(0, str(i), prompt_of(i, 5 + i), wanted) for i in range(3)])
    for sequence in sequences.values():
        assert sequence.stats.num_target_passes == 1 + steps, "the prompt's pass, then k + 1 tokens in each"
        assert sequence.stats.num_accepted_tokens == sequence.stats.num_draft_tokens == steps * k


@pytest.mark.parametrize("k", [1, 4])
def test_a_drafter_that_is_always_wrong_costs_nothing_but_time(k):
    engine = make_engine([DraftModelDrafter(FunctionModel(contrary))], k=k)
    request = (0, "a", prompt_of(0, 7), params(max_tokens=20))
    sequence = run(engine, [request])[0]["a"]
    assert sequence.stats.mean_acceptance_length == 1.0
    assert sequence.stats.num_draft_tokens > 0
    assert sequence.output_tokens == plain([request])["a"].output_tokens


def test_a_drafting_sequence_lags_by_one_token_or_by_two_after_full_acceptance():
    drafter = DraftModelDrafter(FunctionModel(imitating))
    engine = make_engine([drafter], k=3)
    engine.add_request("a", prompt_of(0, 9), params(max_tokens=60))
    (sequence,) = engine.scheduler.waiting
    seen = set()
    engine.step()
    assert drafter.unread_tokens(sequence) == len(sequence.tokens) == 10, "nothing is read before a draft is asked for"
    while engine.has_work:
        before = sequence.stats.num_accepted_tokens
        engine.step()
        if not sequence.finished:
            accepted = sequence.stats.num_accepted_tokens - before
            assert drafter.unread_tokens(sequence) == (2 if accepted == 3 else 1)
            seen.add(accepted)
    assert {0, 3} <= seen
    assert drafter._states == {}


def test_what_was_accepted_is_not_computed_again():
    draft = FunctionModel(repeating, num_layers=1)
    engine = make_engine([DraftModelDrafter(draft)], k=4)
    run(engine, [(0, "a", prompt_of(0, 9), params(max_tokens=1 + 3 * 5))])
    assert draft.rows_per_pass == [10, 1, 1, 1, 2, 1, 1, 1, 2, 1, 1, 1]


def test_a_long_lag_is_read_in_pieces_and_no_other_row_waits_for_it():
    draft = FunctionModel(imitating)
    drafter = DraftModelDrafter(draft, catch_up=16)
    engine = make_engine([drafter], k=3, max_num_batched_tokens=128)
    requests = [
        (0, "long", prompt_of(0, 60), params(max_tokens=30)),
        (0, "short", prompt_of(1, 4), params(max_tokens=30)),
    ]
    sequences, outputs = run(engine, requests)
    results = plain(requests)
    for name, sequence in sequences.items():
        assert sequence.output_tokens == results[name].output_tokens
    assert max(draft.rows_per_pass) <= 16
    first = {name: [step.kinds for step in outputs[name]] for name in outputs}
    assert len(first["short"]) < 30
    assert all(len(kinds) == 1 for kinds in first["long"][:4]), "plain while it reads 60 tokens, 16 a step"
    assert sequences["long"].stats.num_accepted_tokens > 0


def test_a_prefix_hit_on_blocks_it_has_read_spares_the_reading():
    draft = FunctionModel(imitating)
    engine = make_engine([DraftModelDrafter(draft)], k=3)
    run(engine, [(0, "a", prompt_of(0, 40), params(max_tokens=8))])
    draft.rows_per_pass.clear()
    run(engine, [(0, "b", prompt_of(0, 41), params(max_tokens=8))])
    assert draft.rows_per_pass[0] <= 6


def test_a_prefix_hit_on_blocks_it_never_read_is_not_trusted():
    draft = FunctionModel(imitating)
    engine = make_engine([DraftModelDrafter(draft)], policy=ByRequest({"b": DraftPlan("draft-model", 3)}))
    run(engine, [(0, "a", prompt_of(0, 40), params(max_tokens=8))])
    request = (0, "b", prompt_of(0, 41), params(max_tokens=20))
    sequence = run(engine, [request])[0]["b"]
    assert sequence.num_cached_prompt == 40
    assert draft.rows_per_pass[0] == 42, "the toy would notice a slot it never wrote"
    assert sequence.output_tokens == plain([request])["b"].output_tokens


def test_blocks_it_knows_behind_blocks_it_does_not_are_kept():
    """Two twins compute the same prompt; the first block is published by the one that never drafted."""
    drafter = bound(DraftModelDrafter(FunctionModel(imitating, num_layers=1)), 8)
    sequence = sequence_of(prompt_of(0, 21), blocks=[3, 1, 4, 5, 2, 6, 7])
    drafter.admit(sequence, 8, 20)
    assert drafter.unread_tokens(sequence) == 8 + 1
    assert drafter.kv_range(sequence) == (0, 0)
    write(drafter, sequence, range(8, 20))
    drafter.propose([DraftRequest(sequence, 3)])
    assert drafter.kv_range(sequence) == (0, 21)
    assert drafter.model.rows_per_pass == [9, 1, 1]


def test_a_pass_that_fails_midway_leaves_the_drafter_sound():
    for at in range(1, 12):
        draft = FunctionModel(imitating)
        draft.fail_at = {at, at + 3}
        engine = make_engine([DraftModelDrafter(draft)], k=4)
        request = (0, "a", prompt_of(0, 9), params(max_tokens=30))
        sequence = run(engine, [request])[0]["a"]
        assert engine.drafters.failures == 2
        assert sequence.output_tokens == plain([request])["a"].output_tokens
        assert sequence.stats.num_accepted_tokens > 0


def test_it_drafts_up_to_the_end_of_its_own_context_and_no_further():
    draft = FunctionModel(repeating, toy_config(VOCAB, max_positions=24))
    engine = make_engine([DraftModelDrafter(draft)], k=8)
    request = (0, "a", prompt_of(0, 10), params(max_tokens=40))
    sequence, outputs = (part["a"] for part in run(engine, [request]))
    assert sequence.output_tokens == plain([request])["a"].output_tokens
    assert engine.drafters.failures == 0
    position, reached = 10, 0
    for output in outputs:
        reached = max(reached, position + len(output.tokens) - 1 if len(output.tokens) > 1 else 0)
        position += len(output.tokens)
    assert reached == 25, "the last token drafted is never read, so it may lie one past the end; a bonus follows it"


def test_a_token_that_ends_the_answer_ends_the_draft():
    sequence = sequence_of(prompt_of(0, 9), blocks=list(range(8)))
    drafter = bound(DraftModelDrafter(FunctionModel(repeating)), 8)
    drafter.admit(sequence, 0, 0)
    chain = drafter.propose([DraftRequest(sequence, 6)]).tokens[0].tolist()
    for options in ({"eos_token_ids": [chain[2]]}, {"stop_token_ids": [chain[2]]}):
        eos = options.get("eos_token_ids", ())
        stops = options.get("stop_token_ids", ())
        sequence = sequence_of(prompt_of(0, 9), blocks=list(range(8)), stop_token_ids=stops)
        drafter = bound(DraftModelDrafter(FunctionModel(repeating), eos_token_ids=eos), 8)
        drafter.admit(sequence, 0, 0)
        draft = drafter.propose([DraftRequest(sequence, 6)])
        assert draft.tokens[0].tolist() == chain[: chain.index(chain[2]) + 1]


def test_q_is_what_a_loop_of_single_tokens_under_the_requests_parameters_would_sample_from():
    wishes = {
        "temperature": 1.3,
        "top_k": 5,
        "top_p": 0.9,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.3,
        "logit_bias": {3: 1.5},
        "min_tokens": 12,
        "stop_token_ids": [2],
    }
    sequences = [sequence_of(prompt_of(i, 9), [4 * i + j for j in range(4)], name=str(i), **wishes) for i in range(3)]
    sequences.append(sequence_of(prompt_of(3, 6), list(range(12, 16)), name="greedy"))
    sequences.append(sequence_of(prompt_of(4, 6), list(range(16, 20)), name="seeded", temperature=1.0, seed=4))
    for sequence in sequences:
        sequence.bad_words = ((1, 5), (7,))
        sequence.num_prompt -= 2  # two tokens of output
    drafter = bound(DraftModelDrafter(FunctionModel(imitating)), 24)
    for sequence in sequences:
        drafter.admit(sequence, 0, 0)
    node_limits = [2, 5, 3, 4, 1]
    draft = drafter.propose([DraftRequest(sequence, k) for sequence, k in zip(sequences, node_limits, strict=True)])
    draft.validate(VOCAB)
    assert draft.num_nodes.tolist() == node_limits
    rows = draft.q.row_of
    assert sorted(rows[rows >= 0].tolist()) == list(range(2 + 5 + 3)), "every draw has a row of its own"
    for row, (sequence, k) in enumerate(zip(sequences, node_limits, strict=True)):
        sampled = row < 3
        assert (rows[row] >= 0).tolist() == [sampled and slot < k for slot in range(draft.width + 1)]
        for depth in range(k):
            token = int(draft.tokens[row, depth])
            p = one_token_at_a_time(sequence, draft.tokens[row, :depth].tolist())
            if sampled:
                q = draft.q.probs[rows[row, depth]]
                assert torch.equal(q, p)
                assert q[token] > 0
            elif sequence.key.startswith("greedy"):
                assert token == int(p.argmax())


def one_token_at_a_time(sequence, more):
    alone = Sequence("alone", sequence.tokens[: sequence.num_prompt], sequence.params, max_len=99)
    alone.tokens, alone.bad_words = [*sequence.tokens, *more], sequence.bad_words
    metadata = SamplingMetadataBuilder(VOCAB, frozenset(), torch.device("cpu")).metadata([alone])
    logits = torch.tensor([imitating(tuple(alone.tokens), VOCAB)], dtype=torch.float32)
    return probabilities(process(logits, metadata, Nodes.roots(1)))[0]


def test_the_same_request_draws_another_draft_at_every_length_and_the_same_one_in_every_batch():
    def drafts(names):
        drafter = bound(DraftModelDrafter(FunctionModel(imitating)), 24)
        rows = []
        for at, name in enumerate(names):
            sequence = sequence_of(prompt_of(0, 9), [4 * at + j for j in range(4)], name=name, temperature=5.0)
            sequence.noise_key = ord(name)
            drafter.admit(sequence, 0, 0)
            rows.append(DraftRequest(sequence, 5))
        return dict(zip(names, drafter.propose(rows).tokens.tolist(), strict=True))

    together = drafts("abcd")
    assert len({tuple(chain) for chain in together.values()}) > 1
    for name, chain in together.items():
        assert drafts(name)[name] == chain


def test_every_coin_is_drawn_once_and_from_its_own_lane(monkeypatch):
    """Verification draws coins by the same words: sharing one with it would bias the output."""
    tossed = []

    def noted(lane, *words):
        tossed.extend((lane, *each) for each in zip(*(word.tolist() for word in words), strict=True))
        return coin(lane, *words)

    monkeypatch.setattr(by_passes, "propose", functools.partial(propose, source=noted))
    engine = make_engine([DraftModelDrafter(FunctionModel(imitating))], k=3)
    sequences, _ = run(engine, [(0, str(i), prompt_of(i, 5), params(max_tokens=30, temperature=1.0)) for i in range(3)])
    assert {lane for lane, *_ in tossed} == {Lane.DRAFT}
    assert len(set(tossed)) == len(tossed) == sum(sequence.stats.num_draft_tokens for sequence in sequences.values())


def test_two_proposals_for_one_context_are_equal():
    """A step that failed elsewhere is drafted for again."""
    drafter = bound(DraftModelDrafter(FunctionModel(imitating)), 8)
    sequence = sequence_of(prompt_of(0, 9), list(range(8)))
    drafter.admit(sequence, 0, 0)
    first, second = (drafter.propose([DraftRequest(sequence, 4)]) for _ in range(2))
    assert first.tokens.tolist() == second.tokens.tolist()
    assert drafter.kv_range(sequence) == (0, 9)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Two random Llamas of one vocabulary: (target, drafter), as folders."""
    folders = [tmp_path_factory.mktemp(name) for name in ("target", "drafter")]
    for folder, name in zip(folders, ("llama3-untied", "llama-tied"), strict=True):
        save_tiny(name, folder)
    return folders


@pytest.mark.skipif(not kernels_for(torch.device("cpu")).exact, reason="needs kernels of exact numerics")
@pytest.mark.parametrize("own", [True, False], ids=["erring twin", "other model"])
def test_after_every_step_both_caches_are_those_of_a_fresh_prefill_to_the_bit(tiny, own):
    """Random rejects, plain steps in between, chunked prompts, prefix hits, cancellation and preemption."""
    target = load_model(tiny[0], device="cpu", threads=1).decoder
    chance = random.Random(7)

    def errs(positions):
        return torch.tensor([chance.random() < 0.3 for _ in positions], dtype=torch.bool)

    model = Stumbling(target, errs) if own else load_model(tiny[1], device="cpu", threads=1).decoder
    drafter = DraftModelDrafter(model, catch_up=24)

    config = EngineConfig(block_size=4, num_blocks=18, max_num_seqs=4, max_num_batched_tokens=16)
    engine = Engine(target, config, drafters=[drafter], policy=NowAndThen("draft-model", range(1, 6), 0.7))
    layers = engine.runner.cache.layers
    checked = [0, 0]

    def compare(engine):
        for sequence in engine.scheduler.running:
            start, end = drafter.kv_range(sequence)
            for which, (decoder, caches, count) in enumerate(
                (
                    (target, layers[: len(target.kv_specs)], sequence.num_computed),
                    (getattr(model, "model", model), layers[len(target.kv_specs) :], end),
                )
            ):
                assert start == 0
                fresh = prefill(decoder, sequence.tokens[:count])
                slots = [sequence.blocks[at // 4] * 4 + at % 4 for at in range(count)]
                for kept, new in zip(caches, fresh, strict=True):
                    assert torch.equal(kept.k[slots], new.k[:count])
                    assert torch.equal(kept.v[slots], new.v[:count])
                checked[which] += count

    wanted = [
        params(max_tokens=20),
        params(max_tokens=20, temperature=0.5, seed=1),
        params(max_tokens=20, temperature=0.7),
    ]
    requests = [
        (2 * i, str(i), [(7 * at + at * at * (i % 2)) % 97 for at in range(18 + i)], wanted[i % 3]) for i in range(7)
    ]
    sequences, _ = run(engine, requests, cancel=[(9, "2")], after_step=compare)
    assert min(checked) > 500
    assert sum(sequence.num_preemptions for sequence in sequences.values()) > 0
    assert any(sequence.num_cached_prompt for sequence in sequences.values())
    assert engine.drafters.failures == 0
    if own:
        assert exercised(sequences.values())


def prefill(decoder, tokens):
    """The layers of a cache into which the tokens were computed in one pass."""
    count = len(tokens)
    cache = KVCache(
        decoder.kv_specs, num_blocks=1, block_size=max(count, 1), dtype=decoder.cache_dtype, device=decoder.device
    )
    positions = torch.arange(count, dtype=torch.int32)
    plan = PassPlan.in_order(
        positions, positions, torch.zeros_like(positions), torch.zeros(1, 1, dtype=torch.int32), max(count, 1), count
    )
    if count:
        with torch.inference_mode():
            decoder.forward(torch.tensor(tokens), plan, cache.layers, torch.tensor([count - 1]))
    return cache.layers


def test_the_table_makes_it_from_a_models_name(tiny):
    target = load_model(tiny[0], device="cpu", threads=1)
    threads = torch.get_num_threads()
    drafter = METHODS["draft-model"].make(context_of(target, draft_model=str(tiny[1])))
    assert torch.get_num_threads() == threads
    assert len(drafter.kv_layers) == 3
    config = EngineConfig(block_size=4, num_blocks=64)
    engine = Engine(target.decoder, config, drafters=[drafter], policy=ByRequest({}, DraftPlan("draft-model", 3)))
    request = (0, "a", list(range(20, 40)), params(max_tokens=20))
    results = run(engine, [request])[0]["a"]
    assert results.stats.num_drafts > 0
    alone = run(Engine(target.decoder, config), [request])[0]["a"]
    assert results.output_tokens == alone.output_tokens
    assert engine.drafters.failures == 0


@pytest.mark.parametrize(("dtype", "expected"), [("auto", INT8), ("float32", FLOAT32)])
def test_a_draft_model_of_blocks_rounds_its_activations(dtype, expected, smollm2_path):
    """No output depends on a drafter's rounding, so it takes the cheapest; a dtype that was asked for stays."""
    target = load_model(smollm2_path, device="cpu", threads=1)
    kernels = target.decoder.kernels
    context = replace(context_of(target), kernels=kernels, dtype=dtype)
    loaded = load_beside(smollm2_path, context)
    assert loaded.decoder.kernels.activations == (expected if kernels.name.startswith("native") else FLOAT32)
    assert kernels.activations == FLOAT32


def test_versions_differ_by_model(tiny):
    target = load_model(tiny[0], device="cpu", threads=1)
    one, same, other = (
        METHODS["draft-model"].make(context_of(target, draft_model=str(folder))).version
        for folder in (*tiny[:1], *tiny)
    )
    assert one == same != other


def test_it_needs_a_model(tiny):
    target = load_model(tiny[0], device="cpu", threads=1)
    with refused("draft_model"):
        METHODS["draft-model"].make(context_of(target))
    with pytest.raises(ModelNotFound):
        METHODS["draft-model"].make(context_of(target, draft_model="./nowhere"))


def test_a_cache_of_another_precision_is_refused():
    drafter = DraftModelDrafter(FunctionModel(repeating))
    cache = KVCache(drafter.kv_layers, num_blocks=2, block_size=4, dtype=torch.float64, device=torch.device("cpu"))
    with refused("draft_model"):
        drafter.bind(cache.layers, 4)


def context_of(target, draft_model=None):
    return DrafterContext(
        config=target.config,
        device=target.decoder.device,
        speculation=SpeculationConfig(method="draft-model", draft_model=draft_model),
        encode=target.tokenizer.encode,
        token_texts=target.tokenizer.token_text,
    )


def sequence_of(tokens, blocks, name="a", **wishes):
    sequence = Sequence(name, tokens, params(**wishes), max_len=99)
    sequence.blocks = blocks
    return sequence


def bound(drafter, num_blocks):
    model = drafter.model
    cache = KVCache(
        drafter.kv_layers, num_blocks=num_blocks, block_size=4, dtype=model.cache_dtype, device=model.device
    )
    for layer in cache.layers:
        layer.k.fill_(-1)
        layer.v.fill_(-1)
    drafter.bind(cache.layers, 4)
    return drafter


def write(drafter, sequence, positions):
    """Write K/V as another sequence with the same tokens would have left them."""
    for at in positions:
        slot = sequence.blocks[at // 4] * 4 + at % 4
        for layer in drafter._by_passes._caches:
            layer.k[slot], layer.v[slot] = sequence.tokens[at], at
