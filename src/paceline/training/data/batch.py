"""Rows of a step on the device, and random anchors in them. Seed and step are the key of every draw."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.training.data.rows import TokenRows
from paceline.training.trainees.target import FrozenTarget, Hidden, positions_of


@dataclass(frozen=True)
class TrainBatch:
    tokens: Tensor  # (B, L) long
    segments: Tensor  # (B, L)
    positions: Tensor  # (B, L) in the sequence
    answer: Tensor  # (B, L) bool
    hidden: Hidden
    dice: Tensor  # (B, L) uniform numbers, the same however the rows are spread over processes

    @property
    def follows(self) -> Tensor:
        """Return (B, L) bool: this token and the next are both the target's own, in one sequence."""
        inside = torch.zeros_like(self.answer)
        inside[:, :-1] = self.answer[:, :-1] & self.answer[:, 1:] & (self.segments[:, :-1] == self.segments[:, 1:])
        return inside


@dataclass(frozen=True)
class DeviceRows:
    """All rows, on the device: tokens of a training fit beside any model, and no step waits for the host."""

    tokens: Tensor
    segments: Tensor
    answer: Tensor

    @staticmethod
    def of(rows: TokenRows, device: torch.device) -> DeviceRows:
        return DeviceRows(*(torch.from_numpy(part).to(device) for part in (rows.tokens, rows.segments, rows.answer)))

    def batch(
        self,
        which: Tensor,
        target: FrozenTarget,
        taps: tuple[int, ...],
        key: tuple[int, int],
        share: tuple[int, int] = (0, 1),
    ) -> TrainBatch:
        """Return rows `which` of the global batch, of which this process takes its `share` (rank, processes)."""
        rank, world = share
        generator = torch.Generator(device=self.tokens.device)
        generator.manual_seed(key[0] << 32 | key[1])
        dice = torch.rand(len(which), self.tokens.shape[1], generator=generator, device=self.tokens.device)
        each = len(which) // world
        part = slice(rank * each, (rank + 1) * each)
        own = which[part]
        tokens, segments = self.tokens[own].long(), self.segments[own].long()
        positions = positions_of(segments)
        hidden = target(tokens, segments, positions, taps)
        return TrainBatch(tokens, segments, positions, self.answer[own], hidden, dice[part])


def anchors(batch: TrainBatch, count: int) -> tuple[Tensor, Tensor]:
    """Return (B, A) places in the row, drawn without replacement, from which drafts may start, and which exist."""
    drawn = torch.where(batch.follows, batch.dice, -1.0).topk(min(count, batch.tokens.shape[1]), dim=1)
    return drawn.indices, drawn.values >= 0


class Ahead(NamedTuple):
    """Positions behind anchors, (B, A, D) each. A drafter predicts at `place` the target's token at `place` + 1."""

    place: Tensor
    valid: Tensor  # bool: the answer reaches the next token
    known: Tensor  # the token at `place`
    wanted: Tensor  # the token behind it

    def states(self, final: Tensor) -> Tensor:
        """Return the target's head inputs at `place`, (B * A * D, H), from (B, L, H)."""
        flat = self.place.flatten(1)
        return final.gather(1, flat[:, :, None].expand(-1, -1, final.shape[2])).flatten(0, 1)


def ahead(batch: TrainBatch, at: Tensor, exists: Tensor, depth: int) -> Ahead:
    """Return the first `depth` positions from the anchors `at` on, themselves included."""
    length = batch.tokens.shape[1]
    place = at[:, :, None] + torch.arange(depth, device=at.device)
    inside = place < length - 1
    place = place.clamp(max=length - 2)
    flat = place.flatten(1)
    same = batch.segments.gather(1, flat).view_as(place) == batch.segments.gather(1, at)[:, :, None]
    valid = exists[:, :, None] & inside & same & batch.follows.gather(1, flat).view_as(place)
    known, wanted = (batch.tokens.gather(1, flat + shift).view_as(place) for shift in (0, 1))
    return Ahead(place, valid.cumprod(2).bool(), known, wanted)
