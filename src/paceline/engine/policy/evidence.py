"""The drafters at hand: which of them a request may use, and how much speaks for a draft by each.

A drafter that fails to answer has no evidence; the answer under way does not suffer.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as SequenceOf

from paceline.config import AUTO, MAX_K
from paceline.core.sequence import Sequence
from paceline.drafters import Drafter
from paceline.drafters.base import HostDrafter
from paceline.drafters.method_names import matches_method

log = logging.getLogger("paceline")
FIRST_TOKENS = 2  # of an answer: they do not wait for a drafter that has yet to read the prompt,
SMALL_LAG = 8  # tokens: that is, more than so many


class DrafterEvidence:
    def __init__(self, drafters: SequenceOf[Drafter]) -> None:
        self.drafters = {drafter.name: drafter for drafter in drafters}
        self._warned: set[tuple[str, type]] = set()
        self._models = {name for name, drafter in self.drafters.items() if _runs_model(drafter)}
        self.retire(frozenset())

    def retire(self, names: frozenset[str]) -> None:
        """Take out drafters that are switched off."""
        self.retired = names
        self._auto = tuple(
            name
            for name, drafter in self.drafters.items()
            if name not in names and not (isinstance(drafter, HostDrafter) and drafter.only_by_name)
        )
        self._allowed: dict[str, tuple[str, ...]] = {AUTO: self._auto}

    def allowed(self, method: str) -> tuple[str, ...]:
        """Drafters that may draft for a request that asks for this method, or for one of them by its own name."""
        if method not in self._allowed:
            named = [name for name in self.drafters if matches_method(name, method) and name not in self.retired]
            self._allowed[method] = tuple(named)
        return self._allowed[method]

    def runs_model(self, method: str) -> bool:
        """Each token ahead takes a pass: the drafter is no lookup, or has something to read before it drafts."""
        return method in self._models

    def makes_trees(self, method: str) -> bool:
        """The first n nodes of its drafts are the best tree of n, all made at once."""
        return self.drafters[method].trees

    def depth(self, method: str) -> int:
        """That no draft of it exceeds."""
        return self.drafters[method].depth

    def most_nodes(self, method: str, remaining: int) -> int:
        """Return the limit on a draft's nodes when `remaining` more tokens may be committed.

        The target itself gives the last token, so a chain has at most `remaining` - 1; a shallower tree may have any
        number.
        """
        return MAX_K if remaining > self.drafters[method].depth else remaining - 1

    def awaits(self, sequences: SequenceOf[Sequence]) -> bool:
        """A model may draft for one of these in the next step, and is not asked before."""
        early = any(sequence.num_output < FIRST_TOKENS for sequence in sequences)
        return early and any(self.runs_model(method) for method in self._auto)

    def of(self, sequences: SequenceOf[Sequence], method: str) -> list[int]:
        """The evidence for a draft of each; 0: there would be none."""
        drafter = self.drafters[method]
        if isinstance(drafter, HostDrafter):
            try:
                found = drafter.levels(sequences)
                if found is not None and len(found) != len(sequences):
                    raise ValueError(f"{len(found)} answers for {len(sequences)} sequences")
                if found is not None:
                    return found
            except Exception as problem:  # one sequence may be the cause: ask for each alone
                self._warn(method, problem)
        found = []
        for sequence in sequences:
            level = 0
            try:
                if (
                    len(sequence.tokens) - sequence.num_prompt >= FIRST_TOKENS
                    or drafter.unread_tokens(sequence) <= SMALL_LAG
                ):
                    level = drafter.level(sequence)
            except Exception as problem:
                self._warn(method, problem)
            found.append(level)
        return found

    def _warn(self, method: str, problem: Exception) -> None:
        if (method, type(problem)) not in self._warned:  # once: it may fail at every step
            log.warning("drafter %s failed to say what it knows: %r", method, problem)
            self._warned.add((method, type(problem)))


def _runs_model(drafter: Drafter) -> bool:
    own_unread_tokens: object = type(drafter).unread_tokens
    return not isinstance(drafter, HostDrafter) or own_unread_tokens is not HostDrafter.unread_tokens
