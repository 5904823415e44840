"""Drafts, from the drafters to verification: token trees, one for each row of a batch.

Nodes stand in topological order (a parent before its children), siblings in the order they were drawn; parent -1 is the
last committed token, the root, which is no node. Slot 0 stands for the root and slot i + 1 for node i wherever a tensor
is (B, N + 1). Depth is 1-based: the root's children have depth 1. Padding (node index >= num_nodes) holds token 0,
parent -1, depth 0. Plain decoding is the draft without nodes.

A `Draft` is tensors; a `HostDraft` is made of arrays; the tokens of a `DeviceDraft` (device_draft.py), and perhaps the
shape of its trees, are known to the device alone. The engine lays a pass out from what the host knows.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

Ints = np.ndarray[Any, np.dtype[np.int64]]
Bools = np.ndarray[Any, np.dtype[np.bool_]]
UNKNOWN = -2  # a node whose parent only the device knows


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """q, the tensor from which the drafted tokens were sampled. A row belongs to the *parent* of those tokens."""

    probs: Tensor  # (M, Vq)
    row_of: Tensor  # (B, N + 1) row of probs by slot of the parent; -1: a deterministic proposal, or no children
    ids: Tensor | None = None  # (Vq,) the target's token ids of a smaller draft vocabulary; None: the target's own

    def over(self, vocab_size: int) -> Tensor:
        """Return (M, V): q over the target's vocabulary, zero where the drafter has no such token."""
        if self.ids is None:
            return self.probs
        return self.probs.new_zeros(self.probs.shape[0], vocab_size).index_copy_(1, self.ids, self.probs)

    def to(self, device: torch.device, row_of: Tensor) -> Proposal:
        """Return a copy on the device, where `row_of` is already."""
        ids = None if self.ids is None else self.ids.to(device)
        return Proposal(probs=self.probs.to(device), row_of=row_of, ids=ids)

    def validate(self, batch: int, width: int, vocab_size: int) -> None:
        """Raise ValueError unless shapes and indices fit the draft and the vocabulary."""
        if tuple(self.row_of.shape) != (batch, width + 1):
            raise ValueError(f"q.row_of has shape {tuple(self.row_of.shape)}, expected {(batch, width + 1)}")
        size = vocab_size if self.ids is None else self.ids.shape[0]
        if self.probs.dim() != 2 or self.probs.shape[1] != size:
            raise ValueError(f"q.probs has shape {tuple(self.probs.shape)}, expected (M, {size})")
        if self.row_of.numel() and not -1 <= int(self.row_of.min()) <= int(self.row_of.max()) < self.probs.shape[0]:
            raise ValueError(f"q.row_of points outside the {self.probs.shape[0]} rows of q.probs")
        ids = self.ids
        if ids is not None and ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
            raise ValueError(f"q.ids points outside the vocabulary of {vocab_size}")


class DraftArrays(NamedTuple):
    """The numbers of a draft on the host."""

    tokens: Ints  # (B, N); zeros where the host has not seen them
    parents: Ints  # (B, N)
    depth: Ints  # (B, N)
    num_nodes: Ints  # (B,)


@dataclass(frozen=True, eq=False)
class DraftShape:
    """A validated shape, shared by all drafts that have it. Immutable."""

    parent: Ints  # (B, N)
    depth: Ints  # (B, N)
    count: Ints  # (B,)
    num_nodes: tuple[int, ...]  # `count` as a tuple
    used: Bools  # (B, N) nodes that the host knows
    max_depth: int

    @functools.cached_property
    def is_chain(self) -> Bools:
        """(B,) every node is a child of the one before."""
        node = np.arange(self.parent.shape[1])
        chains: Bools = ((self.parent == node - 1) | (node >= self.count[:, None])).all(1)
        return chains

    @functools.cached_property
    def parents(self) -> list[list[int]]:
        """`parent` as lists."""
        lists: list[list[int]] = self.parent.tolist()
        return lists

    @functools.cached_property
    def logit_rows(self) -> list[range]:
        """Rows of logits of each row's last token and nodes, where all logits of a step lie in this order."""
        ends = itertools.accumulate(1 + count for count in self.num_nodes)
        return [range(end - 1 - count, end) for end, count in zip(ends, self.num_nodes, strict=True)]


