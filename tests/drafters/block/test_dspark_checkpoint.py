"""Folders of block drafters: round trips, published layouts, and what is refused by name."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.drafters.block.checkpoint import read, write
from paceline.drafters.block.config import W1, check_target
from paceline.drafters.folder import TargetShape
from paceline.drafters.methods import DFLASH, DSPARK
from paceline.errors import BrokenModel, ModelNotFound, UnsupportedModel
from paceline.models.spec import RopeConfig
from tests.cuda.test_cuda import CONFIG
from tests.drafters.block.dspark_reference import drafter_config, random_tensors
from tests.helpers.errors import refused

OURS = {"tap_norm": True, "mask_embedding": True, "mask_token_id": None, "markov_over_draft_vocab": True}
EMBEDDING = torch.randn(CONFIG.vocab_size, CONFIG.hidden_size, generator=torch.Generator().manual_seed(1))
TARGET = TargetShape.of(CONFIG, EMBEDDING, "some/model")


def config_of(**changes):
    return drafter_config(CONFIG, **{"draft_vocab_size": 60, "target": TARGET, **changes})


@pytest.mark.parametrize(
    "changes",
    [{}, {**OURS, "qk_norm": True}, {"markov_rank": 0, "sample_from_anchor": False}],
    ids=["dspark", "all", "dflash"],
)
def test_what_is_written_is_read(tmp_path, changes):
    config = config_of(**changes)
    llama3 = RopeConfig(theta=5e5, kind="llama3", factor=8.0, original_max_positions=256)
    far = config.body.max_positions // 4
    yarn = RopeConfig(kind="yarn", factor=4.0, original_max_positions=far, beta_fast=16.0, attention_factor=1.25)
    family = "qwen3" if config.body.layer.qk_norm else "llama"
    for rope in (config.body.layer.rope, llama3, yarn):
        config = replace(config, body=replace(config.body, architecture=family).with_layers(rope=rope))
        tensors = random_tensors(config)
        write(tmp_path / "plain", config, tensors)
        found, loaded = read(tmp_path / "plain")
        assert found == config
        assert loaded.keys() == tensors.keys()
        assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)


def test_a_confidence_head_is_ignored(tmp_path):
    config = config_of()
    tensors, path = random_tensors(config), tmp_path / "model.safetensors"
    write(tmp_path, config, tensors)
    head = {"confidence_head.proj.weight": torch.ones(1, 72), "confidence_head.proj.bias": torch.ones(1)}
    save_file(load_file(path) | head, path)
    edit(tmp_path, enable_confidence_head=True, confidence_head_with_markov=True)
    found, loaded = read(tmp_path)
    assert found == config
    assert loaded.keys() == tensors.keys()
    write(tmp_path, found, loaded)
    assert json.loads((tmp_path / "config.json").read_text())["enable_confidence_head"] is False


@pytest.mark.parametrize("group", [8, 64, None])
def test_int8_shards_hold_nearly_the_same(tmp_path, group):
    config = config_of(**OURS)
    tensors = random_tensors(config)
    write(tmp_path, config, tensors, int8=True, group=group, shard_bytes=20_000)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 2
    assert max(path.stat().st_size for path in files) < 40_000
    assert set(json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"].values()) == {
        path.name for path in files
    }
    _, loaded = read(tmp_path)
    for name, tensor in tensors.items():
        if tensor.dim() == 2:
            assert (loaded[name] - tensor).abs().max() <= tensor.abs().max() / 127 * 0.6, name
        else:
            assert torch.equal(loaded[name], tensor)
    write(tmp_path, config, tensors)  # whole again: nothing of the shards is left
    assert [path.name for path in tmp_path.glob("*.safetensors")] == ["model.safetensors"]


def published(folder, config, tensors, **changes):
    """Save as the authors of DFlash and DSpark do: a flat config, ids of layers below the taps, names in `model.`."""
    write(folder, config, tensors)
    raw = json.loads((folder / "config.json").read_text())
    layer = raw["transformer_layer_config"]
    flat = {**layer, "block_size": config.block_size, "num_target_layers": CONFIG.num_layers, "architectures": ["X"]}
    flat["dflash_config"] = {"mask_token_id": config.mask_token_id, "target_layer_ids": [i - 1 for i in config.taps]}
    if config.markov_rank:
        flat["markov_rank"] = config.markov_rank
    (folder / "config.json").write_text(json.dumps({**flat, **changes}))
    found = {f"model.{name}": part for name, part in load_file(folder / "model.safetensors").items()}
    save_file({**found, "lm_head.weight": torch.ones(2, 2)}, folder / "model.safetensors")


@pytest.mark.parametrize("method", [DSPARK, DFLASH])
def test_published_folders_are_read(tmp_path, method):
    rank = 8 if method == DSPARK else 0
    config = config_of(taps=(1, 2), draft_vocab_size=CONFIG.vocab_size, markov_rank=rank, qk_norm=True)
    tensors = random_tensors(config)
    published(tmp_path, config, tensors)
    found, loaded = read(tmp_path)
    assert (found.method, found.taps, found.sample_from_anchor) == (method, (1, 2), method == DSPARK)
    assert found.depth == config.block_size - (method == DFLASH)
    assert found.target.num_layers == CONFIG.num_layers
    assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)


def test_a_drafter_for_another_target_is_refused(tmp_path):
    config = config_of()
    check_target(config, CONFIG, tmp_path)
    for other in (replace(CONFIG, hidden_size=32), CONFIG.of_depth(3), replace(CONFIG, vocab_size=97)):
        with refused("drafter"):
            check_target(config, other, tmp_path)
    unknown = replace(config, target=TargetShape())
    with refused("drafter"):
        check_target(unknown, CONFIG.of_depth(1), tmp_path)


def test_a_target_is_known_by_its_embedding_in_any_precision():
    assert TARGET.is_like(EMBEDDING)
    coarse = EMBEDDING.abs().amax(1, keepdim=True) / 7  # four bits
    assert TARGET.is_like((EMBEDDING / coarse).round() * coarse)
    assert not TARGET.is_like(torch.randn_like(EMBEDDING))
    assert TargetShape().is_like(EMBEDDING)


def edit(folder, **changes):
    raw = json.loads((folder / "config.json").read_text())
    layer = raw["transformer_layer_config"]
    for key, value in changes.items():
        (layer if key in layer else raw)[key] = value
    (folder / "config.json").write_text(json.dumps(raw))


def test_bad_folders_are_refused_by_name(tmp_path):
    config = config_of()
    tensors = random_tensors(config)

    def refused(error, match):
        with pytest.raises(error, match=match):
            read(tmp_path)
        write(tmp_path, config, tensors)

    def stored(change):
        path = tmp_path / "model.safetensors"
        save_file(change(load_file(path)), path)

    with pytest.raises(ModelNotFound, match="does not exist"):
        read(tmp_path / "nowhere")
    refused(BrokenModel, "holds no config.json")
    for name in ("fc.weight", "layers.1.mlp.up_proj.weight", "norm.weight", "d2t"):
        stored(lambda found, name=name: {key: part for key, part in found.items() if key != name})
        refused(BrokenModel, f"tensor {name} is missing")
    edit(tmp_path, num_hidden_layers=3)
    refused(BrokenModel, "tensor layers.2.self_attn.q_proj.weight is missing")
    edit(tmp_path, num_hidden_layers=1)
    refused(BrokenModel, "tensor layers.1.* has no place")
    edit(tmp_path, aux_hidden_state_layer_ids=[0])
    refused(BrokenModel, r"tensor fc.weight has shape \[64, 128\], and config.json asks for \[64, 64\]")
    stored(lambda found: {**found, "fc.weight": found["fc.weight"].to(torch.int8)})
    refused(BrokenModel, "fc.weight holds int8 codes, and fc.weight_scale is missing")
    stored(lambda found: {**found, "norm.weight": found["norm.weight"].int()})
    refused(BrokenModel, "norm.weight has dtype torch.int32")
    stored(lambda found: {key: part for key, part in found.items() if key != W1})
    refused(BrokenModel, "needs a Markov head")
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    refused(BrokenModel, "truncated or damaged")
    path.unlink()
    refused(BrokenModel, "holds no weights")
    for changes, said in (
        ({"block_size": 1}, "block_size must be"),
        ({"draft_vocab_size": 1000}, "draft_vocab_size must be"),
        ({"mask_token_id": None}, "mask_token_id is missing"),
        ({"mask_token_id": 96}, "mask_token_id must be"),
        ({"aux_hidden_state_layer_ids": [1, 1]}, "tapped twice"),
        ({"aux_hidden_state_layer_ids": "all"}, "aux_hidden_state_layer_ids must be"),
        ({"aux_hidden_state_layer_ids": []}, "aux_hidden_state_layer_ids must be"),
        ({"sample_from_anchor": "false"}, "sample_from_anchor must be"),
        ({"paceline": {"tap_norm": "false"}}, "tap_norm must be"),
        ({"speculators_model_type": "magic"}, "no DSpark or DFlash"),
    ):
        edit(tmp_path, **changes)
        refused(BrokenModel, said)
    for changes, said in (
        ({"markov_head_type": "rnn"}, "markov_head_type 'rnn'"),
        ({"model_type": "mamba"}, "model_type 'mamba'"),
        ({"attention_bias": True}, "biases"),
    ):
        edit(tmp_path, **changes)
        refused(UnsupportedModel, said)
    (tmp_path / "config.json").write_text("[]")
    refused(BrokenModel, "must hold a JSON object")
    (tmp_path / "config.json").write_text("{")
    refused(BrokenModel, "cannot be read")
