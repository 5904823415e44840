"""A model that is ready to run: opened from its path, with its device, precision and number of threads."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch

from paceline.errors import DeviceError, InvalidParameter
from paceline.models.decoder import Decoder
from paceline.models.kernels import FLOAT32, INT8, Kernels, kernels_for, why_slow
from paceline.models.load.loader import (
    Declared,
    Weights,
    load_all_weights,
    load_config,
    load_generation_defaults,
    load_notes,
    load_quantization,
    parsed_once,
)
from paceline.models.spec import ModelConfig
from paceline.models.weights import MIDDLE, Dtypes, StoredWeight, WeightKind
from paceline.platform.cpu import usable_cores
from paceline.platform.garbage import no_collection
from paceline.platform.threads import torch_threads
from paceline.text.tokenizer import Tokenizer

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DEVICES = ("auto", "cpu", "cuda")
TYPICAL = "model.layers.0.mlp.down_proj.weight"  # the weight whose kind is reported as the model's
MOST_THREADS = 256  # threads of the native kernels' pool
CPU_KV_DTYPES = {"float32": None, "bfloat16": torch.bfloat16, "int8": torch.int8}
GPU_KV_DTYPES = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn}  # vLLM's spelling is the last
OTHER_KV_DTYPES = ("bfloat16", "int8", "fp8")  # that make another target
PRODUCTS = {  # products of a layer, and the weights of each
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "output": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedModel:
    config: ModelConfig
    decoder: Decoder
    tokenizer: Tokenizer
    generation_defaults: dict[str, Any]
    extra: Mapping[str, StoredWeight] = field(default_factory=dict)  # tensors that drafters declared; read on access

    kind: WeightKind = WeightKind.FLOAT32  # kind of most layers' weights in memory
    notes: tuple[str, ...] = ()  # for the user: where the model is not quite what its checkpoint asks for

    @property
    def kv_dtype(self) -> str:
        """Return bfloat16, int8 or fp8, which are other targets, or auto: the dtype of the computation."""
        dtypes, names = self.decoder.dtypes, CPU_KV_DTYPES | GPU_KV_DTYPES
        return next((name for name, dtype in names.items() if dtype is dtypes.cache is not dtypes.compute), "auto")


def load_model(
    path: Path,
    *,
    dtype: str = "auto",
    device: str = "auto",
    threads: int | None = None,
    activations: str = FLOAT32,
    kv_dtype: str = "auto",
    declared: Declared = lambda name: False,
    tokenizer: Path | None = None,
) -> LoadedModel:
    """Open a model. `declared`: whether a drafter declares a tensor that the decoder has not; others are refused.
    `tokenizer`: the model whose tokenizer is used, if not its own."""
    place = choose_device(device)
    if dtype != "auto" and dtype not in DTYPES:
        raise InvalidParameter("dtype", f"{dtype!r} is not one of auto, {', '.join(DTYPES)}")
    threads = set_threads(threads)
    kernels = kernels_for(place, threads, activations)
    if reason := why_slow(kernels, place):
        _warn_once(str(reason))
    cache = choose_kv_dtype(kv_dtype, place, kernels)
    with parsed_once(path), no_collection():  # which would go through a vocabulary many times
        config = load_config(path)
        weights, extra = load_all_weights(path, config, declared)
        vocabulary = Tokenizer.from_path(tokenizer or path)  # before the weights are read, which takes longest
    dtypes = Dtypes.of(choose_dtype(dtype, place), place, cache)
    kind = dtypes.kept(weights.kinds[TYPICAL]) or weights.kinds[TYPICAL]
    if activations == INT8 and not (kind.is_blocks or kind in MIDDLE):  # codes of integers may become blocks
        _refuse_int8(kind)
    try:
        with torch_threads(kernels.torch_threads):
            decoder = Decoder(config, weights, kernels, device=place, dtypes=dtypes)
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "memory" not in str(error):
            raise
        raise DeviceError(
            f"the model does not fit into {place.type} memory; try a smaller model or dtype bfloat16"
        ) from error
    notes: list[str] = []
    if _is_small(kind):
        notes = _expansions(weights, decoder)
        packed = next(iter(decoder.layers[0].down.kinds))
        kind = packed if kind.has_scales or not _is_small(packed) else kind
    if activations == INT8 and not kind.is_blocks:
        _refuse_int8(kind)
    quantization = load_quantization(path)
    notes = [*load_notes(path), *(quantization.notes if quantization else ()), *notes]
    return LoadedModel(config, decoder, vocabulary, load_generation_defaults(path), extra, kind, tuple(notes))


def _refuse_int8(kind: WeightKind) -> NoReturn:
    raise InvalidParameter(
        "activations",
        f"int8 needs weights stored as blocks, and these are {kind.label}; use a GGUF file, or a folder made by "
        "paceline quantize",
    )


def _is_small(kind: WeightKind) -> bool:
    return kind.is_blocks or kind.has_scales


def _expansions(weights: Weights, decoder: Decoder) -> list[str]:
    """Return the products whose weights are codes or blocks in the file and numbers in memory."""
    wide: list[WeightKind] = []
    for index, layer in enumerate(decoder.layers):
        for product, names in PRODUCTS.items():
            stored = {weights.kinds[f"model.layers.{index}.{name}.weight"] for name in names}
            plain = {decoder.dtypes.kept(kind) or kind for kind in stored if not _is_small(kind)}
            in_memory: set[WeightKind] = getattr(layer, product).kinds
            large = {kind for kind in in_memory if not _is_small(kind)}
            if any(map(_is_small, stored)) and (large == in_memory or large - plain):
                wide.append(min(large - plain or large))
    if not wide:
        return []
    return [
        f"{weights.kinds[TYPICAL].label} weights of {len(wide)} of {len(PRODUCTS) * len(decoder.layers)} products are "
        f"kept in {wide[0].label}: {decoder.kernels.name} kernels do not read them as stored"
    ]


@functools.cache
def _warn_once(message: str) -> None:
    """Log a warning once: on stderr, unless the program that imported the package has set up its own logging."""
    log.warning(message)


def choose_device(name: str) -> torch.device:
    if name not in DEVICES:
        raise InvalidParameter("device", f"{name!r} is not one of {', '.join(DEVICES)}")
    if name == "cuda" and not torch.cuda.is_available():
        raise DeviceError("device cuda was asked for, but torch sees no CUDA GPU; choose cpu, or run `paceline doctor`")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def choose_dtype(name: str, device: torch.device) -> torch.dtype | None:
    """Choose the dtype of weights; auto: None, as the file has them, on a GPU with all numbers in bf16."""
    if name == "float16" and device.type != "cpu":
        raise InvalidParameter("dtype", "a GPU computes in bfloat16 or float32 here; use bfloat16, which auto is")
    return None if name == "auto" else DTYPES[name]


def choose_kv_dtype(name: str, device: torch.device, kernels: Kernels) -> torch.dtype | None:
    """Choose the dtype of the cache; auto: None, the dtype of the computation."""
    if name == "auto":
        return None
    if name not in CPU_KV_DTYPES and name not in GPU_KV_DTYPES:
        raise InvalidParameter(
            "kv_dtype", f"{name!r} is not one of {', '.join(('auto', *CPU_KV_DTYPES, *GPU_KV_DTYPES))}"
        )
    if name in CPU_KV_DTYPES:
        if device.type != "cpu":
            raise InvalidParameter("kv_dtype", f"{name} is for a CPU, not {device.type}; leave it out")
        return CPU_KV_DTYPES[name]
    if not (device.type == "cuda" and kernels.captures):
        raise InvalidParameter(
            "kv_dtype", f"{name} needs the Triton kernels of a GPU, not {kernels.name} on {device.type}; leave it out"
        )
    if torch.cuda.get_device_capability(device) < (8, 9):
        raise InvalidParameter(
            "kv_dtype", f"{name} needs a GPU that computes in fp8 (Ada, Hopper or later); leave it out"
        )
    return GPU_KV_DTYPES[name]


def set_threads(threads: int | None) -> int:
    if threads is not None and not 1 <= threads <= MOST_THREADS:
        raise InvalidParameter("threads", f"must be between 1 and {MOST_THREADS}, got {threads}")
    torch.set_num_threads(threads or usable_cores())
    return torch.get_num_threads()
