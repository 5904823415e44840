"""The native kernels against the torch reference in float64, and the law they exist for: a row's bits depend on that
row alone, not on the rows, threads or cache slots beside it."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.errors import DeviceError
from paceline.models.backends.cpu.kernels import NativeKernels
from paceline.models.backends.torch import TorchKernels
from paceline.models.kernels import Kernels, Layer, LayerByLayer, RopeArgs, StackParams, kernels_for
from paceline.models.kv_cache import LayerCache
from paceline.models.plan import PassPlan
from paceline.models.spec import HEAD, LayerSpec
from paceline.native import library as native_library
from paceline.native.library import VARIANTS, library_status, open_library, runnable_variants
from tests.helpers.errors import refused

BLOCK = 16
REFERENCE = TorchKernels()

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the native kernels are not built on Windows")


@pytest.fixture(params=VARIANTS)
def native(request: pytest.FixtureRequest) -> NativeKernels:
    if request.param not in runnable_variants():
        pytest.skip(f"this processor does not run {request.param}")
    return NativeKernels(open_library(request.param))  # a library that is missing fails the test: CI has a compiler


@pytest.fixture(autouse=True)
def threads() -> Iterator[Callable[[int], None]]:
    """One thread unless a test asks for more: the tests are small, and a busy machine makes waiting for a team slow."""
    before = torch.get_num_threads()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    yield torch.set_num_threads
    torch.set_num_threads(before)


def assert_close(got: Tensor, expected: Tensor, tolerance: float = 2e-5) -> None:
    torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=tolerance)


def ints(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


# ---- a cache with sequences in it, and rows that look at them --------------------------------------------------------


@dataclass
class Scene:
    """Sequences of known K/V in shuffled blocks, the tokens of drafted branches in slots of their own."""

    cache: LayerCache
    tables: Tensor
    tokens: list[tuple[Tensor, Tensor]]  # per sequence: K, V (len, Hkv, D)
    free: list[int]  # blocks that no sequence uses

    def plan(self, rows: list[tuple[int, int]]) -> PassPlan:
        """Rows (sequence, position), each reading everything through the block table."""
        sequence, position = (list(column) for column in zip(*rows, strict=True))
        return PassPlan.in_order(
            ints(position), ints([-1] * len(rows)), ints(sequence), self.tables, BLOCK, max(position) + 1
        )

    def branch(self, rows: list[tuple[int, int]], lengths: list[int]) -> PassPlan:
        """The same rows, but the last `lengths[i]` tokens of row i are drafted: in scattered slots of their own."""
        plan = self.plan(rows)
        spare = [block * BLOCK + i for block in self.free for i in range(BLOCK)]
        path = torch.full((len(rows), max(lengths)), -1, dtype=torch.int32)
        for i, ((sequence, position), length) in enumerate(zip(rows, lengths, strict=True)):
            for j in range(length):
                slot = spare.pop((7 * i + 3 * j) % len(spare))
                token = position + 1 - length + j
                self.cache.k[slot], self.cache.v[slot] = (t[token] for t in self.tokens[sequence])
                path[i, j] = slot
        prefix = plan.positions + 1 - ints(lengths)
        return replace(plan, prefix=prefix, path=path)

    def block(self, rows: list[tuple[int, int]], ends: list[int], by_slot: int = 0) -> PassPlan:
        """Rows that see keys up to an end behind their position; the last `by_slot` of them by explicit slots."""
        reach = ints(ends)
        keys = (reach[:, None] - by_slot + torch.arange(by_slot)).clamp(min=0)
        sequence = torch.tensor([sequence for sequence, _ in rows])[:, None]
        path = (self.tables[sequence, keys // BLOCK] * BLOCK + keys % BLOCK).int()
        return replace(self.plan(rows), prefix=reach - by_slot, reach=reach, path=path, max_len=max(ends))


def scene(lengths: list[int], kv_heads: int = 2, dim: int = 16, spare: int = 4) -> Scene:
    per_sequence = [-(-length // BLOCK) for length in lengths]
    blocks = torch.randperm(sum(per_sequence) + spare).tolist()
    # Slots that were never written may hold anything: NaN shows up wherever one is read.
    k, v = (torch.full(((len(blocks)) * BLOCK, kv_heads, dim), float("nan")) for _ in range(2))
    tables = torch.full((len(lengths), max(per_sequence)), -1, dtype=torch.int32)
    tokens = []
    for row, (length, count) in enumerate(zip(lengths, per_sequence, strict=True)):
        own = [blocks.pop() for _ in range(count)]
        tables[row, :count] = ints(own)
        slots = torch.tensor([own[p // BLOCK] * BLOCK + p % BLOCK for p in range(length)])
        tokens.append((torch.randn(length, kv_heads, dim), torch.randn(length, kv_heads, dim)))
        k[slots], v[slots] = tokens[-1]
    return Scene(LayerCache(k, v), tables, tokens, blocks)


def rows_of(plan: PassPlan, rows: list[int]) -> PassPlan:
    parts = {name: getattr(plan, name)[rows] for name in ("positions", "slots", "sequence", "prefix", "reach", "path")}
    return replace(plan, **parts)


def wide(cache: LayerCache) -> LayerCache:
    return LayerCache(cache.k.double(), cache.v.double())


def wide_rope(rope: RopeArgs) -> RopeArgs:
    return RopeArgs(*(None if part is None else part.double() for part in rope[:4]), rope.eps)


def reference_attention(q: Tensor, plan: PassPlan, cache: LayerCache, scale: float, window: int | None) -> Tensor:
    return REFERENCE.attention(q.double(), plan, wide(cache), scale, window)


# ---- linear ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (31, 7), (32, 64), (100, 33), (65, 2500)])
@pytest.mark.parametrize("biased", [False, True])
def test_linear_matches_the_reference(native: NativeKernels, n: int, k: int, dtype: torch.dtype, biased: bool) -> None:
    weight, bias = (torch.randn(n, k) / k**0.5).to(dtype), torch.randn(n).to(dtype) if biased else None
    packed = native.pack(weight, bias)
    expected = REFERENCE.pack(weight.double(), None if bias is None else bias.double())
    for rows in (0, 1, 5, 13, 130):
        x = torch.randn(rows, k)
        assert_close(native.linear(x, packed), REFERENCE.linear(x.double(), expected))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("n", "k"), [(83, 129), (40, 4500)])
def test_a_row_of_linear_has_the_same_bits_among_any_rows(native, threads, n, k, dtype) -> None:
    packed = native.pack(torch.randn(n, k).to(dtype), torch.randn(n))
    x = torch.randn(300, k)
    alone = torch.cat([native.linear(row[None], packed) for row in x])
    for count in (1, 2):
        threads(count)
        for rows in [*range(1, 41), 64, 121, 300] if count == 1 else [1, 2, 8, 13, 121, 300]:
            assert torch.equal(native.linear(x[-rows:], packed), alone[-rows:])
    order = torch.randperm(len(x))
    assert torch.equal(native.linear(x[order], packed), alone[order])


def test_bf16_storage_gives_the_bits_of_its_widened_weights(native: NativeKernels) -> None:
    weight, x = torch.randn(70, 96).bfloat16(), torch.randn(9, 96)
    stored, widened = native.pack(weight), native.pack(weight.float())
    assert torch.equal(native.linear(x, stored), native.linear(x, widened))
    assert 2 * stored.nbytes == widened.nbytes


def test_a_neighbour_that_overflows_stays_alone(native: NativeKernels) -> None:
    packed = native.pack(torch.randn(40, 50))
    x = torch.randn(8, 50)
    alone = native.linear(x[:1], packed)
    x[1:] = float("nan")
    assert torch.equal(native.linear(x, packed)[:1], alone)


# ---- elementwise -----------------------------------------------------------------------------------------------------


def check_norms(kernels: Kernels, hidden: int) -> None:
    x, residual, weight = torch.randn(6, hidden), torch.randn(6, hidden), torch.rand(hidden)
    assert_close(kernels.rms_norm(x, weight, 1e-5), REFERENCE.rms_norm(x.double(), weight.double(), 1e-5), 1e-6)
    total = residual.clone()
    normed = kernels.add_rms_norm(x, total, weight, 1e-5)
    assert torch.equal(total, residual + x)
    assert torch.equal(normed, kernels.rms_norm(total, weight, 1e-5))


@pytest.mark.parametrize("hidden", [1, 7, 64, 576, 1001])
def test_rms_norm_matches_the_reference(native: NativeKernels, hidden: int) -> None:
    check_norms(native, hidden)


def test_the_gate_matches_the_reference_over_the_whole_range(native: NativeKernels) -> None:
    gate = torch.cat([torch.linspace(-110, 110, 4001), torch.tensor([0.0, -0.0, 1e-30, -1e4, 1e4])])
    got = native.gate(torch.cat([gate, torch.ones_like(gate)])[None])[0]
    expected = torch.nn.functional.silu(gate.double())
    torch.testing.assert_close(got.double(), expected, rtol=4e-7, atol=2e-36)  # e^x is 0 below the normal numbers


def test_not_a_number_stays_visible(native: NativeKernels) -> None:
    assert native.gate(torch.full((1, 34), float("nan"))).isnan().all()
    assert native.rms_norm(torch.full((1, 17), float("nan")), torch.ones(17), 1e-5).isnan().all()


def test_rows_of_the_elementwise_kernels_have_the_same_bits_among_any_rows(native, threads) -> None:
    x, residual, weight = torch.randn(90, 1002), torch.randn(90, 1002), torch.rand(1002)
    alone = torch.cat([native.rms_norm(row[None], weight, 1e-6) for row in x])
    added = torch.cat(
        [native.add_rms_norm(a[None], b[None].clone(), weight, 1e-6) for a, b in zip(x, residual, strict=True)]
    )
    activated = torch.cat([native.gate(row[None]) for row in x])
    for count in (1, 2):
        threads(count)
        for rows in (1, 2, 3, 17, 40, 90):
            assert torch.equal(native.rms_norm(x[-rows:], weight, 1e-6), alone[-rows:])
            assert torch.equal(native.add_rms_norm(x[-rows:], residual[-rows:].clone(), weight, 1e-6), added[-rows:])
            assert torch.equal(native.gate(x[-rows:]), activated[-rows:])


# ---- rotary embedding and the cache ----------------------------------------------------------------------------------


def rotary_tables(dim: int, length: int = 64) -> tuple[Tensor, Tensor]:
    angle = torch.arange(length)[:, None] / 100 ** (torch.arange(dim // 2) / (dim // 2))
    return angle.cos(), angle.sin()


def check_rope_and_store(kernels: Kernels, q_heads: int, kv_heads: int, dim: int, normed: bool) -> None:
    state = scene([40, 20], kv_heads, dim)
    plan = replace(state.plan([(0, 3), (1, 19), (0, 39), (0, 7)]), slots=ints([5, -1, 0, 33]))
    qkv = torch.randn(4, (q_heads + 2 * kv_heads) * dim)
    cos, sin = rotary_tables(dim)
    norms = (torch.rand(dim), torch.rand(dim)) if normed else (None, None)
    expected_cache = wide(state.cache)
    rope = RopeArgs(cos, sin, *norms, 1e-6)
    expected = REFERENCE.rope_and_store(qkv.double(), plan, wide_rope(rope), expected_cache)
    untouched = [slot for slot in range(len(state.cache.k)) if slot not in (5, 0, 33)]
    before = state.cache.k[untouched].clone(), state.cache.v[untouched].clone()
    q = kernels.rope_and_store(qkv.clone(), plan, rope, state.cache)
    assert q.shape == (4, q_heads, dim)
    assert_close(q, expected, 1e-6)
    assert_close(state.cache.k[[5, 0, 33]], expected_cache.k[[5, 0, 33]], 1e-6)
    assert torch.equal(state.cache.v[[5, 0, 33]], qkv[[0, 2, 3], (q_heads + kv_heads) * dim :].view(3, kv_heads, dim))
    for old, new, reference in zip(
        before, (state.cache.k, state.cache.v), (expected_cache.k, expected_cache.v), strict=True
    ):
        torch.testing.assert_close(new[untouched], old, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(reference[untouched].float(), old, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("q_heads", "kv_heads", "dim"), [(4, 2, 16), (3, 1, 8), (9, 3, 64), (2, 2, 40)])
def test_rope_and_store_matches_the_reference(native, q_heads, kv_heads, dim, normed) -> None:
    check_rope_and_store(native, q_heads, kv_heads, dim, normed)


def test_a_row_of_rope_has_the_same_bits_among_any_rows(native: NativeKernels, threads: Callable[[int], None]) -> None:
    rows, dim, kv_heads = 150, 24, 2
    state = scene([rows], kv_heads, dim)
    slots = state.tables[0].repeat_interleave(BLOCK)[:rows] * BLOCK + torch.arange(rows) % BLOCK
    plan = replace(state.plan([(0, p) for p in range(rows)]), slots=slots.int())
    qkv, norm, tables = torch.randn(rows, 10 * dim), torch.rand(dim), rotary_tables(dim, rows)

    def run(chunk: int) -> tuple[Tensor, Tensor, Tensor]:
        parts = [list(range(at, min(at + chunk, rows))) for at in range(0, rows, chunk)]
        call = [
            native.rope_and_store(
                qkv[part].clone(), rows_of(plan, part), RopeArgs(*tables, norm, norm, 1e-6), state.cache
            )
            for part in parts
        ]
        return torch.cat(call), state.cache.k[slots].clone(), state.cache.v[slots].clone()

    alone = run(1)
    for count in (1, 2):
        threads(count)
        for chunk in (2, 7, 150):
            assert all(torch.equal(a, b) for a, b in zip(run(chunk), alone, strict=True))


def test_a_position_beyond_the_tables_is_refused(native: NativeKernels) -> None:
    state = scene([40])
    plan = replace(state.plan([(0, 39)]), slots=ints([0]))
    with pytest.raises(IndexError, match="rotary tables"):
        native.rope_and_store(torch.randn(1, 64), plan, RopeArgs(*rotary_tables(16, 39), None, None, 1e-6), state.cache)


# ---- attention -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kv_heads", "group", "dim"), [(2, 1, 16), (1, 3, 24), (3, 3, 64), (2, 7, 40), (1, 50, 8)])
@pytest.mark.parametrize("window", [None, 1, 37, 300])
def test_attention_matches_the_reference(native, kv_heads, group, dim, window) -> None:
    state = scene([1, 255, 256, 257, 258, 530], kv_heads, dim)
    rows = [(s, p) for s, (k, _) in enumerate(state.tokens) for p in {len(k) - 1, len(k) - 2, len(k) // 2} if p >= 0]
    plan, q = state.plan(rows), torch.randn(len(rows), kv_heads * group, dim)
    got = native.attention(q, plan, state.cache, dim**-0.5, window)
    assert_close(got, reference_attention(q, plan, state.cache, dim**-0.5, window))


@pytest.mark.parametrize("dim", [96, 128, 256])
def test_attention_of_large_heads_matches_the_reference(native: NativeKernels, dim: int) -> None:
    state = scene([300], 1, dim)
    plan, q = state.plan([(0, p) for p in range(280, 300)]), torch.randn(20, 2, dim)
    assert_close(
        native.attention(q, plan, state.cache, 0.1, None), reference_attention(q, plan, state.cache, 0.1, None)
    )


@settings(max_examples=25, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_mixture_of_rows_and_branches_matches_the_reference_and_itself(data: st.DataObject) -> None:
    native = NativeKernels(open_library(runnable_variants()[0]))
    kv_heads, group = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4))
    dim = 8 * data.draw(st.integers(1, 9))
    lengths = data.draw(st.lists(st.sampled_from([2, 17, 64, 255, 256, 257, 400, 515]), min_size=1, max_size=4))
    window = data.draw(st.sampled_from([None, None, 3, 64, 290]))
    state = scene(lengths, kv_heads, dim, spare=20)
    rows = data.draw(
        st.lists(
            st.integers(0, len(lengths) - 1).flatmap(lambda s: st.tuples(st.just(s), st.integers(0, lengths[s] - 1))),
            min_size=1,
            max_size=30,
        )
    )
    rows = sorted(rows) if data.draw(st.booleans()) else rows
    drafted = [min(data.draw(st.integers(0, 9)), position + 1) for _, position in rows]
    plan, q = state.branch(rows, drafted), torch.randn(len(rows), kv_heads * group, dim)
    got = native.attention(q, plan, state.cache, 0.3, window)
    assert_close(got, reference_attention(q, plan, state.cache, 0.3, window))
    plain = state.plan(rows)
    for i in range(len(rows)):  # decoded plainly and alone
        assert torch.equal(native.attention(q[i : i + 1], rows_of(plain, [i]), state.cache, 0.3, window)[0], got[i])


@pytest.mark.parametrize("window", [None, 200])
@pytest.mark.parametrize("dim", [64, 20])
def test_a_row_of_attention_has_the_same_bits_among_any_rows_and_threads(native, threads, dim, window) -> None:
    state = scene([700, 90], 2, dim)
    rows = [(0, p) for p in range(640, 700)] + [(1, p) for p in range(80, 90)]
    plan, q = state.plan(rows), torch.randn(len(rows), 6, dim)
    alone = torch.cat(
        [native.attention(q[i : i + 1], rows_of(plan, [i]), state.cache, 0.2, window) for i in range(len(rows))]
    )
    for count in (1, 2):  # with 2 the splits of few tiles are dealt out and merged afterwards
        threads(count)
        for size in (1, 3, 8, 17, 40, 70):
            for first in (0, 70 - size, 31) if count == 1 else (70 - size,):
                part = list(range(first, min(first + size, 70)))
                assert torch.equal(
                    native.attention(q[part], rows_of(plan, part), state.cache, 0.2, window), alone[part]
                )
        mixed = torch.randperm(len(rows)).tolist()
        assert torch.equal(native.attention(q[mixed], rows_of(plan, mixed), state.cache, 0.2, window), alone[mixed])


@pytest.mark.parametrize("length", [20, 254, 255, 256, 257, 300])
def test_a_tree_node_has_the_bits_of_the_token_decoded_plainly(native: NativeKernels, length: int) -> None:
    state = scene([length], 3, 64, spare=20)
    rows, drafted = [(0, length - 1 - i % 4) for i in range(12)], [1 + (5 * i) % 9 for i in range(12)]
    tree, q = state.branch(rows, drafted), torch.randn(12, 9, 64)
    got = native.attention(q, tree, state.cache, 0.125, None)
    assert torch.equal(got, native.attention(q, state.plan(rows), state.cache, 0.125, None))
    for i in range(12):
        assert torch.equal(native.attention(q[i : i + 1], rows_of(tree, [i]), state.cache, 0.125, None)[0], got[i])


def test_where_the_blocks_lie_does_not_matter(native: NativeKernels) -> None:
    q, results = torch.randn(3, 6, 32), []
    tokens = torch.randn(2, 400, 2, 32)
    for _ in range(2):
        state = scene([400], 2, 32)
        slots = (state.tables[0].repeat_interleave(BLOCK) * BLOCK + torch.arange(400) % BLOCK).long()
        state.cache.k[slots], state.cache.v[slots] = tokens
        results.append(native.attention(q, state.plan([(0, 399), (0, 270), (0, 12)]), state.cache, 0.2, None))
    assert torch.equal(*results)


def test_an_overflowing_neighbour_in_the_tree_stays_alone(native: NativeKernels) -> None:
    state = scene([60], 1, 16)
    plan, q = state.branch([(0, 59)] * 4, [3, 3, 3, 3]), torch.randn(4, 2, 16)
    expected = native.attention(q[:1], rows_of(plan, [0]), state.cache, 0.2, None)
    later = plan.path[1:].flatten().long()
    state.cache.k[later], state.cache.v[later] = float("inf"), float("nan")
    assert torch.equal(native.attention(q, plan, state.cache, 0.2, None)[:1], expected)


def test_large_scores_do_not_overflow(native: NativeKernels) -> None:
    state = scene([520], 1, 16)
    plan, q = state.plan([(0, 519)]), torch.randn(1, 1, 16) * 100
    assert_close(
        native.attention(q, plan, state.cache, 10.0, None), reference_attention(q, plan, state.cache, 10.0, None)
    )


@pytest.mark.parametrize("slot", [-1, 10**6])
def test_a_slot_outside_the_cache_is_refused_not_read(native: NativeKernels, slot: int) -> None:
    state = scene([60])
    plan = state.branch([(0, 59)], [2])
    plan.path[0, 1] = slot
    with pytest.raises(IndexError, match="outside the cache"):
        native.attention(torch.randn(1, 2, 16), plan, state.cache, 0.2, None)


@pytest.mark.parametrize("window", [None, 20])
def test_torch_attention_takes_turns_without_changing_its_answer(window, monkeypatch) -> None:
    state = scene([50, 50, 9], 2, 16, spare=8)
    rows = [(0, p) for p in range(50)] + [(1, 49), (2, 8)]
    q = torch.randn(len(rows), 4, 16)
    for plan in (state.plan(rows), state.branch(rows, [1 + p % 3 for _, p in rows])):
        whole = TorchKernels().attention(q, plan, state.cache, 0.25, window)
        with monkeypatch.context() as patch:
            patch.setattr("paceline.models.backends.torch.LIMIT", 50 * 4 * 7)
            kernels = TorchKernels()
            torch.testing.assert_close(kernels.attention(q, plan, state.cache, 0.25, window), whole)
            assert len(kernels._reads(plan).groups(window, 4, state.cache)) >= 8
        alone = [TorchKernels().attention(q[[i]], rows_of(plan, [i]), state.cache, 0.25, window) for i in range(len(q))]
        torch.testing.assert_close(torch.cat(alone), whole)


@pytest.mark.parametrize("rows", range(1, 10))
def test_torch_products_of_few_rows_are_the_products(rows: int) -> None:
    x, weight, bias = torch.randn(rows, 24), torch.randn(40, 24), torch.randn(40)
    for added in (None, bias):
        got = REFERENCE.linear(x, REFERENCE.pack(weight, added))
        assert got.is_contiguous()
        torch.testing.assert_close(got, torch.nn.functional.linear(x, weight, added))


def test_torch_attention_matches_a_softmax_written_out() -> None:
    state = scene([9], 1, 8)
    (k, v), q = state.tokens[0], torch.randn(1, 2, 8)
    weights = (q[0] @ k[3:, 0].T * 0.5).softmax(-1)
    got = REFERENCE.attention(q, state.branch([(0, 8)], [4]), state.cache, 0.5, 6)
    torch.testing.assert_close(got[0], (weights @ v[3:, 0]).flatten())


# ---- blocks that see themselves --------------------------------------------------------------------------------------

BLOCK_ROWS = [(0, 12), *((0, at) for at in range(29, 37)), *((1, at) for at in range(292, 300))]
BLOCK_ENDS = [13, *[37] * 8, *[300] * 8]  # behind the last row of its block; the first row is a plain one


def block_and_dense(attention: Callable[..., Tensor], window: int | None, by_slot: int) -> tuple[Tensor, Tensor]:
    """Return the kernels' result for two blocks and a plain row, and the softmax over their keys in float64."""
    state, q, group = scene([37, 300], 2, 16), torch.randn(len(BLOCK_ROWS), 4, 16), 2
    got = attention(q, state.block(BLOCK_ROWS, BLOCK_ENDS, by_slot), state.cache, 0.2, window)
    expected = []
    for row, ((sequence, position), end) in enumerate(zip(BLOCK_ROWS, BLOCK_ENDS, strict=True)):
        begin = 0 if window is None else max(position - window + 1, 0)
        k, v = (part[begin:end].double().repeat_interleave(group, 1) for part in state.tokens[sequence])
        weights = torch.einsum("hd,khd->hk", q[row].double() * 0.2, k).softmax(-1)
        expected.append(torch.einsum("hk,khd->hd", weights, v).flatten())
    return got, torch.stack(expected)


