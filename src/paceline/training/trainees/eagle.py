"""Training of EAGLE-1, EAGLE-3 and heads for multi-token prediction (MTP) with EAGLE-3's training-time test (Li et al.
2025): drafters learn on their own outputs, as FastMTP's heads do.

Index t of a row is a draft that starts behind token t + 1. Step s pairs the token t + 1 + s with the feature of t + s,
which is the target's in step 0 and the drafter's own output afterwards; the pair stands at position t + s and predicts
token t + 2 + s. It attends to the pairs of step 0 up to index t, whose features are the target's, and to the pairs of
its own draft, which are those of index t in later steps: one diagonal for each step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from paceline.drafters.eagle import checkpoint as eagle_checkpoint
from paceline.drafters.eagle.config import (
    EMBEDDING_NORM,
    FEATURE_NORM,
    LAYER,
    EagleConfig,
    published_layers,
    shapes,
)
from paceline.drafters.folder import TargetShape, draft_ids
from paceline.drafters.methods import EAGLE, EAGLE3, MTP
from paceline.drafters.mtp import checkpoint as mtp_checkpoint
from paceline.training.data.batch import TrainBatch, ahead, anchors
from paceline.training.registry import (
    MOST_TOKENS,
    MOST_WEIGHT,
    BuiltTrainee,
    TraineeContext,
    between,
    options_of,
)
from paceline.training.trainee import StepLoss
from paceline.training.trainees.losses import LossOptions, chunk_loss, draft_loss
from paceline.training.trainees.target import (
    FrozenTarget,
    LayerWeights,
    Rotary,
    additive,
    decoder_layer,
    layer_weights,
    linear,
    rms_norm,
)

FROZEN = ("lm_head.weight", "d2t")


@dataclass(frozen=True, kw_only=True)
class EagleOptions(LossOptions):
    steps: int = between(1, 64, 5)  # steps of the training-time test
    draft_vocab: int = between(2, MOST_TOKENS, 16_384)  # tokens; EAGLE-3 only, EAGLE-1 drafts all
    features: float = between(0.0, MOST_WEIGHT, 0.0)  # smooth L1 to the target's own feature: EAGLE-1's loss
    decay: float = between(0.01, 1.0, 0.8)  # weight of a step over that of the one before
    fc_norm: bool = True  # EAGLE-3.1: a norm for each tap
    norm_output: bool = True  # EAGLE-3.1: the normed output is fed back


def make_config(target: FrozenTarget, options: EagleOptions, vocab: Tensor, name: str, method: str) -> EagleConfig:
    body = target.config.drafter_layers("llama", 1, qk_norm=False)
    shape = TargetShape.of(target.config, target.embedding, name)
    if method == MTP:  # in MiMo's layout; it reads the state that every model hands out
        return EagleConfig(
            body=body, fused=False, mtp=True, feature_first=True, norm_output=True, own_head=False, target=shape
        )
    if method != EAGLE3:
        return EagleConfig(body=body, fused=False, own_head=False, target=shape)
    return EagleConfig(
        body=body,
        layer_ids=tapped_layers(target.config.num_layers),
        draft_vocab_size=len(vocab) if len(vocab) < body.vocab_size else 0,
        fc_norm=options.fc_norm,
        norm_output=options.norm_output,
        target=shape,
    )


def tapped_layers(num_layers: int) -> tuple[int, ...]:
    """Return the published layers if the target is deep enough for them."""
    layers = published_layers(num_layers)
    return layers if list(layers) == sorted(set(layers)) else (0, num_layers // 2, num_layers)


def initial(config: EagleConfig, norm: Tensor, seed: int) -> dict[str, Tensor]:
    noise = torch.Generator().manual_seed(seed)
    parameters: dict[str, Tensor] = {}
    for name, shape in shapes(config).items():
        if name in FROZEN:
            continue
        if name == "norm.weight":
            parameters[name] = norm.float().cpu().clone()
        elif len(shape) == 1:
            parameters[name] = torch.ones(shape)
        else:
            parameters[name] = torch.randn(shape, generator=noise) / math.sqrt(shape[1])
            parameters[name] *= 0.5 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
    return parameters


def fuse(taps: Tensor, norms: tuple[Tensor, ...], fc: Tensor, eps: float) -> Tensor:
    """Fuse taps of EAGLE-3, (B, L, T, H) -> (B, L, h)."""
    if norms:
        taps = torch.stack([rms_norm(taps[:, :, i], norm, eps) for i, norm in enumerate(norms)], 2)
    return linear(taps.flatten(2), fc)


def eagle_layer(
    embedded: Tensor,
    features: Tensor,
    keys: tuple[Tensor, ...],
    values: tuple[Tensor, ...],
    rotary: Rotary,
    mask: Tensor,
    weights: LayerWeights,
    norms: tuple[Tensor, ...],
    fc: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run one step over (B, L, h); return outputs before the final norm, and the step's own K and V.

    `keys` and `values` are those of the steps before, `mask` is (B, 1, L, steps * L). `norms`: EAGLE-3's of the
    feature; MTP's of the feature and of the embedding; EAGLE-1 has none.
    """
    inputs: Tensor | None = None
    if len(norms) == 2:
        halves = rms_norm(features, norms[0], eps), rms_norm(embedded, norms[1], eps)
        features = linear(torch.cat(halves, -1), fc)
    elif not norms or weights.input_norm is None:
        features = inputs = linear(torch.cat((embedded, features), -1), fc)
    else:
        inputs = torch.cat((rms_norm(embedded, weights.input_norm, eps), rms_norm(features, norms[0], eps)), -1)
    return decoder_layer(features, rotary, mask, weights, eps, features.dtype, inputs=inputs, keys=keys, values=values)


