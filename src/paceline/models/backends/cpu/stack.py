"""Plans, weights and layers as C structures, and the calls that run several layers or a whole pass."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_char, c_float, c_int64, c_void_p
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from paceline.errors import DeviceError
from paceline.models.backends.cpu.weights import PackedRows, PackedWeight, ProductView, rows_view
from paceline.models.kernels import Layer, StackParams
from paceline.models.kv_cache import LayerCache
from paceline.models.plan import ROW_FIELDS, ModelOutput, PassPlan
from paceline.models.spec import ACTIVATIONS, PARALLEL, WHOLE, ModelConfig

if TYPE_CHECKING:
    from paceline.models.backends.cpu.kernels import NativeKernels

PLAN_TENSORS = ("positions", "slots", "sequence", "prefix", "reach", "path", "block_tables")
PLAN_ROWS = [ROW_FIELDS.index(name) for name in PLAN_TENSORS[: len(ROW_FIELDS)]]  # rows of a plan's host array


class PlanView(ctypes.Structure):
    """A PassPlan as a C structure, built once per pass: a plan serves every layer."""

    _fields_ = (
        *((name, c_void_p) for name in PLAN_TENSORS),
        *((name, c_int64) for name in ("rows", "path_width", "table_width", "block_size")),
    )

    @classmethod
    def of(cls, plan: PassPlan) -> PlanView:
        if "host" in vars(plan):
            fields, path, tables, _ = plan.host
            assert fields.dtype == path.dtype == tables.dtype == np.int32
            rows, first = fields.shape[1], address_of(fields)
            at = [first + 4 * rows * row for row in PLAN_ROWS]
            return cls(*at, address_of(path), address_of(tables), *path.shape, tables.shape[1], plan.block_size)
        tensors = [getattr(plan, name) for name in PLAN_TENSORS]
        if any(t.dtype is not torch.int32 or not t.is_contiguous() for t in tensors):
            raise TypeError("a plan is made of contiguous int32 tensors")
        return cls(*(t.data_ptr() for t in tensors), *plan.path.shape, plan.block_tables.shape[1], plan.block_size)


CACHE_DTYPES = (torch.float32, torch.bfloat16, torch.int8)  # by kind, see native/cache.h


class CacheView(ctypes.Structure):
    """K and V of a layer, and their scales if they are int8."""

    _fields_ = (
        *((name, c_void_p) for name in ("keys", "values", "key_scales", "value_scales")),
        ("kind", c_int64),
    )

    @classmethod
    def of(cls, cache: LayerCache) -> CacheView:
        scales = (cache.k_scale, cache.v_scale)
        if cache.k.dtype not in CACHE_DTYPES or (None in scales) is (cache.k.dtype is torch.int8):
            raise TypeError(f"native kernels read no cache of {cache.k.dtype}")
        for tensor in (cache.k, cache.v):
            check_in_place(tensor, cache.k.dtype)
        for scale in scales:
            if scale is not None:
                check_in_place(scale)
        pointers = (None if tensor is None else tensor.data_ptr() for tensor in (cache.k, cache.v, *scales))
        return cls(*pointers, CACHE_DTYPES.index(cache.k.dtype))


class HeadsView(ctypes.Structure):
    """The heads of a layer, their rotary tables, norms and scores."""

    _fields_ = (
        *((name, c_void_p) for name in ("cos", "sin")),
        *((name, c_int64) for name in ("q_heads", "kv_heads", "dim", "num_positions", "num_slots", "whole_norm")),
        *((name, c_float) for name in ("eps", "scale", "softcap")),
    )

    @classmethod
    def of(
        cls,
        cos: Tensor,
        sin: Tensor,
        q_heads: int,
        cache: LayerCache,
        eps: float,
        scale: float,
        softcap: float = 0.0,
        *,
        whole_norm: bool = False,
    ) -> HeadsView:
        num_slots, kv_heads, dim = cache.k.shape
        for table in (cos, sin):  # C keeps pointers to the tables, so they must not be copies
            check_in_place(table)
        sizes = (q_heads, kv_heads, dim, cos.shape[0], num_slots, whole_norm)
        return cls(cos.data_ptr(), sin.data_ptr(), *sizes, eps, scale, softcap)


NORMS = ("input_norm", "q_norm", "k_norm", "attention_norm", "mlp_norm", "down_norm")


class LayerView(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in NORMS),
        ("heads", HeadsView),
        ("cache", CacheView),
        *((name, c_int64) for name in ("window", "activation", "is_parallel", "centred")),
        *((name, ProductView) for name in ("qkv", "output", "gate_up", "down")),
    )

    @classmethod
    def of(cls, layer: Layer, cache: LayerCache, index: int, shape: StackParams) -> LayerView:
        norms, spec = [getattr(layer, name) for name in NORMS], layer.spec
        for norm in norms:
            if norm is not None:
                check_in_place(norm)
        scores, whole = (spec.scale, spec.softcap), spec.qk_norm == WHOLE
        heads = HeadsView.of(*shape.tables[index], spec.heads, cache, shape.eps, *scores, whole_norm=whole)
        kinds = (spec.window or 0, ACTIVATIONS.index(spec.activation), spec.norms == PARALLEL, shape.centred)
        products = (layer.qkv, layer.output, layer.gate_up, layer.down)
        return cls(
            *(None if norm is None else norm.data_ptr() for norm in norms),
            *(heads, CacheView.of(cache)),
            *kinds,
            *(product.view for product in products),
        )


class TapsView(ctypes.Structure):
    """Layers before which the residual stream is read (-1: none), and the buffer it is copied to."""

    _fields_ = (("layers", c_void_p), ("out", c_void_p), ("count", c_int64))


NO_TAPS = TapsView()


class ContextKVView(ctypes.Structure):
    """Weights that turn hidden states into keys and values of a block drafter's layers (native/block_draft.h)."""

    _fields_ = (
        *((name, c_void_p) for name in ("tap_norm", "norm")),
        *((name, ProductView) for name in ("join", "kv")),
        ("taps", c_int64),
        ("eps", c_float),
    )


