"""A benchmark on the terminal: a table for each concurrency, one of the speed-ups by workload, and what to know."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from paceline.bench import report_words as words
from paceline.bench.claims import Best, best_by_concurrency, judged
from paceline.bench.results import ALL, PLAIN, Cell, Results, Speedup, Spread
from paceline.cli.output import print_note

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

NONE = "–"
HEADINGS = (
    "method",
    "tok/s",
    "speed-up [95 %]",
    "τ",
    "accepted",
    "first token\np50 / p99",
    "per token\np50 / p99",
    "request\np50 / p99",
    "engine",
    "loops",
    "same\ntokens",
)


def print_results(results: Results) -> None:
    from rich.console import Console

    console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    for concurrency in dict.fromkeys(cell.concurrency for cell in results.cells):
        cells = [cell for cell in results.cells if cell.concurrency == concurrency]
        _print_methods(console, results, [cell for cell in cells if cell.workload == ALL])
        _print_workloads(console, [cell for cell in cells if cell.workload != ALL])
    for line in notes(results):
        print_note(line)


def _print_methods(console: Console, results: Results, cells: Sequence[Cell]) -> None:
    from rich.box import SIMPLE
    from rich.table import Table

    table = Table(box=SIMPLE, title=title(results, cells[0]))
    for heading in HEADINGS:
        table.add_column(heading, justify="left" if heading == "method" else "right", no_wrap=True)
    for cell in cells:
        table.add_row(
            cell.label,
            _number(cell.tokens_per_s, "{:.1f}"),
            _figure(cell.speedup),
            _number(cell.tau, "{:.2f}"),
            _number(cell.acceptance_rate, "{:.0%}"),
            _spread(cell.ttft_s),
            _spread(cell.inter_token_s),
            _spread(cell.request_s),
            _number(cell.engine_share, "{:.1%}"),
            f"{cell.looping} of {cell.answers}",
            NONE if cell.identical is None else "yes" if cell.identical else "no",
        )
    console.print(table)


def _print_workloads(console: Console, cells: Sequence[Cell]) -> None:
    """Speed-ups only; everything else is in the report."""
    from rich.box import SIMPLE
    from rich.table import Table

    names = list(dict.fromkeys(cell.workload for cell in cells))
    compared = list(dict.fromkeys(cell.label for cell in cells if not cell.plain))
    if len(names) < 2 or not any(cell.speedup for cell in cells):
        return
    table = Table(box=SIMPLE, title="speed-up by workload [95 %]")
    table.add_column("workload")
    for heading in ("answers", "loops", *compared):
        table.add_column(heading, justify="right", no_wrap=True)
    for name in names:
        mine = {cell.label: cell for cell in cells if cell.workload == name}
        first = next(iter(mine.values()))
        figures = [_figure(mine[label].speedup) for label in compared]
        table.add_row(name, str(first.answers), str(first.looping), *figures)
    console.print(table)


def title(results: Results, cell: Cell) -> str:
    where = results.where
    facts = [str(where[key]) for key in ("device", "dtype", "kernels") if key in where]
    if results.endpoint is not None:
        facts = [str(results.endpoint["url"])]
    return " · ".join(
        [results.model, *facts, at_once(cell.concurrency), f"temperature {results.settings.get('temperature', 0):g}"]
    )


def notes(results: Results) -> list[str]:
    """What a reader must know to trust the figures, and what keeps some from being there."""
    everything = [cell for cell in results.cells if cell.workload == ALL]
    lines = []
    rival = "plain decoding" if results.endpoint is None else "the baseline"
    figures = [cell for cell in everything if cell.speedup is not None]
    if figures:
        lines += best(everything, rival)
        lines.append(
            f"speed-up: seconds per token of {rival} over the method's, prompts included, in the same run; "
            f"95 % interval over {_pairs(figures)} pairs of groups of prompts"
        )
    if results.endpoint is not None and all(cell.method != PLAIN for cell in everything):
        lines.append("no speed-up: a server alone has nothing to be compared with; give --baseline-endpoint")
    for cell in everything:
        if cell.too_short is not None and not (cell.plain and figures):
            lines.append(f"no speed-up for {cell.label}, {at_once(cell.concurrency)}: {cell.too_short}")
    for concurrency in dict.fromkeys(cell.concurrency for cell in figures):
        cells = [cell for cell in results.cells if cell.concurrency == concurrency and cell.workload != ALL]
        if few := sorted({cell.workload for cell in cells if cell.too_short and not cell.plain}):
            lines.append(f"{at_once(concurrency)}: too little of {', '.join(few)} alone for a figure of its own")
    if any(cell.looping for cell in everything):
        lines.append("loops: answers in which 16 tokens come twice; they flatter methods that copy. Without them:")
        lines += [f"  {line}" for line in calm(everything)]
    lines.append(
        "per token: the wait for each token after the first; tokens committed together share theirs equally. "
        "p99 of fewer than 100 values is the worst"
    )
    differing = [f"{cell.label} ({at_once(cell.concurrency)})" for cell in everything if cell.identical is False]
    if differing:
        lines.append(
            f"not the same tokens as {rival}: {', '.join(differing)}"
            + ("" if results.endpoint else "; `paceline prove` says more")
        )
    if seeded := words.seeded(results.settings):
        lines.append(f"{seeded}; --seed none measures ordinary ones")
    for level, count in results.settings.get("left_out", {}).items():
        lines.append(f"{count} prompts did not fill a group of {level} and were left out there")
    return lines


def best(cells: Sequence[Cell], rival: str) -> list[str]:
    lines = [f"{at_once(found.cell.concurrency)}: {_claim(found, rival)}" for found in best_by_concurrency(cells)]
    said = {cell.concurrency for cell in cells if judged(cell)}
    silent = dict.fromkeys(cell.concurrency for cell in cells if cell.speedup and cell.concurrency not in said)
    without = "without the answers that loop, too little is left to say what is faster"
    return [*lines, *(f"{at_once(concurrency)}: {without}" for concurrency in silent)]


def _claim(found: Best, rival: str) -> str:
    speedup, label = found.speedup, found.cell.label
    figure = figure_words(speedup) + (", answers that loop left out" if found.without_loops else "")
    if found.pays:
        return f"{label} is the fastest: {figure} over {rival}"
    if found.may_be_chance:
        return f"{label} is the fastest of {found.compared} compared, which may be chance: {figure} over {rival}"
    if speedup.high < 1:
        return f"nothing here is faster than {rival}; the least slow is {label}, {figure}"
    return f"nothing is clearly faster than {rival}: of {label}, the fastest, the interval holds 1"


def at_once(concurrency: int) -> str:
    return "1 request at a time" if concurrency == 1 else f"{concurrency} requests at once"


def calm(cells: Sequence[Cell]) -> list[str]:
    lines = []
    for cell in cells:
        if cell.plain or cell.without_loops is None:
            continue
        speedup = cell.without_loops.speedup
        what = "too little left to say" if speedup is None else figure_words(speedup)
        lines.append(f"{cell.label}, {at_once(cell.concurrency)}: {what} ({cell.without_loops.answers} answers)")
    return lines


def _pairs(cells: Sequence[Cell]) -> str:
    counts = sorted({cell.speedup.pairs for cell in cells if cell.speedup is not None})
    return " to ".join(map(str, dict.fromkeys((counts[0], counts[-1]))))


def figure_words(speedup: Speedup) -> str:
    return f"{speedup.ratio:.2f}x [{speedup.low:.2f}, {speedup.high:.2f}]"


def _figure(speedup: Speedup | None) -> Text:
    from rich.text import Text

    if speedup is None:
        return Text(NONE)
    style = "green" if speedup.low > 1 else "red" if speedup.high < 1 else ""
    return Text(figure_words(speedup), style=style)


def _number(value: float | None, form: str) -> str:
    return NONE if value is None else form.format(value)


def _spread(spread: Spread | None) -> str:
    if spread is None:
        return NONE
    if spread.p99 >= 1:
        return f"{spread.p50:.2f} / {spread.p99:.2f} s"
    digits = 0 if spread.p99 >= 0.01 else 1
    return f"{1000 * spread.p50:.{digits}f} / {1000 * spread.p99:.{digits}f} ms"
