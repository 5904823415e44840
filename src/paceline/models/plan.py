"""The rows of one pass, the keys each of them sees, and the result of the pass.

Every row (a prefill token, a decoded token, a node of a draft tree, a row of a drafter's block) sees the logical keys
[0, reach). The first `prefix` of them are read through its sequence's block table; the rest, a tree node's drafted
ancestors and the node itself, through explicit slots. So a node reads the same values in the same order as the token
would when decoded plainly: kernels that walk keys in order give the same bits for both. A row of a causal pass has
reach == position + 1; rows of a block that sees itself share one reach behind the block's last position.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

Ints = np.ndarray[Any, np.dtype[np.int32]]
ROW_FIELDS = ("positions", "prefix", "slots", "reach", "sequence")  # one number a row


def slots_of(tables: Any, owner: Any, position: Any, block_size: int) -> Any:
    """Cache slots of positions, by their sequence's row of the block tables (S, W): the only slot arithmetic."""
    block = position // block_size
    return tables.reshape(-1).take(owner * tables.shape[1] + block) * block_size + position % block_size


def padded_tables(blocks: Sequence[Sequence[int]]) -> Tensor:
    """(S, W) block ids of sequences, -1 beyond each one's end."""
    width = max(map(len, blocks))
    return torch.tensor([[*one, *[-1] * (width - len(one))] for one in blocks], dtype=torch.int32)


class DeviceTrees(NamedTuple):
    """Drafts of a pass that only the device knows; T trees of at most N nodes, each in rows of the pass that follow one
    another."""

    numbers: Ints  # (T, 4) row of `parents`, first row of the pass, number of nodes, length of the sequence
    tokens: Tensor  # (B, N) int64 on the device
    parents: Tensor  # (B, N) int64 on the device
    max_depth: int


class HostPlan(NamedTuple):
    """A plan as arrays of the host."""

    each: Ints  # (6, M) as ROW_FIELDS, then the tokens
    path: Ints
    block_tables: Ints
    tokens: Tensor | None = None  # the tokens of `each`, where it holds them


@dataclass(frozen=True)
class PassPlan:
    """Built once per pass, on the host, shared by all layers. All tensors are int32; M rows, S sequences.

    The model copies it to its device, where kernels read it.
    """

    positions: Tensor  # (M,) logical position, for RoPE and for where a sliding window begins
    slots: Tensor  # (M,) cache slot its K/V is written to; -1: the slot already holds it (a recomputed token)
    sequence: Tensor  # (M,) which row of block_tables
    prefix: Tensor  # (M,) keys [0, prefix) are read through the block table
    reach: Tensor  # (M,) keys [0, reach) are seen: those from prefix on by path; a guess where only the device knows
    path: Tensor  # (M, P) slots of keys prefix, prefix + 1, ...; P is 0 where no row has drafted ancestors
    block_tables: Tensor  # (S, W) block ids, -1 beyond a sequence's end
    block_size: int
    max_len: int  # no reach is larger; known on the host
    trees: DeviceTrees | None = None  # written into the pass on the device
    work: object = None  # how the kernels divide the pass, where prepared beforehand; owned by the kernels

    @staticmethod
    def on_host(host: HostPlan, block_size: int, max_len: int, trees: DeviceTrees | None = None) -> PassPlan:
        """A plan from arrays. Its tensors are made when a CPU's kernels first read one; a GPU is sent the arrays."""
        plan = object.__new__(PassPlan)
        plan.__dict__.update(host=host, block_size=block_size, max_len=max_len, trees=trees)
        return plan

    def __getattr__(self, name: str) -> Tensor:
        host = self.__dict__.get("host")
        if host is None or name not in (*ROW_FIELDS, "path", "block_tables"):
            raise AttributeError(name)
        self.__dict__.update(zip(ROW_FIELDS, torch.from_numpy(host.each).unbind(), strict=False))
        self.__dict__.update(path=torch.from_numpy(host.path), block_tables=torch.from_numpy(host.block_tables))
        found: Tensor = self.__dict__[name]
        return found

    @functools.cached_property
    def host(self) -> HostPlan:
        """The arrays of a plan that is on the host."""
        each = torch.stack([*(getattr(self, name) for name in ROW_FIELDS), torch.zeros_like(self.positions)])
        return HostPlan(each.numpy(), self.path.numpy(), self.block_tables.numpy())

    @staticmethod
    def in_order(
        positions: Tensor, slots: Tensor, sequence: Tensor, block_tables: Tensor, block_size: int, max_len: int
    ) -> PassPlan:
        """A plan of rows without drafted ancestors: each reads all earlier keys through the block table."""
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
        if ("host" in self.__dict__ and device.type == "cpu") or self.positions.device == device:
            return self
        tensors = {f.name: getattr(self, f.name) for f in fields(self) if isinstance(getattr(self, f.name), Tensor)}
        return replace(self, **{name: tensor.to(device) for name, tensor in tensors.items()})


class ModelOutput(NamedTuple):
    logits: Tensor  # (R, V) fp32, one row per entry of logit_rows
    taps: Tensor | None  # (M, T, H): the tapped hidden states of every row, in the order of `taps`
    time_is_typical: bool = True  # False: the first pass of its shape, which takes longer than later ones
