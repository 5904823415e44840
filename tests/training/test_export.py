"""Drafters exported for other engines: what is written is what was trained, and what a format lacks is refused by
name."""

from __future__ import annotations

import json
from dataclasses import replace
from unittest import mock

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from paceline.cli.app import run
from paceline.drafters.block import checkpoint as dspark_checkpoint
from paceline.drafters.block.config import W1, DSparkConfig
from paceline.drafters.block.config import shapes as block_shapes
from paceline.drafters.eagle import checkpoint as eagle_checkpoint
from paceline.drafters.folder import TargetShape
from paceline.drafters.heads import checkpoint as medusa_checkpoint
from paceline.errors import BrokenModel, ModelNotFound, UnsupportedModel
from paceline.models.spec import uniform
from paceline.training.export import ExportTarget, export
from tests.cuda.test_cuda import CONFIG
from tests.drafters.eagle.eagles import config_for, random_tensors
from tests.drafters.overfit import random_heads
from tests.helpers.errors import refused

HEAD = torch.randn(CONFIG.vocab_size, CONFIG.hidden_size, generator=torch.Generator().manual_seed(4))
TARGET = ExportTarget("some/model", CONFIG, lambda: HEAD)
SPECULATORS = ("speculators_model_type", "speculators_config", "transformer_layer_config")


def eagle3(folder, **flags):
    config = config_for(CONFIG, **{"layer_ids": (0, 1, 2), "vocab": 40, **flags})
    tensors = random_tensors(config)
    eagle_checkpoint.write(folder, config, tensors)
    return config, tensors


def block(folder, **changes):
    body = uniform(
        architecture="qwen3",
        vocab_size=CONFIG.vocab_size,
        hidden_size=CONFIG.hidden_size,
        intermediate_size=96,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        max_positions=512,
        qk_norm=True,
    )
    given = {
        "body": body,
        "block_size": 5,
        "taps": (0, 2),
        "mask_token_id": 7,
        "draft_vocab_size": 30,
        "markov_rank": 8,
        "markov_over_draft_vocab": True,
    }
    config = DSparkConfig(**{**given, **changes})
    tensors = {name: torch.randn(shape) for name, shape in block_shapes(config).items()}
    if "d2t" in tensors:
        tensors["d2t"] = torch.arange(0, 60, 2) - torch.arange(30)
    dspark_checkpoint.write(folder, config, tensors)
    return config, tensors


@pytest.mark.parametrize("form", ["eagle3", "speculators"])
def test_an_eagle3_drafter_keeps_its_weights_and_layers(form, tmp_path):
    config, tensors = eagle3(tmp_path / "in", fc_norm=True, norm_output=True)
    assert export(tmp_path / "in", form, tmp_path / "out", TARGET) == "eagle3"
    found, again = eagle_checkpoint.read(tmp_path / "out", CONFIG)
    assert replace(found, target=config.target) == config
    assert all(torch.equal(again[name], tensor) for name, tensor in tensors.items())
    raw, stored = json.loads((tmp_path / "out/config.json").read_text()), load_file(tmp_path / "out/model.safetensors")
    assert raw["norm_before_residual"] is False, "vLLM takes a missing key for true"
    assert any(name.startswith("midlayer.") for name in stored) == (form == "eagle3")
    assert all(key in raw for key in SPECULATORS) == (form == "speculators")
    if form == "speculators":
        assert raw["eagle_aux_hidden_state_layer_ids"] == [0, 1, 2]
        assert raw["transformer_layer_config"]["num_aux_hidden_states"] == 3
        assert raw["speculators_config"]["verifier"]["name_or_path"] == "some/model"


def test_layers_left_to_the_target_are_written_out(tmp_path):
    deep = CONFIG.of_depth(30)
    eagle3(tmp_path / "in", layer_ids=None)
    folder = tmp_path / "in/config.json"
    raw = json.loads(folder.read_text())
    folder.write_text(json.dumps({**raw, "paceline": {}}))
    export(tmp_path / "in", "speculators", tmp_path / "out", TARGET._replace(config=deep))
    assert eagle_checkpoint.read(tmp_path / "out")[0].layer_ids == (2, 15, 27)


def test_a_head_left_to_the_target_is_written_out(tmp_path):
    _, tensors = eagle3(tmp_path / "in", own_head=False)
    with refused("model"):
        export(tmp_path / "in", "eagle3", tmp_path / "out")
    export(tmp_path / "in", "eagle3", tmp_path / "out", TARGET)
    stored = load_file(tmp_path / "out/model.safetensors")
    assert torch.equal(stored["lm_head.weight"], HEAD[tensors["d2t"] + torch.arange(40)])


