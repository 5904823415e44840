"""Weights stored as codes on a GPU: bits, products, and passes of an 8B-shaped model, for each kind.

    python -m benchmarks.gpu_weights bits products passes [--tiny] [--kinds fp8 int4 ...]

The bits of a product are compared between numbers of rows, and with the same weight expanded to bf16 beforehand.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.passes import Bench, device_ms
from benchmarks.gpu.yardstick import Size
from benchmarks.harness import finish
from paceline.models.backends.cuda.kernels import TritonKernels
from paceline.models.backends.cuda.linear import Rotary, linear
from paceline.models.decoder import Decoder
from paceline.models.kernels import kernels_for
from paceline.models.load.placement import expected_shapes
from paceline.models.spec import ModelConfig, uniform
from paceline.models.weights import Dtypes, StoredWeight, WeightKind
from paceline.platform.launch import INTERPRETED
from paceline.platform.triton import parallel_compile

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BF16 = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32  # the interpreter does not multiply bf16
KINDS = {  # kind, group, dtype of scales, what is beside them
    "fp8": (WeightKind.FP8, 0, torch.float32, None),
    "int4": (WeightKind.INT4, 128, torch.bfloat16, None),
    "int4_awq": (WeightKind.INT4, 128, torch.float16, "zeros"),
    "int4_32": (WeightKind.INT4, 32, torch.float16, None),
    "q4_1": (WeightKind.INT4, 32, torch.float16, "offsets"),
    "int8": (WeightKind.INT8, 128, torch.bfloat16, None),
    "q8_0": (WeightKind.INT8, 32, torch.float16, None),
}
SIZE, ROWS = Size(), (1, 16, 64)
LINEARS = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
TINY_LINEARS = {"qkv": (128, 64), "o": (64, 64), "gate_up": (128, 64), "down": (16, 4096)}


def made(name: str, n: int, k: int) -> StoredWeight:
    """Random codes with scales that give weights of about 0.02."""
    kind, group, dtype, beside = KINDS[name]
    groups = (n, 1 if group == 0 else k // min(group, k))
    scales = (0.5 + torch.rand(groups, device=DEVICE)) * 0.02
    if kind is WeightKind.FP8:
        return StoredWeight.of_codes(kind, torch.randn(n, k, device=DEVICE).to(kind.dtype), scales)
    nibbles = kind is WeightKind.INT4
    data = torch.randint(0, 256, (n, k // 2 if nibbles else k), device=DEVICE, dtype=torch.uint8)
    scales = (scales / (4 if nibbles else 64)).to(dtype)
    zeros = torch.randint(5, 11, groups, device=DEVICE) if beside == "zeros" else None
    offsets = (-8 * scales.float() * torch.rand(groups, device=DEVICE)).to(dtype) if beside == "offsets" else None
    return StoredWeight.of_codes(kind, data if nibbles else data.view(torch.int8), scales, zeros=zeros, offsets=offsets)


def use_of(name: str, dim: int, kv_heads: int, rows: int) -> dict[str, Any]:
    """Return what else a product gets as the engine uses it."""
    angles = torch.rand(4096, dim // 2, device=DEVICE)
    caches = [torch.zeros(256, kv_heads, dim, device=DEVICE, dtype=BF16) for _ in "kv"]
    order = torch.arange(rows, device=DEVICE, dtype=torch.int32)
    rotary = Rotary(order * 7, order, angles.cos(), angles.sin(), *caches)
    return {"qkv": {"rotary": rotary}, "gate_up": {"gated": True}}.get(name, {})


def bits(kinds: list[str], tiny: bool) -> dict[str, Any]:
    """Return the numbers of rows in which a product differs from that of 300 rows, or from the expanded weight's."""
    kernels, found = TritonKernels(DEVICE), {}
    several = (1, 3, 64) if tiny else (1, 2, 3, 8, 16, 17, 33, 40, 64, 65, 128, 200, 256, 300)
    for kind, (name, (n, k)) in itertools.product(kinds, (TINY_LINEARS if tiny else LINEARS).items()):
        weight, bias = made(kind, n, k), 0.1 * torch.randn(n, device=DEVICE).to(BF16)
        packed = kernels.pack(weight, bias)
        x, gated = torch.randn(max(several), k, device=DEVICE).to(BF16), "silu" if name == "gate_up" else None
        if not INTERPRETED:
            with parallel_compile():
                for rows in several:
                    linear(x[:rows].contiguous(), packed, gated=gated)
        whole = linear(x, packed, gated=gated)
        some = {rows: linear(x[:rows].contiguous(), packed, gated=gated) for rows in several}
        row = {"other rows": [rows for rows, one in some.items() if not torch.equal(one, whole[:rows])]}
        if weight.kind is not WeightKind.FP8:
            plain = kernels.pack(weight.numbers().to(BF16), bias)
            theirs = {rows: linear(x[:rows].contiguous(), plain, gated=gated) for rows in several}
            row["expanded"] = [rows for rows, one in some.items() if not torch.equal(one, theirs[rows])]
        found[f"{kind} {name}"] = row
        print(f"   {kind:<9} {name:<8} {row}", flush=True)
    return found


