"""Who drafts by what, and whether a model leads: it drafts for most, and its drafts begin behind the step under way.

Then leaving it costs more than lookups can bring to a few: those have a draft of their own made when they are back.
"""

from __future__ import annotations

from collections.abc import Callable

from paceline.drafters import NONE
from paceline.engine.cost import size_of


class Lead:
    def __init__(self, can_lead: Callable[[str], bool], *, possible: bool = True) -> None:
        self._can_lead, self._possible = can_lead, possible
        self.now: dict[str, str] = {}  # sequences the last plan drafted for -> method
        self._by_size: dict[int, str] = {}  # of the batch: the method that most drafted by

    def follow(self, now: dict[str, str], num_sequences: int) -> None:
        self.now = now
        if now:
            self._by_size[size_of(num_sequences)] = self.main[0]

    @property
    def main(self) -> tuple[str, int]:
        """The method that most draft by, and how many."""
        methods = list(self.now.values())
        if len(methods) == 1:
            return methods[0], 1
        main = max(dict.fromkeys(methods), key=methods.count, default=NONE)
        return main, methods.count(main)

    def leader(self, num_sequences: int) -> str:
        """The model that leads where there are about so many sequences."""
        if not self._possible or not self._by_size:
            return NONE
        size = size_of(num_sequences)
        method = self._by_size[min(self._by_size, key=lambda known: abs(known - size))]
        return method if self._can_lead(method) else NONE

    def forget(self) -> None:
        self._by_size = {}
