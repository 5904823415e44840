"""The decoder's tensors, and where each lies in a file: a part of a fused tensor, rows in another order, norms less 1.

The decoder's names are those of a Hugging Face Llama, and `self_attn.output_norm` and `mlp.output_norm`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from paceline.models.families import family_of
from paceline.models.families.family import Family
from paceline.models.rope import half_order
from paceline.models.spec import PARALLEL, POST, SANDWICH, WHOLE, LayerSpec, ModelConfig
from paceline.models.weights import StoredWeight

Shape = tuple[int, ...]
ROTATED = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.q_norm", "self_attn.k_norm")


@dataclass(frozen=True)
class Place:
    """Where a tensor of the decoder lies."""

    name: str  # of the file's tensor
    first_row: int | None = None  # of a part of it; None: the whole tensor is the decoder's
    order: tuple[int, ...] | None = None  # of the rows of each head
    less_one: bool = False

    def of(self, stored: StoredWeight, rows: int) -> StoredWeight:
        """Return the decoder's tensor of `rows`, from the file's."""
        if self.first_row is not None:
            stored = stored.rows(slice(self.first_row, self.first_row + rows))
        if self.order is not None:
            head = torch.tensor(self.order)
            stored = stored.rows((torch.arange(0, rows, len(head))[:, None] + head).flatten())
        return StoredWeight.of(stored.numbers().float() + 1) if self.less_one else stored


def decoder_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Return the shape of every tensor of the decoder, in the order of the computation."""
    hidden = config.hidden_size
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for index, layer in enumerate(config.layers):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in _layer_shapes(layer, hidden)}
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def places(config: ModelConfig, *, in_gguf: bool = False) -> dict[str, Place]:
    """Return where each tensor of the decoder lies in a folder, or in a GGUF file under a folder's names."""
    family, shapes = family_of(config.architecture), decoder_shapes(config)
    found: dict[str, Place] = {}
    used: dict[str, int] = {}  # rows of a fused tensor that are taken
    for ours, shape in shapes.items():
        prefix, layer, name, what = _split(ours, config)
        stored, whole = family.names.get(name, name), True
        for fused, parts in family.fused.items():
            if name in parts:
                stored, whole = fused, False
        full = f"{prefix}{stored}.{what}"
        first = None if whole else used.get(full, 0)
        used[full] = used.get(full, 0) + shape[0]
        less_one = family.norms_less_one and not in_gguf and len(shape) == 1 and what == "weight"
        found[ours] = Place(full, first, _order(family, layer, name, in_gguf), less_one)
    return found


def expected_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Return the shape of every tensor of a folder of this model."""
    shapes, stored = decoder_shapes(config), dict[str, Shape]()
    for ours, place in places(config).items():
        rows = stored.get(place.name, (0,))[0] + shapes[ours][0]
        stored[place.name] = (rows, *shapes[ours][1:])
    return stored


def _layer_shapes(layer: LayerSpec, hidden: int) -> Iterator[tuple[str, Shape]]:
    linears = [  # name, out, in, bias
        ("self_attn.q_proj", layer.q_size, hidden, layer.qkv_bias),
        ("self_attn.k_proj", layer.kv_size, hidden, layer.qkv_bias),
        ("self_attn.v_proj", layer.kv_size, hidden, layer.qkv_bias),
        ("self_attn.o_proj", hidden, layer.q_size, layer.output_bias),
        ("mlp.gate_proj", layer.inner, hidden, layer.mlp_bias),
        ("mlp.up_proj", layer.inner, hidden, layer.mlp_bias),
        ("mlp.down_proj", hidden, layer.inner, layer.mlp_bias),
    ]
    if layer.norms != POST:
        yield "input_layernorm.weight", (hidden,)
    for name, rows, columns, bias in linears:
        yield f"{name}.weight", (rows, columns)
        if bias:
            yield f"{name}.bias", (rows,)
    if layer.qk_norm:
        whole = layer.qk_norm == WHOLE
        yield "self_attn.q_norm.weight", (layer.q_size if whole else layer.head_dim,)
        yield "self_attn.k_norm.weight", (layer.kv_size if whole else layer.head_dim,)
    if layer.norms in (SANDWICH, POST):
        yield "self_attn.output_norm.weight", (hidden,)
    if layer.norms not in (POST, PARALLEL):
        yield "post_attention_layernorm.weight", (hidden,)
    if layer.norms in (SANDWICH, POST):
        yield "mlp.output_norm.weight", (hidden,)


def _split(name: str, config: ModelConfig) -> tuple[str, LayerSpec | None, str, str]:
    """Split a name into its prefix, the layer, the name inside it, and weight or bias."""
    inner, _, what = name.rpartition(".")
    if not inner.startswith("model.layers."):
        return "", None, inner, what
    index, _, inside = inner.removeprefix("model.layers.").partition(".")
    return f"model.layers.{index}.", config.layers[int(index)], inside, what


def _order(family: Family, layer: LayerSpec | None, name: str, in_gguf: bool) -> tuple[int, ...] | None:
    if layer is None or name not in ROTATED:
        return None
    neighbours = family.gguf_has_neighbours if in_gguf else family.has_neighbours
    order = half_order(layer.head_dim, layer.rope.dims, neighbours=neighbours)
    return None if order is None else tuple(order)
