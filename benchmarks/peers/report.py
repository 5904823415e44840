"""Figures and a table from measured rows. No clock, no processes: only arithmetic on what was measured.

A row is one prompt: {"name", "workload", "greedy", "foreign", "answers": {configuration: {"tokens", "seconds",
"first_s", "overran"}}}.
Rates are tokens over seconds of all prompts together; ratios of rates come with the jackknife's interval over prompts
(paceline.bench.intervals), always from prompts that both sides answered.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.harness import shown
from paceline.bench.intervals import Pair, speedup

ALL, QUIET = "all", "quiet machine"
FOREIGN = 0.1  # share of the cores others may take during a prompt's answers before it counts as disturbed

Row = dict[str, Any]
Answer = dict[str, Any]


def whole(answer: Answer) -> tuple[int, float]:
    return len(answer["tokens"]), answer["seconds"]


def decoding(answer: Answer) -> tuple[int, float]:
    """After the first token: what is left when the prompt has been read."""
    return len(answer["tokens"]) - 1, answer["seconds"] - answer["first_s"]


def rate(answers: Sequence[Answer], part: Callable[[Answer], tuple[int, float]] = whole) -> float | None:
    tokens, seconds = (sum(column) for column in zip(*map(part, answers), strict=True)) if answers else (0, 0.0)
    return tokens / seconds if tokens and seconds > 0 else None


def faster(rows: Sequence[Row], one: str, other: str) -> dict[str, Any] | None:
    """Return the rate of `one` over that of `other`, with a 95 % interval; None where too little was measured."""
    both = [row["answers"] for row in rows if one in row["answers"] and other in row["answers"]]
    sides = [(answers[other], answers[one]) for answers in both]
    pairs = [Pair(a["seconds"], len(a["tokens"]), b["seconds"], len(b["tokens"])) for a, b in sides]
    gain = speedup(pairs)
    return None if gain is None else {"ratio": gain.ratio, "low": gain.low, "high": gain.high, "prompts": gain.pairs}


def agreement(rows: Sequence[Row], name: str, reference: str) -> dict[str, Any] | None:
    """Return how many greedy answers are token for token those of the reference, and where the others first differ
    (the median)."""
    pairs = [
        (row["answers"][name]["tokens"], row["answers"][reference]["tokens"])
        for row in rows
        if row["greedy"] and name in row["answers"] and reference in row["answers"]
    ]
    if not pairs:
        return None
    splits = [_common(a, b) for a, b in pairs if a != b]
    return {
        "same": len(pairs) - len(splits),
        "of": len(pairs),
        "differ_from": statistics.median(splits) if splits else None,
    }


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def slices(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Return all rows, each workload's, and those measured on a quiet machine."""
    found = {ALL: list(rows)}
    for row in rows:
        found.setdefault(row["workload"], []).append(row)
    return found | {QUIET: [row for row in rows if row["foreign"] <= FOREIGN]}


def cells(rows: Sequence[Row], plain_of: dict[str, str], *, reference: str) -> list[dict[str, Any]]:
    """Return one for each slice and configuration. `plain_of` names each configuration's own plain decoding."""
    result = []
    for workload, part in slices(rows).items():
        for name, plain in plain_of.items():
            if not (answers := _answers(part, name)):
                continue
            result.append(
                {
                    "workload": workload,
                    "configuration": name,
                    "answers": len(answers),
                    "tokens": sum(len(answer["tokens"]) for answer in answers),
                    "tokens_per_s": rate(answers),
                    "decoding_tokens_per_s": rate(answers, decoding),
                    "first_token_s": statistics.median(answer["first_s"] for answer in answers),
                    "overran": sum(answer["overran"] for answer in answers),
                    "gain": None if name == plain else faster(part, name, plain),
                    "agreement": agreement(part, name, reference) if name != reference else None,
                    "unchanged": agreement(part, name, plain) if name != plain else None,
                }
            )
    return result


def beside_the_best(rows: Sequence[Row], *, ours: Sequence[str], peers: Sequence[str]) -> list[dict[str, Any]]:
    """Return one for each slice and configuration of ours: how much faster it is than the peer of the highest rate."""
    result = []
    for workload, part in slices(rows).items():
        rates = {name: found for name in peers if (found := rate(_answers(part, name))) is not None}
        for name in ours if rates else ():
            best = max(rates, key=rates.__getitem__)
            gain = faster(part, name, best)
            result.append({"workload": workload, "configuration": name, "best_peer": best, "faster": gain})
    return result


def _answers(rows: Sequence[Row], name: str) -> list[Answer]:
    return [row["answers"][name] for row in rows if name in row["answers"]]


def table(found: Sequence[dict[str, Any]]) -> str:
    columns = ("tok/s", "after the first", "first token", "over its own plain", "tokens as paceline's", "as its plain")
    lines = [f"{'':48}" + "".join(f"{column:>22}" for column in columns)]
    for cell in found:
        after, first = cell["decoding_tokens_per_s"] or 0.0, f"{1000 * cell['first_token_s']:.0f} ms"
        entries = [f"{cell['tokens_per_s']:.1f}", f"{after:.1f}", first, figure(cell["gain"])]
        entries += [f"{one['same']} of {one['of']}" if one else "" for one in (cell["agreement"], cell["unchanged"])]
        lines.append(
            f"{cell['workload']}, {cell['configuration']}".ljust(48) + "".join(f"{one:>22}" for one in entries)
        )
    return "\n".join(lines)


def figure(entry: dict[str, Any] | None) -> str:
    return "" if entry is None else shown(entry)
