"""What drafters propose and the runner and verification take: Draft, Proposal.

A draft is one token tree per row. Nodes stand in topological order (a parent before its children), siblings in the
order they were drawn; parent -1 is the last committed token, the root, which is no node. Slot 0 stands for the root and
slot i + 1 for node i wherever a tensor is (B, N + 1). Depth is 1-based: the root's children have depth 1.
Padding (node index >= num_nodes) holds token 0, parent -1, depth 0. Plain decoding is the draft without nodes.

The shape of a draft is on the host, so that a pass can be laid out; its tokens may be on the device, unseen by the
host, and then padding may hold any token. Trees whose shape only the device knows are `UNKNOWN` on the host.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

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
        """(M, V): the same numbers over the target's vocabulary, zero where the drafter has no such token."""
        if self.ids is None:
            return self.probs
        return self.probs.new_zeros(self.probs.shape[0], vocab_size).index_copy_(1, self.ids, self.probs)

    def to(self, device: torch.device, row_of: Tensor) -> Proposal:
        """The same on the device, where `row_of` is already."""
        return Proposal(
            probs=self.probs.to(device), row_of=row_of, ids=None if self.ids is None else self.ids.to(device)
        )


class DraftArrays(NamedTuple):
    """The numbers of a draft on the host."""

    tokens: Ints  # (B, N); zeros where they lie on a device, unseen
    parents: Ints  # (B, N)
    depth: Ints  # (B, N)
    num_nodes: Ints  # (B,)


@dataclass(frozen=True, eq=False)
class DraftShape:
    """The shape of a draft that was found to be sound. Steps have the same again and again: drafts of one shape share
    one, and what follows from it is kept by it. Never written to."""

    parent: Ints  # (B, N)
    depth: Ints  # (B, N)
    count: Ints  # (B,)
    num_nodes: tuple[int, ...]  # the same
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
        found: list[list[int]] = self.parent.tolist()
        return found

    @functools.cached_property
    def logit_rows(self) -> list[range]:
        """By row: those of its last token and of its nodes, where all logits of a step lie in this order."""
        ends = itertools.accumulate(1 + count for count in self.num_nodes)
        return [range(end - 1 - count, end) for end, count in zip(ends, self.num_nodes, strict=True)]


