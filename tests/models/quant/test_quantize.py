"""`paceline quantize`: blocks that stand for their weights to half a step, a folder that loads, its measured card."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.cli.app import run
from paceline.errors import BrokenModel
from paceline.models.load.loader import load_config, load_weights
from paceline.models.load.open_model import load_model
from paceline.models.quant.compress import COMPRESSED, rounded_fp8, rounded_int4
from paceline.models.quant.quantize import TARGETS, quantize, quantize_folder
from paceline.models.weights import BLOCKS, WeightKind
from tests.helpers.errors import refused
from tests.helpers.tiny import SMALL, save_tiny, write_tokenizer


@pytest.mark.parametrize("kind", TARGETS.values(), ids=lambda kind: kind.name)
def test_a_quantised_weight_is_within_half_a_step(kind: WeightKind) -> None:
    torch.manual_seed(0)
    values = torch.randn(40, 768) * torch.logspace(-2, 1, 40)[:, None]
    values[7], values[8, :256] = 0.0, 0.25
    stored = quantize(values, kind)
    assert stored.shape == (40, 768)
    assert stored.nbytes == 40 * BLOCKS[kind].row_bytes(768)
    groups = values.view(40, -1, 32)
    spread = groups.amax(2).clamp(min=0) - groups.amin(2).clamp(max=0)
    step = 2 * groups.abs().amax(2) / 127 if kind is WeightKind.Q8_0 else spread / 15
    if kind is WeightKind.Q4_K:  # scales and minima are themselves rounded to 6 bits of the block's largest
        step = step + 2 * spread.unflatten(1, (3, 8)).amax(2, keepdim=True).expand(40, 3, 8).flatten(1) / 63
    error = (stored.numbers() - values).abs().view(40, -1, 32).amax(2)
    assert bool((error <= 0.51 * step + 1e-3 * groups.abs().amax(2)).all())
    assert not stored.numbers()[7].any()


@pytest.mark.parametrize("kind", [WeightKind.Q8_0, WeightKind.Q4_1], ids=lambda kind: kind.name)
def test_a_quantised_weight_is_as_close_as_the_gguf_packages(kind: WeightKind) -> None:
    values = torch.randn(50, 320, generator=torch.Generator().manual_seed(1))
    type_ = gguf.GGMLQuantizationType[kind.name]
    theirs = torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(values.numpy(), type_), type_))
    ours = quantize(values, kind).numbers()
    assert (ours - values).square().mean() < 1.01 * (theirs - values).square().mean()


def sized_model(folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Rows of whole blocks of 32, not of 256."""
    import transformers

    torch.manual_seed(0)
    wider = {"intermediate_size": 256, "max_position_embeddings": 512, "tie_word_embeddings": True}
    config = transformers.LlamaConfig(**(SMALL | wider))
    transformers.LlamaForCausalLM(config).to(dtype).save_pretrained(folder)
    write_tokenizer(folder, 96)


