"""Small SVG drawings for the report, made of strings: tracks with dots and whiskers, and line charts.

Horizontal positions are percentages and everything else is pixels, so that a drawing fills whatever width it is given
while its text, strokes and marks keep their size: the same drawing serves a phone and a desk. Colours come from CSS
classes (`s0` to `s7` by series), which know of light and dark. Every string from outside passes through `tag`, which
escapes it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

from paceline.bench.results import Speedup

MARGIN = 0.03  # share of the width, left free on both sides
MIDDLE = 14  # pixels; middle of a track, from its top
RATIO_TICKS = (0.1, 0.2, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10, 15, 20, 30)
CLOSE_TICKS = tuple(tick / 10 for tick in range(1, 30))  # where all is within a factor of two
SHAPES = (  # circle, square, diamond, triangle, cross: distinct without colour
    "M-5,0a5,5 0 1,0 10,0a5,5 0 1,0 -10,0z",
    "M-4.4,-4.4h8.8v8.8h-8.8z",
    "M0,-6.2L6.2,0L0,6.2L-6.2,0z",
    "M0,-5.8L5.6,4.4H-5.6z",
    "M-5,-2h3v-3h4v3h3v4h-3v3h-4v-3h-3z",
)
TEXT_HEIGHT = 15  # pixels; labels closer than this would overlap
COLOURS = 8  # in the style sheet


def tag(name: str, *inside: str, **attributes: object) -> Markup:
    """Return an element. `class_` stands for class, underscores for hyphens; None leaves an attribute out."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(_short(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{name}{written}>{''.join(map(str, map(escape, inside)))}</{name}>")


def _short(value: object) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


@dataclass(frozen=True)
class Series:
    """Name, colour and shape of one contender in all of the report."""

    name: str
    colour: int
    shape: int = 0

    @property
    def css(self) -> str:
        return f"s{self.colour}"


@dataclass(frozen=True)
class Axis:
    """Map from values to shares of the width. Values outside are drawn at the edge."""

    low: float
    high: float
    log: bool = False
    ticks: tuple[float, ...] = ()

    def share(self, value: float) -> float:
        change = math.log if self.log else float
        low, high = change(self.low), change(self.high)
        return min(max((change(max(value, self.low)) - low) / (high - low), 0.0), 1.0)

    def x(self, value: float) -> str:
        return f"{100 * (MARGIN + self.share(value) * (1 - 2 * MARGIN)):.2f}%"


def ratio_axis(speedups: Sequence[Speedup]) -> Axis:
    """Return a logarithmic axis with 1 on it; intervals wider than twice the range of the ratios are cut."""
    ratios = [speedup.ratio for speedup in speedups]
    low = max(min(speedup.low for speedup in speedups), min(ratios) / 2)
    high = min(max(speedup.high for speedup in speedups), max(ratios) * 2)
    low, high = min(low, 0.95) / 1.03, max(high, 1.15) * 1.03
    axis = Axis(low, high, log=True)
    candidates = CLOSE_TICKS if high / low < 2 else RATIO_TICKS
    return Axis(low, high, True, _apart(axis, [tick for tick in candidates if low <= tick <= high]))


def _apart(axis: Axis, ticks: Sequence[float]) -> tuple[float, ...]:
    """Return ticks whose labels do not touch on a narrow screen: 1 first, then the roundest."""
    chosen: list[float] = []
    for tick in sorted(ticks, key=lambda tick: (tick != 1, tick not in (0.5, 2, 3, 4, 8), tick)):
        if all(abs(axis.share(tick) - axis.share(other)) > 0.13 for other in chosen):
            chosen.append(tick)
    return tuple(sorted(chosen))


def zero_axis(values: Sequence[float]) -> Axis:
    """Return an axis from 0 to a round figure above the greatest value, with about four steps."""
    greatest = max([value for value in values if value > 0], default=1.0)
    power = 10 ** math.floor(math.log10(greatest / 4))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor * 4 >= greatest * 0.98)
    steps = math.ceil(greatest / step - 0.02)
    return Axis(0.0, step * steps, ticks=tuple(step * i for i in range(steps + 1)))


def wide_axis(values: Sequence[float]) -> Axis:
    """Return an axis from 0; a logarithmic one, with ticks at 1, 2 and 5, for values of more than a factor of 3."""
    positive = [value for value in values if value > 0]
    if not positive or max(positive) < 3 * min(positive):
        return zero_axis(values)
    powers = range(math.floor(math.log10(min(positive))), math.ceil(math.log10(max(positive))) + 1)
    round_values = [factor * 10.0**power for power in powers for factor in (1, 2, 5)]
    low, high = min(positive) / 1.2, max(positive) * 1.1
    return Axis(low, high, True, tuple(value for value in round_values if low <= value <= high))


