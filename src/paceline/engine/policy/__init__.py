"""The contract between the engine and a policy, which decides what is drafted. `adaptive` is the one users get.

A policy decides from committed tokens and timings, never from the tokens of the draft itself: that would bias the
output. It knows drafters by their offers alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from paceline.config import NONE
from paceline.core.sequence import Sequence
from paceline.engine.batch import StepResult, StepTiming

DEEPEST = 16  # tokens; depth of the longest chain planned where k is open; passes up to it are captured beforehand


@dataclass(frozen=True)
class DraftPlan:
    """The method that drafts for a row, and the most nodes of the draft."""

    method: str = NONE
    max_nodes: int = 0


NO_DRAFT = DraftPlan()


class Offer(NamedTuple):
    """The rows of a step for which one drafter would draft."""

    method: str
    rows: SequenceOf[int]  # indices of the sequences that are planned
    levels: SequenceOf[int]  # by row: how well a draft is supported by committed tokens, at least 1
    unread: SequenceOf[int]  # by row: tokens that the drafter reads before it drafts; empty for a lookup
    price: float  # bytes that a pass of the drafter reads, over those of a pass of the target; 0: unknown, or a lookup
    needs_model: bool  # a token ahead costs a pass of a model; else the drafter looks tokens up
    is_tree: bool  # nodes come in order of probability, all in one pass; else a chain
    max_depth: int


class Offers(Protocol):
    """The offers of all drafters for the sequences of a step. A drafter is asked when its offer is first read: a plan
    that is plain in any case reads none."""

    @property
    def working(self) -> tuple[str, ...]:
        """Names of the drafters that are not switched off."""

    def methods(self, wish: str) -> tuple[str, ...]:
        """Return the working drafters that may draft for a request of this method: `auto`, a method or a name."""

    def of(self, wish: str, rows: SequenceOf[int], leave_out: Collection[str] = ()) -> list[Offer]:
        """Return the offers of these drafters for some rows; a drafter without a draft for any of them has none."""

    @property
    def awaits_model(self) -> bool:
        """A model may draft for one of the sequences in the next step, and is not asked before."""


class Policy(Protocol):
    min_node_probability: float  # of the plan made last: below it a node is not worth its row of the pass; 0: unknown

    def plan(
        self, sequences: SequenceOf[Sequence], offers: Offers, other_rows: int, others_wait: bool
    ) -> SequenceOf[DraftPlan]:
        """Return a plan for each decoding sequence; `other_rows` of the same pass belong to prompts.

        `others_wait`: a waiting request takes the place of a sequence that ends at once.
        """

    def skip_plan(self, sequences: SequenceOf[Sequence], offers: Offers) -> bool:
        """Return whether the step after the one under way is plain whatever that one commits; it is launched without a
        plan then, and counted."""

    def may_repeat(self) -> bool:
        """The step after the one under way may draft as that one does: its drafts may begin before it is planned."""

    def observe(self, result: StepResult, timing: StepTiming) -> None:
        """Note the outcome of a step that was read; the policy may learn from it later, in `learn`."""

    def learn(self) -> None:
        """Learn from the steps observed; called while a pass is under way."""

    def plain_seconds(self, num_sequences: int, sampled: bool) -> float | None:
        """Return the seconds that a step without drafts would take now; None while unknown."""

    def forget(self, sequence: Sequence) -> None:
        """Drop what is kept for a sequence that has finished."""


class FixedPolicy:
    """A policy that learns nothing: `choose` decides for each sequence. For tests, proofs and measurements."""

    min_node_probability = 0.0

    def choose(self, sequence: Sequence) -> DraftPlan:
        return NO_DRAFT

    def plan(
        self, sequences: SequenceOf[Sequence], offers: Offers, other_rows: int, others_wait: bool
    ) -> SequenceOf[DraftPlan]:
        return [self.choose(sequence) for sequence in sequences]

    def skip_plan(self, sequences: SequenceOf[Sequence], offers: Offers) -> bool:
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
    """Return method and k of a sequence: its own request outranks the engine's settings."""
    own = sequence.params.speculation
    if own is None:
        return method, k
    if isinstance(own, str):
        return own, k
    return own.get("method", method), own.get("k", k)


def any_sampled(sequences: Iterable[Sequence]) -> bool:
    return any(sequence.sampled for sequence in sequences)
