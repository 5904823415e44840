"""Quantised Hugging Face checkpoints: the logits of the same model with expanded weights, or one line that says why
not."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.engine.policy.memory import PolicyMemory
from paceline.errors import BrokenModel, ModelError, UnsupportedModel
from paceline.models.kernels import INT8
from paceline.models.load.loader import load_config, load_weights
from paceline.models.load.open_model import load_model
from paceline.models.load.placement import expected_shapes
from paceline.models.load.quantized_config import parse_quantization
from paceline.models.quant.code_blocks import as_blocks
from paceline.models.weights import StoredWeight, WeightKind
from paceline.testing import logits_of
from tests.helpers.errors import refused
from tests.helpers.tiny import SMALL, write_tokenizer
from tests.models.load.quantized import AWQ, FORMATS, GPTQ, compressed, compressed_fp8, write_quantized

LAYER = "model.layers.1.mlp.down_proj"
TOKENS = torch.randint(0, 96, (20,), generator=torch.Generator().manual_seed(3)).tolist()


RAW: dict[str, Any] = {"architectures": ["Qwen2ForCausalLM"], **SMALL}  # biases beside codes


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of plain numbers."""
    folder, draw = tmp_path_factory.mktemp("plain"), torch.Generator().manual_seed(0)
    (folder / "config.json").write_text(json.dumps(RAW))
    shapes = expected_shapes(load_config(folder))
    tensors = {
        name: torch.randn(shape, generator=draw) * 0.2 if len(shape) == 2 else torch.rand(shape, generator=draw) + 0.5
        for name, shape in shapes.items()
    }
    tensors["model.layers.0.self_attn.o_proj.weight"][5].abs_()  # zero points of 0
    save_file(tensors, folder / "model.safetensors")
    write_tokenizer(folder, 96)
    return folder


@pytest.mark.parametrize("case", FORMATS)
def test_a_quantised_checkpoint_has_the_logits_of_its_expansion(case: str, plain: Path, tmp_path: Path) -> None:
    coded, expanded = write_quantized(tmp_path, plain, FORMATS[case])
    loaded, expected = load_model(coded, device="cpu"), load_model(expanded, device="cpu")
    assert loaded.kind is FORMATS[case].on_cpu
    assert all(layer.qkv.kinds == {loaded.kind} for layer in loaded.decoder.layers)
    wanted = logits_of(expected.decoder, TOKENS, [20])
    for passes in ([20], [1] * 20, [7, 13]):
        assert torch.equal(logits_of(loaded.decoder, TOKENS, passes), wanted)


