"""The figures of a big GPU, in one call: exactness first, then time. Parts can be chosen; each prints as it goes.

    python -m benchmarks.gpu.run                        # everything, with the yardstick built from smollm2
    python -m benchmarks.gpu --parts bits passes --weights random

bits       a row of a pass has the same bits for 1 to 64 rows, alone, in a batch, in a tree, in a prefill chunk
passes     a pass over 1, 8, 32, 64 nodes at 1k and 16k of context (figures 1 and 2), and its kernels by time
bare       the same shape through transformers with a static cache, compiled
prefill    8k tokens in chunks against a plain bf16 product of the same shapes
startup    from weights in memory to the first answer
host       the engine's time a step that is not the device's (figure 3)
draft      smollm2 as drafter of the yardstick, and lookup on copy-heavy prompts (figure 5)
batches    tokens/s by batch, plain and auto (figure 6)
small      smollm2 itself, 512 rows, sampled (figure 7)
"""

from __future__ import annotations

import argparse
import gc
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.gpu.engine import ENGINE_PARTS
from benchmarks.gpu.passes import PASS_PARTS
from benchmarks.gpu.subject import Subject
from benchmarks.harness import finish

PARTS: dict[str, Callable[[Subject], dict[str, Any]]] = {**PASS_PARTS, **ENGINE_PARTS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="*", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--weights", default="smollm2", help="smollm2, a folder with it, or random (speed only)")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a small shape, to try the script itself")
    parser.add_argument("--seconds", type=float, default=500.0, help="no part begins after this long")
    args = parser.parse_args()
    started = time.perf_counter()
    subject = Subject(args.weights, torch.device(args.device), tiny=args.tiny)
    result: dict[str, Any] = {"weights": args.weights, "device": subject.device_name}
    for name in args.parts:
        if time.perf_counter() - started > args.seconds:
            print(f"{name}: out of time", flush=True)
            continue
        print(f"== {name}", flush=True)
        try:
            result[name] = PARTS[name](subject)
        except Exception:  # the other parts still count
            traceback.print_exc()
            result[name] = {"failed": traceback.format_exc().splitlines()[-1]}
        gc.collect()
        if subject.device.type == "cuda":
            torch.cuda.empty_cache()
        print(f"   {name} done at {time.perf_counter() - started:.0f} s", flush=True)
    finish("gpu", result)


if __name__ == "__main__":
    main()
