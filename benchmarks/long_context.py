"""Passes of 1 and 8 rows behind long contexts on a CPU, by the dtype of K and V, with int8 activations.

The cache is filled with random K and V: a pass reads as much of them as behind a real prompt, which would take minutes.
Processor time of one thread, the least of some rounds: other processes can only add to it.

    python -m benchmarks.long_context --target FILE.gguf [--contexts 200 2000 6000] [--kv-dtypes auto bfloat16 int8]
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch

from benchmarks.harness import finish
from paceline.models.decoder import Decoder
from paceline.models.kv_cache import KVCache
from paceline.models.load.open_model import load_model
from paceline.models.plan import PassPlan

BLOCK = 16
ROWS = (1, 8)


def filled(decoder: Decoder, positions: int) -> KVCache:
    cache = KVCache(
        decoder.kv_specs,
        num_blocks=-(-positions // BLOCK),
        block_size=BLOCK,
        dtype=decoder.cache_dtype,
        device=decoder.device,
    )
    slots = torch.arange(cache.num_blocks * BLOCK)
    for layer in cache.layers:
        numbers = torch.randn(2, *layer.k.shape)
        layer.write(slots, *numbers)
    return cache


@torch.inference_mode()
def seconds(decoder: Decoder, cache: KVCache, context: int, rows: int, rounds: int) -> float:
    positions = torch.arange(context, context + rows, dtype=torch.int32)
    tables, tokens = torch.arange(cache.num_blocks, dtype=torch.int32)[None], torch.arange(rows)
    times = []
    for _ in range(rounds + 1):
        plan = PassPlan.in_order(positions, positions, torch.zeros_like(positions), tables, BLOCK, context + rows)
        started = time.thread_time()
        decoder.forward(tokens, plan, cache.layers, torch.arange(rows))
        times.append(time.thread_time() - started)
    return min(times[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True, metavar="FILE", help="a GGUF file")
    parser.add_argument("--contexts", type=int, nargs="+", default=[200, 2000, 6000])
    parser.add_argument("--kv-dtypes", nargs="+", default=["auto", "bfloat16", "int8"])
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    result: dict[str, dict[str, float]] = {}
    for name in args.kv_dtypes:
        decoder = load_model(args.target, device="cpu", threads=1, activations="int8", kv_dtype=name).decoder
        cache = filled(decoder, max(args.contexts) + max(ROWS))
        ms = {
            f"{rows} rows behind {context}": 1e3 * seconds(decoder, cache, context, rows, args.rounds)
            for context in args.contexts
            for rows in ROWS
        }
        size = KVCache.bytes_per_block(decoder.kv_specs, 1, decoder.cache_dtype)
        print(f"{name}: {size} bytes a token, ms: {', '.join(f'{key} {value:.1f}' for key, value in ms.items())}")
        result[name] = {"bytes_per_token": size, **ms}
    finish("long_context", {"target": args.target.name, "kv_dtypes": result})


if __name__ == "__main__":
    main()
