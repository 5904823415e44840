# ruff: noqa: E402
"""Chains of passes through Triton's interpreter: tokens and K/V against single passes by the reference kernels."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.helpers.interpreter import require_interpreter

require_interpreter()

from paceline.core.verdict import UnreadVerdict
from paceline.models.backends.cuda.attention import division
from paceline.models.backends.cuda.kernels import TritonKernels
from paceline.models.backends.torch import TorchKernels
from paceline.models.decoder import Decoder
from paceline.models.kv_cache import KVCache
from paceline.models.pass_chain import READ, ChainRow, PassChain
from paceline.models.plan import PassPlan
from paceline.models.spec import ModelConfig
from paceline.models.weights import Dtypes
from tests.helpers.random_llama import llama, random_weights

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
CPU = torch.device("cpu")
BLOCK = 16
CONFIG = llama(vocab_size=90, hidden_size=48, intermediate_size=80, num_heads=3, num_kv_heads=1, head_dim=32,
               max_positions=96, num_layers=1)  # fmt: skip


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter runs one program after the other: a grid for a small chip."""
    monkeypatch.setattr(division, "PROGRAMS", 16)


def weights_of(config: ModelConfig) -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    return random_weights(config, 1.5)


class Scene:
    """A reference decoder with a cache, and the chain with another that starts as a copy of it."""

    def __init__(self, config: ModelConfig = CONFIG) -> None:
        weights = weights_of(config)
        self.reference = Decoder(config, weights, TorchKernels(), device=CPU, dtypes=Dtypes.of(torch.float32, CPU))
        self.decoder = Decoder(config, weights, TritonKernels(CPU), device=CPU, dtypes=Dtypes.of(torch.float32, CPU))
        self.caches = [
            KVCache(self.decoder.kv_specs, num_blocks=24, block_size=BLOCK, dtype=torch.float32, device=CPU)
            for _ in "ab"
        ]
        for cache in self.caches:
            for layer in cache.layers:
                layer.k.fill_(7.0)  # a slot that was not written must not be read
                layer.v.fill_(7.0)
        self.free = torch.randperm(24).tolist()
        chain = self.decoder.pass_chain(self.caches[1].layers, BLOCK)
        assert isinstance(chain, PassChain)
        self.chain = chain

    def row(self, length: int, unread_tokens: int, count: int) -> ChainRow:
        blocks = [self.free.pop() for _ in range(-(-(length + count) // BLOCK))]
        tokens = torch.randint(0, self.reference.config.vocab_size, (length,)).tolist()
        if length > unread_tokens:
            self._pass(tokens[:-unread_tokens], 0, blocks)
        for mine, theirs in zip(self.caches[1].layers, self.caches[0].layers, strict=True):
            mine.k.copy_(theirs.k)
            mine.v.copy_(theirs.v)
        return ChainRow(tokens[-READ:], length - READ, unread_tokens, count, blocks)

    def verify_rows(self, row: ChainRow, after: list[int]) -> None:
        """Check that each token is the most probable one, or as good as that."""
        tokens, start = list(row.tokens)[READ - row.unread_tokens :], row.start + READ - row.unread_tokens
        for token in after[: row.count]:
            logits = self._pass(tokens, start, list(row.blocks))
            assert float(logits[token]) > float(logits.max()) - 0.05, "where logits have a deviation of 1.4"
            tokens, start = [token], start + len(tokens)

    def _pass(self, tokens: list[int], start: int, blocks: list[int]) -> torch.Tensor:
        positions = torch.arange(start, start + len(tokens), dtype=torch.int32)
        tables = torch.tensor([blocks], dtype=torch.int32)
        plan = PassPlan.in_order(
            positions,
            tables[0][positions // BLOCK] * BLOCK + positions % BLOCK,
            torch.zeros_like(positions),
            tables,
            BLOCK,
            start + len(tokens),
        )
        rows = torch.tensor([len(tokens) - 1])
        return self.reference.forward(torch.tensor(tokens), plan, self.caches[0].layers, rows).logits[0]

    def check(
        self, rows: list[ChainRow], known: list[ChainRow] | None = None, after: UnreadVerdict | None = None
    ) -> None:
        drafted = self.chain.draft(known or rows, after)
        assert drafted.shape == (len(rows), max(row.count for row in rows))
        for row, tokens in zip(rows, drafted.tolist(), strict=True):
            self.verify_rows(row, tokens)
        for mine, theirs in zip(self.caches[1].layers, self.caches[0].layers, strict=True):
            torch.testing.assert_close(mine.k, theirs.k, rtol=0.0, atol=0.05)
            torch.testing.assert_close(mine.v, theirs.v, rtol=0.0, atol=0.05)


def test_rows_of_different_lengths_lags_and_counts_share_a_pass() -> None:
    scene = Scene()
    rows = [scene.row(33, 2, 3), scene.row(2, 1, 3), scene.row(20, 1, 3)]
    scene.check(rows)
    scene.check(rows)  # again, over what it wrote


def test_it_goes_on_behind_what_only_the_device_knows() -> None:
    scene = Scene()
    rows = [scene.row(length, 2, 3) for length in (20, 18, 33)]
    after, accepted, known = torch.full((4, 4), 77), torch.full((4,), 9), []
    for row, (which, more) in zip(rows, ((2, 1), (0, 4), (3, 2)), strict=True):
        tokens = [5, 6, 7, *row.tokens] if more > READ else [11, *row.tokens]
        after[which, :more], accepted[which] = torch.tensor(tokens[-more:]), more - 1
        before = tokens[: len(tokens) - more][-READ:]
        start = row.start + READ - more - len(before)
        known.append(replace(row, tokens=[0] * (READ - len(before)) + before, start=start - READ + len(before)))
    unused = dict.fromkeys(("length", "node_row", "req_index"), accepted)
    verdict = UnreadVerdict(tokens=after, num_accepted=accepted, path=after[:, 1:], rows=[2, 0, 3], **unused)
    scene.check(rows, known, verdict)


def test_tokens_may_be_sampled_between_passes() -> None:
    """A sampled token is read by the next pass, stands in the cache, and is drafted."""
    scene, asked = Scene(), []
    rows = [scene.row(20, 2, 2), scene.row(17, 1, 2)]

    def sample(logits: torch.Tensor, depth: int) -> torch.Tensor:
        asked.append(logits.clone())
        return torch.tensor([5 + depth, 40 + depth])

    assert scene.chain.draft(rows, sample=sample).tolist() == [[5, 6], [40, 41]]
    for at, row in enumerate(rows):
        tokens, start = list(row.tokens)[READ - row.unread_tokens :], row.start + READ - row.unread_tokens
        for depth, logits in enumerate(asked):
            torch.testing.assert_close(logits[at], scene._pass(tokens, start, row.blocks), rtol=0.0, atol=1e-3)
            tokens, start = [(5, 40)[at] + depth], start + len(tokens)
    for mine, theirs in zip(scene.caches[1].layers, scene.caches[0].layers, strict=True):
        torch.testing.assert_close(mine.k, theirs.k, rtol=0.0, atol=1e-3)


def test_a_row_without_blocks_for_all_that_is_drafted_writes_nowhere_else() -> None:
    scene = Scene()
    short, long = scene.row(15, 1, 1), scene.row(17, 1, 4)
    short = replace(short, blocks=short.blocks[:1])
    before = [layer.k.clone() for layer in scene.caches[1].layers]
    scene.chain.draft([short, long])
    own = torch.tensor([*short.blocks, *long.blocks])
    others = torch.tensor([block for block in range(24) if block not in own.tolist()])
    for layer, was in zip(scene.caches[1].layers, before, strict=True):
        slots = (others[:, None] * BLOCK + torch.arange(BLOCK)).flatten()
        assert torch.equal(layer.k[slots], was[slots])


def test_chains_are_warmed_up_and_kernels_without_graphs_have_none() -> None:
    assert Scene().chain.warmup()
    decoder = Decoder(CONFIG, weights_of(CONFIG), TorchKernels(), device=CPU, dtypes=Dtypes.of(torch.float32, CPU))
    cache = KVCache(decoder.kv_specs, num_blocks=1, block_size=BLOCK, dtype=torch.float32, device=CPU)
    assert decoder.pass_chain(cache.layers, BLOCK) is None
