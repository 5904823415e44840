"""Stop strings in a text that grows token by token.

Invariant: text from `take` never ends in the beginning of a stop string that a later token may complete, so no streamed
text is taken back. A stop string is found wherever token borders lie; the earliest match wins.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Protocol


class TextDecoder(Protocol):
    def push(self, token: int) -> str: ...
    def flush(self) -> str: ...


class OutputText:
    def __init__(self, decoder: TextDecoder, stops: SequenceOf[str] = (), *, include_stop: bool = False) -> None:
        self._decoder, self._stops, self._include_stop = decoder, tuple(stops), include_stop
        self._longest = max((len(stop) for stop in self._stops), default=0)
        self._searched = 0  # no match starts before this
        self._taken = 0  # handed out by `take`
        self.text = ""
        self.stop: str | None = None  # the stop string that was found

    def push(self, token: int, *, may_stop: bool = True) -> bool:
        """Add a token; return True once a stop string is complete, where the text ends."""
        return self._extend(self._decoder.push(token), may_stop)

    def finish(self) -> None:
        """End the text: none of it is held back any longer."""
        if self.stop is None:
            self._extend(self._decoder.flush(), may_stop=False)
        self._stops = ()

    def take(self) -> str:
        """Return the text that became final since the last call."""
        end = len(self.text) - self._held()
        piece = self.text[self._taken : end]
        self._taken = max(self._taken, end)
        return piece

    def _extend(self, piece: str, may_stop: bool) -> bool:
        self.text += piece
        if not may_stop:
            self._searched = len(self.text)
            return False
        matches = [(at, stop) for stop in self._stops if (at := self.text.find(stop, self._searched)) >= 0]
        if matches:
            at, self.stop = min(matches, key=lambda match: (match[0], -len(match[1])))
            self.text = self.text[: at + len(self.stop) if self._include_stop else at]
            self._stops = ()
            return True
        self._searched = max(self._searched, len(self.text) - self._longest + 1)
        return False

    def _held(self) -> int:
        """Return the length of the longest tail that may be the beginning of a stop string."""
        longest = min(self._longest - 1, len(self.text) - self._searched)
        for length in range(longest, 0, -1):
            tail = self.text[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0
