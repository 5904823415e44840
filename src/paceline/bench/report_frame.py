"""What all parts of the report share: which engines there are and how each is drawn, and what was measured of all
workloads together.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from markupsafe import Markup

from paceline.bench import plots
from paceline.bench.plots import Series
from paceline.bench.report_verdict import overall
from paceline.bench.results import ALL, PLAIN, Cell, Results


@dataclass(frozen=True)
class Row:
    label: str
    swatch: Markup
    drawing: Markup
    figure: str = ""
    note: str = ""
    outcome: str = ""


class Frame:
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


def series_of(cells: Iterable[Cell]) -> dict[str, Series]:
    """One colour for each method (grey for plain decoding), one shape for each of its k, in the order measured."""
    methods: dict[str, list[str]] = {PLAIN: []}
    for cell in cells:
        labels = methods.setdefault(cell.method, [])
        if cell.label not in labels:
            labels.append(cell.label)
    return {
        label: Series(label, colour % plots.COLOURS, shape)
        for colour, labels in enumerate(methods.values())
        for shape, label in enumerate(labels)
    }
