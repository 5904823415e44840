"""A benchmark on the terminal: a table for each concurrency, one of the speed-ups by workload, and what to know."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.text import Text

from paceline.bench import findings
from paceline.bench.report import words
from paceline.bench.results import ALL, Cell, Results, Speedup
from paceline.cli.output import print_note
from paceline.cli.table import in_colour, print_table

HEADINGS = (
    *("method", "tok/s", "prompt\ntok/s", "speed-up [95 %]", "τ", "accepted"),
    *("first token\np50 / p99", "per token\np50 / p99", "request\np50 / p99", "engine", "loops", "same\ntokens"),
)
MOST_LINES = 4  # lines of one note; the report has them all


def print_results(results: Results) -> None:
    for concurrency in dict.fromkeys(cell.concurrency for cell in results.cells):
        cells = [cell for cell in results.cells if cell.concurrency == concurrency]
        together = [cell for cell in cells if cell.workload == ALL]
        print_table(title(results, cells[0]), HEADINGS, [_method(cell) for cell in together])
        _print_workloads([cell for cell in cells if cell.workload != ALL])
    for line in notes(results):
        print_note(line)


def _method(cell: Cell) -> list[str | Text]:
    return [
        cell.label,
        words.rate(cell.tokens_per_s),
        words.rate(cell.prompt_tokens_per_s),
        _figure(cell.speedup),
        words.decimal(cell.tau),
        words.percent(cell.acceptance_rate),
        words.spread(cell.ttft_s),
        words.spread(cell.inter_token_s),
        words.spread(cell.request_s),
        words.percent(cell.engine_share),
        f"{cell.looping} of {cell.answers}",
        words.unchanged(cell),
    ]


def _print_workloads(cells: Sequence[Cell]) -> None:
    """Print speed-ups; the report has everything else."""
    names = list(dict.fromkeys(cell.workload for cell in cells))
    compared = list(dict.fromkeys(cell.label for cell in cells if not cell.plain))
    if len(names) < 2 or not any(cell.speedup for cell in cells):
        return
    rows: list[list[str | Text]] = []
    for name in names:
        by_label = {cell.label: cell for cell in cells if cell.workload == name}
        first = next(iter(by_label.values()))
        figures = [_figure(by_label[label].speedup) for label in compared]
        rows.append([name, str(first.answers), str(first.looping), *figures])
    print_table("speed-up by workload [95 %]", ("workload", "answers", "loops", *compared), rows)


def compared(one: Results, other: Results) -> list[dict[str, Any]]:
    """Return the cells that both runs have: both rates, and the second over the first."""
    known = {(cell.workload, cell.concurrency, cell.label): cell for cell in one.cells}
    entries = []
    for cell in other.cells:
        before = known.get((cell.workload, cell.concurrency, cell.label))
        rates = (before.tokens_per_s if before else None), cell.tokens_per_s
        if before is not None and rates[0] and rates[1]:
            speedups = [each.speedup.ratio if each.speedup else None for each in (before, cell)]
            entry = {"workload": cell.workload, "concurrency": cell.concurrency, "label": cell.label}
            entries.append(entry | {"tokens_per_s": list(rates), "ratio": rates[1] / rates[0], "speedup": speedups})
    return entries


def print_comparison(one: Results, other: Results) -> None:
    rows = []
    for entry in compared(one, other):
        rates = [words.rate(rate) for rate in entry["tokens_per_s"]]
        speedups = [words.DASH if ratio is None else words.ratio(ratio) for ratio in entry["speedup"]]
        where = [entry["workload"], str(entry["concurrency"]), entry["label"]]
        rows.append([*where, *rates, words.ratio(entry["ratio"]), *speedups])
    headings = ("workload", "at a time", "engine", "A tok/s", "B tok/s", "B over A", "A speed-up", "B speed-up")
    print_table(f"A: {one.model}, {one.date} · B: {other.model}, {other.date}", headings, rows, left="engine")
    if not rows:
        print_note("the two have no cell with a rate in common")
    for name in ("where", "settings"):
        facts, others = getattr(one, name), getattr(other, name)
        unlike = sorted(key for key in {*facts, *others} - {"command"} if facts.get(key) != others.get(key))
        if unlike:
            print_note("not the same in both: " + ", ".join(unlike).replace("_", " "))
    print_note("the rates of two runs also differ by how busy the machine was; speed-ups were measured within each run")


def title(results: Results, cell: Cell) -> str:
    facts = [str(results.where[key]) for key in ("device", "dtype", "kernels") if key in results.where]
    if results.endpoint is not None:
        facts = [str(results.endpoint["url"])]
    temperature = f"temperature {results.settings.get('temperature', 0):g}"
    return " · ".join([results.model, *facts, words.at_once(cell.concurrency), temperature])


def notes(results: Results) -> list[str]:
    """Return the verdict, the conditions of the figures, and why some are missing."""
    verdict, cells = findings.verdict(results), findings.overall(results)
    figure = f" ({verdict.figure} {verdict.caption})" if verdict.figure else ""
    lines = [verdict.sentence + figure, *verdict.details]
    if counts := sorted({cell.speedup.pairs for cell in cells if cell.speedup is not None}):
        pairs = " to ".join(map(str, dict.fromkeys((counts[0], counts[-1]))))
        lines.append(
            f"speed-up: seconds per token of {findings.rival(results)} over the method's, prompts included, in the "
            f"same run; 95 % interval over {pairs} pairs of groups of prompts"
        )
    if any(cell.looping for cell in cells):
        lines.append("loops: answers in which 16 tokens come twice; they flatter methods that copy. Without them:")
        lines += [f"  {line}" for cell in cells if not cell.plain for line in _without_loops(cell)]
    lines.append(
        "per token: the wait for each token after the first; tokens committed together share theirs equally. "
        "p99 of fewer than 100 values is the worst"
    )
    for note in findings.notes(results):
        more = ("the report has more",) if len(note.lines) > MOST_LINES else ()
        lines.append(f"{note.heading}: {'; '.join((*note.lines[:MOST_LINES], *more))}")
    if left_out := findings.left_out(results):
        lines.append(f"left out: {left_out}")
    return lines


def _without_loops(cell: Cell) -> list[str]:
    if cell.without_loops is None:
        return []
    answers, speedup = words.count(cell.without_loops.answers, "answer"), cell.without_loops.speedup
    figure = "too little left to measure" if speedup is None else figure_words(speedup)
    return [f"{cell.label}, {words.at_once(cell.concurrency)}: {figure} ({answers})"]


def figure_words(speedup: Speedup) -> str:
    return f"{speedup.ratio:.2f}x [{speedup.low:.2f}, {speedup.high:.2f}]"


def _figure(speedup: Speedup | None) -> str | Text:
    if speedup is None:
        return words.DASH
    outcome = words.outcome(speedup)
    return in_colour(figure_words(speedup), None if outcome == words.LEVEL else outcome == words.FASTER)
