"""From a path to a model ready to run: its device, precision and number of threads."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from paceline.config import ModelConfig
from paceline.errors import DeviceError, InvalidParameter
from paceline.machine import usable_cores
from paceline.models.decoder import Decoder
from paceline.models.kernels import FLOAT32, INT8, kernels_for, why_slow
from paceline.models.loader import Declared, load_all_weights, load_config, load_generation_defaults
from paceline.models.threads import torch_threads
from paceline.models.weights import Dtypes, StoredWeight, WeightKind
from paceline.tokenizer import Tokenizer

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
DEVICES = ("auto", "cpu", "cuda")
TYPICAL = "model.layers.0.mlp.down_proj.weight"  # the weight whose kind stands for the model's
MOST_THREADS = 256  # of the native kernels' pool
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedModel:
    config: ModelConfig
    decoder: Decoder
    tokenizer: Tokenizer
    generation_defaults: dict[str, Any]
    extra: Mapping[str, StoredWeight] = field(default_factory=dict)  # tensors that drafters declared; read on access

    kind: WeightKind = WeightKind.FLOAT32  # of the stored weights: of most layers' where kinds differ

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the stored weights (bytes, of blocks); `decoder.dtypes` has the others."""
        return self.kind.dtype


def load_model(
    path: Path,
    *,
    dtype: str = "auto",
    device: str = "auto",
    threads: int | None = None,
    numerics: str = "exact",
    activations: str = FLOAT32,
    declared: Declared = lambda name: False,
) -> LoadedModel:
    """`declared`: whether a drafter declares a tensor that is not the decoder's, by name; any other is refused."""
    place = choose_device(device)
    if dtype != "auto" and dtype not in DTYPES:
        raise InvalidParameter("dtype", f"{dtype!r} is not one of auto, {', '.join(DTYPES)}")
    threads = set_threads(threads)
    kernels = kernels_for(place, threads, numerics, activations)
    if reason := why_slow(kernels, place):
        _warn_once(str(reason))
    config = load_config(path)
    weights, extra = load_all_weights(path, config, declared)
    tokenizer = Tokenizer.from_path(path)  # before the weights are read, which takes longest
    stored = choose_dtype(dtype, place)
    kind = weights.kinds[TYPICAL] if stored is None else WeightKind.of(stored)
    if activations == INT8 and not kind.is_blocks:
        raise InvalidParameter(
            "activations",
            f"int8 needs weights stored as blocks, and these are {kind.label}; use a GGUF file, or a folder made by "
            "paceline quantize",
        )
    try:
        with torch_threads(kernels.torch_threads):
            decoder = Decoder(config, weights, kernels, device=place, dtypes=Dtypes.of(stored, place))
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "memory" not in str(error):
            raise
        raise DeviceError(
            f"the model does not fit into {place.type} memory; try a smaller model or dtype bfloat16"
        ) from error
    return LoadedModel(config, decoder, tokenizer, load_generation_defaults(path), extra, kind)


@functools.cache
def _warn_once(message: str) -> None:
    """On stderr, unless the program that imported the package has set up logging otherwise."""
    log.warning(message)


def choose_device(name: str) -> torch.device:
    if name not in DEVICES:
        raise InvalidParameter("device", f"{name!r} is not one of {', '.join(DEVICES)}")
    if name == "cuda" and not torch.cuda.is_available():
        raise DeviceError(
            "device cuda was asked for, but torch sees no CUDA GPU; use --device cpu or run `paceline doctor`"
        )
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def choose_dtype(name: str, device: torch.device) -> torch.dtype | None:
    """auto: a CPU reads weights as the file has them (None), a GPU reads bf16."""
    if name != "auto":
        return DTYPES[name]
    return torch.bfloat16 if device.type == "cuda" else None


def set_threads(threads: int | None) -> int:
    if threads is not None and not 1 <= threads <= MOST_THREADS:
        raise InvalidParameter("threads", f"must be between 1 and {MOST_THREADS}, got {threads}")
    torch.set_num_threads(threads or usable_cores())
    return torch.get_num_threads()
