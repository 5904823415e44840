"""Trees from one pass of a block drafter: the likeliest paths through the distributions of its positions.

Position i of a block has logits U_i, and a Markov head adds W1[x] . W2 for the token x before it. Only the likeliest
tokens of each position are considered, and transitions only from the nodes of a level that have children, so a tree
costs no further pass. Everything is batched, and nothing waits for a device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

CANDIDATES = 128  # tokens considered in each position
BEAM = 8  # nodes of a level that have children, and children of each
DEEPER = 1e-4  # log probability; least gap between a parent's score and its child's, so that sorting puts parents first


class Lattice(NamedTuple):
    """The likeliest tokens of D positions, and the parts of their log probabilities."""

    tokens: Tensor  # (B, D, C) of the draft vocabulary, by their logits without the Markov head
    first: Tensor  # (B, C) log probabilities of the first position
    best: Tensor  # (B, D, C) logits without the Markov head; where there is none, log probabilities
    others: Tensor  # (B, D) log of the probability mass of tokens that are no candidates
    into: Tensor | None  # (B, D, C, R) rows of W2 of the candidates; None without a Markov head
    w1: Tensor | None  # (V, R)

    def after(self, position: int, before: Tensor) -> Tensor:
        """Return log probabilities (B, F, C) of a position's candidates behind candidates (B, F) of the one before."""
        best = self.best[:, position, None]
        if self.into is None or self.w1 is None:
            return best.expand(-1, before.shape[1], -1)
        out = self.w1[self.tokens[:, position - 1].gather(1, before)]  # (B, F, R)
        rows = best + (out @ self.into[:, position].transpose(-1, -2)).float()
        return rows - torch.logaddexp(rows.logsumexp(-1), self.others[:, position, None])[..., None]


class BlockTrees(NamedTuple):
    """Trees of N nodes, the likeliest first; a parent comes before its children."""

    tokens: Tensor  # (B, N) of the draft vocabulary
    parents: Tensor  # (B, N), -1: the root
    depth: Tensor  # (B, N) from 1
    score: Tensor  # (B, N) log probability of the path, less `DEEPER` for each step


def lattice(logits: Tensor, anchor: Tensor | None, w1: Tensor | None, w2: Tensor | None, count: int) -> Lattice:
    """Return the lattice of logits (B, D, V); `anchor` (B, R) is the row of W1 of the token before the first position.

    w1, w2 (V, R): None without a Markov head. Tokens that are no candidates count as if it added nothing to them.
    """
    count = min(count, logits.shape[-1])
    best, tokens = logits.topk(count)  # (B, D, C)
    total, among = logits.logsumexp(-1), best.logsumexp(-1)
    if w1 is None or w2 is None or anchor is None:
        shares = best - total[..., None]
        return Lattice(tokens, shares[:, 0], shares, total, None, None)
    others = total + torch.log1p(-(among - total).exp().clamp_max(1 - 1e-6))  # (B, D)
    into = w2[tokens]  # (B, D, C, R)
    first = best[:, 0] + (into[:, 0] @ anchor[..., None]).squeeze(-1).float()
    first = first - torch.logaddexp(first.logsumexp(-1), others[:, 0])[..., None]
    return Lattice(tokens, first, best, others, into, w1)


def grow(of: Lattice, count: int, beam: int = BEAM) -> BlockTrees:
    """Return the likeliest `count` nodes, or all. On every level the best `beam` nodes have children, the best `beam`
    of their candidates. With a beam of one trees are chains."""
    batch, depth, candidates = of.tokens.shape
    wide = min(beam, candidates)
    score, place = of.first.topk(wide)  # the first level: (B, F)
    levels = [(score - DEEPER, place, torch.full_like(place, -1))]
    at = levels[0][0], place, 0  # the frontier's scores and candidates, and where its level begins among all nodes
    frontier = torch.arange(wide, device=score.device).expand(batch, wide)  # its nodes within the level
    for level in range(1, depth):
        before, candidate, begin = at
        best, child = of.after(level, candidate).topk(wide)  # (B, F, beam)
        score = (before[..., None] + best - DEEPER).flatten(1)
        place, parent = child.flatten(1), (frontier + begin)[..., None].expand(-1, -1, wide).flatten(1)
        levels.append((score, place, parent))
        if level + 1 < depth:
            best, frontier = score.topk(min(beam, score.shape[1]))
            at = best, place.gather(1, frontier), begin + levels[-2][0].shape[1]
    scores, places, parents = (torch.cat([level[part] for level in levels], 1) for part in range(3))
    depths = _depths(tuple(level[0].shape[1] for level in levels), scores.device)
    score, chosen = scores.topk(min(count, scores.shape[1]))
    where = torch.empty_like(parents).scatter_(1, chosen, _numbers(chosen.shape[1], scores.device).expand_as(chosen))
    parent, level_of = parents.gather(1, chosen), depths[chosen]
    token = of.tokens.flatten(1).gather(1, (level_of - 1) * candidates + places.gather(1, chosen))
    return BlockTrees(token, torch.where(parent < 0, -1, where.gather(1, parent.clamp_min(0))), level_of, score)


def _numbers(count: int, device: torch.device) -> Tensor:
    return torch.arange(count, device=device)


def _depths(widths: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the level of each node, from 1; without a copy from the host, which a capture does not permit."""
    ends = [sum(widths[: level + 1]) for level in range(len(widths))]
    numbers = _numbers(ends[-1], device)
    depth = torch.ones_like(numbers)
    for end in ends[:-1]:
        depth += numbers >= end
    return depth
