"""The progress bar of `generate(..., use_tqdm=True)`: how many prompts are answered, and tokens per second. A caller
may hand in a tqdm of its own, or a function that makes a bar with the methods used here."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

from tqdm import tqdm

from paceline.errors import InvalidParameter, short_repr


class ProgressBar(Protocol):
    def update(self, n: int) -> Any: ...
    def set_postfix_str(self, s: str) -> Any: ...
    def close(self) -> Any: ...


class AnswerProgress:
    """A bar over the prompts of one call; without one nothing is shown."""

    def __init__(self, use_tqdm: bool | Callable[..., ProgressBar], prompts: int) -> None:
        if not isinstance(use_tqdm, bool) and not callable(use_tqdm):
            raise InvalidParameter("use_tqdm", f"must be True, False or tqdm itself, got {short_repr(use_tqdm)}")
        make = tqdm if isinstance(use_tqdm, bool) else use_tqdm
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
