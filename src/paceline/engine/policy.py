"""The contract between the engine and whoever decides how much is drafted. `adaptive` is the one users get.

A choice is made from committed history and timings, never from the draft at hand: that would bias the output.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Protocol

from paceline.config import AUTO as AUTO
from paceline.config import NONE
from paceline.engine.batch import StepOutput
from paceline.sequence import Sequence


@dataclass(frozen=True)
class Choice:
    method: str = NONE
    budget: int = 0  # nodes


@dataclass(frozen=True)
class StepReport:
    """What a step was and took."""

    num_sequences: int
    rows: int  # of the target pass
    step_s: float
    draft_s: Mapping[str, tuple[int, float]]  # method -> (largest budget, seconds)
    outputs: SequenceOf[StepOutput]
    retired: frozenset[str] = frozenset()  # methods that were switched off
    warm: bool = True  # its time says what such steps take
    ahead: bool = False  # it was launched before the step before it was read


class Policy(Protocol):
    def plan(self, sequences: SequenceOf[Sequence], other_rows: int, others_wait: bool) -> list[Choice]:
        """One choice per decoding sequence; `other_rows` of the same pass belong to prompts.

        `others_wait`: the place of a sequence that ends is taken by another at once.
        """

    def rests(self, sequences: SequenceOf[Sequence]) -> bool:
        """The step after the one under way will not draft, whatever that says: it need not be asked for a plan."""

    def drafts_on(self) -> bool:
        """The step after the one under way may well draft as that one does: drafts may begin before it is planned."""

    def settled(self, sequences: SequenceOf[Sequence]) -> tuple[str, list[int]] | None:
        """The method that will draft for all of these in the step after the one under way, and the nodes each may have,
        where nothing is left to decide but whether it finds something."""

    def observe(self, report: StepReport) -> None:
        """A step has ended; what there is to learn from it may wait."""

    def meanwhile(self) -> None:
        """A pass is under way: learn from the steps before it."""

    def plain_seconds(self, num_sequences: int, sampled: bool) -> float | None:
        """What a step without drafts would take now; None while unknown."""

    def forget(self, sequence: Sequence) -> None:
        """The sequence is finished."""


class LearnsNothing:
    """What a policy that only follows a plan leaves out."""

    def rests(self, sequences: SequenceOf[Sequence]) -> bool:
        return False

    def drafts_on(self) -> bool:
        return True

    def settled(self, sequences: SequenceOf[Sequence]) -> tuple[str, list[int]] | None:
        return None

    def observe(self, report: StepReport) -> None:
        pass

    def meanwhile(self) -> None:
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
