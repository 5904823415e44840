"""The answer in one sentence: switch it on, up to where, or leave it off. Read from the intervals, not from the dots.

A method counts as faster where its whole interval lies above 1, widened for the number compared (`claims`). Of several
that do, the one with the highest ratio is named.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.bench import report_words as words
from paceline.bench.claims import Best, best_by_concurrency, judged
from paceline.bench.results import ALL, Cell, Results

GOOD, MIXED, BAD, UNKNOWN = "good", "mixed", "bad", "unknown"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    tone: str
    sentence: str
    figure: str | None = None
    caption: str = ""
    details: tuple[str, ...] = ()


def overall(results: Results) -> tuple[Cell, ...]:
    """The cells of everything together; of the only workload where there is but one."""
    names = {cell.workload for cell in results.cells}
    chosen = ALL if ALL in names else next(iter(names)) if len(names) == 1 else None
    return tuple(cell for cell in results.cells if cell.workload == chosen)


def verdict(results: Results) -> Verdict:
    cells = overall(results)
    best = best_by_concurrency(cells)
    if not best:
        return _without_comparison(results, cells)
    paying = [found for found in best if found.pays]
    if not paying:
        return _leave_it_off(results, best)
    return _switch_it_on(results, best, paying)


def _switch_it_on(results: Results, best: list[Best], paying: list[Best]) -> Verdict:
    first, refused = paying[0], [found for found in best if not found.pays]
    where = f" for {_levels(paying, best)}" if refused else ""
    plain = _plain_name(results)
    if results.endpoint is None:
        sentence = f"Switch it on{where}: {first.cell.label} is {words.ratio(first.speedup.ratio)} as fast as {plain}."
    else:
        sentence = f"The endpoint is faster{where}: {words.ratio(first.speedup.ratio)} as fast as {plain}."
    details = [_at_level(found, first) for found in best if found is not first]
    return Verdict(
        tone=MIXED if refused else GOOD,
        sentence=sentence,
        figure=words.ratio(first.speedup.ratio),
        caption=f"with {words.at_once(first.cell.concurrency)}; {_interval(first)}",
        details=(*details, *_by_workload(results, first.cell)),
    )


def _leave_it_off(results: Results, best: list[Best]) -> Verdict:
    top = max(best, key=lambda found: found.speedup.ratio)
    slower = all(words.outcome(found.speedup) == words.SLOWER for found in best)
    how = "slower than" if slower else "clearly faster than"
    what = "Leave it off" if results.endpoint is None else "No gain"
    thing = ("everything measured is" if slower else "nothing measured is") + f" {how} {_plain_name(results)}"
    if top.may_be_chance:
        thing = f"{top.cell.label} was the fastest of {top.compared} compared, which may be chance; give more prompts"
    comes = "comes closest" if slower else "is the best"
    closest = f"{top.cell.label} {comes}, with {words.at_once(top.cell.concurrency)}"
    return Verdict(
        tone=BAD,
        sentence=f"{what}: {thing}.",
        figure=words.ratio(top.speedup.ratio),
        caption=f"{closest}; {_interval(top)}",
        details=tuple(_by_workload(results, top.cell)),
    )


def _without_comparison(results: Results, cells: tuple[Cell, ...]) -> Verdict:
    rated = sorted((cell for cell in cells if cell.tokens_per_s is not None), key=lambda cell: cell.concurrency)
    engines = [cell for cell in rated if not cell.plain]
    if results.endpoint is None or not engines or any(cell.plain for cell in cells):
        what = "Without the answers that loop, too little" if any(cell.speedup for cell in cells) else "Too little"
        return Verdict(tone=UNKNOWN, sentence=f"{what} was measured to say whether speculation pays.")
    speeds = [f"{words.rate(cell.tokens_per_s)} with {words.at_once(cell.concurrency)}" for cell in engines]
    return Verdict(
        tone=UNKNOWN,
        sentence=f"Tokens per second of this server: {words.listed(speeds)}.",
        figure=words.rate(engines[0].tokens_per_s),
        caption="tokens per second",
        details=("No second endpoint was measured beside it, so there is no speed-up to tell.",),
    )


def _levels(paying: list[Best], best: list[Best]) -> str:
    levels = [found.cell.concurrency for found in paying]
    if paying != best[: len(paying)]:
        return f"{words.listed([str(level) for level in levels])} requests at a time"
    return words.at_once(levels[0]) if len(levels) == 1 else f"up to {levels[-1]} requests at a time"


def _plain_name(results: Results) -> str:
    return "plain decoding" if results.endpoint is None else "the baseline"


def _interval(found: Best) -> str:
    apart = ", answers that loop left out" if found.without_loops else ""
    return f"{words.INTERVAL} {words.interval(found.speedup)}{apart}"


def _at_level(found: Best, first: Best) -> str:
    said = {words.FASTER: "", words.LEVEL: ", not clearly different from 1", words.SLOWER: ", slower"}
    ending = ", which may be chance" if found.may_be_chance else said[words.outcome(found.speedup)]
    figure = f"{words.ratio(found.speedup.ratio)} ({words.interval(found.speedup)})"
    which = "it is" if found.cell.label == first.cell.label else f"the best is {found.cell.label} at"
    return f"With {words.at_once(found.cell.concurrency)} {which} {figure}{ending}."


def _by_workload(results: Results, chosen: Cell) -> list[str]:
    """Where the chosen engine does best and worst."""
    same = [
        cell
        for cell in results.cells
        if (cell.method, cell.k, cell.concurrency) == (chosen.method, chosen.k, chosen.concurrency)
    ]
    known = [(speedup, cell.workload) for cell in same if (speedup := judged(cell))]
    ranked = sorted((speedup.ratio, workload) for speedup, workload in known if workload != chosen.workload)
    if len(ranked) < 2:
        return []
    (low, worst), (high, most) = ranked[0], ranked[-1]
    return [f"By workload it ranges from {words.ratio(low)} ({worst}) to {words.ratio(high)} ({most})."]
