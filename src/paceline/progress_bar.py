"""The progress bar of `generate(..., use_tqdm=True)`: how many prompts are answered, and tokens per second.

It has the methods of tqdm that are used here, so that a caller may hand in tqdm itself, or a function that makes one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

from paceline.errors import InvalidParameter, shown


class ProgressBar(Protocol):
    """What is asked of a bar, as tqdm has it."""

    def update(self, n: int) -> Any: ...
    def set_postfix_str(self, s: str) -> Any: ...
    def close(self) -> Any: ...


class RichBar:
    """On stderr; outside of a terminal one line when it is closed."""

    def __init__(self, total: int, desc: str) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._display = Progress(*columns, TextColumn("{task.fields[postfix]}"), console=Console(stderr=True))
        self._task = self._display.add_task(desc, total=total, postfix="")
        self._display.start()

    def update(self, n: int) -> None:
        self._display.update(self._task, advance=n)

    def set_postfix_str(self, s: str) -> None:
        self._display.update(self._task, postfix=s)

    def close(self) -> None:
        self._display.stop()


class AnswerProgress:
    """A bar over the prompts of one call; without one nothing is shown."""

    def __init__(self, use_tqdm: bool | Callable[..., ProgressBar], prompts: int) -> None:
        if not isinstance(use_tqdm, bool) and not callable(use_tqdm):
            raise InvalidParameter("use_tqdm", f"must be True, False or tqdm itself, got {shown(use_tqdm)}")
        make = RichBar if isinstance(use_tqdm, bool) else use_tqdm
        try:
            self._bar: ProgressBar | None = make(total=prompts, desc="answers") if use_tqdm and prompts else None
        except TypeError as error:
            raise InvalidParameter("use_tqdm", f"cannot make a bar as tqdm does: {error}") from error
        self._done = 0
        self._started = time.perf_counter()

    @property
    def shown(self) -> bool:
        return self._bar is not None

    def reached(self, done: int, tokens: int) -> None:
        """So many prompts are answered, with so many tokens."""
        if self._bar is not None and done > self._done:
            rate = tokens / max(time.perf_counter() - self._started, 1e-9)
            self._bar.set_postfix_str(f"{rate:.0f} tok/s")
            self._bar.update(done - self._done)
            self._done = done

    def close(self) -> None:
        bar, self._bar = self._bar, None
        if bar is not None:
            bar.close()
