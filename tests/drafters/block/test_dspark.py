"""DSpark and DFlash: logits, trees and K/V against plain torch, overfit weights, and what a user gets."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from paceline import LLM, SamplingParams
from paceline.config import EngineConfig
from paceline.drafters.block.drafter import head_rows
from paceline.drafters.block.tree import DEEPER, grow, lattice
from paceline.drafters.methods import DFLASH, DSPARK
from paceline.engine.engine import Engine
from paceline.engine.policy import DraftPlan
from paceline.models.backends.torch import TorchKernels
from paceline.models.kernels import kernels_for
from paceline.models.kv_cache import slots_of
from paceline.native.library import load_library
from tests.cuda.test_cuda import CONFIG, PROMPTS
from tests.drafters.block.dspark_reference import (
    after,
    context_of,
    drafter_config,
    ids_of,
    keys_and_values,
    knowing,
    make,
    random_tensors,
    unary_logits,
)
from tests.drafters.overfit import CPU, taps_of, tiny_decoder
from tests.helpers.contract_toys import ByRequest, NowAndThen, answers, params, run

KINDS = {
    "dspark": {},
    "all of our own": {
        "qk_norm": True,
        "tap_norm": True,
        "mask_embedding": True,
        "markov_over_draft_vocab": True,
        "draft_vocab_size": 60,
    },
    "dflash": {"markov_rank": 0, "sample_from_anchor": False, "draft_vocab_size": 80},
}
SIZES = EngineConfig(num_blocks=20, block_size=16, max_num_seqs=4, max_num_batched_tokens=48)


@pytest.fixture(scope="module")
def decoder():
    return tiny_decoder()


class Checked:
    """Compares every draft's logits with the reference, from hidden states of a fresh pass over the tokens."""

    def __init__(self, drafter, tensors, decoder):
        self.drafter, self.tensors, self.decoder = drafter, tensors, decoder
        self.compared, self.worst, self._propose = 0, 0.0, drafter.propose
        watch_logits(drafter, self.look)
        drafter.propose = self.propose

    def look(self, logits):
        self.logits = logits

    def propose(self, rows, after=None):
        draft, config = self._propose(rows, after), self.drafter.config
        for row, logits in zip(rows, self.logits, strict=True):
            tokens = row.sequence.tokens
            if self.drafter.kv_range(row.sequence)[0] or after is not None:
                continue
            room = len(row.sequence.blocks) * SIZES.block_size
            if len(tokens) - 1 + config.block_size <= room:  # else the block is cut off, at the end of an answer
                taps = taps_of(self.decoder, tokens[:-1], config.taps)
                embedding = self.decoder.embedding.float()
                expected = unary_logits(config, self.tensors, embedding, taps, tokens[-1])
                off = (expected[: len(logits)] - logits).abs().max()
                self.worst, self.compared = max(self.worst, float(off)), self.compared + 1
        return draft


def watch_logits(drafter, look):
    """Hand the logits of every draft to `look`: of each row, those of the first positions that draft."""
    config = drafter.config
    if (native := drafter._native) is None:
        finish = drafter._passes._finish

        def watched(logits, anchors, nodes):
            look(logits.view(len(anchors), config.block_size, -1)[:, config.block_size - config.depth :].clone())
            return finish(logits, anchors, nodes)

        drafter._passes._finish = watched
    else:
        draft, tile = native.draft, 8 if "avx512" in drafter._decoder.kernels.name else 4  # rounded.h's RT

        def watched(rows, tables, asked, nodes):
            found = draft(rows, tables, asked, nodes)
            levels = min(config.depth, nodes, tile if len(rows) > 1 else nodes, len(native.logits))
            look(native.logits[: len(rows) * levels].view(len(rows), levels, -1))
            return found

        native.draft = watched


