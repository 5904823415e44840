"""Chains: several tokens of each row by ordinary passes, without the host between them.

The first pass reads the last tokens of every row, the others one token each. Between two passes a kernel takes each
row's most probable token, or the one that was sampled, and advances the row. Passes are replayed from the decoder's own
graphs, so k tokens of any number of rows take k launches of each, and the host never waits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.core.draft import sent
from paceline.core.verdict import UnreadVerdict
from paceline.models.graphs import PassGraphs
from paceline.models.kv_cache import LayerCache, slots_of
from paceline.models.plan import PassPlan, padded_tables
from paceline.models.spec import ModelConfig

MOST_ROWS = 512
READ = 2  # tokens of a row that may have to be read before it is continued: the last drafted token has no K/V
SampleTokens = Callable[[Tensor, int], Tensor]  # logits (R, V) and a depth to (R,) int64 tokens, on the device
log = logging.getLogger("paceline")


@dataclass(frozen=True)
class ChainRow:
    """A sequence whose last tokens are read and then continued by `count` more; their K/V are written."""

    tokens: Sequence[int]  # the last READ tokens that the host knows
    start: int  # position of the first of them
    unread_tokens: int  # the number of them, counted from the last, whose K/V are not in the cache
    count: int
    blocks: Sequence[int]  # block ids for all but the last of the new tokens


class PassChain:
    """A decoder's chains, bound to its caches."""

    most_rows = MOST_ROWS

    def __init__(self, graphs: PassGraphs, config: ModelConfig, caches: Sequence[LayerCache], block_size: int) -> None:
        self._graphs, self._caches, self._block_size = graphs, caches, block_size
        self._most_positions = config.max_positions
        self.time_is_typical = True  # False: a pass of the last draft was the first of its shape

    def draft(
        self, rows: Sequence[ChainRow], after: UnreadVerdict | None = None, sample: SampleTokens | None = None
    ) -> Tensor:
        """Draft (R, K) int64 tokens on the device, K the largest count; without `sample` the most probable ones.

        `after`: rows continue behind this verdict. K/V that a row has no blocks for are not written; tokens behind them
        are arbitrary.
        """
        from paceline.models.backends.cuda.advance_rows import advance_rows, begin_rows, known_of

        count, most = max(row.count for row in rows), 0 if after is None else after.most
        ends = [min(len(row.blocks) * self._block_size, self._most_positions) for row in rows]
        which = range(len(rows)) if after is None else after.rows
        lasts = [row.start + len(row.tokens) - 1 for row in rows]
        known = known_of(
            [(at, last, row.tokens[-1], end) for at, last, row, end in zip(which, lasts, rows, ends, strict=True)]
        )
        longest = min(max(lasts) + most + count + 1, max(ends))
        tables, graphs = padded_tables([row.blocks for row in rows]), self._graphs
        known = sent(known, graphs.device)
        reading = self._reading(rows, tables, longest)
        first = graphs.place(*reading, self._caches, torch.arange(READ - 1, READ * len(rows), READ))
        if after is not None:
            begin_rows(after, known, first)
        self.time_is_typical = graphs.is_warm(first)
        logits = graphs.run(first).logits
        second = graphs.place(*self._one_each(rows, tables, longest), self._caches, torch.arange(len(rows)))
        drafted = torch.empty(len(rows), count, dtype=torch.int64, device=graphs.device)
        seen, each = first, READ
        for depth in range(count):
            if depth:
                self.time_is_typical &= graphs.is_warm(second)
                logits, seen, each = graphs.run(second).logits, second, 1
            chosen = None if sample is None else sample(logits[: len(rows)], depth)
            advance_rows(logits, chosen, known, drafted, depth, seen, each, second)
        return drafted

    def warmup(self) -> bool:
        """Compile the kernels between two passes, before anything is in the caches; return whether chains work here."""
        row = ChainRow([0] * READ, 0, READ, 2, [0] * (READ + 2))
        zeros = torch.zeros(1, 2, dtype=torch.int64, device=self._graphs.device)
        rows = dict.fromkeys(("num_accepted", "length", "node_row", "req_index"), zeros[:, 0])
        verdict = UnreadVerdict(tokens=zeros, path=zeros[:, :1], rows=[0], **rows)
        try:
            self.draft([row])
            self.draft([row], verdict)
            self.draft([row], sample=lambda logits, depth: zeros[:, 0])
        except Exception as problem:  # drafting by passes with the host between them still works
            log.warning("PassChain is not used for drafting: %r", problem)
            return False
        return True

    def _reading(self, rows: Sequence[ChainRow], tables: Tensor, longest: int) -> tuple[Tensor, PassPlan]:
        """Plan READ rows for each sequence; tokens whose K/V are in the cache are computed again and not written."""
        owners = torch.arange(len(rows)).repeat_interleave(READ)
        tokens = torch.tensor([token for row in rows for token in row.tokens])
        positions = torch.tensor([row.start + at for row in rows for at in range(READ)])
        missing = torch.tensor([at >= READ - row.unread_tokens for row in rows for at in range(READ)])
        slots = torch.where(missing, slots_of(tables, owners, positions, self._block_size), -1)
        return tokens, PassPlan.in_order(positions, slots, owners, tables, self._block_size, longest)

    def _one_each(self, rows: Sequence[ChainRow], tables: Tensor, longest: int) -> tuple[Tensor, PassPlan]:
        """Plan one row for each sequence, filled in on the device; its estimated length divides attention's work."""
        nothing = torch.zeros(len(rows), dtype=torch.int64)
        about = torch.tensor([row.start + len(row.tokens) for row in rows])
        owners = torch.arange(len(rows))
        return nothing, PassPlan.in_order(about, nothing - 1, owners, tables, self._block_size, longest)
