"""The rows of one pass, the keys each of them attends to, and the result of the pass.

Every row (a prefill token, a decoded token, a node of a draft tree, a row of a drafter's block) attends to the logical
keys [0, reach). The first `prefix` of them are read through its sequence's block table; the rest, the drafted ancestors
of a node and the node itself, through explicit slots. So a node reads the values that its token reads when decoded
plainly, in their order, and kernels that walk keys in order give both the same bits. A row of a causal pass has
reach == position + 1; rows of a block that attends to itself share one reach, behind the block's last position.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

Ints = np.ndarray[Any, np.dtype[np.int32]]
ROW_FIELDS = ("positions", "prefix", "slots", "reach", "sequence")  # one number a row, in the order of HostPlan.each


def padded_tables(blocks: Sequence[Sequence[int]]) -> Tensor:
    """Return the (S, W) block ids of sequences, -1 beyond the end of each."""
    width = max(map(len, blocks))
    return torch.tensor([[*row, *[-1] * (width - len(row))] for row in blocks], dtype=torch.int32)


class DeviceTrees(NamedTuple):
    """Drafts of a pass that only the device knows: T trees of at most N nodes, each in consecutive rows of the pass."""

    numbers: Ints  # (T, 4) row of `parents`, first row of the pass, number of nodes, length of the sequence
    tokens: Tensor  # (B, N) int64 on the device
    parents: Tensor  # (B, N) int64 on the device
    max_depth: int


class HostPlan(NamedTuple):
    """A plan as arrays of the host."""

    each: Ints  # (6, M) the ROW_FIELDS, then the tokens
    path: Ints
    block_tables: Ints
    tokens: Tensor | None = None  # the tokens of `each`, where it holds them


@dataclass(frozen=True)
class PassPlan:
    """The plan of M rows of S sequences, shared by all layers; all tensors are int32.

    It is built on the host; the model copies it to its device, where kernels read it.
    """

    positions: Tensor  # (M,) logical position, for RoPE and for where a sliding window begins
    slots: Tensor  # (M,) cache slot that its K/V are written to; -1: a recomputed token, whose slot holds them already
    sequence: Tensor  # (M,) row of block_tables
    prefix: Tensor  # (M,) keys [0, prefix) are read through the block table
    reach: Tensor  # (M,) keys [prefix, reach) are read by path; an estimate where only the device knows it
    path: Tensor  # (M, P) slots of keys prefix, prefix + 1, ...; P is 0 where no row has drafted ancestors
    block_tables: Tensor  # (S, W) block ids, -1 beyond a sequence's end
    block_size: int
    max_len: int  # an upper bound of reach, on the host
    trees: DeviceTrees | None = None  # written into the pass on the device
    work: object = None  # division of the pass among programs, where it is prepared beforehand; the kernels' own

    @staticmethod
    def on_host(host: HostPlan, block_size: int, max_len: int, trees: DeviceTrees | None = None) -> PassPlan:
        return _ArrayPlan(host, block_size, max_len, trees)

    @functools.cached_property
    def host(self) -> HostPlan:
        """Return the arrays of a plan that is on the host."""
        each = torch.stack([*(getattr(self, name) for name in ROW_FIELDS), torch.zeros_like(self.positions)])
        return HostPlan(each.numpy(), self.path.numpy(), self.block_tables.numpy())

    @staticmethod
    def in_order(
        positions: Tensor, slots: Tensor, sequence: Tensor, block_tables: Tensor, block_size: int, max_len: int
    ) -> PassPlan:
        """Plan rows without drafted ancestors: each reads all earlier keys through the block table."""
        positions = positions.int()
        return PassPlan(
            positions=positions,
            slots=slots.int(),
            sequence=sequence.int(),
            prefix=positions + 1,
            reach=positions + 1,
            path=positions.new_empty(len(positions), 0),
            block_tables=block_tables,
            block_size=block_size,
            max_len=max_len,
        )

    def to(self, device: torch.device) -> PassPlan:
        if self.positions.device == device:
            return self
        tensors = {name: getattr(self, name).to(device) for name in (*ROW_FIELDS, "path", "block_tables")}
        return PassPlan(**tensors, block_size=self.block_size, max_len=self.max_len, trees=self.trees, work=self.work)


class _ArrayPlan(PassPlan):
    """A plan of arrays. Its tensors are made when a CPU's kernels first read one; a GPU is sent the arrays."""

    def __init__(self, host: HostPlan, block_size: int, max_len: int, trees: DeviceTrees | None) -> None:
        self.__dict__.update(host=host, block_size=block_size, max_len=max_len, trees=trees)

    @functools.cached_property
    def _rows(self) -> tuple[Tensor, ...]:
        return torch.from_numpy(self.host.each).unbind()

    @functools.cached_property
    def positions(self) -> Tensor:
        return self._rows[0]

    @functools.cached_property
    def prefix(self) -> Tensor:
        return self._rows[1]

    @functools.cached_property
    def slots(self) -> Tensor:
        return self._rows[2]

    @functools.cached_property
    def reach(self) -> Tensor:
        return self._rows[3]

    @functools.cached_property
    def sequence(self) -> Tensor:
        return self._rows[4]

    @functools.cached_property
    def path(self) -> Tensor:
        return torch.from_numpy(self.host.path)

    @functools.cached_property
    def block_tables(self) -> Tensor:
        return torch.from_numpy(self.host.block_tables)

    def to(self, device: torch.device) -> PassPlan:
        return self if device.type == "cpu" else super().to(device)


class ModelOutput(NamedTuple):
    logits: Tensor  # (R, V) fp32, one row per entry of logit_rows
    taps: Tensor | None  # (M, T, H): the tapped hidden states of every row, in the order of `taps`
    time_is_typical: bool = True  # False: the first pass of its shape, which takes longer