@dataclass(frozen=True, kw_only=True)
class Draft:
    """A draft as tensors, which verification reads. `num_nodes` and `q.row_of` may lie on the host while the others are
    on a device."""

    tokens: Tensor  # (B, N) int64
    parents: Tensor  # (B, N) int64
    depth: Tensor  # (B, N) int64
    num_nodes: Tensor  # (B,) int64
    q: Proposal | None = None  # proposal of chains; None: every row is deterministic
    depth_bound: int | None = None  # bound of every node's depth, where the tensors are not read for it

    tokens_on_device: ClassVar[bool] = False  # the host has not seen the tokens
    token_bound: ClassVar[int] = sys.maxsize  # all tokens are in 0 ..< token_bound, where that is known

    @staticmethod
    def empty(batch: int, width: int = 0) -> HostDraft:
        """Return a draft without nodes."""
        tokens, depth = np.zeros((2, batch, width), np.int64)
        return HostDraft.of_arrays(tokens, np.full((batch, width), -1), depth, np.zeros(batch, np.int64))

    @staticmethod
    def chains(tokens: Tensor, num_nodes: Tensor | None = None, q: Proposal | None = None) -> Draft:
        """Return chains of the tokens (B, K) on the host, the first num_nodes of each row in use (all, if None).

        Every node is a child of the one before.
        """
        counts = np.full(len(tokens), tokens.shape[1]) if num_nodes is None else num_nodes.numpy()
        used, parents, depth = chain_shape(counts, tokens.shape[1])
        draft = HostDraft.of_arrays(tokens.numpy() * used, parents, depth, counts)
        return draft if q is None else draft.with_q(q)

    @functools.cached_property
    def arrays(self) -> DraftArrays:
        """Copied from the device, where the draft is on one."""
        return DraftArrays(*(one.cpu().numpy() for one in (self.tokens, self.parents, self.depth, self.num_nodes)))

    @functools.cached_property
    def size(self) -> tuple[int, int]:
        """B, N."""
        batch, width = self.tokens.shape
        return batch, width

    @property
    def batch(self) -> int:
        """B."""
        return self.size[0]

    @property
    def width(self) -> int:
        """N: an upper bound on every row's nodes, and on its depth."""
        return self.size[1]

    @functools.cached_property
    def shape(self) -> DraftShape:
        """The shape, as far as the host knows it. Raises ValueError where a row is no tree."""
        _, parents, depth, counts = self.arrays
        return draft_shape(parents.tobytes() + depth.tobytes(), tuple(counts.tolist()), self.width, False)

    @functools.cached_property
    def max_depth(self) -> int:
        """A bound on every node's depth, known on the host."""
        return self.shape.max_depth if self.depth_bound is None else self.depth_bound

    @property
    def unseen(self) -> list[Tensor]:
        """Return (B, N) tokens, and parents too where the host does not know all, that are only on the device."""
        return []

    @property
    def is_planned(self) -> bool:
        """Return whether all but tokens, unknown trees and q's numbers are on the host."""
        return self.parents.is_cpu and (self.q is None or self.q.row_of.is_cpu)

    def to(self, device: torch.device) -> Draft:
        """Return the whole draft on the device, its numbers in one copy."""
        q = self.q
        if self.num_nodes.device.type == device.type:
            return self
        parts = [self.num_nodes] if q is None else [self.num_nodes, q.row_of]
        if self.tokens.device.type != device.type:
            parts += [self.tokens, self.parents, self.depth]
        num_nodes, *rest = packed_to(device, *parts)
        if q is not None:
            q = q.to(device, rest.pop(0))
        tokens, parents, depth = rest or (self.tokens, self.parents, self.depth)
        bound = self.max_depth
        return Draft(tokens=tokens, parents=parents, depth=depth, num_nodes=num_nodes, q=q, depth_bound=bound)

    def placed(self, device: torch.device) -> Draft:
        """Return the draft with the trees that only the device knows filled in there; counts stay on the host."""
        return self

    def repaired(self, vocab_size: int) -> Draft:
        """Return the draft with the trees and tokens that only the device knows made valid there."""
        return self

    def on_host(self, vocab_size: int) -> Draft:
        """Return the draft with the trees that only the device knows, and their tokens, read by the host."""
        return self

    def take(self, rows: Sequence[int], counts: Sequence[int]) -> Draft:
        """Return some rows, each with its first `counts` nodes. The choice must not depend on tokens drawn from q."""
        index, num_nodes = np.array(rows, np.int64), np.array(counts, np.int64)
        width = int(num_nodes.max(initial=0))
        used = np.arange(width) < num_nodes[:, None]
        tokens, parents, depth = (part[index, :width] for part in self.arrays[:3])
        draft = HostDraft.of_arrays(tokens * used, np.where(used, parents, -1), depth * used, num_nodes)
        if self.q is None:
            return draft
        row_of = np.full((len(index), width + 1), -1)
        row_of[:, :-1] = np.where(used, self.q.row_of.numpy()[index, :width], -1)
        return draft.with_q(replace(self.q, row_of=torch.from_numpy(row_of)))

    def validate(self, vocab_size: int) -> None:
        """Raise ValueError unless every row is a tree as defined above, and rows that carry q are chains."""
        tokens, parents, depth, counts = self.arrays
        if not tokens.dtype == parents.dtype == depth.dtype == counts.dtype == np.int64:
            raise ValueError("tokens, parents, depth and num_nodes must be int64")
        if not tokens.shape == parents.shape == depth.shape == (len(counts), self.width):
            raise ValueError("tokens, parents and depth must have a row for each number of nodes")
        shape = self.shape
        if not self.tokens_on_device and self.token_bound > vocab_size:
            unsigned = tokens.view(np.uint64)  # negative ones are the largest
            if np.maximum.reduce(unsigned, None, initial=0) >= vocab_size:
                refuse(shape.used & (unsigned >= vocab_size), "row {}, node {}: a token outside the vocabulary")
        if self.q is not None:
            self.q.validate(self.batch, self.width, vocab_size)
            carries: Bools = self.q.row_of.amax(1).cpu().numpy() >= 0
            refuse(carries & ~shape.is_chain, "row {}: a tree carries q; give q with chains only")