@pytest.mark.parametrize("window", [None, 5, 37])
@pytest.mark.parametrize("by_slot", [0, 8])
def test_a_block_that_sees_itself_matches_dense_attention(native, window, by_slot) -> None:
    assert_close(*block_and_dense(REFERENCE.attention, window, by_slot))
    assert_close(*block_and_dense(native.attention, window, by_slot))


def check_rows_of_blocks(kernels: Kernels, rows: Sequence[int]) -> None:
    """A row of a block has the same bits alone and read by slot."""
    state, q = scene([37, 300], 2, 16), torch.randn(len(BLOCK_ROWS), 4, 16)
    plan = state.block(BLOCK_ROWS, BLOCK_ENDS)
    together = kernels.attention(q, plan, state.cache, 0.2, None)
    by_slot = state.block(BLOCK_ROWS, BLOCK_ENDS, by_slot=8)
    assert torch.equal(kernels.attention(q, by_slot, state.cache, 0.2, None), together)
    for row in rows:
        alone = kernels.attention(q[row : row + 1], rows_of(plan, [row]), state.cache, 0.2, None)
        assert torch.equal(alone[0], together[row])


def test_a_row_of_a_block_has_the_same_bits_alone_and_read_by_slot(native: NativeKernels) -> None:
    check_rows_of_blocks(native, (3, 12))