@dataclass(frozen=True, kw_only=True)
class Draft:
    """A draft made on the host is made of arrays (`of_arrays`), and makes the tensors when one is first read."""

    tokens: Tensor  # (B, N) int64
    parents: Tensor  # (B, N) int64; `UNKNOWN` in rows whose tree only the device knows
    depth: Tensor  # (B, N) int64; 0 in such rows
    num_nodes: Tensor  # (B,) int64
    q: Proposal | None = None  # None: every row is deterministic
    tokens_on_device: bool = False  # the tokens are on the model's device, and the host has not read them
    device_parents: Tensor | None = None  # (B, N) int64 on the device, of the rows that are `UNKNOWN` on the host
    device_depth: Tensor | None = None  # (B, N) int64, beside `device_parents` once these are made `repaired`
    depth_bound: int = 0  # of those rows' trees
    token_bound: int = sys.maxsize  # all tokens are known to be below it, and none to be negative, where it is lower

    @staticmethod
    def of_arrays(tokens: Ints, parents: Ints, depth: Ints, num_nodes: Ints) -> Draft:
        draft = object.__new__(Draft)
        draft.__dict__.update(arrays=DraftArrays(tokens, parents, depth, num_nodes), shape=tokens.shape)
        return draft

    @staticmethod
    def of_trees(found: Ints, counts: Sequence[int], bound: int) -> Draft:
        """From tokens below `bound`, parents and depths (3, B, N)."""
        trees = _trees(found[1:].tobytes(), tuple(counts), found.shape[2], False)
        tokens, draft = found[0], object.__new__(Draft)
        arrays = DraftArrays(tokens, trees.parent, trees.depth, trees.count)
        draft.__dict__.update(arrays=arrays, trees=trees, shape=tokens.shape, token_bound=bound)
        return draft

    def __getattr__(self, name: str) -> Tensor:
        if name not in DraftArrays._fields or "arrays" not in self.__dict__:
            raise AttributeError(name)
        made = self.__dict__[name] = torch.from_numpy(getattr(self.arrays, name))
        return made

    @functools.cached_property
    def arrays(self) -> DraftArrays:
        """Copied from the device, where a draft is there; tokens that the host has not seen are not waited for."""
        parents, depth, num_nodes = (part.cpu().numpy() for part in (self.parents, self.depth, self.num_nodes))
        waits = self.tokens_on_device and not self.tokens.is_cpu
        tokens = np.zeros_like(parents) if waits else self.tokens.cpu().numpy()
        return DraftArrays(tokens, parents, depth, num_nodes)

    @functools.cached_property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tokens.shape)

    @property
    def batch(self) -> int:
        return self.shape[0]

    @property
    def width(self) -> int:
        """N: an upper bound on every row's nodes, and on its depth."""
        return self.shape[1]

    @functools.cached_property
    def trees(self) -> DraftShape:
        """Raises ValueError where a row is no tree."""
        _, parents, depth, counts = self.arrays
        unknown = self.device_parents is not None
        return _trees(parents.tobytes() + depth.tobytes(), tuple(counts.tolist()), self.width, unknown)

    @functools.cached_property
    def max_depth(self) -> int:
        """A bound on every node's depth, known on the host."""
        return max(self.trees.max_depth if self._is_here else self.width, self.depth_bound)

    @property
    def _is_here(self) -> bool:
        """Its shape is on the host."""
        made = self.__dict__.get("parents")
        return made is None or bool(made.is_cpu)

    @staticmethod
    def empty(batch: int, device: torch.device | str = "cpu", width: int = 0) -> Draft:
        def full(shape: tuple[int, ...], value: int) -> Tensor:
            return torch.full(shape, value, dtype=torch.int64, device=device)

        return Draft(
            tokens=full((batch, width), 0),
            parents=full((batch, width), -1),
            depth=full((batch, width), 0),
            num_nodes=full((batch,), 0),
        )

    @staticmethod
    def chains(
        tokens: Tensor, num_nodes: Tensor | None = None, q: Proposal | None = None, *, tokens_on_device: bool = False
    ) -> Draft:
        """(B, K) tokens, the first num_nodes of each row in use (all, if None), every node a child of the one before.

        In numpy, which takes a fraction of torch's time for small arrays: `num_nodes` is on the host.
        """
        batch, width = tokens.shape
        if num_nodes is None:
            num_nodes = torch.full((batch,), width)
        index = np.arange(width)
        used = index < num_nodes.numpy()[:, None]
        parents, depth = np.where(used, index - 1, -1), (index + 1) * used
        if not tokens_on_device and q is None:
            return Draft.of_arrays(tokens.numpy() * used, parents, depth, num_nodes.numpy())
        return Draft(
            tokens=tokens if tokens_on_device else torch.from_numpy(tokens.numpy() * used),
            parents=torch.from_numpy(parents),
            depth=torch.from_numpy(depth),
            num_nodes=num_nodes,
            q=q,
            tokens_on_device=tokens_on_device,
        )

    @staticmethod
    def device_trees(
        tokens: Tensor, parents: Tensor, num_nodes: Tensor, depth_bound: int, depth: Tensor | None = None
    ) -> Draft:
        """Trees whose tokens and shape (B, N) only the device knows; the host knows each row's number of nodes, and a
        bound on their depth. Such rows are deterministic: a sampled tree's shape is fixed before any token is drawn.

        `depth` (B, N): the drafter vouches for tokens of the vocabulary and for trees within the bound; without it they
        are made so on the device.
        """
        used = np.arange(tokens.shape[1]) < num_nodes.numpy()[:, None]
        return Draft(
            tokens=tokens,
            parents=torch.from_numpy(np.where(used, UNKNOWN, -1)),
            depth=torch.from_numpy(np.zeros(used.shape, np.int64)),
            num_nodes=num_nodes,
            tokens_on_device=True,
            device_parents=parents,
            device_depth=depth,
            depth_bound=depth_bound,
        )

    @staticmethod
    def merge(parts: Sequence[tuple[Sequence[int], Draft]], batch: int, vocab_size: int) -> Draft:
        """The drafts of several methods as one, on the host: row j of a part becomes row `rows[j]`; other rows are
        empty.

        Where the parts' draft vocabularies differ, q is spread over the target's: the numbers stay the ones sampled.
        """
        if len(parts) == 1 and list(parts[0][0]) == list(range(batch)) and parts[0][1].is_planned:
            return parts[0][1]
        merged = Draft.empty(batch, width=max((draft.width for _, draft in parts), default=0))
        proposals: list[tuple[Tensor, Proposal]] = []
        for rows, draft in parts:
            at = np.array(rows, np.int64)
            for name in ("parents", "depth"):
                getattr(merged, name).numpy()[at, : draft.width] = getattr(draft, name).cpu().numpy()
            merged.num_nodes.numpy()[at] = draft.num_nodes.cpu().numpy()
            if draft.q is not None:
                proposals.append((torch.from_numpy(at), draft.q))
        shapes = [(rows, draft.device_parents) for rows, draft in parts if draft.device_parents is not None]
        depths = [(rows, draft.device_depth) for rows, draft in parts if draft.device_depth is not None]
        size, sound = merged.parents.shape, len(depths) == len(shapes)
        return replace(
            merged,
            tokens=_merge_tokens(parts, merged.tokens),
            q=_merge_proposals(proposals, batch, merged.width, vocab_size) if proposals else None,
            tokens_on_device=any(draft.tokens_on_device for _, draft in parts),
            device_parents=_placed(shapes, size, shapes[0][1].device) if shapes else None,
            device_depth=_placed(depths, size, depths[0][1].device) if depths and sound else None,
            depth_bound=max((draft.depth_bound for _, draft in parts), default=0),
        )

    def take(self, rows: Sequence[int], counts: Sequence[int]) -> Draft:
        """Some rows of a planned draft, each with its first `counts` nodes: fewer of a chain, or of a tree whose nodes
        were not sampled. The choice must not depend on the tokens drawn."""
        at, num_nodes = np.array(rows, np.int64), np.array(counts, np.int64)
        width = int(num_nodes.max(initial=0))
        used = np.arange(width) < num_nodes[:, None]
        if list(rows) == list(range(self.batch)):
            tokens, shape, deep = self.tokens[:, :width], self.device_parents, self.device_depth
        else:
            (on_device,) = packed_to(self.tokens.device, torch.from_numpy(at))
            tokens = self.tokens[on_device, :width]
            shape = None if self.device_parents is None else self.device_parents[on_device]
            deep = None if self.device_depth is None else self.device_depth[on_device]
        q = self.q
        if q is not None:
            row_of = np.full((len(at), width + 1), -1)
            row_of[:, :-1] = np.where(used, q.row_of.numpy()[at, :width], -1)
            q = replace(q, row_of=torch.from_numpy(row_of))
        return replace(
            self,
            tokens=tokens if self.tokens_on_device else tokens * torch.from_numpy(used),
            parents=torch.from_numpy(np.where(used, self.parents.numpy()[at, :width], -1)),
            depth=torch.from_numpy(np.where(used, self.depth.numpy()[at, :width], 0)),
            num_nodes=torch.from_numpy(num_nodes),
            q=q,
            device_parents=None if shape is None else shape[:, :width],
            device_depth=None if deep is None else deep[:, :width],
        )

    @property
    def is_planned(self) -> bool:
        """All but tokens, unknown trees and q's numbers are on the host."""
        return self._is_here and (self.q is None or self.q.row_of.is_cpu)

    def to(self, device: torch.device) -> Draft:
        """The whole draft on the device, its numbers in one copy; trees that only the device knows are filled in."""
        q = self.q
        if self.parents.device.type == device.type and self.device_parents is None:
            if self.num_nodes.device.type == device.type:
                return self
            num_nodes, row_of = packed_to(device, self.num_nodes, self.num_nodes if q is None else q.row_of)
            return replace(self, num_nodes=num_nodes, q=None if q is None else q.to(device, row_of))
        parts = [self.num_nodes if self.tokens_on_device else self.tokens, self.parents, self.depth, self.num_nodes]
        (tokens, parents, depth, num_nodes, row_of) = packed_to(device, *parts, parts[3] if q is None else q.row_of)
        q = None if q is None else q.to(device, row_of)
        if self.tokens_on_device:  # the tokens are there already
            tokens = self.tokens
        if self.device_parents is not None:
            assert self.device_depth is not None, "make it sound first"
            unknown = parents == UNKNOWN
            parents = torch.where(unknown, self.device_parents, parents)
            depth = torch.where(unknown, self.device_depth, depth)
        return Draft(
            tokens=tokens,
            parents=parents,
            depth=depth,
            num_nodes=num_nodes,
            q=q,
            tokens_on_device=self.tokens_on_device,
            depth_bound=self.max_depth,
        )

    def placed(self, device: torch.device) -> Draft:
        """The same with trees that only the device knows filled in there; numbers of nodes stay on the host."""
        if self.device_parents is None:
            return self
        return replace(self.to(device), num_nodes=self.num_nodes, q=self.q)

    def repaired(self, vocab_size: int) -> Draft:
        """The same, with trees and tokens that only the device knows made valid there. Any first nodes of each row are
        then sound too."""
        if self.device_parents is None or self.device_depth is not None:
            return self
        tokens, parents, depth = clamp_trees(self.tokens, self.device_parents, vocab_size, self.max_depth)
        return replace(self, tokens=tokens, device_parents=parents, device_depth=depth)

    def on_host(self, vocab_size: int) -> Draft:
        """The same, with tokens and trees read from the device; on a CPU every draft is read."""
        if self.device_parents is None:
            return self
        host = self.repaired(vocab_size)
        assert host.device_parents is not None
        assert host.device_depth is not None
        parents, depth = host.device_parents.cpu(), host.device_depth.cpu()
        host = replace(host, tokens=host.tokens.cpu(), device_parents=parents, device_depth=depth)
        used = torch.arange(self.width) < self.num_nodes[:, None]
        host = host.to(torch.device("cpu"))
        return replace(host, tokens=host.tokens * used, tokens_on_device=False, depth_bound=0)

    def validate(self, vocab_size: int) -> None:
        """Raise ValueError unless every row is a tree as defined above. Tokens and trees the host has not seen are not
        read, which would wait for them: they are made valid on the device."""
        tokens, parents, depth, counts = self.arrays
        if not tokens.dtype == parents.dtype == depth.dtype == counts.dtype == np.int64 or (
            self.tokens_on_device and self.tokens.dtype != torch.int64
        ):
            raise ValueError("tokens, parents, depth and num_nodes must be int64")
        if not tokens.shape == parents.shape == depth.shape == (len(counts), self.width):
            raise ValueError("tokens, parents and depth must have a row for each number of nodes")
        trees = self.trees
        if not self.tokens_on_device and self.token_bound > vocab_size:
            unsigned = tokens.view(np.uint64)  # negative ones are the largest
            if np.maximum.reduce(unsigned, None, initial=0) >= vocab_size:
                _refuse(trees.used & (unsigned >= vocab_size), "row {}, node {}: a token outside the vocabulary")
        if self.q is not None:
            _validate_proposal(self.q, self.batch, self.width, vocab_size)
            carries: Bools = self.q.row_of.amax(1).cpu().numpy() >= 0
            _refuse(carries & ~trees.is_chain, "row {}: a tree carries q; give q with chains only")


