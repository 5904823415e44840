"""Checkpoints that compressed-tensors itself has written: are they read as that package reads them?

    pip install compressed-tensors && python -m benchmarks.quantized_checkpoints [--out FOLDER]

For each scheme a small random Llama is compressed by the package, saved, loaded here, and every weight compared with
the package's own decompression, in bf16, which rounds once as ours does; an AWQ checkpoint of random codes is compared
with the package's conversion of it; and folders of `paceline quantize --to int4|fp8` are read by transformers and the
package. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
from pathlib import Path
from typing import Any

import compressed_tensors
import torch
import transformers
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.entrypoints.convert.converters.autoawq import AutoAWQConverter
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    apply_quantization_config,
)
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.models.load.loader import load_config, load_quantization, load_weights
from paceline.models.quant.compress import COMPRESSED
from paceline.models.quant.quantize import quantize_folder

FP8 = {"num_bits": 8, "type": "float"}
ROUNDED = {**FP8, "strategy": "token", "dynamic": True}  # activations
SCHEMES: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "W4A16": ({"num_bits": 4, "strategy": "group", "group_size": 32}, None),
    "W4A16 asymmetric": ({"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False}, None),
    "W4A16 channel": ({"num_bits": 4, "strategy": "channel"}, None),
    "W8A16": ({"num_bits": 8, "strategy": "group", "group_size": 32}, None),
    "W8A16 asymmetric": ({"num_bits": 8, "strategy": "channel", "symmetric": False}, None),
    "W8A8": ({"num_bits": 8, "strategy": "channel"}, {"num_bits": 8, "strategy": "token", "dynamic": True}),
    "FP8 dynamic": ({**FP8, "strategy": "channel"}, ROUNDED),
    "FP8 tensor": ({**FP8, "strategy": "tensor"}, ROUNDED),
    "FP8 blocks": ({**FP8, "strategy": "block", "block_structure": [32, 32]}, None),
}


def extremes(weight: Tensor, args: QuantizationArgs) -> tuple[Tensor, Tensor]:
    n, k = weight.shape
    if args.strategy == "group":
        groups = weight.view(n, -1, args.group_size)
        return groups.amin(2), groups.amax(2)
    if args.strategy == "channel":
        return weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    if args.strategy == "block":
        rows, columns = args.block_structure
        blocks = weight.view(n // rows, rows, k // columns, columns)
        return blocks.amin((1, 3)), blocks.amax((1, 3))
    return weight.min().reshape(1), weight.max().reshape(1)


def small_model() -> transformers.LlamaForCausalLM:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    return transformers.LlamaForCausalLM(config).to(torch.bfloat16)


def write_plain(folder: Path) -> Path:
    small_model().save_pretrained(folder)
    return folder


def write(folder: Path, weights: dict[str, Any], activations: dict[str, Any] | None) -> dict[str, Tensor]:
    """Writes the checkpoint and returns the package's own decompression of its layers."""
    model = small_model()
    scheme = QuantizationScheme(
        targets=["Linear"],
        weights=QuantizationArgs(**weights),
        input_activations=None if activations is None else QuantizationArgs(**activations),
    )
    apply_quantization_config(model, QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"]))
    for layer in model.modules():
        if getattr(layer, "quantization_scheme", None) is not None:
            args = layer.quantization_scheme.weights
            scale, zero = calculate_qparams(*extremes(layer.weight.data.float(), args), args)
            layer.weight_scale.data.copy_(scale.reshape(layer.weight_scale.shape))
            if hasattr(layer, "weight_zero_point"):
                layer.weight_zero_point.data.copy_(zero.reshape(layer.weight_zero_point.shape))
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)
    compressor.decompress_model(model)
    return {name: tensor for name, tensor in model.state_dict().items() if name.endswith("_proj.weight")}


def awq_as_converted(out: Path) -> int:
    """An AWQ checkpoint of random codes, and the package's conversion of it: how many weights are read as equal."""
    source, draw = out / "W4A16-asymmetric", torch.Generator().manual_seed(1)
    tensors = load_file(source / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if "_proj." not in name}
    layers = sorted(name.removesuffix(".weight_packed") for name in tensors if name.endswith("weight_packed"))
    for layer in layers:
        n, k = tensors[f"{layer}.weight_shape"].tolist()
        for part, rows in (("qweight", k), ("qzeros", k // 32)):
            words = torch.randint(-(2**31), 2**31, (rows, n // 8), generator=draw)
            kept[f"{layer}.{part}"] = words.to(torch.int32)
        kept[f"{layer}.scales"] = (torch.rand(k // 32, n, generator=draw) / 64).half()
    awq = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
    converted = AutoAWQConverter.from_autoawq_config(awq).process(dict(kept))
    config = json.loads((source / "config.json").read_text())
    read = []
    for name, weights, changes in (("AWQ", kept, {"quantization_config": awq}), ("AWQ-converted", converted, {})):
        (out / name).mkdir(exist_ok=True)
        save_file({key: tensor.contiguous() for key, tensor in weights.items()}, out / name / "model.safetensors")
        (out / name / "config.json").write_text(json.dumps(config | changes))
        read.append(load_weights(out / name, load_config(out / name)))
    ours, theirs = read
    names = [f"{layer}.weight" for layer in layers]
    return sum(torch.equal(ours[name].numbers(), theirs[name].numbers()) for name in names)


def read_by_transformers(out: Path, to: str) -> int:
    """A folder of `quantize_folder`: how many weights transformers expands to the same numbers."""
    folder = out / f"ours-{to}"
    quantize_folder(write_plain(out / "plain"), to, folder, lambda done, total: None)
    settings = transformers.CompressedTensorsConfig(dequantize=True)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, quantization_config=settings).state_dict()
    ours = load_weights(folder, load_config(folder))
    names = [name for name in ours if name.endswith("_proj.weight")]
    return sum(torch.equal(ours[name].numbers().bfloat16(), theirs[name].bfloat16()) for name in names)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="keep the checkpoints here")
    out = parser.parse_args().out or Path(tempfile.mkdtemp())
    logging.disable()
    found: dict[str, Any] = {}
    for scheme, settings in SCHEMES.items():
        folder = out / scheme.replace(" ", "-")
        theirs = write(folder, *settings)
        ours, quantization = load_weights(folder, load_config(folder)), load_quantization(folder)
        assert quantization is not None
        same = sum(torch.equal(ours[name].numbers().bfloat16(), tensor.bfloat16()) for name, tensor in theirs.items())
        kind = ours.kinds["model.layers.0.mlp.down_proj.weight"].label
        found[scheme] = {"kind": kind, "weights": len(theirs), "equal": same, "notes": list(quantization.notes)}
        print(f"{scheme:18} {kind:8} {same} of {len(theirs)} weights equal")
    same = awq_as_converted(out)
    found["AWQ"] = {"kind": "int4", "weights": 14, "equal": same, "notes": []}
    print(f"{'AWQ':18} {'int4':8} {same} of 14 weights equal to those of the package's conversion")
    for to in COMPRESSED:
        same = read_by_transformers(out, to)
        found[f"ours {to}"] = {"kind": to, "weights": 14, "equal": same, "notes": []}
        print(f"{'quantize --to ' + to:18} {to:8} {same} of 14 weights equal in transformers")
    print(json.dumps({"compressed_tensors": compressed_tensors.__version__, "schemes": found}))


if __name__ == "__main__":
    main()
