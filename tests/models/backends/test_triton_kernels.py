# ruff: noqa: E402
"""The CUDA kernels through Triton's interpreter, against the torch reference in float64, and their law: a row's bits
depend on that row alone. What only a GPU can show (its rounding) is checked by benchmarks.gpu.run there."""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.helpers.interpreter import require_interpreter

require_interpreter()

from paceline.errors import DeviceError
from paceline.models.backends.cuda import linear as linear_module
from paceline.models.backends.cuda.attention import division
from paceline.models.backends.cuda.attention.attention import attention
from paceline.models.backends.cuda.attention.division import (
    HEADER,
    KEYS,
    NARROW,
    TILE,
    Division,
    Work,
    chunks_of,
    tiles_of,
    work_of,
)
from paceline.models.backends.cuda.kernels import TritonKernels
from paceline.models.backends.cuda.linear import Rotary, Tile, linear
from paceline.models.decoder import Decoder
from paceline.models.kernels import LayerByLayer, RopeArgs, kernels_for
from paceline.models.kv_cache import KVCache, LayerCache
from paceline.models.plan import DeviceTrees, PassPlan
from paceline.models.spec import ModelConfig
from paceline.models.warmup import PassShape
from paceline.models.weights import Dtypes
from tests.helpers.random_llama import llama, random_weights
from tests.models.test_kernels import (
    REFERENCE,
    block_and_dense,
    check_norms,
    check_rope_and_store,
    check_rows_of_blocks,
    ints,
    reference_attention,
    rotary_tables,
    rows_of,
    scene,
)

