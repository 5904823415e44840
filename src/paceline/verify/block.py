"""Law 2: how much of a chain drawn from q to accept, so that the committed tokens are distributed as p.

Block verification (Sun et al., 2403.10444) judges the chain as a whole and accepts at least as much as the rule that
judges one token after another (Leviathan et al. 2023, Chen et al. 2023). Lengths differ by row; a chain's length may
depend on its own tokens, never on tokens left out.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.core.draft import Draft
from paceline.core.rng import Lane, coin
from paceline.core.verdict import Verdict
from paceline.verify.distribution import probabilities, process
from paceline.verify.outcome import outcome, take
from paceline.verify.processors import Nodes, SamplingMetadata
from paceline.verify.sample import sample, sample_weighted
from paceline.verify.walk import CoinSource, DrawKeys, SamplingMode


def drawn_chains(draft: Draft, draws: DrawKeys) -> Tensor:
    """Return (B,) bool: the rows for law 2, chains drawn wholly from q for requests that draw by coins."""
    assert draft.q is not None
    node = torch.arange(draft.width, device=draft.tokens.device)
    drawn = (draft.q.row_of[:, :-1] >= 0) & (draft.parents == node - 1)
    whole = (drawn | (node >= draft.num_nodes[:, None])).all(1)
    return draws.by(SamplingMode.COIN) & (draft.num_nodes > 0) & whole


def verify_block(
    draft: Draft,
    logits: Tensor,
    row_of: Tensor,
    nodes: Nodes,
    metadata: SamplingMetadata,
    draws: DrawKeys,
    rows: Tensor,
    *,
    max_depth: int,
    source: CoinSource = coin,
) -> Verdict:
    """Verify the rows (B',) of a draft, all of them `drawn_chains`. `row_of` (B, N + 1): slot -> row of logits."""
    draft, row_of = take(draft, rows), row_of[rows]
    assert draft.q is not None
    key, committed = draws.key[rows], draws.committed[rows]
    drafted = torch.arange(draft.width + 1) < draft.num_nodes[:, None]  # (B', N + 1) slots that have a child
    p = probabilities(_processed(logits, metadata, nodes, row_of[drafted]))
    p_row = torch.where(drafted, drafted.flatten().cumsum(0).view_as(row_of) - 1, 0)
    q, q_row = draft.q.over(p.shape[1]).to(p.dtype), draft.q.row_of.clamp_min(0)
    tokens = draft.tokens[:, :max_depth]
    depth = tokens.shape[1]
    coins = node_coins(source, key, committed, depth)
    scale = _scales(likelihood_ratio(p[p_row[:, :depth], tokens], q[q_row[:, :depth], tokens]))
    stop = _accepted(scale, coins, draft.num_nodes, p, q, p_row, q_row)
    leaf = stop == draft.num_nodes
    inner = (~leaf).nonzero()[:, 0]
    coins = source(Lane.RESIDUAL, key, committed, stop - 1)
    last = torch.empty_like(stop)
    if inner.shape[0]:
        slot = stop[inner]
        residual = excess(scale[inner, slot], p[p_row[inner, slot]], q[q_row[inner, slot]])
        last[inner] = sample_weighted(residual, coins[inner])
    if inner.shape[0] < stop.shape[0]:
        at = row_of.gather(1, stop[:, None])[:, 0]
        last[leaf] = sample(_processed(logits, metadata, nodes, at[leaf]), coins[leaf])
    node = torch.arange(max_depth)
    return outcome(draft, torch.where(node < stop[:, None], node, -1), stop, last, leaf)


def node_coins(source: CoinSource, key: Tensor, committed: Tensor, count: int) -> Tensor:
    """Return (B, count) one acceptance coin for every node."""
    shape = (key.shape[0], count)
    node = torch.arange(count, device=key.device).expand(shape).flatten()
    row = torch.arange(key.shape[0], device=key.device)[:, None].expand(shape).flatten()
    return source(Lane.ACCEPT, key[row], committed[row], node).view(shape)


def likelihood_ratio(p: Tensor, q: Tensor) -> Tensor:
    """Return p/q of drafted tokens, finite; 0, a reject, where q gives the token no probability."""
    return torch.where(q > 0, p / q, 0).clamp_max(torch.finfo(p.dtype).max)


def excess(scale: Tensor, p: Tensor, q: Tensor) -> Tensor:
    """Return (B, V) the recovered token's weights, (scale * p - q)+; p where rounding, or a broken q, leaves none."""
    weights = (p * scale[:, None]).sub_(q).clamp_min_(0)
    return torch.where(weights.sum(-1, keepdim=True) > 0, weights, p)


def _processed(logits: Tensor, metadata: SamplingMetadata, nodes: Nodes, at: Tensor) -> Tensor:
    if at.shape[0] == 1:  # a view is as good: nothing writes into the logits
        return process(logits[int(at) : int(at) + 1], metadata, nodes.take(at))
    return process(logits[at], metadata, nodes.take(at))


def _scales(ratio: Tensor) -> Tensor:
    """Return (B, K + 1) a_0 = 1, a_i = min(1, a_{i-1} * p/q of token i)."""
    scales = [torch.ones_like(ratio[:, 0])]
    for i in range(ratio.shape[1]):
        scales.append((scales[-1] * ratio[:, i]).clamp_max(1))
    return torch.stack(scales, 1)


def _accepted(
    scale: Tensor, coins: Tensor, length: Tensor, p: Tensor, q: Tensor, p_row: Tensor, q_row: Tensor
) -> Tensor:
    """Return (B,) how many tokens are kept: up to the last node that passes, whatever failed before it."""
    node = torch.arange(coins.shape[1])
    passed = (coins <= _acceptance(scale, length, p, q, p_row, q_row)) & (node < length[:, None])
    return torch.where(passed, node + 1, 0).amax(1)


def _acceptance(scale: Tensor, length: Tensor, p: Tensor, q: Tensor, p_row: Tensor, q_row: Tensor) -> Tensor:
    """Return (B, K) the probability of keeping the first i tokens at least, given that no longer run is kept."""
    a, inner = scale[:, 1:], slice(1, scale.shape[1] - 1)  # behind token K nothing can follow: no row is longer
    surplus = torch.zeros_like(a)
    surplus[:, :-1] = (p[p_row[:, inner]] * scale[:, inner, None]).sub_(q[q_row[:, inner]]).clamp_min_(0).sum(-1)
    total = surplus + 1 - a
    # total = 0: p is q and a is 1. Not a number: q is broken, and the chain is taken to end here.
    keep = torch.where(total > 0, surplus / total, a)
    last = torch.arange(1, scale.shape[1]) == length[:, None]
    return torch.where(last, a, keep)
