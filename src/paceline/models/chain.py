"""Continuation by a model without the host between its tokens: what a drafter may ask of a decoder, where it offers it.

The host waits for none of them: tokens stay on the device, and a continuation may begin with tokens that only the
device knows.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from paceline.draft import UnreadVerdict
from paceline.models.kv_cache import LayerCache

log = logging.getLogger("paceline")
READ = 2  # tokens of a row that may have to be read before it is continued: what was drafted last is in no cache


@dataclass(frozen=True)
class ChainRow:
    """A sequence whose last tokens are read and then continued by `count` more, its K/V written on the way."""

    tokens: Sequence[int]  # the last that the host knows: READ of them
    start: int  # position of the first of them
    lag: int  # how many of them, from the last one back, are to be read; the others are in the cache
    count: int
    blocks: Sequence[int]  # block ids for all but the last of the new tokens


class GreedyChain(Protocol):
    """Bound to a model's caches."""

    most_rows: int
    warm: bool  # the last draft took what its like will take again

    def draft(self, rows: Sequence[ChainRow], after: UnreadVerdict | None = None) -> Tensor:
        """(R, K) int64 on the device, K the largest count: for each row the most probable token after those before.

        `after`: rows continue behind this verdict. Bits may differ from those of a pass, and so may a token where two
        are almost equally probable. K/V that a row has no blocks for are not written; tokens behind them are random.
        """

    def check(self) -> None:
        """Raise if the last draft failed, which may be found out only once it is over."""


class Pick(Protocol):
    def __call__(self, logits: Tensor, depth: int) -> Tensor:
        """(R,) int64, where the logits (R, V) are: each row's token, `depth` tokens behind the begin of its chain."""


@runtime_checkable
class PicksTokens(GreedyChain, Protocol):
    """A chain that may also have its tokens picked, between its passes."""

    def draft_by(self, pick: Pick, rows: Sequence[ChainRow], after: UnreadVerdict | None = None) -> Tensor:
        """As `draft`; `pick` is asked once for every depth, for all rows, and its result stays on the device."""


def warmup(chain: GreedyChain, device: torch.device) -> bool:
    """Have it compile its kernels, before anything is in its caches; False: it does not work here."""
    row = ChainRow([0] * READ, 0, READ, 2, [0] * (READ + 2))
    nothing = torch.zeros(1, 2, dtype=torch.int64, device=device)
    try:
        chain.draft([row])
        chain.draft([row], UnreadVerdict(tokens=nothing, num_accepted=nothing[:, 0], path=nothing[:, :1], rows=[0]))
        if isinstance(chain, PicksTokens):
            chain.draft_by(lambda logits, depth: nothing[:, 0], [row])
    except Exception as problem:  # drafts by passes with the host between them serve
        log.warning("%s is not used for drafting: %r", type(chain).__name__, problem)
        return False
    return True


@runtime_checkable
class OffersGreedyChains(Protocol):
    """A model that may have such ways, by its shape and where it runs; the fastest for its number of rows first."""

    def greedy_chains(self, caches: Sequence[LayerCache], block_size: int) -> list[GreedyChain]: ...
