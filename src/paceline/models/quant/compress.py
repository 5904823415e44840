"""Weights rounded to codes beside their scales, in compressed-tensors' layout, which other software reads too.

int4: groups of the largest of 128, 64 and 32 columns that divides every row. fp8: e4m3, a scale for each row. Scales
follow from the largest weight and are bf16, in which transformers holds them whatever the file has. Embedding, head,
norms and biases stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from paceline.errors import BrokenModel
from paceline.files.safetensors_writer import Header
from paceline.models.load.loader import Weights
from paceline.models.load.placement import expected_shapes
from paceline.models.load.quantized_config import LINEAR
from paceline.models.quant.block_file import DTYPES
from paceline.models.spec import ModelConfig
from paceline.models.weights import StoredWeight, WeightKind

COMPRESSED = {"int4": WeightKind.INT4, "fp8": WeightKind.FP8}
GROUPS = (128, 64, 32)
MOST_FP8 = 448.0  # the largest e4m3 number
KEPT = ("model.embed_tokens.weight", "lm_head.weight")


def is_rounded(name: str, shape: tuple[int, ...]) -> bool:
    return len(shape) == 2 and name not in KEPT


def group_of(config: ModelConfig, source: str) -> int:
    """Return the number of columns that share a scale of int4."""
    shapes = expected_shapes(config)
    widths = {shape[1] for name, shape in shapes.items() if is_rounded(name, shape)}
    group = next((size for size in GROUPS if not any(width % size for width in widths)), None)
    if group is None:
        raise BrokenModel(f"{source}: rows of {min(widths)} are not whole groups of 32; this model cannot be quantised")
    return group


def quantization_config(kind: WeightKind, group: int) -> dict[str, Any]:
    """Return the entry of config.json."""
    weights: dict[str, Any] = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
    if kind is WeightKind.INT4:
        weights |= {"num_bits": 4, "type": "int", "strategy": "group", "group_size": group}
    form = "pack-quantized" if kind is WeightKind.INT4 else "float-quantized"
    scheme = {"targets": [LINEAR], "weights": weights | {"dynamic": False}, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": scheme | {"output_activations": None}},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
    }


def headers(weights: Weights, config: ModelConfig, kind: WeightKind, group: int) -> dict[str, Header]:
    by_name: dict[str, Header] = {}
    for name, shape in expected_shapes(config).items():
        if not is_rounded(name, shape):
            by_name[name] = Header(DTYPES.get(weights.kinds[name], "F32"), shape)
            continue
        layer, (n, k) = name.removesuffix(".weight"), shape
        if kind is WeightKind.INT4:
            by_name[f"{layer}.weight_packed"] = Header("I32", (n, k // 8))
            by_name[f"{layer}.weight_scale"] = Header("BF16", (n, k // group))
            by_name[f"{layer}.weight_shape"] = Header("I64", (2,))
        else:
            by_name[name] = Header("F8_E4M3", (n, k))
            by_name[f"{layer}.weight_scale"] = Header("BF16", (n, 1))
    return by_name


def tensors(weights: Mapping[str, StoredWeight], config: ModelConfig, kind: WeightKind, group: int) -> Iterator[Tensor]:
    """Yield the tensors in the order of `headers`."""
    for name, shape in expected_shapes(config).items():
        values = weights[name].numbers()
        if not is_rounded(name, shape):
            yield values.float() if values.dtype is torch.float64 else values
        elif kind is WeightKind.INT4:
            codes, scales = rounded_int4(values.float(), group)
            yield from ((codes[:, ::2] | codes[:, 1::2] << 4).view(torch.int32), scales, torch.tensor(shape))
        else:
            yield from rounded_fp8(values.float())


def rounded_int4(values: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Round to codes 0 to 15 (N, K), of which 8 stands for 0, and scales (N, K / group), 7.5 to the largest weight."""
    groups = values.view(len(values), -1, group)
    scales = (groups.abs().amax(2) / 7.5).bfloat16()
    steps = groups / torch.where(scales == 0, 1.0, scales.float())[:, :, None]
    return (steps.round().clamp(-8, 7) + 8).to(torch.uint8).view(values.shape), scales


def rounded_fp8(values: Tensor) -> tuple[Tensor, Tensor]:
    scales = (values.abs().amax(1, keepdim=True) / MOST_FP8).bfloat16()
    steps = values / torch.where(scales == 0, 1.0, scales.float())
    return steps.clamp(-MOST_FP8, MOST_FP8).to(torch.float8_e4m3fn), scales
