"""What the layers of a pass share in the torch kernels: rotations, slots to write, and the keys each row reads.

Sequences with equally many rows are one part: their keys are gathered once for all rows of a sequence, not per row.
Built once per pass; `TorchKernels` keeps the last one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.models.kernels import RopeArgs
from paceline.models.kv_cache import LayerCache
from paceline.models.plan import PassPlan, slots_of

LIMIT = 1 << 24  # numbers a part may gather or compute at once; more sequences or rows make further parts


class Part(NamedTuple):
    """S sequences with R rows each."""

    rows: Tensor  # (S, R) rows of the pass
    slots: Tensor  # (S, T) of the keys that rows of a sequence share, padded
    hidden: Tensor | None  # (S, R, T) shared keys that a row does not see; None: all are seen
    path: Tensor | None  # (S, R, P) slots of a row's drafted ancestors; None where no row has any
    path_hidden: Tensor | None  # (S, R, P)


class PassReads:
    def __init__(self, plan: PassPlan) -> None:
        self.plan = plan
        self.positions, self.sequence, self.prefix, self.reach = (  # (M,)
            tensor.long() for tensor in (plan.positions, plan.sequence, plan.prefix, plan.reach)
        )
        writes = plan.slots >= 0
        self.writing = None if bool(writes.all()) else writes  # (M,) bool
        self.slots = (plan.slots if self.writing is None else plan.slots[writes]).long()
        self._rotation: tuple[Tensor | None, Tensor, Tensor] | None = None
        self._parts: dict[tuple[int | None, int, int], list[Part]] = {}

    def rotation(self, rope: RopeArgs) -> tuple[Tensor, Tensor]:
        """cos and sin of the rows' positions, (M, 1, D / 2)."""
        if self._rotation is None or self._rotation[0] is not rope.cos:
            at = self.positions
            self._rotation = rope.cos, rope.cos[at][:, None], rope.sin[at][:, None]
        return self._rotation[1], self._rotation[2]

    def parts(self, window: int | None, heads: int, cache: LayerCache) -> list[Part]:
        """For layers of this window, of as many query heads and of this size of a key."""
        key = window, heads, cache.k[0].numel()
        if key not in self._parts:
            self._parts[key] = list(self._divide(*key))
        return self._parts[key]

    def _divide(self, window: int | None, heads: int, key_size: int) -> Iterator[Part]:
        begin = torch.zeros_like(self.positions)
        if window is not None:
            begin = (self.positions - window + 1).clamp(min=0)
        order = torch.argsort(self.sequence, stable=True)
        counts = torch.unique_consecutive(self.sequence[order], return_counts=True)[1]
        ends = counts.cumsum(0)
        for count in counts.unique().tolist():
            starts = (ends - counts)[counts == count]
            rows = order[starts[:, None] + torch.arange(count, device=starts.device)]  # (S, R)
            seen = max(int((self.reach[rows].amax(1) - begin[rows].amin(1)).max()), 1)
            for together in torch.split(rows, max(1, LIMIT // (seen * max(key_size, count * heads)))):
                for piece in torch.split(together, max(1, LIMIT // (seen * heads)), dim=1):
                    yield self._part(piece, begin)

    def _part(self, rows: Tensor, begin: Tensor) -> Part:
        plan = self.plan
        prefix, reach, begin = self.prefix[rows], self.reach[rows], begin[rows]  # (S, R)
        first, end = begin.amin(1, keepdim=True), prefix.amax(1, keepdim=True)  # (S, 1)
        positions = first + torch.arange(max(int((end - first).max()), 0), device=rows.device)  # (S, T)
        hidden = (positions[:, None] >= prefix[..., None]) | (positions[:, None] < begin[..., None])
        owner, last = self.sequence[rows], self._last_keys(rows)
        paged = slots_of(plan.block_tables, owner[:, :1], positions.minimum(end - 1).clamp(min=0), plan.block_size)
        slots = torch.where(positions < end, paged, last[:, :1]).long()
        path = path_hidden = None
        if bool((reach > prefix).any()):
            ahead = prefix[..., None] + torch.arange(plan.path.shape[1], device=rows.device)  # (S, R, P)
            path = torch.where(ahead < reach[..., None], plan.path[rows], last[..., None]).long()
            path_hidden = (ahead >= reach[..., None]) | (ahead < begin[..., None])
        return Part(rows, slots, hidden if bool(hidden.any()) else None, path, path_hidden)

    def _last_keys(self, rows: Tensor) -> Tensor:
        """Slots of the last key each row sees (S, R), to pad with: what no row wrote may be NaN, and 0 x NaN is NaN."""
        plan = self.plan
        prefix, reach = self.prefix[rows], self.reach[rows]
        paged: Tensor = slots_of(plan.block_tables, self.sequence[rows], (prefix - 1).clamp(min=0), plan.block_size)
        if not plan.path.shape[1]:
            return paged
        own = plan.path[rows].gather(2, (reach - prefix - 1).clamp(min=0)[..., None].long())[..., 0]
        return torch.where(reach > prefix, own, paged)
