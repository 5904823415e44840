"""The config of an EAGLE drafter: config.json as published or in speculators' layout, and the tensors it asks for.

EAGLE-3 reads the residual stream *entering* some layers of the target (vLLM's and speculators' meaning of layer ids),
EAGLE-1 the hidden state after the final norm. A folder that names no layers reads 2, L // 2 and L - 3. A head for
multi-token prediction (drafters/mtp) has the same drafter around another layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from paceline.drafters import folder
from paceline.drafters.methods import EAGLE, EAGLE3, MTP
from paceline.errors import BrokenModel, InvalidParameter, UnsupportedModel
from paceline.files.json_fields import Json, JsonFields
from paceline.models.decoder import FINAL
from paceline.models.families.hf import rope_scaling
from paceline.models.load.hf_config import parse_config
from paceline.models.spec import ModelConfig

HEADS = 32  # transformers' default number for both families, which speculators' files leave out
LLAMAS = (EAGLE, "qwen2", "mistral")  # families whose layers differ from Llama's in biases and windows alone
POSITIONS = 2048  # transformers' default
LAYER = "layers.0"
EMBEDDING_NORM, FEATURE_NORM = "embedding_norm", "feature_norm"  # of MTP
UP = ("gate", "up")


@dataclass(frozen=True, kw_only=True)
class EagleConfig:
    body: ModelConfig  # the one layer; vocab_size is the target's
    fused: bool = True  # EAGLE-3; False: EAGLE-1 or MTP
    mtp: bool = False  # embedding and feature are normed before `fc` joins them, and the layer norms its own input
    feature_first: bool = False  # MTP: order of the halves that `fc` joins
    normed_feature: bool = True  # MTP: reads the hidden state after the final norm; False: before it
    layer_ids: tuple[int, ...] | None = None  # None: as published for the target's number of layers
    target_hidden_size: int = 0  # 0: the drafter's own
    draft_vocab_size: int = 0  # 0: the target's vocabulary
    norm_before_residual: bool = False
    norm_before_fc: bool = False  # one norm over all taps
    fc_norm: bool = False  # a norm for each tap
    norm_output: bool = False  # feed back the normed output
    own_embedding: bool = False
    own_head: bool = True
    biases: frozenset[str] = field(default_factory=frozenset)  # names of linear layers that have one
    target: folder.TargetShape = folder.UNKNOWN_TARGET

    @property
    def method(self) -> str:
        return EAGLE3 if self.fused else MTP if self.mtp else EAGLE

    @property
    def vocab(self) -> int:
        return self.draft_vocab_size or self.body.vocab_size

    @property
    def feature_size(self) -> int:
        return self.target_hidden_size or self.body.hidden_size

    @property
    def num_taps(self) -> int:
        return 1 if not self.fused else 3 if self.layer_ids is None else len(self.layer_ids)

    def taps(self, num_layers: int) -> tuple[int, ...]:
        """Return the taps of a target with `num_layers` layers."""
        if self.fused:
            return self.layer_ids or published_layers(num_layers)
        return (FINAL,) if self.normed_feature else (num_layers,)


def published_layers(num_layers: int) -> tuple[int, ...]:
    return 2, num_layers // 2, num_layers - 3


def is_eagle(raw: Mapping[str, Any], names: frozenset[str]) -> str | None:
    """Return the method of a folder with this config.json and tensors of these names if it is an EAGLE."""
    kind = raw.get("speculators_model_type")
    if kind is not None:
        return str(kind) if kind in (EAGLE, EAGLE3) else None
    names = frozenset(plain_name(name) for name in names)
    if "fc.weight" not in names or f"{LAYER}.self_attn.q_proj.weight" not in names:
        return None
    if f"{LAYER}.hidden_norm.weight" in names:
        return EAGLE3
    return EAGLE if f"{LAYER}.input_layernorm.weight" not in names and "hidden_norm.weight" not in names else None


def plain_name(name: str) -> str:
    """Return a tensor's name in the spelling that all layouts share."""
    return name.removeprefix("model.").replace("midlayer.", f"{LAYER}.")