class HostDraft(Draft):
    """A draft made of arrays, which makes a tensor when it is first read."""

    @staticmethod
    def of_arrays(tokens: Ints, parents: Ints, depth: Ints, num_nodes: Ints) -> HostDraft:
        draft = object.__new__(HostDraft)
        draft.__dict__.update(arrays=DraftArrays(tokens, parents, depth, num_nodes), size=tokens.shape)
        return draft

    @staticmethod
    def of_trees(nodes: Ints, counts: Sequence[int], bound: int) -> HostDraft:
        """Return a draft of the tokens, all below `bound`, parents and depths in `nodes` (3, B, N)."""
        shape = draft_shape(nodes[1:].tobytes(), tuple(counts), nodes.shape[2], False)
        tokens, draft = nodes[0], object.__new__(HostDraft)
        arrays = DraftArrays(tokens, shape.parent, shape.depth, shape.count)
        draft.__dict__.update(arrays=arrays, shape=shape, size=tokens.shape, token_bound=bound)
        return draft

    @property
    def is_planned(self) -> bool:
        return self.q is None or self.q.row_of.is_cpu

    def with_q(self, q: Proposal) -> HostDraft:
        """Return the draft with the q that its chains were drawn from."""
        draft = object.__new__(HostDraft)
        draft.__dict__.update(self.__dict__, q=q)
        return draft

    @functools.cached_property
    def tokens(self) -> Tensor:
        return torch.from_numpy(self.arrays.tokens)

    @functools.cached_property
    def parents(self) -> Tensor:
        return torch.from_numpy(self.arrays.parents)

    @functools.cached_property
    def depth(self) -> Tensor:
        return torch.from_numpy(self.arrays.depth)

    @functools.cached_property
    def num_nodes(self) -> Tensor:
        return torch.from_numpy(self.arrays.num_nodes)


