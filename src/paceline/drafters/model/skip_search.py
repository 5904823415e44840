"""Which layers of a target may be skipped while it drafts: a dynamic programme over its layers (CLaSp, 2505.24196), and
the choice among its results by expected speed, as KnapSpec (2602.20217) does.

At each layer the best hidden states for every number of layers skipped so far are kept: those of the run layer, or
those that skip it, whichever is nearer to the target's own. Cosines do not add up, so this is a good set and not the
best one.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from paceline.core.sequence import Sequence
from paceline.models.decoder import Decoder
from paceline.models.kv_cache import LayerCache
from paceline.models.plan import PassPlan, padded_tables

Kept = tuple[int, ...]  # layers, ascending
POSITIONS = 16  # of a text, on which sets are compared
LONGEST = 8  # tokens of a draft that the expected gain considers


class SkipSet(NamedTuple):
    kept: Kept
    accuracy: float  # share of positions at which the likeliest token is the target's
    price: float  # bytes that a pass reads, over those of the target's


def expected_gain(accuracy: float, price: float) -> float:
    """Return the expected tokens of a step over its time in plain steps, at the best length of a chain."""
    return max(
        sum(accuracy**depth for depth in range(length + 1)) / (1 + length * price) for length in range(LONGEST + 1)
    )


class SkipSearch:
    def __init__(self, target: Decoder, most: int) -> None:
        """`most`: layers that may be skipped."""
        self._target, self._most = target, most

    @torch.inference_mode()
    def run(
        self, sequence: Sequence, caches: SequenceOf[LayerCache], block_size: int, own: Kept
    ) -> tuple[SkipSet, SkipSet]:
        """Return the set in use and the best one found, compared on the last computed tokens of a sequence. No K/V are
        written: the target has written those of these tokens."""
        end = len(sequence.tokens) - 1
        positions = torch.arange(max(end - POSITIONS, 0), end)
        tokens = torch.tensor(sequence.tokens)[positions].to(self._target.device)
        table = padded_tables([sequence.blocks])

        def plan_of(copies: int) -> PassPlan:
            at = positions.repeat(copies)
            nowhere = torch.full_like(at, -1)
            plan = PassPlan.in_order(at, nowhere, torch.zeros_like(at), table, block_size, end)
            return plan.to(self._target.device)

        hidden = self._target.embed(tokens)[None]  # (J, P, H), by the number of layers skipped
        skipped: list[Kept] = [()]
        count = self._target.config.num_layers
        for layer in range(count):
            after = self._after(layer, hidden, plan_of(len(hidden)), caches)
            if layer in (0, count - 1):
                hidden = after
                continue
            hidden, skipped = self._step(layer, hidden, after, skipped)
        wanted, *others = self._likeliest(hidden)
        sets = [
            self._judged(tuple(one for one in range(count) if one not in left_out), wanted, found)
            for left_out, found in zip(skipped[1:], others, strict=True)
        ]
        in_use = self._target.embed(tokens)[None]
        for layer in own:
            in_use = self._after(layer, in_use, plan_of(1), caches)
        return self._judged(own, wanted, self._likeliest(in_use)[0]), max(sets, key=lambda one: expected_gain(*one[1:]))

    def _step(self, layer: int, before: Tensor, after: Tensor, skipped: list[Kept]) -> tuple[Tensor, list[Kept]]:
        """Return the best states and the layers they skip, for one more layer."""
        exact = after[0]
        best, sets = [exact], [skipped[0]]
        for number in range(1, min(len(before) + 1, self._most + 1)):
            skips = before[number - 1], (*skipped[number - 1], layer)
            runs = (after[number], skipped[number]) if number < len(before) else skips
            state, left_out = max((runs, skips), key=lambda one: _likeness(one[0], exact))
            best.append(state)
            sets.append(left_out)
        return torch.stack(best), sets

    def _after(self, layer: int, hidden: Tensor, plan: PassPlan, caches: SequenceOf[LayerCache]) -> Tensor:
        residual = hidden.flatten(0, 1).clone()
        added = self._target.stack(caches, plan.max_len).run(layer, layer + 1, None, residual, plan)
        return (residual + added).view_as(hidden)

    def _likeliest(self, hidden: Tensor) -> Tensor:
        """Return the likeliest tokens (J, P) behind the last layer's states."""
        return self._target.read(hidden.flatten(0, 1)).argmax(-1).view(hidden.shape[:2])

    def _judged(self, kept: Kept, wanted: Tensor, found: Tensor) -> SkipSet:
        hits, count = int((wanted == found).sum()), len(wanted)
        price = self._target.with_layers(kept).pass_bytes / self._target.pass_bytes
        return SkipSet(kept, hits / (count + 1), price)


def _likeness(states: Tensor, exact: Tensor) -> float:
    return float(F.cosine_similarity(states.float(), exact.float(), dim=-1).mean())
