# ruff: noqa: E402
"""Greedy chains, in one launch and by passes, through Triton's interpreter: with one program, so none waits for
another. Tokens and K/V against passes by the reference. That programs find each other is checked on a GPU, by
benchmarks/gpu_chain.py."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.helpers.interpreter import require_interpreter

require_interpreter()

from paceline.config import ModelConfig
from paceline.core.verdict import INVALID, UnreadVerdict
from paceline.models.backends.cuda.attention import division
from paceline.models.backends.cuda.greedy_chain import CUT as DEFAULT_CUT
from paceline.models.backends.cuda.greedy_chain import (
    HEADER,
    LOOK_EVERY,
    MOST_HELD,
    MOST_TAG,
    ChainFailed,
    Cut,
    Share,
    TritonChain,
)
from paceline.models.backends.cuda.kernels import TritonKernels
from paceline.models.backends.torch import TorchKernels
from paceline.models.chain import READ, ChainRow
from paceline.models.decoder import Decoder
from paceline.models.kernels import Weights
from paceline.models.kv_cache import KVCache
from paceline.models.pass_chain import PassChain
from paceline.models.plan import PassPlan
from paceline.models.weights import Dtypes
from tests.helpers.random_llama import llama, random_weights

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
CPU = torch.device("cpu")
BLOCK = 16
CONFIG = llama(vocab_size=90, hidden_size=48, intermediate_size=80, num_heads=3, num_kv_heads=1, head_dim=32,
               max_positions=96)  # fmt: skip
SHALLOW = replace(CONFIG, num_layers=1)  # passes have tests of their own
CUT = Cut(rows=3, keys=16, splits=4)


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter runs one program after the other: a grid for a small chip."""
    monkeypatch.setattr(division, "PROGRAMS", 16)


def weights_of(config: ModelConfig) -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    return random_weights(config, 1.5)


class Scene:
    """A reference decoder with a cache, and the chain with another that starts as a copy of it."""

    def __init__(self, config: ModelConfig = CONFIG, *, by_passes: bool = False) -> None:
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
        at_once, passes = self.decoder.greedy_chains(self.caches[1].layers, BLOCK)
        assert isinstance(at_once, TritonChain)
        assert isinstance(passes, PassChain)
        parts = Weights(self.decoder.embedding, self.decoder.layers, self.decoder.final_norm, self.decoder.head)
        at_once = TritonChain(
            parts, self.decoder.shape(config.max_positions), self.caches[1].layers, BLOCK, config, 1, CUT
        )
        self.chain = passes if by_passes else at_once

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
        """Each token is the most probable one, or as good as that: columns of the residual stream travel as bf16."""
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
        self.chain.check()
        assert drafted.shape == (len(rows), max(row.count for row in rows))
        for row, tokens in zip(rows, drafted.tolist(), strict=True):
            self.verify_rows(row, tokens)
        for mine, theirs in zip(self.caches[1].layers, self.caches[0].layers, strict=True):
            torch.testing.assert_close(mine.k, theirs.k, rtol=0.0, atol=0.05)
            torch.testing.assert_close(mine.v, theirs.v, rtol=0.0, atol=0.05)


@pytest.mark.parametrize(("length", "unread_tokens"), [(2, 1), (2, 2), (16, 2), (17, 1), (65, 1)])
def test_its_tokens_and_kv_equal_those_of_passes(length: int, unread_tokens: int) -> None:
    scene = Scene()
    scene.check([scene.row(length, unread_tokens, 3)])


@pytest.mark.parametrize("by_passes", [False, True])
def test_rows_of_different_lengths_lags_and_counts_share_a_launch(by_passes: bool) -> None:
    scene = Scene(SHALLOW if by_passes else CONFIG, by_passes=by_passes)
    rows = [scene.row(33, 2, 3), scene.row(2, 1, 3), scene.row(20, 1, 3 if by_passes else 1)]  # passes go on to the end
    scene.check(rows)
    scene.check(rows)  # again, over what it wrote


