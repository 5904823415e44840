"""The tokens a step commits: Verdict, HostVerdict, and UnreadVerdict while the step is under way.

Nodes are numbered as in a `Draft`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from operator import itemgetter
from typing import NamedTuple

import torch
from torch import Tensor

INVALID = -1  # in place of a token: no token can be drawn from logits that are not numbers


class TokenKind(IntEnum):
    """The origin of a committed token."""

    DRAFTED = 0
    RECOVERED = 1  # drawn where every drafted child was rejected
    BONUS = 2  # drawn where nothing further was drafted; plain decoding's token too
    PAD = 3


@dataclass(frozen=True, kw_only=True)
class Logprobs:
    """Log-probabilities under the model's raw logits, before any processor (as vLLM's default)."""

    chosen: Tensor  # (B, D + 1)
    rank: Tensor  # (B, D + 1) int64, 1 = the most likely
    top_tokens: Tensor  # (B, D + 1, n) int64, most likely first
    top: Tensor  # (B, D + 1, n)

    def each(self, change: Callable[[Tensor], Tensor]) -> Logprobs:
        return Logprobs(**{name: change(part) for name, part in vars(self).items()})


class VerdictRow(NamedTuple):
    """The tokens that one row of a verdict commits, on the host."""

    tokens: list[int]  # the accepted ones, and one more
    path: list[int]  # the accepted nodes
    kinds: list[int]  # kinds of the tokens


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The tokens a step commits: each row's first num_accepted + 1.

    Where the last of them is INVALID, the target's logits there held NaN or +inf, or nothing finite: the row's request
    ends with an error.
    """

    tokens: Tensor  # (B, D + 1) int64, -1 beyond
    num_accepted: Tensor  # (B,) int64
    path: Tensor  # (B, D) int64, accepted nodes from the root's child down, -1 beyond
    kinds: Tensor  # (B, D + 1) uint8, of TokenKind
    logprobs: Logprobs | None = None
    packed: Tensor | None = None  # (bytes,) all but the logprobs, contiguous: read in one copy
    packed_rows: int = 0  # rows of `packed`, if more than these

    @functools.cached_property
    def rows(self) -> Sequence[VerdictRow]:
        """The rows of a verdict in the host's memory."""
        parts = (self.tokens, self.num_accepted, self.path, self.kinds)
        return [
            VerdictRow(tokens[: count + 1], path[:count], kinds[: count + 1])
            for tokens, count, path, kinds in zip(*(part.tolist() for part in parts), strict=True)
        ]

    @property
    def is_cuda(self) -> bool:
        return self.tokens.is_cuda

    @property
    def moves(self) -> bool:
        """Return whether an accepted path may have to be moved into place; on the host: whether one has to be."""
        return self.is_cuda or any(row.path != list(range(len(row.path))) for row in self.rows)

    @staticmethod
    def blank(batch: int, depth: int, device: torch.device, packed: Tensor | None = None) -> Verdict:
        """Return a packed verdict to be filled in; or the content of `packed`."""
        places, size = Verdict.places(batch, depth)
        packed = torch.empty(size, dtype=torch.uint8, device=device) if packed is None else packed
        tokens, num_accepted, path = (packed[place].view(torch.int64) for place in places[:3])
        return Verdict(
            tokens=tokens.view(batch, depth + 1),
            num_accepted=num_accepted,
            path=path.view(batch, depth),
            kinds=packed[places[3]].view(batch, depth + 1),
            packed=packed,
        )

    @staticmethod
    @functools.cache
    def places(batch: int, depth: int) -> tuple[list[slice], int]:
        """Return slices of tokens, num_accepted, path and kinds in a packed verdict, and its size, in bytes.

        Each is aligned to 16 bytes: Triton compiles kernels anew for unaligned pointers.
        """
        places, end = [], 0
        for size in (8 * batch * (depth + 1), 8 * batch, 8 * batch * depth, batch * (depth + 1)):
            places.append(slice(end, end + size))
            end += -(-size // 16) * 16
        return places, end

    def first(self, rows: int) -> Verdict:
        """Return the first rows; the others stay in `packed`."""
        packed_rows = 0 if self.packed is None else self.packed_rows or len(self.path)
        parts = {name: getattr(self, name)[:rows] for name in ("tokens", "num_accepted", "path", "kinds")}
        logprobs = None if self.logprobs is None else self.logprobs.each(itemgetter(slice(rows)))
        return Verdict(**parts, logprobs=logprobs, packed=self.packed, packed_rows=packed_rows)

    def pack(self) -> Tensor:
        """Return all but the logprobs, contiguous."""
        if self.packed is not None:
            return self.packed
        batch, depth = self.path.shape
        copy = Verdict.blank(batch, depth, self.path.device)
        for name in ("tokens", "num_accepted", "path", "kinds"):
            getattr(copy, name).copy_(getattr(self, name))
        assert copy.packed is not None
        return copy.packed


class HostVerdict(Verdict):
    """A verdict reached on the host: rows of lists, which makes a tensor when it is first read."""

    is_cuda = False
    _depth: int

    @staticmethod
    def of(rows: Sequence[VerdictRow], depth: int) -> HostVerdict:
        """Return a verdict as wide as drafts of that depth."""
        verdict = object.__new__(HostVerdict)
        verdict.__dict__.update(rows=rows, _depth=depth)
        return verdict

    @functools.cached_property
    def tokens(self) -> Tensor:
        return _padded([row.tokens for row in self.rows], self._depth + 1, -1)

    @functools.cached_property
    def num_accepted(self) -> Tensor:
        return torch.tensor([len(row.path) for row in self.rows], dtype=torch.int64)

    @functools.cached_property
    def path(self) -> Tensor:
        return _padded([row.path for row in self.rows], self._depth, -1)

    @functools.cached_property
    def kinds(self) -> Tensor:
        return _padded([row.kinds for row in self.rows], self._depth + 1, int(TokenKind.PAD)).to(torch.uint8)


def _padded(rows: Sequence[list[int]], width: int, filler: int) -> Tensor:
    return torch.tensor([row + [filler] * (width - len(row)) for row in rows], dtype=torch.int64).view(len(rows), width)


@dataclass(frozen=True, kw_only=True)
class UnreadVerdict:
    """The verdict of a step under way, on the device: the host has not read it and never branches on its values.

    Row b commits its first num_accepted + 1 tokens behind the `length` it had. The hidden state of committed position
    length - 1 + i is row node_row - 1 of the pass for i = 0, and row node_row + path[i - 1] for the others.
    """

    tokens: Tensor  # (B, D + 1), as in `Verdict`, its rows one stride apart; D is the draft's depth
    num_accepted: Tensor  # (B,)
    path: Tensor  # (B, D)
    rows: Sequence[int]  # row of these tensors for each row of `propose`: those of the drafter
    length: Tensor  # (B,)
    node_row: Tensor  # (B,)
    req_index: Tensor  # (B,)

    @property
    def most(self) -> int:
        """The most tokens that a row may commit."""
        return self.tokens.shape[1]
