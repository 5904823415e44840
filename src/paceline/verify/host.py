"""The walk on the host where no penalty, bias or ban changes the logits: tokens are drawn only at nodes it reaches.

After a pass the CPU caches are cold, and a small tensor operation takes many times as long as usual; this is the most
common step, so it uses few of them. Every token equals that of `walk.draw`, also by the native function, which returns
none where its rounding might change the token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.draft import INVALID, Draft, Kind, Verdict
from paceline.rng import Lane, bits_of, coin_of
from paceline.verify.pick import pick, pick_seeded_row
from paceline.verify.processors import first_highest, threshold

Row = np.ndarray[Any, Any]  # (V,) logits
# Of a row of float32: temperature, log min_p, top_k, top_p, the coin (negative: by seed) and the key of the noise.
NativeDraw = Callable[[Row, float, float, int, float, float, int], int | None]


@dataclass(frozen=True, slots=True)
class TokenSampler:
    """How a sequence draws its tokens."""

    temperature: float  # 0: the highest logit
    key: int
    committed: int  # tokens when the step starts
    seeded: bool
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # 1: off
    min_p: float = 0.0  # 0: off

    def draw(self, logits: Row, node: int, depth: int, native: NativeDraw | None = None) -> int:
        """The token at a node of the draft with that depth; -1 and 0 at the root."""
        if self.temperature == 0:
            best = int(logits.argmax())
            return best if math.isfinite(logits[best]) else INVALID
        info = np.finfo(logits.dtype)
        temperature = min(max(self.temperature, float(info.tiny)), float(info.max))
        coin, key = -1.0, 0
        if self.seeded:  # the noise is keyed by the token's position
            key = bits_of(Lane.GUMBEL, self.key, self.committed + depth)
        else:
            coin = coin_of(Lane.WALK, self.key, self.committed, node)
        if native is not None:
            least = math.log(self.min_p) if self.min_p > 0 else -math.inf
            token = native(logits, temperature, least, self.top_k, self.top_p, coin, key)
            if token is not None:
                return token
        if not np.isfinite(logits.max()):
            return INVALID
        tempered = self._tempered(logits, temperature)
        if self.seeded:
            return pick_seeded_row(tempered, key)
        return int(pick(torch.from_numpy(tempered)[None], torch.tensor([coin], dtype=torch.float64)))

    def _tempered(self, logits: Row, temperature: float) -> Row:
        """-inf where a filter drops the token."""
        tempered: Row = logits - logits.max()
        if temperature != 1:
            tempered /= tempered.dtype.type(temperature)
        lowest = threshold(tempered, self.top_k, self.top_p, self.min_p)
        if lowest > -math.inf:
            tempered[tempered < lowest] = -math.inf
        return tempered


GREEDY = TokenSampler(temperature=0.0, key=0, committed=0, seeded=False)


def walk_on_host(
    draft: Draft,
    logits: Tensor,
    row_of: Tensor,
    max_depth: int,
    samplers: Sequence[TokenSampler] | None,
    native: NativeDraw | None = None,
) -> Verdict:
    """`walk` by tokens drawn from raw logits (R, V) in the host's memory; of equal siblings the first is taken.

    `samplers` by row of the draft; None: all are greedy.
    """
    values, batch = logits.numpy(), draft.batch
    native = native if values.dtype == np.float32 and values.flags.c_contiguous else None
    num_accepted = np.zeros(batch, np.int64)
    if not draft.width and not max_depth and samplers is None:
        kinds = np.full((batch, 1), int(Kind.BONUS), np.uint8)
        return _verdict(first_highest(values)[row_of.numpy()], num_accepted, np.empty((batch, 0), np.int64), kinds)
    tokens = np.full((batch, max_depth + 1), -1, np.int64)
    kinds = np.full((batch, max_depth + 1), int(Kind.PAD), np.uint8)
    path = np.full((batch, max_depth), -1, np.int64)
    drafts = zip(draft.tokens.tolist(), draft.parents.tolist(), draft.num_nodes.tolist(), strict=True)
    for row, (at, (drafted, parents, count)) in enumerate(zip(row_of.tolist(), drafts, strict=True)):
        drawn = _tokens_by_node(values, at, GREEDY if samplers is None else samplers[row], native)
        node, depth, is_leaf, wanted = -1, 0, True, drawn(-1, 0)
        for child in range(count):  # nodes come after their parents
            if parents[child] != node:
                continue
            is_leaf = False
            if drafted[child] == wanted:
                tokens[row, depth], kinds[row, depth], path[row, depth] = wanted, int(Kind.DRAFTED), child
                node, depth, is_leaf, wanted = child, depth + 1, True, drawn(child, depth + 1)
        tokens[row, depth] = wanted
        kinds[row, depth] = int(Kind.BONUS if is_leaf else Kind.RECOVERED)
        num_accepted[row] = depth
    return _verdict(tokens, num_accepted, path, kinds)


def _tokens_by_node(
    values: Row, at: Sequence[int], sampler: TokenSampler, native: NativeDraw | None
) -> Callable[[int, int], int]:
    """A function that draws the token at a node of a given depth; `at`: each slot's row of logits."""
    return lambda node, depth: sampler.draw(values[at[node + 1]], node, depth, native)


def _verdict(
    tokens: np.ndarray[tuple[int, int], np.dtype[np.int64]],
    num_accepted: np.ndarray[tuple[int], np.dtype[np.int64]],
    path: np.ndarray[tuple[int, int], np.dtype[np.int64]],
    kinds: np.ndarray[tuple[int, int], np.dtype[np.uint8]],
) -> Verdict:
    return Verdict(
        tokens=torch.from_numpy(tokens),
        num_accepted=torch.from_numpy(num_accepted),
        path=torch.from_numpy(path),
        kinds=torch.from_numpy(kinds),
    )
