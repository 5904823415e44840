"""Configs and weights from Hugging Face folders: read as transformers reads them, or refused in one line."""

from __future__ import annotations

import contextlib
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.errors import BrokenModel, ModelError, ModelNotFound, UnsupportedModel
from paceline.models.families import FAMILIES
from paceline.models.families.hf import NEUTRAL, rope_scaling
from paceline.models.load.hf_config import parse_config
from paceline.models.load.loader import load_config, load_generation_defaults, load_weights
from paceline.models.load.open_model import load_model
from paceline.models.rope import rope_tables
from paceline.models.spec import HEAD, RopeConfig
from paceline.models.weights import WeightKind
from tests.helpers.tiny import SMALL, write_tokenizer

RAW: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], **SMALL, "num_hidden_layers": 3}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("Llama", {"rms_norm_eps": 1e-3}, {"rms_norm_eps": 1e-3, "windows": ()}),
    "llama tied": ("Llama", {"tie_word_embeddings": True}, {"tie_embeddings": True}),
    "llama biased": ("Llama", {"attention_bias": True, "mlp_bias": True}, {"output_bias": True, "mlp_bias": True}),
    "llama wide heads": ("Llama", {"head_dim": 32}, {"head_dim": 32, "q_size": 128}),
    "mistral": ("Mistral", {"sliding_window": 16}, {"windows": (16, 16), "qkv_bias": False}),
    "mistral full": ("Mistral", {"sliding_window": None}, {"windows": ()}),
    "qwen2": ("Qwen2", {}, {"qkv_bias": True, "output_bias": False, "windows": ()}),
    "qwen2 windows": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
        {"windows": (None, 8)},
    ),
    "qwen3": ("Qwen3", {"head_dim": 32}, {"qk_norm": HEAD, "head_dim": 32, "qkv_bias": False}),
    "qwen3 biased": ("Qwen3", {"head_dim": 32, "attention_bias": True}, {"qkv_bias": True, "output_bias": True}),
}


@pytest.mark.parametrize("case", MODELS)
def test_every_architecture_loads_as_transformers_wrote_it(case: str, tmp_path: Path, write_model: Any) -> None:
    kind, options, expected = MODELS[case]
    model = write_model(tmp_path, kind, **options)
    config = load_config(tmp_path)
    assert config.architecture == kind.lower()
    assert (config.vocab_size, config.hidden_size, config.num_layers) == (96, 64, 2)
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2,))
    found = {field: getattr(config if hasattr(config, field) else config.layer, field) for field in expected}
    assert found == expected
    weights = load_weights(tmp_path, config)
    state = model.state_dict()
    assert set(weights) == set(state) - ({"lm_head.weight"} if config.tie_embeddings else set())
    assert all(torch.equal(weight.data, state[name]) for name, weight in weights.items())


def test_sharded_weights_are_one_model(tmp_path: Path, write_model: Any) -> None:
    model = write_model(tmp_path, "Llama", max_shard_size="50KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    weights = load_weights(tmp_path, load_config(tmp_path))
    assert all(torch.equal(weights[name].data, tensor) for name, tensor in model.state_dict().items())


def test_weights_keep_their_dtype(tmp_path: Path, write_model: Any) -> None:
    write_model(tmp_path, "Llama").to(torch.bfloat16).save_pretrained(tmp_path)
    assert {weight.kind for weight in load_weights(tmp_path, load_config(tmp_path)).values()} == {WeightKind.BFLOAT16}


ROPE_FORMS: list[tuple[dict[str, Any], RopeConfig]] = [
    ({}, RopeConfig(theta=10_000.0)),
    ({"rope_theta": 5e5}, RopeConfig(theta=5e5)),
    ({"rope_theta": 5e5, "rope_scaling": None}, RopeConfig(theta=5e5)),
    ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, RopeConfig(theta=5e5)),
    (
        {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
        RopeConfig(theta=5e5, kind="linear", factor=2.0),
    ),
    (
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0}},
        RopeConfig(theta=5e5, kind="linear", factor=2.0),
    ),
    (
        {"rope_theta": 5e5, "rope_scaling": LLAMA3},
        RopeConfig(theta=5e5, kind="llama3", factor=8.0, original_max_positions=32),
    ),
    (
        {"rope_parameters": LLAMA3 | {"rope_theta": 5e5}},
        RopeConfig(theta=5e5, kind="llama3", factor=8.0, original_max_positions=32),
    ),
]


