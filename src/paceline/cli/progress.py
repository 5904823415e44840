"""Progress of a download or a load, on stderr: a bar on a terminal, and for `pull` plain lines elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from paceline.cli.output import human_bytes, print_note

if TYPE_CHECKING:
    from paceline.models.hub import Progress as ProgressCallback


@contextmanager
def progress(*, plain: bool) -> Iterator[ProgressCallback | None]:
    """`plain` asks for lines where there is no terminal; without it there is silence."""
    if sys.stderr.isatty():
        with _bar() as callback:
            yield callback
    else:
        yield PlainLines() if plain else None


@contextmanager
def _bar() -> Iterator[ProgressCallback]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

    stage_name = TextColumn("{task.description}", markup=False)  # it may quote an error with brackets in it
    columns = (stage_name, BarColumn(), TextColumn("{task.fields[size]}"), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as display:
        tasks: dict[str, TaskID] = {}

        def callback(stage: str, done: int, total: int | None) -> None:
            if stage not in tasks:
                for earlier in tasks.values():
                    display.update(earlier, visible=False)
                tasks[stage] = display.add_task(stage, total=total, size="")
            size = f"{human_bytes(done)} of {human_bytes(total)}" if total else ""
            display.update(tasks[stage], completed=done, total=total, size=size)

        yield callback


class PlainLines:
    """One line when a stage begins and one at every further tenth of it."""

    def __init__(self) -> None:
        self.stage = ""
        self.tenth = 0

    def __call__(self, stage: str, done: int, total: int | None) -> None:
        tenth = 10 * done // total if total else 0
        if stage == self.stage and tenth <= self.tenth:
            return
        self.stage, self.tenth = stage, tenth
        print_note(f"{stage}: {10 * tenth} % of {human_bytes(total)}" if total else f"{stage} …")
