"""A policy that changes its mind at every step: what `auto` may do, and much that it would not."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager

from paceline.drafters import NONE
from paceline.engine.engine import Engine
from paceline.engine.policy import AUTO, Choice, LearnsNothing, wish
from paceline.sequence import Sequence

MOST = 8


class Restless(LearnsNothing):
    """Method and k by a hash of the committed length: committed history only, as the laws ask of any policy."""

    def __init__(self, methods: SequenceOf[str]) -> None:
        self._choices = [NONE, *[method for method in methods for _ in range(3)]]

    def plan(self, sequences: SequenceOf[Sequence], other_rows: int, others_wait: bool) -> list[Choice]:
        return [self._choice(sequence) for sequence in sequences]

    def _choice(self, sequence: Sequence) -> Choice:
        if wish(sequence, AUTO, None)[0] == NONE:  # the plain answer to compare with
            return Choice()
        drawn = zlib.crc32(f"{sequence.index} {len(sequence.tokens)}".encode())
        method = self._choices[drawn % len(self._choices)]
        budget = min(1 + drawn // 97 % MOST, sequence.room - 1)
        return Choice(method, budget) if method != NONE and budget > 0 else Choice()


@contextmanager
def restless(engine: Engine, methods: SequenceOf[str]) -> Iterator[None]:
    before = engine.policy
    engine.policy = engine.scheduler.policy = Restless(methods)
    try:
        yield
    finally:
        engine.policy = engine.scheduler.policy = before