pytestmark = [
    pytest.mark.skipif(sys.platform == "win32", reason="triton does not run on Windows"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # the interpreter's numpy on infinities, which kernels mask
]
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter runs one program after the other: a grid for a small chip."""
    torch.manual_seed(0)
    monkeypatch.setattr(division, "PROGRAMS", 16)


@pytest.fixture
def kernels() -> TritonKernels:
    return TritonKernels(CPU)


def assert_close(got: Tensor, expected: Tensor, tolerance: float = 2e-5) -> None:
    torch.testing.assert_close(got.double(), expected.double(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("rows", "n", "k"), [(1, 40, 64), (3, 96, 48), (70, 33, 80)])
@pytest.mark.parametrize("biased", [False, True])
def test_linear_matches_the_reference(kernels: TritonKernels, rows: int, n: int, k: int, biased: bool) -> None:
    weight, bias = torch.randn(n, k) / k**0.5, torch.randn(n) if biased else None
    x = torch.randn(rows, k)
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    assert_close(kernels.linear(x, kernels.pack(weight, bias)), expected)
    assert_close(kernels.logits(x, kernels.pack(weight, bias)), expected)


@pytest.mark.parametrize("tile", [None, Tile(16, 64, 32, 4, 2, swapped=True), Tile(64, 32, 32, 4, 2, swapped=True)])
def test_the_gated_product_is_silu_of_the_gate_times_up(kernels: TritonKernels, tile: Tile | None) -> None:
    weight, bias, x = torch.randn(72, 64) / 8, torch.randn(72), torch.randn(5, 64)
    got = linear(x, kernels.pack(weight, bias), gated="silu", tile=tile)
    assert_close(got, REFERENCE.gate(x.double() @ weight.double().T + bias.double()))


def product_of(kernels: TritonKernels, kind: str, rows: int, k: int) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """A product plain, gated, or of q, k and v rotated and stored: (result, K, V) for options of `linear`."""
    q_heads, kv_heads, dim = 3, 1, 32
    width = (q_heads + 2 * kv_heads) * dim
    weight, x = kernels.pack(torch.randn(width, k) / 8, torch.randn(width)), torch.randn(rows, k)
    (cos, sin), at = rotary_tables(dim, rows), ints(list(range(rows)))

    def product(**options: Any) -> tuple[Tensor, Tensor, Tensor]:
        cache = LayerCache(*torch.zeros(2, rows, kv_heads, dim))
        rotary = Rotary(at, at, cos, sin, cache.k, cache.v) if kind == "rotary" else None
        return linear(x, weight, gated="silu" if kind == "gated" else None, rotary=rotary, **options), cache.k, cache.v

    return product


@pytest.mark.parametrize("kind", ["gated", "rotary"])
def test_a_deep_and_narrow_weight_is_gated_and_rotated_as_any_other(kernels, monkeypatch, kind: str) -> None:
    product, results = product_of(kernels, kind, 5, 256), []
    for segments in (1, 2):
        monkeypatch.setattr(linear_module, "segments_of", lambda n, k, segments=segments: segments)
        results.append(product())
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


@pytest.mark.parametrize("biased", [False, True])
def test_a_product_in_segments_is_one_sum_in_order_for_few_rows_and_many(kernels, monkeypatch, biased) -> None:
    monkeypatch.setattr(linear_module, "segments_of", lambda n, k: 4)
    weight = kernels.pack(torch.randn(40, 256) / 16, torch.randn(40) if biased else None)
    x, tile = torch.randn(70, 256), Tile(16, 64, 32, 4, 2, swapped=True)
    many = linear(x, weight, tile=tile)
    few = linear(x[:3], weight, tile=tile)
    parts = [x[:3, at : at + 64] @ weight.weight.data[:, at : at + 64].T for at in range(0, 256, 64)]
    assert_close(few, sum(parts) + (0 if weight.bias is None else weight.bias))
    assert torch.equal(few, many[:3])


def test_a_norm_adds_the_segments_of_the_product_before_it(kernels, monkeypatch) -> None:
    monkeypatch.setattr(linear_module, "segments_of", lambda n, k: 2)
    weight, x = kernels.pack(torch.randn(40, 128)), torch.randn(3, 128)
    residual, scale = torch.randn(3, 40), torch.rand(40)
    parts = linear(x, weight, in_segments=True)
    assert parts.shape == (2, 3, 40)
    streams = residual.clone(), residual.clone()
    normed = [
        kernels.add_rms_norm(added, stream, scale, 1e-5)
        for added, stream in zip((parts, linear(x, weight)), streams, strict=True)
    ]
    assert torch.equal(*normed)
    assert torch.equal(*streams)


@pytest.mark.parametrize(("rows", "tile"), [(3, None), (3, Tile(16, 32, 32, 4, 2, swapped=True)), (70, None)])
@pytest.mark.parametrize("biased", [False, True])
def test_the_product_of_q_k_and_v_rotates_and_stores_as_the_kernels_apart_do(kernels, rows, tile, biased) -> None:
    q_heads, kv_heads, dim = 3, 2, 24
    state = scene([rows + 40], kv_heads, dim)
    plan = state.plan([(0, at) for at in range(rows)])
    plan = replace(plan, slots=torch.where(torch.arange(rows) == 1, -1, plan.slots))
    width = (q_heads + 2 * kv_heads) * dim
    weight = kernels.pack(torch.randn(width, 64) / 8, torch.randn(width) if biased else None)
    x, (cos, sin) = torch.randn(rows, 64), rotary_tables(dim, rows)
    apart = LayerCache(state.cache.k.clone(), state.cache.v.clone())
    qkv = linear(x, weight, tile=tile)
    expected = kernels.rope_and_store(qkv, plan, RopeArgs(cos, sin, None, None, 1e-6), apart)
    rotary = Rotary(plan.positions, plan.slots, cos, sin, state.cache.k, state.cache.v)
    assert torch.equal(linear(x, weight, rotary=rotary, tile=tile).view_as(expected), expected)
    for got, wanted in ((state.cache.k, apart.k), (state.cache.v, apart.v)):
        torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kind", ["plain", "gated", "rotary"])
@pytest.mark.parametrize("swapped", [False, True])
def test_tiles_through_the_copy_engine_give_the_same_bits(kernels: TritonKernels, kind: str, swapped: bool) -> None:
    product = product_of(kernels, kind, 70, 128)
    results = [product(tile=Tile(64, 64, 64, 4, 2, swapped, boxes)) for boxes in (False, True)]
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


@pytest.mark.parametrize("kind", ["plain", "gated", "rotary"])
def test_a_tile_of_two_parts_gives_what_one_of_one_gives(kernels: TritonKernels, kind: str) -> None:
    product = product_of(kernels, kind, 70, 128)
    for pair in zip(*(product(tile=Tile(m, 64, 64, 4, 2, boxes=True)) for m in (32, 48)), strict=True):
        assert_close(*pair)


def test_a_tile_that_cannot_come_through_the_copy_engine_comes_by_pointers(kernels: TritonKernels) -> None:
    weight, x = kernels.pack(torch.randn(40, 80) / 9), torch.randn(70, 80)  # no whole number of steps of 64
    expected = x.double() @ weight.weight.data.double().T
    assert_close(linear(x, weight, tile=Tile(48, 64, 64, 4, 2, boxes=True)), expected)


@pytest.mark.parametrize(
    ("rows", "n", "columns"),
    [(512, 6144, 256), (512, 28672, 128), (768, 6144, 128), (1024, 6144, 128), (1024, 28672, 256), (640, 49152, 256)],
)
def test_many_rows_take_the_widest_tile_that_leaves_no_multiprocessor_idle_for_longer(rows, n, columns) -> None:
    assert linear_module.tile_for(rows, n, 4096, 2).n == columns


def test_half_products_are_summed_in_fp32(kernels: TritonKernels) -> None:
    """In float16: the interpreter does not know how to transpose bfloat16."""
    x, weight = torch.randn(4, 256).half(), torch.randn(32, 256).half()
    got = kernels.logits(x, kernels.pack(weight))
    assert got.dtype is torch.float32
    assert_close(got, x.double() @ weight.double().T, 1e-4)


@pytest.mark.parametrize("hidden", [7, 64, 576])
def test_the_norms_match_the_reference(kernels: TritonKernels, hidden: int) -> None:
    check_norms(kernels, hidden)


def test_the_gate_matches_the_reference(kernels: TritonKernels) -> None:
    x = torch.randn(3, 50) * 5
    assert_close(kernels.gate(x), REFERENCE.gate(x.double()), 1e-6)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("q_heads", "kv_heads", "dim"), [(4, 2, 16), (3, 1, 24)])
def test_rope_and_store_matches_the_reference(kernels, q_heads, kv_heads, dim, normed) -> None:
    check_rope_and_store(kernels, q_heads, kv_heads, dim, normed)


MIXED = [(0, 0), (1, 129), (1, 100), (2, 63), (2, 64), (3, 339), (3, 320), (3, 20)]  # 339: the second chunk
DRAFTED = [1, 3, 0, 9, 2, 40, 1, 5]


@pytest.mark.parametrize(("kv_heads", "group", "dim", "window"), [(1, 3, 24, None), (2, 2, 16, 37), (1, 4, 64, None)])
def test_a_tree_node_has_the_bits_of_the_token_decoded_plainly(kernels, kv_heads, group, dim, window) -> None:
    state = scene([1, 130, 66, 340], kv_heads, dim, spare=20)
    q, plan = torch.randn(len(MIXED), kv_heads * group, dim), state.plan(MIXED)
    plain = kernels.attention(q, plan, state.cache, 0.2, window)
    assert_close(plain, reference_attention(q, plan, state.cache, 0.2, window))
    tree = state.branch(MIXED, DRAFTED)
    assert torch.equal(kernels.attention(q, tree, state.cache, 0.2, window), plain)
    alone = [kernels.attention(q[i : i + 1], rows_of(plan, [i]), state.cache, 0.2, window) for i in (1, 5)]
    assert torch.equal(torch.cat(alone), plain[[1, 5]])


@pytest.mark.parametrize(("programs", "window", "by_slot"), [(16, None, 0), (2, None, 0), (16, 37, 8), (16, 5, 0)])
def test_a_block_that_sees_itself_matches_dense_attention(kernels, monkeypatch, programs, window, by_slot) -> None:
    """In one program and in many, by the block table and by slot."""
    monkeypatch.setattr(division, "PROGRAMS", programs)
    assert_close(*block_and_dense(kernels.attention, window, by_slot))


def test_a_row_of_a_block_has_the_same_bits_alone_and_read_by_slot(kernels: TritonKernels) -> None:
    check_rows_of_blocks(kernels, (3,))


@pytest.mark.parametrize(("programs", "window"), [(2, None), (16, None), (16, 130)])
def test_where_the_work_is_cut_does_not_matter(kernels, monkeypatch, programs, window) -> None:
    """All in one program, chunk by chunk, block by block; chunks early and late in the context."""
    state = scene([1200, 40], 1, 16, spare=20)
    rows = [(0, 1199), (1, 39)]
    q, plan, results = torch.randn(2, 2, 16), state.plan(rows), []
    for blocks in (1, 1000):
        monkeypatch.setattr(division, "PROGRAMS", programs)
        monkeypatch.setattr(division, "SPLIT_BLOCKS", blocks)
        results.append(kernels.attention(q, replace(plan), state.cache, 0.2, window))
    monkeypatch.setattr(division, "PROGRAMS", 4)
    results.append(kernels.attention(q, replace(plan), state.cache, 0.2, window))
    monkeypatch.setattr(division, "PROGRAMS", 16)
    results.append(kernels.attention(q, state.branch(rows, [70, 5]), state.cache, 0.2, window))
    assert all(torch.equal(result, results[0]) for result in results)
    assert_close(results[0], reference_attention(q, plan, state.cache, 0.2, window))


@pytest.mark.parametrize("window", [None, 250])
def test_a_chunk_beside_decodes_has_the_same_bits_however_it_is_dealt_and_alone(kernels, window) -> None:
    """A program for each tile, shares by length, and shares by lengths that are no good estimates."""
    state = scene([600, 70, 300], 1, 16)
    rows = [(1, 69), (2, 299), *((0, position) for position in range(560, 600))]
    plan, q = state.plan(rows), torch.randn(len(rows), 4, 16)
    dealt = work_of(plan, 4, 1)
    shape, turns = dealt.division, dealt.shares[HEADER:].view(4, -1)[3]
    assert (shape.tile, shape.direct, shape.num_tiles, int(turns.max())) == (2 * TILE, False, 4, 3)
    _, begin, count = tiles_of(plan.sequence.numpy(), 4)
    undivided = replace(shape, direct=True, units=1, shares=shape.num_tiles)
    works = [dealt]
    for way, reach in ((undivided, plan.reach), (shape, plan.reach * 0), (shape, 640 - plan.reach)):
        numbers = way.dealt(begin, count, reach.numpy(), plan.max_len)
        works.append(Work(way, torch.cat((dealt.shares[:HEADER], torch.from_numpy(numbers)))))
    results = [attention(q, plan, work, state.cache, 0.2, window, kernels.workspace) for work in works]
    assert all(torch.equal(result, results[0]) for result in results)
    assert_close(results[0], reference_attention(q, plan, state.cache, 0.2, window))
    for row in (0, 1, 2, 41):
        alone = kernels.attention(q[row : row + 1], rows_of(plan, [row]), state.cache, 0.2, window)
        assert torch.equal(alone[0], results[0][row])


@pytest.mark.parametrize("tile", [NARROW, TILE, 2 * TILE])
@pytest.mark.parametrize("longest", [64, 2600, 4096, 5200, 8192, 40_000])
def test_no_pass_has_more_partial_results_than_its_scratch_holds(tile: int, longest: int) -> None:
    """The scratch of a division is sized for the longest context, and a shorter one may be divided more finely."""
    for num_tiles, path_width in itertools.product((1, 2, 3, 4, 5, 8, 16, 64), (0, 64)):
        divided = Division.of(num_tiles * tile, num_tiles, tile, path_width, 2, longest)
        blocks = [-(-length // KEYS) for length in range(1, longest + 1, 31)]
        units = [each if divided.by_block(each * KEYS) else chunks_of(each) for each in blocks]
        assert divided.direct or max(units) <= divided.units


def test_tiles_are_runs_of_one_sequence_cut_to_fit() -> None:
    tile, begin, count = tiles_of(np.array([0] * 40 + [1] + [2] * 3), group=4)
    assert (tile, begin.tolist(), count.tolist()) == (128, [0, 32, 40, 41], [32, 8, 1, 3])
    tile, begin, count = tiles_of(np.array([0, 1, 2]), group=4)
    assert (tile, begin.tolist(), count.tolist()) == (16, [0, 1, 2], [1, 1, 1])


# ---- a whole pass ----------------------------------------------------------------------------------------------------

CONFIG = llama(vocab_size=50, hidden_size=32, intermediate_size=48, head_dim=16, max_positions=128)


SHALLOW = CONFIG.of_depth(1)  # where a pass is looked at from outside; others are held against torch


def weights(config: ModelConfig = CONFIG) -> dict[str, Tensor]:
    return random_weights(config, 1.4)


def decoder_of(
    kernels: Any, config: ModelConfig = CONFIG, *, blocks: int = 1, made: Any = None
) -> tuple[Decoder, KVCache]:
    """A decoder and a cache whose slots hold 7."""
    dtypes = Dtypes.of(torch.float32, CPU)
    decoder = Decoder(config, made or weights(config), kernels, device=CPU, dtypes=dtypes)
    cache = KVCache(decoder.kv_specs, num_blocks=blocks, block_size=16, dtype=torch.float32, device=CPU)
    for layer in cache.layers:
        layer.k.fill_(7.0)
        layer.v.fill_(7.0)
    return decoder, cache


ONE_BLOCK = torch.zeros((1, 1), dtype=torch.int32)


def plan_of(positions: list[int], tables: Tensor = ONE_BLOCK) -> PassPlan:
    at = ints(positions)
    return PassPlan.in_order(at, at, torch.zeros_like(at), tables, 16, max(positions) + 1)


def test_a_padded_pass_gives_what_the_torch_kernels_give_and_writes_no_other_slot(kernels: TritonKernels) -> None:
    made = weights()
    tokens, tables = torch.randint(0, 50, (9,)), torch.arange(3, dtype=torch.int32)[None]
    results = []
    for each in (kernels, REFERENCE):
        decoder, cache = decoder_of(each, blocks=3, made=made)
        first = decoder.forward(tokens[:6], plan_of(list(range(6)), tables), cache.layers, torch.tensor([5]))
        kept = first.logits.clone()
        taps = (1, -1)
        rest = decoder.forward(tokens[6:], plan_of([6, 7, 8], tables), cache.layers, torch.arange(3), taps)
        assert rest.taps is not None
        assert rest.taps.shape == (3, 2, 32)
        assert all(bool((layer.k[9:] == 7.0).all() and (layer.v[9:] == 7.0).all()) for layer in cache.layers)
        results.append((kept, rest.logits, rest.taps))
    for ours, theirs in zip(*results, strict=True):
        assert_close(ours, theirs, 1e-4)


def test_tables_of_more_sequences_than_a_bucket_was_made_for_find_room(
    kernels: TritonKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.models.graphs.SEQUENCES", 2)
    decoder, cache = decoder_of(kernels, blocks=24)
    at, placed = torch.arange(5), []
    for width in (1, 8, 8):  # blocks of each sequence; the context has 8
        tables = torch.arange(5 * width, dtype=torch.int32).view(5, width) % 24
        plan = PassPlan.in_order(at, at - 20, at, tables, 16, 100)
        placed.append(decoder.graphs.place(at, plan, cache.layers, at))
        assert torch.equal(placed[-1].plan.block_tables[: tables.numel()], tables.flatten())
    assert placed[1] is not placed[0]
    assert placed[2] is placed[1]


@pytest.mark.parametrize("rows", [1, 3, 9])
def test_rows_that_lie_side_by_side_are_staged_as_one_by_one(kernels: TritonKernels, rows: int) -> None:
    decoder, cache = decoder_of(kernels)
    apart, staged = plan_of(list(range(2, 2 + rows))), []
    tokens, each = torch.arange(rows), apart.host.each.copy()
    each[-1] = tokens
    known = torch.from_numpy(each[-1])
    packed = PassPlan.on_host(apart.host._replace(each=each, tokens=known), apart.block_size, apart.max_len)
    for given, plan in ((tokens, apart), (known, packed)):
        of = decoder.graphs.place(given, plan, cache.layers, torch.arange(rows))
        staged.append(of.device_ints.clone())
    assert torch.equal(*staged)


@pytest.mark.parametrize(("chosen", "taps"), [([1, 3, 5], ()), ([5], (1,))])
def test_logits_are_of_the_rows_asked_for_also_where_a_bucket_has_as_many_rows(kernels, chosen, taps) -> None:
    decoder, cache = decoder_of(kernels, SHALLOW)
    plan, tokens = plan_of(list(range(6))), torch.arange(6)
    every = decoder.forward(tokens, plan, cache.layers, torch.arange(6), taps).logits.clone()
    some = decoder.forward(tokens, plan, cache.layers, torch.tensor(chosen), taps).logits
    assert torch.equal(some, every[chosen])


def test_a_pass_from_hidden_states_gives_what_a_pass_from_their_tokens_gives(kernels: TritonKernels) -> None:
    """A drafter with the target's embedding and head, and layers and width of its own; the input is not changed."""
    made = weights()
    target = Decoder(CONFIG, made, kernels, device=CPU, dtypes=Dtypes.of(torch.float32, CPU))
    layers = {name: weight for name, weight in made.items() if ".layers." in name or name == "model.norm.weight"}
    shared = {"embedding": target.embedding, "head": target.head}
    drafter = Decoder(CONFIG, layers, kernels, device=CPU, dtypes=Dtypes.of(torch.float32, CPU), **shared)
    tokens, tables, results = torch.randint(0, 50, (5,)), torch.zeros((1, 1), dtype=torch.int32), []
    plan, hidden = plan_of(list(range(5)), tables), target.embedding[tokens].clone()
    before = hidden.clone()
    for decoder, inputs in ((target, tokens), (drafter, hidden)):
        cache = KVCache(decoder.kv_specs, num_blocks=1, block_size=16, dtype=torch.float32, device=CPU)
        output = decoder.forward(inputs, plan, cache.layers, torch.tensor([2, 4]), (0, 2, -1))
        assert output.taps is not None
        results.append((output.logits, output.taps, cache.layers[1].k[:5]))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*results, strict=True))
    assert torch.equal(hidden, before)
    assert drafter.prepare(cache.layers, 16, (0,), [PassShape((1,)), PassShape((4, 4))], from_hidden=True)
    assert {bucket.rows for bucket in drafter.graphs._passes if bucket.from_hidden} == {1, 8}


