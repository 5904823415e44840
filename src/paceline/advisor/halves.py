"""The prompts in two halves that are alike, one to choose on and one to check on, and a benchmark of a half. No torch.

Of every workload each half has every other prompt, so that neither is all code and the other all chat. Where a half
fills fewer than five groups, further rounds group its prompts anew, each with new engines, so that no suffix store has
seen their answers. Such groups share prompts: the figure is valid, but its interval would be too narrow and is omitted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from paceline.advisor.choice import Figure
from paceline.bench.grid import Contender
from paceline.bench.groups import make_groups
from paceline.bench.intervals import MIN_PAIRS, MIN_TOKENS
from paceline.bench.measurement import Measurement, cells
from paceline.bench.prompts import Prompt
from paceline.bench.results import ALL
from paceline.bench.runner import OnProgress, Plan, Subject, measure
from paceline.errors import InvalidParameter

MOST_ROUNDS = 5


def halves(prompts: Sequence[Prompt]) -> tuple[list[Prompt], list[Prompt]]:
    """The second half has one prompt less for each workload with an odd number of prompts."""
    alike: dict[tuple[str, int], list[Prompt]] = {}
    for prompt in prompts:
        alike.setdefault((prompt.workload, len(prompt.turns)), []).append(prompt)
    first: list[Prompt] = []
    second: list[Prompt] = []
    for members in alike.values():
        shorter, longer = sorted((first, second), key=len)
        shorter += members[::2]
        longer += members[1::2]
    return first, second


def check_halves(halves: Sequence[Sequence[Prompt]], levels: Sequence[int], max_tokens: int) -> None:
    """Refuse, before the run, one that could not end in advice."""
    for half in halves:
        if len(half) < MIN_PAIRS:
            total = sum(map(len, halves))
            raise InvalidParameter(
                "prompts",
                f"{total} prompts are too few: half of them are to choose on and half to check on, and fewer than "
                f"{MIN_PAIRS} in a half are not enough; give at least {2 * MIN_PAIRS}",
            )
        for level in levels:
            if not make_groups(half, level)[0]:
                raise InvalidParameter(
                    "concurrency",
                    f"half of the prompts ({len(half)}) never make {level} requests at once with equally many turns: "
                    f"give at least {2 * level} prompts, or lower the concurrency",
                )
        if len(half) * max_tokens < MIN_TOKENS:
            raise InvalidParameter(
                "max_tokens",
                f"at most {len(half) * max_tokens} tokens would be measured, and fewer than {MIN_TOKENS} are not "
                "enough: raise it or give more prompts",
            )


def measure_half(
    subject: Subject,
    prompts: Sequence[Prompt],
    plan: Plan,
    contenders: Sequence[Contender],
    found: dict[tuple[int, Contender], Figure],
    on_progress: OnProgress,
) -> None:
    """Add the figures of `contenders` to `found`; an interruption leaves those measured until then."""
    measurement = Measurement(list(contenders))
    rounds = [(level, turn) for level in plan.concurrencies for turn in range(_rounds(prompts, level))]
    try:
        for done, (level, turn) in enumerate(rounds):
            part = Measurement(measurement.contenders)
            one = dataclasses.replace(plan, concurrencies=[level], seed=(plan.seed or 0) + turn)

            def progress(now: float, total: float, what: str, done: int = done) -> None:
                on_progress(done + now / total, len(rounds), what)

            try:
                measure(subject, prompts, one, part, progress)
            finally:
                first = 1 + max((row.group for row in measurement.rows), default=-1)
                measurement.rows += [dataclasses.replace(row, group=first + row.group) for row in part.rows]
    finally:
        by_label = {contender.label: contender for contender in contenders}
        whole = [cell for cell in cells(measurement) if cell.workload == ALL]
        for cell in whole:
            if figure := Figure.of(cell, interval=_rounds(prompts, cell.concurrency) == 1):
                found[cell.concurrency, by_label[cell.label]] = figure
    if not found:
        raise InvalidParameter("prompts", next(cell.too_short for cell in whole if cell.too_short) or "")


def _rounds(prompts: Sequence[Prompt], level: int) -> int:
    groups, _ = make_groups(prompts, level)
    return min(-(-MIN_PAIRS // max(len(groups), 1)), MOST_ROUNDS)
