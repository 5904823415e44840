"""The figures of a big GPU, in one call: exactness first, then time. Parts can be chosen; each prints as it goes.

    python -m benchmarks.gpu.run                        # everything, with the yardstick built from smollm2
    python -m benchmarks.gpu.run --parts bits passes --weights random
    python -m benchmarks.gpu.run --parts batches --plot gpu-batches.png

bits       a row of a pass has the same bits for 1 to 64 rows, alone, in a batch, in a tree, in a prefill chunk
passes     a pass over 1, 8, 32, 64 nodes at 1k and 16k of context
bare       the same shape through transformers with a static cache, compiled
prefill    8k tokens in chunks against a plain bf16 product of the same shapes
startup    from weights in memory to the first answer
identity   answers of every drafter, together, against plain answers alone
host       the engine's time a step that is not the device's
draft      lookups on copy-heavy prompts
batches    tokens/s by batch, plain, with smollm2 as the yardstick's draft model, and auto
small      smollm2 itself, 512 rows, sampled
"""

from __future__ import annotations

import argparse
import gc
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.engine import ENGINE_PARTS
from benchmarks.gpu.passes import PASS_PARTS
from benchmarks.gpu.subject import Subject
from benchmarks.harness import finish

PARTS: dict[str, Callable[[Subject], dict[str, Any]]] = {**PASS_PARTS, **ENGINE_PARTS}


def draw(rows: dict[str, dict[str, Any]], to: Path) -> None:
    """Draw tokens per second by sequences at once."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    at = sorted(rows, key=int)
    fixed = [name for name in rows[at[0]] if name.startswith("k=")]
    figure, (above, below) = plt.subplots(2, 1, sharex=True, figsize=(6.4, 5.6), height_ratios=(3, 2))
    for name, style in [("plain", "k-o"), *((name, ":") for name in fixed), ("auto", "C3-o"), ("cold", "C3--")]:
        label = f"draft-model {name}" if name in fixed else {"cold": "auto, cold"}.get(name, name)
        sizes, values = [int(size) for size in at], [rows[size][name] for size in at]
        above.plot(sizes, values, style, label=label, markersize=4)
        below.plot(sizes, [rows[size][name] / rows[size]["plain"] for size in at], style, markersize=4)
    above.set(
        xscale="log", yscale="log", ylabel="tokens per second", title="8B yardstick, one H200, greedy, 128 tokens"
    )
    above.legend(fontsize=8)
    below.axhline(0.98, color="0.7", linewidth=0.8)
    below.set(xlabel="sequences at once", ylabel="over plain", xticks=[int(size) for size in at], xticklabels=at)
    below.minorticks_off()
    figure.tight_layout()
    figure.savefig(to, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="*", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--weights", default="smollm2", help="smollm2, a folder with it, or random (speed only)")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a small shape, to try the script itself")
    parser.add_argument("--seconds", type=float, default=500.0, help="no part begins after this long")
    parser.add_argument("--plot", type=Path, help="picture of the batches")
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
    if args.plot:
        draw(result["batches"], args.plot)
    finish("gpu", result)


if __name__ == "__main__":
    main()