def step_mask(segments: Tensor, steps: int, dtype: torch.dtype) -> Tensor:
    """Return the mask of the last of `steps`, (B, 1, L, steps * L): causal in a sequence, then a diagonal a step."""
    length = segments.shape[1]
    at = torch.arange(length, device=segments.device)
    causal = (segments[:, :, None] == segments[:, None, :]) & (at[:, None] >= at)
    own = torch.eye(length, dtype=torch.bool, device=segments.device).expand_as(causal)
    return additive(torch.cat((causal, *[own] * (steps - 1)), 2)[:, None], dtype)


class EagleTrainee:
    def __init__(
        self,
        target: FrozenTarget,
        options: EagleOptions,
        vocab: Tensor,
        method: str,
        *,
        seed: int,
        name: str,
        compiled: bool = False,
        init_from: Path | None = None,
    ) -> None:
        self.target, self.options = target, options
        size = target.config.vocab_size
        self.config = make_config(target, options, vocab, name, method)
        self._checkpoint: Any = mtp_checkpoint if method == MTP else eagle_checkpoint
        tensors = initial(self.config, target.norm, seed)
        if init_from is not None:
            stored_config, stored = self._checkpoint.read(init_from, target.config)
            # The target need not be the one that the stored drafter was trained for.
            self.config = replace(stored_config, target=self.config.target)
            tensors = {key: tensor for key, tensor in stored.items() if key not in FROZEN}
            if "d2t" in stored:
                vocab = draft_ids(stored["d2t"])
        self.vocab = (vocab if self.config.vocab < size else torch.arange(size)).to(target.device)
        self.taps = self.config.taps(target.config.num_layers) if self.config.fused else ()
        self.parameters = {
            key: tensor.to(device=target.device, dtype=torch.float32).requires_grad_()
            for key, tensor in tensors.items()
        }
        self.head = target.head[self.vocab].contiguous()
        self.in_draft = torch.zeros(size, dtype=torch.bool, device=target.device)
        self.in_draft[self.vocab] = True
        self.eps = self.config.body.rms_norm_eps

        def compile_(function: Callable[..., Any]) -> Callable[..., Any]:
            return torch.compile(function, dynamic=False) if compiled else function

        self._fuse, self._layer, self._chunk = compile_(fuse), compile_(eagle_layer), compile_(chunk_loss)

    def outputs(self, batch: TrainBatch) -> list[Tensor]:
        """Return the outputs of every step, (B, L, h), before the final norm."""
        config, target, dtype = self.config, self.target, self.target.dtype
        length, parameters = batch.tokens.shape[1], self.parameters
        weights = layer_weights(parameters.get, LAYER)
        names = [f"{LAYER}.hidden_norm"] if config.fused else [FEATURE_NORM, EMBEDDING_NORM] if config.mtp else []
        norms, fc = tuple(parameters[f"{name}.weight"] for name in names), parameters["fc.weight"]
        if config.fused:
            names = [f"fc_norm.{i}.weight" for i in range(config.num_taps)] if config.fc_norm else []
            tap_norms = tuple(parameters[name] for name in names)
            features = self._fuse(batch.hidden.taps, tap_norms, fc, self.eps)
        else:
            features = batch.hidden.final
        outputs: list[Tensor] = []
        keys: tuple[Tensor, ...] = ()
        values: tuple[Tensor, ...] = ()
        for step in range(self.options.steps):
            tokens = F.pad(batch.tokens, (0, step + 1))[:, step + 1 : step + 1 + length]
            mask = step_mask(batch.segments, step + 1, dtype)
            out, k, v = self._layer(
                target.embedding[tokens],
                features,
                keys,
                values,
                target.rotary(batch.positions + step),
                mask,
                weights,
                norms,
                fc,
                self.eps,
            )
            keys, values = (*keys, k), (*values, v)
            outputs.append(out)
            features = self.normed(out) if config.norm_output else out
        return outputs

    def normed(self, out: Tensor) -> Tensor:
        """Return the head's input."""
        if "norm.weight" not in self.parameters:
            return out
        return rms_norm(out, self.parameters["norm.weight"], self.eps)

    def loss(self, batch: TrainBatch) -> StepLoss:
        options = self.options
        at, exists = anchors(batch, options.anchors)  # tokens behind which a draft starts: pairs of index at - 1
        exists = exists & (at > 0) & (batch.segments.gather(1, (at - 1).clamp(min=0)) == batch.segments.gather(1, at))
        places = ahead(batch, at, exists, options.steps)
        index = (at - 1).clamp(min=0)[:, :, None].expand(-1, -1, self.head.shape[1])
        outs = torch.stack([out.gather(1, index) for out in self.outputs(batch)], 2)  # (B, A, S, h)
        known = self.in_draft[places.wanted]
        steps = torch.arange(options.steps, device=at.device)
        weight = places.valid * known * options.decay**steps
        states = places.states(batch.hidden.final)
        losses = draft_loss(
            self.normed(outs).flatten(0, 2),
            self.head,
            states,
            weight.flatten(),
            options,
            chunk=self._chunk,
        )
        loss = losses.loss
        if options.features:
            away = F.smooth_l1_loss(outs.flatten(0, 2).float(), states.float(), reduction="none").mean(1)
            loss = loss + options.features * (weight.flatten() * away).sum()
        return StepLoss.of(loss, weight, losses.hit.view_as(weight) & known, places.valid, exists)

    def save(self, folder: Path, parameters: Mapping[str, Tensor] | None = None) -> None:
        dtype = torch.bfloat16
        tensors = {name: one.detach().to(dtype) for name, one in (parameters or self.parameters).items()}
        if self.config.own_head:
            tensors["lm_head.weight"] = self.head.to(dtype)
        if len(self.vocab) < self.target.config.vocab_size:
            tensors["d2t"] = self.vocab.cpu() - torch.arange(len(self.vocab))
        self._checkpoint.write(folder, self.config, tensors)


# Options of a method that differ from EAGLE-3's: EAGLE-1's loss; the few steps of FastMTP.
DEFAULTS: dict[str, dict[str, Any]] = {
    EAGLE: {"steps": 3, "features": 1.0, "ce": 0.1, "tv": 0.0},
    MTP: {"steps": 3},
}


def build(context: TraineeContext, *, method: str) -> BuiltTrainee:
    whole = {} if method == EAGLE3 else {"draft_vocab": context.target.config.vocab_size}
    options = options_of(EagleOptions, {**DEFAULTS.get(method, {}), **context.sizes}, whole)
    trainee = EagleTrainee(
        context.target,
        options,
        context.vocabulary(options.draft_vocab),
        method,
        seed=context.seed,
        name=context.name,
        compiled=context.compiled,
        init_from=context.init_from,
    )
    return BuiltTrainee(trainee, asdict(options), None, 60 if method == EAGLE3 else 30)