def test_torch_kernels_read_the_same_numbers(plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    coded, expanded = write_quantized(tmp_path, plain, FORMATS["awq"])
    monkeypatch.setenv("PACELINE_KERNELS", "torch")
    loaded, expected = (load_model(folder, device="cpu").decoder for folder in (coded, expanded))
    assert torch.equal(logits_of(loaded, TOKENS, [20]), logits_of(expected, TOKENS, [20]))


def test_weights_are_as_small_in_memory_as_in_the_file(plain: Path, tmp_path: Path) -> None:
    loaded = load_model(write_quantized(tmp_path, plain, FORMATS["w4a16"])[0], device="cpu")
    assert loaded.decoder.layers[0].down.parts[0].nbytes == 64 * 96 * 18 / 32
    assert loaded.notes == ()


def test_what_is_not_as_the_checkpoint_asks_is_said(plain: Path, tmp_path: Path) -> None:
    expected = {
        "fp8": ["activations are not rounded to fp8", "fp8 weights of 8 of 8 products are kept in float32"],
        "w4a16 of 16": ["int4 weights of 8 of 8 products are kept in float32: native"],
        "fp8 blocks": ["activations are not rounded to fp8", r"a scale for each block of rows and columns \(40 x 32\)"],
    }
    for case, notes in expected.items():
        loaded = load_model(write_quantized(tmp_path / case, plain, FORMATS[case])[0], device="cpu")
        assert len(loaded.notes) == len(notes), loaded.notes
        for found, wanted in zip(loaded.notes, notes, strict=True):
            assert re.search(wanted, found), found
    config = compressed_fp8("channel") | {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}
    parsed = parse_quantization({"quantization_config": config}, "c")
    assert parsed is not None
    assert parsed.notes[1:] == ("the checkpoint's scales for an fp8 cache are not used",)


@pytest.mark.parametrize("part", ["q_proj", "v_proj"])
@pytest.mark.parametrize(("case", "expanded"), [("w4a16", None), ("w4a16 of 16", "8 of 8")])
def test_a_part_of_a_product_in_plain_numbers_is_not_said_to_be_expanded(
    part: str, case: str, expanded: str | None, plain: Path, tmp_path: Path
) -> None:
    coded, numbers = write_quantized(tmp_path, plain, FORMATS[case])
    kept = load_file(numbers / "model.safetensors")

    def change(tensors: dict[str, Tensor]) -> None:
        for layer in (f"model.layers.{index}.self_attn.{part}" for index in range(2)):
            for name in ("weight_packed", "weight_scale", "weight_shape"):
                del tensors[f"{layer}.{name}"]
            tensors[f"{layer}.weight"] = kept[f"{layer}.weight"].bfloat16()

    rewrite(coded, change)
    notes = load_model(coded, device="cpu").notes
    if expanded is None:
        assert notes == ()
    else:
        assert f"int4 weights of {expanded} products are kept in float32" in "".join(notes)


def test_int8_activations_need_codes_that_become_blocks(plain: Path, tmp_path: Path) -> None:
    coded, _ = write_quantized(tmp_path, plain, FORMATS["gptq"])
    assert load_model(coded, device="cpu", activations=INT8).kind is WeightKind.Q4_0
    for case in ("fp8", "w4a16 of 16"):
        coded, _ = write_quantized(tmp_path / case, plain, FORMATS[case])
        with refused("activations"):
            load_model(coded, device="cpu", activations=INT8)


def test_layers_are_chosen_by_name_then_pattern_then_class() -> None:
    groups = {
        f"group_{bits}": {
            "targets": [target],
            "weights": {"num_bits": bits, "strategy": "group", "group_size": size, "symmetric": True},
        }
        for target, bits, size in (("Linear", 4, 128), (r"re:.*\.down_proj", 8, 64))
    }
    groups["named"] = {
        "targets": ["model.layers.3.mlp.down_proj"],
        "weights": {"num_bits": 8, "strategy": "channel"},
    }
    config = compressed(4, 32) | {"config_groups": groups, "ignore": ["lm_head", "re:.*layers.2.*"]}
    found = parse_quantization({"quantization_config": config}, "c")
    assert found is not None
    schemes = {
        name: found.scheme_of(f"model.layers.{name}")
        for name in ("0.mlp.up_proj", "0.mlp.down_proj", "3.mlp.down_proj", "2.mlp.up_proj")
    }
    chosen = {name: scheme and (scheme.bits, scheme.group) for name, scheme in schemes.items()}
    assert chosen == {
        "0.mlp.up_proj": (4, 128),
        "0.mlp.down_proj": (8, 64),
        "3.mlp.down_proj": (8, None),
        "2.mlp.up_proj": None,
    }
    assert found.scheme_of("lm_head") is None


def test_layers_left_in_plain_numbers_and_idle_tensors_are_read(plain: Path, tmp_path: Path) -> None:
    coded, expanded = write_quantized(tmp_path, plain, FORMATS["gptq"])
    kept = load_file(expanded / "model.safetensors")

    def change(tensors: dict[str, Tensor]) -> None:
        for part in ("qweight", "qzeros", "scales", "g_idx"):
            del tensors[f"{LAYER}.{part}"]
        tensors[f"{LAYER}.weight"] = kept[f"{LAYER}.weight"]
        tensors["model.layers.0.self_attn.o_proj.bias"] = torch.zeros(64)  # of a layer without bias
        tensors["model.layers.0.self_attn.k_scale"] = torch.ones(1)
        tensors["model.layers.1.self_attn.q_proj.bias"].zero_()  # of a layer with one
        del tensors["model.layers.0.mlp.up_proj.g_idx"]

    rewrite(coded, change)
    rewrite(expanded, lambda tensors: tensors["model.layers.1.self_attn.q_proj.bias"].zero_())
    loaded, expected = (load_model(folder, device="cpu").decoder for folder in (coded, expanded))
    assert torch.equal(logits_of(loaded, TOKENS, [20]), logits_of(expected, TOKENS, [20]))
    rewrite(coded, lambda tensors: tensors["model.layers.0.self_attn.o_proj.bias"].fill_(0.5))
    with pytest.raises(BrokenModel, match=r"o_proj\.bias is not part of a qwen2 model"):
        load_model(coded, device="cpu")


def test_blocks_hold_the_numbers_of_codes_or_there_are_none() -> None:
    def weight(scale: float, zeros: Tensor | None = None, kind: WeightKind = WeightKind.INT8) -> StoredWeight:
        codes = torch.tensor([[-128, 127] * 32], dtype=torch.int8)
        return StoredWeight.of_codes(kind, codes, torch.full((1, 2), scale), zeros=zeros)

    for given in (weight(0.125), weight(2.0**-20), weight(0.125, torch.zeros(1, 2))):
        blocks = as_blocks(given)
        assert blocks is not None or given.zeros is not None
        assert blocks is None or torch.equal(blocks.numbers(), given.numbers())
    assert as_blocks(weight(0.1)) is None, "no float16 number"
    assert as_blocks(weight(1e6)) is None
    assert as_blocks(weight(2.0**-30)) is None
    assert as_blocks(weight(0.125, torch.full((1, 2), 5))) is None, "-133 has nine bits"
    assert as_blocks(StoredWeight.of(torch.zeros(2, 32))) is None


UNREAD: list[tuple[Any, str]] = [
    ({"quant_method": "bitsandbytes"}, "quant_method 'bitsandbytes' is not read: known are compressed-tensors, awq"),
    ({"bits": 4}, "quant_method None is not read"),
    ({"quant_method": ["awq"]}, "quant_method"),
    (
        compressed(4, 32, format_="nvfp4-pack-quantized"),
        "format 'nvfp4-pack-quantized'.*must be pack-quantized or int-",
    ),
    (compressed(4, 32, format_="marlin-24"), "marlin-24"),
    (compressed(3, 32), "num_bits 3"),
    (compressed(4, 32, actorder="group"), "actorder 'group' is not read: .*act-order"),
    (compressed(4, 32, dynamic=True), "dynamic True"),
    (compressed(4, 32, strategy="tensor_group"), "strategy 'tensor_group'"),
    (compressed(4, 32, type="float"), "type 'float'"),
    (compressed_fp8("group"), "strategy 'group'"),
    (compressed_fp8("channel", symmetric=False), "symmetric False"),
    (compressed(4, 32) | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
    (compressed(4, 32) | {"transform_config": {"config_groups": {"u": {}}}}, "transform_config"),
    (AWQ | {"version": "gemv"}, "version 'gemv' is not read: it must be gemm"),
    (AWQ | {"bits": 3}, "bits 3 is not read: it must be 4"),
    (AWQ | {"zero_point": False}, "zero_point False"),
    (GPTQ | {"desc_act": True}, "desc_act True is not read: .*act-order"),
    (GPTQ | {"bits": 3}, "bits 3 is not read: it must be 4 or 8"),
    (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
    (GPTQ | {"format": "gptq_p"}, "format 'gptq_p'"),
    (GPTQ | {"pack_dtype": "int16"}, "pack_dtype 'int16'"),
    (GPTQ | {"rotation": "hadamard"}, "rotation"),
    (GPTQ | {"dynamic": {r"+:.*down.*": {"bits": 8}}}, "dynamic"),
    ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt 'e5m2'"),
    ({"quant_method": "fp8", "activation_scheme": "none"}, "activation_scheme"),
]
NO_SENSE: list[tuple[Any, str]] = [
    ([4], "quantization_config must be an object"),
    (compressed(4, 32) | {"config_groups": {}}, "config_groups .* at least one group"),
    (compressed(4, 32) | {"config_groups": {"group_0": 3}}, "group_0 .* must be an object"),
    (compressed(4, 0), "group_size .* must be a positive integer"),
    (compressed(4, None, strategy="group"), "group_size"),
    (compressed(4, 32) | {"ignore": "lm_head"}, "ignore .* a list of names"),
    (compressed(4, 32) | {"ignore": ["re:["]}, "ignore: 're:.' is not a regular expression"),
    (compressed(4, 32, symmetric="no"), "symmetric .* true or false"),
    (GPTQ | {"group_size": "all"}, "group_size"),
    ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size .* two positive integers"),
]


JUNK = [None, True, -1, 0, 1.5, 10**30, "", "x", [], ["x"], [None], {}, {"x": 1}, {"x": {}}, {"x": {"y": []}}]


def test_no_config_causes_anything_but_a_model_error() -> None:
    for sound in (compressed(4, 32), compressed_fp8("block", block_structure=[8, 8]), AWQ, GPTQ, FORMATS["fp8"].config):
        for value in JUNK:
            for key in [*sound, "sparsity_config", "dynamic", "weight_block_size"]:
                with contextlib.suppress(ModelError):
                    parse_quantization({"quantization_config": sound | {key: value}}, "c")
            for key in ("targets", "weights", "input_activations", "format"):
                with contextlib.suppress(ModelError):
                    group = {"targets": ["Linear"], "weights": {"num_bits": 4}} | {key: value}
                    parse_quantization({"quantization_config": sound | {"config_groups": {"g": group}}}, "c")
            for key in ("num_bits", "type", "strategy", "group_size", "symmetric", "actorder", "block_structure"):
                with contextlib.suppress(ModelError):
                    parse_quantization({"quantization_config": compressed(4, 32, **{key: value})}, "c")


@pytest.mark.parametrize(
    ("config", "message", "kind"),
    [*((*case, UnsupportedModel) for case in UNREAD), *((*case, BrokenModel) for case in NO_SENSE)],
)
def test_a_config_that_cannot_be_read_is_refused_by_name(config: Any, message: str, kind: type[ModelError]) -> None:
    with pytest.raises(kind, match=message) as caught:
        parse_quantization({"quantization_config": config}, "config.json")
    assert str(caught.value).startswith("config.json: ")
    assert "\n" not in str(caught.value)


def rewrite(folder: Path, change: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


def set_to(part: str, value: float, at: int = 3) -> Any:
    return lambda tensors: tensors[f"{LAYER}.{part}"].view(-1)[at : at + 1].fill_(value)


def remade(part: str, change: Any) -> Any:
    return lambda tensors: tensors.update({f"{LAYER}.{part}": change(tensors[f"{LAYER}.{part}"])})


NAN, INFINITE = float("nan"), float("inf")
HEADERS: list[tuple[str, Any, str]] = [  # found before any weight is read
    ("awq", lambda tensors: tensors.pop(f"{LAYER}.qzeros"), f"{LAYER}.qzeros is missing"),
    ("w4a16", lambda tensors: tensors.pop(f"{LAYER}.weight_scale"), f"{LAYER}.weight_scale is missing"),
    ("w4a16", lambda tensors: tensors.pop(f"{LAYER}.weight_packed"), f"{LAYER}.weight_packed is missing"),
    ("fp8", lambda tensors: tensors.pop(f"{LAYER}.weight_scale"), f"{LAYER}.weight_scale is missing"),
    ("w4a16 asymmetric", lambda tensors: tensors.pop(f"{LAYER}.weight_zero_point"), "weight_zero_point is missing"),
    ("gptq", remade("qweight", lambda t: t[1:]), r"qweight has shape \[11, 64\], and quantization_config asks for"),
    ("gptq", remade("scales", lambda t: t[:2]), r"scales has shape \[2, 64\].* \[3, 64\]: bits or group_size"),
    ("awq", remade("qweight", lambda t: t.to(torch.int64)), "qweight has dtype I64, .* asks for I32"),
    ("fp8", remade("weight", lambda t: t.view(torch.int8)), "weight has dtype I8, .* asks for F8_E4M3"),
    ("gptq", lambda tensors: tensors.update({"model.other": torch.zeros(3)}), "model.other is not part of"),
    ("gptq", lambda tensors: tensors.update({"model.other": torch.zeros(3).int()}), "model.other has dtype I32"),
]
VALUES: list[tuple[str, Any, str]] = [
    *((case, set_to("scales", NAN), f"{LAYER} has a scale that is not a number") for case in ("awq", "gptq")),
    *((case, set_to("weight_scale", INFINITE), "a scale that is not a number") for case in ("w4a16", "w8a8", "fp8")),
    ("fp8 blocks", set_to("weight_scale_inv", NAN), "a scale that is not a number"),
    ("fp8", set_to("weight", NAN), f"{LAYER} has a weight that is not a number"),
    ("gptq", remade("g_idx", lambda t: t.flip(0)), "act-order.*desc_act false"),
    ("gptq", set_to("qzeros", 0), "zero points that are not the middle code.*set sym to false"),
    ("w4a16", remade("weight_shape", lambda t: t.flip(0)), r"weight_shape says \[96, 64\]"),
]


def read(folder: Path, name: str | None) -> None:
    weights = load_weights(folder, load_config(folder))
    if name is not None:
        weights[name].numbers()


def test_tensors_that_cannot_be_right_are_refused_in_one_line(plain: Path, tmp_path: Path) -> None:
    written = {
        case: write_quantized(tmp_path / case, plain, FORMATS[case])[0]
        for case in {case for case, *_ in HEADERS + VALUES}
    }
    for case, change, message in HEADERS + VALUES:
        kept = (written[case] / "model.safetensors").read_bytes()
        rewrite(written[case], change)
        by_header = (case, change, message) in HEADERS
        with pytest.raises(ModelError, match=message) as caught:
            read(written[case], None if by_header else f"{LAYER}.weight")
        assert "\n" not in str(caught.value)
        (written[case] / "model.safetensors").write_bytes(kept)
    (written["awq"] / "model.safetensors").write_bytes(kept[: len(kept) // 2])
    with pytest.raises(BrokenModel, match="truncated or damaged"):
        load_weights(written["awq"], load_config(written["awq"]))


def with_config(folder: Path, quantization: dict[str, Any] | None) -> Path:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    return folder


def test_a_config_that_does_not_fit_the_file_is_refused(plain: Path, tmp_path: Path) -> None:
    coded, _ = write_quantized(tmp_path, plain, FORMATS["gptq"])
    for quantization, message in (
        (
            GPTQ | {"group_size": 40},
            "groups of 40 do not divide its 64 columns; take a checkpoint of another group_size",
        ),
        (GPTQ | {"group_size": 16}, "bits or group_size are wrong"),
        (GPTQ | {"bits": 8}, "bits or group_size are wrong"),
        (AWQ, "bits or group_size are wrong"),
        (compressed(4, 32), "weight_packed is missing"),
        (None, "unless quantization_config in config.json says how to read it"),
    ):
        with_config(coded, quantization)
        with pytest.raises(ModelError, match=message):
            load_weights(coded, load_config(coded))
    with_config(coded, GPTQ | {"checkpoint_format": "gptq_v2"})
    with pytest.raises(BrokenModel, match="correct checkpoint_format"):
        load_model(coded, device="cpu")


def test_a_cache_of_each_dtype_has_a_policy_of_its_own(plain: Path) -> None:
    loaded = load_model(plain, device="cpu")
    assert loaded.kv_dtype == "auto"
    paths = {PolicyMemory(plain, loaded, []).path()}
    for dtype, name in ((torch.float8_e4m3fn, "fp8"), (torch.bfloat16, "bfloat16"), (torch.int8, "int8")):
        loaded.decoder.dtypes = replace(loaded.decoder.dtypes, cache=dtype)
        assert loaded.kv_dtype == name
        paths.add(PolicyMemory(plain, loaded, []).path())
    assert len(paths) == 4


LOADING = """
import sys, threading, time
from pathlib import Path
import torch
from paceline.models.decoder import Decoder
from paceline.models.kernels import kernels_for
from paceline.models.load.loader import load_config, load_weights
from paceline.models.weights import Dtypes

def anonymous():  # what this process has written: pages of the mapped file are not its own
    return int(next(line for line in open("/proc/self/status") if line.startswith("RssAnon")).split()[1]) * 1024

cpu, folder, peak, done = torch.device("cpu"), Path(sys.argv[1]), [0], threading.Event()

def watch():
    while not done.wait(0.001):
        peak[0] = max(peak[0], anonymous())

kernels = kernels_for(cpu, 1)
kernels.linear(torch.ones(1, 64), kernels.pack(torch.ones(64, 64)))
before = anonymous()
threading.Thread(target=watch).start()
config = load_config(folder)
decoder = Decoder(config, load_weights(folder, config), kernels, device=cpu, dtypes=Dtypes.of(None, cpu))
done.set()
print(peak[0] - before, anonymous() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_loading_takes_the_memory_of_the_file_and_of_one_weight(tmp_path: Path) -> None:
    """AWQ, whose codes must be turned around, so that the most is copied."""
    sizes = {"hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 4}
    (tmp_path / "config.json").write_text(json.dumps(RAW | sizes | {"quantization_config": AWQ}))
    tensors: dict[str, Tensor] = {}
    for name, shape in expected_shapes(load_config(tmp_path)).items():
        layer = name.removesuffix(".weight")
        if not layer.endswith("_proj"):
            tensors[name] = torch.ones(shape, dtype=torch.bfloat16)
            continue
        n, k = shape
        tensors[f"{layer}.qweight"] = torch.full((k, n // 8), 0x12345678, dtype=torch.int32)
        tensors[f"{layer}.qzeros"] = torch.full((k // 32, n // 8), 0x77777777, dtype=torch.int32)
        tensors[f"{layer}.scales"] = torch.ones((k // 32, n), dtype=torch.float16)
    save_file(tensors, tmp_path / "model.safetensors")
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "131072"}  # freed memory is given back at once
    command = [sys.executable, "-c", LOADING, str(tmp_path)]
    found = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
    peak, after = map(int, found.split())
    kept = (tmp_path / "model.safetensors").stat().st_size * 5.5 / 4.6  # Q5_0 has a scale of 16 bits for each 32 codes
    assert 0.9 * kept < after < 1.1 * kept
    assert peak - after < 6 * 1024 * 2048, "bytes, of one weight's numbers"
