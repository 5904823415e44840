"""What one target pass costs by its number of tokens: this is what speculation lives on.

One sequence of `--context` tokens, then passes over n further tokens of it with logits for every one: the shape of
verification.

    python benchmarks/pass_cost.py [--context 256] [--rounds 15]
"""

from __future__ import annotations

import argparse
import statistics

import torch
from common import finish, interleaved, ratio

from paceline.models.kv_cache import KVCache
from paceline.models.load.hub import resolve
from paceline.models.load.open_model import load_model
from paceline.models.plan import PassPlan

SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 64)
BLOCK = 16


def chain_plan(first: int, count: int, num_blocks: int) -> PassPlan:
    """`count` tokens from position `first` of a sequence whose blocks are 0, 1, 2, ..."""
    positions = torch.arange(first, first + count, dtype=torch.int32)
    return PassPlan.in_order(
        positions,
        positions,
        torch.zeros_like(positions),
        torch.arange(num_blocks, dtype=torch.int32)[None],
        BLOCK,
        first + count,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args()

    decoder = load_model(resolve("smollm2"), dtype=args.dtype, device="cpu").decoder
    num_blocks = (args.context + max(SIZES)) // BLOCK + 1
    cache = KVCache(
        decoder.kv_specs, num_blocks=num_blocks, block_size=BLOCK, dtype=decoder.cache_dtype, device=decoder.device
    )

    @torch.inference_mode()
    def run(first: int, count: int, rows: int) -> None:
        tokens = torch.arange(count) % decoder.config.vocab_size
        decoder.forward(tokens, chain_plan(first, count, num_blocks), cache.layers, torch.arange(rows))

    torch.set_num_threads(decoder.torch_threads or torch.get_num_threads())  # as the engine does: else they spin
    run(0, args.context, 1)
    times = interleaved({str(n): (lambda n=n: run(args.context, n, n)) for n in SIZES}, args.rounds, warmup=2)
    ratios = {n: ratio(times[n], times["1"]) for n in times}
    print("tokens      ms   against one token")
    for n, seconds in times.items():
        r = ratios[n]
        goal = {"8": "  (goal 1.5x)", "16": "  (goal 2.1x)"}.get(n, "")
        milliseconds = 1e3 * statistics.median(seconds)
        print(f"{n:>6}  {milliseconds:6.2f}   {r['median']:.2f}x [{r['low']:.2f}, {r['high']:.2f}]{goal}")
    finish(
        "pass_cost",
        {
            "kernels": decoder.kernels.name,
            "dtype": args.dtype,
            "context": args.context,
            "ms": {n: 1e3 * statistics.median(seconds) for n, seconds in times.items()},
            "against_one": ratios,
            "rounds": args.rounds,
        },
    )


if __name__ == "__main__":
    main()
