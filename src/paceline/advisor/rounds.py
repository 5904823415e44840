"""A benchmark that goes on until there are groups enough for a figure.

Where one round over the prompts fills fewer than five groups, further rounds group them anew, each with new engines,
so that no store has seen their answers. Such groups share prompts: the figure stands, its interval would be too narrow
and is not given.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from paceline.bench.grid import Contender
from paceline.bench.groups import make_groups
from paceline.bench.measurement import Measurement, cells
from paceline.bench.prompts import Prompt
from paceline.bench.results import ALL, Cell
from paceline.bench.runner import OnProgress, Plan, Subject, measure
from paceline.bench.statistics import MIN_PAIRS

MOST_ROUNDS = 5


def rounds_for(prompts: Sequence[Prompt], level: int) -> int:
    groups, _ = make_groups(prompts, level)
    return min(-(-MIN_PAIRS // max(len(groups), 1)), MOST_ROUNDS)


def measure_rounds(
    subject: Subject,
    prompts: Sequence[Prompt],
    plan: Plan,
    measurement: Measurement,
    on_progress: OnProgress = lambda done, total, what: None,
) -> None:
    """Fill `measurement`, level by level and round by round; what is in it stands whatever ends the run."""
    shares = {level: rounds_for(prompts, level) for level in plan.concurrencies}
    total, done = sum(shares.values()), 0
    for level, count in shares.items():
        for turn in range(count):
            part = Measurement(measurement.contenders)
            seed = None if plan.seed is None else plan.seed + turn
            before, started = len(measurement.rows), done
            try:
                measure(
                    subject,
                    prompts,
                    dataclasses.replace(plan, concurrencies=[level], seed=seed),
                    part,
                    lambda now, all_of_it, what, at=started: on_progress(at + now / all_of_it, total, what),  # type: ignore[misc]
                )
            finally:
                offset = 1 + max((row.group for row in measurement.rows[:before]), default=-1)
                measurement.rows += [dataclasses.replace(row, group=row.group + offset) for row in part.rows]
                measurement.comparable = part.comparable
            done += 1
    measurement.complete = True


def overall(measurement: Measurement) -> dict[tuple[int, Contender], Cell]:
    """The cells of all prompts together, by concurrency and contender."""
    by_label = {contender.label: contender for contender in measurement.contenders}
    return {(cell.concurrency, by_label[cell.label]): cell for cell in cells(measurement) if cell.workload == ALL}
