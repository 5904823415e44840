"""Common parts of the lookup methods: texts are indexed as they grow, and all rows of a step are looked up at once.

A text is looked up once for each length it has; later calls at the same length read the stored result. The lookup
itself is a `Backend`: native code where there is a library (`native_lookup`), else Python, with the same results.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Generic, Protocol, TypeVar

from paceline.core.draft import Draft
from paceline.core.sequence import Sequence
from paceline.drafters.base import DraftRequest, HostDrafter


class State:
    """The lookup state of one sequence."""

    __slots__ = ("at", "level", "sequence")

    def __init__(self, sequence: Sequence) -> None:
        self.sequence = sequence
        self.at = -1  # length of the text when it was looked up
        self.level = 0  # found by that lookup


S = TypeVar("S", bound=State)


class Backend(Protocol[S]):
    """The index of a lookup method, and its search."""

    def new(self, sequence: Sequence) -> S:
        """A state with no tokens indexed yet."""

    def index_up_to(self, state: S, end: int) -> None:
        """Index tokens[:end]."""

    def find(self, states: SequenceOf[S]) -> None:
        """Look up the texts as they are now."""

    def draft(self, states: SequenceOf[S], max_nodes: SequenceOf[int]) -> Draft:
        """Drafts from what `find` found."""

    def drop(self, state: S) -> None:
        """Free the state."""


class LookupDrafter(HostDrafter, Generic[S]):
    def __init__(self, backend: Backend[S]) -> None:
        self.backend = backend
        self.states: dict[str, S] = {}

    def levels(self, sequences: SequenceOf[Sequence]) -> list[int]:
        return [state.level for state in self.looked_up(sequences)]

    def level(self, sequence: Sequence) -> int:
        """Evidence for a draft made now: a function of the committed tokens and of past answers."""
        state = self.states.get(sequence.key)
        if state is None or state.at != len(sequence.tokens) or state.sequence is not sequence:
            (state,) = self.looked_up([sequence])
        return state.level

    def propose(self, rows: SequenceOf[DraftRequest]) -> Draft:
        return self.backend.draft(self.looked_up([row.sequence for row in rows]), [row.max_nodes for row in rows])

    def index_prompt(self, sequence: Sequence, end: int) -> None:
        """Index the computed part of a prompt; tokens that decoding commits are indexed when a draft is needed."""
        if not self.idle or sequence.key in self.states:
            self.backend.index_up_to(self.state_of(sequence), end)

    def admit(self, sequence: Sequence, start: int, end: int) -> None:
        self._forget(sequence)

    def release(self, sequence: Sequence) -> None:
        self._forget(sequence)

    def looked_up(self, sequences: SequenceOf[Sequence]) -> list[S]:
        known, states, due = self.states, [], []
        for sequence in sequences:
            state = known.get(sequence.key)
            if state is None or state.sequence is not sequence:
                state = self.state_of(sequence)
            states.append(state)
            if state.at != len(sequence.tokens):
                due.append(state)
        if due:
            self.backend.find(due)
        return states

    def state_of(self, sequence: Sequence) -> S:
        state = self.states.get(sequence.key)
        if state is None or state.sequence is not sequence:
            self._forget(sequence)
            state = self.states[sequence.key] = self.backend.new(sequence)
        return state

    def _forget(self, sequence: Sequence) -> bool:
        """Whether the sequence was known."""
        state = self.states.pop(sequence.key, None)
        if state is not None:
            self.backend.drop(state)
        return state is not None and state.sequence is sequence
