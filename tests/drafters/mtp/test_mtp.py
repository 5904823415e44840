"""Heads for multi-token prediction: MiMo's names, heads in the model's own checkpoint, folders, and what is refused.

The arithmetic stands beside EAGLE's in tests/drafters/eagle/test_eagle.py."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline import LLM, SamplingParams
from paceline.config import SpeculationConfig
from paceline.drafters.base import DrafterContext
from paceline.drafters.eagle.config import shapes
from paceline.drafters.folder import TargetShape
from paceline.drafters.method_names import drafter_specs, unknown_method
from paceline.drafters.methods import METHODS, MTP, MTP_MODELS, accepts_folder, methods_of
from paceline.drafters.mtp.checkpoint import read, read_native, write
from paceline.drafters.mtp.layouts import LAYOUTS, MIMO, is_head_tensor
from paceline.errors import BrokenModel, InvalidParameter
from paceline.models.decoder import FINAL
from paceline.models.load.loader import load_config
from paceline.models.weights import StoredWeight
from tests.cuda.test_cuda import CONFIG
from tests.drafters.eagle.eagles import config_for, random_tensors
from tests.drafters.overfit import CPU, tiny_decoder
from tests.helpers.tiny import save_tiny

# Names of MiMo-7B's published checkpoint.
PUBLISHED = {
    "model.mtp_layers.0.input_proj.weight": "fc.weight",
    "model.mtp_layers.0.token_layernorm.weight": "embedding_norm.weight",
    "model.mtp_layers.0.hidden_layernorm.weight": "feature_norm.weight",
    "model.mtp_layers.0.final_layernorm.weight": "norm.weight",
    "model.mtp_layers.0.input_layernorm.weight": "layers.0.input_layernorm.weight",
    "model.mtp_layers.0.self_attn.q_proj.bias": "layers.0.self_attn.q_proj.bias",
    "model.mtp_layers.0.mlp.down_proj.weight": "layers.0.mlp.down_proj.weight",
}


def head(**flags):
    biases = frozenset(f"layers.0.self_attn.{part}_proj" for part in "qkv")
    config = config_for(
        CONFIG, fused=False, mtp=True, own_head=False, feature_first=True, norm_output=True, biases=biases, **flags
    )
    return config, random_tensors(config)


def test_the_published_names_are_known_in_both_directions():
    for stored, plain in PUBLISHED.items():
        assert MIMO.plain_name(stored) == plain
        assert MIMO.stored_name(plain) == stored
        assert is_head_tensor(stored)
    assert MIMO.plain_name("model.layers.0.mlp.down_proj.weight") is None
    assert not is_head_tensor("model.layers.0.mlp.down_proj.weight")
    assert tuple(LAYOUTS) == MTP_MODELS


@pytest.mark.parametrize("normed", [True, False])
def test_a_folder_gives_back_what_was_written(normed, tmp_path):
    config, tensors = head(normed_feature=normed)
    write(tmp_path, config, tensors)
    found, again = read(tmp_path, CONFIG)
    assert found == config
    assert found.taps(CONFIG.num_layers) == ((FINAL,) if normed else (CONFIG.num_layers,))
    assert {name: tensor.tolist() for name, tensor in again.items()} == {n: t.tolist() for n, t in tensors.items()}
    assert accepts_folder(MTP, tmp_path)
    assert [method.name for method in methods_of(json.loads((tmp_path / "config.json").read_text()))] == [MTP]


def test_heads_in_the_checkpoint_of_the_model_draft_without_a_folder():
    config, tensors = head(normed_feature=False, head_dim=CONFIG.layer.head_dim)
    body = CONFIG.of_depth(1).with_layers(window=None)
    config = replace(config, body=body, target=TargetShape())
    tensors = random_tensors(config)
    extra = {MIMO.stored_name(name): StoredWeight.of(tensor) for name, tensor in tensors.items()}
    found, again = read_native(CONFIG, extra)
    assert found == config
    assert again.keys() == shapes(config).keys()
    decoder = tiny_decoder()
    context = DrafterContext(
        config=CONFIG,
        device=CPU,
        speculation=SpeculationConfig(method=MTP),
        embedding=decoder.embedding,
        head=decoder.head,
        kernels=decoder.kernels,
        extra=extra,
    )
    (spec,) = [one for one in drafter_specs(SpeculationConfig(method=MTP), native_heads=True) if one.name == MTP]
    drafter = spec.method.make(context)
    assert (drafter.name, drafter.taps) == (MTP, (CONFIG.num_layers,))
    assert not [
        one
        for one in drafter_specs(SpeculationConfig(method=MTP, drafter="none"), native_heads=True)
        if one.name == MTP
    ]


def test_what_lacks_its_heads_is_refused_by_name(tmp_path):
    config, tensors = head()
    write(tmp_path, config, tensors)
    stored = load_file(tmp_path / "model.safetensors")
    save_file({"model.norm.weight": torch.ones(4)}, tmp_path / "model.safetensors")
    with pytest.raises(BrokenModel, match="promises one"):
        read(tmp_path)
    save_file({name: one for name, one in stored.items() if "down_proj" not in name}, tmp_path / "model.safetensors")
    with pytest.raises(BrokenModel, match=r"down_proj\.weight is missing"):
        read(tmp_path)
    with pytest.raises(BrokenModel, match="holds no head"):
        read_native(CONFIG, {})
    write(tmp_path, config, tensors)
    with pytest.raises(InvalidParameter) as refusal:
        read(tmp_path, replace(CONFIG, hidden_size=2 * CONFIG.hidden_size))
    assert refusal.value.field == "drafter"


def test_a_model_with_its_own_head_drafts_by_it_and_answers_the_same(tmp_path):
    save_tiny("qwen2", tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    raw |= {"architectures": ["MiMoForCausalLM"], "model_type": "mimo", "num_nextn_predict_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    target = load_config(tmp_path)
    config, _ = head(normed_feature=False)
    heads = random_tensors(replace(config, body=target.of_depth(1)))
    stored = load_file(tmp_path / "model.safetensors")
    stored |= {MIMO.stored_name(name): tensor for name, tensor in heads.items()}
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    wanted = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
    answers = []
    for method in ("none", "mtp"):
        with LLM(str(tmp_path), method=method, k=3 if method == "mtp" else None) as llm:
            (request,) = llm.generate([{"prompt_token_ids": list(range(3, 20))}], SamplingParams(**wanted))
            answers.append(request.outputs[0])
    assert answers[0].token_ids == answers[1].token_ids
    assert answers[1].speculation.num_draft_tokens > 0


def test_names_of_other_engines_lead_to_the_method():
    assert "called mtp here" in unknown_method("deepseek_mtp")
    assert METHODS[MTP].vllm == "mtp"
