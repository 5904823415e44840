"""The contract between the engine and a policy, which decides what is drafted. `adaptive` is the one users get.

A choice is made from committed history and timings, never from the draft at hand: that would bias the output.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Protocol

from paceline.config import NONE
from paceline.core.sequence import Sequence
from paceline.engine.batch import StepResult, StepTiming

DEEPEST = 16  # tokens ahead that a policy plans where k is open: passes for such drafts are captured beforehand


@dataclass(frozen=True)
class DraftPlan:
    method: str = NONE
    max_nodes: int = 0  # nodes


class Policy(Protocol):
    min_node_probability: (
        float  # probability below which a node is not worth its row in the step that was planned last; 0: unknown
    )

    def plan(self, sequences: SequenceOf[Sequence], other_rows: int, others_wait: bool) -> list[DraftPlan]:
        """One choice per decoding sequence; `other_rows` of the same pass belong to prompts.

        `others_wait`: a waiting request takes the place of a sequence that ends at once.
        """

    def next_is_plain(self, sequences: SequenceOf[Sequence]) -> bool:
        """The step after the one under way is plain whatever that one commits, so it needs no plan."""

    def may_repeat(self) -> bool:
        """The step after the one under way may draft as that one does: its drafts may begin before it is planned."""

    def observe(self, result: StepResult, timing: StepTiming) -> None:
        """A step has ended; learning from it may wait for `learn`."""

    def learn(self) -> None:
        """A pass is under way: learn from the steps before it."""

    def plain_seconds(self, num_sequences: int, sampled: bool) -> float | None:
        """Seconds that a step without drafts would take now; None while unknown."""

    def forget(self, sequence: Sequence) -> None:
        """The sequence is finished."""


class LearnsNothing:
    """The part of a policy that one with a fixed plan leaves empty."""

    min_node_probability = 0.0

    def next_is_plain(self, sequences: SequenceOf[Sequence]) -> bool:
        return False

    def may_repeat(self) -> bool:
        return True

    def observe(self, result: StepResult, timing: StepTiming) -> None:
        pass

    def learn(self) -> None:
        pass

    def plain_seconds(self, num_sequences: int, sampled: bool) -> float | None:
        return None

    def forget(self, sequence: Sequence) -> None:
        pass


def wish(sequence: Sequence, method: str, k: int | None) -> tuple[str, int | None]:
    """(method, k) for a sequence: its own request outranks the engine's."""
    own = sequence.params.speculation
    if own is None:
        return method, k
    if isinstance(own, str):
        return own, k
    return own.get("method", method), own.get("k", k)


def any_sampled(sequences: Iterable[Sequence]) -> bool:
    return any(sequence.sampled for sequence in sequences)
