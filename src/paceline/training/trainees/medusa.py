"""Training Medusa (Cai et al. 2024): head i reads the hidden state behind which token t + 1 was picked, and learns the
target's distribution of token t + 2 + i. Heads share the target's own output weights, so a head is one small matrix."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from paceline.config import MAX_K
from paceline.drafters.heads.checkpoint import MOST_LAYERS, MedusaHead, load_heads, save_heads
from paceline.errors import InvalidParameter
from paceline.training.data.batch import TrainBatch, ahead, anchors
from paceline.training.registry import BuiltTrainee, TraineeContext, between, options_of
from paceline.training.trainee import StepLoss
from paceline.training.trainees.losses import LossOptions, chunk_loss, draft_loss
from paceline.training.trainees.target import FrozenTarget


@dataclass(frozen=True, kw_only=True)
class MedusaOptions(LossOptions):
    heads: int = between(1, MAX_K, 4)
    layers: int = between(1, MOST_LAYERS, 1)  # blocks of a head
    decay: float = between(0.01, 1.0, 0.8)  # of the weight, from head to head


class MedusaTrainee:
    taps: tuple[int, ...] = ()

    def __init__(
        self,
        target: FrozenTarget,
        options: MedusaOptions,
        *,
        name: str,
        compiled: bool = False,
        init_from: Path | None = None,
    ) -> None:
        given = load_heads(init_from, target.config) if init_from is not None else None
        if given is not None:
            if any(head.output is not None for head in given):
                raise InvalidParameter(
                    "init_from", f"{init_from} holds heads with output weights of their own, which are not trained here"
                )
            options = replace(options, heads=len(given), layers=len(given[0].blocks))
        self.target, self.options, self.name = target, options, name
        hidden = target.config.hidden_size
        self.parameters: dict[str, Tensor] = {}
        for i in range(options.heads):
            for j in range(options.layers):
                # A weight of zero makes a block the identity: the head begins as the target's own.
                weight, bias = torch.zeros(hidden, hidden), torch.zeros(hidden)
                if given is not None:
                    weight, stored = given[i].blocks[j]
                    bias = bias if stored is None else stored
                self.parameters |= {f"{i}.{j}.linear.weight": weight, f"{i}.{j}.linear.bias": bias}
        self.parameters = {
            key: one.to(device=target.device, dtype=torch.float32).requires_grad_()
            for key, one in self.parameters.items()
        }
        self._chunk = torch.compile(chunk_loss, dynamic=False) if compiled else chunk_loss

    def heads(self, x: Tensor) -> Tensor:
        """(..., H) -> (..., heads, H), the inputs of the target's output weights."""
        found = []
        for i in range(self.options.heads):
            y = x
            for j in range(self.options.layers):
                weight, bias = (self.parameters[f"{i}.{j}.linear.{part}"].to(x.dtype) for part in ("weight", "bias"))
                y = y + F.silu(F.linear(y, weight, bias))
            found.append(y)
        return torch.stack(found, -2)

    def loss(self, batch: TrainBatch) -> StepLoss:
        """An anchor is the newest token: the state before it picked it, and head i predicts the i + 1st behind it."""
        options = self.options
        at, exists = anchors(batch, options.anchors)
        exists = exists & (at > 0) & (batch.segments.gather(1, (at - 1).clamp(min=0)) == batch.segments.gather(1, at))
        there = ahead(batch, at, exists, options.heads)
        final = batch.hidden.final
        before = final.gather(1, (at - 1).clamp(min=0)[:, :, None].expand(-1, -1, final.shape[2]))
        weight = there.valid * options.decay ** torch.arange(options.heads, device=at.device)
        found = draft_loss(
            self.heads(before).flatten(0, 2),
            self.target.head,
            there.states(final),
            weight.flatten(),
            options,
            chunk=self._chunk,
        )
        return StepLoss.of(found.loss, weight, found.hit.view_as(weight), there.valid, exists)

    def save(self, folder: Path, parameters: Mapping[str, Tensor] | None = None) -> None:
        chosen = {name: one.detach().cpu() for name, one in (parameters or self.parameters).items()}
        heads = [
            MedusaHead(
                tuple(
                    (chosen[f"{i}.{j}.linear.weight"], chosen[f"{i}.{j}.linear.bias"])
                    for j in range(self.options.layers)
                ),
                None,
            )
            for i in range(self.options.heads)
        ]
        save_heads(folder, heads, self.name)


def build(context: TraineeContext) -> BuiltTrainee:
    options = options_of(MedusaOptions, context.sizes)
    trainee = MedusaTrainee(
        context.target, options, name=context.name, compiled=context.compiled, init_from=context.init_from
    )
    return BuiltTrainee(trainee, asdict(trainee.options), None, 30)
