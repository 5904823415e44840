"""Progress of a download, a load or a measurement, on stderr: a bar with the time left on a terminal, a line at every
tenth elsewhere.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from paceline.cli.output import human_bytes, print_note

if TYPE_CHECKING:
    from rich.progress import Progress

    from paceline.core.sequence import Sequence
    from paceline.models.load.hub import PullProgress

LONG_PROMPT_S = 1.0  # seconds; a prompt that is read sooner shows no bar
REFRESH_S = 0.2


@contextmanager
def progress(*, plain: bool) -> Iterator[PullProgress | None]:
    """Show downloads and loads. `plain`: in lines where there is no terminal; else nothing is printed there."""
    if plain or sys.stderr.isatty():
        with live() as display:
            yield display.load
    else:
        yield None


@contextmanager
def live() -> Iterator[ProgressBar | ProgressLines]:
    if not sys.stderr.isatty():
        yield ProgressLines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    stage_name = TextColumn("{task.description}", markup=False)  # it may quote an error with brackets in it
    columns = (stage_name, BarColumn(), TimeElapsedColumn(), TextColumn("{task.fields[left]}", markup=False))
    console = Console(stderr=True)
    console.width -= 3  # room for the terminal's ^C, which would begin a new line and leave this one behind
    with Progress(*columns, console=console, transient=True) as display:
        yield ProgressBar(display)


@contextmanager
def prompt_progress(sequence: Sequence | None) -> Iterator[None]:
    """Show a bar on a terminal while a long prompt is read."""
    if sequence is None or not sys.stderr.isatty():
        yield
        return
    read = threading.Event()
    bar = threading.Thread(target=_show_prompt, args=(sequence, read), daemon=True)
    bar.start()
    try:
        yield
    finally:
        read.set()
        bar.join()


def _show_prompt(sequence: Sequence, read: threading.Event) -> None:
    if read.wait(LONG_PROMPT_S):
        return
    with live() as display:
        while True:
            display.work(sequence.num_computed, sequence.num_prompt, "reading the prompt")
            if read.wait(REFRESH_S):
                return


class TimeLeft:
    """An estimate of the time left, from the rate since the first piece of work."""

    def __init__(self) -> None:
        self._what, self._first = "", (0.0, 0.0)

    def left(self, what: str, done: float, total: float) -> str:
        now = time.monotonic()
        if what != self._what or done < self._first[1]:
            self._what, self._first = what, (now, done)
        started, before = self._first
        if done <= before:
            return ""
        seconds = (total - done) * (now - started) / (done - before)
        return f"about {seconds:.0f} s left" if seconds < 90 else f"about {seconds / 60:.0f} min left"


class ProgressBar:
    def __init__(self, display: Progress) -> None:
        self._display, self._clock = display, TimeLeft()
        self._task = display.add_task("", total=None, left="")

    def stage(self, what: str) -> None:
        """Show that work without a measure of progress has begun."""
        self._display.update(self._task, description=what)

    def load(self, stage: str, done: int, total: int | None) -> None:
        """Show a download, in bytes."""
        left = f"{human_bytes(done)} of {human_bytes(total)}  {self._clock.left(stage, done, total)}" if total else ""
        self._display.update(self._task, description=stage, completed=done, total=total, left=left)

    def work(self, done: float, total: float, what: str) -> None:
        """Show a measurement, in units of about equal time."""
        percent, left = f"{100 * done / total:.0f} %", self._clock.left("work", done, total)
        self._display.update(self._task, description=what, completed=done, total=total, left=f"{percent}  {left}")


class ProgressLines:
    """A line when a stage begins and one at every further tenth of it."""

    def __init__(self) -> None:
        self._clock, self._stage, self._tenth = TimeLeft(), "", -1

    def stage(self, what: str) -> None:
        pass

    def load(self, stage: str, done: int, total: int | None) -> None:
        if self._further(stage, done, total):
            print_note(f"{stage}: {10 * self._tenth} % of {human_bytes(total)}" if total else f"{stage} …")

    def work(self, done: float, total: float, what: str) -> None:
        left = self._clock.left("work", done, total)
        if self._further("work", done, total):
            print_note(f"{10 * self._tenth} %" + (f", {left}" if left and done < total else ""))

    def _further(self, stage: str, done: float, total: float | None) -> bool:
        before, tenth = (self._stage, self._tenth), int(10 * done / total) if total else 0
        self._stage, self._tenth = stage, tenth if stage != self._stage else max(tenth, self._tenth)
        return (self._stage, self._tenth) != before