def test_all_passes_write_their_taps_into_one_buffer(kernels: TritonKernels) -> None:
    decoder, cache = decoder_of(kernels, SHALLOW)
    tables, tapped = torch.zeros((1, 1), dtype=torch.int32), []
    for count in (12, 3, 1):
        plan = plan_of(list(range(count)), tables)
        taps = decoder.forward(torch.arange(count), plan, cache.layers, torch.tensor([count - 1]), (1, -1)).taps
        assert taps is not None
        tapped.append((taps, taps.clone()))
    assert len({taps.data_ptr() for taps, _ in tapped}) == 1
    assert all(torch.equal(kept, tapped[0][1][: len(kept)]) for _, kept in tapped)


def tree_plans(parents: list[int], claimed: list[int], length: int = 21) -> tuple[PassPlan, PassPlan]:
    """A last token and a tree, known on the host; and known on the device alone, which is given `claimed` parents."""
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    tables, most = torch.tensor([[2, 0, 1]], dtype=torch.int32), max(depths)
    stored = torch.arange(length - 1, length + len(parents))
    slots = (tables[0, stored // 16] * 16 + stored % 16).int()
    at = ints([length - 1, *(length - 1 + depth for depth in depths)])
    path = torch.full((len(at), most), -1, dtype=torch.int32)
    for node, depth in enumerate(depths):
        above = node
        for place in range(depth - 1, -1, -1):
            path[1 + node, place], above = slots[1 + above], parents[above]
    plain = PassPlan.in_order(at, slots, torch.zeros_like(at), tables, 16, length + most)
    known = replace(plain, prefix=plain.prefix.clamp(max=length), path=path)
    unknown = replace(
        known,
        positions=known.positions.clamp(max=length),
        reach=known.reach.clamp(max=length + 1),
        path=torch.full_like(path, -1),
        trees=DeviceTrees(
            numbers=np.array([[1, 1, len(parents), length]], np.int32),
            tokens=torch.tensor([[0] * len(parents), list(range(1, 1 + len(parents)))]),
            parents=torch.tensor([[-1] * len(parents), claimed]),
            max_depth=most,
        ),
    )
    return known, unknown


@pytest.mark.parametrize("seed", range(4))
def test_a_tree_known_on_the_device_alone_is_placed_as_one_known_on_the_host(kernels: TritonKernels, seed: int) -> None:
    """A parent that does not come before its node is taken for the one before it: no row reads a slot of another."""
    draw = random.Random(seed)
    parents = [-1, *(draw.randrange(-1, node) for node in range(1, 9))]
    claimed = list(parents)
    for node in (node for node in range(1, 9) if parents[node] == node - 1):
        claimed[node] = draw.choice([node - 1, node, node + 3, 99])
    decoder, cache = decoder_of(kernels, blocks=3)
    placed = []
    for plan in tree_plans(parents, claimed):
        tokens = torch.arange(10) if plan.trees is None else torch.tensor([0, *[-1] * 9])
        of = decoder.graphs.place(tokens, plan, cache.layers, torch.arange(10))
        parts = [getattr(of.plan, name)[:10] for name in ("positions", "prefix", "slots", "reach", "path")]
        placed.append([part.clone() for part in (*parts, of.tokens[:10])])
    width = max(plan.path.shape[1] for plan in tree_plans(parents, claimed))
    for known, unknown in zip(*placed, strict=True):
        assert torch.equal(*(part[..., :width] if part.dim() == 2 else part for part in (known, unknown)))


class FakeRecorder:
    """Graphs that are counted; nothing asks for what a replay computes."""

    def capture(self, work: Callable[[], Any]) -> Any:
        return SimpleNamespace(result=work(), replay=lambda: None)


def test_graphs_captured_after_start_up_are_counted_and_named_once(kernels, monkeypatch, caplog) -> None:
    decoder, cache = decoder_of(kernels, SHALLOW, blocks=2)
    graphs = decoder.graphs
    assert graphs is not None
    monkeypatch.setattr(type(graphs), "_captures", True)
    monkeypatch.setattr(graphs, "_compile", lambda passes: None)
    monkeypatch.setattr(graphs, "_recorder", FakeRecorder())
    decoder.prepare(cache.layers, 16, (), [PassShape((1,)), PassShape((8,))])
    assert (graphs.captured, graphs.late_captures, caplog.messages) == (2, 0, [])
    tables, late = torch.tensor([[0, 1]], dtype=torch.int32), []
    for count in (1, 5, 12, 12, 20, 20):
        plan = plan_of(list(range(count)), tables)
        with torch.inference_mode():
            decoder.forward(torch.arange(count), plan, cache.layers, torch.arange(count))
        late.append(graphs.late_captures)
    assert late == [0, 0, 0, 1, 1, 2], "12 and 20 rows take other kernels: the first pass is run, which compiles them"
    assert graphs.captured == 4
    assert len(caplog.messages) == 1
    assert "rows=16" in caplog.messages[0]


def test_a_chunk_of_a_prompt_that_goes_on_computes_no_logits_of_all_its_rows(kernels: TritonKernels) -> None:
    """The buffer of logits would grow from 64 rows to those of a chunk, and verification is captured with the first."""
    decoder, cache = decoder_of(kernels, SHALLOW, blocks=6)
    decoder.prepare(cache.layers, 16, (), [PassShape((1,))])
    before, plan = decoder.logits_buffer, plan_of(list(range(80)), torch.arange(6, dtype=torch.int32)[None])
    with torch.inference_mode():
        output = decoder.forward(torch.arange(80) % 7, plan, cache.layers, torch.arange(0))
        assert output.logits.shape[0] == 0
        decoder.forward(torch.arange(80) % 7, plan, cache.layers, torch.tensor([79]))
    assert decoder.logits_buffer.data_ptr() == before.data_ptr()


def test_the_warmup_meets_the_shapes_of_steps_and_writes_no_slot(kernels: TritonKernels) -> None:
    decoder, cache = decoder_of(kernels, SHALLOW, blocks=2)
    decoder.graphs.capture = False
    assert decoder.prepare(
        cache.layers, 16, (), [PassShape((1,)), PassShape((4, 4)), PassShape((5, 3)), PassShape((8,))]
    )
    assert all(bool((layer.k == 7.0).all() and (layer.v == 7.0).all()) for layer in cache.layers)
    met = set(decoder.graphs._passes)
    with torch.inference_mode():
        for rows in (1, 5):
            plan = plan_of(list(range(rows)))
            decoder.forward(torch.arange(rows), plan, cache.layers, torch.arange(rows))
    assert set(decoder.graphs._passes) == met


def test_a_pass_of_the_stack_is_the_sequence_of_its_kernels(kernels: TritonKernels) -> None:
    decoder, cache = decoder_of(kernels)
    plan, x = plan_of([0, 1, 2]), torch.randn(3, 32)
    results = []
    for make in (kernels.stack, lambda *parts: LayerByLayer(kernels, *parts)):
        residual = x.clone()
        added = make(decoder.layers, cache.layers, decoder.shape(64)).run(0, 2, None, residual, plan)
        results.append(residual + added)
    assert_close(*results)


def test_a_model_without_a_gpu_refuses_the_triton_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_KERNELS", "triton")
    with pytest.raises(DeviceError, match="runs on cuda only"):
        kernels_for(CPU)
