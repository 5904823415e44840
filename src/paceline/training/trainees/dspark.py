"""Training of DSpark: blocks from random anchors, all positions of a block at once (DFlash and DSpark, 2026).

Context K/V do not depend on the anchor, so they are computed once a row; all blocks of a row share one attention whose
mask lets a block see the context before its anchor and itself. Parameters carry the names of the checkpoint.
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

from paceline.config import MAX_K
from paceline.drafters.block import checkpoint as dspark_checkpoint
from paceline.drafters.block.config import MASKS, TAP_NORM, W1, W2, DSparkConfig, shapes
from paceline.drafters.folder import TargetShape, draft_ids
from paceline.errors import InvalidParameter
from paceline.models.spec import ModelConfig
from paceline.training.data.batch import TrainBatch, ahead, anchors
from paceline.training.registry import MOST_TOKENS, BuiltTrainee, TraineeContext, between, options_of
from paceline.training.trainee import StepLoss
from paceline.training.trainees.losses import LossOptions, chunk_loss, draft_loss
from paceline.training.trainees.target import (
    FrozenTarget,
    LayerWeights,
    Rotary,
    additive,
    decoder_layer,
    heads,
    layer_weights,
    linear,
    rms_norm,
    rotated,
)

Parameters = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class DSparkOptions(LossOptions):
    layers: int = between(1, 64, 5)
    block: int = between(2, MAX_K + 1, 8)
    num_taps: int = between(1, 64, 5)
    rank: int = between(0, 4096, 128)  # rank of the Markov head; 0 trains DFlash
    draft_vocab: int = between(2, MOST_TOKENS, 16_384)
    decay: float = between(0.01, 1e6, 4.0)  # position i of a block weighs exp(-i / decay)
    portable: bool = False  # only what vLLM's class has: no norm per tap, masks are the embedding of one token


def make_config(target: FrozenTarget, options: DSparkOptions, vocab: Tensor, name: str) -> DSparkConfig:
    body = target.config
    return DSparkConfig(
        body=body.drafter_layers("qwen3", options.layers, qk_norm=True),
        block_size=options.block,
        taps=spread_taps(body, options.num_taps),
        mask_token_id=_spare_token(vocab, body.vocab_size) if options.portable else None,
        draft_vocab_size=len(vocab),
        markov_rank=options.rank,
        tap_norm=not options.portable,
        mask_embedding=not options.portable,
        markov_over_draft_vocab=options.rank > 0,
        target=TargetShape.of(body, target.embedding, name),
    )


def _spare_token(vocab: Tensor, vocab_size: int) -> int:
    """Return the first token that answers do not contain, or 0: it stands for tokens that are not known yet."""
    used = set(vocab.tolist())
    return next((token for token in range(vocab_size) if token not in used), 0)


def spread_taps(config: ModelConfig, count: int) -> tuple[int, ...]:
    """Return `count` layers, evenly from the input of layer 1 to that of the last."""
    last = config.num_layers - 1
    if not 1 <= count <= last:
        raise InvalidParameter("taps", f"must be between 1 and {last}, got {count}")
    return tuple(sorted({1 + round(i * (last - 1) / max(count - 1, 1)) for i in range(count)}))


def initial(config: DSparkConfig, vocab: Tensor, norm: Tensor, seed: int) -> Parameters:
    """Return initial parameters for the draft tokens `vocab` (Vd,), ascending; `norm` is the target's final one."""
    noise = torch.Generator().manual_seed(seed)
    parameters: Parameters = {}
    for name, shape in shapes(config).items():
        if name == "d2t":
            parameters[name] = vocab.cpu().long() - torch.arange(len(vocab))
        elif name == "norm.weight":
            parameters[name] = norm.float().cpu().clone()
        elif name.endswith("norm.weight") or name == TAP_NORM or "layernorm" in name:
            parameters[name] = torch.ones(shape)
        elif name == W2:
            parameters[name] = torch.zeros(shape)
        else:
            parameters[name] = torch.randn(shape, generator=noise) * _spread(name, shape, config.body.num_layers)
    return parameters


def _spread(name: str, shape: tuple[int, ...], layers: int) -> float:
    if name in (MASKS, W1):
        return 0.1
    return (
        1 / math.sqrt(shape[1]) / (math.sqrt(2 * layers) if name.endswith(("o_proj.weight", "down_proj.weight")) else 1)
    )


def fuse(taps: Tensor, tap_norm: Tensor | None, fc: Tensor, norm: Tensor, eps: float) -> Tensor:
    """Fuse taps, (..., T, H) -> (..., H): the input of the drafter's layers for a committed position."""
    if tap_norm is not None:
        taps = rms_norm(taps, tap_norm, eps)
    return rms_norm(linear(taps.flatten(-2), fc), norm, eps)


