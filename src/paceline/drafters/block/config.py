"""The config of a block drafter, DSpark or DFlash: config.json in speculators' layout or as published, and its tensors.

Ids of tapped layers mean the residual stream that *enters* a layer; published DFlash folders name the layer it leaves,
one less.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from paceline.config import MAX_K
from paceline.drafters.folder import (
    UNKNOWN_TARGET,
    Json,
    TargetShape,
    description,
    layer_keys,
    refuse_another,
    rope_keys,
    section,
    target_of,
)
from paceline.drafters.methods import BLOCK_DRAFTERS, DFLASH, DSPARK, block_drafter
from paceline.errors import BrokenModel, InvalidParameter, UnsupportedModel
from paceline.models.load.hf_config import parse_config
from paceline.models.spec import ModelConfig

FAMILIES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
W1, W2, CONFIDENCE = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight", "confidence_head.proj"
TAP_NORM, MASKS = "tap_norm.weight", "mask_embedding.weight"


@dataclass(frozen=True, kw_only=True)
class DSparkConfig:
    body: ModelConfig  # of the drafter's layers; vocab_size is the target's
    block_size: int  # rows of a block: the anchor and masks
    taps: tuple[int, ...]  # residual stream entering these layers of the target
    mask_token_id: int | None  # None: masks have an embedding of their own
    draft_vocab_size: int
    markov_rank: int = 0  # 0: no Markov head, which is DFlash
    confidence: bool = False
    sample_from_anchor: bool = True  # row i of a block predicts the token behind it; False: row i > 0 the token at it
    tap_norm: bool = False
    mask_embedding: bool = False
    markov_over_draft_vocab: bool = False  # W1 has a row for each draft token; for other tokens it is zero
    target: TargetShape = UNKNOWN_TARGET

    @property
    def method(self) -> str:
        return DSPARK if self.markov_rank else DFLASH

    @property
    def depth(self) -> int:
        """Tokens of a chain from one pass."""
        return self.block_size - (not self.sample_from_anchor)


def check_target(config: DSparkConfig, target: ModelConfig, folder: Path) -> None:
    """Refuse a drafter that was trained for a model of another shape."""
    refuse_another(
        config.target,
        folder,
        ("hidden size", config.body.hidden_size, target.hidden_size),
        ("hidden size", config.target.hidden_size, target.hidden_size),
        ("number of layers", config.target.num_layers, target.num_layers),
        ("vocabulary", config.target.vocab_size or config.body.vocab_size, target.vocab_size),
    )
    deepest = max(config.taps)
    if deepest > target.num_layers:
        raise InvalidParameter(
            "drafter", f"{folder} reads the input of layer {deepest}, and this model has {target.num_layers} layers"
        )


def shapes(config: DSparkConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of such a drafter."""
    body, taps = config.body, len(config.taps)
    hidden, middle, vocab, rank = body.hidden_size, body.intermediate_size, config.draft_vocab_size, config.markov_rank
    found: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, taps * hidden)}
    found |= {"hidden_norm.weight": (hidden,), "norm.weight": (hidden,)}
    for layer in range(body.num_layers):
        each: dict[str, tuple[int, ...]] = {
            "self_attn.q_proj": (body.q_size, hidden),
            "self_attn.k_proj": (body.kv_size, hidden),
            "self_attn.v_proj": (body.kv_size, hidden),
            "self_attn.o_proj": (hidden, body.q_size),
            "mlp.gate_proj": (middle, hidden),
            "mlp.up_proj": (middle, hidden),
            "mlp.down_proj": (hidden, middle),
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
        }
        if body.qk_norm:
            each |= {"self_attn.q_norm": (body.head_dim,), "self_attn.k_norm": (body.head_dim,)}
        found |= {f"layers.{layer}.{name}.weight": shape for name, shape in each.items()}
    if rank:
        found |= {W1: (vocab if config.markov_over_draft_vocab else body.vocab_size, rank), W2: (vocab, rank)}
    if config.confidence:
        found |= {f"{CONFIDENCE}.weight": (1, hidden + rank), f"{CONFIDENCE}.bias": (1,)}
    if config.tap_norm:
        found[TAP_NORM] = (taps, hidden)
    if config.mask_embedding:
        found[MASKS] = (config.block_size - 1, hidden)
    if vocab < body.vocab_size:
        found["d2t"] = (vocab,)
    return found