def products(kinds: list[str], tiny: bool) -> dict[str, Any]:
    """Return microseconds of a product, over as many weights as exceed the cache; bf16 beside it."""
    shapes, dim, kv_heads = (TINY_LINEARS, 32, 1) if tiny else (LINEARS, SIZE.head_dim, SIZE.kv_heads)
    kernels, found = TritonKernels(DEVICE), {}
    for kind, (name, (n, k)) in itertools.product(kinds, shapes.items()):
        copies = 1 if tiny else max(2, math.ceil(200e6 / made(kind, n, k).nbytes))
        weights = {
            kind: [kernels.pack(made(kind, n, k)) for _ in range(copies)],
            "bf16": [kernels.pack(torch.randn(n, k, device=DEVICE).to(BF16)) for _ in range(1 if tiny else 2)],
        }
        work: dict[str, Callable[[], Any]] = {}
        for rows, (each, packed) in itertools.product(ROWS, weights.items()):
            x = torch.randn(rows, k, device=DEVICE).to(BF16)
            use = {**use_of(name, dim, kv_heads, rows), "in_segments": True}
            work[f"{each} {rows}"] = lambda x=x, use=use, packed=packed: [linear(x, one, **use) for one in packed]
        if not INTERPRETED:
            with parallel_compile():
                for each_work in work.values():
                    each_work()
        us = {what: timed_us(each_work, len(weights[what.split()[0]])) for what, each_work in work.items()}
        found[f"{kind} {name}"] = us
        print(f"   {kind} {name}, us by rows: {us}", flush=True)
    return found


def timed_us(work: Callable[[], Any], count: int) -> float:
    if DEVICE.type == "cpu":
        return 1e3 * device_ms(work, 1, 0) / count
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return 1e3 * device_ms(graph.replay, 12, 3) / count


class Coded(Mapping[str, Tensor | StoredWeight]):
    """Weights of a model by name, made when asked for: projections as codes, everything else in bf16."""

    def __init__(self, config: ModelConfig, kind: str) -> None:
        self.shapes, self.kind = expected_shapes(config), kind

    def __len__(self) -> int:
        return len(self.shapes)

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __getitem__(self, name: str) -> Tensor | StoredWeight:
        shape = self.shapes[name]
        if len(shape) == 1:
            return torch.ones(shape, device=DEVICE, dtype=BF16)
        if "proj" in name and self.kind != "bf16":
            return made(self.kind, *shape)
        return (0.02 * torch.randn(shape, device=DEVICE)).to(BF16)


def passes(kinds: list[str], tiny: bool) -> dict[str, Any]:
    config = uniform(
        architecture="llama", vocab_size=512 if tiny else 49152, hidden_size=64 if tiny else SIZE.hidden,
        intermediate_size=128 if tiny else SIZE.intermediate, num_layers=2 if tiny else SIZE.layers,
        num_heads=2 if tiny else SIZE.heads, num_kv_heads=1 if tiny else SIZE.kv_heads,
        head_dim=32 if tiny else SIZE.head_dim, max_positions=8192, tie_embeddings=False,
    )  # fmt: skip
    found: dict[str, Any] = {}
    for kind in ("bf16", *kinds):
        dtypes = Dtypes.of(None, DEVICE)
        kernels = TritonKernels(DEVICE) if tiny else kernels_for(DEVICE)
        decoder = Decoder(config, Coded(config, kind), kernels, device=DEVICE, dtypes=dtypes)
        context = 30 if tiny else 1024
        bench = Bench(decoder, context + 64)
        row: dict[str, Any] = {"memory_gb": torch.cuda.memory_allocated() / 1e9 if DEVICE.type == "cuda" else 0}
        tokens = torch.randint(0, 500, (64,))
        for rows in (1, 2) if tiny else (1, 4, 16, 32, 64, 128):
            plan = bench.chain(context - 64 if rows > 64 else context, rows)
            given = tokens.repeat(2)[:rows].to(DEVICE)
            row[f"{rows}"] = device_ms(
                lambda bench=bench, plan=plan, given=given: bench.forward(given, plan), 1 if tiny else 30
            )
        found[kind] = row
        print(f"   {kind:<9} {row}", flush=True)
        del decoder, bench
        gc.collect()  # graphs and their decoder refer to each other
        if DEVICE.type == "cuda":
            torch.cuda.empty_cache()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=("bits", "products", "passes"))
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--tiny", action="store_true", help="a small shape, to try the script")
    args = parser.parse_args()
    torch.manual_seed(0)
    with torch.inference_mode():
        run = {"bits": bits, "products": products, "passes": passes}
        finish("gpu_weights", {part: run[part](args.kinds, args.tiny) for part in args.parts})


if __name__ == "__main__":
    main()