@pytest.mark.parametrize("form", ["dspark", "speculators"])
def test_a_block_drafter_is_written_as_vllm_reads_it(form, tmp_path):
    config, tensors = block(tmp_path / "in")
    assert export(tmp_path / "in", form, tmp_path / "out", TARGET) == "dspark"
    raw, stored = json.loads((tmp_path / "out/config.json").read_text()), load_file(tmp_path / "out/model.safetensors")
    ids = torch.arange(0, 60, 2)
    assert raw["architectures"] == ["Qwen3DSparkModel"]
    assert (raw["sample_from_anchor"], raw["enable_confidence_head"]) == (True, False)
    assert raw["transformer_layer_config"]["rope_parameters"]["rope_theta"] == config.body.layer.rope.theta
    assert torch.equal(stored["lm_head.weight"], HEAD[ids])
    assert torch.equal(stored["d2t"], tensors["d2t"])
    assert stored["t2d"].nonzero()[:, 0].tolist() == ids.tolist()
    assert stored[W1].shape == (CONFIG.vocab_size, 8)
    assert torch.equal(stored[W1][ids], tensors[W1])
    assert not stored[W1][1::2].any()
    found, again = dspark_checkpoint.read(tmp_path / "out")
    assert found == replace(config, markov_over_draft_vocab=False, target=TargetShape(name="some/model"))
    assert torch.equal(again["fc.weight"], tensors["fc.weight"])


def test_medusa_heads_are_written_as_vllm_reads_them(tmp_path):
    heads = random_heads(CONFIG.hidden_size, CONFIG.vocab_size)
    shared = [head._replace(output=None) for head in heads]
    medusa_checkpoint.save_heads(tmp_path / "in", shared)
    export(tmp_path / "in", "medusa", tmp_path / "out", TARGET)
    raw = json.loads((tmp_path / "out/config.json").read_text())
    assert raw["model_type"] == "medusa"
    assert raw["architectures"] == ["MedusaModel"]
    assert (raw["hidden_size"], raw["vocab_size"], raw["medusa_fc_bias"]) == (64, 96, True)
    again = medusa_checkpoint.load_heads(tmp_path / "out", CONFIG)
    assert all(torch.equal(head.output, HEAD) for head in again)
    assert torch.equal(again[1].blocks[0][0], heads[1].blocks[0][0])


@pytest.mark.parametrize(
    ("make", "changes", "form", "lacks"),
    [
        (block, {"tap_norm": True}, "dspark", "tap_norm"),
        (block, {"mask_embedding": True}, "dspark", "mask_embedding"),
        (eagle3, {"qk_norm": True}, "eagle3", "norms of q and k"),
        (eagle3, {"biases": frozenset({"fc"})}, "speculators", "a bias of fc"),
        (eagle3, {"norm_before_fc": True, "fc_norm": True}, "eagle3", "both norm_before_fc and fc_norm"),
    ],
)
def test_what_a_class_of_vllm_lacks_is_refused_by_name(make, changes, form, lacks, tmp_path):
    make(tmp_path / "in", **changes)
    with pytest.raises(UnsupportedModel, match=lacks):
        export(tmp_path / "in", form, tmp_path / "out", TARGET)
    assert not (tmp_path / "out").exists()


def test_a_block_drafter_without_norms_of_q_and_k_is_refused(tmp_path):
    config, _ = block(tmp_path / "other")
    block(tmp_path / "in", body=replace(config.body, architecture="llama").with_layers(qk_norm=None))
    with pytest.raises(UnsupportedModel):
        export(tmp_path / "in", "dspark", tmp_path / "out", TARGET)


def test_a_format_of_another_method_is_refused_with_the_one_to_take(tmp_path):
    eagle3(tmp_path / "in")
    with refused("format"):
        export(tmp_path / "in", "medusa", tmp_path / "out", TARGET)
    config = config_for(CONFIG, fused=False, own_head=False)
    eagle_checkpoint.write(tmp_path / "first", config, random_tensors(config))
    with refused("format"):
        export(tmp_path / "first", "eagle3", tmp_path / "out", TARGET)
    with refused("format"):
        export(tmp_path / "in", "onnx", tmp_path / "out")


def test_folders_that_cannot_be_read_or_written_are_refused(tmp_path):
    eagle3(tmp_path / "in")
    with refused("out"):
        export(tmp_path / "in", "eagle3", tmp_path / "in")
    with pytest.raises(ModelNotFound):
        export(tmp_path / "nowhere", "eagle3", tmp_path / "out")
    (tmp_path / "empty").mkdir()
    with pytest.raises(BrokenModel):
        export(tmp_path / "empty", "eagle3", tmp_path / "out")


def test_a_full_disk_is_one_line_and_leaves_no_folder(tmp_path):
    eagle3(tmp_path / "in")
    full = mock.patch("paceline.drafters.folder.save_file", side_effect=SafetensorError("No space left on device"))
    with full, refused("out"):
        export(tmp_path / "in", "eagle3", tmp_path / "out", TARGET)
    assert not (tmp_path / "out").exists()
    (tmp_path / "file").write_text("")
    with refused("out"):
        export(tmp_path / "in", "eagle3", tmp_path / "file" / "out", TARGET)


def test_the_command_writes_and_says_so(tmp_path, capsys):
    eagle3(tmp_path / "in")
    arguments = ["export", str(tmp_path / "in"), "--format", "eagle3", "--out", str(tmp_path / "out")]
    with mock.patch("paceline.training.export.target_of", return_value=TARGET) as asked:
        assert run([*arguments, "--json"]) == 0
        assert asked.call_count == 0
        assert json.loads(capsys.readouterr().out)["method"] == "eagle3"
        assert run([*arguments, "--model", "some/model"]) == 1
        assert "is there already" in capsys.readouterr().err
