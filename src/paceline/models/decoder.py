"""One decoder for every family of models/families, driven by `ModelConfig`; the arithmetic is the kernels'.

A pass takes any mix of rows (see `PassPlan`) and returns logits for `logit_rows`. q, k and v are one product,
and so are gate and up: at one row the time of a pass is the time to read the weights.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from paceline.models.backends.cpu.kernels import NativeKernels
from paceline.models.backends.cpu.stack import NativePass, NativeStack
from paceline.models.graphs import PassGraphs
from paceline.models.kernels import Kernels, Layer, Packed, Stack, StackParams
from paceline.models.kv_cache import KVSpec, LayerCache
from paceline.models.pass_chain import PassChain
from paceline.models.plan import ModelOutput, PassPlan
from paceline.models.rope import rope_tables
from paceline.models.spec import ModelConfig
from paceline.models.warmup import PassShape
from paceline.models.weights import Dtypes, StoredWeight, WeightKind

# Taps: i in 0..num_layers is the residual stream entering layer i (num_layers: leaving the last one), FINAL the hidden
# state after the final norm, which is the head's input.
FINAL = -1
LEAST_POSITIONS = 4096  # positions of the smallest rotary tables
NUMBERS = (torch.float32, torch.bfloat16, torch.float16)  # dtypes that native code embeds


class Model(Protocol):
    """A model as the engine and drafters use it."""

    config: ModelConfig
    kv_specs: tuple[KVSpec, ...]
    device: torch.device
    cache_dtype: torch.dtype
    torch_threads: int | None  # threads for torch's own operations beside its kernels; None: unchanged
    pass_bytes: int  # of weights that one pass reads; 0: unknown

    def forward(
        self, tokens: Tensor, plan: PassPlan, caches: Sequence[LayerCache], logit_rows: Tensor, taps: Sequence[int] = ()
    ) -> ModelOutput:
        """Run a pass. `tokens` are on the host or on the device, `plan` and `logit_rows` (ascending) on the host.

        Logits and taps are valid until the next pass.
        """

    def prepare(
        self, caches: Sequence[LayerCache], block_size: int, taps: Sequence[int], shapes: Iterable[PassShape]
    ) -> bool:
        """Compile and capture passes of these shapes, without a write to the cache; return whether any was needed."""

    def pass_chain(self, caches: Sequence[LayerCache], block_size: int) -> PassChain | None:
        """Return chains of passes without the host between them; None where passes are not captured."""


@dataclass(frozen=True)
class _Packing:
    """Weights by their names in a Hugging Face model, brought into the layout of the kernels."""

    config: ModelConfig
    weights: Mapping[str, Tensor | StoredWeight]
    kernels: Kernels
    device: torch.device
    dtypes: Dtypes

    def stored(self, name: str) -> StoredWeight:
        weight = StoredWeight.of(self.weights[name])
        return weight.to(self.dtypes.kept(weight.kind), self.device)

    def vector(self, name: str) -> Tensor:
        return StoredWeight.of(self.weights[name]).to(WeightKind.of(self.dtypes.compute), self.device).data.contiguous()

    def linear(self, *names: str) -> Packed:
        """Pack several weights as one product. All of them have a bias or none: the loader has checked the names."""
        parts = [self.stored(f"{name}.weight") for name in names]
        biases = [self.vector(f"{name}.bias") for name in names if f"{name}.bias" in self.weights]
        return self.kernels.pack(parts, torch.cat(biases) if biases else None)

    def norm(self, name: str) -> Tensor | None:
        return self.vector(f"{name}.weight") if f"{name}.weight" in self.weights else None

    def layer(self, index: int) -> Layer:
        layer = f"model.layers.{index}"
        attention = f"{layer}.self_attn"
        return Layer(
            spec=self.config.layers[index],
            input_norm=self.norm(f"{layer}.input_layernorm"),
            qkv=self.linear(*(f"{attention}.{part}_proj" for part in "qkv")),
            q_norm=self.norm(f"{attention}.q_norm"),
            k_norm=self.norm(f"{attention}.k_norm"),
            output=self.linear(f"{attention}.o_proj"),
            attention_norm=self.norm(f"{attention}.output_norm"),
            mlp_norm=self.norm(f"{layer}.post_attention_layernorm"),
            gate_up=self.linear(f"{layer}.mlp.gate_proj", f"{layer}.mlp.up_proj"),
            down=self.linear(f"{layer}.mlp.down_proj"),
            down_norm=self.norm(f"{layer}.mlp.output_norm"),
        )

    def embedding(self, rows: StoredWeight, tied_head: Packed | None) -> Any:
        if rows.kind.is_blocks and self.device.type != "cpu":  # only a CPU's kernels read rows of blocks
            rows = rows.to(WeightKind.of(self.dtypes.compute), self.device)
        return self.kernels.embedding(rows, tied_head)


class Decoder:
    """A model's weights in the layout of its kernels, and its passes."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, Tensor | StoredWeight],
        kernels: Kernels,
        *,
        device: torch.device,
        dtypes: Dtypes,
        embedding: Any = None,
        head: Packed | None = None,
    ) -> None:
        """Pack the weights. A drafter's decoder may share `embedding` and `head` with its target."""
        self.config, self.kernels, self.device = config, kernels, device
        self.torch_threads = kernels.torch_threads
        self.dtypes, self.cache_dtype = dtypes, dtypes.cache
        self.kv_specs = tuple(KVSpec(num_kv_heads=one.kv_heads, head_dim=one.head_dim) for one in config.layers)

        packing = _Packing(config, weights, kernels, device, dtypes)
        self.layers = [packing.layer(index) for index in range(config.num_layers)]
        self.final_norm = packing.vector("model.norm.weight")
        tied = head is None and config.tie_embeddings
        rows = packing.stored("model.embed_tokens.weight") if tied else None
        if head is None:
            head = packing.linear("lm_head") if rows is None else kernels.pack([rows])
        if embedding is None:
            rows = packing.stored("model.embed_tokens.weight") if rows is None else rows
            embedding = packing.embedding(rows, head if tied else None)
        self.head = head
        self.embedding = embedding  # (V, H), indexed by token ids
        products = [self.head, *(product for layer in self.layers for product in layer.products)]
        self.pass_bytes = sum([product.nbytes for product in products])
        self._shape: StackParams | None = None
        self._stack: tuple[Stack | None, StackParams | None] = None, None
        self.graphs = PassGraphs(self) if kernels.captures else None
        self._native: NativePass | None = None  # None: a pass is made of several calls
        rows = self.embedding
        in_rows = not isinstance(rows, Tensor) or (rows.dtype in NUMBERS and rows.is_contiguous())
        if isinstance(kernels, NativeKernels) and in_rows:
            self._native = NativePass(kernels, rows, self.final_norm, self.head, config)

    def with_layers(self, kept: Sequence[int]) -> Decoder:
        """Return the decoder with some of its layers alone, which share their weights."""
        part = copy.copy(self)
        part.config = replace(self.config, layers=tuple(self.config.layers[layer] for layer in kept))
        part.layers = [self.layers[layer] for layer in kept]
        part.kv_specs = tuple(self.kv_specs[layer] for layer in kept)
        part.pass_bytes = sum([product.nbytes for layer in part.layers for product in layer.products], self.head.nbytes)
        part._shape, part._stack = None, (None, None)
        part.graphs = PassGraphs(part) if self.kernels.captures else None
        return part

    def forward(
        self, tokens: Tensor, plan: PassPlan, caches: Sequence[LayerCache], logit_rows: Tensor, taps: Sequence[int] = ()
    ) -> ModelOutput:
        """Run a pass of (M,) tokens or of (M, H) hidden states that enter the first layer and are not overwritten.

        `logit_rows`: int64, ascending.
        """
        if self.graphs is not None:
            return self.graphs.forward(tokens, plan, caches, logit_rows, tuple(taps))
        chosen = None if logit_rows.shape[0] == tokens.shape[0] else logit_rows
        if self._native is not None and tokens.dim() == 1 and FINAL not in taps:
            stack = self.stack(caches, plan.max_len)
            assert isinstance(stack, NativeStack)
            return self._native(stack, tokens, plan, chosen, taps)
        device, chosen = self.device, None if chosen is None else chosen.to(self.device)
        return self.run(self.embed(tokens.to(device)), plan.to(device), caches, chosen, taps)

    @torch.inference_mode()
    def prepare(
        self,
        caches: Sequence[LayerCache],
        block_size: int,
        taps: Sequence[int],
        shapes: Iterable[PassShape],
        *,
        from_hidden: bool = False,
    ) -> bool:
        if self.graphs is None:
            return False
        self.graphs.prepare(caches, block_size, tuple(taps), shapes, from_hidden=from_hidden)
        return True

    @property
    def logits_buffer(self) -> Tensor:
        """Return the whole buffer that captured passes write their logits to, once they are prepared."""
        assert self.graphs is not None
        return self.graphs.logits

    @torch.inference_mode()
    def pass_chain(self, caches: Sequence[LayerCache], block_size: int) -> PassChain | None:
        if self.graphs is None:
            return None
        chain = PassChain(self.graphs, self.config, caches, block_size)
        if self.device.type == "cpu":
            return chain
        with self.graphs.starting():
            return chain if chain.warmup() else None

    def embed(self, inputs: Tensor) -> Tensor:
        """Return a new (M, H) for `run` to overwrite: embeddings of (M,) tokens, or a copy of (M, H) hidden states."""
        if inputs.dim() == 2:
            return inputs.to(self.dtypes.compute, copy=True)
        embedded: Tensor = self.embedding[inputs].to(self.dtypes.compute)
        return embedded if self.config.embed_scale == 1.0 else embedded * self.config.embed_scale

    def run(
        self,
        residual: Tensor,
        plan: PassPlan,
        caches: Sequence[LayerCache],
        logit_rows: Tensor | None,
        taps: Sequence[int] = (),
        out: Tensor | None = None,
        out_taps: Tensor | None = None,
    ) -> ModelOutput:
        """Run the layers and the head on the device, from `residual` (M, H), which is overwritten.

        Logits are of `logit_rows` (None: all) and are written to `out`, tap j of row m to `out_taps[m, j]`, if given.
        """
        assert len(set(taps)) == len(taps), "taps must not repeat"
        stack = self.stack(caches, plan.max_len)
        if taps and out_taps is None:
            out_taps = residual.new_empty(residual.shape[0], len(taps), residual.shape[1])
        added: Tensor | None = None  # output of the last layer, not yet added to the residual stream
        if out_taps is not None and isinstance(stack, NativeStack):
            layers = [-1 if tap == FINAL else tap for tap in taps]
            added = stack.run_tapped(residual, plan, layers, out_taps)
        else:
            first = 0
            for last in self._stops(taps):
                if last > first:
                    added = stack.run(first, last, added, residual, plan)
                if out_taps is not None and last in taps:
                    out_tap = out_taps[:, taps.index(last)]
                    out_tap.copy_(residual) if added is None else torch.add(residual, added, out=out_tap)
                first = last
        if FINAL not in taps and logit_rows is not None and added is not None:
            added, residual = added[logit_rows], residual[logit_rows]
            logit_rows = None
        final = self._norm(added, residual)
        if out_taps is not None and self.config.stream_scale != 1.0:
            out_taps *= self.config.stream_scale
        if out_taps is not None and FINAL in taps:
            out_taps[:, taps.index(FINAL)].copy_(final)
        return ModelOutput(self.logits(final if logit_rows is None else final[logit_rows], out), out_taps)

    def read(self, residual: Tensor) -> Tensor:
        """Return logits (M, V) of the residual stream (M, H) behind the last layer."""
        return self.logits(self._norm(None, residual))

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Return logits (M, V) of hidden states (M, H) behind the last norm."""
        config = self.config
        if config.logit_scale != 1.0:
            hidden = hidden * config.logit_scale
        logits = self.kernels.logits(hidden, self.head, out)
        return self.kernels.cap(logits, config.logit_softcap) if config.logit_softcap else logits

    def shape(self, length: int) -> StackParams:
        """Return the parameters of the layers, with rotary tables for `length` positions or the model's context.

        The tables grow with the passes: a config may promise 10**8 positions, which no cache holds.
        """
        config = self.config
        length = min(length, config.max_positions)
        if self._shape is None or self._shape.positions < length:
            length = min(max(1 << (length - 1).bit_length(), LEAST_POSITIONS), config.max_positions)
            keys = [(layer.rope, layer.head_dim) for layer in config.layers]
            tables = {key: rope_tables(*key, length, self.device) for key in set(keys)}
            self._shape = StackParams(tuple(tables[key] for key in keys), config.rms_norm_eps, config.mean_centred)
        return self._shape

    def stack(self, caches: Sequence[LayerCache], length: int) -> Stack:
        """Return layers bound to caches and rotary tables; bound again when the caches change or the tables grow,
        but never once passes are captured: a graph points into them."""
        shape = self.shape(caches[0].k.shape[0] if self.graphs is not None else length)
        stack, bound = self._stack
        if stack is None or stack.caches is not caches or shape is not bound:
            stack = self.kernels.stack(self.layers, caches, shape)
            self._stack = stack, shape
        return stack

    def _stops(self, taps: Sequence[int]) -> list[int]:
        """Return the layers before which the run stops to read the residual stream, and the end of the run."""
        return sorted({tap for tap in taps if tap != FINAL} | {self.config.num_layers})

    def _norm(self, added: Tensor | None, residual: Tensor) -> Tensor:
        eps, centred = self.config.rms_norm_eps, self.config.mean_centred
        if added is None:
            return self.kernels.rms_norm(residual, self.final_norm, eps, centred)
        return self.kernels.add_rms_norm(added, residual, self.final_norm, eps, centred)
