"""Trees that grow where the drafter is confident (EAGLE-2, Li et al. 2024), for all rows of a batch at once.

A level's best nodes by cumulative probability are expanded together; of all nodes proposed the best make the draft. A
node is never likelier than its parent and ties go to the earlier level, so these nodes form a tree, in topological
order, and the first n of them are the tree of n nodes. Trees depend on the drafter's probabilities alone, so they are
deterministic proposals. Everything is a tensor operation without a host synchronisation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

TOP_K = 10  # most children considered of a node, and most nodes expanded on a level
DEPTH = 7
BELOW = DEPTH - 1  # levels whose nodes are expanded


class TreeShape(NamedTuple):
    """Sizes of a batch's trees, which the host decides before it is drafted."""

    nodes: int  # nodes of the largest tree
    children: int  # considered of each node
    width: int  # nodes expanded on a level, of the largest tree
    depth: int

    @staticmethod
    def of(nodes: int, vocab_size: int, top_k: int = TOP_K) -> TreeShape:
        children = min(top_k, nodes, vocab_size)
        return TreeShape(nodes, children, min(width_of(nodes), children), min(DEPTH, nodes))

    def most(self, nodes: int) -> int:
        """Return how many of `nodes` nodes a row can have."""
        return min(nodes, self.children * (1 + min(width_of(nodes), self.width) * (self.depth - 1)))


def width_of(nodes: int) -> int:
    """Return the nodes expanded on each level of a tree of `nodes`; all levels together expand at most `nodes`."""
    return max(nodes // BELOW, 1)


class Frontier(NamedTuple):
    """Nodes to expand, (B, W). Entries with alive = False are padding."""

    tokens: Tensor  # (B, W)
    features: Tensor  # (B, W, h) outputs of their parents
    number: Tensor  # (B, W) index among all nodes that the row expands, level by level
    above: Tensor  # (B, W, L) numbers of the ancestors, from the root's child down to the level before; -1 beyond
    alive: Tensor  # (B, W)
    level: int  # 1: children of the root


class Proposed(NamedTuple):
    tokens: Tensor  # (B, N)
    parents: Tensor  # (B, N) -1: the root
    scores: Tensor  # (B, N) log probabilities of their paths, the highest first


Expand = Callable[[Frontier], tuple[Tensor, Tensor]]  # (B, W, Vd) logits behind the nodes, (B, W, h) their outputs
Translate = Callable[[Tensor], Tensor]  # ids of the draft vocabulary to the target's


def grow(
    logits: Tensor, features: Tensor, max_nodes: Tensor, shape: TreeShape, expand: Expand, translate: Translate
) -> Proposed:
    """Grow trees from logits (B, Vd) and output (B, h) of the root; row b expands at most `max_nodes[b]` nodes."""
    batch, width = len(logits), shape.width
    widths = (max_nodes // BELOW).clamp(1, width)[:, None]  # (B, 1) `width_of` each row
    lane = torch.arange(width, device=logits.device)
    best, ids = _best(logits, shape.children)  # (B, K)
    scores, tokens = [best], [translate(ids)]
    parents = [torch.full_like(ids, -1)]
    outputs, numbers = features[:, None], ids.new_empty(batch, 1, 0)  # values of the nodes expanded last
    first, each = 0, shape.children  # the last level's first candidate, and candidates of one parent
    for level in range(1, shape.depth):
        score, chosen = scores[-1].topk(width)  # (B, W) among the last level's candidates
        number = (level - 1) * widths + lane
        alive = (lane < widths) & (number < max_nodes[:, None]) & score.isfinite()
        features, above = (_taken(part, chosen // each) for part in (outputs, numbers))
        logits, outputs = expand(Frontier(tokens[-1].gather(1, chosen), features, number, above, alive, level))
        numbers = torch.cat((above, number[..., None]), 2)
        best, ids = _best(logits, shape.children)  # (B, W, K)
        best = torch.where(alive[..., None], score[..., None] + best, -torch.inf)
        scores.append(best.flatten(1))
        tokens.append(translate(ids).flatten(1))
        parents.append((first + chosen)[..., None].expand_as(ids).flatten(1))
        first += scores[-2].shape[1]
    return _ranked(torch.cat(scores, 1), torch.cat(tokens, 1), torch.cat(parents, 1), shape.nodes)


def _best(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return log probabilities and ids of the likeliest tokens; one of NaN has probability 0."""
    best, ids = logits.topk(count)
    return (best - logits.logsumexp(-1, keepdim=True)).nan_to_num(-torch.inf, -torch.inf, -torch.inf), ids


def _taken(values: Tensor, which: Tensor) -> Tensor:
    """Return values[b, which[b, i]] of values (B, W, ...)."""
    return values.gather(1, which[..., None].expand(-1, -1, values.shape[2]))


def _ranked(scores: Tensor, tokens: Tensor, parents: Tensor, count: int) -> Proposed:
    """Return the best candidates in order, with parents numbered in that order."""
    ranked, order = (part[:, :count] for part in scores.sort(dim=1, descending=True, stable=True))
    rank = torch.zeros_like(tokens)
    rank.scatter_(1, order, torch.arange(order.shape[1], device=order.device).expand_as(order))
    above = parents.gather(1, order)
    parents = torch.where(above < 0, -1, rank.gather(1, above.clamp_min(0)))
    return Proposed(tokens.gather(1, order), parents, ranked)
