"""The report's other figures: speed over concurrency, acceptance by position, latencies."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from paceline.bench import plots
from paceline.bench import report_words as words
from paceline.bench.plots import Axis, Line
from paceline.bench.report_frame import Frame, Row
from paceline.bench.results import Cell, Spread

MOST_LABELS = 12  # on a horizontal axis
LATENCIES: tuple[tuple[str, Callable[[Cell], Spread | None]], ...] = (
    ("first token", lambda cell: cell.ttft_s),
    ("between tokens", lambda cell: cell.inter_token_s),
    ("whole answer", lambda cell: cell.request_s),
)


def throughput(frame: Frame) -> Markup | None:
    """Lines over concurrency; None where there are no two to draw a line between (then `rates` says it)."""
    rated = [(cell, cell.tokens_per_s) for cell in frame.overall if cell.tokens_per_s]
    if len({cell.concurrency for cell, _ in rated}) < 2:
        return None
    lines = []
    for label, series in frame.series.items():
        mine = sorted((cell.concurrency, rate) for cell, rate in rated if cell.label == label)
        hints = [f"{label}, {words.at_once(level)}: {words.rate(rate)} tokens/s" for level, rate in mine]
        lines.append(Line(series, tuple((float(level), rate) for level, rate in mine), tuple(hints)))
    up = plots.wide_axis([rate for _, rate in rated])
    first, last = frame.levels[0], frame.levels[-1]
    span = last / first
    across = Axis(first / span**0.15, last * span**0.08, log=True)
    y_words = {tick: f"{tick:,.4g}" for tick in up.ticks}
    y_words[up.ticks[-1]] += " tokens/s" + (", logarithmic scale" if up.log else "")
    x_words = {float(level): str(level) for level in frame.levels}
    return plots.chart(lines, across, up, x_words, y_words, "tokens per second over concurrency")


def rates(frame: Frame) -> list[Row]:
    rated = [(cell, cell.tokens_per_s) for cell in frame.overall if cell.tokens_per_s]
    axis = plots.zero_axis([rate for _, rate in rated])
    rows = []
    for cell, rate in rated:
        series, y = frame.series[cell.label], plots.MIDDLE
        bar = plots.tag("line", x1=axis.x(0), x2=axis.x(rate), y1=y, y2=y, class_=f"line thick {series.css}")
        drawing = plots.track(bar, plots.mark(axis.x(rate), y, series), label=f"{words.rate(rate)} tokens/s")
        rows.append(Row(cell.label, frame.swatch(cell.label), drawing, words.rate(rate), "tokens/s"))
    return rows


def drafting(frame: Frame) -> list[Cell]:
    """The engines whose drafts are known, with the least concurrency."""
    first = frame.levels[0] if frame.levels else None
    told = (cell for cell in frame.overall if cell.concurrency == first and not cell.plain)
    return [cell for cell in told if cell.tau is not None or any(cell.drafted_per_position)]


def acceptance(frame: Frame) -> Markup | None:
    """By position: of what was drafted there, the share that was accepted. None where no server or engine tells."""
    lines = [line for cell in drafting(frame) if (line := _accepted(frame, cell)).points]
    if not lines:
        return None
    longest = round(max(line.points[-1][0] for line in lines))
    up = Axis(0.0, 1.0, ticks=(0, 0.25, 0.5, 0.75, 1))
    every = math.ceil(longest / MOST_LABELS)
    x_words = {float(place): str(place) for place in range(1, longest + 1, every)}
    y_words = {tick: f"{100 * tick:.0f} %" for tick in up.ticks}
    across = Axis(1 - 0.1 * longest, longest + 0.3)  # room for the labels of the vertical axis
    return plots.chart(lines, across, up, x_words, y_words, "acceptance by position")


def _accepted(frame: Frame, cell: Cell) -> Line:
    pairs = enumerate(zip(cell.drafted_per_position, cell.accepted_per_position, strict=False), start=1)
    known = [(position, drafted, accepted) for position, (drafted, accepted) in pairs if drafted]
    return Line(
        frame.series[cell.label],
        tuple((float(position), accepted / drafted) for position, drafted, accepted in known),
        tuple(f"{cell.label}, position {place}: {n:,} of {of:,} accepted" for place, of, n in known),
    )


@dataclass(frozen=True)
class Reach:
    """One kind of latency of one engine."""

    name: str
    drawing: Markup
    figures: str


def latency(frame: Frame) -> list[tuple[str, list[tuple[Cell, list[Reach]]]]]:
    """By concurrency and engine: from the median to the 99th percentile, on one scale for all engines."""
    found = []
    for level in frame.levels:
        cells = [cell for cell in frame.overall if cell.concurrency == level]
        rows = [(cell, reaches) for cell in cells if (reaches := _reaches(frame, cell, cells))]
        if rows:
            found.append((words.at_once(level), rows))
    return found


def _reaches(frame: Frame, cell: Cell, beside: Sequence[Cell]) -> list[Reach]:
    reaches = []
    for name, of in LATENCIES:
        if (spread := of(cell)) is None:
            continue
        axis = plots.zero_axis([other.p99 for one in beside if (other := of(one)) is not None])
        far = f"99th percentile {words.seconds(spread.p99)}"
        hint = f"{cell.label}, {name}: median {words.seconds(spread.p50)}, {far}"
        drawing = plots.reach(axis, frame.series[cell.label], spread.p50, spread.p99, hint)
        reaches.append(Reach(name, drawing, words.spread(spread)))
    return reaches