def test_the_command_writes_a_folder_that_loads_and_says_how_far_it_is(tmp_path, capsys) -> None:
    sized_model(tmp_path / "m")
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("w1 w2 w3 w4\nw9 w8 w7\n")
    out = tmp_path / "out"
    arguments = ["--model", str(tmp_path / "m"), "--out", str(out), "--prompts", str(prompts)]
    assert run(["quantize", *arguments, "--to", "q4_k", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["kinds"] == {"q8_0": 1, "q4_1": 12, "q4_k": 2}, "rows of 64 are not blocks of 256"
    assert result["distance"]["tokens"] == 7
    assert 0 < result["distance"]["mean_kl"] <= result["distance"]["max_kl"] < 1
    card = (out / "README.md").read_text()
    assert card.startswith("# m, weights rounded to q4_k\n"), "the folder's name, not its path"
    assert f"{result['distance']['mean_kl']:.5f}" in card
    loaded = load_model(out, device="cpu", activations="int8")
    assert loaded.kind is WeightKind.Q4_K
    weights, original = (load_weights(at, load_config(at)) for at in (out, tmp_path / "m"))
    for name, weight in original.items():
        wide = weight.numbers().float()
        assert (weights[name].numbers() - wide).abs().max() <= 0.1 * wide.abs().max(), name
    assert run(["quantize", *arguments, "--to", "q8_0"]) == 1
    assert "exists already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("to", "kept", "activations"),
    [("q4_1", "q4_1", "float32"), ("q4_1", "q4_1", "int8"), ("int4", "q4_0", "float32"), ("fp8", "float32", "float32")],
)
def test_drafting_changes_no_token_of_a_quantised_model(to: str, kept: str, activations: str, tmp_path: Path) -> None:
    from paceline import LLM, SamplingParams

    sized_model(tmp_path / "m")
    quantize_folder(tmp_path / "m", to, tmp_path / "out", lambda done, total: None)
    prompts, accepted = [[1, 2, 3, 4, 1, 2, 3], [9, 9, 8, 9, 9]], 0
    with LLM(str(tmp_path / "out"), device="cpu", activations=activations, method="ngram", k=5) as llm:
        assert (llm.dtype_name, llm.activations) == (kept, activations)
        for temperature in (0.0, 0.7):
            drafted = SamplingParams(temperature=temperature, seed=3, max_tokens=60, ignore_eos=True)
            plain = replace(drafted, speculation="none")
            both = llm.generate(prompts, drafted)
            for prompt, output in zip(prompts, both, strict=True):
                alone = llm.generate(prompt, plain)[0].outputs[0]
                assert output.outputs[0].token_ids == alone.token_ids
            accepted += sum(output.outputs[0].speculation.num_accepted_tokens for output in both)
    assert accepted > 0


def test_what_cannot_be_quantised_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    save_tiny("llama-tied", tmp_path / "odd")  # rows of 48
    out = tmp_path / "out"
    for to, parts in (("q8_0", "blocks"), ("int4", "groups")):
        with pytest.raises(BrokenModel, match=f"not whole {parts} of 32; this model cannot be quantised"):
            quantize_folder(tmp_path / "odd", to, out, lambda done, total: None)
    with refused("to"):
        quantize_folder(tmp_path / "odd", "q3_k", out, lambda done, total: None)
    assert [path.name for path in tmp_path.iterdir()] == ["odd"]
    sized_model(tmp_path / "m")
    quantize_folder(tmp_path / "m", "q8_0", out, lambda done, total: None)
    with refused("model"):
        quantize_folder(out, "q8_0", tmp_path / "again", lambda done, total: None)
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize("to", ["int4", "fp8"])
def test_codes_beside_their_scales_are_a_checkpoint_that_others_read_too(to, tmp_path, capsys) -> None:
    sized_model(tmp_path / "m")
    prompts, out = tmp_path / "prompts.txt", tmp_path / "out"
    prompts.write_text("w1 w2 w3 w4\n")
    arguments = ["--model", str(tmp_path / "m"), "--out", str(out), "--prompts", str(prompts)]
    assert run(["quantize", *arguments, "--to", to, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["kinds"] == {"bfloat16": 1, to: 14}
    assert 0 < result["distance"]["mean_kl"] < 1
    quantization = json.loads((out / "config.json").read_text())["quantization_config"]
    assert quantization["quant_method"] == "compressed-tensors"
    stored, original = (load_weights(at, load_config(at)) for at in (out, tmp_path / "m"))
    for name, weight in original.items():
        values, found = weight.numbers().float(), stored[name]
        if not found.kind.has_scales:
            assert torch.equal(found.numbers().float(), values), name
            continue
        assert found.kind is COMPRESSED[to]
        error = (found.numbers() - values).abs()
        if to == "int4":  # groups of 64: rows of 64 and 256
            assert found.scales is not None
            steps = found.scales.float().repeat_interleave(64, 1)
            assert bool((error <= 0.56 * steps).all()), "half a step, and what the scale is off by in bf16"
        else:
            assert bool((error <= values.abs() / 16 + values.abs().amax(1, keepdim=True) / 2**18).all())
    kind = load_model(out, device="cpu").kind
    assert kind is (WeightKind.Q4_0 if to == "int4" else WeightKind.FLOAT32)
    with refused("model"):
        quantize_folder(out, "q8_0", tmp_path / "again", lambda done, total: None)


def test_weights_of_zero_stay_zero() -> None:
    zeros = torch.zeros(2, 64)
    codes, scales = rounded_int4(zeros, 32)
    assert bool((codes == 8).all())
    assert not scales.any()
    assert not any(part.float().any() for part in rounded_fp8(zeros))


DOWN = "model.layers.1.mlp.down_proj.weight"
NORM = "model.layers.1.input_layernorm.weight"


def changed_model(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    sized_model(folder, torch.float32)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def change_config(folder: Path, **fields: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def refusal(tmp_path: Path, capsys: pytest.CaptureFixture[str], to: str = "q8_0", out: str = "out") -> str:
    """The line that the command ends with on the model m; it left nothing."""
    before = {path.name for path in tmp_path.iterdir()}
    (tmp_path / "prompts.txt").write_text("w1 w2 w3 w4\n")
    arguments = ["--model", str(tmp_path / "m"), "--to", to, "--prompts", str(tmp_path / "prompts.txt"), "--json"]
    assert run(["quantize", *arguments, "--out", str(tmp_path / out)]) == 1
    assert {path.name for path in tmp_path.iterdir()} == before | {"prompts.txt"}
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["type"] in ("BrokenModel", "InvalidParameter")
    return str(error["message"])


@pytest.mark.parametrize("to", ["q8_0", "q4_1", "q4_k"])
@pytest.mark.parametrize("largest", [3e38, 1e9])
def test_weights_too_large_for_float16_scales_are_refused_by_name(to, largest, tmp_path, capsys) -> None:
    changed_model(tmp_path / "m", lambda tensors: tensors[DOWN][3].copy_(largest * torch.linspace(-1, 1, 256)))
    line = refusal(tmp_path, capsys, to)
    assert f"m: tensor {DOWN} holds weights too large for {to}" in line
    assert line.endswith("quantise to int4 or fp8")


@pytest.mark.parametrize("to", ["q8_0", "int4", "fp8"])
@pytest.mark.parametrize("name", [DOWN, NORM])
def test_a_weight_that_is_not_a_number_is_refused_by_name(name, to, tmp_path, capsys) -> None:
    changed_model(tmp_path / "m", lambda tensors: tensors[name].view(-1)[2:3].fill_(torch.nan))
    assert f"tensor {name} holds a weight that is not a number" in refusal(tmp_path, capsys, to)


def test_a_model_whose_output_is_not_a_number_is_refused(tmp_path, capsys) -> None:
    changed_model(tmp_path / "m", lambda tensors: tensors[NORM].fill_(3e38))
    assert "the original model's output on a prompt is not a number" in refusal(tmp_path, capsys)


def test_a_model_without_a_tokenizer_is_refused_before_anything_is_written(tmp_path, capsys) -> None:
    sized_model(tmp_path / "m")
    (tmp_path / "m/tokenizer.json").unlink()
    assert "holds no tokenizer" in refusal(tmp_path, capsys)


def test_prompts_beyond_the_vocabulary_are_refused_before_anything_is_written(tmp_path, capsys) -> None:
    sized_model(tmp_path / "m")
    change = json.loads((tmp_path / "m/tokenizer.json").read_text())
    change["model"]["vocab"]["w4"] = 99
    (tmp_path / "m/tokenizer.json").write_text(json.dumps(change))
    assert "makes token 99 of a prompt, which the vocabulary of 96 lacks" in refusal(tmp_path, capsys)


def test_prompts_are_cut_to_the_models_context(tmp_path, capsys) -> None:
    sized_model(tmp_path / "m")
    change_config(tmp_path / "m", max_position_embeddings=3)
    (tmp_path / "prompts.txt").write_text("w1 w2 w3 w4\nw5\n")
    arguments = ["--model", str(tmp_path / "m"), "--out", str(tmp_path / "out"), "--to", "q8_0", "--json"]
    assert run(["quantize", *arguments, "--prompts", str(tmp_path / "prompts.txt")]) == 0
    assert json.loads(capsys.readouterr().out)["distance"]["tokens"] == 4


def test_a_folder_that_cannot_be_written_is_one_line_before_the_work(tmp_path, capsys) -> None:
    sized_model(tmp_path / "m")
    (tmp_path / "loop").symlink_to("loop")
    assert "loop exists already; name a new folder" in refusal(tmp_path, capsys, out="loop")
    assert "(File name too long); name a folder that can" in refusal(tmp_path, capsys, out="x" * 300)
    assert "(Not a directory); name a folder that can" in refusal(tmp_path, capsys, out="m/config.json/out")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "extra.json"])
def test_a_file_that_may_not_be_read_is_named_with_its_reason(name, tmp_path, capsys, monkeypatch) -> None:
    sized_model(tmp_path / "m")
    (tmp_path / "m/extra.json").write_text("{}")

    def refusing(opens):  # root may read everything
        def refuse(path, *given, **options):
            if Path(path).name == name and Path(path).parent.name == "m":
                raise PermissionError(errno.EACCES, "Permission denied", str(path))
            return opens(path, *given, **options)

        return refuse

    monkeypatch.setattr(Path, "open", refusing(Path.open))
    monkeypatch.setattr(os, "open", refusing(os.open))
    line = refusal(tmp_path, capsys)
    assert f"{name} cannot be read" in line
    assert "Permission denied" in line


def test_further_chat_templates_are_kept(tmp_path: Path) -> None:
    sized_model(tmp_path / "m")
    (tmp_path / "m/additional_chat_templates").mkdir()
    (tmp_path / "m/additional_chat_templates/tool_use.jinja").write_text("{{ tools }}")
    quantize_folder(tmp_path / "m", "q8_0", tmp_path / "out", lambda done, total: None)
    assert (tmp_path / "out/additional_chat_templates/tool_use.jinja").read_text() == "{{ tools }}"
