"""Small quantised checkpoints, written by plain loops that share no code with the reader.

A weight is rounded to codes and scales here, and packed as each format describes it, one code after the other.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.models.weights import WeightKind

Tensors = dict[str, Tensor]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the column that each nibble of a word holds
LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass
class Rounded:
    """codes from 0 on (N, K); scales and zeros (N, G); `zeros` are the codes of the number 0."""

    codes: Any
    scales: Tensor
    zeros: Any
    bits: int

    def numbers(self) -> Tensor:
        """fp32: (code - zero) * scale, one by one."""
        n, k = self.codes.shape
        group = k // self.scales.shape[1]
        scales = self.scales.float().numpy()
        out = np.zeros((n, k), np.float32)
        for row in range(n):
            for column in range(k):
                at = row, column // group
                out[row, column] = np.float32(int(self.codes[row, column]) - int(self.zeros[at])) * scales[at]
        return torch.from_numpy(out)


def rounded(values: Tensor, bits: int, group: int, zeros: bool, dtype: torch.dtype = torch.float16) -> Rounded:
    n, k = values.shape
    groups = values.float().view(n, k // group, group)
    middle, most = 2 ** (bits - 1), 2**bits - 1
    if zeros:
        low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
        scales = ((high - low) / most).to(dtype)
        zero = (-low / scales.float()).round().clamp(0, most)
    else:
        scales = (groups.abs().amax(2) / (middle - 1)).to(dtype)
        zero = torch.full((n, k // group), float(middle))
    codes = ((groups / scales.float()[:, :, None]).round() + zero[:, :, None]).clamp(0, most)
    return Rounded(codes.view(n, k).to(torch.int64).numpy(), scales, zero.to(torch.int64).numpy(), bits)


def words(codes: Any, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """(R, C) -> (R, C * bits / 32) int32: code `order[i]` of each word's at bit i * bits."""
    per_word = 32 // bits
    order = order or tuple(range(per_word))
    rows, columns = codes.shape
    padded = np.zeros((rows, -(-columns // per_word) * per_word), np.int64)
    padded[:, :columns] = codes
    out = np.zeros((rows, padded.shape[1] // per_word), np.uint32)
    for word in range(out.shape[1]):
        for place, source in enumerate(order):
            out[:, word] |= (padded[:, word * per_word + source] << place * bits).astype(np.uint32)
    return torch.from_numpy(out.view(np.int32).copy())


def pack_quantized(layer: str, weight: Rounded) -> Tensors:
    tensors = {
        f"{layer}.weight_packed": words(weight.codes, weight.bits),
        f"{layer}.weight_scale": weight.scales,
        f"{layer}.weight_shape": torch.tensor(weight.codes.shape),
    }
    if (weight.zeros != 2 ** (weight.bits - 1)).any():
        tensors[f"{layer}.weight_zero_point"] = words(weight.zeros.T, weight.bits).T.contiguous()
    return tensors


def int_quantized(layer: str, weight: Rounded) -> Tensors:
    return {
        f"{layer}.weight": torch.from_numpy(weight.codes - 128).to(torch.int8),
        f"{layer}.weight_scale": weight.scales,
        f"{layer}.weight_zero_point": torch.from_numpy(weight.zeros - 128).to(torch.int8),
    }


def awq(layer: str, weight: Rounded) -> Tensors:
    return {
        f"{layer}.qweight": words(weight.codes.T, 4, AWQ_ORDER),
        f"{layer}.qzeros": words(weight.zeros.T, 4, AWQ_ORDER),
        f"{layer}.scales": weight.scales.t().contiguous(),
    }


def gptq(layer: str, weight: Rounded, less: int = 1) -> Tensors:
    k = weight.codes.shape[1]
    return {
        f"{layer}.qweight": words(weight.codes, weight.bits).t().contiguous(),
        f"{layer}.qzeros": less_one(words(weight.zeros.T, weight.bits), less, weight.bits),
        f"{layer}.scales": weight.scales.t().contiguous(),
        f"{layer}.g_idx": torch.arange(k, dtype=torch.int32) // (k // weight.scales.shape[1]),
    }


def less_one(packed: Tensor, less: int, bits: int) -> Tensor:
    """Subtracted from whole words, so a zero point of 0 borrows from the next."""
    each = sum(less << place * bits for place in range(32 // bits))
    return torch.from_numpy((packed.numpy().view(np.uint32) - np.uint32(each)).view(np.int32))


def gptq_v2(layer: str, weight: Rounded) -> Tensors:
    return gptq(layer, weight, less=0)


def compressed(
    bits: int, group: int | None, symmetric: bool = True, format_: str = "pack-quantized", **more: Any
) -> dict[str, Any]:
    weights: dict[str, Any] = {"num_bits": bits, "type": "int", "symmetric": symmetric, "dynamic": False}
    weights |= {"strategy": "group" if group else "channel", "group_size": group, "actorder": None}
    return {
        "quant_method": "compressed-tensors",
        "format": format_,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights | more, "input_activations": None}},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
    }


def compressed_fp8(strategy: str, **more: Any) -> dict[str, Any]:
    config = compressed(8, None, format_="float-quantized", type="float", strategy=strategy, **more)
    config["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8, "type": "float", "dynamic": True}
    return config


@dataclass(frozen=True)
class Format:
    config: dict[str, Any]
    pack: Callable[[str, Rounded], Tensors] | None
    on_cpu: WeightKind  # in which a CPU keeps the weights
    bits: int = 4
    group: int | None = 32
    zeros: bool = False
    scales: torch.dtype = torch.float16
    block: tuple[int, int] | None = None  # FP8: rows and columns that share a scale; None: a row


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
Q4_0, Q5_0, Q8_0, FLOAT32 = WeightKind.Q4_0, WeightKind.Q5_0, WeightKind.Q8_0, WeightKind.FLOAT32
WHOLE = (10**6, 10**6)  # one scale for the tensor
FORMATS = {
    "w4a16": Format(compressed(4, 32), pack_quantized, Q4_0, scales=torch.bfloat16),
    "w4a16 asymmetric": Format(compressed(4, 32, False), pack_quantized, Q5_0, zeros=True),
    "w4a16 channel": Format(compressed(4, None), pack_quantized, Q4_0, group=None),
    "w4a16 of 16": Format(compressed(4, 16), pack_quantized, FLOAT32, group=16),
    "w4a16 float32 scales": Format(compressed(4, 32), pack_quantized, FLOAT32, scales=torch.float32),
    "w8a16": Format(compressed(8, 32), pack_quantized, Q8_0, bits=8),
    "w8a16 asymmetric": Format(compressed(8, 32, False), pack_quantized, FLOAT32, bits=8, zeros=True),
    "w8a8": Format(compressed(8, None, False, "int-quantized"), int_quantized, Q8_0, bits=8, group=None),
    "awq": Format(AWQ, awq, Q5_0, zeros=True),
    "awq row": Format(AWQ | {"group_size": -1}, awq, Q5_0, zeros=True, group=None),
    "gptq": Format(GPTQ, gptq, Q4_0),
    "gptq v2": Format(GPTQ | {"checkpoint_format": "gptq_v2"}, gptq_v2, Q4_0),
    "gptq asymmetric": Format(GPTQ | {"sym": False}, gptq, Q5_0, zeros=True),
    "gptq v2 asymmetric": Format(GPTQ | {"sym": False, "checkpoint_format": "gptq_v2"}, gptq_v2, Q5_0, zeros=True),
    "gptq 8 bits": Format(GPTQ | {"bits": 8}, gptq, Q8_0, bits=8),
    "gptq row": Format(GPTQ | {"group_size": -1, "desc_act": True}, gptq, Q4_0, group=None),
    "fp8": Format(compressed_fp8("channel"), None, FLOAT32, scales=torch.bfloat16),
    "fp8 tensor": Format(compressed_fp8("tensor"), None, FLOAT32, scales=torch.float32, block=WHOLE),
    "fp8 static": Format(
        {"quant_method": "fp8", "activation_scheme": "static"},
        None,
        FLOAT32,
        scales=torch.float32,
        block=WHOLE,
    ),
    "fp8 blocks": Format(
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [40, 32], "fmt": "e4m3"},
        None,
        FLOAT32,
        scales=torch.float32,
        block=(40, 32),
    ),
}


def write_quantized(folder: Path, plain: Path, case: Format) -> tuple[Path, Path]:
    """Two folders from a model in `plain`: quantised, and plain numbers that are the expansion of its codes."""
    tensors = load_file(plain / "model.safetensors")
    coded, expanded = dict(tensors), dict(tensors)
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        layer, values = name.removesuffix(".weight"), tensors[name].float()
        del coded[name]
        if case.pack is None:
            parts, expanded[name] = _fp8(layer, values, case)
            coded |= parts
            continue
        weight = rounded(values, case.bits, case.group or values.shape[1], case.zeros, case.scales)
        coded |= case.pack(layer, weight)
        expanded[name] = weight.numbers()
    pair = folder / "coded", folder / "expanded"
    for at, kept in zip(pair, (coded, expanded), strict=True):
        at.mkdir(parents=True)
        save_file({name: tensor.contiguous() for name, tensor in kept.items()}, at / "model.safetensors")
        for name in ("config.json", "tokenizer.json"):
            (at / name).write_bytes((plain / name).read_bytes())
    config = json.loads((plain / "config.json").read_text())
    (pair[0] / "config.json").write_text(json.dumps(config | {"quantization_config": case.config}))
    return pair


def _fp8(layer: str, values: Tensor, case: Format) -> tuple[Tensors, Tensor]:
    n, k = values.shape
    height, width = case.block or (1, k)
    scales = torch.zeros(-(-n // height), -(-k // width), dtype=case.scales)
    codes, numbers = torch.zeros(n, k, dtype=torch.float8_e4m3fn), torch.zeros(n, k)
    for row in range(scales.shape[0]):
        for column in range(scales.shape[1]):
            at = slice(row * height, (row + 1) * height), slice(column * width, (column + 1) * width)
            scale = (values[at].abs().max() / 448).to(case.scales)
            scales[row, column] = scale
            codes[at] = (values[at] / scale.float()).to(torch.float8_e4m3fn)
            numbers[at] = codes[at].float() * scale.float()
    name = "weight_scale_inv" if "weight_block_size" in case.config else "weight_scale"
    parts = {f"{layer}.weight": codes, f"{layer}.{name}": scales.reshape(()) if scales.numel() == 1 else scales}
    if case.config.get("activation_scheme") == "static":
        parts[f"{layer}.input_scale"] = torch.tensor(0.5)
    return parts, numbers
