"""Laws 1 and 3: draw the target's own token at every node, and follow the draft while it agrees.

At each node y is what plain decoding would say there: the argmax (greedy), argmax(log p + Gumbel(seed, position,
token)) (seeded), or one fresh coin against cumulative p. The walk descends to the child that carries y and stops at the
first node without one; y there is the recovered token, or the bonus at a leaf. No draft has a say in what y is, so any
draft is lossless here, a sampled one and one with duplicates too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.draft import Draft, Kind, Verdict
from paceline.rng import Lane, bits, coin, gumbel, gumbel_row
from paceline.verify.processors import Nodes, argmax, probabilities

BLOCK = 256


@dataclass(frozen=True, kw_only=True)
class Draws:
    """How R rows of processed logits become tokens. A row in neither list is greedy."""

    key: Tensor  # (S,) int64, the request's seed, or its private random key
    committed: Tensor  # (S,) int64, tokens (prompt and output) when the step starts
    coins: Tensor | None = None  # (Rc,) int64, ascending: the rows of unseeded sampling requests; None: no row
    seeded: Tensor | None = None  # (Rs,) int64, ascending: the rows of seeded ones; None: no row

    @staticmethod
    def of(key: Tensor, committed: Tensor, seq: Sequence[int], greedy: Sequence[bool], seeded: Sequence[bool]) -> Draws:
        """Sort rows (given by their sequence, on the host) by what their sequence asked for."""

        def rows(wanted: bool) -> Tensor | None:
            found = [row for row, s in enumerate(seq) if not greedy[s] and bool(seeded[s]) is wanted]
            return torch.tensor(found, device=key.device) if found else None

        return Draws(key=key, committed=committed, coins=rows(False), seeded=rows(True))


def draw(logits: Tensor, draws: Draws, nodes: Nodes, uniforms: Tensor | None = None) -> Tensor:
    """(R,) the token each row says. `uniforms` (R,) stand in for the coins (to enumerate, or to replay)."""
    rows = logits.shape[0]
    sampled = sum(0 if part is None else part.shape[0] for part in (draws.coins, draws.seeded))
    tokens = argmax(logits) if sampled < rows else nodes.seq.new_empty(rows)
    if draws.coins is not None:
        at = draws.coins
        seq = nodes.seq[at]
        if uniforms is None:
            coins = coin(Lane.WALK, draws.key[seq], draws.committed[seq], nodes.node[at])
        else:
            coins = uniforms[at]
        tokens[at] = pick(_rows(logits, at), coins)
    if draws.seeded is not None:
        at = draws.seeded
        seq = nodes.seq[at]
        # The noise belongs to the position the token will take, whichever step or node says it.
        tokens[at] = pick_seeded(_rows(logits, at), draws.key[seq], draws.committed[seq] + nodes.depth[at])
    return tokens


def pick(logits: Tensor, coins: Tensor) -> Tensor:
    """(R,) the token whose stretch of cumulative p holds the coin; never one of probability 0."""
    if logits.is_cpu:
        return torch.tensor([_pick(*row) for row in zip(logits.numpy(), coins.tolist(), strict=True)])
    return _pick_batch(logits, coins)


def _pick_batch(logits: Tensor, coins: Tensor) -> Tensor:
    """All rows at once, without reading a value."""
    cumulative = probabilities(logits).cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1]
    # p sums to 1 up to rounding: the coin is scaled to the sum, and kept under it.
    point = torch.minimum(coins * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, point[:, None], right=True)[:, 0]


def _pick(logits: np.ndarray[Any, Any], coin: float) -> int:
    """The same for one row (V,): of the tokens left, first the block of them that holds the coin, then the token."""
    left = _left(logits)
    weights = logits - logits.max() if left is None else logits[left] - logits.max()
    np.exp(weights, out=weights)
    ends = np.add.reduceat(weights, np.arange(0, weights.shape[0], BLOCK), dtype=np.float64).cumsum()
    point = min(coin * ends[-1], math.nextafter(ends[-1], 0))
    block = int(ends.searchsorted(point, "right"))
    inside = weights[block * BLOCK : (block + 1) * BLOCK]
    rest = point - (ends[block - 1] if block else 0.0)
    offset = int(inside.cumsum(dtype=np.float64).searchsorted(rest, "right"))
    # A block's total may round above the sum of its tokens in turn: the last one that can be said then holds the coin.
    index = block * BLOCK + min(offset, int(np.flatnonzero(inside)[-1]))
    return index if left is None else int(left[index])


def pick_seeded(logits: Tensor, seed: Tensor, position: Tensor) -> Tensor:
    """(R,) argmax(log p + Gumbel(seed, position, token)); log p up to a constant is the processed logit."""
    if not logits.is_cpu:
        return argmax(logits + gumbel(seed, position, logits.shape[1]).to(logits.dtype))
    keys = bits(Lane.GUMBEL, seed, position).tolist()
    return torch.tensor([_pick_seeded(*row) for row in zip(logits.numpy(), keys, strict=True)])


def _pick_seeded(logits: np.ndarray[Any, Any], key: int) -> int:
    """The same for one row (V,). Noise is the costly part: only the tokens the filters left get any."""
    left = _left(logits)
    if left is None:
        return int(np.argmax(gumbel_row(key, np.arange(logits.shape[0])) + logits))
    return int(left[np.argmax(gumbel_row(key, left) + logits[left])])


def _left(logits: np.ndarray[Any, Any]) -> Any:
    """The tokens of a row (V,) that can be said; None: all of them."""
    return np.flatnonzero(logits > -np.inf) if logits.min() == -np.inf else None


def walk(draft: Draft, drawn: Tensor, row_of: Tensor, max_depth: int) -> Verdict:
    """Follow the draft along the tokens drawn (R,). `row_of` (B, N + 1): slot -> row, -1 for padding; no host sync."""
    said = drawn[row_of.clamp_min(0)]  # (B, N + 1) by slot
    if draft.width == 0 or max_depth == 0:
        return _plain(said[:, 0], max_depth)
    accepted, has_children = _accepted(draft, said, max_depth)
    path, num_accepted = _path(draft, accepted, max_depth)
    return _verdict(draft, said, has_children, path, num_accepted)


def _rows(logits: Tensor, at: Tensor) -> Tensor:
    return logits if at.shape[0] == logits.shape[0] else logits[at]


def _plain(tokens: Tensor, max_depth: int) -> Verdict:
    batch = tokens.shape[0]
    beyond = tokens.new_full((batch, max_depth), -1)
    kinds = torch.full((batch, max_depth + 1), int(Kind.PAD), dtype=torch.uint8, device=tokens.device)
    kinds[:, 0] = int(Kind.BONUS)
    return Verdict(
        tokens=torch.cat((tokens[:, None], beyond), 1),
        num_accepted=torch.zeros_like(tokens),
        path=beyond,
        kinds=kinds,
    )


def _accepted(draft: Draft, said: Tensor, max_depth: int) -> tuple[Tensor, Tensor]:
    """(B, N) which nodes the walk passes through, and (B, N + 1) which slots have children."""
    index = torch.arange(draft.width, device=said.device).expand_as(draft.tokens)
    valid = index < draft.num_nodes[:, None]
    above = draft.parents + 1  # the parent's slot
    agrees = valid & (draft.tokens == said.gather(1, above))
    # Of equal siblings the first one counts.
    first = torch.full_like(said, draft.width).scatter_reduce_(
        1, above, torch.where(agrees, index, draft.width), "amin"
    )
    reached = torch.cat((torch.ones_like(valid[:, :1]), agrees & (first.gather(1, above) == index)), 1)  # by slot
    jump = torch.cat((torch.zeros_like(above[:, :1]), above), 1)
    for _ in range(max(max_depth - 1, 0).bit_length()):  # pointer doubling: every ancestor must agree as well
        reached = reached & reached.gather(1, jump)
        jump = jump.gather(1, jump)
    has_children = torch.zeros_like(said).scatter_reduce_(1, above, valid.to(said.dtype), "amax") > 0
    return reached[:, 1:], has_children


def _path(draft: Draft, accepted: Tensor, max_depth: int) -> tuple[Tensor, Tensor]:
    """The accepted nodes stand on one path, one for each depth."""
    index = torch.arange(draft.width, device=accepted.device).expand_as(draft.tokens)
    column = torch.where(accepted, draft.depth - 1, max_depth)  # the last column swallows the rest
    path = draft.tokens.new_full((draft.batch, max_depth + 1), -1).scatter_(1, column, index)
    return path[:, :max_depth], accepted.sum(-1)


def _verdict(draft: Draft, said: Tensor, has_children: Tensor, path: Tensor, num_accepted: Tensor) -> Verdict:
    depth = torch.arange(path.shape[1] + 1, device=said.device)
    before, at_end = depth < num_accepted[:, None], depth == num_accepted[:, None]
    slots = torch.cat((torch.zeros_like(path[:, :1]), path + 1), 1).clamp_min(
        0
    )  # (B, D + 1), where each token was said
    tokens = torch.where(before | at_end, said.gather(1, slots), -1)
    last = torch.where(has_children.gather(1, slots), int(Kind.RECOVERED), int(Kind.BONUS))
    kinds = torch.where(before, int(Kind.DRAFTED), torch.where(at_end, last, int(Kind.PAD))).to(torch.uint8)
    return Verdict(tokens=tokens, num_accepted=num_accepted, path=path, kinds=kinds)
