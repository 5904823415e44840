# ruff: noqa: E402
"""A cache in fp8 through Triton's interpreter: rounded when written, read exactly, moved byte by byte."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.helpers.interpreter import require_interpreter

require_interpreter()

from paceline.models.backends.cuda.compact import compact
from paceline.models.backends.cuda.kernels import TritonKernels
from paceline.models.backends.cuda.linear import Rotary, linear
from paceline.models.kernels import RopeArgs
from paceline.models.kv_cache import LayerCache
from tests.models.test_kernels import ints, rotary_tables, scene

FP8 = torch.float8_e4m3fn
MIXED = [(0, 0), (1, 129), (2, 63), (2, 64)]
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's numpy on infinities


@pytest.fixture(scope="module")
def kernels() -> TritonKernels:
    return TritonKernels(torch.device("cpu"))


def rounded(cache: LayerCache) -> LayerCache:
    """Numbers that e4m3 has; where nothing was written its NaN."""
    return LayerCache(cache.k.to(FP8), cache.v.to(FP8))


def in_numbers(cache: LayerCache) -> LayerCache:
    return LayerCache(cache.k.float(), cache.v.float())


@pytest.mark.parametrize("window", [None, 37])
def test_attention_reads_fp8_as_the_numbers_it_stands_for(kernels: TritonKernels, window: int | None) -> None:
    state = scene([1, 130, 66], 1, 16, spare=20)
    cache = rounded(state.cache)
    q, plan = torch.randn(len(MIXED), 2, 16), state.plan(MIXED)
    plain = kernels.attention(q, plan, in_numbers(cache), 0.2, window)
    assert not plain.isnan().any()
    assert torch.equal(kernels.attention(q, plan, cache, 0.2, window), plain)


def exact_in_fp8(*shape: int) -> Tensor:
    return torch.randn(*shape).to(FP8).float()


def test_keys_and_values_are_rounded_to_fp8_and_kept_within_its_range(kernels: TritonKernels) -> None:
    kv_heads, dim = 1, 16
    qkv, (cos, sin) = exact_in_fp8(3, 3 * dim), rotary_tables(dim)
    qkv[:, 2 * dim] = torch.tensor([1e4, -1e4, 3.0])  # values beyond 448
    plan = replace(scene([40], kv_heads, dim).plan([(0, 0), (0, 1), (0, 2)]), slots=ints([5, 9, -1]))
    rope = RopeArgs(torch.ones_like(cos), torch.zeros_like(sin), None, None, 1e-6)  # position does not matter: exact
    made = LayerCache(*(torch.zeros(16, kv_heads, dim, dtype=FP8) for _ in "kv"))
    kernels.rope_and_store(qkv.clone(), plan, rope, made)
    expected = qkv.clamp(-448, 448).view(3, 3, dim)
    assert torch.equal(made.k[[5, 9]].float(), expected[:2, 1:2])
    assert torch.equal(made.v[[5, 9]].float(), expected[:2, 2:])
    assert made.v.float().count_nonzero() == expected[:2, 2:].count_nonzero()
    fused = LayerCache(*(torch.zeros(16, kv_heads, dim, dtype=FP8) for _ in "kv"))
    rotary = Rotary(plan.positions, plan.slots, rope.cos, rope.sin, fused.k, fused.v)
    linear(qkv, kernels.pack(torch.eye(3 * dim)), rotary=rotary)
    assert torch.equal(fused.k.float(), made.k.float())
    assert torch.equal(fused.v.float(), made.v.float())


def test_accepted_paths_are_moved_byte_by_byte() -> None:
    storage = torch.randn(2, 2, 8, 1, 16).to(FP8)
    before = storage.clone()
    compact(storage, torch.tensor([[0, 2, 4, 6]]), torch.tensor([[1, 2, -1]]))
    assert torch.equal(storage[:, :, 2].float(), before[:, :, 4].float())
    assert torch.equal(storage[:, :, 4].float(), before[:, :, 6].float())
    assert torch.equal(storage[:, :, 6].float(), before[:, :, 6].float())
