"""Law 2 on trees: traversal verification (2505.12398) of trees whose siblings were drawn from q without replacement.

Leaves are judged first, in depth-first order; a rejected one is deleted: its parent's p becomes the excess of p over q,
and its parent's q loses that token. The first accepted node ends the step with its whole path. A parent is judged once
its last child is deleted, so the order is the tree's postorder, known before any coin is drawn. On a chain this is
block verification.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.core.draft import Draft, ancestors
from paceline.core.rng import coin
from paceline.verify.block import likelihood_ratio, node_coins
from paceline.verify.outcome import Stop, has_children
from paceline.verify.walk import CoinSource


def tree(
    draft: Draft,
    p: Tensor,
    row_of: Tensor,
    key: Tensor,
    committed: Tensor,
    *,
    max_depth: int,
    source: CoinSource = coin,
) -> Stop:
    """Trees drawn from draft.q. `row_of` (B, N + 1): slot -> row of p (R, V); slots without children may hold -1."""
    assert draft.q is not None
    batch, width, rows = draft.batch, draft.width, torch.arange(draft.batch, device=p.device)
    # (B, N + 1, V) copies, rewritten as leaves are deleted
    q = draft.q.over(p.shape[1]).to(p.dtype)[draft.q.row_of.clamp_min(0)]
    p = p[row_of.clamp_min(0)]
    above, order = draft.parents + 1, _postorder(draft, max_depth)
    coins = node_coins(source, key, committed, width)
    a = p.new_ones(batch, width + 1)  # by slot
    # Slots with a deleted child: their a is no longer computed from the parent's.
    settled = torch.zeros_like(a, dtype=torch.bool)
    settled[:, 0] = True
    slot = torch.zeros_like(draft.num_nodes)
    done = draft.num_nodes == 0
    for turn in range(width):
        a = _descend(a, settled, p, q, draft, above, max_depth)
        v = order[:, turn]
        judged = ~done & (turn < draft.num_nodes)
        accepted = judged & (coins[rows, v] <= a[rows, v + 1])
        slot = torch.where(accepted, v + 1, slot)
        done = done | accepted
        if bool(done.all()):
            break
        deleted, u = (judged & ~accepted)[:, None], above[rows, v]
        old_p, old_q, old_a = p[rows, u], q[rows, u], a[rows, u]
        new_p, new_q, new_a = _without(draft.tokens[rows, v], old_a, old_p, old_q)
        p[rows, u] = torch.where(deleted, new_p, old_p)
        q[rows, u] = torch.where(deleted, new_q, old_q)
        a[rows, u] = torch.where(deleted[:, 0], new_a, old_a)
        settled[rows, u] = settled[rows, u] | deleted[:, 0]
    leaf = ~has_children(draft)[rows, slot]
    return Stop(slot=slot, leaf=leaf, residual=p[rows, slot])


def _descend(a: Tensor, settled: Tensor, p: Tensor, q: Tensor, draft: Draft, above: Tensor, max_depth: int) -> Tensor:
    """(B, N + 1) a(v) = min(1, a(u) * p(v|u) / q(v|u)) of every node, from the settled slots down."""
    row = torch.arange(draft.batch, device=a.device)[:, None]
    ratio = likelihood_ratio(p[row, above, draft.tokens], q[row, above, draft.tokens])
    for _ in range(max_depth):
        below = (a.gather(1, above) * ratio).clamp_max(1)
        a = torch.where(settled, a, torch.cat((a[:, :1], below), 1))
    return a


def _without(token: Tensor, a: Tensor, p: Tensor, q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """p (B, V), q (B, V) and a (B,) of a parent after a child was deleted."""
    excess = (p * a[:, None]).sub_(q).clamp_min_(0)
    surplus = excess.sum(-1)
    total = surplus + 1 - a
    some = (surplus > 0)[:, None]
    new_p = torch.where(some, excess / torch.where(some, surplus[:, None], 1), p)
    rest = q.scatter(1, token[:, None], 0)
    mass = rest.sum(-1, keepdim=True)
    new_q = rest / torch.where(mass > 0, mass, 1)
    # total = 0: p is q and a is 1. Not a number: q is broken, and the slot is taken to have no draft.
    return new_p, new_q, torch.where(total > 0, surplus / total, a)


def _postorder(draft: Draft, max_depth: int) -> Tensor:
    """(B, N) the nodes in the order they are judged, padding last."""
    path = ancestors(draft.parents, draft.depth, max_depth)  # (B, N, D)
    batch, width = draft.batch, draft.width
    index = torch.arange(width, device=path.device)
    used = index < draft.num_nodes[:, None]
    on_path = torch.zeros(batch, width, width + 1, dtype=torch.int64, device=path.device)
    on_path = on_path.scatter_(2, torch.where(path >= 0, path, width), 1)[..., :width]  # (B, v, w): w = v or above it
    size = on_path.sum(1)  # of each node's subtree
    elder = (draft.parents[:, None, :] == draft.parents[:, :, None]) & (index < index[:, None]) & used[:, None, :]
    before = (elder * size[:, None, :]).sum(-1)  # nodes in the subtrees of elder siblings
    preorder = (on_path * (before + 1)[:, None, :]).sum(-1)
    # Judged before v: the preorder count with v's descendants in place of its ancestors.
    rank = preorder + size - draft.depth
    return torch.where(used, rank, 2 * width + 1).argsort(dim=1, stable=True)
