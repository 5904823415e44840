"""Law 2 on chains: how much of a chain drawn from q to accept, so that the committed tokens are distributed as p.

Block verification (Sun et al., 2403.10444) judges the chain as a whole and accepts at least as much as the rule that
judges one token after another (Leviathan et al. 2023, Chen et al. 2023).
Lengths differ by row; a chain's length may depend on its own tokens, never on tokens left out.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.core.draft import Draft
from paceline.core.rng import Lane, coin
from paceline.verify.outcome import Stop
from paceline.verify.walk import CoinSource


def chain(
    draft: Draft,
    p: Tensor,
    row_of: Tensor,
    key: Tensor,
    committed: Tensor,
    *,
    max_depth: int,
    source: CoinSource = coin,
) -> Stop:
    """Chains drawn from draft.q. `row_of` (B, N + 1): slot -> row of p (R, V); slots without a child may hold -1."""
    assert draft.q is not None
    q = draft.q.over(p.shape[1]).to(p.dtype)  # (M, V)
    most = min(max_depth, draft.width)  # K
    tokens, length = draft.tokens[:, :most], draft.num_nodes
    p_row, q_row = row_of.clamp_min(0), draft.q.row_of.clamp_min(0)
    ratio = likelihood_ratio(p[p_row[:, :most], tokens], q[q_row[:, :most], tokens])  # (B, K)
    node = torch.arange(most, device=tokens.device).expand_as(tokens)
    coins = node_coins(source, key, committed, most)
    scale = _scales(ratio)
    passed = (coins <= _block_acceptance(scale, length, p, q, p_row, q_row)) & (node < length[:, None])
    stop = torch.where(passed, node + 1, 0).amax(1)  # the last node that passes; earlier failures do not matter
    at = stop[:, None]
    residual = excess(scale.gather(1, at), p[p_row.gather(1, at)[:, 0]], q[q_row.gather(1, at)[:, 0]])
    return Stop(slot=stop, leaf=stop == length, residual=residual)


def node_coins(source: CoinSource, key: Tensor, committed: Tensor, count: int) -> Tensor:
    """(B, count) one acceptance coin for every node."""
    shape = (key.shape[0], count)
    node = torch.arange(count, device=key.device).expand(shape).flatten()
    whose = torch.arange(key.shape[0], device=key.device)[:, None].expand(shape).flatten()
    return source(Lane.ACCEPT, key[whose], committed[whose], node).view(shape)


def likelihood_ratio(p: Tensor, q: Tensor) -> Tensor:
    """p/q of drafted tokens, finite; 0, a reject, where q gives the token no probability."""
    return torch.where(q > 0, p / q, 0).clamp_max(torch.finfo(p.dtype).max)


def excess(scale: Tensor, p: Tensor, q: Tensor) -> Tensor:
    """(scale * p - q)+ (B, V), the recovered token's weights; p where rounding, or a broken q, leaves nothing."""
    weights = (p * scale).sub_(q).clamp_min_(0)
    return torch.where(weights.sum(-1, keepdim=True) > 0, weights, p)


def _scales(ratio: Tensor) -> Tensor:
    """(B, K + 1) a_0 = 1, a_i = min(1, a_{i-1} * p/q of token i)."""
    scales = [torch.ones_like(ratio[:, 0])]
    for i in range(ratio.shape[1]):
        scales.append((scales[-1] * ratio[:, i]).clamp_max(1))
    return torch.stack(scales, 1)


def _block_acceptance(scale: Tensor, length: Tensor, p: Tensor, q: Tensor, p_row: Tensor, q_row: Tensor) -> Tensor:
    """(B, K) the probability of keeping the first i tokens at least, given that no longer run is kept."""
    a, inner = scale[:, 1:], slice(1, scale.shape[1] - 1)  # behind token K nothing can follow: no row is longer
    surplus = torch.zeros_like(a)
    surplus[:, :-1] = (p[p_row[:, inner]] * scale[:, inner, None]).sub_(q[q_row[:, inner]]).clamp_min_(0).sum(-1)
    total = surplus + 1 - a
    # total = 0: p is q and a is 1. Not a number: q is broken, and the chain is taken to end here.
    keep = torch.where(total > 0, surplus / total, a)
    last = torch.arange(1, scale.shape[1], device=a.device) == length[:, None]
    return torch.where(last, a, keep)
