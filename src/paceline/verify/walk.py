"""Laws 1 and 3: draw the target's own token at every node, and follow the draft while it agrees.

At each node y is the token plain decoding commits there: the argmax (greedy), argmax(log p + Gumbel(seed, position,
token)) (seeded), or one fresh coin against cumulative p. The walk descends to the child that carries y and stops at the
first node without one; y there is the recovered token, or the bonus at a leaf. y does not depend on the draft, so any
draft is lossless here, sampled ones and ones with duplicates too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import torch
from torch import Tensor

from paceline.draft import Draft, Kind, Verdict
from paceline.rng import Lane, coin
from paceline.verify import seam
from paceline.verify.outcome import has_children, outcome, take
from paceline.verify.pick import pick, pick_seeded
from paceline.verify.processors import Controls, Nodes, argmax, process

CoinSource = Callable[[Lane, Tensor, Tensor, Tensor], Tensor]  # as rng.coin; another one enumerates or replays


class DrawKind(IntEnum):
    """How a sequence draws its tokens."""

    GREEDY = 0
    COIN = 1  # by a fresh coin: sampling without a seed
    SEEDED = 2  # by the noise of its seed


@dataclass(frozen=True, kw_only=True)
class Draws:
    """How S sequences draw tokens from processed logits."""

    key: Tensor  # (S,) int64, the request's seed, or its private random key
    committed: Tensor  # (S,) int64, tokens (prompt and output) when the step starts
    kind: Tensor | None = None  # (S,) int64 of DrawKind; None: all are greedy
    coins: bool = True  # some sequence may draw by coins, as far as the host knows

    @staticmethod
    def by_coins(key: Tensor, committed: Tensor) -> Draws:
        """Every sequence samples without a seed."""
        return Draws(key=key, committed=committed, kind=torch.full_like(key, DrawKind.COIN, dtype=torch.int64))

    def by(self, kind: DrawKind) -> Tensor:
        """(S,) bool: the sequences that draw in this way."""
        if self.kind is None:
            return torch.full_like(self.key, kind == DrawKind.GREEDY, dtype=torch.bool)
        return self.kind == kind


def draw(logits: Tensor, draws: Draws, nodes: Nodes, source: CoinSource = coin) -> Tensor:
    """(R,) the token of each row."""
    if (kernels := seam.kernels(logits)) is not None:
        return kernels.draw(logits, draws, nodes, source)  # type: ignore[no-any-return]
    if draws.kind is None:
        return argmax(logits)
    coins, seeded = ((draws.kind == kind)[nodes.seq].nonzero()[:, 0] for kind in (DrawKind.COIN, DrawKind.SEEDED))
    sampled = coins.shape[0] + seeded.shape[0]
    tokens = argmax(logits) if sampled < logits.shape[0] else nodes.seq.new_empty(sampled)
    if coins.shape[0]:
        seq = nodes.seq[coins]
        tokens[coins] = pick(
            _rows(logits, coins), source(Lane.WALK, draws.key[seq], draws.committed[seq], nodes.node[coins])
        )
    if seeded.shape[0]:
        seq = nodes.seq[seeded]
        # The noise is keyed by the token's position, whichever step or node draws it.
        position = draws.committed[seq] + nodes.depth[seeded]
        tokens[seeded] = pick_seeded(_rows(logits, seeded), draws.key[seq], position)
    return tokens


def walk(draft: Draft, drawn: Tensor, row_of: Tensor, max_depth: int) -> Verdict:
    """Follow the draft along the tokens drawn (R,). `row_of` (B, N + 1): slot -> row, -1 for padding; no host sync."""
    if draft.width == 0 or max_depth == 0:
        return _plain(drawn[row_of[:, 0]], max_depth)
    by_slot = drawn[row_of.clamp_min(0)]  # (B, N + 1) by slot
    path, num_accepted = _path(draft, _accepted(draft, by_slot, max_depth), max_depth)
    above = torch.cat((path.new_zeros(draft.batch, 1), path + 1), 1).gather(1, num_accepted[:, None])  # the last slot
    leaf = ~has_children(draft).gather(1, above)[:, 0]
    return outcome(draft, path, num_accepted, by_slot.gather(1, above)[:, 0], leaf)


def descend(
    draft: Draft,
    logits: Tensor,
    row_of: Tensor,
    nodes: Nodes,
    controls: Controls,
    draws: Draws,
    rows: Tensor,
    *,
    max_depth: int,
    source: CoinSource = coin,
) -> Verdict:
    """The same walk of the rows (B',) of a draft, on the host: level by level, processing only the nodes it reaches."""
    tokens, parents = draft.tokens.numpy(), draft.parents.numpy()
    used = np.arange(draft.width) < draft.num_nodes.numpy()[:, None]
    batch = rows.shape[0]
    path = np.full((batch, max_depth), -1)
    num_accepted, last, leaf = np.zeros(batch, np.int64), np.zeros(batch, np.int64), np.zeros(batch, bool)
    live, owner, node = np.arange(batch), rows.numpy(), np.full(batch, -1)
    while live.size:
        at = row_of[torch.from_numpy(owner), torch.from_numpy(node + 1)]
        here = nodes.take(at)
        drawn = draw(process(logits[at], controls, here), draws, here, source).numpy()
        children = used[owner] & (parents[owner] == node[:, None])
        agrees = children & (tokens[owner] == drawn[:, None])  # of equal siblings the first is taken
        last[live], leaf[live] = drawn, ~children.any(1)
        goes = agrees.any(1)
        live, owner, node = live[goes], owner[goes], agrees.argmax(1)[goes]
        path[live, num_accepted[live]] = node
        num_accepted[live] += 1
    parts = (torch.from_numpy(part) for part in (path, num_accepted, last, leaf))
    return outcome(take(draft, rows), *parts)


def _rows(logits: Tensor, at: Tensor) -> Tensor:
    return logits if at.shape[0] == logits.shape[0] else logits[at]


def walk_chains(draft: Draft, drawn: Tensor, row_of: Tensor) -> Verdict:
    """`walk` where every row is known to be a chain: a row is followed up to the first token that was not drawn."""
    by_slot = drawn[row_of.clamp_min(0)]  # (B, N + 1) by slot
    index = torch.arange(draft.width, device=by_slot.device)
    agrees = (draft.tokens == by_slot[:, :-1]) & (index < draft.num_nodes[:, None])
    num_accepted = agrees.long().cumprod(1).sum(1)
    path = torch.where(index < num_accepted[:, None], index, -1)
    leaf = num_accepted == draft.num_nodes
    return outcome(draft, path, num_accepted, by_slot.gather(1, num_accepted[:, None])[:, 0], leaf)


def _plain(tokens: Tensor, max_depth: int) -> Verdict:
    """One token a row. Every plain step runs this with cold CPU caches, so it uses few operations."""
    batch = tokens.shape[0]
    kinds = torch.full((batch, max_depth + 1), int(Kind.PAD), dtype=torch.uint8, device=tokens.device)
    kinds[:, 0] = int(Kind.BONUS)
    beyond = tokens.new_full((batch, max_depth), -1)
    committed = torch.cat((tokens[:, None], beyond), 1) if max_depth else tokens[:, None]
    return Verdict(tokens=committed, num_accepted=torch.zeros_like(tokens), path=beyond, kinds=kinds)


def _accepted(draft: Draft, by_slot: Tensor, max_depth: int) -> Tensor:
    """(B, N) which nodes the walk passes through."""
    index = torch.arange(draft.width, device=by_slot.device).expand_as(draft.tokens)
    valid = index < draft.num_nodes[:, None]
    above = draft.parents + 1  # the parent's slot
    agrees = valid & (draft.tokens == by_slot.gather(1, above))
    # Of equal siblings the first is taken.
    first = torch.full_like(by_slot, draft.width).scatter_reduce_(
        1, above, torch.where(agrees, index, draft.width), "amin"
    )
    reached = torch.cat((torch.ones_like(valid[:, :1]), agrees & (first.gather(1, above) == index)), 1)  # by slot
    jump = torch.cat((torch.zeros_like(above[:, :1]), above), 1)
    for _ in range(max(max_depth - 1, 0).bit_length()):  # pointer doubling: every ancestor must agree as well
        reached = reached & reached.gather(1, jump)
        jump = jump.gather(1, jump)
    return reached[:, 1:]


def _path(draft: Draft, accepted: Tensor, max_depth: int) -> tuple[Tensor, Tensor]:
    """The path of the accepted nodes, one for each depth."""
    index = torch.arange(draft.width, device=accepted.device).expand_as(draft.tokens)
    column = torch.where(accepted, draft.depth - 1, max_depth)  # the last column discards the rest
    path = draft.tokens.new_full((draft.batch, max_depth + 1), -1).scatter_(1, column, index)
    return path[:, :max_depth], accepted.sum(-1)
