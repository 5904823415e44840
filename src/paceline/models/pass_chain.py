"""Chains by ordinary passes, one after the other, without the host between them.

The first pass reads the last tokens of every row, the others one token each; between them a kernel picks each row's
most probable token, or takes the token that `pick` drew, and advances the row. Passes are replayed from the decoder's
own graphs, so drafting k tokens for any number of rows takes k launches of each, and the host never waits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.config import ModelConfig
from paceline.core.draft import sent
from paceline.core.verdict import UnreadVerdict
from paceline.models.chain import READ, ChainRow, Pick
from paceline.models.graphs import PassGraphs
from paceline.models.kv_cache import LayerCache
from paceline.models.plan import PassPlan, padded_tables, slots_of

MOST_ROWS = 512


class PassChain:
    most_rows = MOST_ROWS

    def __init__(self, graphs: PassGraphs, config: ModelConfig, caches: Sequence[LayerCache], block_size: int) -> None:
        self._graphs, self._caches, self._block_size = graphs, caches, block_size
        self._most_positions = config.max_positions
        self.time_is_typical = True  # every pass of the last draft had a shape that occurred before

    def draft(self, rows: Sequence[ChainRow], after: UnreadVerdict | None = None) -> Tensor:
        return self._draft(rows, after, None)

    def draft_by(self, pick: Pick, rows: Sequence[ChainRow], after: UnreadVerdict | None = None) -> Tensor:
        return self._draft(rows, after, pick)

    def _draft(self, rows: Sequence[ChainRow], after: UnreadVerdict | None, pick: Pick | None) -> Tensor:
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
            chosen = None if pick is None else pick(logits[: len(rows)], depth)
            advance_rows(logits, chosen, known, drafted, depth, seen, each, second)
        return drafted

    def check(self) -> None:
        pass

    def _reading(self, rows: Sequence[ChainRow], tables: Tensor, longest: int) -> tuple[Tensor, PassPlan]:
        """READ rows for each sequence; tokens whose K/V are in the cache are computed again and not written."""
        owners = torch.arange(len(rows)).repeat_interleave(READ)
        tokens = torch.tensor([token for row in rows for token in row.tokens])
        positions = torch.tensor([row.start + at for row in rows for at in range(READ)])
        missing = torch.tensor([at >= READ - row.unread_tokens for row in rows for at in range(READ)])
        slots = torch.where(missing, slots_of(tables, owners, positions, self._block_size), -1)
        return tokens, PassPlan.in_order(positions, slots, owners, tables, self._block_size, longest)

    def _one_each(self, rows: Sequence[ChainRow], tables: Tensor, longest: int) -> tuple[Tensor, PassPlan]:
        """One row for each sequence, to be filled in on the device; attention's work is dealt by about its length."""
        nothing = torch.zeros(len(rows), dtype=torch.int64)
        about = torch.tensor([row.start + len(row.tokens) for row in rows])
        owners = torch.arange(len(rows))
        return nothing, PassPlan.in_order(about, nothing - 1, owners, tables, self._block_size, longest)
