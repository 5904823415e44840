"""Training of Medusa (Cai et al. 2024).

Head i reads the hidden state from which token t + 1 was chosen, and learns the target's distribution of token
t + 2 + i. Heads share the target's own output weights, so a head is one small matrix.
"""

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
from paceline.training.trainees.target import FrozenTarget, linear


@dataclass(frozen=True, kw_only=True)
class MedusaOptions(LossOptions):
    heads: int = between(1, MAX_K, 4)
    layers: int = between(1, MOST_LAYERS, 1)  # blocks of a head
    decay: float = between(0.01, 1.0, 0.8)  # weight of a head over that of the one before


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
        initial = load_heads(init_from, target.config) if init_from is not None else None
        if initial is not None:
            if any(head.output is not None for head in initial):
                raise InvalidParameter(
                    "init_from", f"{init_from} holds heads with output weights of their own, which are not trained here"
                )
            options = replace(options, heads=len(initial), layers=len(initial[0].blocks))
        self.target, self.options, self.name = target, options, name
        hidden = target.config.hidden_size
        self.parameters: dict[str, Tensor] = {}
        for i in range(options.heads):
            for j in range(options.layers):
                # A weight of zero makes a block the identity: the head begins as the target's own.
                weight, bias = torch.zeros(hidden, hidden), torch.zeros(hidden)
                if initial is not None:
                    weight, stored = initial[i].blocks[j]
                    bias = bias if stored is None else stored
                self.parameters |= {f"{i}.{j}.linear.weight": weight, f"{i}.{j}.linear.bias": bias}
        self.parameters = {
            key: one.to(device=target.device, dtype=torch.float32).requires_grad_()
            for key, one in self.parameters.items()
        }
        self._chunk = torch.compile(chunk_loss, dynamic=False) if compiled else chunk_loss

    def heads(self, x: Tensor) -> Tensor:
        """Return the inputs of the target's output weights, (..., H) -> (..., heads, H)."""
        outputs = []
        for i in range(self.options.heads):
            y = x
            for j in range(self.options.layers):
                weight, bias = (self.parameters[f"{i}.{j}.linear.{part}"] for part in ("weight", "bias"))
                y = y + F.silu(linear(y, weight, bias))
            outputs.append(y)
        return torch.stack(outputs, -2)

    def loss(self, batch: TrainBatch) -> StepLoss:
        """Return the loss of all heads. An anchor is the newest token; head i predicts the i + 1st token behind it."""
        options = self.options
        at, exists = anchors(batch, options.anchors)
        exists = exists & (at > 0) & (batch.segments.gather(1, (at - 1).clamp(min=0)) == batch.segments.gather(1, at))
        places = ahead(batch, at, exists, options.heads)
        final = batch.hidden.final
        before = final.gather(1, (at - 1).clamp(min=0)[:, :, None].expand(-1, -1, final.shape[2]))
        weight = places.valid * options.decay ** torch.arange(options.heads, device=at.device)
        losses = draft_loss(
            self.heads(before).flatten(0, 2),
            self.target.head,
            places.states(final),
            weight.flatten(),
            options,
            chunk=self._chunk,
        )
        return StepLoss.of(losses.loss, weight, losses.hit.view_as(weight), places.valid, exists)

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
