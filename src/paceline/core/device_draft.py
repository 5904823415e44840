"""Drafts whose tokens, and perhaps whose trees, only the device knows; and the drafts of several methods as one."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from paceline.core.draft import (
    UNKNOWN,
    Draft,
    DraftArrays,
    DraftShape,
    HostDraft,
    Proposal,
    chain_shape,
    draft_shape,
    packed_to,
    sent,
)

Parts = Sequence[tuple[Sequence[int], Draft]]  # pairs of (batch row of each draft row, draft)


@dataclass(frozen=True, kw_only=True)
class DeviceDraft(Draft):
    """A draft whose tokens are on the model's device, unseen by the host; padding may hold any token.

    `parents`, `depth`, `num_nodes` and `q.row_of` are on the host, so that a pass can be laid out. A row whose tree is
    not known there has the parents `UNKNOWN` and depths 0, and no q.
    """

    depth_bound: int = 0  # bound for the trees that only the device knows
    device_parents: Tensor | None = None  # (B, N) int64 on the device, of the rows that are `UNKNOWN` on the host
    device_depth: Tensor | None = None  # (B, N) int64, beside `device_parents` where the trees are known to be valid

    tokens_on_device: ClassVar[bool] = True

    @staticmethod
    def chains(tokens: Tensor, num_nodes: Tensor | None = None, q: Proposal | None = None) -> DeviceDraft:
        """Return chains of the tokens (B, K), the first num_nodes (on the host) of each row in use (all, if None)."""
        num_nodes = torch.full(tokens.shape[:1], tokens.shape[1]) if num_nodes is None else num_nodes
        _, parents, depth = chain_shape(num_nodes.numpy(), tokens.shape[1])
        return DeviceDraft(
            tokens=tokens, parents=torch.from_numpy(parents), depth=torch.from_numpy(depth), num_nodes=num_nodes, q=q
        )

    @staticmethod
    def trees(
        tokens: Tensor, parents: Tensor, num_nodes: Tensor, depth_bound: int, depth: Tensor | None = None
    ) -> DeviceDraft:
        """Return trees whose tokens and parents (B, N) are on the device, and their number of nodes on the host.

        `depth` (B, N): the drafter vouches for tokens of the vocabulary and for trees within the bound; without it they
        are made so on the device.
        """
        used = np.arange(tokens.shape[1]) < num_nodes.numpy()[:, None]
        return DeviceDraft(
            tokens=tokens,
            parents=torch.from_numpy(np.where(used, UNKNOWN, -1)),
            depth=torch.from_numpy(np.zeros(used.shape, np.int64)),
            num_nodes=num_nodes,
            depth_bound=depth_bound,
            device_parents=parents,
            device_depth=depth,
        )

    @functools.cached_property
    def arrays(self) -> DraftArrays:
        """The numbers on the host; tokens on a device are not waited for."""
        parents, depth, num_nodes = (part.numpy() for part in (self.parents, self.depth, self.num_nodes))
        tokens = self.tokens.numpy() if self.tokens.is_cpu else np.zeros_like(parents)
        return DraftArrays(tokens, parents, depth, num_nodes)

    @functools.cached_property
    def shape(self) -> DraftShape:
        _, parents, depth, counts = self.arrays
        unknown = self.device_parents is not None
        return draft_shape(parents.tobytes() + depth.tobytes(), tuple(counts.tolist()), self.width, unknown)

    @functools.cached_property
    def max_depth(self) -> int:
        return max(self.shape.max_depth, self.depth_bound)

    @property
    def unseen(self) -> list[Tensor]:
        return [self.tokens] if self.device_parents is None else [self.tokens, self.device_parents]

    def to(self, device: torch.device) -> Draft:
        """Return the whole draft on the device, trees that only the device knows filled in."""
        q = self.q
        if self.device_parents is None and device.type == "cpu":
            return self
        parents, depth, num_nodes, *rest = packed_to(
            device, self.parents, self.depth, self.num_nodes, *([] if q is None else [q.row_of])
        )
        if self.device_parents is not None:
            assert self.device_depth is not None, "repair the trees first"
            unknown = parents == UNKNOWN
            parents = torch.where(unknown, self.device_parents, parents)
            depth = torch.where(unknown, self.device_depth, depth)
        q = None if q is None else q.to(device, rest[0])
        bound = self.max_depth
        return Draft(tokens=self.tokens, parents=parents, depth=depth, num_nodes=num_nodes, q=q, depth_bound=bound)

    def placed(self, device: torch.device) -> Draft:
        if self.device_parents is None:
            return self
        return replace(self.to(device), num_nodes=self.num_nodes, q=self.q)

    def repaired(self, vocab_size: int) -> DeviceDraft:
        """Return the draft with valid trees on the device. The first nodes of each row are then valid trees too."""
        if self.device_parents is None or self.device_depth is not None:
            return self
        tokens, parents, depth = clamp_trees(self.tokens, self.device_parents, vocab_size, self.max_depth)
        return replace(self, tokens=tokens, device_parents=parents, device_depth=depth)

    def on_host(self, vocab_size: int) -> Draft:
        if self.device_parents is None:
            return self
        draft, known = self.repaired(vocab_size), self.arrays
        assert draft.device_parents is not None
        assert draft.device_depth is not None
        read = (part.cpu().numpy() for part in (draft.tokens, draft.device_parents, draft.device_depth))
        tokens, parents, depth = read
        used, unknown = np.arange(self.width) < known.num_nodes[:, None], known.parents == UNKNOWN
        parents, depth = np.where(unknown, parents, known.parents), np.where(unknown, depth, known.depth)
        host = HostDraft.of_arrays(tokens * used, parents, depth, known.num_nodes)
        return host if self.q is None else host.with_q(self.q)

    def take(self, rows: Sequence[int], counts: Sequence[int]) -> DeviceDraft:
        plan, index = super().take(rows, counts), None
        if list(rows) != list(range(self.batch)):
            (index,) = packed_to(self.tokens.device, torch.tensor(rows))

        def cut(part: Tensor) -> Tensor:
            return (part if index is None else part[index])[:, : plan.width]

        return replace(
            self,
            tokens=cut(self.tokens),
            parents=plan.parents,
            depth=plan.depth,
            num_nodes=plan.num_nodes,
            q=plan.q,
            device_parents=None if self.device_parents is None else cut(self.device_parents),
            device_depth=None if self.device_depth is None else cut(self.device_depth),
        )

    def validate(self, vocab_size: int) -> None:
        """Raise ValueError unless what the host knows is valid. Tokens and trees that it does not know are not read,
        which would wait for them: they are made valid on the device."""
        if self.tokens.dtype != torch.int64:
            raise ValueError("tokens, parents, depth and num_nodes must be int64")
        super().validate(vocab_size)


def clamp_trees(tokens: Tensor, parents: Tensor, vocab_size: int, max_depth: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return (B, N) tokens, parents and depth as trees of at most that depth: tokens of the vocabulary, parents before
    their children. A drafter that breaks this costs acceptance only.

    A node at depth max_depth + 1, counted by its parents, becomes a child of the root, and so on. No host sync.
    """
    batch, width = tokens.shape
    node = torch.arange(width, device=tokens.device)
    parents = torch.minimum(parents.clamp_min(-1), node - 1)
    root = parents.new_zeros(batch, 1)
    above, depth = torch.cat((root, parents + 1), 1), torch.cat((root, torch.ones_like(parents)), 1)  # columns: slots
    for _ in range(width.bit_length()):  # pointer doubling: steps to the root
        depth, above = depth + depth.gather(1, above), above.gather(1, above)
    depth = (depth[:, 1:] - 1) % max(max_depth, 1) + 1
    return tokens.clamp(0, vocab_size - 1), torch.where(depth == 1, -1, parents), depth


