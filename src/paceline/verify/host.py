"""The walk on the host where no penalty, bias or ban changes the logits: tokens are drawn only at nodes it reaches.

After a pass the CPU caches are cold, and a small tensor operation takes many times as long as usual; this is the most
common step, so it uses few of them. Every token equals that of `walk.draw`, also by the native function, which returns
None where its rounding might change the token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.core.draft import Draft
from paceline.core.rng import Lane, bits_of, coin_of
from paceline.core.verdict import INVALID, HostVerdict, TokenKind, VerdictRow
from paceline.verify.distribution import threshold
from paceline.verify.sample import sample, sample_seeded_row

LogitRow = np.ndarray[Any, Any]  # (V,)
# (row, temperature, log min_p, top_k, top_p, coin, key of the noise) -> token; a negative coin: by seed
DrawRow = Callable[[int, float, float, int, float, float, int], int | None]
NativeDraw = Callable[[Tensor], DrawRow | None]  # logits (R, V) -> DrawRow; None: native code cannot draw from them
DRAFTED, RECOVERED, BONUS = int(TokenKind.DRAFTED), int(TokenKind.RECOVERED), int(TokenKind.BONUS)


@dataclass(frozen=True, slots=True)
class TokenSampler:
    """The parameters by which a sequence draws its tokens."""

    temperature: float  # a float32 value; 0: the highest logit
    key: int
    seeded: bool
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # 1: off
    min_p: float = 0.0  # 0: off

    def draw(
        self, values: Tensor, row: int, committed: int, node: int, depth: int, native: DrawRow | None = None
    ) -> int:
        """Return the token at a node of the draft with that depth (-1 and 0 at the root), from a row of logits (R, V).

        `committed`: tokens of the sequence when the step starts.
        """
        coin, key = -1.0, 0
        if self.seeded:  # the noise is keyed by the token's position
            key = bits_of(Lane.GUMBEL, self.key, committed + depth)
        elif self.temperature:
            coin = coin_of(Lane.WALK, self.key, committed, node)
        if native is not None:
            log_min_p = math.log(self.min_p) if self.min_p > 0 else -math.inf
            token = native(row, self.temperature, log_min_p, self.top_k, self.top_p, coin, key)
            if token is not None:
                return token
        logits: LogitRow = values[row].numpy()
        if self.temperature == 0:
            best = int(logits.argmax())
            return best if math.isfinite(logits[best]) else INVALID
        if not np.isfinite(logits.max()):
            return INVALID
        tempered = self._tempered(logits)
        if self.seeded:
            return sample_seeded_row(tempered, key)
        return int(sample(torch.from_numpy(tempered)[None], torch.tensor([coin], dtype=torch.float64)))

    def _tempered(self, logits: LogitRow) -> LogitRow:
        """Return tempered logits, -inf where a filter drops the token."""
        tempered: LogitRow = logits - logits.max()
        if self.temperature != 1:
            tempered /= tempered.dtype.type(self.temperature)
        lowest = threshold(tempered, self.top_k, self.top_p, self.min_p)
        if lowest > -math.inf:
            tempered[tempered < lowest] = -math.inf
        return tempered


def walk_on_host(
    draft: Draft,
    logits: Tensor,
    row_of: Sequence[Sequence[int]],
    max_depth: int,
    samplers: Sequence[TokenSampler],
    committed: Sequence[int],
    native: NativeDraw | None = None,
) -> HostVerdict:
    """Walk the draft by tokens drawn from raw logits (R, V) in the host's memory; of equal siblings take the first.

    By row of the draft: `row_of`, the rows of logits of its last token and its nodes; its sampler; and the tokens
    `committed` when the step starts.
    """
    rows: list[VerdictRow] = []
    by_row = None if native is None else native(logits)
    shape = draft.shape
    drafts = zip(row_of, draft.arrays.tokens.tolist(), shape.parents, shape.num_nodes, samplers, committed, strict=True)
    for at, drafted, parents, count, sampler, length in drafts:
        path: list[int] = []
        node, is_leaf = -1, True
        wanted = sampler.draw(logits, at[0], length, -1, 0, by_row)
        for child in range(count):  # nodes come after their parents
            if parents[child] != node:
                continue
            is_leaf = False
            if drafted[child] == wanted:
                path.append(child)
                node, is_leaf = child, True
                wanted = sampler.draw(logits, at[node + 1], length, node, len(path), by_row)
        kinds = [DRAFTED] * len(path) + [BONUS if is_leaf else RECOVERED]
        rows.append(VerdictRow([*[drafted[one] for one in path], wanted], path, kinds))
    return HostVerdict.of(rows, max_depth)
