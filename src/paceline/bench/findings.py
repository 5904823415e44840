"""Conclusions of a benchmark in sentences, for the terminal and the report: whether drafting pays, and the caveats.

Looping answers flatter every method that copies, so if some loop, the figure without them counts. The best of several
is often only the luckiest: a method counts as faster if its interval, widened for the number of cells compared
(Bonferroni), lies above 1. Of several such methods the one with the highest ratio is named. No torch.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

from paceline.bench.report import words
from paceline.bench.results import ALL, Cell, Results, Speedup

GOOD, MIXED, BAD, UNKNOWN = "good", "mixed", "bad", "unknown"


@dataclass(frozen=True, kw_only=True)
class Conclusion:
    tone: str
    sentence: str  # switch it on, up to where, or leave it off
    figure: str | None = None
    caption: str = ""
    details: tuple[str, ...] = ()


@dataclass(frozen=True)
class Note:
    heading: str
    lines: tuple[str, ...]


@dataclass(frozen=True)
class BestCell:
    """The most promising cell of one concurrency; `compared` cells of all concurrencies have a speed-up."""

    cell: Cell
    speedup: Speedup
    compared: int

    @property
    def pays(self) -> bool:
        normal = NormalDist()
        wider = normal.inv_cdf(1 - 0.025 / self.compared) / normal.inv_cdf(1 - 0.025)
        return math.log(self.speedup.ratio) > wider * math.log(self.speedup.ratio / self.speedup.low)

    @property
    def may_be_chance(self) -> bool:
        """Return whether it would count as faster if it were the only cell compared."""
        return self.speedup.low > 1 and not self.pays

    @property
    def ratio(self) -> str:
        return words.ratio(self.speedup.ratio)

    @property
    def where(self) -> str:
        return f"with {words.at_once(self.cell.concurrency)}"

    @property
    def interval(self) -> str:
        return words.interval(self.speedup) + (", answers that loop left out" if self.cell.looping else "")


def judged(cell: Cell) -> Speedup | None:
    """Return the figure that conclusions use; None if too little was measured without loops."""
    if not cell.looping:
        return cell.speedup
    return cell.without_loops.speedup if cell.without_loops else None


def best_by_concurrency(cells: Sequence[Cell]) -> list[BestCell]:
    """Return the best cell of each concurrency: one that pays goes before one with a higher ratio."""
    figures = [(cell, speedup) for cell in cells if (speedup := judged(cell)) is not None]
    best = [BestCell(cell, speedup, len(figures)) for cell, speedup in figures]
    by_level: dict[int, BestCell] = {}
    for each in sorted(best, key=lambda each: (each.pays, each.speedup.ratio), reverse=True):
        by_level.setdefault(each.cell.concurrency, each)
    return [by_level[concurrency] for concurrency in sorted(by_level)]


def overall(results: Results) -> tuple[Cell, ...]:
    """Return the cells of all workloads together, or those of the only workload."""
    names = {cell.workload for cell in results.cells}
    chosen = ALL if ALL in names else next(iter(names)) if len(names) == 1 else None
    return tuple(cell for cell in results.cells if cell.workload == chosen)


def rival(results: Results) -> str:
    return "plain decoding" if results.endpoint is None else "the baseline"


def verdict(results: Results) -> Conclusion:
    cells = overall(results)
    best = best_by_concurrency(cells)
    if not best:
        return _without_comparison(results, cells)
    paying, over = [each for each in best if each.pays], rival(results)
    head = paying[0] if paying else max(best, key=lambda each: each.speedup.ratio)
    if paying:
        where = f" for {_levels(paying, best)}" if len(paying) < len(best) else ""
        local = results.endpoint is None
        switch = f"Switch it on{where}: {head.cell.label}" if local else f"The endpoint is faster{where}: it"
        sentence = f"{switch} is {head.ratio} as fast as {over}."
    else:
        switch = "Leave it off" if results.endpoint is None else "No gain"
        sentence = f"{switch}: {_no_gain(head, all(each.speedup.high < 1 for each in best), over)}."
    known = {cell.concurrency for cell in cells if judged(cell)}
    silent = dict.fromkeys(cell.concurrency for cell in cells if cell.speedup and cell.concurrency not in known)
    return Conclusion(
        tone=BAD if not paying else MIXED if len(paying) < len(best) else GOOD,
        sentence=sentence,
        figure=head.ratio,
        caption=("" if paying else f"{head.cell.label} ") + f"{head.where}; {words.INTERVAL} {head.interval}",
        details=(
            *(_at_level(each, over) for each in best if each is not head),
            *(f"With {words.at_once(level)} too little is left without the answers that loop." for level in silent),
            *_by_workload(results, head.cell),
        ),
    )


def _levels(paying: list[BestCell], best: list[BestCell]) -> str:
    levels = [each.cell.concurrency for each in paying]
    if paying != best[: len(paying)]:
        return f"{words.listed([str(level) for level in levels])} requests at a time"
    return words.at_once(levels[0]) if len(levels) == 1 else f"up to {levels[-1]} requests at a time"


def _no_gain(best: BestCell, slower: bool, over: str) -> str:
    if best.may_be_chance:
        return f"{best.cell.label} was the fastest of {best.compared} compared, which may be chance; give more prompts"
    return f"everything measured is slower than {over}" if slower else f"nothing measured is clearly faster than {over}"


def _at_level(best: BestCell, over: str) -> str:
    where, label, figure = best.where.capitalize(), best.cell.label, f"{best.ratio} ({best.interval})"
    if best.pays:
        return f"{where} {label} is the fastest: {figure}."
    if best.may_be_chance:
        return f"{where} {label} is the fastest of {best.compared} compared at {figure}, which may be chance."
    how = "everything is slower than" if best.speedup.high < 1 else "nothing is clearly faster than"
    return f"{where} {how} {over}: {label} comes closest at {figure}."


def _by_workload(results: Results, chosen: Cell) -> list[str]:
    """Say on which workloads the chosen contender does best and worst."""
    same = [cell for cell in results.cells if (cell.label, cell.concurrency) == (chosen.label, chosen.concurrency)]
    known = [(speedup.ratio, cell.workload) for cell in same if (speedup := judged(cell))]
    ranked = sorted(pair for pair in known if pair[1] != chosen.workload)
    if len(ranked) < 2:
        return []
    (low, worst), (high, most) = ranked[0], ranked[-1]
    return [f"By workload it ranges from {words.ratio(low)} ({worst}) to {words.ratio(high)} ({most})."]


def _without_comparison(results: Results, cells: Sequence[Cell]) -> Conclusion:
    rated = sorted((cell for cell in cells if cell.tokens_per_s is not None), key=lambda cell: cell.concurrency)
    if results.endpoint is None or not rated or any(cell.plain for cell in cells):
        what = "Without the answers that loop, too little" if any(cell.speedup for cell in cells) else "Too little"
        return Conclusion(tone=UNKNOWN, sentence=f"{what} was measured to say whether speculation pays.")
    speeds = [f"{words.rate(cell.tokens_per_s)} with {words.at_once(cell.concurrency)}" for cell in rated]
    return Conclusion(
        tone=UNKNOWN,
        sentence=f"Tokens per second of this server: {words.listed(speeds)}.",
        figure=words.rate(rated[0].tokens_per_s),
        caption="tokens per second",
        details=("No speed-up: a server alone has nothing to be compared with; give --baseline-endpoint.",),
    )


def notes(results: Results) -> list[Note]:
    notes = []
    if not results.complete:
        notes.append(Note("This run was not finished", ("The figures are of the part measured until then.",)))
    if seeded := words.seeded(results.settings):
        notes.append(Note("Seeded requests", (f"{seeded}; --seed none measures ordinary ones",)))
    if changed := [cell for cell in results.cells if cell.identical is False]:
        where = dict.fromkeys(f"{cell.label}, {cell.workload}, {words.at_once(cell.concurrency)}" for cell in changed)
        more = () if results.endpoint else ("`paceline prove` says more",)
        notes.append(Note(f"Some answers differ from those of {rival(results)}", (*where, *more)))
    if reasons := Counter(cell.too_short for cell in results.cells if cell.too_short):
        cells = f"{words.count(sum(reasons.values()), 'cell')} of {len(results.cells)}"
        lines = (f"{reason} ({words.count(n, 'cell')})" for reason, n in reasons.most_common())
        notes.append(Note(f"Too little was measured for a figure in {cells}", tuple(lines)))
    return notes


def left_out(results: Results) -> str | None:
    """Describe the prompts that filled no group."""
    counts = results.settings.get("left_out") or {}
    parts = [f"{words.count(n, 'prompt')} with {words.at_once(int(level))}" for level, n in counts.items() if n]
    return f"{words.listed(parts)}, for they filled no group" if parts else None
