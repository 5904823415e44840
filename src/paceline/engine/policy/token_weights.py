"""What a token of each answer is worth where a caller waits for several together (a *job*): one of an answer that will
end long before the others saves little.

How likely an answer is to be the last grows with the square of the steps that it still needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as SequenceOf

from paceline.core.sequence import Sequence

BELIEF = 0.7  # in what a token is worth to a job, against every token being worth the same: the last row is a guess
FORESIGHT = 0.3  # share of a draft's promise that counts as the sequence's pace already
PACE_RATE = 0.1  # weight of the newest step in a sequence's tokens per step


class JobValues:
    def __init__(self) -> None:
        self._pace: dict[str, float] = {}  # tokens per step of those in which some sequence drafts, by sequence

    def note(self, sequences: Iterable[Sequence], tokens: Iterable[SequenceOf[int]]) -> None:
        """What a step with drafts committed; in other steps all have the same pace."""
        for sequence, committed in zip(sequences, tokens, strict=True):
            if sequence.finished:  # and forgotten: cancelled since
                continue
            pace = self._pace.get(sequence.key, 1.0)
            self._pace[sequence.key] = pace + PACE_RATE * (len(committed) - pace)

    def forget(self, sequence: Sequence) -> None:
        self._pace.pop(sequence.key, None)

    def of(
        self,
        keys: SequenceOf[str],
        remaining: SequenceOf[int],
        wait_groups: Mapping[str, SequenceOf[int]],
        promised: Callable[[int], float],
    ) -> dict[str, float]:
        """Return values by sequence.

        `remaining`: tokens that each may still commit; `wait_groups`: the rows of each; `promised`: tokens that the
        next draft of a row promises.
        """
        values: dict[str, float] = {}
        for members in wait_groups.values():
            pace = [self._pace.get(keys[at], 1.0) + FORESIGHT * promised(at) for at in members]
            squares = [(remaining[at] / each) ** 2 for at, each in zip(members, pace, strict=True)]
            scale = BELIEF * len(members) / max(sum(squares), 1e-9)
            values.update((keys[at], 1 - BELIEF + scale * one) for at, one in zip(members, squares, strict=True))
        return values