# ---- choosing --------------------------------------------------------------------------------------------------------


def test_the_native_kernels_serve_the_cpu() -> None:
    kernels = kernels_for(torch.device("cpu"))
    assert kernels.name.startswith("native-"), library_status()
    assert kernels.exact


def test_the_environment_chooses_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_KERNELS", "torch")
    assert kernels_for(torch.device("cpu")).name == "torch"
    monkeypatch.setenv("PACELINE_KERNELS", "native")
    assert kernels_for(torch.device("cpu")).exact
    with pytest.raises(DeviceError, match="cpu only"):
        kernels_for(torch.device("meta"))
    monkeypatch.setenv("PACELINE_KERNELS", "fast")
    with refused("PACELINE_KERNELS"):
        kernels_for(torch.device("cpu"))


def test_without_a_library_torch_serves_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    status = (None, "no native kernels: kernels_avx2.so was not built")
    monkeypatch.setattr(native_library, "best_library", lambda: status)
    assert kernels_for(torch.device("cpu")).name == "torch"
    monkeypatch.setenv("PACELINE_KERNELS", "native")
    with pytest.raises(DeviceError, match="was not built; install paceline's wheel"):
        kernels_for(torch.device("cpu"))


def test_a_library_older_than_the_sources_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(native_library.SIGNATURES, "made_tomorrow", (None, []))
    with pytest.raises(OSError, match="older than the sources: it has no made_tomorrow"):
        open_library.__wrapped__(runnable_variants()[0])


