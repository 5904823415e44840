"""Greedy continuation by a model that needs no logits back: what a drafter may ask of a decoder, where it offers it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from paceline.models.kv_cache import LayerCache


@dataclass(frozen=True)
class ChainRow:
    """A sequence whose last tokens are read and then continued by `count` more, its K/V written on the way."""

    tokens: Sequence[int]  # those to read, at least the last one
    start: int  # position of the first of them
    count: int
    blocks: Sequence[int]  # block ids for all but the last of the new tokens


class GreedyChain(Protocol):
    """Bound to a model's caches."""

    most_rows: int
    most_lag: int  # tokens a row may have to read

    def draft(self, rows: Sequence[ChainRow]) -> list[list[int]]:
        """`count` tokens for every row: each the most probable one after those before, as this model sees it.

        Bits may differ from those of a pass, and so may a token where two are almost equally probable.
        """


@runtime_checkable
class OffersGreedyChain(Protocol):
    """A model that may have such a way, by its shape and where it runs."""

    def greedy_chain(self, caches: Sequence[LayerCache], block_size: int) -> GreedyChain | None: ...
