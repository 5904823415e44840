"""Checkpoints that compressed-tensors itself writes are read as that package reads them, and the other way round.

For each scheme a small random Llama is compressed by the package, saved, loaded here, and every weight compared with
the package's own decompression in bf16, which rounds once as ours does. Skipped without the package.
"""

from __future__ import annotations

import json

import pytest
import torch

from paceline.models.load.loader import load_config, load_weights
from paceline.models.quant.compress import COMPRESSED
from paceline.models.quant.quantize import quantize_folder

pytest.importorskip("compressed_tensors")
import transformers
from compressed_tensors import quantization as q
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.entrypoints.convert.converters.autoawq import AutoAWQConverter
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import load_file, save_file

from tests.helpers.tiny import SMALL

FP8 = {"num_bits": 8, "type": "float"}
PER_TOKEN = {**FP8, "strategy": "token", "dynamic": True}  # activations
SCHEMES = {
    "W4A16": ({"num_bits": 4, "strategy": "group", "group_size": 32}, None),
    "W4A16 asymmetric": ({"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False}, None),
    "W4A16 channel": ({"num_bits": 4, "strategy": "channel"}, None),
    "W8A16": ({"num_bits": 8, "strategy": "group", "group_size": 32}, None),
    "W8A16 asymmetric": ({"num_bits": 8, "strategy": "channel", "symmetric": False}, None),
    "W8A8": ({"num_bits": 8, "strategy": "channel"}, {"num_bits": 8, "strategy": "token", "dynamic": True}),
    "FP8 dynamic": ({**FP8, "strategy": "channel"}, PER_TOKEN),
    "FP8 tensor": ({**FP8, "strategy": "tensor"}, PER_TOKEN),
    "FP8 blocks": ({**FP8, "strategy": "block", "block_structure": [32, 32]}, None),
}


def extremes(weight, args):
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


def small_model():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SMALL, tie_word_embeddings=False)
    return transformers.LlamaForCausalLM(config).to(torch.bfloat16)


def write(folder, weights, activations):
    """Write the checkpoint; return the package's own decompression of its layers."""
    model, given = small_model(), None if activations is None else q.QuantizationArgs(**activations)
    scheme = q.QuantizationScheme(targets=["Linear"], weights=q.QuantizationArgs(**weights), input_activations=given)
    q.apply_quantization_config(model, q.QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"]))
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


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_checkpoint_is_read_as_the_package_reads_it(scheme, tmp_path):
    theirs, ours = write(tmp_path, *SCHEMES[scheme]), load_weights(tmp_path, load_config(tmp_path))
    assert len(theirs) == 14
    for name, tensor in theirs.items():
        assert torch.equal(ours[name].numbers().bfloat16(), tensor.bfloat16()), name


def test_an_awq_checkpoint_is_read_as_the_packages_conversion_of_it(tmp_path):
    write(tmp_path / "source", *SCHEMES["W4A16 asymmetric"])
    draw, tensors = torch.Generator().manual_seed(1), load_file(tmp_path / "source" / "model.safetensors")
    weights = {name: tensor for name, tensor in tensors.items() if "_proj." not in name}
    layers = sorted(name.removesuffix(".weight_packed") for name in tensors if name.endswith("weight_packed"))
    for layer in layers:
        n, k = tensors[f"{layer}.weight_shape"].tolist()
        for part, rows in (("qweight", k), ("qzeros", k // 32)):
            weights[f"{layer}.{part}"] = torch.randint(-(2**31), 2**31, (rows, n // 8), generator=draw).to(torch.int32)
        weights[f"{layer}.scales"] = (torch.rand(k // 32, n, generator=draw) / 64).half()
    awq = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
    converted = AutoAWQConverter.from_autoawq_config(awq).process(dict(weights))
    config, read = json.loads((tmp_path / "source" / "config.json").read_text()), []
    for name, each, changes in (("awq", weights, {"quantization_config": awq}), ("converted", converted, {})):
        (tmp_path / name).mkdir()
        save_file({key: tensor.contiguous() for key, tensor in each.items()}, tmp_path / name / "model.safetensors")
        (tmp_path / name / "config.json").write_text(json.dumps(config | changes))
        read.append(load_weights(tmp_path / name, load_config(tmp_path / name)))
    for layer in layers:
        assert torch.equal(*(each[f"{layer}.weight"].numbers() for each in read))


@pytest.mark.parametrize("to", COMPRESSED)
def test_a_folder_of_quantize_is_read_by_transformers_as_here(to, tmp_path):
    small_model().save_pretrained(tmp_path / "plain")
    quantize_folder(tmp_path / "plain", to, tmp_path / "out", lambda done, total: None)
    settings = transformers.CompressedTensorsConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", quantization_config=settings)
    theirs, ours = model.state_dict(), load_weights(tmp_path / "out", load_config(tmp_path / "out"))
    names = [name for name in ours if name.endswith("_proj.weight")]
    assert len(names) == 14
    for name in names:
        assert torch.equal(ours[name].numbers().bfloat16(), theirs[name].bfloat16()), name