def packed_to(device: torch.device, *tensors: Tensor) -> list[Tensor]:
    """int64 tensors of the host on a device, contiguous, in one copy: a copy's overhead exceeds its transfer.

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
    """The tensor on a device, without waiting for work under way there: a copy from unpinned memory would wait."""
    pins = device.type == "cuda" and tensor.numel() > 0
    return tensor.pin_memory().to(device, non_blocking=True) if pins else tensor.to(device)


def ancestors(parents: Tensor, depth: Tensor, max_depth: int) -> Tensor:
    """(B, N, max_depth) the path from the root's child to each node itself, as node indices, -1 beyond.

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


def clamp_trees(tokens: Tensor, parents: Tensor, vocab_size: int, max_depth: int) -> tuple[Tensor, Tensor, Tensor]:
    """(B, N) tokens, parents and depth of drafts that only the device has seen, made into trees of at most that depth:
    tokens of the vocabulary, parents before their children. A drafter that breaks this costs acceptance only.

    A node at depth max_depth + 1, counted by its parents, becomes a child of the root, and so on. No host sync.
    """
    batch, width = tokens.shape
    node = torch.arange(width, device=tokens.device)
    parents = torch.minimum(parents.clamp_min(-1), node - 1)
    root = parents.new_zeros(batch, 1)
    above, depth = torch.cat((root, parents + 1), 1), torch.cat((root, torch.ones_like(parents)), 1)  # by slot
    for _ in range(width.bit_length()):  # pointer doubling: steps to the root
        depth, above = depth + depth.gather(1, above), above.gather(1, above)
    depth = (depth[:, 1:] - 1) % max(max_depth, 1) + 1
    return tokens.clamp(0, vocab_size - 1), torch.where(depth == 1, -1, parents), depth


