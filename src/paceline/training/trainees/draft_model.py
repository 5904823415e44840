"""Training of a draft model: some layers of the target, with its embedding and head, distilled from the whole of it.

It begins as the target with layers left out, evenly spaced, and learns the target's distribution at every token of its
answers. Embedding and head stay the target's own, and the folder is a model folder like any other.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from paceline.errors import InvalidParameter, UnsupportedModel
from paceline.models.families import family_of
from paceline.models.load.hf_folder import WEIGHTS
from paceline.models.load.loader import load_config, load_weights
from paceline.models.load.placement import expected_shapes
from paceline.models.load.quantized_config import KEYS
from paceline.training.data.batch import TrainBatch, ahead, anchors
from paceline.training.registry import BuiltTrainee, TraineeContext, between, options_of
from paceline.training.trainee import StepLoss
from paceline.training.trainees.losses import LossOptions, chunk_loss, draft_loss
from paceline.training.trainees.target import FrozenTarget, additive, decoder_layer, layer_weights, rms_norm


@dataclass(frozen=True, kw_only=True)
class DraftOptions(LossOptions):
    layers: int = between(1, 1024, 4)
    anchors: int = between(1, 1 << 16, 128)  # tokens a row that count


class DraftTrainee:
    taps: tuple[int, ...] = ()

    def __init__(
        self, target: FrozenTarget, options: DraftOptions, *, compiled: bool = False, init_from: Path | None = None
    ) -> None:
        config, source = target.config, init_from or target.path
        source_config = load_config(source)
        if init_from is not None:
            if expected_shapes(source_config.of_depth(1)) != expected_shapes(config.of_depth(1)):
                raise InvalidParameter("init_from", f"{init_from} is no draft model of this target: their sizes differ")
            options = replace(options, layers=source_config.num_layers)
        self.target, self.options = target, options
        if len(set(config.layers)) > 1 or config.windows or not family_of(config.architecture).is_plain:
            raise UnsupportedModel(
                f"a draft model of {target.path} cannot be trained: its layers have windows, differ from each other or "
                "are stored otherwise than Llama's; train a drafter that reads hidden states instead (eagle3, dspark)"
            )
        if not 1 <= options.layers < config.num_layers:
            raise InvalidParameter("layers", f"must be between 1 and {config.num_layers - 1}, got {options.layers}")
        weights = load_weights(source, source_config)
        last = source_config.num_layers - 1
        chosen = [round(i * last / max(options.layers - 1, 1)) for i in range(options.layers)]
        self.parameters = {"model.norm.weight": weights["model.norm.weight"].numbers()}
        for new, old in enumerate(chosen):
            at = f"model.layers.{old}."
            self.parameters |= {
                f"model.layers.{new}.{name.removeprefix(at)}": weights[name].numbers()
                for name in weights
                if name.startswith(at)
            }
        self.parameters = {
            name: one.to(device=target.device, dtype=torch.float32, copy=True).requires_grad_()
            for name, one in self.parameters.items()
        }
        self._layer = torch.compile(decoder_layer, dynamic=False) if compiled else decoder_layer
        self._chunk = torch.compile(chunk_loss, dynamic=False) if compiled else chunk_loss

    def hidden(self, batch: TrainBatch) -> Tensor:
        """Return the head's input, (B, L, H)."""
        config, target = self.target.config, self.target
        length = batch.tokens.shape[1]
        at = torch.arange(length, device=batch.tokens.device)
        seen = (batch.segments[:, :, None] == batch.segments[:, None, :]) & (at[:, None] >= at)
        mask, rotary = additive(seen[:, None], target.dtype), target.rotary(batch.positions)
        x = target.embed(batch.tokens)
        for index in range(self.options.layers):
            weights = layer_weights(self.parameters.get, f"model.layers.{index}")
            spec = config.layer
            x, _, _ = self._layer(x, rotary, mask, weights, config.rms_norm_eps, target.dtype, spec=spec)
        return rms_norm(x, self.parameters["model.norm.weight"], config.rms_norm_eps)

    def loss(self, batch: TrainBatch) -> StepLoss:
        options = self.options
        at, exists = anchors(batch, options.anchors)
        places = ahead(batch, at, exists, 1)
        weight = places.valid.float()
        losses = draft_loss(
            places.states(self.hidden(batch)),
            self.target.head,
            places.states(batch.hidden.final),
            weight.flatten(),
            options,
            chunk=self._chunk,
        )
        return StepLoss.of(losses.loss, weight, losses.hit.view_as(weight), places.valid, exists)

    def save(self, folder: Path, parameters: Mapping[str, Tensor] | None = None) -> None:
        """Write a model folder: config and tokenizer are the target's, with fewer layers."""
        source = self.target.path
        if not source.is_dir():
            raise UnsupportedModel(
                f"{source} is not a folder; train a draft model from the Hugging Face folder instead"
            )
        folder.mkdir(parents=True, exist_ok=True)
        for file in source.iterdir():
            if (
                file.suffix in (".json", ".jinja", ".model")
                and "safetensors" not in file.name
                and file.name != "paceline.json"
            ):
                shutil.copy(file, folder / file.name)
        config = json.loads((source / "config.json").read_text(encoding="utf-8"))
        config = {key: value for key, value in config.items() if key not in KEYS}  # its weights are plain numbers
        config |= {"num_hidden_layers": self.options.layers, "torch_dtype": "bfloat16"}
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        tensors = {
            name: one.detach().to("cpu", torch.bfloat16) for name, one in (parameters or self.parameters).items()
        }
        tensors["model.embed_tokens.weight"] = self.target.embedding.to("cpu", torch.bfloat16)
        if not self.target.config.tie_embeddings:
            tensors["lm_head.weight"] = self.target.stored_head.to("cpu", torch.bfloat16)
        save_file({name: one.contiguous() for name, one in tensors.items()}, folder / WEIGHTS, {"format": "pt"})


def build(context: TraineeContext) -> BuiltTrainee:
    options = options_of(DraftOptions, context.sizes)
    trainee = DraftTrainee(context.target, options, compiled=context.compiled, init_from=context.init_from)
    return BuiltTrainee(trainee, asdict(trainee.options), None, 5)
