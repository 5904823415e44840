# ruff: noqa: E402
"""Weights of codes on CUDA, through Triton's interpreter: the kernels' layout stands for the same numbers, and products
have the bits of products with the weights expanded beforehand. `streamed` needs a GPU: test_cuda_weights.py."""

from __future__ import annotations

import itertools
import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.helpers.interpreter import require_interpreter

require_interpreter()

from paceline.engine.policy.priors import GPU, GPU_CODES, prior_of
from paceline.models.backends.cuda.codes.codes import MOST_ROWS, expanded, laid_out, ring_for
from paceline.models.backends.cuda.kernels import TritonKernels
from paceline.models.backends.cuda.linear import Rotary, linear
from paceline.models.buckets import alike
from paceline.models.quant.code_blocks import as_codes
from paceline.models.weights import BLOCKS, Linear, StoredWeight, WeightKind
from tests.models.test_weights import codes_of

CPU = torch.device("cpu")
FORMS = [(WeightKind.FP8, "none"), *((kind, shift) for kind in (WeightKind.INT8, WeightKind.INT4) for shift in
         ("none", "zeros", "offsets"))]  # fmt: skip


@pytest.fixture(scope="module")
def kernels() -> TritonKernels:
    return TritonKernels(CPU)


def numbers_of(weight: StoredWeight) -> torch.Tensor:
    """Return the numbers that enter products: the codes alone for FP8."""
    return weight.data.float() if weight.kind is WeightKind.FP8 else weight.numbers()


def in_full(weight: StoredWeight) -> torch.Tensor:
    """In fp32: the interpreter neither rounds to bf16 nor multiplies it as a GPU does."""
    return expanded(weight, torch.float32)


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize(("kind", "shift"), FORMS)
def test_codes_laid_out_for_the_kernels_expand_to_the_same_numbers(kind: WeightKind, shift: str, group: int) -> None:
    weight = codes_of(kind, 32, 128, group, shift)
    assert torch.equal(in_full(laid_out(weight)), numbers_of(weight))


@pytest.mark.parametrize("rows", [3, 70])
@pytest.mark.parametrize(("kind", "shift"), [(WeightKind.INT8, "zeros"), (WeightKind.INT4, "none")])
def test_a_product_with_codes_has_the_bits_of_one_with_the_expanded_weight(kernels, kind, shift, rows) -> None:
    parts = [codes_of(kind, 32, 128, 64, shift, seed) for seed in (1, 2)]
    bias = torch.randn(64)
    packed = kernels.pack(parts, bias)
    assert packed.weight.kind is kind
    plain = kernels.pack(in_full(packed.weight), bias)
    x = 0.01 * torch.randn(rows, 128)
    assert torch.equal(linear(x, packed), linear(x, plain))
    assert torch.equal(linear(x, packed, gated="silu"), linear(x, plain, gated="silu"))


def test_an_fp8_product_is_the_sum_over_codes_times_the_rows_scale(kernels: TritonKernels) -> None:
    weight = codes_of(WeightKind.FP8, 64, 128, 128, "none")
    assert weight.scales is not None
    x, bias = torch.randn(5, 128), torch.randn(64)
    sums = linear(x, kernels.pack(numbers_of(weight)), out_dtype=torch.float32)
    given = linear(x, kernels.pack(weight, bias), out_dtype=torch.float32)
    assert torch.equal(given, sums * weight.scales[:, 0] + bias.float())


def test_an_fp8_product_in_segments_scales_each(kernels: TritonKernels) -> None:
    weight = codes_of(WeightKind.FP8, 16, 4096, 4096, "none")
    x = torch.randn(2, 4096)
    given = linear(x, kernels.pack(weight), out_dtype=torch.float32)
    parts = linear(x, kernels.pack(numbers_of(weight)), in_segments=True)
    assert weight.scales is not None
    assert parts.shape == (2, 2, 16)
    assert torch.equal(given, parts[0] * weight.scales[:, 0] + parts[1] * weight.scales[:, 0])
    many = torch.cat([x, torch.randn(300, 4096)])
    assert torch.equal(linear(many, kernels.pack(weight), out_dtype=torch.float32)[:2], given)