class NativeStack:
    """All layers of a model in one call."""

    def __init__(
        self, kernels: NativeKernels, layers: Sequence[Layer], caches: Sequence[LayerCache], shape: StackParams
    ) -> None:
        self.caches, self._kernels = caches, kernels
        self._kept = layers, shape  # the views point into these
        views = [LayerView.of(layers[at], caches[at], at, shape) for at in range(len(layers))]
        self._layers = (LayerView * len(layers))(*views)

    def run_tapped(self, residual: Tensor, plan: PassPlan, taps: Sequence[int], out: Tensor) -> Tensor:
        """Run all layers; tap j is the residual stream before layer taps[j] (-1: none), written to out[:, j]."""
        check_in_place(out)
        layers = (c_int64 * len(taps))(*taps)
        view = TapsView(ctypes.addressof(layers), out.data_ptr(), len(taps))
        return self._run(0, len(self._layers), None, residual, plan, view)

    def run(self, first: int, last: int, added: Tensor | None, residual: Tensor, plan: PassPlan) -> Tensor:
        return self._run(first, last, added, residual, plan, NO_TAPS)

    def _run(
        self, first: int, last: int, added: Tensor | None, residual: Tensor, plan: PassPlan, taps: TapsView
    ) -> Tensor:
        check_in_place(residual)
        out = torch.empty_like(residual) if added is None else fp32(added).clone()
        view = self._kernels.view(plan, residual.shape[0])
        status = self._kernels.layers(
            ctypes.addressof(view),
            ctypes.addressof(self._layers[first]),
            last - first,
            residual.data_ptr(),
            out.data_ptr(),
            added is None,
            ctypes.addressof(taps),
            self._kernels.threads,
        )
        check_status(status)
        return out

    def write_context_kv(self, taps: Tensor, plan: PassPlan, weights: ContextKVView) -> None:
        """Write keys and values of all layers, computed from the target's hidden states (M, T, H), to their caches."""
        taps, view = fp32(taps), self._kernels.view(plan, taps.shape[0])
        layers, count = self.address
        status = self._kernels.write_context_kv(
            *(ctypes.addressof(view), layers, count, ctypes.addressof(weights), taps.data_ptr()),
            self._kernels.threads,
        )
        check_status(status)

    @property
    def address(self) -> tuple[int, int]:
        """Return the address of the layers, and their number."""
        return ctypes.addressof(self._layers), len(self._layers)