@pytest.mark.parametrize("own", [False, True], ids=["torch", "own kernels"])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_cache_are_those_of_plain_torch(decoder, kind, own):
    """After chunked prompts, prefix hits, plain steps in between, rejected branches and preemption."""
    config = drafter_config(CONFIG, **KINDS[kind])
    tensors, embedding = random_tensors(config), decoder.embedding.float()
    drafter = make(config, tensors, embedding, kernels=decoder.kernels if own else None)

    engine = Engine(decoder, SIZES, drafters=[drafter], policy=NowAndThen(drafter.name, range(1, 10), 0.6))
    checked = Checked(drafter, tensors, decoder)
    wanted = params(max_tokens=40, ignore_eos=True)
    prompts = [PROMPTS[1], PROMPTS[2], [*PROMPTS[1][:50], 7, 8], PROMPTS[0]]
    requests = [(6 * at, str(at), prompt, wanted) for at, prompt in enumerate(prompts)]
    hits, cached = 0, 0

    def after_step(engine):
        nonlocal hits, cached
        for sequence in engine.scheduler.running:
            hits += sequence.num_cached > 0
            start, end = drafter.kv_range(sequence)
            if start or end < 2 or engine.stats.num_steps % 5:
                continue
            taps = taps_of(decoder, sequence.tokens[:end], config.taps)
            context, at = context_of(config, tensors, taps), torch.arange(end)
            slots = torch.from_numpy(slots_of(torch.tensor([sequence.blocks]).numpy(), 0, at.numpy(), SIZES.block_size))
            for layer, cache in enumerate(drafter._passes._caches):
                keys, values = keys_and_values(config, tensors, layer, context, at)
                torch.testing.assert_close(cache.k[slots], keys, rtol=1e-4, atol=1e-4)
                torch.testing.assert_close(cache.v[slots], values, rtol=1e-4, atol=1e-4)
            cached += 1

    sequences, _ = run(engine, requests, after_step=after_step)
    plain = answers(Engine(decoder, replace(SIZES, num_blocks=64)), requests)
    assert {name: sequence.output_tokens for name, sequence in sequences.items()} == plain
    assert checked.compared > 20
    assert checked.worst < 1e-3
    assert cached > 5
    assert hits > 0, "a prefix was shared"
    assert sum(sequence.num_preemptions for sequence in sequences.values()) > 0
    assert engine.drafters.failures == 0


def test_blocks_without_the_drafters_own_cache_are_left_out(decoder):
    """A prompt that another method read: its positions are unknown here, and nothing of them is read."""
    config = drafter_config(CONFIG)
    tensors = random_tensors(config)
    drafter = make(config, tensors, decoder.embedding.float(), kernels=decoder.kernels)
    engine = Engine(
        decoder, replace(SIZES, num_blocks=40), drafters=[drafter], policy=ByRequest({}, DraftPlan(DSPARK, 4))
    )
    for cache in drafter._passes._caches:
        cache.k.fill_(float("nan"))
        cache.v.fill_(float("nan"))
    finite = []
    watch_logits(drafter, lambda logits: finite.append(bool(logits.isfinite().all())))
    wanted = params(max_tokens=12, ignore_eos=True)
    run(engine, [(0, "plain", PROMPTS[1], params(max_tokens=2, speculation="none"))])
    sequence = run(engine, [(0, "later", PROMPTS[1], wanted)])[0]["later"]
    assert sequence.num_cached_prompt > 0
    assert finite
    assert all(finite)
    assert engine.drafters.failures == 0


# -- trees


def every_path(config, tensors, logits, anchor):
    """(score, tokens of the target) of all paths, by the reference."""
    ids, paths = ids_of(config, tensors), [(0.0, ())]
    for position in logits:
        longer = []
        for score, path in [one for one in paths if len(one[1]) == len(paths[-1][1])]:
            shares = after(config, tensors, position, path[-1] if path else anchor).tolist()
            longer += [(score + share, (*path, token)) for token, share in zip(ids.tolist(), shares, strict=True)]
        paths += longer
    return sorted(paths[1:], reverse=True)


