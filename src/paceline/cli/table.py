"""Tables on stdout: as wide as the terminal, at most `PIPED` columns elsewhere; row by row where that is too narrow."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from rich.text import Text

PIPED = 160  # columns


def print_table(
    title: str | None, headings: Sequence[str], rows: Sequence[Sequence[str | Text]], left: str = ""
) -> None:
    """The first column, and those whose headings are among the words of `left`, are aligned to the left."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else PIPED)
    table = Table(box=SIMPLE, title=title)
    for place, heading in enumerate(headings):
        aligned_left = not place or heading in left.split()
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
        ]
        console.print(Text("  ").append_text(Text(" · ").join(pair for pair in pairs if pair.plain.strip())))


def print_lines(lines: Iterable[str]) -> None:
    """Sentences; on a terminal they are broken between words."""
    console = Console(highlight=False, markup=False)
    for line in lines:
        console.print(line, soft_wrap=not sys.stdout.isatty())


def in_colour(text: str, good: bool | None) -> Text:
    """Green, red, or (None) neither."""
    return Text(text, style={True: "green", False: "red", None: ""}[good])