@pytest.mark.parametrize(("keys", "expected"), ROPE_FORMS)
def test_old_and_new_spellings_of_rope_mean_the_same(keys: dict[str, Any], expected: RopeConfig) -> None:
    assert parse_config(RAW | keys, "config.json").layer.rope == expected


def test_transformers_writes_a_rope_we_read(tmp_path: Path, write_model: Any) -> None:
    write_model(tmp_path, "Llama", rope_parameters=LLAMA3 | {"rope_theta": 7e4})
    assert load_config(tmp_path).layer.rope == RopeConfig(
        theta=7e4, kind="llama3", factor=8.0, original_max_positions=32
    )


YARNS: dict[str, dict[str, Any]] = {
    "as Qwen asks for it": {},
    "betas": {"beta_fast": 16.0, "beta_slow": 2.0},
    "without rounding": {"truncate": False, "factor": 8.0},
    "attention factor": {"attention_factor": 1.25},
    "mscale": {"mscale": 1.0, "mscale_all_dim": 0.7},
    "one mscale alone": {"mscale": 0.5},
}


@pytest.mark.parametrize(
    "keys",
    [
        *(keys for keys, _ in ROPE_FORMS),
        *({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, **each}} for each in YARNS.values()),
    ],
)
def test_a_rope_that_is_written_is_read_back(keys) -> None:
    rope = parse_config(RAW | keys, "config.json").layer.rope
    for written in (
        {"rope_theta": rope.theta, "rope_scaling": rope_scaling(rope)},
        {"rope_parameters": {**rope_scaling(rope), "rope_theta": rope.theta}},
    ):
        assert parse_config(RAW | written, "config.json").layer.rope == rope


@pytest.mark.parametrize("case", YARNS)
@pytest.mark.parametrize("theta", [1e4, 1e6])
def test_yarn_gives_the_tables_of_transformers(case: str, theta: float) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    raw = RAW | {"rope_scaling": YARN | YARNS[case], "rope_theta": theta}
    config = parse_config(raw, "config.json")
    oracle = LlamaRotaryEmbedding(
        LlamaConfig(**(raw | {"rope_parameters": YARN | YARNS[case] | {"rope_theta": theta}}))
    )
    expected = oracle(torch.zeros(1), torch.arange(500)[None])
    for got, wanted in zip(
        rope_tables(config.layer.rope, config.layer.head_dim, 500, torch.device("cpu")), expected, strict=True
    ):
        torch.testing.assert_close(got, wanted[0, :, : config.layer.head_dim // 2], rtol=1e-6, atol=1e-6)


def test_yarn_lengthens_a_context_that_the_config_left_short() -> None:
    raw = RAW | {"max_position_embeddings": 64, "rope_scaling": YARN | {"original_max_position_embeddings": 64}}
    assert parse_config(raw, "c").max_positions == 256
    assert parse_config(RAW | {"max_position_embeddings": 500, "rope_scaling": YARN}, "c").max_positions == 500


def test_layer_types_choose_the_windows() -> None:
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    raw = RAW | {"architectures": ["Qwen3ForCausalLM"], "layer_types": kinds, "sliding_window": 8, "head_dim": 16}
    assert parse_config(raw | {"use_sliding_window": True}, "c").windows == (None, 8, None)


UNSUPPORTED: list[tuple[dict[str, Any], str]] = [
    ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
    ({"architectures": [], "model_type": "gemma"}, "gemma"),
    ({"architectures": ["LlamaForCausalLM", "Other"]}, "Other"),
    ({"hidden_act": "gelu"}, "gelu"),
    ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "longrope"),
    ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
    ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "differ between layers"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),  # of a drafter, whose weights are plain
    ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
    ({"num_local_experts": 8}, "num_local_experts"),
    ({"architectures": ["Qwen2ForCausalLM"], "layer_types": ["linear_attention"] * 3}, "linear_attention"),
    ({"architectures": ["MistralForCausalLM"], "layer_types": ["full_attention"] * 3}, "layer_types"),
]