@pytest.mark.parametrize("kind", ["markov", "over the draft vocabulary", "none"])
def test_a_tree_is_the_likeliest_paths_and_its_scores_are_theirs(kind):
    """With a beam as wide as the vocabulary, against all paths one by one; batched."""
    changes = {"markov_rank": 0} if kind == "none" else {"markov_over_draft_vocab": kind != "markov"}
    target = replace(CONFIG, vocab_size=9)
    config = drafter_config(target, draft_vocab_size=6, block_size=4, **changes)
    tensors = random_tensors(config, scale=0.6)
    ids = ids_of(config, tensors)
    logits = torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(1))
    drafter = make(config, tensors, torch.randn(9, CONFIG.hidden_size))
    anchors = torch.tensor([0, int(ids[2]), 8])
    anchor_rows, w1, w2 = drafter._markov or (None, None, None)
    found = lattice(logits, None if kind == "none" else anchor_rows[anchors], w1, w2, 64)
    nodes = grow(found, 40, beam=6**3)
    for row, anchor in enumerate(anchors.tolist()):
        expected = every_path(config, tensors, logits[row], anchor)[:40]
        paths = []
        for node in range(40):
            parent = int(nodes.parents[row, node])
            assert parent < node
            paths.append((*(paths[parent] if parent >= 0 else ()), int(ids[nodes.tokens[row, node]])))
        assert [len(path) for path in paths] == nodes.depth[row].tolist()
        assert len(set(paths)) == 40
        scores = (nodes.score[row] + DEEPER * nodes.depth[row]).tolist()
        known = {path: score for score, path in every_path(config, tensors, logits[row], anchor)}
        assert scores == pytest.approx([known[path] for path in paths], abs=1e-3)
        assert sum(path in {path for _, path in expected} for path in paths) >= 38, "but for near ties"


def test_fewer_nodes_are_the_beginning_of_more():
    logits = torch.randn(2, 5, 100, generator=torch.Generator().manual_seed(2))
    w1, w2 = (torch.randn(100, 7, generator=torch.Generator().manual_seed(seed)) / 2 for seed in (3, 4))
    found = lattice(logits, w1[:2], w1, w2, 64)
    all_of_them = grow(found, 60)
    for count in (1, 2, 7, 30):
        for few, many in zip(grow(found, count), all_of_them, strict=True):
            assert torch.equal(few, many[:, :count])


def test_a_beam_of_one_is_the_greedy_chain():
    logits = torch.randn(2, 5, 50, generator=torch.Generator().manual_seed(2))
    w1, w2 = (torch.randn(50, 7, generator=torch.Generator().manual_seed(seed)) / 2 for seed in (3, 4))
    chain = grow(lattice(logits, w1[[4, 9]], w1, w2, 50), 5, beam=1)
    assert chain.parents.tolist() == [[-1, 0, 1, 2, 3]] * 2
    for row, last in enumerate((4, 9)):
        for at in range(5):
            last = int((logits[row, at] + w2 @ w1[last]).argmax())
            assert int(chain.tokens[row, at]) == last


def test_the_head_is_read_off_whatever_layout_its_kernels_have():
    weight = torch.randn(100, CONFIG.hidden_size)
    ids = torch.tensor([3, 99, 0, 41])
    for kernels in (kernels_for(CPU), TorchKernels()):
        found = head_rows(kernels.pack(weight), kernels, ids, CONFIG.hidden_size, torch.float32)
        assert torch.equal(found, weight[ids])


# -- overfit


def overfit(config, decoder, tokens, begin, steps=70):
    """Trained by the reference's own gradients to continue `tokens` from every position behind `begin`."""
    torch.manual_seed(0)
    embedding = decoder.embedding.float().clone()
    taps = taps_of(decoder, tokens, config.taps).clone()
    tensors = {name: part.requires_grad_(part.is_floating_point()) for name, part in random_tensors(config).items()}
    learner = torch.optim.Adam([part for part in tensors.values() if part.requires_grad], lr=0.01)
    index = {token: at for at, token in enumerate(ids_of(config, tensors).tolist())}
    for _ in range(steps):
        loss = torch.zeros(())
        for anchor in range(begin, len(tokens) - config.depth):
            logits = unary_logits(config, tensors, embedding, taps[:anchor], tokens[anchor])
            for ahead in range(config.depth):
                shares = after(config, tensors, logits[ahead], tokens[anchor + ahead])
                loss = loss - shares[index[tokens[anchor + ahead + 1]]]
        learner.zero_grad()
        loss.backward()
        learner.step()
    return {name: part.detach() for name, part in tensors.items()}