def context_kv(context: Tensor, rotary: Rotary, w: LayerWeights, eps: float) -> tuple[Tensor, Tensor]:
    """Return K and V (B, kv heads, L, d) of committed positions in one layer."""
    head_dim = 2 * rotary[0].shape[-1]
    k, v = heads(linear(context, w.k), head_dim), heads(linear(context, w.v), head_dim)
    return rotated(k if w.k_norm is None else rms_norm(k, w.k_norm, eps), rotary), v


def context_and_layer(
    x: Tensor,
    context: Tensor,
    at_context: Rotary,
    at_block: Rotary,
    mask: Tensor,
    w: LayerWeights,
    eps: float,
    dtype: torch.dtype,
) -> Tensor:
    """Run a layer of blocks (B, N, H) in fp32 over the context's K and V and their own."""
    k, v = context_kv(context, at_context, w, eps)
    return decoder_layer(x, at_block, mask, w, eps, dtype, keys=(k,), values=(v,))[0]


class DSparkModel:
    """The drafter's arithmetic over parameters by name, for the trainer and for the walk that measures it."""

    def __init__(self, config: DSparkConfig, target: FrozenTarget, *, compiled: bool = False) -> None:
        self.config, self.target = config, target
        self.eps, self.dtype = config.body.rms_norm_eps, target.dtype

        def compile_(function: Callable[..., Any]) -> Callable[..., Any]:
            return torch.compile(function, dynamic=False) if compiled else function

        self._fuse, self._layer, self.chunk = compile_(fuse), compile_(context_and_layer), compile_(chunk_loss)

    def context(self, parameters: Mapping[str, Tensor], taps: Tensor, *, compiled: bool = True) -> Tensor:
        run = self._fuse if compiled else fuse
        context: Tensor = run(
            taps, parameters.get(TAP_NORM), parameters["fc.weight"], parameters["hidden_norm.weight"], self.eps
        )
        return context

    def blocks(self, parameters: Mapping[str, Tensor], anchor_tokens: Tensor) -> Tensor:
        """Return the input of the first layer, (B, A) -> (B, A * g, H) in fp32."""
        first = self.target.embedding[anchor_tokens].float()
        masks = parameters.get(MASKS)
        if masks is None:
            assert self.config.mask_token_id is not None
            masks = self.target.embedding[self.config.mask_token_id].float().expand(self.config.block_size - 1, -1)
        rest = masks.expand(*anchor_tokens.shape, *masks.shape)
        return torch.cat((first[:, :, None], rest), 2).flatten(1, 2)

    def hidden(
        self,
        parameters: Mapping[str, Tensor],
        context: Tensor,
        positions: Tensor,
        anchor_tokens: Tensor,
        anchor_positions: Tensor,
        seen: Tensor,
    ) -> Tensor:
        """Return the head's input, (B, A, g, H). `seen` (B, A, L): context positions that a block sees."""
        size, (rows, count) = self.config.block_size, anchor_tokens.shape
        steps = torch.arange(size, device=context.device)
        at_block = self.target.rotary((anchor_positions[:, :, None] + steps).flatten(1))
        at_context = self.target.rotary(positions)
        block = torch.arange(count, device=context.device).repeat_interleave(size)
        own = (block[:, None] == block).expand(rows, -1, -1)
        mask = additive(torch.cat((seen.repeat_interleave(size, 1), own), 2)[:, None], self.dtype)
        x = self.blocks(parameters, anchor_tokens)
        for index in range(self.config.body.num_layers):
            weights = layer_weights(parameters.get, f"layers.{index}")
            x = self._layer(x, context, at_context, at_block, mask, weights, self.eps, self.dtype)
        normed = rms_norm(x, parameters["norm.weight"], self.eps).to(self.dtype)
        return normed.view(rows, count, size, -1)


