"""How far a benchmark is, on stderr: a bar with the time left on a terminal, a line at every tenth elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from paceline.cli.output import human_bytes, print_note

if TYPE_CHECKING:
    from rich.progress import Progress


@contextmanager
def live() -> Iterator[Lines | Bar]:
    if not sys.stderr.isatty():
        yield Lines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[left]}", markup=False),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as display:
        yield Bar(display)


class Clock:
    """Time left, from the rate since the first piece of work: batches differ, so it is an estimate."""

    def __init__(self) -> None:
        self._first: tuple[float, float] | None = None

    def left(self, done: float, total: float) -> str:
        now = time.monotonic()
        if self._first is None or done < self._first[1]:
            self._first = now, done
        started, before = self._first
        if done <= before:
            return ""
        seconds = (total - done) * (now - started) / (done - before)
        return f"about {seconds:.0f} s left" if seconds < 90 else f"about {seconds / 60:.0f} min left"


class Bar:
    def __init__(self, display: Progress) -> None:
        self._display, self._clock = display, Clock()
        self._task = display.add_task("", total=None, left="")

    def stage(self, what: str) -> None:
        """Something without a measure is under way."""
        self._display.update(self._task, description=what)

    def load(self, stage: str, done: int, total: int | None) -> None:
        """A download, in bytes."""
        self._display.update(self._task, description=stage, completed=done, total=total)

    def work(self, done: float, total: float, what: str) -> None:
        """The measurement, in units of about the same time."""
        left = self._clock.left(done, total)
        self._display.update(self._task, description=what, completed=done, total=total, left=left)


class Lines:
    def __init__(self) -> None:
        self._clock, self._stage, self._tenth = Clock(), "", -1

    def stage(self, what: str) -> None:
        pass

    def load(self, stage: str, done: int, total: int | None) -> None:
        if stage != self._stage:
            self._stage = stage
            print_note(f"{stage}: {human_bytes(total)}" if total else f"{stage} …")

    def work(self, done: float, total: float, what: str) -> None:
        left, tenth = self._clock.left(done, total), int(10 * done / total)
        if tenth > self._tenth:
            self._tenth = tenth
            print_note(f"{10 * tenth} %" + (f", {left}" if left and done < total else ""))