@pytest.mark.parametrize("kind", [WeightKind.FP8, WeightKind.INT4])
def test_q_k_and_v_of_codes_are_rotated_and_stored(kernels: TritonKernels, kind: WeightKind) -> None:
    dim, heads, kv_heads, rows = 32, 2, 1, 3
    weight = codes_of(kind, (heads + 2 * kv_heads) * dim, 64, 32, "none")
    packed = kernels.pack(weight)
    x = torch.randint(-2, 3, (rows, 64)).float()  # sums are exact: the interpreter's order of them is its library's
    angles = torch.rand(8, dim // 2)

    def run(fused: bool) -> list[torch.Tensor]:
        caches = [torch.zeros(4, kv_heads, dim) for _ in "kv"]
        rotary = Rotary(torch.tensor([2, 5, 7]), torch.tensor([1, -1, 3]), angles.cos(), angles.sin(), *caches)
        if fused:
            return [linear(x, packed, rotary=rotary), *caches]
        unit = Linear(StoredWeight.of(torch.eye(len(weight.data))), None)  # rotates what it is given
        return [linear(linear(x, packed), unit, rotary=rotary), *caches]

    for fused, apart in zip(run(True), run(False), strict=True):
        assert torch.equal(fused, apart)


@pytest.mark.parametrize("kind", [kind for kind in BLOCKS if kind is not WeightKind.Q6_K])
def test_blocks_as_codes_are_the_same_numbers(kernels: TritonKernels, kind: WeightKind) -> None:
    generator = torch.Generator().manual_seed(int(kind))
    data = torch.randint(0, 256, (16, 2 * BLOCKS[kind].bytes), generator=generator).to(torch.uint8)
    blocks = data.view(-1, BLOCKS[kind].bytes)
    for at in BLOCKS[kind].halves:  # finite scales
        blocks[:, at + 1] &= 0x3B
    weight = StoredWeight.of_blocks(kind, data)
    codes = as_codes(weight)
    assert codes is not None
    assert torch.equal(codes.numbers(), weight.numbers())
    packed = kernels.pack(weight)
    assert packed.weight.kind is codes.kind
    assert torch.equal(in_full(packed.weight), weight.numbers())


@pytest.mark.parametrize("kind", [WeightKind.FP8, WeightKind.INT8, WeightKind.INT4])
@pytest.mark.parametrize(("n", "k"), [(6144, 4096), (28672, 4096), (4096, 7168), (192, 192), (576, 64)])
def test_a_ring_divides_the_columns_and_is_one_for_rows_that_are_captured_alike(kind, n, k) -> None:
    for rows, group in itertools.product(range(1, MOST_ROWS + 1), (0,) if kind is WeightKind.FP8 else (32, 64, k)):
        ring = ring_for(rows, n, k, kind, group)
        columns = 64 * ring.unroll
        assert k % columns == 0
        assert group == 0 or columns % group == 0 or group % columns == 0
        assert ring.n % (16 * ring.warps) == 0
        assert ring == ring_for(alike(rows), n, k, kind, group)


def test_passes_with_codes_grow_sooner_with_their_rows() -> None:
    gpu: Any = SimpleNamespace(device=torch.device("cuda"), graphs=None)
    assert prior_of(gpu, WeightKind.INT4) == prior_of(gpu, WeightKind.Q4_K) == GPU_CODES
    assert prior_of(gpu, WeightKind.BFLOAT16) == GPU


def test_codes_that_do_not_fit_the_kernels_are_expanded_and_said_to_be(kernels, caplog) -> None:
    weight = codes_of(WeightKind.INT4, 24, 64, 32, "none")  # rows that are not strips of 16
    with caplog.at_level(logging.WARNING, "paceline"):
        packed = kernels.pack(weight)
    assert packed.weight.kind is WeightKind.FLOAT32  # bfloat16 on a GPU
    assert torch.equal(packed.weight.data, weight.numbers())
    assert "stored as int4 take the memory of bfloat16" in caplog.text


def test_a_gpu_without_the_streamed_kernel_expands_every_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.models.backends.cuda.kernels.keeps_codes", lambda device: False)
    kernels = TritonKernels(CPU)
    assert not kernels.keeps_codes
    assert not kernels.pack(codes_of(WeightKind.INT8, 32, 128, 64, "none")).weight.kind.has_scales
