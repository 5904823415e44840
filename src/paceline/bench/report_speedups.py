"""The report's first figures: speed-ups as dots with their intervals against the line at 1."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from markupsafe import Markup

from paceline.bench import plots
from paceline.bench import report_words as words
from paceline.bench.plots import Axis
from paceline.bench.report_frame import Frame, Row
from paceline.bench.results import Cell, Speedup

LANE = 11  # pixels between the engines of one workload
HEIGHT = 2 * plots.MIDDLE


@dataclass(frozen=True)
class Group:
    """The rows of one concurrency, above their scale."""

    title: str
    rows: tuple[Row, ...]
    scale: Markup


def together(frame: Frame) -> list[Group]:
    """All workloads together: a row for each engine, by concurrency."""
    axis = _axis(frame.overall)
    if axis is None:
        return []
    compared = [cell for cell in frame.overall if not cell.plain]
    rows = {
        level: [_row(frame, axis, cell) for cell in compared if cell.concurrency == level] for level in frame.levels
    }
    return [Group(words.at_once(level), tuple(found), _scale(axis)) for level, found in rows.items() if found]


def by_workload(frame: Frame) -> list[Group]:
    """One lane a workload, with all engines in it, by concurrency; nothing where there is but one workload."""
    axis = _axis(frame.results.cells)
    if axis is None or len(frame.workloads) < 2:
        return []
    groups = []
    for level in frame.levels:
        lanes = [_lane(frame, axis, workload, level) for workload in frame.workloads]
        groups.append(Group(words.at_once(level), tuple(lane for lane in lanes if lane is not None), _scale(axis)))
    return [group for group in groups if group.rows]


def _axis(cells: Iterable[Cell]) -> Axis | None:
    found = [cell.speedup for cell in cells if cell.speedup is not None]
    if not found:
        return None
    ends = [end for speedup in found for end in (speedup.low, speedup.high)]
    return plots.ratio_axis([speedup.ratio for speedup in found], ends)


def _scale(axis: Axis) -> Markup:
    return plots.scale(axis, {tick: f"{tick:g}×" for tick in axis.ticks})


def _row(frame: Frame, axis: Axis, cell: Cell) -> Row:
    speedup, backdrop = cell.speedup, plots.grid(axis, HEIGHT, emphasis=1)
    if speedup is None:
        empty = plots.track(backdrop, label="not measured")
        return Row(cell.label, frame.swatch(cell.label), empty, words.DASH, cell.too_short or "not compared", "unknown")
    hint = _hint(cell, speedup)
    dot = plots.whisker(axis, plots.MIDDLE, frame.series[cell.label], speedup.ratio, speedup.low, speedup.high, hint)
    drawing = plots.track(backdrop, dot, label=hint)
    figure, note = words.ratio(speedup.ratio), words.interval(speedup)
    return Row(cell.label, frame.swatch(cell.label), drawing, figure, note, words.outcome(speedup))


def _lane(frame: Frame, axis: Axis, workload: str, level: int) -> Row | None:
    cells = [cell for cell in frame.results.cells if (cell.workload, cell.concurrency) == (workload, level)]
    found = [(cell, cell.speedup) for cell in cells if cell.speedup is not None]
    if not found:
        empty = plots.track(plots.grid(axis, HEIGHT, emphasis=1), label="not measured")
        short = any(cell.too_short for cell in cells)
        return Row(workload, Markup(), empty, words.DASH, "too little measured", "unknown") if short else None
    height = LANE * (len(found) + 1)
    dots = [
        plots.whisker(axis, LANE * place, frame.series[cell.label], s.ratio, s.low, s.high, _hint(cell, s), slim=True)
        for place, (cell, s) in enumerate(found, start=1)
    ]
    cell, best = max(found, key=lambda pair: pair[1].ratio)
    backdrop = plots.grid(axis, height, emphasis=1)
    drawing = plots.track(backdrop, *dots, height=height, label=f"speed-ups on {workload}")
    note = f"best: {cell.label}" if len(found) > 1 else words.interval(best)
    return Row(workload, Markup(), drawing, words.ratio(best.ratio), note, words.outcome(best))


def _hint(cell: Cell, speedup: Speedup) -> str:
    figure = f"{words.ratio(speedup.ratio)}, {words.INTERVAL} {words.interval(speedup)}"
    return f"{cell.workload}, {cell.label}: {figure} over {words.count(speedup.pairs, 'pair')}"