@pytest.mark.parametrize("by_passes", [False, True])
def test_it_goes_on_behind_what_only_the_device_knows(by_passes: bool) -> None:
    scene = Scene(SHALLOW, by_passes=by_passes)
    rows = [scene.row(length, 2, 3) for length in (20, 18, 33)]
    after, accepted, known = torch.full((4, 4), 77), torch.full((4,), 9), []
    for row, (which, more) in zip(rows, ((2, 1), (0, 4), (3, 2)), strict=True):
        tokens = [5, 6, 7, *row.tokens] if more > READ else [11, *row.tokens]
        after[which, :more], accepted[which] = torch.tensor(tokens[-more:]), more - 1
        before = tokens[: len(tokens) - more][-READ:]
        start = row.start + READ - more - len(before)
        known.append(replace(row, tokens=[0] * (READ - len(before)) + before, start=start - READ + len(before)))
    scene.check(rows, known, UnreadVerdict(tokens=after, num_accepted=accepted, path=after[:, 1:], rows=[2, 0, 3]))


def test_what_is_no_token_is_taken_for_the_first_one() -> None:
    """Behind logits that are no numbers: its embedding would lie before all others, where nothing may be read."""
    scene = Scene()
    rows, drafted = [scene.row(12, 1, 3)], []
    for last in (INVALID, 0):
        tokens = torch.tensor([[5, last]])
        after = UnreadVerdict(tokens=tokens, num_accepted=torch.tensor([1]), path=tokens[:, :1], rows=[0])
        drafted.append(scene.chain.draft(rows, after))
        given = scene.chain._buffers.state[scene.chain._buffers._out + HEADER + 3 * CUT.rows :][:READ]
        assert given.tolist() == [5, 0]
    assert torch.equal(*drafted)


def test_tokens_may_be_picked_between_passes() -> None:
    """What is picked is read by the next pass, stands in the cache, and is what was drafted."""
    scene, asked = Scene(SHALLOW, by_passes=True), []
    rows = [scene.row(20, 2, 2), scene.row(17, 1, 2)]

    def pick(logits: torch.Tensor, depth: int) -> torch.Tensor:
        asked.append(logits.clone())
        return torch.tensor([5 + depth, 40 + depth])

    assert scene.chain.draft_by(pick, rows).tolist() == [[5, 6], [40, 41]]
    for at, row in enumerate(rows):
        tokens, start = list(row.tokens)[READ - row.unread_tokens :], row.start + READ - row.unread_tokens
        for depth, logits in enumerate(asked):
            torch.testing.assert_close(logits[at], scene._pass(tokens, start, row.blocks), rtol=0.0, atol=1e-3)
            tokens, start = [(5, 40)[at] + depth], start + len(tokens)
    for mine, theirs in zip(scene.caches[1].layers, scene.caches[0].layers, strict=True):
        torch.testing.assert_close(mine.k, theirs.k, rtol=0.0, atol=1e-3)


def test_a_row_without_blocks_for_all_that_is_drafted_writes_nowhere_else() -> None:
    scene = Scene(SHALLOW, by_passes=True)
    short, long = scene.row(15, 1, 1), scene.row(17, 1, 4)
    short = replace(short, blocks=short.blocks[:1])
    before = [layer.k.clone() for layer in scene.caches[1].layers]
    scene.chain.draft([short, long])
    mine = torch.tensor([*short.blocks, *long.blocks])
    others = torch.tensor([block for block in range(24) if block not in mine.tolist()])
    for layer, was in zip(scene.caches[1].layers, before, strict=True):
        slots = (others[:, None] * BLOCK + torch.arange(BLOCK)).flatten()
        assert torch.equal(layer.k[slots], was[slots])