@functools.lru_cache(128)
def _trees(shape: bytes, counts: tuple[int, ...], width: int, unknown: bool) -> DraftShape:
    """`shape`: parents, then depths. `unknown`: some rows are known to the device alone."""
    count, node = np.array(counts, np.int64), np.arange(width)
    parent, depth = np.frombuffer(shape, np.int64).copy().reshape(2, len(count), width)  # torch wants to own them
    _refuse((count < 0) | (count > width), "row {}: num_nodes is not between 0 and the width")
    used: Bools = node < count[:, None]
    if unknown:
        used = used & (parent != UNKNOWN)
    _refuse(used & ((parent < -1) | (parent >= node)), "row {}, node {}: its parent does not come before it")
    rows = np.arange(len(count))[:, None]
    above = np.where(parent < 0, 0, depth[rows, np.where(used, parent, -1)]) if width else depth
    _refuse(used & (depth != above + 1), "row {}, node {}: depth is not its parent's plus one")
    return DraftShape(parent, depth, count, counts, used, int(depth.max(initial=0)))


def _refuse(wrong: Bools, complaint: str) -> None:
    if wrong.any():
        raise ValueError(complaint.format(*np.argwhere(wrong)[0].tolist()))


def _merge_tokens(parts: Sequence[tuple[Sequence[int], Draft]], into: Tensor) -> Tensor:
    """If the host has not seen some tokens, all go to their device."""
    device = next((draft.tokens.device for _, draft in parts if draft.tokens_on_device), None)
    if device is not None:
        return _placed([(rows, draft.tokens) for rows, draft in parts], into.shape, device)
    for rows, draft in parts:
        into.numpy()[np.array(rows, np.int64), : draft.width] = draft.tokens.cpu().numpy()
    return into