def merge_drafts(parts: Parts, batch: int, vocab_size: int) -> Draft:
    """Return the drafts of several methods as one: row j of a part becomes row `rows[j]`; other rows are empty.

    Where the parts' draft vocabularies differ, q is spread over the target's: the numbers stay the ones sampled.
    """
    if len(parts) == 1 and list(parts[0][0]) == list(range(batch)) and parts[0][1].is_planned:
        return parts[0][1]
    plan = Draft.empty(batch, max((draft.width for _, draft in parts), default=0))
    for rows, draft in parts:
        index = np.array(rows, np.int64)
        for into, part in zip(plan.arrays[:3], draft.arrays[:3], strict=True):
            into[index, : draft.width] = part
        plan.arrays.num_nodes[index] = draft.arrays.num_nodes
    proposals = [(rows, draft.q) for rows, draft in parts if draft.q is not None]
    if proposals:
        plan = plan.with_q(_merge_proposals(proposals, plan.size, vocab_size))
    device = next((draft.tokens.device for _, draft in parts if draft.tokens_on_device), None)
    return plan if device is None else _with_device_parts(plan, parts, device)


def _merge_proposals(
    parts: Sequence[tuple[Sequence[int], Proposal]], size: tuple[int, int], vocab_size: int
) -> Proposal:
    ids, (batch, width) = parts[0][1].ids, size
    is_shared = all(q.ids is ids for _, q in parts)
    row_of = torch.full((batch, width + 1), -1, dtype=torch.int64)
    blocks, first = [], 0
    for rows, q in parts:
        of_part = q.row_of.cpu()
        row_of[list(rows), : of_part.shape[1]] = torch.where(of_part < 0, of_part, of_part + first)
        blocks.append(q.probs if is_shared else q.over(vocab_size))  # on the device where they were drawn
        first += q.probs.shape[0]
    # One part keeps its tensor: verification must divide by the same q that was sampled from.
    probs = blocks[0] if len(blocks) == 1 else torch.cat(blocks)
    return Proposal(probs=probs, row_of=row_of, ids=ids if is_shared else None)


def _with_device_parts(plan: HostDraft, parts: Parts, device: torch.device) -> DeviceDraft:
    """Return the merged draft with all tokens on the device, and the trees that only the device knows."""
    drafts = [(rows, draft) for rows, draft in parts if isinstance(draft, DeviceDraft)]
    parents = [(rows, draft.device_parents) for rows, draft in drafts if draft.device_parents is not None]
    depths = [(rows, draft.device_depth) for rows, draft in drafts if draft.device_depth is not None]
    return DeviceDraft(
        tokens=_placed([(rows, draft.tokens) for rows, draft in parts], plan.size, device),
        parents=plan.parents,
        depth=plan.depth,
        num_nodes=plan.num_nodes,
        q=plan.q,
        depth_bound=max((draft.depth_bound for _, draft in drafts), default=0),
        device_parents=_placed(parents, plan.size, device) if parents else None,
        device_depth=_placed(depths, plan.size, device) if depths and len(depths) == len(parents) else None,
    )


def _placed(parts: Sequence[tuple[Sequence[int], Tensor]], size: tuple[int, int], device: torch.device) -> Tensor:
    """Return a tensor on the device with the rows of several in their places, and zeros elsewhere."""
    into = torch.zeros(size, dtype=torch.int64, device=device)
    for rows, part in parts:
        (index,) = packed_to(device, torch.tensor(rows))
        into[index, : part.shape[1]] = sent(part, device) if part.is_cpu else part
    return into
