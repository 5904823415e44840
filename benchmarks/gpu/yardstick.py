"""The yardstick: SmolLM2's exact function inside an 8B-shaped Llama, so that latency and acceptance are both real.

It costs what an 8B model costs and gives SmolLM2's logits. Channels of the small model come first; every weight that
meets an exact zero is filled with N(0, 0.02), so that the chip works as hard as on a real model; outputs that must
stay zero have zero rows; the layers beyond the small model's are the identity.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from paceline.drafters.block.config import MASKS, TAP_NORM, DSparkConfig
from paceline.models.spec import ModelConfig

SPREAD = 0.02


@dataclass(frozen=True)
class Size:
    """Sizes of the large model. Heads are grouped as in the small one, with room for as many query heads or more."""

    hidden: int = 4096
    layers: int = 32
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    intermediate: int = 14336


def large_config(small: ModelConfig, size: Size) -> ModelConfig:
    large = replace(
        small.of_depth(size.layers),
        hidden_size=size.hidden,
        rms_norm_eps=small.rms_norm_eps * small.hidden_size / size.hidden,
        tie_embeddings=False,
    )
    sizes = {"heads": size.heads, "kv_heads": size.kv_heads, "head_dim": size.head_dim, "inner": size.intermediate}
    return large.with_layers(**sizes, scale=1 / math.sqrt(size.head_dim))


class Yardstick(Mapping[str, Tensor]):
    """The large model's weights by name, each made when asked for: no two copies of them need to fit."""

    def __init__(
        self, small: ModelConfig, weights: Mapping[str, Tensor], size: Size, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        assert size.hidden >= small.hidden_size
        assert size.layers >= small.num_layers
        assert size.kv_heads >= small.layer.kv_heads
        assert size.head_dim % small.layer.head_dim == 0
        assert size.heads // size.kv_heads >= small.layer.heads // small.layer.kv_heads
        self.small, self.size, self._weights, self._device, self._dtype = small, size, weights, device, dtype
        self.config = large_config(small, size)
        self._generator = torch.Generator(device).manual_seed(0)

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __iter__(self):  # type: ignore[no-untyped-def]
        parts = ["input_layernorm", "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
        parts += [f"self_attn.{name}_proj" for name in "qkvo"]
        yield from ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
        yield from (f"model.layers.{layer}.{part}.weight" for layer in range(self.size.layers) for part in parts)

    def __getitem__(self, name: str) -> Tensor:
        if name.endswith((".bias", "_norm.weight")):  # the source has none
            raise KeyError(name)
        if name == "lm_head.weight":
            return self._columns(self._source("model.embed_tokens.weight"))
        if name == "model.embed_tokens.weight":
            source = self._source(name)
            out = torch.zeros(source.shape[0], self.size.hidden, dtype=self._dtype, device=self._device)
            out[:, : self.small.hidden_size] = source
            return out
        if name == "model.norm.weight":
            return self._norm(self._source(name))
        layer, part = int(name.split(".")[2]), name.split(".", 3)[3]
        source = self._source(name) if layer < self.small.num_layers else None
        return self._layer(part, source)

    def _layer(self, part: str, source: Tensor | None) -> Tensor:
        size, small = self.size, self.small
        if "layernorm" in part:
            return self._norm(source if source is not None else torch.ones(small.hidden_size))
        if part.startswith("self_attn.o_proj"):
            lanes = self._head_lanes(small.layer.heads, query=True)
            # A query head that is all zeros attends to everything alike: what it gives is no zero and must not count.
            heads = size.heads // size.kv_heads * small.layer.kv_heads
            return self._output(source, size.heads * size.head_dim, lanes, self._lanes_of(torch.arange(heads)))
        if part.startswith("self_attn"):
            query = part.startswith("self_attn.q")
            heads = size.heads if query else size.kv_heads
            lanes = self._head_lanes(small.layer.heads if query else small.layer.kv_heads, query=query)
            # The scores' 1 / sqrt(head_dim) shrinks with the larger heads; q makes up for it.
            gain = math.sqrt(size.head_dim / small.layer.head_dim) if query else 1.0
            return self._rows(source, heads * size.head_dim, lanes, gain)
        if part.startswith("mlp.down_proj"):
            return self._output(source, size.intermediate, torch.arange(small.layer.inner))
        return self._rows(source, size.intermediate, torch.arange(small.layer.inner), 1.0)

    def _head_lanes(self, heads: int, *, query: bool) -> Tensor:
        """Return where each lane of the small model's heads goes: RoPE frequencies and GQA groups are kept.

        Lane i of a head turns with frequency i / (d / 2): i of the first half goes to s i, and so does the second.
        """
        small, size = self.small, self.size
        group, large_group = small.layer.heads // small.layer.kv_heads, size.heads // size.kv_heads
        head = torch.arange(heads)
        place = large_group * (head // group) + head % group if query else head
        return self._lanes_of(place)

    def _lanes_of(self, heads: Tensor) -> Tensor:
        lane = torch.arange(self.small.layer.head_dim // 2) * (self.size.head_dim // self.small.layer.head_dim)
        within = torch.cat([lane, self.size.head_dim // 2 + lane])
        return (heads[:, None] * self.size.head_dim + within).flatten()

    def _rows(self, source: Tensor | None, rows: int, lanes: Tensor, gain: float) -> Tensor:
        """(rows, hidden): the small model's rows in their lanes, reading its channels; other rows give zero."""
        out = torch.zeros(rows, self.size.hidden, dtype=self._dtype, device=self._device)
        # Columns beyond the small model's meet zeros of the residual stream.
        out[:, self.small.hidden_size :] = self._noise(rows, self.size.hidden - self.small.hidden_size)
        if source is not None:
            out[lanes.to(self._device), : self.small.hidden_size] = (source.float() * gain).to(self._dtype)
        return out

    def _output(self, source: Tensor | None, columns: int, lanes: Tensor, live: Tensor | None = None) -> Tensor:
        """(hidden, columns): back into the residual stream. Inputs that are always zero, all but `live` (by default
        `lanes`), have any weight; without source all are."""
        out = torch.zeros(self.size.hidden, columns, dtype=self._dtype, device=self._device)
        dead = torch.ones(columns, dtype=torch.bool, device=self._device)
        if source is not None:
            dead[(lanes if live is None else live).to(self._device)] = False
            kept = torch.zeros(self.size.hidden, len(lanes), dtype=self._dtype, device=self._device)
            kept[: self.small.hidden_size] = source
            out[:, lanes.to(self._device)] = kept
        out[:, dead] = self._noise(self.size.hidden, int(dead.sum()))
        return out

    def _columns(self, source: Tensor) -> Tensor:
        out = self._noise(source.shape[0], self.size.hidden)
        out[:, : self.small.hidden_size] = source
        return out

    def _norm(self, source: Tensor) -> Tensor:
        """The mean square is over more channels, most of them zero."""
        out = torch.ones(self.size.hidden, dtype=self._dtype, device=self._device)
        share = math.sqrt(self.small.hidden_size / self.size.hidden)
        out[: self.small.hidden_size] = (source.float().to(self._device) * share).to(self._dtype)
        return out

    def _noise(self, *shape: int) -> Tensor:
        noise = torch.empty(shape, dtype=torch.float32, device=self._device)
        return noise.normal_(std=SPREAD, generator=self._generator).to(self._dtype)

    def _source(self, name: str) -> Tensor:
        return self._weights[name].to(self._device)


def large_drafter(
    config: DSparkConfig, tensors: Mapping[str, Tensor], size: Size, *, device: torch.device, dtype: torch.dtype
) -> tuple[DSparkConfig, dict[str, Tensor]]:
    """A block drafter of the small model, as one of the large: it reads the large model's hidden states, costs what its
    layers cost there, and proposes what the small one proposes."""
    body, hidden = config.body, config.body.hidden_size
    size = replace(size, layers=body.num_layers)
    source = Yardstick(
        body, {f"model.{name}": tensor for name, tensor in tensors.items()}, size, device=device, dtype=dtype
    )
    share = math.sqrt(hidden / size.hidden)

    def padded(tensor: Tensor, gain: float = 1.0) -> Tensor:
        out = torch.zeros(*tensor.shape[:-1], size.hidden, device=device)
        out[..., :hidden] = tensor.to(device) * gain
        return out

    def head_norm(tensor: Tensor, *, query: bool) -> Tensor:
        """A norm over twice the lanes, half of them zero, is larger by the square root; scores shrink by as much."""
        out = torch.ones(size.head_dim, device=device)
        shrink = math.sqrt(body.layer.head_dim / size.head_dim)
        lanes = source._lanes_of(torch.zeros(1, dtype=torch.int64))
        out[lanes.to(device)] = tensor.to(device) * (1.0 if query else shrink)
        return out

    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name.startswith("layers.") and name.endswith(("q_norm.weight", "k_norm.weight")):
            found[name] = head_norm(tensor, query="q_norm" in name)
        elif name.startswith("layers.") or name in ("norm.weight", "hidden_norm.weight"):
            found[name] = source._norm(tensor) if tensor.dim() == 1 else source[f"model.{name}"]
        elif name == "fc.weight":
            taps = tensor.view(hidden, -1, hidden).to(device)
            out = torch.zeros(size.hidden, taps.shape[1], size.hidden, device=device)
            out[:hidden] = padded(taps)
            found[name] = out.flatten(1)
        elif name == TAP_NORM:
            found[name] = padded(tensor, share)
        elif name == MASKS:
            found[name] = padded(tensor)
        else:  # over the vocabulary
            found[name] = tensor
    large = replace(source.config, architecture="qwen3", max_positions=max(body.max_positions, 1 << 15))
    large = large.with_layers(qk_norm=body.layer.qk_norm)
    target = replace(config.target, hidden_size=size.hidden, num_layers=0, embedding_sample=())
    return replace(config, body=large, target=target), found


@torch.inference_mode()
def logits_of(decoder, tokens: list[int]) -> Tensor:  # type: ignore[no-untyped-def]
    from paceline.models.kv_cache import KVCache
    from paceline.models.plan import PassPlan

    count, block = len(tokens), 16
    blocks = -(-count // block)
    cache = KVCache(
        decoder.kv_specs, num_blocks=blocks, block_size=block, dtype=decoder.cache_dtype, device=decoder.device
    )
    positions = torch.arange(count, dtype=torch.int32)
    plan = PassPlan.in_order(
        positions, positions, torch.zeros_like(positions), torch.arange(blocks, dtype=torch.int32)[None], block, count
    )
    return decoder.forward(torch.tensor(tokens), plan, cache.layers, torch.arange(count)).logits.float().cpu()
