"""Laws 1 and 3: draw the target's own token at every node, and follow the draft while it agrees.

At each node y is the token that plain decoding commits: the argmax (greedy), argmax(log p + Gumbel(seed, position,
token)) (seeded), or one fresh coin against cumulative p. The walk descends to the child that carries y and stops at the
first node without one; y there is the recovered token, or the bonus at a leaf. y does not depend on the draft, so any
draft is lossless here, sampled ones and ones with duplicates too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import IntEnum

import numpy as np
import torch
from torch import Tensor

from paceline.core.draft import Draft
from paceline.core.rng import Lane, coin
from paceline.core.verdict import Verdict
from paceline.verify.dispatch import on_device
from paceline.verify.distribution import argmax, probabilities, process
from paceline.verify.outcome import outcome, take
from paceline.verify.processors import Nodes, SamplingMetadata
from paceline.verify.sample import sample, sample_seeded, sample_weighted

CoinSource = Callable[[Lane, Tensor, Tensor, Tensor], Tensor]  # rng.coin's signature; others enumerate or replay


class SamplingMode(IntEnum):
    """Ways of drawing a sequence's tokens."""

    GREEDY = 0
    COIN = 1  # a fresh coin: sampling without a seed
    SEEDED = 2  # the noise of its seed


@dataclass(frozen=True, kw_only=True)
class DrawKeys:
    """Keys and modes by which S sequences draw tokens from processed logits."""

    key: Tensor  # (S,) int64, the request's seed, or its private random key
    committed: Tensor  # (S,) int64, tokens (prompt and output) when the step starts
    kind: Tensor | None = None  # (S,) int64 of SamplingMode; None: all are greedy
    coins: bool = True  # some sequence may draw by coins, as far as the host knows

    @staticmethod
    def by_coins(key: Tensor, committed: Tensor) -> DrawKeys:
        """Return keys of sequences that all sample without a seed."""
        return DrawKeys(key=key, committed=committed, kind=torch.full_like(key, SamplingMode.COIN, dtype=torch.int64))

    def by(self, kind: SamplingMode) -> Tensor:
        """Return (S,) bool: the sequences that draw in this way."""
        if self.kind is None:
            return torch.full_like(self.key, kind == SamplingMode.GREEDY, dtype=torch.bool)
        return self.kind == kind


@on_device
def draw(logits: Tensor, draws: DrawKeys, nodes: Nodes, source: CoinSource = coin) -> Tensor:
    """Return (R,) the token of each row."""
    if draws.kind is None:
        return argmax(logits)
    coins, seeded = (
        (draws.kind == kind)[nodes.seq].nonzero()[:, 0] for kind in (SamplingMode.COIN, SamplingMode.SEEDED)
    )
    sampled = coins.shape[0] + seeded.shape[0]
    tokens = argmax(logits) if sampled < logits.shape[0] else nodes.seq.new_empty(sampled)
    if coins.shape[0]:
        seq = nodes.seq[coins]
        tokens[coins] = sample(
            _rows(logits, coins), source(Lane.WALK, draws.key[seq], draws.committed[seq], nodes.node[coins])
        )
    if seeded.shape[0]:
        seq = nodes.seq[seeded]
        # The noise is keyed by the token's position, whichever step or node draws it.
        position = draws.committed[seq] + nodes.depth[seeded]
        tokens[seeded] = sample_seeded(_rows(logits, seeded), draws.key[seq], position)
    return tokens


def walk(
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
    """Walk the rows (B',) of a draft, level by level: only nodes that are reached are processed.

    `row_of` (B, N + 1): slot -> row of logits, -1 for padding.
    """
    tokens, parents = draft.tokens.numpy(), draft.parents.numpy()
    used = np.arange(draft.width) < draft.num_nodes.numpy()[:, None]
    batch = rows.shape[0]
    path = np.full((batch, max_depth), -1)
    num_accepted, last, leaf = np.zeros(batch, np.int64), np.zeros(batch, np.int64), np.zeros(batch, bool)
    live, owner, node = np.arange(batch), rows.numpy(), np.full(batch, -1)
    while True:
        at = row_of[torch.from_numpy(owner), torch.from_numpy(node + 1)]
        reached = nodes.take(at)
        drawn = draw(process(logits[at], metadata, reached), draws, reached, source).numpy()
        children = used[owner] & (parents[owner] == node[:, None])
        agrees = children & (tokens[owner] == drawn[:, None])  # the first of equal siblings is taken
        last[live], leaf[live] = drawn, ~children.any(1)
        goes = agrees.any(1)
        if not goes.any():
            break
        live, owner, node = live[goes], owner[goes], agrees.argmax(1)[goes]
        path[live, num_accepted[live]] = node
        num_accepted[live] += 1
    parts = (torch.from_numpy(part) for part in (path, num_accepted, last, leaf))
    return outcome(take(draft, rows), *parts)


def _rows(logits: Tensor, at: Tensor) -> Tensor:
    return logits if at.shape[0] == logits.shape[0] else logits[at]


@on_device
def propose(
    logits: Tensor, metadata: SamplingMetadata, draws: DrawKeys, nodes: Nodes, source: CoinSource = coin
) -> tuple[Tensor, Tensor | None]:
    """Return (R,) a token for each row of a drafter's logits, and the q (R, V) that they were drawn from.

    q has the parameters of verification; it is None if no sequence samples without a seed. Coins come from a separate
    random lane (`Lane.DRAFT`). Seeded and greedy rows draw the target's token where q equals p.
    """
    processed = process(logits, metadata, nodes)
    if draws.kind is None or not draws.coins:
        return draw(processed, draws, nodes), None
    q, at = probabilities(processed), (draws.kind == SamplingMode.COIN)[nodes.seq].nonzero()[:, 0]
    tokens = draw(processed, replace(draws, kind=torch.where(draws.kind == SamplingMode.COIN, 0, draws.kind)), nodes)
    seq = nodes.seq[at]
    coins = source(Lane.DRAFT, draws.key[seq], draws.committed[seq], nodes.node[at])
    tokens[at] = sample_weighted(q[at], coins)
    return tokens, q