def chain_shape(counts: Ints, width: int) -> tuple[Bools, Ints, Ints]:
    """Return which nodes (B, N) of chains of these lengths are used, their parents and their depths."""
    node = np.arange(width)
    used: Bools = node < counts[:, None]
    return used, np.where(used, node - 1, -1), (node + 1) * used


@functools.lru_cache(128)
def draft_shape(shape: bytes, counts: tuple[int, ...], width: int, unknown: bool) -> DraftShape:
    """Return the shape of parents and depths, one behind the other; raise ValueError where a row is no tree.

    `unknown`: some rows are known to the device alone.
    """
    count, node = np.array(counts, np.int64), np.arange(width)
    parent, depth = np.frombuffer(shape, np.int64).copy().reshape(2, len(count), width)  # torch wants to own them
    refuse((count < 0) | (count > width), "row {}: num_nodes is not between 0 and the width")
    used: Bools = node < count[:, None]
    if unknown:
        used = used & (parent != UNKNOWN)
    refuse(used & ((parent < -1) | (parent >= node)), "row {}, node {}: its parent does not come before it")
    rows = np.arange(len(count))[:, None]
    above = np.where(parent < 0, 0, depth[rows, np.where(used, parent, -1)]) if width else depth
    refuse(used & (depth != above + 1), "row {}, node {}: depth is not its parent's plus one")
    return DraftShape(parent, depth, count, counts, used, int(depth.max(initial=0)))


def refuse(wrong: Bools, complaint: str) -> None:
    """Raise ValueError, with the index of the first wrong entry in the complaint, where there is one."""
    if wrong.any():
        raise ValueError(complaint.format(*np.argwhere(wrong)[0].tolist()))


def ancestors(parents: Tensor, depth: Tensor, max_depth: int) -> Tensor:
    """Return (B, N, max_depth) the path from the root's child to each node itself, as node indices, -1 beyond.

    No host sync; padding (depth 0) has no path. `max_depth` bounds the true depth (N always does).
    """
    batch, width = parents.shape
    path = parents.new_full((batch, width, max_depth + 1), -1)  # the last column discards nodes without a path
    node = torch.arange(width, device=parents.device).expand(batch, width)
    alive = depth > 0
    for _ in range(max_depth):
        column = torch.where(alive, depth.gather(1, node) - 1, max_depth)
        path.scatter_(2, column[..., None], node[..., None])
        above = parents.gather(1, node)
        alive = alive & (above >= 0)
        node = above.clamp_min(0)
    return path[..., :max_depth]


def packed_to(device: torch.device, *tensors: Tensor) -> list[Tensor]:
    """Return int64 tensors of the host on a device, contiguous, in one copy: its overhead exceeds the transfer.

    Each is aligned to 16 bytes: Triton compiles kernels anew for unaligned pointers.
    """
    if device.type == "cpu":
        return [tensor.contiguous() for tensor in tensors]  # columns of numpy's nonzero are not
    odd = torch.zeros(1, dtype=torch.int64)
    sizes = [tensor.numel() for tensor in tensors]
    padded = (
        [tensor.flatten(), odd] if size % 2 else [tensor.flatten()] for tensor, size in zip(tensors, sizes, strict=True)
    )
    flat = sent(torch.cat([part for parts in padded for part in parts]), device)
    parts = torch.split(flat, [size + size % 2 for size in sizes])
    return [part[:size].view(tensor.shape) for part, size, tensor in zip(parts, sizes, tensors, strict=True)]


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the tensor on a device, without a wait for work there: a copy from unpinned memory would wait."""
    pins = device.type == "cuda" and tensor.numel() > 0
    return tensor.pin_memory().to(device, non_blocking=True) if pins else tensor.to(device)