def _placed(parts: Sequence[tuple[Sequence[int], Tensor]], shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Rows of several tensors in their places of one on the device; zeros elsewhere."""
    into = torch.zeros(shape, dtype=torch.int64, device=device)
    for rows, part in parts:
        (at,) = packed_to(device, torch.tensor(rows))
        into[at, : part.shape[1]] = sent(part, device) if part.is_cpu else part
    return into


def _merge_proposals(parts: Sequence[tuple[Tensor, Proposal]], batch: int, width: int, vocab_size: int) -> Proposal:
    ids = parts[0][1].ids
    shared = all(q.ids is ids for _, q in parts)
    row_of = torch.full((batch, width + 1), -1, dtype=torch.int64)
    blocks, first = [], 0
    for at, q in parts:
        theirs = q.row_of.cpu()
        row_of[at, : theirs.shape[1]] = torch.where(theirs < 0, theirs, theirs + first)
        blocks.append(q.probs if shared else q.over(vocab_size))  # on the device where they were drawn
        first += q.probs.shape[0]
    # One part keeps its tensor: verification must divide by the same q that was sampled from.
    probs = blocks[0] if len(blocks) == 1 else torch.cat(blocks)
    return Proposal(probs=probs, row_of=row_of, ids=ids if shared else None)


def _validate_proposal(q: Proposal, batch: int, width: int, vocab_size: int) -> None:
    if tuple(q.row_of.shape) != (batch, width + 1):
        raise ValueError(f"q.row_of has shape {tuple(q.row_of.shape)}, expected {(batch, width + 1)}")
    size = vocab_size if q.ids is None else q.ids.shape[0]
    if q.probs.dim() != 2 or q.probs.shape[1] != size:
        raise ValueError(f"q.probs has shape {tuple(q.probs.shape)}, expected (M, {size})")
    if q.row_of.numel() and not -1 <= int(q.row_of.min()) <= int(q.row_of.max()) < q.probs.shape[0]:
        raise ValueError(f"q.row_of points outside the {q.probs.shape[0]} rows of q.probs")
    if q.ids is not None and q.ids.numel() and not 0 <= int(q.ids.min()) <= int(q.ids.max()) < vocab_size:
        raise ValueError(f"q.ids points outside the vocabulary of {vocab_size}")
