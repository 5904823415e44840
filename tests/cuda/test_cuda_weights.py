"""Weights of codes and a cache in fp8 on a CUDA device: the bits of a product are those of the expanded weight, and a
row's bits do not depend on its pass."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import Tensor

from paceline.models.decoder import Decoder
from paceline.models.kernels import kernels_for
from paceline.models.load.placement import expected_shapes
from paceline.models.weights import Dtypes, Linear, StoredWeight, WeightKind
from paceline.platform.triton import compile_together
from paceline.testing import logits_of
from tests.helpers.random_llama import llama
from tests.models.test_weights import codes_of

pytestmark = pytest.mark.cuda
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BF16 = torch.bfloat16
CONFIG = llama(hidden_size=128, intermediate_size=192)
FORMS = [  # kind, what is beside scales, group, dtype of scales, shape
    ("fp8", "none", 192, torch.float32, (192, 192)),
    ("fp8", "none", 192, torch.float32, (64, 4096)),  # in two segments
    ("int8", "none", 64, BF16, (192, 192)),
    ("int8", "none", 32, torch.float16, (16384, 576)),  # wide tiles, one step of k a turn
    ("int8", "offsets", 32, torch.float16, (192, 192)),
    ("int8", "zeros", 1024, BF16, (80, 1024)),  # a scale a row; strips that do not fill a tile
    ("int4", "none", 64, BF16, (192, 192)),
    ("int4", "none", 128, BF16, (224, 1536)),  # more stages than the ring has
    ("int4", "none", 192, BF16, (192, 384)),  # groups that a stage of 128 columns would not divide
    ("int4", "zeros", 32, torch.float16, (64, 4096)),
    ("int4", "offsets", 32, torch.float32, (192, 192)),
]
ROWS = (1, 9, 17, 40, 130, 300)  # one for each choice of tiles; expanded beforehand from 257 on
FEW = (1, 40, 300)  # kernels take a second each to compile: all tiles for one form of each kind
HEADS = [  # kind, q heads, dim, rows
    *(("int4", 3, dim, 17) for dim in (32, 64, 96, 128, 256)),
    *((kind, 3, 96, 17) for kind in ("fp8", "int8")),
    *(("int4", 126, 128, rows) for rows in (17, 130)),  # weights of so many rows take other tiles
]


def coded(kind: str, n: int, k: int, group: int, shift: str, dtype: torch.dtype, seed: int = 0) -> StoredWeight:
    weight = codes_of(WeightKind[kind.upper()], n, k, group if k % group == 0 else 32, shift, seed)
    if weight.kind is WeightKind.FP8:
        return weight.to(None, DEVICE)
    assert weight.scales is not None
    offsets = None if weight.offsets is None else (weight.offsets / 16).to(dtype)
    return replace(weight, scales=(weight.scales / 4).to(dtype), offsets=offsets).to(None, DEVICE)


def uses(x: Tensor, packed: Linear) -> list[Tensor]:
    from paceline.models.backends.cuda.linear import linear

    return [linear(x, packed, gated="silu"), linear(x, packed, out_dtype=torch.float32)]


@pytest.mark.parametrize(("kind", "shift", "group", "dtype", "shape"), FORMS)
def test_a_product_with_codes_has_the_bits_of_the_expanded_weight_in_any_pass(kind, shift, group, dtype, shape):
    n, k = shape
    kernels = kernels_for(DEVICE)
    weight, bias = coded(kind, n, k, group, shift, dtype), torch.randn(n, device=DEVICE).to(BF16)
    packed = kernels.pack(weight, bias)
    assert packed.weight.kind is weight.kind
    x = torch.randn(max(ROWS), k, device=DEVICE).to(BF16)
    several = ROWS if shift == "none" and shape in ((192, 192), (16384, 576)) else FEW
    compile_together(DEVICE, [lambda rows=rows: uses(x[:rows].contiguous(), packed) for rows in several])
    every = uses(x, packed)
    for rows in several:
        for some, whole in zip(uses(x[:rows].contiguous(), packed), every, strict=True):
            assert torch.equal(some, whole[:rows]), rows
    if weight.kind is not WeightKind.FP8:
        plain = kernels.pack(weight.numbers().to(BF16), bias)
        for given, expected in zip(every, uses(x, plain), strict=True):
            assert torch.equal(given, expected)
        return
    assert weight.scales is not None
    sums = uses(x, kernels.pack(weight.data.to(BF16)))[1]
    tolerance = 1e-5 * float(sums.abs().max())
    torch.testing.assert_close(every[1], sums * weight.scales[:, 0] + bias.float(), rtol=1e-6, atol=tolerance)


@pytest.mark.parametrize(("kind", "heads", "dim", "rows"), HEADS)
def test_heads_of_any_size_are_rotated_as_with_the_expanded_weight(kind, heads, dim, rows):
    from paceline.models.backends.cuda.linear import Rotary, linear

    kv_heads, k = 1, 256
    n = (heads + 2 * kv_heads) * dim
    kernels, angles = kernels_for(DEVICE), torch.rand(3 * rows, dim // 2, device=DEVICE)
    packed = kernels.pack(coded(kind, n, k, 64, "none", BF16), torch.randn(n, device=DEVICE).to(BF16))
    x = torch.randn(rows, k, device=DEVICE).to(BF16)
    order = torch.arange(rows, device=DEVICE, dtype=torch.int32)

    def run() -> list[Tensor]:
        caches = [torch.zeros(rows, kv_heads, dim, device=DEVICE, dtype=BF16) for _ in "kv"]
        slots = torch.where(order % 5 == 4, -1, order)
        return [linear(x, packed, rotary=Rotary(order * 3, slots, angles.cos(), angles.sin(), *caches)), *caches]

    found = run()
    with mock.patch("paceline.models.backends.cuda.linear.streams", return_value=False):
        expected = run()
    assert all(map(torch.equal, found, expected))


def test_large_scales_are_multiplied_exactly():
    kernels = kernels_for(DEVICE)
    weight = coded("int4", 64, 256, 64, "none", BF16)
    assert weight.scales is not None
    weight = replace(weight, scales=weight.scales + 3.0)
    x = torch.randn(5, 256, device=DEVICE).to(BF16)
    packed, plain = kernels.pack(weight), kernels.pack(weight.numbers().to(BF16))
    for given, expected in zip(uses(x, packed), uses(x, plain), strict=True):
        assert torch.equal(given, expected)


def logits(decoder: Decoder, tokens: list[int], chunks: list[int]) -> Tensor:
    """Copied from every pass: the next one overwrites them."""
    forward = decoder.forward
    with mock.patch.object(decoder, "forward", lambda *given: SimpleNamespace(logits=forward(*given).logits.clone())):
        return logits_of(decoder, tokens, chunks, block_size=16)


@pytest.mark.parametrize(
    ("kind", "cache"),
    [
        *((kind, None) for kind in ("bf16", "fp8", "int8", "int4")),
        *((kind, torch.float8_e4m3fn) for kind in ("bf16", "int4")),
    ],
)
def test_a_token_has_the_same_logits_alone_and_in_any_pass(kind, cache):
    generator = torch.Generator().manual_seed(3)

    def made(at: int, name: str, shape: tuple[int, ...]) -> Tensor | StoredWeight:
        if len(shape) == 1:
            return 1 + 0.2 * torch.randn(shape, generator=generator)
        if kind != "bf16" and "proj" in name:
            return coded(kind, *shape, 32, "none", torch.float16, at)
        return torch.randn(shape, generator=generator) / shape[1] ** 0.5

    weights = {name: made(at, name, shape) for at, (name, shape) in enumerate(expected_shapes(CONFIG).items())}
    dtypes = Dtypes.of(None, DEVICE, cache)
    decoder = Decoder(CONFIG, weights, kernels_for(DEVICE), device=DEVICE, dtypes=dtypes)
    if kind != "bf16":
        assert all(product.weight.kind.label == kind for layer in decoder.layers for product in layer.products)
    tokens = torch.randint(0, CONFIG.vocab_size, (200,), generator=generator).tolist()
    with torch.inference_mode():
        alone = logits(decoder, tokens, [64] + [1] * 136)
        for chunks in ([64, *[8] * 17], [64, 40, 96], [200]):
            assert torch.equal(logits(decoder, tokens, chunks), alone)