class ModelView(ctypes.Structure):
    _fields_ = (
        *((name, ProductView) for name in ("embedding", "head")),
        ("norm", c_void_p),
        *((name, c_int64) for name in ("vocab", "centred")),
        *((name, c_float) for name in ("eps", "embed_scale", "logit_scale", "logit_softcap")),
    )


class NativePass:
    def __init__(
        self,
        kernels: NativeKernels,
        embedding: Tensor | PackedRows,
        norm: Tensor,
        head: PackedWeight,
        config: ModelConfig,
    ) -> None:
        check_in_place(norm)
        self._kernels, self._kept = kernels, (embedding, norm, head)  # the view points into these
        self._view = ModelView(
            rows_view(embedding), head.view, norm.data_ptr(), embedding.shape[0], config.mean_centred,
            config.rms_norm_eps, config.embed_scale, config.logit_scale, config.logit_softcap,
        )  # fmt: skip
        self._stream_scale = config.stream_scale
        (self._vocab, self._hidden), self._address = head.shape, ctypes.addressof(self._view)
        self._taps: dict[tuple[int, ...], ctypes.Array[c_int64]] = {}  # arrays for native code

    def __call__(
        self, stack: NativeStack, tokens: Tensor, plan: PassPlan, chosen: Tensor | None, taps: Sequence[int]
    ) -> ModelOutput:
        """Run a pass. `chosen`: rows whose logits are computed, ascending; None: all. `taps`: layers before which the
        residual stream is read."""
        rows, kernels = tokens.shape[0], self._kernels
        if tokens.dtype is not torch.int32 or not tokens.is_contiguous():
            tokens = tokens.to(torch.int32).contiguous()
        out = torch.empty(rows, len(taps), self._hidden) if taps else None
        logits = torch.empty(rows if chosen is None else chosen.shape[0], self._vocab)
        view, taps_view = kernels.view(plan, rows), self._taps_view(tuple(taps), out)
        layers, count = stack.address
        status = kernels.whole_pass(
            *(self._address, ctypes.addressof(view), layers, count, tokens.data_ptr()),
            *(None if chosen is None else chosen.data_ptr(), logits.shape[0], ctypes.addressof(taps_view)),
            *(logits.data_ptr(), kernels.threads),
        )
        check_status(status)
        if out is not None and self._stream_scale != 1.0:
            out *= self._stream_scale
        return ModelOutput(logits, out)

    def _taps_view(self, taps: tuple[int, ...], out: Tensor | None) -> TapsView:
        layers = self._taps.get(taps)
        if layers is None:
            layers = self._taps[taps] = (c_int64 * len(taps))(*taps)
        return TapsView(ctypes.addressof(layers), None if out is None else out.data_ptr(), len(taps))


def fp32(x: Tensor) -> Tensor:
    if x.dtype is not torch.float32:
        raise TypeError(f"native kernels compute in float32, not {x.dtype}")
    return x if x.is_contiguous() else x.contiguous()


def check_in_place(x: Tensor, dtype: torch.dtype = torch.float32) -> torch.Size:
    """Refuse tensors that cannot be written through their pointer: they are contiguous and of this dtype."""
    if x.dtype is not dtype or not x.is_contiguous():
        raise TypeError(f"native kernels write contiguous {dtype} tensors in place, got {x.dtype}, {x.stride()}")
    return x.shape


def address_of(array: np.ndarray[Any, Any]) -> int:
    """Return the address of a writable, contiguous array, three times as fast as `array.ctypes`."""
    return ctypes.addressof(c_char.from_buffer(array)) if array.size else 0  # type: ignore[arg-type]


def check_status(status: int) -> None:
    if status == 1:
        raise DeviceError("not enough memory for this pass; use a shorter context or fewer sequences at once")
    if status == 3:
        raise IndexError("a token id is outside the vocabulary")
    if status == 4:
        raise IndexError("rows of logits must be ascending and rows of the pass")
    if status:
        raise IndexError("the plan names a position outside the rotary tables or a slot outside the cache")