def mark(x: str, y: float, series: Series, hint: str = "") -> Markup:
    shape = tag("path", d=SHAPES[series.shape % len(SHAPES)], class_=f"mark {series.css}")
    return tag("svg", tag("title", hint) if hint else "", shape, x=x, y=y, overflow="visible", class_="at")


def swatch(series: Series) -> Markup:
    """Draw the mark alone, for legends and row labels."""
    return tag("svg", mark("7", 7, series), width=14, height=14, class_="swatch", aria_hidden="true")


def track(*drawn: str, height: int = 2 * MIDDLE, label: str = "") -> Markup:
    return tag("svg", *drawn, width="100%", height=height, class_="track", role="img", aria_label=label or None)


def grid(axis: Axis, height: int, emphasis: float | None = None) -> Markup:
    lines = [
        tag("line", x1=axis.x(tick), x2=axis.x(tick), y1=0, y2=height, class_="one" if tick == emphasis else "grid")
        for tick in axis.ticks
    ]
    return Markup("").join(lines)


def level_line(axis: Axis, y: float, series: Series, low: float, high: float, kind: str = "line") -> Markup:
    return tag("line", x1=axis.x(low), x2=axis.x(high), y1=y, y2=y, class_=f"{kind} {series.css}")


def cap(axis: Axis, y: float, series: Series, end: float) -> Markup:
    return tag("line", x1=axis.x(end), x2=axis.x(end), y1=y - 5, y2=y + 5, class_=f"line {series.css}")


def whisker(axis: Axis, y: float, series: Series, speedup: Speedup, hint: str, slim: bool = False) -> Markup:
    """Draw a dot with its interval; an end that does not fit has no cap."""
    ends = [end for end in (speedup.low, speedup.high) if axis.low <= end <= axis.high and not slim]
    caps = Markup("").join(cap(axis, y, series, end) for end in ends)
    bar = level_line(axis, y, series, speedup.low, speedup.high)
    return bar + caps + mark(axis.x(speedup.ratio), y, series, hint)


def scale(axis: Axis, words: dict[float, str]) -> Markup:
    """Draw labels under tracks."""
    labels = [tag("text", words[tick], x=axis.x(tick), y=13, text_anchor="middle") for tick in axis.ticks]
    return tag("svg", *labels, width="100%", height=18, class_="scale", aria_hidden="true")


def reach(axis: Axis, series: Series, middle: float, far: float, hint: str) -> Markup:
    """Draw a line from the median (the mark) to the 99th percentile (the cap)."""
    base = tag("line", x1=axis.x(0), x2=axis.x(axis.high), y1=MIDDLE, y2=MIDDLE, class_="grid")
    bar, end = level_line(axis, MIDDLE, series, middle, far), cap(axis, MIDDLE, series, far)
    return track(base, bar, end, mark(axis.x(middle), MIDDLE, series, hint), label=hint)


@dataclass(frozen=True)
class ChartLine:
    series: Series
    points: tuple[tuple[float, float], ...]  # in the order of x
    hints: tuple[str, ...]
    few: tuple[str, ...] = ()  # counts of each point that has few, which is faded; "" for other points


def chart(
    lines: Sequence[ChartLine], across: Axis, up: Axis, x_words: dict[float, str], y_words: dict[float, str], label: str
) -> Markup:
    """Draw lines over an axis; labels of the vertical axis sit on its grid lines, so they take no width."""
    top, bottom = 22, 262

    def y(value: float) -> float:
        return bottom - up.share(value) * (bottom - top)

    drawn = []
    for tick in up.ticks:
        drawn.append(tag("line", x1="0", x2="100%", y1=y(tick), y2=y(tick), class_="grid"))
        drawn.append(tag("text", y_words[tick], x="0", y=y(tick) - 5))
    drawn.append(tag("line", x1="0", x2="100%", y1=bottom, y2=bottom, class_="one"))
    drawn += [tag("text", words, x=across.x(at), y=bottom + 20, text_anchor="middle") for at, words in x_words.items()]
    written: list[tuple[str, float]] = []
    for line in lines:
        seldom = line.few or ("",) * len(line.points)
        places = [(across.x(x), y(value), few) for (x, value), few in zip(line.points, seldom, strict=True)]
        drawn += [
            tag("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=f"line {line.series.css}" + (" faded" if few else ""))
            for (x1, y1, _), (x2, y2, few) in itertools.pairwise(places)
        ]
        for (x, height, few), hint in zip(places, line.hints, strict=True):
            drawn.append(tag("g", mark(x, height, line.series, hint), class_="faded" if few else None))
            if few and all(x != other or abs(height - taken) >= TEXT_HEIGHT for other, taken in written):
                drawn.append(tag("text", few, x=x, y=height - 9, text_anchor="middle"))  # else in the hint alone
                written.append((x, height))
    return tag("svg", *drawn, width="100%", height=bottom + 30, class_="chart", role="img", aria_label=label)
