"""Passes of one model with its weights expanded to fp32, kept as the file's blocks, and with int8 activations.

One sequence of `--context` tokens, then passes over n further tokens with logits for every one. All three decoders are
in one process and take turns; minima are compared, since another process can only add time. The logits of the first
two must be the same bits.

    python benchmarks/small_weights.py [--model FILE.gguf] [--context 64] [--rounds 12] [--one-core]

`--one-core` takes one thread's processor time, the only clock worth reading on a machine that others keep busy.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import common
import torch
from common import finish, interleaved
from pass_cost import BLOCK, chain_plan

from paceline.models.kv_cache import KVCache
from paceline.models.load.hub import resolve
from paceline.models.load.open_model import load_model

SIZES = (1, 4, 8, 16)
PROMPT = 256
MODES = {
    "fp32": {"dtype": "float32"},
    "blocks": {},
    "int8": {"activations": "int8"},
}


class Passes:
    """One decoder and its cache."""

    def __init__(self, path: Path, context: int, threads: int | None, options: dict[str, str]) -> None:
        self.decoder = load_model(path, device="cpu", threads=threads, **options).decoder  # type: ignore[arg-type]
        self.context, self.num_blocks = context, (context + max(*SIZES, PROMPT)) // BLOCK + 1
        self.cache = KVCache(
            self.decoder.kv_specs,
            num_blocks=self.num_blocks,
            block_size=BLOCK,
            dtype=self.decoder.cache_dtype,
            device=self.decoder.device,
        )
        self.run(0, context, 1)

    @torch.inference_mode()
    def run(self, first: int, count: int, rows: int) -> torch.Tensor:
        tokens = torch.arange(count) * 37 % self.decoder.config.vocab_size
        plan = chain_plan(first, count, self.num_blocks)
        return self.decoder.forward(tokens, plan, self.cache.layers, torch.arange(rows)).logits

    def work(self, count: int) -> object:
        rows = 1 if count == PROMPT else count
        return lambda: self.run(self.context, count, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2", help="a model whose weights are blocks")
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--one-core", action="store_true")
    args = parser.parse_args()
    if args.one_core:
        common.clock = time.thread_time

    path = resolve(args.model)
    modes = {name: Passes(path, args.context, 1 if args.one_core else None, options) for name, options in MODES.items()}
    torch.set_num_threads(1)  # of torch beside the kernels, which have threads of their own
    same = all(
        torch.equal(modes["fp32"].run(args.context, n, n), modes["blocks"].run(args.context, n, n)) for n in SIZES
    )
    works = {f"{name} {n}": passes.work(n) for name, passes in modes.items() for n in SIZES}
    times = interleaved(works, args.rounds, warmup=2)  # type: ignore[arg-type]
    prompts = interleaved({name: passes.work(PROMPT) for name, passes in modes.items()}, 3)  # type: ignore[arg-type]
    least = {name: {n: 1e3 * min(times[f"{name} {n}"]) for n in SIZES} for name in modes}
    print("milliseconds of a pass, the least of", args.rounds)
    print("rows    " + "".join(f"{n:>8}" for n in SIZES) + f"{PROMPT:>8}")
    for name in modes:
        ms = [*least[name].values(), 1e3 * min(prompts[name])]
        print(f"{name:8}" + "".join(f"{each:8.2f}" for each in ms))
    finish(
        "small_weights",
        {
            "model": args.model,
            "kernels": modes["blocks"].decoder.kernels.name,
            "ms": least,
            "prompt_ms": {name: 1e3 * min(seconds) for name, seconds in prompts.items()},
            "clock": "processor time of one thread" if args.one_core else "wall",
            "blocks_are_fp32_bits": same,
            "fp32_over_blocks": {n: least["fp32"][n] / least["blocks"][n] for n in SIZES},
            "int8_over_blocks": {n: least["int8"][n] / least["blocks"][n] for n in SIZES},
            "int8_over_one": {n: least["int8"][n] / least["int8"][1] for n in SIZES},
            "rounds": args.rounds,
        },
    )


if __name__ == "__main__":
    main()
