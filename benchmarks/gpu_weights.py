"""Weights stored as codes on a GPU: bits, products by tile, and passes of an 8B-shaped model, for each kind.

    python -m benchmarks.gpu_weights bits tiles passes [--tiny] [--kinds fp8 int4 ...]

The bits of a product are compared between numbers of rows, and with the same weight expanded to bf16 beforehand.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
import triton
from torch import Tensor

from benchmarks.gpu.passes import Bench, device_ms
from benchmarks.gpu.yardstick import Size
from paceline.models.backends.cuda.codes import codes
from paceline.models.backends.cuda.codes.codes import Ring, expanded, ring_for
from paceline.models.backends.cuda.kernels import TritonKernels
from paceline.models.backends.cuda.linear import Rotary, linear
from paceline.models.decoder import Decoder
from paceline.models.kernels import kernels_for
from paceline.models.load.loader import expected_shapes
from paceline.models.spec import ModelConfig
from paceline.models.weights import Dtypes, Linear, StoredWeight, WeightKind
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
SIZE = Size()
LINEARS = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
BEST: dict[tuple[WeightKind, tuple[int, int], int], Ring] = {}  # rings by kind, shape and rows, once tried
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


def uses(
    shapes: dict[str, tuple[int, int]], dim: int, kv_heads: int, rows: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    angles = torch.rand(4096, dim // 2, device=DEVICE)
    caches = [torch.zeros(256, kv_heads, dim, device=DEVICE, dtype=BF16) for _ in "kv"]
    order = torch.arange(rows, device=DEVICE, dtype=torch.int32)
    rotary = Rotary(order * 7, order, angles.cos(), angles.sin(), *caches)
    for name in shapes:
        yield name, {"qkv": {"rotary": rotary}, "gate_up": {"gated": True}}.get(name, {})


def bits(kinds: list[str], tiny: bool) -> dict[str, Any]:
    shapes, dim, kv_heads = (TINY_LINEARS, 32, 1) if tiny else (LINEARS, SIZE.head_dim, SIZE.kv_heads)
    kernels, found = TritonKernels(DEVICE), {}
    for kind, (name, use) in itertools.product(kinds, uses(shapes, dim, kv_heads, 300)):
        n, k = shapes[name]
        weight = made(kind, n, k)
        packed = kernels.pack(weight, 0.1 * torch.randn(n, device=DEVICE).to(BF16))
        assert packed.weight.kind is weight.kind
        x = torch.randn(300, k, device=DEVICE).to(BF16)

        def run(rows: int, by: Linear = packed, use: dict[str, Any] = use, x: Tensor = x) -> list[Tensor]:
            given = use
            if "rotary" in use:
                for cache in (use["rotary"].k_cache, use["rotary"].v_cache):
                    cache.zero_()
                parts = {field: getattr(use["rotary"], field)[:rows] for field in ("positions", "slots")}
                slots = torch.where(parts["slots"] < 256, parts["slots"], -1)
                given = {"rotary": replace(use["rotary"], positions=parts["positions"], slots=slots)}
            out = linear(x[:rows].contiguous(), by, **given)
            if "rotary" not in use:
                return [out]
            return [out, *(cache[:rows].clone() for cache in (use["rotary"].k_cache, use["rotary"].v_cache))]

        several = (3, 64) if tiny else (2, 3, 8, 16, 17, 33, 64, 65, 128, 200, 256, 300)
        if not INTERPRETED:
            with parallel_compile():
                for rows in (1, 40, *several):
                    run(rows)
        one = run(1)
        wrong = [rows for rows in several
                 if any(not torch.equal(a[:1], b) for a, b in zip(run(rows), one, strict=True))]  # fmt: skip
        many, halves = run(64), run(40)
        wrong += [-40] * any(not torch.equal(a[:40], b) for a, b in zip(many, halves, strict=True))
        row = {"other rows": wrong}
        if weight.kind is not WeightKind.FP8:
            plain = kernels.pack(expanded(packed.weight, BF16), packed.bias)
            row["kernel's expansion"] = bool((expanded(packed.weight, BF16) == weight.numbers().to(BF16)).all())
            row["expanded"] = [rows for rows in (1, 17, 64) if not all(map(torch.equal, run(rows), run(rows, plain)))]
        else:
            assert weight.scales is not None
            exact = x[:64].double() @ (weight.data.double() * weight.scales.double()).t()
            exact += 0 if packed.bias is None else packed.bias.double()
            if not use:
                row["error"] = float((many[0].double() - exact).abs().max() / exact.std())
        found[f"{kind} {name}"] = row
        print(f"   {kind:<9} {name:<8} {row}", flush=True)
    return found


def rings(rows: int, name: str) -> Iterator[Ring]:
    m, wide = max(8, int(triton.next_power_of_2(rows))), name == "gate_up"
    if m <= 16:
        narrow = ((64, 4, 4), (64, 4, 6), (64, 8, 3), (64, 8, 4))
        found = ((256, 2, 5, 8), (256, 4, 2, 8), (256, 4, 3, 8), (128, 4, 3), (128, 2, 6)) if wide else narrow
    else:
        narrow = ((64, 2, 4), (64, 2, 6), (64, 4, 3))
        found = ((256, 2, 3, 8), (256, 1, 5, 8), (128, 2, 4), (128, 2, 3, 8)) if wide else narrow
    yield from (Ring(m, *each) for each in found)


def tiles(kinds: list[str], tiny: bool) -> dict[str, Any]:
    """Microseconds of a product by ring, over as many weights as exceed the cache; bf16 beside it."""
    shapes, dim, kv_heads = (TINY_LINEARS, 32, 1) if tiny else (LINEARS, SIZE.head_dim, SIZE.kv_heads)
    kernels, found, started = TritonKernels(DEVICE), {}, time.perf_counter()
    for kind, (name, (n, k)) in itertools.product(kinds, shapes.items()):
        copies = 1 if tiny else max(2, math.ceil(200e6 / made(kind, n, k).nbytes))
        weights = [kernels.pack(made(kind, n, k)) for _ in range(copies)]
        plain = [kernels.pack(torch.randn(n, k, device=DEVICE).to(BF16)) for _ in range(1 if tiny else 2)]
        work: dict[tuple[int, Any], Callable[[], Any]] = {}
        for rows in (1, 64):
            x = torch.randn(rows, k, device=DEVICE).to(BF16)
            use = dict(uses(shapes, dim, kv_heads, rows))[name]
            many = {**use, "in_segments": True}
            work[rows, "bf16"] = lambda x=x, many=many, plain=plain: [linear(x, each, **many) for each in plain]
            for ring in () if tiny else rings(rows, name):
                work[rows, ring] = lambda x=x, many=many, ring=ring, weights=weights: [
                    linear(x, each, **many, ring=ring) for each in weights
                ]
            work[rows, "default"] = lambda x=x, many=many, weights=weights: [
                linear(x, each, **many) for each in weights
            ]
        if not INTERPRETED:
            with parallel_compile():
                for each in work.values():
                    each()
        expected = {rows: work[rows, "default"]() for rows in (1, 64)}
        for (rows, ring), each in work.items():
            if isinstance(ring, Ring) and not all(
                map(torch.equal, _if_it_fits(each) or expected[rows], expected[rows])
            ):
                print(f"   OTHER BITS {kind} {name} {rows} {ring}", flush=True)
        timed = {key: _timed(each, len(plain if key[1] == "bf16" else weights)) for key, each in work.items()}
        for rows in (1, 64):
            found_here = {ring: us for (count, ring), us in timed.items() if count == rows and isinstance(ring, Ring)}
            if found_here:
                BEST[KINDS[kind][0], (n, k), rows] = min(found_here, key=lambda ring: found_here[ring])
            best = sorted((us, str(ring)) for ring, us in found_here.items())
            gb = 1e-3 * weights[0].nbytes
            default = timed[rows, "default"]
            found[f"{kind} {name} {rows}"] = {"bf16": timed[rows, "bf16"], "default": default, "best": best[:3]}
            print(
                f"   {kind} {name} {rows} rows: bf16 {timed[rows, 'bf16']:.1f} us, default {default:.1f} us", flush=True
            )
            for us, ring in best:
                print(f"      {us:6.1f} us {gb / us:5.0f} GB/s {ring}", flush=True)
        print(f"   ({time.perf_counter() - started:.0f} s)", flush=True)
    return found


def _if_it_fits(work: Callable[[], Any]) -> Any:
    try:
        return work()
    except triton.OutOfResources as problem:
        print(f"   {problem}", flush=True)
        return None


def _timed(work: Callable[[], Any], count: int) -> float:
    if DEVICE.type == "cpu":
        return 1e3 * device_ms(work, 1, 0) / count
    if _if_it_fits(work) is None:
        return math.inf
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return 1e3 * device_ms(graph.replay, 12, 3) / count


def best_ring(rows: int, n: int, k: int, kind: WeightKind, group: int = 0) -> Ring:
    """`k`: columns that one program sums."""
    shape = next(((n, whole) for whole in (k, 2 * k) if (n, whole) in LINEARS.values()), (0, 0))
    tried = BEST.get((kind, shape, 1 if rows <= 16 else 64)) if rows <= 16 or 32 < rows <= 64 else None
    default = ring_for(rows, n, k, kind, group)
    return default if tried is None else replace(tried, m=default.m)


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
    config = ModelConfig(
        architecture="llama", vocab_size=512 if tiny else 49152, hidden_size=64 if tiny else SIZE.hidden,
        intermediate_size=128 if tiny else SIZE.intermediate, num_layers=2 if tiny else SIZE.layers,
        num_heads=2 if tiny else SIZE.heads, num_kv_heads=1 if tiny else SIZE.kv_heads,
        head_dim=32 if tiny else SIZE.head_dim, max_positions=8192, tie_embeddings=False,
    )  # fmt: skip
    found: dict[str, Any] = {}
    several = ["bf16", *kinds] if tiny else ["bf16", *kinds, f"{kinds[0]} kv8"]
    for kind, by_tiles in itertools.product(several, (False, True) if BEST else (False,)):
        if by_tiles and kind == "bf16":
            continue
        dtypes = Dtypes.of(None, DEVICE, torch.float8_e4m3fn if kind.endswith("kv8") else None)
        codes.ring_for = best_ring if by_tiles else ring_for
        kernels = TritonKernels(DEVICE) if tiny else kernels_for(DEVICE)
        decoder = Decoder(config, Coded(config, kind.split()[0]), kernels, device=DEVICE, dtypes=dtypes)
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
        if not tiny:
            alone = torch.cat(
                [bench.forward(tokens[at : at + 1], bench.chain(context + at, 1)).clone() for at in range(8)]
            )
            row["same bits"] = torch.equal(bench.forward(tokens[:8], bench.chain(context, 8)), alone)
        found[kind + " by tiles" * by_tiles] = row
        print(f"   {kind:<9} {'by tiles ' if by_tiles else ''}{row}", flush=True)
        del decoder, bench
        gc.collect()  # graphs and their decoder refer to each other
        if DEVICE.type == "cuda":
            torch.cuda.empty_cache()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="+", choices=["bits", "tiles", "passes"])
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(0)
    found = {}
    with torch.inference_mode():
        for part in args.parts:
            print(part, flush=True)
            found[part] = {"bits": bits, "tiles": tiles, "passes": passes}[part](args.kinds, args.tiny)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
