"""Rows of one length, into which sequences are packed, and the rows that a step takes.

A row holds whole sequences, each under a segment number of its own (0 is padding). A step's rows are a function of the
seed and of a few counters that a checkpoint keeps, so a run that continues takes the rows it would have taken.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline.errors import InvalidParameter
from paceline.training.data.store import Array, Sequences

LEAST_ANSWER = 2  # tokens; shortest answer that a row takes
LEAST_MEASURED = 8  # tokens; shortest answer on which τ is measured
HELD_OUT = 0.01  # share of all prompts, never trained on
LEAST_HELD_OUT = 50  # sequences; fewer are all trained on


@dataclass(frozen=True)
class TokenRows:
    tokens: Array  # (R, L) int32
    segments: Array  # (R, L) int16
    answer: Array  # (R, L) bool
    source: Array  # (R,) rows hold sequences of one source

    def __len__(self) -> int:
        return len(self.tokens)

    def chosen(self, which: Array) -> TokenRows:
        return TokenRows(self.tokens[which], self.segments[which], self.answer[which], self.source[which])


def packed(sequences: Sequences, length: int) -> TokenRows:
    """Pack sequences. Longer ones are cut to a row; those without an answer in it are left out."""
    parts = []
    for source in np.unique(sequences.source).tolist():
        parts.append(_packed(sequences.chosen(sequences.source == source), length, source))
    parts = [part for part in parts if len(part)]
    if not parts:
        raise InvalidParameter("data", f"no sequence has an answer within its first {length} tokens")
    return TokenRows(
        *(
            np.concatenate([getattr(part, field) for part in parts])
            for field in ("tokens", "segments", "answer", "source")
        )
    )


def _packed(sequences: Sequences, length: int, source: int) -> TokenRows:
    """Pack the longest sequences first, each into the fullest row that has room for it."""
    rows: list[list[tuple[Array, Array]]] = []
    free: list[list[int]] = [[] for _ in range(length)]  # rows by tokens left
    pieces = [(tokens[:length], answer[:length]) for tokens, answer in sequences]
    pieces = [piece for piece in pieces if np.count_nonzero(piece[1]) >= LEAST_ANSWER]
    for tokens, answer in sorted(pieces, key=lambda piece: -len(piece[0])):
        left = next((left for left in range(len(tokens), length) if free[left]), None)
        row = len(rows) if left is None else free[left].pop()
        if left is None:
            left = length
            rows.append([])
        rows[row].append((tokens, answer))
        free[left - len(tokens)].append(row)
    packed_rows = TokenRows(
        np.zeros((len(rows), length), np.int32),
        np.zeros((len(rows), length), np.int16),
        np.zeros((len(rows), length), bool),
        np.full(len(rows), source, np.uint8),
    )
    for row, parts in enumerate(rows):
        start = 0
        for number, (tokens, answer) in enumerate(parts, start=1):
            end = start + len(tokens)
            packed_rows.tokens[row, start:end], packed_rows.answer[row, start:end] = tokens, answer
            packed_rows.segments[row, start:end] = number
            start = end
    return packed_rows


def divided(sequences: Sequences) -> tuple[Sequences, Sequences]:
    """Return the sequences to learn, and those held out."""
    apart = held_out(sequences, HELD_OUT if len(sequences) >= LEAST_HELD_OUT else 0.0)
    return sequences.chosen(~apart), sequences.chosen(apart)


def answers_of(sequences: Sequences, count: int, length: int) -> list[tuple[list[int], list[int]]]:
    """Return prompt and first answer of `count` sequences, within their first `length` tokens."""
    answers: list[tuple[list[int], list[int]]] = []
    for tokens, answer in sequences:
        if len(answers) == count:
            break
        tokens, answer = tokens[:length], answer[:length]
        start = int(answer.argmax())
        end = start + (int((~answer[start:]).argmax()) or len(answer) - start)
        if start > 0 and end - start >= LEAST_MEASURED:
            answers.append((tokens[:start].tolist(), tokens[start:end].tolist()))
    return answers


def held_out(sequences: Sequences, share: float) -> Array:
    """Return (S,) bool by a hash of the prompt, so that all answers to one prompt fall on the same side."""
    limit, chosen = int(share * (1 << 32)), np.zeros(len(sequences), bool)
    for i, (tokens, answer) in enumerate(sequences):
        start = int(answer.argmax()) or len(tokens)
        chosen[i] = zlib.crc32(tokens[:start].astype(np.uint32).tobytes()) < limit
    return chosen


class RowSampler:
    """Rows of each source in an order drawn anew for every pass over them; sources by weight, or by their size."""

    def __init__(self, source: Array, weights: Mapping[int, float] | None, seed: int) -> None:
        self._rows = {one: np.flatnonzero(source == one) for one in np.unique(source).tolist()}
        by_source = weights or {one: float(len(rows)) for one, rows in self._rows.items()}
        self._sources = [one for one in self._rows if by_source.get(one, 0.0) > 0]
        if not self._sources:
            raise InvalidParameter("mix", "no source with rows has a weight above 0")
        shares = np.array([by_source[one] for one in self._sources])
        self._shares, self._seed = shares / shares.sum(), seed
        self._drawn = 0
        self._taken = dict.fromkeys(self._sources, 0)
        self._orders: dict[int, tuple[int, Array]] = {}  # source -> number of the pass, order of its rows

    def next(self, count: int) -> Array:
        """Return the indices of the next rows."""
        noise = np.random.default_rng((self._seed, 0, self._drawn))
        self._drawn += 1
        chosen = noise.choice(len(self._sources), size=count, p=self._shares)
        return np.array([self._take(self._sources[one]) for one in chosen.tolist()])

    def _take(self, source: int) -> int:
        rows, taken = self._rows[source], self._taken[source]
        number, place = divmod(taken, len(rows))
        if self._orders.get(source, (-1, rows))[0] != number:
            order = np.random.default_rng((self._seed, 1 + source, number)).permutation(len(rows))
            self._orders[source] = number, order
        self._taken[source] += 1
        return int(rows[self._orders[source][1][place]])

    @property
    def epochs(self) -> float:
        return sum(self._taken.values()) / sum(len(self._rows[one]) for one in self._sources)

    def state(self) -> dict[str, Any]:
        return {"drawn": self._drawn, "taken": dict(self._taken)}

    def restore(self, state: Mapping[str, Any]) -> None:
        if set(state["taken"]) != set(self._taken):
            raise InvalidParameter("resume", "the data has other sources than when the training began; start it anew")
        self._drawn, self._taken = state["drawn"], dict(state["taken"])
