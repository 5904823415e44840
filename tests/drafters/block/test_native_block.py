"""Drafts of one native call are those of torch's passes, for drafters of any shape and sequences in any state."""

from __future__ import annotations

import math
import random

import pytest

from paceline.config import EngineConfig
from paceline.engine.engine import Engine
from paceline.engine.policy import DraftPlan, FixedPolicy
from paceline.models.backends.cpu.kernels import NativeKernels
from paceline.models.kv_cache import LayerCache
from paceline.native.library import open_library, runnable_variants
from tests.cuda.test_cuda import CONFIG
from tests.drafters.block.dspark_reference import drafter_config, make, random_tensors
from tests.drafters.overfit import tiny_decoder
from tests.helpers.contract_toys import answers, params, run

CLOSE = 5e-3  # of log probabilities


class Twin:
    """Has every draft made again by torch, from K/V of its own, and compares."""

    def __init__(self, drafter, twin, caches):
        self.drafter, self.twin = drafter, twin
        twin.bind([LayerCache(cache.k.clone(), cache.v.clone()) for cache in caches], drafter.block_size)
        twin._ring, twin._columns, twin._states = drafter._ring, drafter._columns, drafter._states
        self.compared, self.nodes, self.batches, self.lagging = 0, 0, set(), 0
        self._propose, self._write_context_kv = drafter.propose, drafter.write_context_kv
        drafter.propose, drafter.write_context_kv = self.propose, self.write_context_kv
        for each in (drafter, twin):
            each._on_host = self.keep(each._on_host)

    def write_context_kv(self, batch):
        self._write_context_kv(batch)
        self.twin.write_context_kv(batch)

    def keep(self, shaped):
        def kept(rows, found, scores):
            self.grown = found.copy(), scores.copy()
            return shaped(rows, found, scores)

        return kept

    def propose(self, rows, after=None):
        states = [self.drafter._states[row.sequence.key] for row in rows]
        before = [(state.start, state.end) for state in states]
        self.lagging += max(self.drafter.unread_tokens(row.sequence) for row in rows) > 1
        draft, native = self._propose(rows, after), self.grown
        for state, (start, end) in zip(states, before, strict=True):
            state.start, state.end = start, end
        self.twin.propose(rows, after)
        for at, row in enumerate(rows):
            self.compare(
                *(paths(tree[:, at], scores[at]) for tree, scores in (native, self.grown)), row.min_node_probability
            )
        self.compared, self.batches = self.compared + len(rows), self.batches | {len(rows)}
        return draft

    def compare(self, found, wanted, least):
        """But for nodes that are as likely as the last of the other's."""
        for one, other in ((found, wanted), (wanted, found)):
            last = max(min(other.values()), math.log(least) if least else -math.inf) + CLOSE
            for path, score in one.items():
                assert score == pytest.approx(other[path], abs=CLOSE) if path in other else score <= last, path
        self.nodes += len(found)


def paths(tree, scores):
    """{tokens from the root: log probability} of a tree's nodes."""
    found = []
    for at, (token, parent, depth) in enumerate(tree.T.tolist()):
        if scores[at] == -math.inf:  # there are no more
            break
        assert parent < at
        found.append((*(found[parent] if parent >= 0 else ()), token))
        assert len(found[-1]) == depth
    assert len(set(found)) == len(found)
    return dict(zip(found, scores.tolist(), strict=False))


def drawn_config(chance):
    heads = chance.choice([1, 2, 3])
    vocab = chance.choice([5, 40, CONFIG.vocab_size])
    return drafter_config(
        CONFIG,
        num_layers=chance.randint(1, 3),
        num_heads=heads * chance.choice([1, 2, 4]),
        num_kv_heads=heads,
        head_dim=chance.choice([8, 16, 24]),
        block_size=chance.choice([2, 3, 5, 9, 17]),
        taps=tuple(chance.sample(range(CONFIG.num_layers + 1), chance.randint(1, 3))),
        draft_vocab_size=vocab,
        markov_rank=(rank := chance.choice([0, 3, 16, 21])),
        markov_over_draft_vocab=bool(rank) and chance.random() < 0.5,
        sample_from_anchor=chance.random() < 0.7,
        mask_embedding=chance.random() < 0.5,
        tap_norm=chance.random() < 0.5,
        qk_norm=chance.random() < 0.5,
    )


@pytest.mark.parametrize(("seed", "num_blocks"), [(seed, 11 if seed % 2 else 80) for seed in range(10)])
def test_drafts_of_any_shape_are_those_of_torch(seed, num_blocks):
    """Up to five sequences of different lengths, with prefix hits, plain steps in between, more unread tokens than the
    ring holds, trees that are cut and, with few blocks, preemption."""
    chance, decoder, variants = random.Random(seed), tiny_decoder(), runnable_variants()
    variant = variants[seed % len(variants)]
    config = drawn_config(chance)
    tensors, embedding = random_tensors(config, seed, scale=0.5), decoder.embedding.float()
    beam = chance.choice([1, 2, 8])
    drafter, twin = (
        make(config, tensors, embedding, kernels=kernels, beam=beam)
        for kernels in (NativeKernels(open_library(variant), chance.choice([1, 3])), None)
    )

    class NowAndThen(FixedPolicy):
        least = chance.choice([0.0, 0.0, 0.02])

        def choose(self, sequence):
            plain = len(sequence.tokens) < sequence.num_prompt + 70 and sequence.request_id == "0"
            return (
                DraftPlan()
                if plain or chance.random() < 0.3
                else DraftPlan(drafter.name, chance.choice([1, 4, 12, 50]))
            )

    sizes = EngineConfig(num_blocks=num_blocks, block_size=16, max_num_seqs=5, max_num_batched_tokens=80)
    engine = Engine(decoder, sizes, drafters=[drafter], policy=NowAndThen())
    twins = Twin(drafter, twin, engine.runner.cache.layers[len(decoder.kv_specs) :])
    shared = [(7 * at * at + 3) % 96 for at in range(40)]
    prompts = [[*shared[: chance.randint(1, 40)], *range(at)] for at in range(7)]
    lengths = [100 if at == 0 else chance.randint(10, 60) for at in range(7)]
    requests = [
        (2 * at, str(at), prompt, params(max_tokens=length, ignore_eos=True))
        for at, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
    ]
    sequences, _ = run(engine, requests)
    assert engine.drafters.failures == 0
    plain = answers(Engine(decoder, EngineConfig(num_blocks=200, block_size=16)), requests)
    assert {name: sequence.output_tokens for name, sequence in sequences.items()} == plain
    assert twins.compared > 50
    assert twins.lagging > 0
    preempted = sum(sequence.num_preemptions for sequence in sequences.values())
    assert preempted > 0 if num_blocks == 11 else max(twins.batches) >= 4
