"""The result of `paceline theory` on a terminal: a row for each k, and the conclusions in sentences."""

from __future__ import annotations

from rich.text import Text

from paceline.cli.output import human_bytes
from paceline.cli.table import in_colour, print_lines, print_table
from paceline.theory.table import Case, MemoryUse, TableRow, best_tree_row, row, rows

SHOWN = {*range(1, 11), 12, 14, 16, 20, 24, 32, 48, 64}  # k of the rows shown, besides the best and the asked k
AFTER = 2  # rows shown after the best k


def print_case(case: Case, asked: int, use: MemoryUse | None, batch: int) -> None:
    best, cells = case.best.k, []
    for each in rows(case):
        if each.k in (best, asked) or (each.k in SHOWN and each.k <= max(best, asked) + AFTER):
            note = " ".join(word for word, k in (("best", best), ("asked", asked)) if k == each.k)
            cells.append([*_cells(case, each), note if best != asked or best != each.k else "best"])
    print_table(None, [*_headings(case), ""], cells)
    print_lines(sentences(case, asked, use, batch))


def _headings(case: Case) -> list[str]:
    headings = ["k", "tokens/pass", "pass cost", "speed-up", "break-even α", "R (all k)", "RK+(1-R)"]
    if case.roofline is not None:
        headings.append("stops at")
    return [*headings, "tree", "tree gain"] if case.siblings else headings


def _cells(case: Case, each: TableRow) -> list[str | Text]:
    cells: list[str | Text] = [
        str(each.k),
        f"{each.tokens_per_pass:.2f}",
        f"{each.verify_cost:.2f}",
        gain(each.speedup),
        "none" if each.break_even_alpha is None else f"{each.break_even_alpha:.3f}",
        f"{each.whole_draft_rate:.1%}",
        f"{each.whole_prefix_tokens:.2f}",
    ]
    if case.roofline is not None:
        cells.append("never" if each.stop_batch is None else str(each.stop_batch))
    if each.tree_tokens_per_pass is not None and each.tree_speedup is not None:
        cells += [f"{each.tree_tokens_per_pass:.2f}", gain(each.tree_speedup)]
    return cells


def gain(speedup: float) -> Text:
    return in_colour(f"{speedup:.2f}x", None if speedup == 1 else speedup > 1)


def sentences(case: Case, asked: int, use: MemoryUse | None, batch: int) -> list[str]:
    lines = [f"a drafted token costs {case.draft_cost:g} plain passes"]
    if asked:
        lines.append(_asked(row(case, asked)))
    if not case.best.k:
        lines.append("no k pays: leave drafting off")
    elif case.best.k != asked:
        lines.append(f"k = {case.best.k} is best: {case.best.speedup:.2f}x")
    if (tree := best_tree_row(rows(case))) is not None:
        lines.append(
            f"a tree of {tree.k} nodes is best: {tree.tree_tokens_per_pass:.2f} tokens a pass, {tree.tree_speedup:.2f}x"
        )
    if case.limited:
        lines.append(f"k = {case.max_k} is the largest tried: more may be better still")
    if case.roofline is not None:
        rows_free = case.roofline.ridge(batch)
        lines.append(f"at batch {batch} arithmetic, not memory, bounds a pass from {rows_free:.0f} rows on")
    return lines if use is None else [*lines, _memory(use)]


def _asked(each: TableRow) -> str:
    even = each.break_even_alpha
    pays = "no acceptance makes it pay" if even is None else f"it pays above α {even:.3f}"
    return (
        f"k = {each.k}: {each.tokens_per_pass:.2f} tokens per pass (as a constant α of {each.alpha:.3f}), "
        f"{each.speedup:.2f}x; {pays}"
    )


def _memory(use: MemoryUse) -> str:
    lost = "the target alone leaves no room for K/V" if use.lost_share is None else f"{use.lost_share:.1%} less"
    return (
        f"the drafter takes {human_bytes(round(use.drafter_bytes))}: K/V for {use.kv_tokens_drafting:,} tokens "
        f"where plain decoding has {use.kv_tokens_plain:,} ({lost})"
    )
