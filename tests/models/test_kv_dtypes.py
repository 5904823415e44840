"""K and V in bfloat16 and int8 on a CPU: rounded alike by every kernel, and a row's bits depend on that row alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from paceline import LLM, SamplingParams
from paceline.models.backends.cpu.kernels import NativeKernels
from paceline.models.backends.torch import TorchKernels
from paceline.models.kernels import RopeArgs
from paceline.models.kv_cache import KVCache, KVSpec, LayerCache
from paceline.models.load.open_model import choose_kv_dtype, load_model
from paceline.native.library import VARIANTS, open_library, runnable_variants
from tests.helpers.errors import refused
from tests.models.test_kernels import BLOCK, Scene, assert_close, ints, rows_of, scene

DTYPES = {"bfloat16": torch.bfloat16, "int8": torch.int8}
CPU = torch.device("cpu")


@pytest.fixture(params=VARIANTS)
def native(request: pytest.FixtureRequest) -> NativeKernels:
    if request.param not in runnable_variants():
        pytest.skip(f"this processor does not run {request.param}")
    return NativeKernels(open_library(request.param))


@pytest.fixture(params=DTYPES.values(), ids=list(DTYPES))
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def made(dtype: torch.dtype, slots: int, kv_heads: int, dim: int) -> LayerCache:
    spec = KVSpec(num_kv_heads=kv_heads, head_dim=dim)
    return KVCache([spec], num_blocks=slots // BLOCK, block_size=BLOCK, dtype=dtype, device=CPU).layers[0]


def rounded(state: Scene, dtype: torch.dtype) -> Scene:
    """The same sequences, their K and V rounded to another dtype."""
    cache = made(dtype, *state.cache.k.shape)
    cache.write(torch.arange(len(cache.k)), state.cache.k, state.cache.v)
    return replace(state, cache=cache)


def in_numbers(cache: LayerCache) -> LayerCache:
    return LayerCache(*(part.float() for part in cache.read(torch.arange(len(cache.k)))))


def equal(one: LayerCache, other: LayerCache) -> bool:
    pairs = zip(vars(one).values(), vars(other).values(), strict=True)
    return all(a is b or torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in pairs)


@pytest.mark.parametrize("dim", [16, 40])
def test_every_kernel_writes_the_same_numbers(native: NativeKernels, dtype: torch.dtype, dim: int) -> None:
    rows, kv_heads = 24, 3
    qkv = torch.randn(rows, 3 * kv_heads * dim) * torch.logspace(-44, 38, rows)[:, None]
    qkv[3, 2 * dim :] = 0
    qkv[5, 4 * dim], qkv[6, 5 * dim + 1] = float("inf"), float("nan")
    qkv[7] = torch.randint(-254, 255, (3 * kv_heads * dim,)) / 2  # ties
    positions, tables = ints(range(rows)), ints([[1, 0]])
    plan = replace(scene([32]).plan([(0, p) for p in range(rows)]), slots=positions.flip(0), block_tables=tables)
    still = RopeArgs(torch.ones(rows, dim // 2), torch.zeros(rows, dim // 2), None, None, 1e-6)
    own, reference = made(dtype, 32, kv_heads, dim), made(dtype, 32, kv_heads, dim)
    for kernels, cache in ((native, own), (TorchKernels(), reference)):
        for part in vars(cache).values():
            if part is not None:
                part.zero_()
        kernels.rope_and_store(qkv.clone(), plan, still, cache)
    assert equal(own, reference)


@pytest.mark.parametrize("codes", [[1.0, -127.0, 0.5, 1.5], [0.0] * 4])
def test_codes_are_multiples_of_the_largest_number_over_127(codes: list[float]) -> None:
    cache, numbers = made(torch.int8, BLOCK, 1, 4), torch.tensor(codes)
    cache.write(torch.tensor([3]), numbers.view(1, 1, 4), -numbers.view(1, 1, 4))
    assert cache.k[3].flatten().tolist() == [round(code) for code in codes]  # Python rounds ties to even too
    assert cache.read(torch.tensor([3]))[1].flatten().tolist() == [-round(code) for code in codes]


def test_bfloat16_attends_with_the_bits_of_its_widened_numbers(native: NativeKernels) -> None:
    for kv_heads, group, dim in ((2, 1, 16), (1, 3, 24), (3, 3, 64), (2, 7, 40), (1, 50, 8), (2, 6, 128)):
        state = rounded(scene([255, 258, 530], kv_heads, dim), torch.bfloat16)
        rows = [(s, p) for s, (k, _) in enumerate(state.tokens) for p in (len(k) - 1, len(k) - 2, len(k) // 2)]
        plan, q = state.plan(rows), torch.randn(len(rows), kv_heads * group, dim)
        widened = native.attention(q, plan, in_numbers(state.cache), dim**-0.5, None)
        assert torch.equal(native.attention(q, plan, state.cache, dim**-0.5, None), widened)


@pytest.mark.parametrize(("kv_heads", "group", "dim"), [(2, 1, 16), (1, 3, 24), (3, 3, 64), (2, 7, 40), (1, 50, 8)])
@pytest.mark.parametrize("window", [None, 37])
def test_attention_matches_the_reference(native, dtype, kv_heads, group, dim, window) -> None:
    state = rounded(scene([1, 255, 256, 530], kv_heads, dim), dtype)
    rows = [(s, p) for s, (k, _) in enumerate(state.tokens) for p in {len(k) - 1, len(k) // 2}]
    plan, q = state.plan(rows), torch.randn(len(rows), kv_heads * group, dim)
    wide = LayerCache(*(part.double() for part in vars(in_numbers(state.cache)).values() if part is not None))
    expected = TorchKernels().attention(q.double(), plan, wide, dim**-0.5, window)
    assert_close(native.attention(q, plan, state.cache, dim**-0.5, window), expected)
    assert_close(TorchKernels().attention(q, plan, state.cache, dim**-0.5, window), expected)


@pytest.mark.parametrize("window", [None, 200])
@pytest.mark.parametrize("dim", [64, 20])
def test_a_row_of_attention_has_the_same_bits_among_any_rows_and_threads(native, dtype, dim, window) -> None:
    state = rounded(scene([700, 90], 2, dim), dtype)
    rows = [(0, p) for p in range(640, 700)] + [(1, p) for p in range(80, 90)]
    plan, q = state.plan(rows), torch.randn(len(rows), 6, dim)

    def run(part: list[int]) -> torch.Tensor:
        return native.attention(q[part], rows_of(plan, part), state.cache, 0.2, window)

    alone = torch.cat([run([i]) for i in range(len(rows))])
    for count in (1, 2):
        torch.set_num_threads(count)
        for size in (1, 3, 8, 17, 40, 70):
            part = list(range(70 - size, 70))
            assert torch.equal(run(part), alone[part])


@pytest.mark.parametrize("length", [20, 255, 257, 300])
def test_a_tree_node_has_the_bits_of_the_token_decoded_plainly(native, dtype, length) -> None:
    state = rounded(scene([length], 2, 32), dtype)
    plan, q = state.plan([(0, length - 1)]), torch.randn(1, 8, 32)
    plain = native.attention(q, plan, state.cache, 0.3, None)
    count, free = 5, [block * BLOCK + i for block in state.free for i in range(BLOCK)]
    path, table = free[: 2 * count : 2], state.tables[0].tolist()
    for j, slot in enumerate(path):  # the last tokens lie in slots of a draft
        position = length - count + j
        for part in vars(state.cache).values():
            if part is not None:
                part[slot] = part[table[position // BLOCK] * BLOCK + position % BLOCK]
    drafted = replace(plan, prefix=plan.positions + 1 - count, path=ints([path]))
    assert torch.equal(native.attention(q, drafted, state.cache, 0.3, None), plain)


def test_an_accepted_node_takes_its_scale_along() -> None:
    spec = KVSpec(num_kv_heads=2, head_dim=4)
    cache = KVCache([spec] * 2, num_blocks=2, block_size=4, dtype=torch.int8, device=CPU)
    for layer in cache.layers:
        layer.write(torch.arange(8), torch.randn(8, 2, 4), torch.randn(8, 2, 4))
    expected = [part[5].clone() for layer in cache.layers for part in layer.read(torch.arange(8))]
    cache.compact(torch.tensor([[0, 3, 4, 5]]), torch.tensor([[0, 2]]))
    moved = [part[4] for layer in cache.layers for part in layer.read(torch.arange(8))]
    assert all(torch.equal(a, b) for a, b in zip(moved, expected, strict=True))


def test_memory_follows_the_dtype() -> None:
    specs = [KVSpec(num_kv_heads=2, head_dim=128)] * 3
    of = {dtype: KVCache.bytes_per_block(specs, 16, dtype) for dtype in (torch.float32, torch.bfloat16, torch.int8)}
    assert of[torch.bfloat16] * 2 == of[torch.float32] == 3 * 2 * 16 * 2 * 128 * 4
    assert of[torch.int8] == of[torch.float32] // 4 + 3 * 2 * 16 * 2 * 4
    for dtype, size in of.items():
        cache = KVCache(specs, num_blocks=5, block_size=16, dtype=dtype, device=CPU)
        held = [part for layer in cache.layers for part in vars(layer).values() if part is not None]
        assert sum(part.nbytes for part in held) == 5 * size


def test_the_number_of_blocks_follows_the_dtype(smollm2_path: Path) -> None:
    blocks = {}
    for name in ("auto", "bfloat16", "int8"):
        with LLM(str(smollm2_path), device="cpu", method="none", kv_dtype=name, kv_cache_bytes=64 << 20) as llm:
            blocks[name] = llm.call(lambda engine: engine.runner.cache.num_blocks)
    assert blocks["bfloat16"] == 2 * blocks["auto"]
    assert 3.7 * blocks["auto"] < blocks["int8"] < 4 * blocks["auto"]


@pytest.mark.parametrize("kv_dtype", DTYPES)
def test_plain_and_drafted_alone_and_batched_answers_are_the_same(smollm2_path: Path, kv_dtype: str) -> None:
    prompts = ["def add(a, b):\n    return a + b\n\ndef add(a, b):", "One two three four one two three", "The sea is"]
    with LLM(str(smollm2_path), device="cpu", kv_dtype=kv_dtype, max_model_len=256) as llm:

        def ask(some: list[str], speculation: object) -> list[object]:
            params = SamplingParams(temperature=0, max_tokens=24, logprobs=1, speculation=speculation)
            outputs = [output.outputs[0] for output in llm.generate(some, params)]
            return [(output.token_ids, output.logprobs) for output in outputs]

        assert llm.kv_dtype == kv_dtype
        plain = ask(prompts, "none")
        for speculation in ("none", {"method": "ngram", "k": 4}, {"method": "dspark", "k": 12}):
            assert ask(prompts, speculation) == plain
            assert [ask([prompt], speculation)[0] for prompt in prompts] == plain
        assert llm.engine.drafters.failures == 0


def test_an_explicit_float32_is_the_default(smollm2_path: Path) -> None:
    assert load_model(smollm2_path, device="cpu", kv_dtype="float32").kv_dtype == "auto"


@pytest.mark.parametrize("name", ["float32", "bfloat16", "int8"])
def test_a_gpu_refuses_the_dtypes_of_a_cpu(name: str) -> None:
    with refused("kv_dtype"):
        choose_kv_dtype(name, torch.device("cuda"), TorchKernels())
