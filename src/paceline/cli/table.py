"""Tables on stdout: at most as wide as the terminal, `PIPED` columns elsewhere; row by row where that is too narrow."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence

from rich.box import SIMPLE
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

PIPED = 160  # columns
INDENT = "  "


def print_table(
    title: str | None, headings: Sequence[str], rows: Sequence[Sequence[str | Text]], left: str = ""
) -> None:
    """Print a table. The first column and those with headings among the words of `left` are aligned to the left.

    Where the table is too wide, headings take several lines and columns move together.
    """
    console = Console(highlight=False, width=None if sys.stdout.isatty() else PIPED)
    several_lines = [_narrow(heading, [row[place] for row in rows]) for place, heading in enumerate(headings)]
    for shown, padding in ((headings, (0, 1)), (several_lines, (0, 1, 0, 0)), (several_lines, (0, 0))):
        table = Table(box=SIMPLE, title=title, padding=padding)
        for heading, plain in zip(shown, headings, strict=True):
            aligned_left = plain == headings[0] or plain in left.split()
            table.add_column(heading, justify="left" if aligned_left else "right", no_wrap=True)
        for row in rows:
            table.add_row(*row)
        if console.measure(table, options=console.options.update(max_width=10 * PIPED)).maximum <= console.width:
            console.print(table)
            return
    console.print(*([title] if title else []), "", sep="\n", end="")
    for name, *cells in rows:
        console.print(f"{headings[0]} {name}".strip(), style="bold")
        pairs = [
            Text.assemble(f"{heading} ".replace("\n", " "), cell)
            for heading, cell in zip(headings[1:], cells, strict=True)
            if str(cell).strip()
        ]
        for line in _lines(pairs, console.width - len(INDENT)):
            console.print(Text(INDENT).append_text(line))


def _narrow(heading: str, cells: Iterable[str | Text]) -> str:
    """Break a heading between words, also in tokens/pass, to the width of the column's cells where words allow it."""
    width = max((cell_len(str(cell)) for cell in cells), default=0)
    lines = [""]
    for word in re.findall(r"[^\s/]+/(?=\w{4})|\S+", heading):
        joint = "" if not lines[-1] or lines[-1].endswith("/") else " "
        if lines[-1] and cell_len(lines[-1] + joint + word) > width:
            lines.append(word)
        else:
            lines[-1] += joint + word
    return "\n".join(lines)


def _lines(pairs: Iterable[Text], width: int) -> list[Text]:
    """Break lines between pairs: a figure stays beside its unit."""
    lines: list[Text] = []
    for pair in pairs:
        joined = Text(" · ").join([*lines[-1:], pair])
        lines = [*lines[:-1], joined] if lines and joined.cell_len <= width else [*lines, pair]
    return lines


def print_lines(lines: Iterable[str]) -> None:
    """Print sentences, on a terminal broken between words."""
    console = Console(highlight=False, markup=False)
    for line in lines:
        console.print(line, soft_wrap=not sys.stdout.isatty())


def in_colour(text: str, good: bool | None) -> Text:
    """Colour text green, red, or (None) not at all."""
    return Text(text, style={True: "green", False: "red", None: ""}[good])
