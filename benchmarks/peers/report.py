"""From measured rows to figures and a table. No clock, no processes: only arithmetic on what was written down.

A row is one prompt: {"name", "workload", "greedy", "foreign", "answers": {configuration: {"tokens", "seconds",
"first_s", "overran"}}}.
Rates are tokens over seconds of all prompts together; ratios of rates come with a bootstrap over prompts, always from
prompts that both sides answered.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from typing import Any

ALL, NO_LOOPS, QUIET = "all", "all but loops", "quiet machine"
FOREIGN = 0.1  # share of the cores others may take during a prompt's answers before it counts as disturbed
DRAWS = 2000
FEWEST = 4  # prompts; an interval from fewer is useless
LOOP = 16  # tokens that come back are a loop

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
    """How many times the rate of `other` that of `one` is, with a 95 % interval; None where too few prompts say."""
    pairs = [
        (whole(row["answers"][one]), whole(row["answers"][other]))
        for row in rows
        if one in row["answers"] and other in row["answers"]
    ]
    if len(pairs) < FEWEST:
        return None
    noise = random.Random(1)
    draws = sorted(_rate_ratio(noise.choices(pairs, k=len(pairs))) for _ in range(DRAWS))
    low, high = draws[int(0.025 * DRAWS)], draws[int(0.975 * DRAWS) - 1]
    return {"ratio": _rate_ratio(pairs), "low": low, "high": high, "prompts": len(pairs)}


def _rate_ratio(pairs: Sequence[tuple[tuple[int, float], tuple[int, float]]]) -> float:
    tokens, seconds, other_tokens, other_seconds = (
        sum(pair[side][at] for pair in pairs) for side in (0, 1) for at in (0, 1)
    )
    return tokens / seconds / (other_tokens / other_seconds)


def agreement(rows: Sequence[Row], name: str, reference: str) -> dict[str, Any] | None:
    """How many greedy answers are token for token those of the reference, and where the others first differ (the
    median)."""
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


def loops(tokens: Sequence[int]) -> bool:
    grams = [tuple(tokens[at : at + LOOP]) for at in range(len(tokens) - LOOP + 1)]
    return len(set(grams)) < len(grams)


def slices(rows: Sequence[Row], reference: str) -> dict[str, list[Row]]:
    """All rows, each workload's, those whose reference answer does not loop, those measured on a quiet machine."""
    found = {ALL: list(rows)}
    for row in rows:
        found.setdefault(row["workload"], []).append(row)
    straight = [row for row in rows if reference in row["answers"] and not loops(row["answers"][reference]["tokens"])]
    return found | {NO_LOOPS: straight, QUIET: [row for row in rows if row["foreign"] <= FOREIGN]}


def cells(
    rows: Sequence[Row],
    plain_of: dict[str, str],
    *,
    ours: Sequence[str],
    peers: Sequence[str],
    reference: str,
) -> list[dict[str, Any]]:
    """One per slice and configuration. `plain_of` names each configuration's own plain decoding; all of `peers` are
    compared with all of `ours`."""
    result = []
    for workload, mine in slices(rows, reference).items():
        for name, plain in plain_of.items():
            answers = _answers(mine, name)
            if not answers:
                continue
            result.append(
                {
                    "workload": workload,
                    "configuration": name,
                    "answers": len(answers),
                    "tokens": sum(len(answer["tokens"]) for answer in answers),
                    "tokens_per_s": rate(answers),
                    "decoding_tokens_per_s": rate(answers, decoding),
                    "first_token_s": _first_token(mine, name),
                    "overran": sum(answer["overran"] for answer in answers),
                    "gain": None if name == plain else faster(mine, name, plain),
                    "paceline_over_it": {one: faster(mine, one, name) for one in ours} if name in peers else {},
                    "agreement": agreement(mine, name, reference) if name != reference else None,
                    "unchanged": agreement(mine, name, plain) if name != plain else None,
                }
            )
    return result


def beside_the_best(
    rows: Sequence[Row], *, ours: Sequence[str], peers: Sequence[str], reference: str
) -> list[dict[str, Any]]:
    """One per slice and configuration of ours: the peer of the highest rate there, and how much faster ours is; the
    same for the time to the first token."""
    result = []
    for workload, mine in slices(rows, reference).items():
        rates = {name: found for name in peers if (found := rate(_answers(mine, name))) is not None}
        waits = {name: _first_token(mine, name) for name in rates}
        for name in ours:
            if not rates or not (answers := _answers(mine, name)):
                continue
            best, soonest = max(rates, key=rates.__getitem__), min(waits, key=waits.__getitem__)
            result.append(
                {
                    "workload": workload,
                    "configuration": name,
                    "tokens_per_s": rate(answers),
                    "best_peer": best,
                    "its_tokens_per_s": rates[best],
                    "faster": faster(mine, name, best),
                    "soonest_peer": soonest,
                    "first_token_over_it": _first_token(mine, name) / waits[soonest],
                }
            )
    return result


def _answers(rows: Sequence[Row], name: str) -> list[Answer]:
    return [row["answers"][name] for row in rows if name in row["answers"]]


def _first_token(rows: Sequence[Row], name: str) -> float:
    return statistics.median(answer["first_s"] for answer in _answers(rows, name))


def summary(best: Sequence[dict[str, Any]]) -> str:
    """Markdown: paceline beside the best peer of each slice."""
    columns = ["", "", "tok/s", "best peer", "its tok/s", "faster by", "first token, share of the soonest peer's"]
    lines = ["", "**beside the best peer**", "", _line(columns), _line(["---"] * len(columns))]
    for entry in best:
        rates = [f"{entry['tokens_per_s']:.1f}", entry["best_peer"], f"{entry['its_tokens_per_s']:.1f}"]
        sooner = f"{entry['first_token_over_it']:.2f} ({entry['soonest_peer']})"
        lines.append(_line([entry["workload"], entry["configuration"], *rates, figure(entry["faster"]), sooner]))
    return "\n".join(lines)


def table(found: Sequence[dict[str, Any]], precision: dict[str, str]) -> str:
    """Markdown, one table per slice."""
    lines: list[str] = []
    for workload in dict.fromkeys(cell["workload"] for cell in found):
        mine = [cell for cell in found if cell["workload"] == workload]
        columns = ["", "precision", "tok/s", "after the first", "first token", "gain over its own plain"]
        columns += ["tokens as paceline's", "as its own plain"]
        lines += ["", f"**{workload}**, {max(cell['answers'] for cell in mine)} prompts", ""]
        lines += [_line(columns), _line(["---"] * len(columns))]
        lines += [_line(_entries(cell, precision)) for cell in mine]
    return "\n".join(lines)


def _entries(cell: dict[str, Any], precision: dict[str, str]) -> list[str]:
    after = cell["decoding_tokens_per_s"]
    return [
        cell["configuration"],
        precision.get(cell["configuration"], "?"),
        f"{cell['tokens_per_s']:.1f}",
        "" if after is None else f"{after:.1f}",
        f"{1000 * cell['first_token_s']:.0f} ms",
        figure(cell["gain"]),
        *(
            "" if found is None else f"{found['same']} of {found['of']}"
            for found in (cell["agreement"], cell["unchanged"])
        ),
    ]


def figure(entry: dict[str, Any] | None) -> str:
    return "" if entry is None else f"{entry['ratio']:.2f}x [{entry['low']:.2f}, {entry['high']:.2f}]"


def _line(entries: Sequence[str]) -> str:
    return "| " + " | ".join(entries) + " |"
