"""The contracts between drafters, the runner and verification: Draft, Proposal, Verdict.

A draft is one token tree per row. Nodes stand in topological order (a parent before its children), siblings in the
order they were drawn; parent -1 is the last committed token, the root, which is no node. Slot 0 stands for the root and
slot i + 1 for node i wherever a tensor is (B, N + 1). Depth is 1-based: the root's children have depth 1.
Padding (node index >= num_nodes) holds token 0, parent -1, depth 0. Plain decoding is the draft without nodes.

Drafts are made on the host, so that a pass can be laid out; only tokens may lie on the device, unseen, and then padding
may hold any.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import torch
from torch import Tensor

NO_METHOD = -1  # `Draft.source` of a row nobody drafted for
FEW = 4  # rows
INVALID = -1  # in place of a token: logits that are no numbers left nothing to draw


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """q, the very tensor the drafted tokens were sampled from. It belongs to the *parent* of those tokens."""

    probs: Tensor  # (M, Vq)
    row_of: Tensor  # (B, N + 1) row of probs by slot of the parent; -1: a deterministic proposal, or no children
    ids: Tensor | None = None  # (Vq,) the target's token ids of a smaller draft vocabulary; None: the target's own

    def over(self, vocab_size: int) -> Tensor:
        """(M, V): the same numbers over the target's vocabulary, zero where the drafter has no such token."""
        if self.ids is None:
            return self.probs
        return self.probs.new_zeros(self.probs.shape[0], vocab_size).index_copy_(1, self.ids, self.probs)


@dataclass(frozen=True)
class Even:
    """Chains of one length each. Made once for many drafts, so nobody may write to them."""

    parents: Tensor
    depth: Tensor
    num_nodes: Tensor