@pytest.mark.parametrize(
    "changes",
    [
        {"tie_embeddings": False},
        {"num_heads": 4, "num_kv_heads": 4},
        {"hidden_size": 528, "num_layers": 1},
        {"intermediate_size": 544, "num_layers": 1},
    ],
)
def test_other_shapes(changes: dict[str, int]) -> None:
    scene = Scene(replace(CONFIG, **changes))
    scene.check([scene.row(18, 1, 2)])


def test_ties_go_to_the_lowest_token() -> None:
    scene = Scene(replace(CONFIG, tie_embeddings=False))
    row = scene.row(5, 1, 1)
    ((best,),) = scene.chain.draft([row]).tolist()
    head = scene.decoder.head.weight.data
    for twin in (best + 1, best + 40, 89):
        head[twin % 90] = head[best]
    assert scene.chain.draft([row]).tolist() == [[min(best, (best + 1) % 90, (best + 40) % 90, 89)]]


def test_tags_start_over_before_they_run_out() -> None:
    scene = Scene()
    row = scene.row(9, 1, 2)
    scene.chain._tag = MOST_TAG - 4
    scene.check([row])
    assert scene.chain._tag < 100


def test_a_launch_that_gave_up_raises() -> None:
    scene = Scene()
    row = scene.row(9, 1, 2)
    scene.chain.draft([row])
    scene.chain.check()
    buffers = scene.chain._buffers
    buffers.state[0] = 1
    buffers.fill([row], 1, 1, None)  # a program that has given up does not begin anew
    for _ in range(LOOK_EVERY):
        buffers.drafted([row])
    with pytest.raises(ChainFailed):
        scene.chain.check()


@pytest.mark.parametrize(
    "changes",
    [{"qk_norm": True}, {"windows": (16, 16)}, {"head_dim": 48}, {"num_heads": 16}, {"hidden_size": 40}],
)
def test_what_it_does_not_serve_goes_the_other_way(changes: dict[str, object]) -> None:
    config = replace(CONFIG, **changes)
    weights = weights_of(config)
    weights |= {
        f"model.layers.{layer}.self_attn.{name}_norm.weight": torch.ones(config.head_dim)
        for layer in range(2)
        for name in "qk"
    }
    decoder = Decoder(config, weights, TritonKernels(CPU), device=CPU, dtypes=Dtypes.of(torch.float32, CPU))
    cache = KVCache(decoder.kv_specs, num_blocks=2, block_size=BLOCK, dtype=torch.float32, device=CPU)
    assert [type(chain) for chain in decoder.greedy_chains(cache.layers, BLOCK)] == [PassChain]


def test_a_layer_must_fit_into_the_registers_of_the_chip() -> None:
    small = replace(CONFIG, hidden_size=576, intermediate_size=1536, num_heads=9, num_kv_heads=3, head_dim=64)
    assert Share.of(small, 132, DEFAULT_CUT).held <= MOST_HELD
    assert Share.of(small, 60, DEFAULT_CUT).held > MOST_HELD
    larger = replace(small, hidden_size=960, intermediate_size=2560, num_heads=15, num_kv_heads=5)
    assert Share.of(larger, 132, DEFAULT_CUT).held > MOST_HELD


def test_caches_of_another_dtype_are_refused() -> None:
    scene = Scene()
    half = KVCache(scene.decoder.kv_specs, num_blocks=2, block_size=BLOCK, dtype=torch.float16, device=CPU)
    assert [type(chain) for chain in scene.decoder.greedy_chains(half.layers, BLOCK)] == [PassChain]


def test_kernels_without_a_chain_say_so() -> None:
    decoder = Decoder(CONFIG, weights_of(CONFIG), TorchKernels(), device=CPU, dtypes=Dtypes.of(torch.float32, CPU))
    cache = KVCache(decoder.kv_specs, num_blocks=1, block_size=BLOCK, dtype=torch.float32, device=CPU)
    assert decoder.greedy_chains(cache.layers, BLOCK) == []
