"""The curve of the batches of gpu.run: tokens per second by sequences at once, plain, by fixed k, and auto.

python -m benchmarks.gpu --parts batches | tail -1 > batches.json
python -m benchmarks.gpu_batches_plot batches.json docs/benchmarks/2026-11-15-gpu-batches.png
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt


def draw(rows: dict[str, dict[str, Any]], to: Path) -> None:
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
    parser.add_argument("result", type=Path)
    parser.add_argument("picture", type=Path)
    args = parser.parse_args()
    draw(json.loads(args.result.read_text().splitlines()[-1])["batches"], args.picture)


if __name__ == "__main__":
    main()
