"""How many tokens an answer held, and when each came. Servers put several tokens into one chunk when speculation gives
them several at once, so chunks are not tokens: token ids, log-probabilities or usage say how many there were, and what
they say is held against the text that came.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

UNSEEN = 16  # tokens an answer may hold without any text: EOS, special tokens a server strips
UNCOUNTED = 1  # EOS: counted by some servers and not by others
SPLIT = 2  # tokens whose text a server may divide over two chunks, such as the end of a thought


class Disagreement(ValueError):
    """Between a server and itself, in words."""


@dataclass(frozen=True)
class Piece:
    """A chunk that carried something."""

    at: float  # seconds since the request was sent
    text: str
    tokens: int | None = None  # as the server says for this very chunk


@dataclass(frozen=True, kw_only=True)
class Answer:
    text: str
    tokens: int
    commits: tuple[tuple[float, int], ...]  # (seconds since the request was sent, tokens that came then)
    request_s: float  # until the last of it came
    sent: float = 0.0  # by the clock all requests share

    def gaps(self) -> Iterator[float]:
        """The wait for every token after the first chunk; those that come together share it equally."""
        for (before, _), (moment, count) in itertools.pairwise(self.commits):
            yield from [(moment - before) / count] * count


def answer(pieces: Sequence[Piece], usage: int | None, hidden: int, max_tokens: int, ended: float) -> Answer:
    """`usage` is the server's last word on the whole answer, `hidden` of it tokens whose text it keeps to itself."""
    total = _total(pieces, usage)
    _compare_with_text(total, hidden, pieces, max_tokens)
    counts = _per_piece(pieces, max(total - hidden, 0))
    commits = tuple((piece.at, count) for piece, count in zip(pieces, counts, strict=True) if count)
    return Answer(text="".join(piece.text for piece in pieces), tokens=total, commits=commits, request_s=ended)


def _total(pieces: Sequence[Piece], usage: int | None) -> int:
    told = [piece.tokens for piece in pieces if piece.tokens is not None]
    complete = len(told) == len(pieces)
    if any(count < 0 for count in told):
        raise Disagreement("its usage goes down from one chunk to the next")
    if usage is None:
        if not complete or not pieces:
            raise Disagreement(
                "it sends neither usage nor token ids nor log-probabilities, so its tokens cannot be counted"
            )
        return sum(told)
    if complete and pieces and abs(usage - sum(told)) > UNCOUNTED:
        raise Disagreement(f"usage says {usage} tokens, its chunks hold {sum(told)}")
    return usage


def _compare_with_text(total: int, hidden: int, pieces: Sequence[Piece], max_tokens: int) -> None:
    chunks = sum(bool(piece.text) for piece in pieces)
    size = sum(len(piece.text.encode()) for piece in pieces)
    if total > max_tokens + UNCOUNTED:
        raise Disagreement(f"usage says {total} tokens where at most {max_tokens} were asked for")
    if chunks and (total == 0 or total + SPLIT < chunks):
        raise Disagreement(f"usage says {total} tokens, but text came in {chunks} chunks of at least one token each")
    if total - hidden > size + UNSEEN:
        raise Disagreement(f"usage says {total} tokens, but the text has only {size} bytes")


def _per_piece(pieces: Sequence[Piece], total: int) -> list[int]:
    """As told; where not told, one token each and the rest in proportion to the text: the best guess there is."""
    if all(piece.tokens is not None for piece in pieces):
        return [piece.tokens or 0 for piece in pieces]
    spare, size = max(total - len(pieces), 0), sum(len(piece.text) for piece in pieces) or 1
    counts, seen, given = [], 0, 0
    for piece in pieces:
        seen += len(piece.text)
        share = round(spare * seen / size) - given
        given += share
        counts.append(1 + share)
    return counts
