"""Drawings and rows of the report, all from one set of results. Each contender has one colour and one shape."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from markupsafe import Markup

from paceline.bench.findings import overall
from paceline.bench.report import plots, words
from paceline.bench.report.plots import Axis, ChartLine, Series
from paceline.bench.results import ALL, PLAIN, Cell, Results, Speedup, Spread

LANE = 11  # pixels between the contenders of one workload
MOST_LABELS = 12  # on a horizontal axis
SELDOM = 30  # steps; a share of fewer is faded
LATENCIES: tuple[tuple[str, Callable[[Cell], Spread | None]], ...] = (
    ("first token", lambda cell: cell.ttft_s),
    ("between tokens", lambda cell: cell.inter_token_s),
    ("whole answer", lambda cell: cell.request_s),
)


@dataclass(frozen=True)
class FigureRow:
    label: str
    swatch: Markup
    drawing: Markup
    figure: str = ""
    note: str = ""
    outcome: str = ""


@dataclass(frozen=True)
class FigureGroup:
    """The rows of one concurrency, above their scale."""

    title: str
    rows: tuple[FigureRow, ...]
    scale: str = ""


class Figures:
    def __init__(self, results: Results) -> None:
        self.results = results
        self.series = series_of(results.cells)
        self.overall = overall(results)
        self.levels = sorted({cell.concurrency for cell in results.cells})
        self.workloads = [name for name in dict.fromkeys(cell.workload for cell in results.cells) if name != ALL]

    def swatch(self, label: str) -> Markup:
        return plots.swatch(self.series[label])

    def legend(self, plain: bool = True) -> list[tuple[str, Markup]]:
        left_out = set() if plain else {cell.label for cell in self.results.cells if cell.plain}
        return [(label, self.swatch(label)) for label in self.series if label not in left_out]

    # -- speed-ups: dots with their intervals against the line at 1

    def together(self) -> list[FigureGroup]:
        """Return a row for each contender over all workloads together, by concurrency."""
        compared = [cell for cell in self.overall if not cell.plain]
        return self._groups(
            self.overall,
            lambda axis, level: [self._row(axis, cell) for cell in compared if cell.concurrency == level],
        )

    def by_workload(self) -> list[FigureGroup]:
        """Return a lane for each workload with all contenders in it, by concurrency; nothing for one workload only."""
        names = self.workloads if len(self.workloads) > 1 else []
        return self._groups(
            self.results.cells,
            lambda axis, level: [lane for name in names if (lane := self._lane(axis, name, level))],
        )

    def _groups(self, cells: Iterable[Cell], rows: Callable[[Axis, int], list[FigureRow]]) -> list[FigureGroup]:
        """Return the rows by concurrency, on one axis for all; nothing if there is no speed-up to show."""
        speedups = [cell.speedup for cell in cells if cell.speedup is not None]
        if not speedups:
            return []
        axis = plots.ratio_axis(speedups)
        scale = plots.scale(axis, {tick: f"{tick:g}×" for tick in axis.ticks})
        groups = [FigureGroup(words.at_once(level), tuple(rows(axis, level)), scale) for level in self.levels]
        return [group for group in groups if group.rows]

    def _row(self, axis: Axis, cell: Cell) -> FigureRow:
        speedup, swatch = cell.speedup, self.swatch(cell.label)
        if speedup is None:
            return FigureRow(cell.label, swatch, _empty(axis), words.DASH, cell.too_short or "not compared", "unknown")
        hint = _hint(cell, speedup)
        dot = plots.whisker(axis, plots.MIDDLE, self.series[cell.label], speedup, hint)
        drawing = plots.track(plots.grid(axis, 2 * plots.MIDDLE, emphasis=1), dot, label=hint)
        figure, note = words.ratio(speedup.ratio), words.interval(speedup)
        return FigureRow(cell.label, swatch, drawing, figure, note, words.outcome(speedup))

    def _lane(self, axis: Axis, workload: str, level: int) -> FigureRow | None:
        cells = [cell for cell in self.results.cells if (cell.workload, cell.concurrency) == (workload, level)]
        compared = [(cell, cell.speedup) for cell in cells if cell.speedup is not None]
        if not compared:
            short = any(cell.too_short for cell in cells)
            nothing = FigureRow(workload, Markup(), _empty(axis), words.DASH, "too little measured", "unknown")
            return nothing if short else None
        height = LANE * (len(compared) + 1)
        dots = [
            plots.whisker(axis, LANE * place, self.series[cell.label], speedup, _hint(cell, speedup), slim=True)
            for place, (cell, speedup) in enumerate(compared, start=1)
        ]
        cell, best = max(compared, key=lambda pair: pair[1].ratio)
        backdrop = plots.grid(axis, height, emphasis=1)
        drawing = plots.track(backdrop, *dots, height=height, label=f"speed-ups on {workload}")
        note = f"best: {cell.label}" if len(compared) > 1 else words.interval(best)
        return FigureRow(workload, Markup(), drawing, words.ratio(best.ratio), note, words.outcome(best))

    # -- tokens per second

    @property
    def rated(self) -> list[tuple[Cell, float]]:
        return [(cell, cell.tokens_per_s) for cell in self.overall if cell.tokens_per_s]

    def throughput(self) -> Markup | None:
        """Draw lines over concurrency; None if there is one concurrency only, which `rates` shows."""
        rated = self.rated
        if len({cell.concurrency for cell, _ in rated}) < 2:
            return None
        lines = []
        for label, series in self.series.items():
            points = sorted((cell.concurrency, rate) for cell, rate in rated if cell.label == label)
            hints = [f"{label}, {words.at_once(level)}: {words.rate(rate)} tokens/s" for level, rate in points]
            lines.append(ChartLine(series, tuple((float(level), rate) for level, rate in points), tuple(hints)))
        up = plots.wide_axis([rate for _, rate in rated])
        first, last = self.levels[0], self.levels[-1]
        across = Axis(first / (last / first) ** 0.15, last * (last / first) ** 0.08, log=True)
        y_words = {tick: f"{tick:,.4g}" for tick in up.ticks}
        y_words[up.ticks[-1]] += " tokens/s" + (", logarithmic scale" if up.log else "")
        x_words = {float(level): str(level) for level in self.levels}
        return plots.chart(lines, across, up, x_words, y_words, "tokens per second over concurrency")

    def rates(self) -> FigureGroup:
        axis, y, rows = plots.zero_axis([rate for _, rate in self.rated]), plots.MIDDLE, []
        for cell, rate in self.rated:
            series = self.series[cell.label]
            bar = plots.level_line(axis, y, series, 0, rate, "line thick")
            drawing = plots.track(bar, plots.mark(axis.x(rate), y, series), label=f"{words.rate(rate)} tokens/s")
            rows.append(FigureRow(cell.label, self.swatch(cell.label), drawing, words.rate(rate), "tokens/s"))
        return FigureGroup("tokens per second", tuple(rows))

    # -- acceptance

    def drafting(self) -> list[Cell]:
        """Return the contenders whose drafts are known, at the lowest concurrency."""
        cells = (cell for cell in self.overall if cell.concurrency == self.levels[0] and not cell.plain)
        return [cell for cell in cells if cell.tau is not None or any(cell.drafted_per_position)]

    def acceptance(self) -> Markup | None:
        """Draw, by depth, the accepted share of the drafts that reached it; None if it is not known."""
        lines = [line for cell in self.drafting() if (line := self._accepted(cell)).points]
        if not lines:
            return None
        longest = round(max(line.points[-1][0] for line in lines))
        up = Axis(0.0, 1.0, ticks=(0, 0.25, 0.5, 0.75, 1))
        every = math.ceil(longest / MOST_LABELS)
        x_words = {float(place): str(place) for place in range(1, longest + 1, every)}
        y_words = {tick: f"{100 * tick:.0f} %" for tick in up.ticks}
        across = Axis(1 - 0.1 * longest, longest + 0.3)  # room for the labels of the vertical axis
        return plots.chart(lines, across, up, x_words, y_words, "acceptance by position")

    def _accepted(self, cell: Cell) -> ChartLine:
        pairs = enumerate(zip(cell.drafted_per_position, cell.accepted_per_position, strict=False), start=1)
        known = [(position, drafted, accepted) for position, (drafted, accepted) in pairs if drafted]
        return ChartLine(
            self.series[cell.label],
            tuple((float(position), accepted / drafted) for position, drafted, accepted in known),
            tuple(f"{cell.label}, position {place}: {n:,} of {of:,} accepted" for place, of, n in known),
            tuple(f"{n}/{of}" if of < SELDOM else "" for _, of, n in known),
        )

    # -- latency

    def latency(self) -> list[tuple[str, list[tuple[Cell, list[FigureRow]]]]]:
        """Return, by concurrency and contender, ranges from the median to the 99th percentile, on one scale for all."""
        levels = []
        for level in self.levels:
            cells = [cell for cell in self.overall if cell.concurrency == level]
            rows = [(cell, reaches) for cell in cells if (reaches := self._reaches(cell, cells))]
            if rows:
                levels.append((words.at_once(level), rows))
        return levels

    def _reaches(self, cell: Cell, beside: Iterable[Cell]) -> list[FigureRow]:
        reaches = []
        for name, of in LATENCIES:
            if (spread := of(cell)) is None:
                continue
            axis = plots.zero_axis([other.p99 for one in beside if (other := of(one)) is not None])
            far = f"99th percentile {words.seconds(spread.p99)}"
            hint = f"{cell.label}, {name}: median {words.seconds(spread.p50)}, {far}"
            drawing = plots.reach(axis, self.series[cell.label], spread.p50, spread.p99, hint)
            reaches.append(FigureRow(name, Markup(), drawing, words.spread(spread)))
        return reaches


def series_of(cells: Iterable[Cell]) -> dict[str, Series]:
    """Return a colour for each method (grey for plain decoding), a shape for each of its k, in the order measured."""
    methods: dict[str, dict[str, None]] = {PLAIN: {}}
    for cell in cells:
        methods.setdefault(cell.method, {})[cell.label] = None
    return {
        label: Series(label, colour % plots.COLOURS, shape)
        for colour, labels in enumerate(methods.values())
        for shape, label in enumerate(labels)
    }


def _empty(axis: Axis) -> Markup:
    return plots.track(plots.grid(axis, 2 * plots.MIDDLE, emphasis=1), label="not measured")


def _hint(cell: Cell, speedup: Speedup) -> str:
    figure = f"{words.ratio(speedup.ratio)}, {words.INTERVAL} {words.interval(speedup)}"
    return f"{cell.workload}, {cell.label}: {figure} over {words.count(speedup.pairs, 'pair')}"
