"""What a plan is asked for, what it was made of, and how long it serves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import NamedTuple

from paceline.engine.budget import Terms
from paceline.engine.cost import CostModel
from paceline.engine.methods import is_patient
from paceline.engine.policy import Choice
from paceline.sequence import Sequence

STILL_THERE = 0.9  # share of a plan's sequences that must be left, or have the same in another plan

Open = dict[int, tuple[str, int]]  # sequence -> (method or auto, most nodes)


@dataclass(slots=True)
class Plan:
    """What the last plan was made of, for whoever learns from what came of it."""

    evidence: dict[tuple[str, str], int] = field(default_factory=dict)  # by sequence and method
    promises: dict[str, list[float]] = field(default_factory=dict)  # by sequence: how likely it is to get how far
    drafts: bool = False  # of the policy's own choosing
    seconds: float = 0.0  # that it took
    trial: Terms | None = None  # it is made for what it teaches, under these
    asked: bool = False  # somebody was asked
    ahead: bool = False  # it was made behind a pass


class Question(NamedTuple):
    """What a plan is asked for."""

    sequences: SequenceOf[Sequence]
    open_ended: Open
    others_wait: bool
    cost: CostModel
    base: int  # rows without prompts and without the drafts in question
    other_rows: int  # of prompts
    said: int = 0  # tokens that each will have said more by then, at least

    def patient(self, sequence: Sequence) -> bool:
        return is_patient(sequence, self.said)


@dataclass
class Standing:
    """A plan that serves for some steps: what models draft changes little from one to the next."""

    choices: dict[str, Choice]  # by sequence
    plan: Plan
    steps: int  # it serves for
    left: int

    def like(self, choices: Mapping[str, Choice]) -> bool:
        """Whether another plan says much the same."""
        same = 0
        for key, choice in choices.items():
            known = self.choices.get(key)
            same += known is not None and choice.method == known.method and abs(choice.budget - known.budget) <= 1
        return same >= STILL_THERE * len(choices)


def any_sampled(sequences: Iterable[Sequence]) -> bool:
    return any(sequence.sampled for sequence in sequences)