def shapes(config: EagleConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a drafter's tensors by name."""
    body, wide = config.body, config.body.hidden_size
    fused = config.num_taps * config.feature_size
    layer = folder.layer_shapes(body, 2 * wide if config.fused else wide)
    parts: dict[str, tuple[int, ...]] = {"fc": (wide, fused if config.fused else 2 * wide)}
    parts |= {f"{LAYER}.{name}": shape for name, shape in layer.items()}
    if config.fused or config.mtp:
        parts |= {f"{LAYER}.input_layernorm": (wide,), "norm": (wide,)}
    if config.fused:
        parts[f"{LAYER}.hidden_norm"] = (wide,)
    if config.mtp:
        parts |= {EMBEDDING_NORM: (wide,), FEATURE_NORM: (wide,)}
    if config.norm_before_fc:
        parts["input_norm"] = (fused,)
    if config.fc_norm:
        parts |= {f"fc_norm.{tap}": (config.feature_size,) for tap in range(config.num_taps)}
    if config.own_head:
        parts["lm_head"] = (config.vocab, wide)
    if config.own_embedding:
        parts["embed_tokens"] = (body.vocab_size, wide)
    tensors = {f"{name}.weight": shape for name, shape in parts.items()}
    tensors |= {f"{name}.bias": parts[name][:1] for name in sorted(config.biases)}
    return tensors | ({"d2t": (config.vocab,)} if config.vocab < body.vocab_size else {})


def parse(raw: Json, tensors: Mapping[str, Tensor], source: str) -> EagleConfig:
    method = is_eagle(raw, frozenset(tensors))
    if method is None:
        raise BrokenModel(f"{source} describes no EAGLE drafter")
    fields = JsonFields(raw, source)
    fused, eagle = method == EAGLE3, fields.section("eagle_config")
    layer = fields.section("transformer_layer_config") if "speculators_model_type" in raw else fields
    body = layer_config(layer.values, tensors, fused, source)
    if eagle.values.get("use_aux_hidden_state", True) is not True:
        raise UnsupportedModel(f"{source}: use_aux_hidden_state false is not supported")
    biases = frozenset(name.removesuffix(".bias") for name in tensors if name.endswith(".bias"))
    for parts in ([f"{LAYER}.self_attn.{part}_proj" for part in "qkv"], [f"{LAYER}.mlp.{part}_proj" for part in UP]):
        if biases & set(parts) and not biases >= set(parts):
            raise BrokenModel(f"{source}: tensor {min(set(parts) - biases)}.bias is missing")
    vocab = fields.integer("draft_vocab_size", 0, least=0)
    return EagleConfig(
        body=body,
        fused=fused,
        layer_ids=_layer_ids(fields, eagle) if fused else None,
        target_hidden_size=fields.integer("target_hidden_size", 0, least=0),
        draft_vocab_size=0 if vocab == body.vocab_size else vocab,
        norm_before_residual=fields.flag("norm_before_residual"),
        norm_before_fc=fused and eagle.flag("norm_before_fc", fields.flag("norm_before_fc")),
        fc_norm=fused and fields.flag("fc_norm"),
        norm_output=fields.flag("norm_output"),
        own_embedding="embed_tokens.weight" in tensors,
        own_head="lm_head.weight" in tensors,
        biases=biases,
        target=folder.target_of(fields),
    )


def layer_config(layer: Json, tensors: Mapping[str, Tensor], fused: bool, source: str) -> ModelConfig:
    """Return the layer's config; keys that a file leaves out are read off the tensors or are transformers' defaults."""
    family = str(layer.get("model_type", "llama"))
    family = "llama" if family in LLAMAS else family
    if family not in folder.FAMILIES:
        raise UnsupportedModel(f"{source}: a layer of model_type {family!r} is not supported; llama and qwen3 are")
    if layer.get("num_hidden_layers", 1) != 1:
        raise UnsupportedModel(f"{source}: {layer['num_hidden_layers']} layers are not supported; one is")
    attention = f"{LAYER}.self_attn"
    queries, gate = tensors.get(f"{attention}.q_proj.weight"), tensors.get(f"{LAYER}.mlp.gate_proj.weight")
    if queries is None or gate is None:
        missing = f"{attention}.q_proj.weight" if queries is None else f"{LAYER}.mlp.gate_proj.weight"
        raise BrokenModel(f"{source}: tensor {missing} is missing")
    heads = layer.get("num_attention_heads") or HEADS
    defaults: Json = {
        "hidden_size": queries.shape[1] // (2 if fused else 1),
        "intermediate_size": len(gate),
        "num_attention_heads": heads,
        "max_position_embeddings": POSITIONS,
        **({"head_dim": len(queries) // heads} if type(heads) is int and heads > 0 else {}),
        **({"vocab_size": len(tensors["t2d"])} if "t2d" in tensors else {}),
    }
    keys = {key: value for key, value in layer.items() if value is not None and key != "architectures"}
    merged = {**defaults, **keys, "architectures": [folder.FAMILIES[family]], "num_hidden_layers": 1}
    fixed = {"attention_bias": False, "mlp_bias": False, "layer_types": None, "use_sliding_window": False}
    body = parse_config(merged | fixed, source)
    if f"{attention}.q_norm.weight" not in tensors and body.layer.qk_norm:
        raise BrokenModel(f"{source}: tensor {attention}.q_norm.weight is missing")
    return body


def _layer_ids(fields: JsonFields, eagle: JsonFields) -> tuple[int, ...] | None:
    key = "eagle_aux_hidden_state_layer_ids"
    ids = fields.integers(key, "layer numbers") or eagle.integers(key, "layer numbers")
    if list(ids) != sorted(set(ids)):
        raise UnsupportedModel(f"{fields.source}: {key} must ascend, found {list(ids)}")
    return ids or None


def check_target(config: EagleConfig, target: ModelConfig, source: str) -> None:
    """Refuse a drafter that was trained for a model of another shape."""
    folder.refuse_another(config.target, target, source, config.feature_size, config.body.vocab_size)
    if config.body.hidden_size != target.hidden_size and not (config.own_embedding and config.own_head):
        raise InvalidParameter("drafter", f"{source} has another hidden size and no embedding and head of its own")
    if not config.own_head and config.vocab < target.vocab_size and not target.tie_embeddings:
        raise BrokenModel(f"{source}: tensor lm_head.weight is missing; a smaller vocabulary needs a head of its own")
    taps = config.taps(target.num_layers)
    if config.fused and not (len(set(taps)) == len(taps) and 0 <= min(taps) <= max(taps) <= target.num_layers):
        raise InvalidParameter(
            "drafter", f"{source} reads the inputs of layers {list(taps)}, and this model has {target.num_layers}"
        )


def _layer(config: EagleConfig) -> Json:
    biases = {part: any(part in name for name in config.biases) for part in ("self_attn", "mlp")}
    return folder.layer_keys(config.body, attention_bias=biases["self_attn"], mlp_bias=biases["mlp"])


def _own_keys(config: EagleConfig) -> Json:
    keys = {key: getattr(config, key) for key in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")}
    return {"draft_vocab_size": config.vocab, **keys}


def raw_description(config: EagleConfig) -> Json:
    """Return config.json of a folder as published."""
    name = "LlamaForCausalLMEagle3" if config.fused else "EagleLlamaForCausalLM"
    raw: Json = {"architectures": [name], **_layer(config)}
    if config.body.layer.rope.kind != "default":
        raw["rope_scaling"] = rope_scaling(config.body.layer.rope)
    if config.fused:
        raw |= _own_keys(config)
        if config.target_hidden_size:
            raw["target_hidden_size"] = config.target_hidden_size
        if config.layer_ids is not None:
            raw["eagle_config"] = {
                "eagle_aux_hidden_state_layer_ids": list(config.layer_ids),
                "use_aux_hidden_state": True,
                "norm_before_fc": config.norm_before_fc,
            }
    else:
        raw["bias"] = "fc" in config.biases
    return raw | {"paceline": {"target": folder.target_keys(config.target)}}


def speculators_description(config: EagleConfig, tokens: int = 5) -> Json:
    """Return config.json in speculators' layout; `tokens`: of a chain, unless its reader chooses."""
    assert config.fused, "speculators has no EAGLE-1"
    rope = folder.rope_keys(config.body.layer.rope)
    layer = {**_layer(config), "num_aux_hidden_states": config.num_taps, "rope_parameters": rope}
    keys = {
        **_own_keys(config),
        "target_hidden_size": config.target_hidden_size or None,
        "eagle_aux_hidden_state_layer_ids": None if config.layer_ids is None else list(config.layer_ids),
    }
    return folder.description(config.method, "0.9.0", "Eagle3DraftModel", layer, tokens, config.target) | keys
