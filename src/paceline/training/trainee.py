"""The interface between the loop and a method's trainee."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

from torch import Tensor

from paceline.training.data.batch import TrainBatch


class StepLoss(NamedTuple):
    """Sums over this process's rows, on the device, unread."""

    loss: Tensor  # () sum of weighted losses, with a gradient
    weight: Tensor  # () sum of weights
    hits: Tensor  # (depth,) positions where drafter and target have the same likeliest token
    counts: Tensor  # (depth,) positions
    walked: Tensor  # () tokens committed from these anchors, had each been the start of a step
    anchors: Tensor  # ()

    @staticmethod
    def of(loss: Tensor, weight: Tensor, hit: Tensor, valid: Tensor, exists: Tensor) -> StepLoss:
        """Sum (B, A, D) weights, hits and positions that count, and (B, A) anchors that exist."""
        hits = hit & valid
        return StepLoss(
            loss=loss,
            weight=weight.sum(),
            hits=hits.sum((0, 1)),
            counts=valid.sum((0, 1)),
            walked=exists.sum() + hits.cumprod(2).sum(),
            anchors=exists.sum(),
        )


class Trainee(Protocol):
    parameters: dict[str, Tensor]  # leaves, in fp32
    taps: tuple[int, ...]

    def loss(self, batch: TrainBatch) -> StepLoss: ...

    def save(self, folder: Path, parameters: Mapping[str, Tensor] | None = None) -> None:
        """Write the folder that the drafter of this method reads."""
