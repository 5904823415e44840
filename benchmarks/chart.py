"""README's chart: tokens per second beside other engines, drawn from results that were measured before.

    python -m benchmarks.peers.compare --environments DIR --prompts mt_bench.jsonl ... > small.txt
    python -m benchmarks.peers.compare --environments DIR --model FILE.gguf --only paceline llama_cpp ... > large.txt
    python -m benchmarks.chart "SmolLM2 135M, Q4_1=small.txt" "Qwen2.5-Coder 1.5B, Q4_K_M=large.txt"

The last line of each file is a result of `peers.compare`. What is drawn is kept in docs/benchmarks/chart.json, from
which the chart is drawn again without arguments.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from benchmarks.harness import ROOT
from benchmarks.peers.report import ALL

DATA = ROOT / "docs" / "benchmarks" / "chart.json"
WIDTH, NAMES, BAR, GAP, HEAD = 720, 210, 18, 6, 46  # pixels; NAMES: of the column of names, HEAD: above each panel
COLOURS = {True: "#2f6fd0", False: "#9aa4b2"}  # of this package and of others; both are read on white and on black
TEXT = "#7a8494"

Panel = dict[str, Any]  # title, note, bars: [{name, tokens_per_s, own}]


def panel_of(title: str, result: dict[str, Any]) -> Panel:
    """Return the panel of a result of `peers.compare`: rates of all its prompts together."""
    where, bars = result["where"], list[dict[str, Any]]()
    for cell in result["cells"]:
        if cell["workload"] == ALL and cell["tokens_per_s"]:
            name = cell["configuration"]
            bars.append({"name": name, "tokens_per_s": round(cell["tokens_per_s"], 1), "own": "paceline" in name})
    temperatures = ", ".join(f"{one:g}" for one in result["temperature"])
    note = (
        f"{result['prompts_measured']} prompts, T {temperatures}, {result['max_tokens']} tokens each, prompt included"
    )
    return {"title": title, "note": f"{note}; {where['cpu']}, {result['threads']} cores, {where['date']}", "bars": bars}


def drawing(panels: Sequence[Panel]) -> str:
    """Return the panels below each other as SVG; bars of a panel share a scale."""
    y, parts = 0, list[str]()
    for panel in panels:
        parts.append(f'<text x="0" y="{y + 18}" class="title">{escape(panel["title"])}: tokens per second</text>')
        parts.append(f'<text x="0" y="{y + 36}" class="note">{escape(panel["note"])}</text>')
        y += HEAD
        most = max(bar["tokens_per_s"] for bar in panel["bars"])
        for bar in panel["bars"]:
            length, middle = (WIDTH - NAMES - 60) * bar["tokens_per_s"] / most, y + BAR - 5
            parts.append(f'<text x="{NAMES - 8}" y="{middle}" text-anchor="end">{escape(bar["name"])}</text>')
            fill = COLOURS[bar["own"]]
            parts.append(f'<rect x="{NAMES}" y="{y}" width="{length:.1f}" height="{BAR}" rx="2" fill="{fill}"/>')
            parts.append(f'<text x="{NAMES + length + 6:.1f}" y="{middle}">{bar["tokens_per_s"]:g}</text>')
            y += BAR + GAP
        y += GAP
    style = f"text{{font:13px sans-serif;fill:{TEXT}}}.title{{font-weight:bold}}.note{{font-size:11px}}"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" width="{WIDTH}" height="{y}" role="img">'
    return "\n".join([head, f"<style>{style}</style>", *parts, "</svg>", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "results", nargs="*", metavar="TITLE=FILE", help="without one the stored panels are drawn again"
    )
    args = parser.parse_args()
    if args.results:
        named = [one.rpartition("=") for one in args.results]
        panels = [panel_of(title, json.loads(Path(file).read_text().splitlines()[-1])) for title, _, file in named]
        DATA.write_text(json.dumps(panels, indent=1) + "\n")
    panels = json.loads(DATA.read_text())
    DATA.with_suffix(".svg").write_text(drawing(panels))
    print(json.dumps({"benchmark": "chart", "panels": len(panels), "file": str(DATA.with_suffix(".svg"))}))


if __name__ == "__main__":
    main()