def test_a_library_with_other_structures_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_library, "ABI", native_library.ABI + 1)
    with pytest.raises(OSError, match="not of these sources"):
        open_library.__wrapped__(runnable_variants()[0])


# ---- a whole stack of layers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stops", [(3,), (1, 3), (0, 2, 3)])
def test_layers_in_one_call_are_the_same_bits_as_call_by_call(native, dtype, stops) -> None:
    hidden, inner, q_heads, kv_heads, dim, rows = 48, 40, 6, 2, 16, 7

    def weight(n: int, k: int, bias: bool = False) -> object:
        return native.pack((torch.randn(n, k) / k**0.5).to(dtype), torch.randn(n) if bias else None)

    layers = [
        Layer(
            spec=LayerSpec(
                heads=q_heads,
                kv_heads=kv_heads,
                head_dim=dim,
                inner=inner,
                window=4 if index == 1 else None,
                qk_norm=HEAD if index else None,
            ),
            input_norm=torch.rand(hidden) + 0.5,
            qkv=weight((q_heads + 2 * kv_heads) * dim, hidden, bias=True),
            q_norm=torch.rand(dim) + 0.5 if index else None,
            k_norm=torch.rand(dim) + 0.5 if index else None,
            output=weight(hidden, q_heads * dim),
            attention_norm=None,
            mlp_norm=torch.rand(hidden) + 0.5,
            gate_up=weight(2 * inner, hidden),
            down=weight(hidden, inner, bias=True),
            down_norm=None,
        )
        for index in range(3)
    ]
    positions = ints(range(rows))
    plan = PassPlan.in_order(positions, positions, torch.zeros_like(positions), ints([[0]]), BLOCK, rows)
    shape = StackParams(((torch.rand(rows, dim // 2), torch.rand(rows, dim // 2)),) * 3, 1e-5)
    embedded, results = torch.randn(rows, hidden), []
    for make in (native.stack, functools.partial(LayerByLayer, native)):
        caches = [LayerCache(torch.zeros(BLOCK, kv_heads, dim), torch.zeros(BLOCK, kv_heads, dim)) for _ in layers]
        stack, residual, added, first = make(layers, caches, shape), embedded.clone(), None, 0
        for last in stops:
            if last > first:
                added = stack.run(first, last, added, residual, plan)
            first = last
        results.append([residual, added, *(tensor for cache in caches for tensor in (cache.k, cache.v))])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


# ---- the pool of threads ---------------------------------------------------------------------------------------------


def test_callers_on_several_threads_do_not_disturb_each_other(native: NativeKernels, threads: object) -> None:
    torch.set_num_threads(2)
    weight, x = native.pack(torch.randn(320, 96)), torch.randn(5, 96)
    expected = native.linear(x, weight)
    with ThreadPoolExecutor(4) as callers:
        results = list(callers.map(lambda _: native.linear(x, weight), range(400)))
    assert all(torch.equal(result, expected) for result in results)


def test_more_threads_than_cores_and_then_fewer_give_the_same_bits(native: NativeKernels, threads: object) -> None:
    weight, x = native.pack(torch.randn(320, 96)), torch.randn(5, 96)
    expected = native.linear(x, weight)
    for count in (7, 1, 3, 16, 2):
        torch.set_num_threads(count)
        assert all(torch.equal(native.linear(x, weight), expected) for _ in range(50))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="nothing forks here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_computes_with_threads_of_its_own(native: NativeKernels, threads: object) -> None:
    torch.set_num_threads(2)
    weight, x = native.pack(torch.randn(320, 96)), torch.randn(5, 96)
    expected = native.linear(x, weight)  # the parent's threads exist now
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(native.linear(x, weight), expected) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert torch.equal(native.linear(x, weight), expected)
