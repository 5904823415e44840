"""The one layer of an EAGLE drafter or of a head for multi-token prediction (MTP), by the target's kernels.

EAGLE-3: hidden states of the target are fused by `fc`; attention reads the normed embedding beside the normed feature.
EAGLE-1: `fc` joins embedding and feature, attention reads that without a norm, and the target's head reads the output.
MTP: `fc` joins the normed embedding and the normed feature, and a whole decoder layer reads that.
The output of a position takes the place of the feature of the next.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch
from torch import Tensor

from paceline.drafters.base import digest
from paceline.drafters.eagle.config import EMBEDDING_NORM, FEATURE_NORM, LAYER, EagleConfig
from paceline.drafters.folder import draft_ids
from paceline.models.kernels import Kernels, Packed, RopeArgs
from paceline.models.kv_cache import KVSpec, LayerCache
from paceline.models.plan import PassPlan
from paceline.models.rope import rope_tables
from paceline.models.spec import ModelConfig
from paceline.models.weights import Dtypes, StoredWeight, joined


class EagleLayer:
    def __init__(
        self,
        config: EagleConfig,
        tensors: Mapping[str, Tensor],
        target: ModelConfig,
        kernels: Kernels,
        *,
        device: torch.device,
        dtypes: Dtypes | None = None,  # None: those of the checkpoint
        embedding: Tensor | None = None,
        head: Packed | None = None,
    ) -> None:
        """`embedding` and `head`: the target's, in place of those that the checkpoint lacks."""
        self.config, self.device, self._kernels = config, device, kernels
        self.dtypes = dtypes or Dtypes.of(tensors["fc.weight"].dtype, device)
        self.kv_spec = KVSpec(num_kv_heads=config.body.layer.kv_heads, head_dim=config.body.layer.head_dim)
        vector = functools.partial(self._vector, tensors)
        packed = functools.partial(self._packed, tensors)
        attention, mlp = f"{LAYER}.self_attn", f"{LAYER}.mlp"
        self._fc = packed("fc")
        self._qkv = packed(*(f"{attention}.{part}_proj" for part in "qkv"))
        self._output = packed(f"{attention}.o_proj")
        self._gate_up, self._down = packed(f"{mlp}.gate_proj", f"{mlp}.up_proj"), packed(f"{mlp}.down_proj")
        self._q_norm, self._k_norm = (vector(f"{attention}.{part}_norm") for part in "qk")
        self._input_norm, self._hidden_norm = vector(f"{LAYER}.input_layernorm"), vector(f"{LAYER}.hidden_norm")
        self._mlp_norm, self._norm = vector(f"{LAYER}.post_attention_layernorm"), vector("norm")
        self._embedding_norm, self._feature_norm = vector(EMBEDDING_NORM), vector(FEATURE_NORM)
        self._taps_norm = vector("input_norm")
        self._tap_norms = [vector(f"fc_norm.{tap}") for tap in range(config.num_taps)] if config.fc_norm else []
        self.ids: Tensor | None = None  # (Vd,) the target's tokens of the draft vocabulary
        if config.vocab < config.body.vocab_size:
            self.ids = draft_ids(tensors["d2t"]).to(device)
        self._logit_scale = 1.0 if config.own_head else target.logit_scale  # of the head that is read
        self._embedding, self._head = self._ends(tensors, embedding, head)
        products = self._qkv, self._output, self._gate_up, self._down, self._head
        self.pass_bytes = sum([product.nbytes for product in products])
        self._eps, self._scale = config.body.rms_norm_eps, config.body.layer.scale
        self._rope: RopeArgs | None = None
        self.digest = f"{config.taps(target.num_layers)}/{digest(tensors[name] for name in sorted(tensors))}"

    def _vector(self, tensors: Mapping[str, Tensor], name: str) -> Tensor | None:
        weight = tensors.get(f"{name}.weight")
        return None if weight is None else weight.to(self.device, self.dtypes.compute).contiguous()

    def _packed(self, tensors: Mapping[str, Tensor], *names: str) -> Packed:
        parts = [StoredWeight.of(tensors[f"{name}.weight"]).to(self.dtypes.stored, self.device) for name in names]
        biased = [tensors[f"{name}.bias"] for name in names if name in self.config.biases]
        biases = [bias.to(self.device, self.dtypes.compute) for bias in biased]
        return self._kernels.pack(joined(parts), torch.cat(biases) if biases else None)

    def _ends(
        self, tensors: Mapping[str, Tensor], embedding: Tensor | None, head: Packed | None
    ) -> tuple[Tensor, Packed]:
        """Return the embedding and the head: the checkpoint's, or the target's."""
        own = tensors.get("embed_tokens.weight")
        used = embedding if own is None else own.to(self.device, self.dtypes.numbers)
        assert used is not None, "neither the checkpoint nor the target gives an embedding"
        if self.config.own_head:
            return used, self._packed(tensors, "lm_head")
        if self.ids is None:
            assert head is not None, "neither the checkpoint nor the target gives a head"
            return used, head
        assert embedding is not None  # the target's, which shares it with its head
        return used, self._kernels.pack(embedding[self.ids])

    def bind(self, positions: int) -> None:
        """Make rotary tables for `positions`: a drafter's own limit is often shorter than its target's context."""
        body = self.config.body
        cos, sin = rope_tables(body.layer.rope, body.layer.head_dim, positions, self.device)
        self._rope = RopeArgs(cos, sin, self._q_norm, self._k_norm, self._eps)

    @property
    def num_positions(self) -> int:
        assert self._rope is not None, "bind first"
        return len(self._rope.cos)

    def fuse(self, taps: Tensor) -> Tensor:
        """Return features (M, h) from the target's hidden states (M, T, H)."""
        taps = taps.to(self.dtypes.compute)
        if not self.config.fused:
            return taps[:, 0].contiguous()
        if self._tap_norms:
            normed = [self._norms(taps[:, at].contiguous(), weight) for at, weight in enumerate(self._tap_norms)]
            flat = torch.cat(normed, 1)
        else:
            flat = taps.flatten(1)
        if self._taps_norm is not None:
            flat = self._norms(flat, self._taps_norm)
        return self._kernels.linear(flat.contiguous(), self._fc)

    def store(self, tokens: Tensor, features: Tensor, plan: PassPlan, cache: LayerCache) -> None:
        """Write the K/V of pairs of a feature and the token after it."""
        self._queries(self._inputs(tokens, features)[0], plan, cache)

    def run(self, tokens: Tensor, features: Tensor, plan: PassPlan, cache: LayerCache) -> Tensor:
        """Return the outputs (M, h) of pairs of a feature and the token after it, before the final norm; their K/V are
        written where the plan has slots."""
        kernels = self._kernels
        hidden, residual = self._inputs(tokens, features)
        attended = kernels.attention(self._queries(hidden, plan, cache), plan, cache, self._scale, None)
        assert self._mlp_norm is not None
        hidden = kernels.add_rms_norm(kernels.linear(attended, self._output), residual, self._mlp_norm, self._eps)
        return residual + kernels.linear(kernels.gate(kernels.linear(hidden, self._gate_up)), self._down)

    def read(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits (M, Vd) in fp32, and the features that the next tokens are paired with."""
        normed = outputs if self._norm is None else self._norms(outputs, self._norm)
        scaled = normed if self._logit_scale == 1.0 else normed * self._logit_scale
        return self._kernels.logits(scaled, self._head), normed if self.config.norm_output else outputs

    def tokens(self, drafted: Tensor) -> Tensor:
        """Return the target's tokens for ids of the draft vocabulary."""
        return drafted if self.ids is None else self.ids[drafted]

    def _inputs(self, tokens: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return attention's input, and a residual stream that may be overwritten."""
        embedded = self._embedding[tokens].to(self.dtypes.compute)
        if self.config.mtp:
            halves = [self._norms(embedded, self._embedding_norm), self._norms(features, self._feature_norm)]
            joint = self._kernels.linear(torch.cat(halves[:: -1 if self.config.feature_first else 1], 1), self._fc)
            return self._norms(joint, self._input_norm), joint
        if not self.config.fused:
            joint = self._kernels.linear(torch.cat((embedded, features), 1), self._fc)
            return joint, joint.clone()
        assert self._input_norm is not None
        assert self._hidden_norm is not None
        normed = self._norms(features, self._hidden_norm)
        hidden = torch.cat((self._norms(embedded, self._input_norm), normed), 1)
        return hidden, (normed if self.config.norm_before_residual else features).clone()

    def _queries(self, hidden: Tensor, plan: PassPlan, cache: LayerCache) -> Tensor:
        assert self._rope is not None, "bind first"
        return self._kernels.rope_and_store(self._kernels.linear(hidden, self._qkv), plan, self._rope, cache)

    def _norms(self, x: Tensor, weight: Tensor | None) -> Tensor:
        assert weight is not None
        return self._kernels.rms_norm(x, weight, self._eps)
