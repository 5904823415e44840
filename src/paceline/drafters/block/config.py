"""The config of a block drafter, DSpark or DFlash: config.json in speculators' layout or as published, and its tensors.

The id of a tapped layer stands for the residual stream that *enters* it; published DFlash folders name the layer that
the stream leaves, one less.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from paceline.config import MAX_K
from paceline.drafters import folder
from paceline.drafters.methods import BLOCK_DRAFTERS, DFLASH, DSPARK, block_drafter
from paceline.errors import BrokenModel, InvalidParameter, UnsupportedModel
from paceline.files.json_fields import Json, JsonFields
from paceline.models.load.hf_config import parse_config
from paceline.models.spec import HEAD, ModelConfig

W1, W2 = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"
TAP_NORM, MASKS = "tap_norm.weight", "mask_embedding.weight"
OWN_KEYS = ("tap_norm", "mask_embedding", "markov_over_draft_vocab")  # under `paceline`


@dataclass(frozen=True, kw_only=True)
class DSparkConfig:
    body: ModelConfig  # the drafter's layers; vocab_size is the target's
    block_size: int  # rows of a block: the anchor and masks
    taps: tuple[int, ...]  # residual stream entering these layers of the target
    mask_token_id: int | None  # None: masks have an embedding of their own
    draft_vocab_size: int
    markov_rank: int = 0  # 0: no Markov head, which is DFlash
    sample_from_anchor: bool = True  # row i of a block predicts the token behind it; False: row i > 0 the token at it
    tap_norm: bool = False
    mask_embedding: bool = False
    markov_over_draft_vocab: bool = False  # W1 has a row for each draft token; for other tokens it is zero
    target: folder.TargetShape = folder.UNKNOWN_TARGET

    @property
    def method(self) -> str:
        return DSPARK if self.markov_rank else DFLASH

    @property
    def depth(self) -> int:
        """Tokens of a chain from one pass."""
        return self.block_size - (not self.sample_from_anchor)


def check_target(config: DSparkConfig, target: ModelConfig, source: Path) -> None:
    """Refuse a drafter that was trained for a model of another shape."""
    folder.refuse_another(config.target, target, source, config.body.hidden_size, config.body.vocab_size)
    deepest = max(config.taps)
    if deepest > target.num_layers:
        raise InvalidParameter(
            "drafter", f"{source} reads the input of layer {deepest}, and this model has {target.num_layers} layers"
        )


def shapes(config: DSparkConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a drafter's tensors by name."""
    body, taps = config.body, len(config.taps)
    hidden, vocab, rank = body.hidden_size, config.draft_vocab_size, config.markov_rank
    tensors: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, taps * hidden)}
    tensors |= {"hidden_norm.weight": (hidden,), "norm.weight": (hidden,)}
    for layer in range(body.num_layers):
        parts = folder.layer_shapes(body, hidden) | {"input_layernorm": (hidden,)}
        tensors |= {f"layers.{layer}.{name}.weight": shape for name, shape in parts.items()}
    if rank:
        tensors |= {W1: (vocab if config.markov_over_draft_vocab else body.vocab_size, rank), W2: (vocab, rank)}
    if config.tap_norm:
        tensors[TAP_NORM] = (taps, hidden)
    if config.mask_embedding:
        tensors[MASKS] = (config.block_size - 1, hidden)
    if vocab < body.vocab_size:
        tensors["d2t"] = (vocab,)
    return tensors


def parse(raw: Json, tensors: Mapping[str, Tensor], source: str) -> DSparkConfig:
    if block_drafter(raw) is None:
        raise BrokenModel(f"{source} describes no DSpark or DFlash drafter")
    fields, is_dspark = JsonFields(raw, source), block_drafter(raw) == DSPARK
    published, own = fields.section("dflash_config"), fields.section("paceline")
    if raw.get("markov_head_type", "vanilla") != "vanilla":
        raise UnsupportedModel(f"{source}: markov_head_type {raw['markov_head_type']!r} is not supported; vanilla is")
    body, masks = _body(fields, tensors), fields if "mask_token_id" in raw else published
    has_mask_token = masks.values.get("mask_token_id") is not None or not own.flag("mask_embedding")
    config = DSparkConfig(
        body=body,
        block_size=fields.integer("block_size", least=2, most=MAX_K + 1),
        taps=_taps(fields, published),
        mask_token_id=masks.integer("mask_token_id", least=0, most=body.vocab_size - 1) if has_mask_token else None,
        draft_vocab_size=fields.integer("draft_vocab_size", body.vocab_size, most=body.vocab_size),
        markov_rank=fields.integer("markov_rank", 0, least=0) if W1 in tensors else 0,
        # Where the key is missing: speculators means False, DSpark folders as published mean True.
        sample_from_anchor=fields.flag("sample_from_anchor", "speculators_model_type" not in raw and is_dspark),
        target=folder.target_of(fields),
        **{key: own.flag(key) for key in OWN_KEYS},
    )
    if is_dspark and not config.markov_rank:
        raise BrokenModel(
            f"{source}: a DSpark drafter needs a Markov head; tensor {W1} or the key markov_rank is missing"
        )
    return config


def _body(fields: JsonFields, tensors: Mapping[str, Tensor]) -> ModelConfig:
    """Return the config of the drafter's layers; whether q and k have norms is read off the tensors."""
    layer, source = fields.section("transformer_layer_config").values or fields.values, fields.source
    family = str(layer.get("model_type", "qwen3"))
    if family not in folder.FAMILIES:
        raise UnsupportedModel(
            f"{source}: layers of model_type {family!r} are not supported; {', '.join(folder.FAMILIES)} are"
        )
    body = parse_config({**layer, "architectures": [folder.FAMILIES[family]]}, source)
    if body.layer.qkv_bias or body.layer.mlp_bias:
        raise UnsupportedModel(f"{source}: a drafter's layers with biases are not supported")
    return body.with_layers(qk_norm=HEAD if "layers.0.self_attn.q_norm.weight" in tensors else None)


def _taps(fields: JsonFields, published: JsonFields) -> tuple[int, ...]:
    taps = fields.integers("aux_hidden_state_layer_ids", "a list of layers")
    if not taps:
        taps = tuple(layer + 1 for layer in published.integers("target_layer_ids", "a list of layers"))
    if not taps:
        raise fields.wrong("aux_hidden_state_layer_ids", "a list of the layers to tap")
    if len(set(taps)) < len(taps):
        raise BrokenModel(f"{fields.source}: a layer is tapped twice: {list(taps)}")
    return taps


def described(config: DSparkConfig) -> Json:
    """Return config.json: speculators' keys, and those of this package under `paceline`."""
    architecture = next(name for name, method in BLOCK_DRAFTERS.items() if method == config.method)
    keys = {
        "block_size": config.block_size,
        "aux_hidden_state_layer_ids": list(config.taps),
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": config.sample_from_anchor,
        "markov_rank": config.markov_rank,
        "markov_head_type": "vanilla",
        "enable_confidence_head": False,
        "target_hidden_size": config.body.hidden_size,
        "draft_vocab_size": config.draft_vocab_size,
    }
    layer = {**folder.layer_keys(config.body), "rope_parameters": folder.rope_keys(config.body.layer.rope)}
    own = {key: getattr(config, key) for key in OWN_KEYS}
    return folder.description(config.method, "0.4.0", architecture, layer, config.depth, config.target, own) | keys
