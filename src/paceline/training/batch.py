"""A step's rows on the device, and random anchors in them. Every draw is keyed by seed and step: nothing to store."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.training.rows import Rows
from paceline.training.target import FrozenTarget, Hidden, positions_of


@dataclass(frozen=True)
class Batch:
    tokens: Tensor  # (B, L) long
    segments: Tensor  # (B, L)
    positions: Tensor  # (B, L) in the sequence
    answer: Tensor  # (B, L) bool
    hidden: Hidden
    dice: Tensor  # (B, L) uniform numbers, the same however the rows are spread over processes

    @property
    def follows(self) -> Tensor:
        """(B, L) bool: this token and the next are both the target's own, in one sequence."""
        inside = torch.zeros_like(self.answer)
        inside[:, :-1] = self.answer[:, :-1] & self.answer[:, 1:] & (self.segments[:, :-1] == self.segments[:, 1:])
        return inside


@dataclass(frozen=True)
class DeviceRows:
    """All rows on the device: tokens of a training fit beside any model, and no step waits for the host."""

    tokens: Tensor
    segments: Tensor
    answer: Tensor

    @staticmethod
    def of(rows: Rows, device: torch.device) -> DeviceRows:
        return DeviceRows(*(torch.from_numpy(part).to(device) for part in (rows.tokens, rows.segments, rows.answer)))

    def batch(
        self,
        which: Tensor,
        target: FrozenTarget,
        taps: tuple[int, ...],
        key: tuple[int, int],
        share: tuple[int, int] = (0, 1),
    ) -> Batch:
        """Rows `which` (global batch), of which this process takes its `share` (rank, processes)."""
        rank, world = share
        generator = torch.Generator(device=self.tokens.device)
        generator.manual_seed(key[0] << 32 | key[1])
        dice = torch.rand(len(which), self.tokens.shape[1], generator=generator, device=self.tokens.device)
        each = len(which) // world
        mine = slice(rank * each, (rank + 1) * each)
        own = which[mine]
        tokens, segments = self.tokens[own].long(), self.segments[own].long()
        positions = positions_of(segments)
        hidden = target(tokens, segments, positions, taps)
        return Batch(tokens, segments, positions, self.answer[own], hidden, dice[mine])


def anchors(batch: Batch, count: int) -> tuple[Tensor, Tensor]:
    """(B, A) places in the row that a draft may start from, drawn without replacement, and which of them exist."""
    drawn = torch.where(batch.follows, batch.dice, -1.0).topk(min(count, batch.tokens.shape[1]), dim=1)
    return drawn.indices, drawn.values >= 0
