"""Results of steps, row by row: tests make them for a policy, and read them from an engine."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

from paceline.config import NONE
from paceline.core.sequence import Sequence
from paceline.engine.batch import DraftOutcome, StepResult


class ResultRow(NamedTuple):
    """One sequence of a step: what it committed, and what came of its draft."""

    sequence: Sequence
    tokens: list[int]
    finished: bool = False
    method: str = NONE
    drafted: int = 0
    accepted: int = 0
    depth: int = 0
    kinds: SequenceOf[int] = ()  # TokenKind of each token; only of rows that were read from an engine
    text: str = ""


def result_of(rows: SequenceOf[ResultRow], paths: Callable[[int], list[int]] | None = None) -> StepResult:
    return StepResult(
        [row.sequence for row in rows],
        [row.tokens for row in rows],
        paths=paths,
        drafts={at: DraftOutcome(*row[3:7]) for at, row in enumerate(rows) if row.drafted},
        ended=[at for at, row in enumerate(rows) if row.finished],
    )


def rows_of(result: StepResult) -> list[ResultRow]:
    """Return the rows of a step that was just taken: kinds are read from a buffer that a later step overwrites."""
    return [
        ResultRow(
            sequence,
            tokens,
            at in result.ended,
            *result.drafts.get(at, (NONE, 0, 0, 0)),
            result.kinds_of(at),
            result.texts.get(at, ""),
        )
        for at, (sequence, tokens) in enumerate(zip(result.sequences, result.tokens, strict=True))
    ]