def parse(raw: Json, tensors: Mapping[str, Tensor], source: str) -> DSparkConfig:
    if block_drafter(raw) is None:
        raise BrokenModel(f"{source} describes no DSpark or DFlash drafter")
    published = section(raw, "dflash_config", source)
    if raw.get("markov_head_type", "vanilla") != "vanilla":
        raise UnsupportedModel(f"{source}: markov_head_type {raw['markov_head_type']!r} is not supported; vanilla is")
    body = _body(raw, tensors, source)
    ours = section(raw, "paceline", source)
    given = raw.get("mask_token_id", published.get("mask_token_id"))
    config = DSparkConfig(
        body=body,
        block_size=_whole(raw, "block_size", source, least=2, most=MAX_K + 1),
        taps=_taps(raw, published, source),
        mask_token_id=None if given is None else _whole({"mask_token_id": given}, "mask_token_id", source, least=0),
        draft_vocab_size=_whole(raw, "draft_vocab_size", source, default=body.vocab_size, most=body.vocab_size),
        markov_rank=_whole(raw, "markov_rank", source, default=0, least=0) if W1 in tensors else 0,
        confidence=f"{CONFIDENCE}.weight" in tensors,
        # Where the key is missing: speculators means False, DSpark folders as published mean True.
        sample_from_anchor=bool(
            raw.get("sample_from_anchor", "speculators_model_type" not in raw and block_drafter(raw) == DSPARK)
        ),
        tap_norm=bool(ours.get("tap_norm")),
        mask_embedding=bool(ours.get("mask_embedding")),
        markov_over_draft_vocab=bool(ours.get("markov_over_draft_vocab")),
        target=target_of(raw, source),
    )
    if block_drafter(raw) == DSPARK and not config.markov_rank:
        raise BrokenModel(
            f"{source}: a DSpark drafter needs a Markov head; tensor {W1} or the key markov_rank is missing"
        )
    if not config.mask_embedding and not 0 <= (-1 if given is None else given) < body.vocab_size:
        raise BrokenModel(f"{source}: mask_token_id must be a token of the vocabulary, found {given!r}")
    return config


def _body(raw: Json, tensors: Mapping[str, Tensor], source: str) -> ModelConfig:
    """The drafter's layers; whether q and k have norms is read off the tensors."""
    layer = section(raw, "transformer_layer_config", source) or raw
    family = str(layer.get("model_type", "qwen3"))
    if family not in FAMILIES:
        raise UnsupportedModel(
            f"{source}: layers of model_type {family!r} are not supported; {', '.join(FAMILIES)} are"
        )
    body = parse_config({**layer, "architectures": [FAMILIES[family]]}, source)
    if body.qkv_bias or body.mlp_bias:
        raise UnsupportedModel(f"{source}: a drafter's layers with biases are not supported")
    return replace(body, qk_norm="layers.0.self_attn.q_norm.weight" in tensors)


def _taps(raw: Json, published: Json, source: str) -> tuple[int, ...]:
    entering, leaving = raw.get("aux_hidden_state_layer_ids"), published.get("target_layer_ids")
    given = leaving if entering is None else entering
    if not isinstance(given, list) or not given or not all(type(one) is int and one >= 0 for one in given):
        raise BrokenModel(f"{source}: aux_hidden_state_layer_ids must list the layers to tap, found {given!r}")
    taps = tuple(given) if entering is not None else tuple(one + 1 for one in given)
    if len(set(taps)) < len(taps):
        raise BrokenModel(f"{source}: a layer is tapped twice: {given}")
    return taps


def _whole(raw: Json, key: str, source: str, *, default: int | None = None, least: int = 1, most: int = 1 << 31) -> int:
    value = raw.get(key, default)
    if type(value) is not int or not least <= value <= most:
        raise BrokenModel(f"{source}: {key} must be a whole number from {least} to {most}, found {value!r}")
    return value


def described(config: DSparkConfig) -> Json:
    """config.json: speculators' keys, and what is ours alone under `paceline`."""
    architecture = next(name for name, method in BLOCK_DRAFTERS.items() if method == config.method)
    own = {
        "block_size": config.block_size,
        "aux_hidden_state_layer_ids": list(config.taps),
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": config.sample_from_anchor,
        "markov_rank": config.markov_rank,
        "markov_head_type": "vanilla",
        "enable_confidence_head": config.confidence,
        "confidence_head_with_markov": config.confidence and bool(config.markov_rank),
        "target_hidden_size": config.body.hidden_size,
        "draft_vocab_size": config.draft_vocab_size,
    }
    layer = {**layer_keys(config.body), "rope_parameters": rope_keys(config.body.rope)}
    ours = {
        "tap_norm": config.tap_norm,
        "mask_embedding": config.mask_embedding,
        "markov_over_draft_vocab": config.markov_over_draft_vocab,
    }
    return description(config.method, "0.4.0", architecture, layer, config.depth, config.target, ours) | own