@pytest.mark.parametrize(("keys", "named"), UNSUPPORTED)
def test_what_the_decoder_would_ignore_is_refused(keys: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModel, match=named) as caught:
        parse_config(RAW | keys, "config.json")
    assert "\n" not in str(caught.value)


def test_an_unknown_architecture_is_refused_with_those_supported() -> None:
    with pytest.raises(UnsupportedModel, match=r"supported: Llama.*, Mistral.*, Qwen2.*, Qwen3"):
        parse_config(RAW | {"architectures": ["MambaForCausalLM"]}, "config.json")


BROKEN: list[tuple[dict[str, Any], str]] = [
    *[({key: None}, f"the key {key} is missing") for key in RAW if key not in ("architectures", "num_key_value_heads")],
    ({"architectures": None}, "architectures is missing"),
    ({"vocab_size": "many"}, "vocab_size must be a positive integer"),
    ({"hidden_size": 0}, "hidden_size must be a positive integer"),
    ({"rms_norm_eps": -1.0}, "rms_norm_eps must be a positive number"),
    ({"num_key_value_heads": 3}, "not a multiple of num_key_value_heads"),
    ({"hidden_size": 66}, "hidden_size .66. is not a multiple"),
    ({"head_dim": 15}, "head_dim must be even"),
    ({"eos_token_id": "</s>"}, "eos_token_id"),
    ({"rope_scaling": {"rope_type": "linear"}}, "factor is missing"),
    ({"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}}, "high_freq_factor"),
    ({"architectures": ["MistralForCausalLM"], "sliding_window": 0}, "sliding_window"),
    ({"architectures": ["Qwen2ForCausalLM"], "layer_types": ["full_attention"]}, "all 3 layers"),
    ({"architectures": "LlamaForCausalLM"}, "architectures must be a list of names, found 'LlamaForCausalLM'"),
    ({"architectures": [["LlamaForCausalLM"]]}, "architectures must be a list of names"),
    ({"architectures": {"name": "LlamaForCausalLM"}}, "architectures must be a list of names"),
    ({"tie_word_embeddings": "false"}, "tie_word_embeddings must be true or false without quotation marks"),
    ({"attention_bias": "true"}, "attention_bias must be true or false"),
    ({"mlp_bias": 1}, "mlp_bias must be true or false"),
    ({"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": "false"}, "use_sliding_window must be true or"),
    ({"rope_scaling": YARN | {"truncate": "no"}}, "truncate must be true or false"),
    ({"rope_theta": 10**400}, "rope_theta must be a positive number"),
    ({"hidden_size": "x" * 10_000}, r"hidden_size must be a positive integer .* found 'xxx.*…$"),
]


@pytest.mark.parametrize(("keys", "message"), BROKEN)
def test_a_config_that_makes_no_sense_names_the_key(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(BrokenModel, match=message):
        parse_config(RAW | keys, "config.json")


EXOTIC: dict[str, Any] = {
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "rope_scaling": LLAMA3,
    "rope_parameters": YARN,
    "tie_word_embeddings": True,
    "attention_bias": True,
    "mlp_bias": True,
    "use_sliding_window": True,
    "sliding_window": 8,
    "max_window_layers": 1,
    "layer_types": ["sliding_attention"] * 3,
    "original_max_position_embeddings": 32,
    "bos_token_id": 1,
    "eos_token_id": [1, 2],
    "quantization_config": None,
}


JUNK = [None, True, False, -1, 0, 1, 1.5, math.nan, math.inf, 10**30, "", "x", [], ["x"], [None], {}, {"x": 1}]


FURTHER = (  # keys of some families
    *("query_pre_attn_scalar", "use_bidirectional_attention", "rope_local_base_freq", "sliding_window_pattern"),
    *("no_rope_layer_interval", "layer_norm_eps", "attention_out_bias", "use_bias", "hidden_activation"),
)


@pytest.mark.parametrize("kind", [family.classes[-1] for family in FAMILIES])
def test_no_config_causes_anything_but_a_model_error(kind: str) -> None:
    sound = {key: value for key, value in (RAW | EXOTIC).items() if value is not None}
    sound["architectures"] = [kind]
    for key in [*RAW, *EXOTIC, *NEUTRAL, *FURTHER, "hidden_act"]:
        for value in JUNK:
            for absent in ({}, {"layer_types": None}):
                with contextlib.suppress(ModelError):
                    parse_config(sound | absent | {key: value}, "config.json")
    for key in [*LLAMA3, "type", "rope_theta"]:
        for value in JUNK:
            with contextlib.suppress(ModelError):
                parse_config(RAW | {"rope_scaling": LLAMA3 | {key: value}}, "config.json")


@pytest.fixture
def llama(tmp_path: Path, write_model: Any) -> Path:
    write_model(tmp_path, "Llama")
    return tmp_path


def refusal(folder: Path) -> str:
    with pytest.raises(ModelError) as caught:
        load_weights(folder, load_config(folder))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def edit(folder: Path, change: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_a_missing_tensor_is_named(llama: Path) -> None:
    edit(llama, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    assert "model.layers.1.mlp.up_proj.weight is missing" in refusal(llama)


def test_a_misshapen_tensor_is_named_with_both_shapes(llama: Path) -> None:
    edit(llama, lambda tensors: tensors.update({"model.norm.weight": torch.ones(63)}))
    assert "model.norm.weight has shape [63], the config says [64]" in refusal(llama)


def test_an_unexpected_tensor_is_refused(llama: Path) -> None:
    edit(llama, lambda tensors: tensors.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(64)}))
    assert "model.layers.0.self_attn.q_proj.bias is not part of" in refusal(llama)


def test_tensors_no_layer_claims_go_to_the_drafter_that_declares_them(llama: Path) -> None:
    extra = {"mtp.norm.weight": torch.rand(64), "mtp.fc.weight": torch.rand(64, 128).bfloat16()}
    edit(llama, lambda tensors: tensors.update(extra))
    assert "mtp." in refusal(llama)
    write_tokenizer(llama, 96)
    loaded = load_model(llama, device="cpu", declared=lambda name: name.startswith("mtp."))
    assert loaded.extra.keys() == extra.keys()
    assert all(torch.equal(loaded.extra[name].data, tensor) for name, tensor in extra.items())
    assert loaded.extra["mtp.fc.weight"].kind is WeightKind.BFLOAT16
    with pytest.raises(BrokenModel, match=r"mtp\.(norm|fc)\.weight is not part of"):
        load_model(llama, device="cpu", declared=lambda name: name == "mtp.other")


def test_integer_weights_are_refused(llama: Path) -> None:
    edit(llama, lambda tensors: tensors.update({"model.norm.weight": torch.ones(64, dtype=torch.int8)}))
    assert "model.norm.weight has dtype I8" in refusal(llama)


def test_rotary_buffers_of_old_checkpoints_are_left_out(llama: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit(llama, lambda tensors: tensors.update({name: torch.ones(8)}))
    assert name not in load_weights(llama, load_config(llama))


def test_a_tied_model_may_store_its_head_twice_but_not_differently(tmp_path: Path, write_model: Any) -> None:
    write_model(tmp_path, "Llama", tie_word_embeddings=True)
    edit(tmp_path, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}))
    assert "lm_head.weight" not in load_weights(tmp_path, load_config(tmp_path))
    edit(tmp_path, lambda tensors: tensors["lm_head.weight"].add_(1))
    assert "tie_word_embeddings" in refusal(tmp_path)


@pytest.mark.parametrize("keep", [0, 4, 100, 0.5, 0.99])
def test_a_truncated_file_is_refused(llama: Path, keep: float) -> None:
    data = (llama / "model.safetensors").read_bytes()
    (llama / "model.safetensors").write_bytes(data[: int(keep if keep >= 1 else keep * len(data))])
    assert "truncated or damaged" in refusal(llama)


def test_a_missing_shard_is_named(tmp_path: Path, write_model: Any) -> None:
    write_model(tmp_path, "Llama", max_shard_size="50KB")
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    shard.unlink()
    assert shard.name in refusal(tmp_path)


def test_an_index_cannot_point_outside_the_folder(llama: Path) -> None:
    (llama / "model.safetensors").rename(llama.parent / "elsewhere.safetensors")
    index = {"weight_map": {"model.norm.weight": "../elsewhere.safetensors"}}
    (llama / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "elsewhere" in refusal(llama)


@pytest.mark.parametrize(
    ("present", "hint"),
    [(None, "model.safetensors is missing"), ("pytorch_model.bin", "save_pretrained"), ("m.gguf", "m.gguf")],
)
def test_a_folder_without_weights_says_what_to_do(llama: Path, present: str | None, hint: str) -> None:
    (llama / "model.safetensors").unlink()
    if present:
        (llama / present).touch()
    assert hint in refusal(llama)


def test_a_folder_without_config_and_one_with_a_damaged_one(llama: Path) -> None:
    (llama / "config.json").write_text("{")
    assert "config.json cannot be read" in refusal(llama)
    (llama / "config.json").write_text("[]")
    assert "must hold a JSON object" in refusal(llama)
    (llama / "config.json").unlink()
    assert "holds no config.json; a model's folder has config.json, tokenizer.json and" in refusal(llama)
    inner = llama / "snapshots" / "b7"
    inner.mkdir(parents=True)
    (inner / "config.json").write_text("{}")
    assert refusal(llama).endswith(f"holds no config.json; name the folder that does, such as {inner}")
    with pytest.raises(ModelNotFound):
        load_config(llama / "nothing")


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_an_end_of_text_id_beyond_the_vocabulary_is_refused(llama: Path, name: str) -> None:
    file = llama / name
    before = json.loads(file.read_text()) if file.exists() else {}
    (llama / "generation_config.json").unlink(missing_ok=True)
    file.write_text(json.dumps(before | {"eos_token_id": [2, 96]}))
    with pytest.raises(BrokenModel, match=rf"{name}: the end-of-text id 96 is not one of the vocabulary's 96 tokens"):
        load_config(llama)
    file.write_text(json.dumps(before | {"eos_token_id": [2, 95]}))
    assert load_config(llama).eos_token_ids == (2, 95)


def test_generation_defaults_are_read_and_their_eos_outranks_the_config(llama: Path) -> None:
    file = llama / "generation_config.json"
    file.write_text(json.dumps({"eos_token_id": [5, 6], "temperature": 0.6, "top_k": None, "do_sample": True, "x": 1}))
    assert load_generation_defaults(llama) == {"eos_token_id": [5, 6], "temperature": 0.6, "do_sample": True}
    assert load_config(llama).eos_token_ids == (5, 6)
    file.write_text(json.dumps({"eos_token_id": 7}))
    assert load_config(llama).eos_token_ids == (7,)
    file.write_text(json.dumps({"temperature": "warm"}))
    with pytest.raises(BrokenModel, match="temperature must be a number"):
        load_generation_defaults(llama)
    file.unlink()
    assert load_generation_defaults(llama) == {}
    assert load_config(llama).eos_token_ids == (2,)


# ---- folders that are no models --------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_config", [False, True])
def test_a_lora_folder_is_called_one_with_the_name_of_its_model(with_config: bool, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "some/model"}))
    (tmp_path / "adapter_model.safetensors").touch()
    if with_config:
        (tmp_path / "config.json").write_text(json.dumps(RAW))
    with pytest.raises(BrokenModel, match=r"LoRA adapter of some/model, not a model\. Merge the two") as caught:
        load_weights(tmp_path, load_config(tmp_path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("adapter", ["[]", "{", '{"base_model_name_or_path": 5}'])
def test_a_damaged_lora_folder_is_still_called_one(adapter: str, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(adapter)
    with pytest.raises(BrokenModel, match="LoRA adapter, not a model"):
        load_config(tmp_path)


def test_a_folder_without_a_tokenizer_is_refused_before_its_weights_are_read(
    tmp_path: Path, write_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(tmp_path, "Llama")
    monkeypatch.setattr("paceline.models.load.open_model.Decoder", None)
    with pytest.raises(BrokenModel, match=r"holds no tokenizer: tokenizer\.json is missing; copy it"):
        load_model(tmp_path, device="cpu")


def test_a_config_nested_without_end_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"a":' * 100_000 + "1" + "}" * 100_000)
    with pytest.raises(BrokenModel, match="nested too deeply"):
        load_config(tmp_path)


def test_generation_defaults_take_no_word_for_true(llama: Path) -> None:
    (llama / "generation_config.json").write_text('{"do_sample": "false"}')
    with pytest.raises(BrokenModel, match="do_sample must be true or false, found 'false'"):
        load_generation_defaults(llama)