class DSparkTrainee:
    """A block drafter in training."""

    def __init__(
        self,
        target: FrozenTarget,
        options: DSparkOptions,
        vocab: Tensor,
        *,
        seed: int,
        name: str,
        compiled: bool = False,
    ) -> None:
        self.target, self.options, self.vocab = target, options, vocab.to(target.device)
        self.config = make_config(target, options, vocab, name)
        self._prepare(initial(self.config, vocab, target.norm, seed), compiled)

    def _prepare(self, tensors: Parameters, compiled: bool) -> None:
        target, device = self.target, self.target.device
        self.model = DSparkModel(self.config, target, compiled=compiled)
        self.taps = self.config.taps
        self.parameters = {
            name: tensor.to(device=device, dtype=torch.float32).requires_grad_()
            for name, tensor in tensors.items()
            if name != "d2t"
        }
        self.head = target.head[self.vocab].contiguous()
        self.draft_id = torch.full((target.config.vocab_size,), -1, dtype=torch.long, device=device)
        self.draft_id[self.vocab] = torch.arange(len(self.vocab), device=device)

    @classmethod
    def from_folder(
        cls,
        folder: Path,
        target: FrozenTarget,
        options: DSparkOptions | None = None,
        *,
        compiled: bool = False,
        name: str = "",
    ) -> DSparkTrainee:
        """Load a checkpoint to train it further or to measure it; sizes are its own. `name` is that of the target,
        which need not be the one that the checkpoint was trained for."""
        from paceline.drafters.block.config import check_target

        config, tensors = dspark_checkpoint.read(folder)
        check_target(config, target.config, folder)
        trainee = cls.__new__(cls)
        base = options or DSparkOptions()
        trainee.options = replace(
            base,
            layers=config.body.num_layers,
            block=config.block_size,
            num_taps=len(config.taps),
            rank=config.markov_rank,
            draft_vocab=config.draft_vocab_size,
        )
        offsets = tensors.get("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long))
        shape = TargetShape.of(target.config, target.embedding, name or config.target.name)
        trainee.target, trainee.config = target, replace(config, target=shape)
        trainee.vocab = draft_ids(offsets).to(target.device)
        trainee._prepare(tensors, compiled)
        return trainee

    def loss(self, batch: TrainBatch) -> StepLoss:
        options, size = self.options, self.config.block_size
        at, exists = anchors(batch, options.anchors)  # (B, A)
        context = self.model.context(self.parameters, batch.hidden.taps)
        length = batch.tokens.shape[1]
        place = torch.arange(length, device=at.device)
        same = batch.segments[:, None, :] == batch.segments.gather(1, at)[:, :, None]
        seen = same & (place < at[:, :, None])  # (B, A, L)
        anchor_tokens, anchor_positions = batch.tokens.gather(1, at), batch.positions.gather(1, at)
        hidden = self.model.hidden(self.parameters, context, batch.positions, anchor_tokens, anchor_positions, seen)

        places = ahead(batch, at, exists, size)
        known = self.draft_id[places.wanted] >= 0
        weight = places.valid * known * torch.exp(-torch.arange(size, device=at.device) / options.decay)
        features = markov_features(self.parameters, self.draft_id, places.known.flatten(), self.model.dtype)
        losses = draft_loss(
            hidden.flatten(0, 2),
            self.head,
            places.states(batch.hidden.final),
            weight.flatten(),
            options,
            previous=features,
            w2=self.parameters.get(W2),
            chunk=self.model.chunk,
        )
        return StepLoss.of(losses.loss, weight, losses.hit.view_as(weight) & known, places.valid, exists)

    def save(self, folder: Path, parameters: Mapping[str, Tensor] | None = None, *, int8: bool = False) -> None:
        tensors = {name: tensor.detach().float() for name, tensor in (parameters or self.parameters).items()}
        if len(self.vocab) < self.target.config.vocab_size:
            tensors["d2t"] = self.vocab.cpu() - torch.arange(len(self.vocab))
        if not int8:
            tensors = {name: one if one.dim() < 2 else one.to(torch.bfloat16) for name, one in tensors.items()}
        dspark_checkpoint.write(folder, self.config, tensors, int8=int8)


def markov_features(
    parameters: Mapping[str, Tensor], draft_id: Tensor, previous: Tensor, dtype: torch.dtype
) -> Tensor | None:
    """Return W1 of the tokens before, (N, r); zero for tokens outside the draft vocabulary."""
    w1 = parameters.get(W1)
    if w1 is None:
        return None
    ids = draft_id[previous] if len(w1) != len(draft_id) else previous
    return (F.embedding(ids.clamp(min=0), w1) * (ids >= 0)[:, None]).to(dtype)


def build(context: TraineeContext, **fixed: int) -> BuiltTrainee:
    from paceline.training.acceptance import by_depth, tau, walk

    options = options_of(DSparkOptions, context.sizes, fixed)
    common: dict[str, Any] = {"compiled": context.compiled, "name": context.name}
    if context.init_from is not None:
        trainee = DSparkTrainee.from_folder(context.init_from, context.target, options, **common)
    else:
        vocabulary = context.vocabulary(options.draft_vocab)
        trainee = DSparkTrainee(context.target, options, vocabulary, seed=context.seed, **common)

    depth = trainee.options.block - 1

    def measure(parameters: Mapping[str, Tensor]) -> dict[str, Any]:
        chain = walk(trainee, context.answers, depth, chain=True, parameters=parameters)
        tree = walk(trainee, context.answers, 60, parameters=parameters)
        return {
            f"τ chain {depth}": tau(chain),
            "τ tree 60": tau(tree),
            "by depth": [round(one, 3) for one in by_depth(chain)],
        }

    return BuiltTrainee(trainee, asdict(trainee.options), measure if context.answers else None, 60)