@pytest.mark.parametrize("kind", [{}, {"markov_rank": 0}], ids=[DSPARK, DFLASH])
def test_weights_that_know_the_answer_by_heart_are_always_right(decoder, kind):
    prompt, config = list(range(12)), drafter_config(CONFIG, num_layers=1, block_size=3, **kind)
    requests = [(0, "a", prompt, params(max_tokens=16, ignore_eos=True))]
    answer = answers(Engine(decoder, SIZES), requests)["a"]
    tensors = overfit(config, decoder, [*prompt, *answer], len(prompt))
    for beam, k in ((1, 3), (8, 8)):
        drafter = make(config, tensors, decoder.embedding.float(), kernels=decoder.kernels, beam=beam)
        engine = Engine(decoder, SIZES, drafters=[drafter], policy=ByRequest({}, DraftPlan(drafter.name, k)))
        (sequence,) = run(engine, requests)[0].values()
        assert sequence.output_tokens == answer
        assert sequence.stats.num_target_passes <= 1 + -(-15 // 4) + 1, "of the last tokens nothing was known"
        assert engine.drafters.failures == 0


# -- as a user has it


WISHES = (
    {},
    {"temperature": 0.8, "seed": 3, "n": 2},
    {"repetition_penalty": 1.2, "frequency_penalty": 0.3},
    {"temperature": 1.0, "seed": 4, "min_p": 0.1, "top_k": 30, "logit_bias": {28: 3.0, 260: -100}},
    {"bad_words": ["the", "one two"], "min_tokens": 8},
    {"temperature": 0.7, "seed": 5, "top_p": 0.9, "logprobs": 2},
    {"max_tokens": 1},
)


@pytest.mark.parametrize("activations", ["float32", "int8"])
def test_the_packaged_drafter_changes_no_answer(smollm2_path, activations):
    """A CPU drafts like this by default, in native code with int8 weights; here in every step, for all requests."""
    texts = ["one two three four. one two three four. one two", "The capital of France is", "Once upon a time", "def f"]
    prompts = [texts[at % len(texts)] for at in range(len(WISHES))]
    with LLM(str(smollm2_path), device="cpu", activations=activations, max_model_len=256) as llm:

        def ask(prompts, wishes, speculation):
            base = {"max_tokens": 16, "temperature": 0.0, "speculation": speculation}
            return llm.generate(prompts, [SamplingParams(**{**base, **wish}) for wish in wishes])

        drafted = ask(prompts, WISHES, {"method": DSPARK, "k": 24})
        for prompt, wish, output in zip(prompts, WISHES, drafted, strict=True):
            (alone,) = ask([prompt], [wish], "none")
            for one, other in zip(output.outputs, alone.outputs, strict=True):
                assert (one.token_ids, one.logprobs) == (other.token_ids, other.logprobs), wish
        (drafter,) = (one for one in llm.engine.drafters.drafters if one.name == DSPARK)
        assert drafter._native is not None or load_library() is None
        assert llm.engine.drafters.failures == 0
        assert sum(one.speculation.num_accepted_tokens for output in drafted for one in output.outputs) > 10


@pytest.mark.parametrize("nodes", [1, 15])
def test_a_drafter_that_is_hardly_ever_right_is_reported_once(nodes, decoder, caplog):
    """A drafter of random weights: now and then one of 96 tokens is right, and of a wide tree's more often."""
    config = drafter_config(CONFIG)
    requests = [(0, str(at), prompt, params(max_tokens=40, ignore_eos=True)) for at, prompt in enumerate(PROMPTS)]
    texts = list(answers(Engine(decoder, replace(SIZES, num_blocks=64)), requests).values())
    for good in (False, True):
        caplog.clear()
        known = knowing(CONFIG, decoder.embedding.float(), texts) if good else (config, random_tensors(config))
        drafter = make(*known, decoder.embedding.float(), kernels=decoder.kernels)
        policy = ByRequest({}, DraftPlan(drafter.name, nodes))
        run(Engine(decoder, replace(SIZES, num_blocks=64), drafters=[drafter], policy=policy), requests)
        assert [record.message.count("is it for this model?") for record in caplog.records] == [1] * (not good)