@dataclass(frozen=True, kw_only=True)
class Draft:
    tokens: Tensor  # (B, N) int64
    parents: Tensor  # (B, N) int64
    depth: Tensor  # (B, N) int64
    num_nodes: Tensor  # (B,) int64
    source: Tensor  # (B,) int64, index of the method that drew it, for statistics
    q: Proposal | None = None  # None: every row is deterministic
    unseen: bool = False  # the tokens lie where the model is, and the host has not waited for them
    evenly: Even | None = None  # what `even` made it of, which holds as long as it has those very tensors
    max_depth: int | None = None  # bounds every depth; None: it is read off `depth`, which then lies on the host

    @property
    def batch(self) -> int:
        return self.tokens.shape[0]

    @property
    def deepest(self) -> int:
        """A bound of every depth, known to the host."""
        return int(self.depth.numpy().max(initial=0)) if self.max_depth is None else self.max_depth

    @property
    def width(self) -> int:
        """N: an upper bound of every row's nodes, and of its depth."""
        return self.tokens.shape[1]

    @staticmethod
    def empty(batch: int, device: torch.device | str = "cpu", width: int = 0) -> Draft:
        def full(shape: tuple[int, ...], value: int) -> Tensor:
            return torch.full(shape, value, dtype=torch.int64, device=device)

        return Draft(
            tokens=full((batch, width), 0),
            parents=full((batch, width), -1),
            depth=full((batch, width), 0),
            num_nodes=full((batch,), 0),
            source=full((batch,), NO_METHOD),
        )

    @staticmethod
    def chains(
        tokens: Tensor, num_nodes: Tensor, source: int, q: Proposal | None = None, *, unseen: bool = False
    ) -> Draft:
        """(B, K) tokens, the first num_nodes of each row in use, every node hanging from the one before."""
        batch, width = tokens.shape
        if num_nodes.is_cpu:
            return _host_chains(tokens, num_nodes, source, q, unseen)
        index = torch.arange(width, device=tokens.device).expand(batch, width)
        used = index < num_nodes[:, None]
        return Draft(
            tokens=tokens * used,
            parents=torch.where(used, index - 1, -1),
            depth=(index + 1) * used,
            num_nodes=num_nodes,
            source=torch.full_like(num_nodes, source),
            q=q,
        )

    @staticmethod
    def merge(parts: Sequence[tuple[Sequence[int], Draft]], batch: int, vocab_size: int) -> Draft:
        """The drafts of several methods as one, on the host: row j of a part becomes row `rows[j]`; rows no part names
        stay empty.

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
            for name in ("num_nodes", "source"):
                getattr(merged, name).numpy()[at] = getattr(draft, name).cpu().numpy()
            if draft.q is not None:
                proposals.append((torch.from_numpy(at), draft.q))
        tokens = _merge_tokens(parts, merged.tokens)
        q = _merge_proposals(proposals, batch, merged.width, vocab_size) if proposals else None
        unseen = any(draft.unseen for _, draft in parts)
        return Draft(**{**vars(merged), "tokens": tokens, "q": q, "unseen": unseen})

    @staticmethod
    def even(tokens: Tensor, source: int) -> Draft:
        """(B, K) tokens of the host: chains of one length each, in few operations, since many steps ask for them."""
        of, sources = _even(*tokens.shape, source)
        return Draft(
            tokens=tokens, parents=of.parents, depth=of.depth, num_nodes=of.num_nodes, source=sources, evenly=of
        )

    @property
    def is_even(self) -> bool:
        """Known without looking: every row is a chain of all the width."""
        of = self.evenly
        return (
            of is not None
            and self.parents is of.parents
            and self.depth is of.depth
            and self.num_nodes is of.num_nodes
            and self.tokens.shape == of.parents.shape
        )

    @property
    def is_planned(self) -> bool:
        """All but tokens and q's numbers lie in the host's memory."""
        return self.parents.is_cpu and (self.q is None or self.q.row_of.is_cpu)

    def to(self, device: torch.device) -> Draft:
        """All of it there, its numbers in one copy."""
        if self.parents.device.type == device.type:
            if self.num_nodes.device.type == device.type:
                return self
            num_nodes, source = packed_to(device, self.num_nodes, self.source)
            return Draft(**{**vars(self), "num_nodes": num_nodes, "source": source})
        parts = [self.num_nodes if self.unseen else self.tokens, self.parents, self.depth, self.num_nodes, self.source]
        q = self.q
        (tokens, parents, depth, num_nodes, source, row_of) = packed_to(
            device, *parts, parts[3] if q is None else q.row_of
        )
        if q is not None:
            ids = None if q.ids is None else q.ids.to(device)
            q = Proposal(probs=q.probs.to(device), row_of=row_of, ids=ids)
        if self.unseen:  # they are there already
            tokens = self.tokens
        return Draft(
            tokens=tokens,
            parents=parents,
            depth=depth,
            num_nodes=num_nodes,
            source=source,
            q=q,
            unseen=self.unseen,
            max_depth=self.max_depth,
        )

    def validate(self, vocab_size: int) -> None:
        """Raise ValueError unless every row is a tree as this module says. Tokens the host has not seen are taken on
        trust, so as not to wait for them; all else is read."""
        if self.is_even and self.q is None and not self.unseen and self._says_only(vocab_size):
            return
        if self.batch <= FEW and self.q is None and self.parents.is_cpu and not self.unseen and self._sound(vocab_size):
            return
        counts, parents, depth = (part.cpu().numpy() for part in (self.num_nodes, self.parents, self.depth))
        tokens = np.zeros_like(parents) if self.unseen else self.tokens.cpu().numpy()
        _refuse((counts < 0) | (counts > self.width), "row {}: num_nodes is not between 0 and the width")
        node = np.arange(self.width)
        used = node < counts[:, None]
        known = tokens.view(np.uint64) < vocab_size  # nor are negative ones
        if (~used | (known & (parents == node - 1) & (depth == node + 1))).all() and self.q is None:
            return  # chains, mostly
        _refuse(used & ((tokens < 0) | (tokens >= vocab_size)), "row {}, node {}: a token outside the vocabulary")
        _refuse(used & ((parents < -1) | (parents >= node)), "row {}, node {}: its parent does not come before it")
        rows = np.arange(self.batch)[:, None]
        above = np.where(parents < 0, 0, depth[rows, np.where(used, parents, -1)]) if self.width else depth
        _refuse(used & (depth != above + 1), "row {}, node {}: depth is not its parent's plus one")
        if self.q is not None:
            _validate_proposal(self.q, self.batch, self.width, vocab_size)

    def _says_only(self, vocab_size: int) -> bool:
        """Tokens of the vocabulary, in every place."""
        if self.batch <= FEW:
            return all(0 <= token < vocab_size for row in self.tokens.tolist() for token in row)
        tokens = self.tokens.numpy().view(np.uint64)  # so negative ones are large
        return bool(tokens.max(initial=0) < vocab_size)

    def _sound(self, vocab_size: int) -> bool:
        """Every row is a tree, as lists say: for a few rows arrays take longer to make."""
        rows = zip(*(part.tolist() for part in (self.num_nodes, self.tokens, self.parents, self.depth)), strict=True)
        return all(
            0 <= count <= self.width and _is_tree(tokens[:count], parents[:count], depth[:count], vocab_size)
            for count, tokens, parents, depth in rows
        )


class Kind(IntEnum):
    """Where a committed token came from."""

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


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a step commits: each row's first num_accepted + 1 tokens. Where the last of them is INVALID, the target's
    logits there held NaN or +inf, or nothing finite: the row's request cannot go on."""

    tokens: Tensor  # (B, D + 1) int64, -1 beyond
    num_accepted: Tensor  # (B,) int64
    path: Tensor  # (B, D) int64, accepted nodes from the root's child down, -1 beyond
    kinds: Tensor  # (B, D + 1) uint8, of Kind
    logprobs: Logprobs | None = None
    packed: Tensor | None = None  # (bytes,) all but the logprobs, where they lie side by side: one copy takes them
    packed_rows: int = 0  # how many, if more than these

    @staticmethod
    def blank(batch: int, depth: int, device: torch.device, packed: Tensor | None = None) -> Verdict:
        """To be filled in, packed; or what `packed` holds."""
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
        """Where tokens, num_accepted, path and kinds lie in a packed verdict, and its size, in bytes.

        Each begins at 16 bytes: kernels are compiled anew for pointers that do not.
        """
        places, end = [], 0
        for size in (8 * batch * (depth + 1), 8 * batch, 8 * batch * depth, batch * (depth + 1)):
            places.append(slice(end, end + size))
            end += -(-size // 16) * 16
        return places, end

    @property
    def invalid(self) -> Tensor:
        """(B,) bool: rows whose request cannot go on; no host sync."""
        return self.tokens.gather(1, self.num_accepted[:, None])[:, 0] == INVALID

    def first(self, rows: int) -> Verdict:
        """The others are no longer asked for, but stay packed with these."""
        packed_rows = 0 if self.packed is None else self.packed_rows or len(self.path)
        parts = {name: getattr(self, name)[:rows] for name in ("tokens", "num_accepted", "path", "kinds")}
        logprobs = None
        if self.logprobs is not None:
            logprobs = Logprobs(**{name: part[:rows] for name, part in vars(self.logprobs).items()})
        return Verdict(**parts, logprobs=logprobs, packed=self.packed, packed_rows=packed_rows)

    def pack(self) -> Tensor:
        """All but the logprobs side by side."""
        if self.packed is not None:
            return self.packed
        batch, depth = self.path.shape
        copy = Verdict.blank(batch, depth, self.path.device)
        for name in ("tokens", "num_accepted", "path", "kinds"):
            getattr(copy, name).copy_(getattr(self, name))
        assert copy.packed is not None
        return copy.packed


def packed_to(device: torch.device, *tensors: Tensor) -> list[Tensor]:
    """int64 tensors of the host on a device, in one copy: there a copy costs more than what it carries.

    Each begins at 16 bytes: kernels are compiled anew for pointers that do not.
    """
    if device.type == "cpu":
        return list(tensors)
    odd = torch.zeros(1, dtype=torch.int64)
    sizes = [tensor.numel() for tensor in tensors]
    padded = (
        [tensor.flatten(), odd] if size % 2 else [tensor.flatten()] for tensor, size in zip(tensors, sizes, strict=True)
    )
    flat = sent(torch.cat([part for parts in padded for part in parts]), device)
    parts = torch.split(flat, [size + size % 2 for size in sizes])
    return [part[:size].view(tensor.shape) for part, size, tensor in zip(parts, sizes, tensors, strict=True)]


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """The same on a device, without waiting for what that is busy with: a copy from ordinary memory would."""
    pins = device.type == "cuda" and tensor.numel() > 0
    return tensor.pin_memory().to(device, non_blocking=True) if pins else tensor.to(device)


def ancestors(parents: Tensor, depth: Tensor, max_depth: int) -> Tensor:
    """(B, N, max_depth) the path from the root's child to each node itself, as node indices, -1 beyond.

    No host sync; padding (depth 0) has no path. `max_depth` bounds the true depth (N always does).
    """
    batch, width = parents.shape
    path = parents.new_full((batch, width, max_depth + 1), -1)  # the last column swallows what is not there
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

    A node at depth max_depth + 1, counted by its parents, hangs from the root, and so on below it. No host sync.
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


def _host_chains(tokens: Tensor, num_nodes: Tensor, source: int, q: Proposal | None, unseen: bool) -> Draft:
    """`Draft.chains` in numpy, which takes a fraction of torch's time for small arrays."""
    index = np.arange(tokens.shape[1])
    used = index < num_nodes.numpy()[:, None]
    return Draft(
        tokens=tokens if unseen else torch.from_numpy(tokens.numpy() * used),
        parents=torch.from_numpy(np.where(used, index - 1, -1)),
        depth=torch.from_numpy((index + 1) * used),
        num_nodes=num_nodes,
        source=torch.from_numpy(np.full(len(used), source)),
        q=q,
        unseen=unseen,
    )


@functools.lru_cache(64)
def _even(batch: int, width: int, source: int) -> tuple[Even, Tensor]:
    """And the sources."""
    depth = torch.arange(1, width + 1).repeat(batch, 1)
    return Even(depth - 2, depth, torch.full((batch,), width)), torch.full((batch,), source)


def _is_tree(tokens: list[int], parents: list[int], depth: list[int], vocab_size: int) -> bool:
    if tokens and not 0 <= min(tokens) <= max(tokens) < vocab_size:
        return False
    count = len(tokens)
    if parents == [*range(-1, count - 1)]:
        return depth == [*range(1, count + 1)]
    above = [*depth, 0]  # at -1 the root's
    return all(-1 <= parent < node and depth[node] == above[parent] + 1 for node, parent in enumerate(parents))


def _refuse(wrong: np.ndarray[Any, np.dtype[np.bool_]], complaint: str) -> None:
    if wrong.any():
        raise ValueError(complaint.format(*np.argwhere(wrong)[0].tolist()))


def _merge_tokens(parts: Sequence[tuple[Sequence[int], Draft]], into: Tensor) -> Tensor:
    """Where the host has not seen some, all lie where those do."""
    device = next((draft.tokens.device for _, draft in parts if draft.unseen), None)
    if device is None:
        for rows, draft in parts:
            into.numpy()[np.array(rows, np.int64), : draft.width] = draft.tokens.cpu().numpy()
        return into
    into = torch.zeros(into.shape, dtype=into.dtype, device=device)
    for rows, draft in parts:
        (at,) = packed_to(device, torch.tensor(rows))
        into[at, : draft.width] = draft.tokens if draft.unseen else sent(draft.tokens, device)
    return into


def _merge_proposals(parts: Sequence[tuple[Tensor, Proposal]], batch: int, width: int, vocab_size: int) -> Proposal:
    ids = parts[0][1].ids
    shared = all(q.ids is ids for _, q in parts)
    row_of = torch.full((batch, width + 1), -1, dtype=torch.int64)
    blocks, first = [], 0
    for at, q in parts:
        theirs = q.row_of.cpu()
        row_of[at, : theirs.shape[1]] = torch.where(theirs < 0, theirs, theirs + first)
        blocks.append(q.probs if shared else q.over(vocab_size))  # they stay where they were drawn
        first += q.probs.shape[0]
    # One part keeps its tensor: verification must divide by the very q that was sampled.
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
