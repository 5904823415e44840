"""CPU kernels of our own, from native/kernels.cpp: a row's bits do not depend on the rows or threads beside it.

The libraries are plain C, opened by path, with threads of their own (native/pool.h has the reason against OpenMP).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import c_char, c_float, c_int64, c_void_p
from typing import Any

import numpy as np
import torch
from torch import Tensor, get_num_threads

from paceline.config import ModelConfig
from paceline.errors import DeviceError
from paceline.models.backends.cpu.weights import CPU, PackedRows, PackedWeight, ProductView, runs_of_a_kind
from paceline.models.chain import GreedyChain
from paceline.models.kernels import FLOAT32, INT8, Layer, RopeArgs, Stack, StackParams, Weights
from paceline.models.kv_cache import LayerCache
from paceline.models.plan import ROW_FIELDS, PassPlan
from paceline.models.weights import StoredWeight, joined
from paceline.native.library import Library, load_library

PLAN_TENSORS = ("positions", "slots", "sequence", "prefix", "reach", "path", "block_tables")
PLAN_ROWS = [ROW_FIELDS.index(name) for name in PLAN_TENSORS[: len(ROW_FIELDS)]]  # of a plan's arrays


def native_draw(library: Library | None) -> Callable[[Tensor], Callable[..., int | None] | None] | None:
    """Draws the tokens of rows of logits (R, V), for `verify.host`; None without a library."""
    if library is None:
        return None
    draw_token = library.function("draw_token")

    def of(logits: Tensor) -> Callable[..., int | None] | None:
        if logits.dtype is not torch.float32 or not logits.is_contiguous():
            return None
        first, size = logits.data_ptr(), logits.shape[1]

        def draw(row: int, *asked: float) -> int | None:
            token: int = draw_token(first + 4 * size * row, size, *asked)
            return None if token < 0 else token

        return draw

    return of


class PlanView(ctypes.Structure):
    """A PassPlan as a C structure. Built once per pass: a plan serves every layer."""

    _fields_ = (
        *((name, c_void_p) for name in PLAN_TENSORS),
        *((name, c_int64) for name in ("rows", "path_width", "table_width", "block_size")),
    )

    @classmethod
    def of(cls, plan: PassPlan) -> PlanView:
        if "host" in vars(plan):  # whose rows follow one another in memory
            each, path, tables, _ = plan.host
            assert each.dtype == path.dtype == tables.dtype == np.int32
            rows, first = each.shape[1], address_of(each)
            at = [first + 4 * rows * row for row in PLAN_ROWS]
            return cls(*at, address_of(path), address_of(tables), *path.shape, tables.shape[1], plan.block_size)
        tensors = [getattr(plan, name) for name in PLAN_TENSORS]
        if any(t.dtype is not torch.int32 or not t.is_contiguous() for t in tensors):
            raise TypeError("a plan is made of contiguous int32 tensors")
        return cls(*(t.data_ptr() for t in tensors), *plan.path.shape, plan.block_tables.shape[1], plan.block_size)


class HeadsView(ctypes.Structure):
    """What all layers of a model share, as a C structure."""

    _fields_ = (
        *((name, c_void_p) for name in ("cos", "sin")),
        *((name, c_int64) for name in ("q_heads", "kv_heads", "dim", "num_positions", "num_slots")),
        *((name, c_float) for name in ("eps", "scale")),
    )

    @classmethod
    def of(cls, cos: Tensor, sin: Tensor, q_heads: int, cache: LayerCache, eps: float, scale: float) -> HeadsView:
        num_slots, kv_heads, dim = check_in_place(cache.k)
        check_in_place(cache.v)
        for table in (cos, sin):  # C keeps pointers to them, so they must not be copies
            check_in_place(table)
        return cls(cos.data_ptr(), sin.data_ptr(), q_heads, kv_heads, dim, cos.shape[0], num_slots, eps, scale)


class LayerView(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("input_norm", "q_norm", "k_norm", "mlp_norm", "keys", "values")),
        ("window", c_int64),
        *((name, ProductView) for name in ("qkv", "output", "gate_up", "down")),
    )

    @classmethod
    def of(cls, layer: Layer, cache: LayerCache) -> LayerView:
        norms = (layer.input_norm, layer.q_norm, layer.k_norm, layer.mlp_norm)
        for norm in norms:
            if norm is not None:
                check_in_place(norm)
        products = (layer.qkv, layer.output, layer.gate_up, layer.down)
        return cls(
            *(None if norm is None else norm.data_ptr() for norm in norms),
            *(cache.k.data_ptr(), cache.v.data_ptr(), layer.window or 0),
            *(product.view for product in products),
        )


class TapsView(ctypes.Structure):
    """Layers before which the residual stream is read (-1: none), and where to."""

    _fields_ = (("layers", c_void_p), ("out", c_void_p), ("count", c_int64))


NO_TAPS = TapsView()


class AbsorbedView(ctypes.Structure):
    """How hidden states become keys and values of a block drafter's layers (native/block_draft.h)."""

    _fields_ = (
        *((name, c_void_p) for name in ("tap_norm", "norm")),
        *((name, ProductView) for name in ("join", "kv")),
        ("taps", c_int64),
    )


def native_ring_store() -> Callable[..., None] | None:
    """`store_in_ring` of native/layers.h; None without a library."""
    library = load_library()
    return None if library is None else library.function("store_in_ring")


class NativeStack:
    """All layers of a model in one call: no time between them."""

    def __init__(
        self, kernels: NativeKernels, layers: Sequence[Layer], caches: Sequence[LayerCache], shape: StackParams
    ) -> None:
        self.caches, self._kernels = caches, kernels
        self._kept = layers, shape  # the views below point into these
        self._heads = HeadsView.of(shape.cos, shape.sin, shape.q_heads, caches[0], shape.eps, shape.scale)
        self._layers = (LayerView * len(layers))(*map(LayerView.of, layers, caches))

    def run_tapped(self, residual: Tensor, plan: PassPlan, taps: Sequence[int], out: Tensor) -> Tensor:
        """All layers; tap j is the residual stream before layer taps[j] (-1: none), written to out[:, j]."""
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
        out = torch.empty_like(residual) if added is None else _fp32(added).clone()
        view = self._kernels.view(plan, residual.shape[0])
        status = self._kernels.layers(
            ctypes.addressof(view),
            ctypes.addressof(self._heads),
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

    def write_context_kv(self, taps: Tensor, plan: PassPlan, by: AbsorbedView) -> None:
        """Keys and values of all layers from the target's hidden states (M, T, H), into their caches."""
        taps, view = _fp32(taps), self._kernels.view(plan, taps.shape[0])
        heads, layers, count = self.addresses
        status = self._kernels.absorb(
            *(ctypes.addressof(view), heads, layers, count, ctypes.addressof(by), taps.data_ptr()),
            self._kernels.threads,
        )
        check_status(status)

    @property
    def addresses(self) -> tuple[int, int, int]:
        """Of what all layers share, of the layers, and how many there are."""
        return ctypes.addressof(self._heads), ctypes.addressof(self._layers), len(self._layers)


class NativeKernels:
    exact = True
    captures = False
    keeps_codes = True
    torch_threads: int | None = 1

    def __init__(self, library: Library, threads: int | None = None, activations: str = FLOAT32) -> None:
        """`threads` None: as many as torch uses at each call."""
        self.name, self.activations = f"native-{library.variant}", activations
        self._library, self._threads = library, threads
        self._panel_bytes, self._pack = library.function("panel_bytes"), library.function("pack")
        self._linear, self._gather = library.function("linear"), library.function("gather")
        self._rms_norm = library.function("rms_norm")
        self._silu_mul = library.function("silu_mul")
        self._rope_and_store = library.function("rope_and_store")
        self._attention = library.function("attention")
        self.layers, self.absorb = library.function("layers"), library.function("absorb")
        self.draft_blocks, self.whole_pass = library.function("draft_blocks"), library.function("pass")
        self._last_plan: tuple[PassPlan | None, PlanView] = (None, PlanView())

    @property
    def threads(self) -> int:
        return self._threads or get_num_threads()

    def rounding(self) -> NativeKernels:
        """The same with int8 activations: for drafters, whose rounding no output depends on."""
        return NativeKernels(self._library, self._threads, INT8)

    def pack(self, weight: Tensor | StoredWeight | Sequence[StoredWeight], bias: Tensor | None = None) -> PackedWeight:
        """Blocks, bf16 and fp16 stay what they are in memory; everything else is stored as fp32."""
        given = [weight] if isinstance(weight, Tensor | StoredWeight) else weight
        parts = [self._panels(joined(run)) for run in runs_of_a_kind(given)]
        bias = None if bias is None else bias.detach().to(CPU, torch.float32).contiguous()
        return PackedWeight.of(parts, bias, self.activations == INT8)

    def _panels(self, stored: StoredWeight) -> StoredWeight:
        rows = stored.data.contiguous()
        n, k = stored.shape
        panels = torch.empty(self._panel_bytes(stored.kind, n, k), dtype=torch.uint8)
        self._pack(stored.kind, rows.data_ptr(), panels.data_ptr(), n, k, self.threads)
        return StoredWeight(stored.kind, panels, (n, k))

    def embedding(self, weight: StoredWeight, packed: PackedWeight | None) -> Tensor | PackedRows:
        """Blocks are read from the head where that is the same weight."""
        if not weight.kind.is_blocks:
            return weight.numbers()
        return PackedRows(self.pack(weight) if packed is None else packed, self.gather)

    def gather(self, weight: PackedWeight, ids: Tensor) -> Tensor:
        """Rows of a weight of blocks: (...,) -> (..., K)."""
        n, k = weight.shape
        wanted = ids.to(CPU, torch.int64).contiguous()
        if wanted.numel() and not 0 <= int(wanted.min()) <= int(wanted.max()) < n:
            raise IndexError(f"a token id is outside the vocabulary of {n}")
        out = torch.empty((*wanted.shape, k))
        self._gather(ctypes.addressof(weight.view), wanted.data_ptr(), out.data_ptr(), wanted.numel(), self.threads)
        return out

    def linear(self, x: Tensor, weight: PackedWeight) -> Tensor:
        rows, inputs = x.shape
        n, k = weight.shape
        if inputs != k:
            raise ValueError(f"a linear layer of {k} inputs was given {inputs}")
        x = _fp32(x)
        out = x.new_empty((rows, n))
        check_status(self._linear(ctypes.addressof(weight.view), x.data_ptr(), out.data_ptr(), rows, self.threads))
        return out

    def logits(self, x: Tensor, weight: PackedWeight, out: Tensor | None = None) -> Tensor:
        logits = self.linear(x, weight)
        return logits if out is None else out.copy_(logits)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x, weight = _fp32(x), _fp32(weight)
        rows, hidden = x.shape
        out = torch.empty_like(x)
        self._rms_norm(x.data_ptr(), None, weight.data_ptr(), out.data_ptr(), rows, hidden, eps, self.threads)
        return out

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        x, weight = _fp32(x), _fp32(weight)
        check_in_place(residual)
        rows, hidden = x.shape
        out = torch.empty_like(x)
        self._rms_norm(
            x.data_ptr(), residual.data_ptr(), weight.data_ptr(), out.data_ptr(), rows, hidden, eps, self.threads
        )
        return out

    def rope_and_store(self, qkv: Tensor, plan: PassPlan, rope: RopeArgs, cache: LayerCache) -> Tensor:
        qkv, q_norm, k_norm = _fp32(qkv), _optional(rope.q_norm), _optional(rope.k_norm)
        rows, width = qkv.shape
        _, kv_heads, dim = cache.k.shape
        q_heads = width // dim - 2 * kv_heads
        heads = HeadsView.of(rope.cos, rope.sin, q_heads, cache, rope.eps, 1.0)
        q = qkv.new_empty((rows, q_heads, dim))
        view = self.view(plan, rows)  # held here: another thread may pass another plan meanwhile
        status = self._rope_and_store(
            ctypes.addressof(view),
            ctypes.addressof(heads),
            qkv.data_ptr(),
            cache.k.data_ptr(),
            cache.v.data_ptr(),
            q.data_ptr(),
            None if q_norm is None else q_norm.data_ptr(),
            None if k_norm is None else k_norm.data_ptr(),
            self.threads,
        )
        check_status(status)
        return q

    def attention(self, q: Tensor, plan: PassPlan, cache: LayerCache, scale: float, window: int | None) -> Tensor:
        q = _fp32(q)
        rows, q_heads, dim = q.shape
        heads = HeadsView.of(q, q, q_heads, cache, 0.0, scale)  # attention reads no rotary table
        out = q.new_empty((rows, q_heads * dim))
        view = self.view(plan, rows)
        status = self._attention(
            ctypes.addressof(view),
            ctypes.addressof(heads),
            q.data_ptr(),
            cache.k.data_ptr(),
            cache.v.data_ptr(),
            out.data_ptr(),
            window or 0,
            self.threads,
        )
        check_status(status)
        return out

    def stack(self, layers: Sequence[Layer], caches: Sequence[LayerCache], shape: StackParams) -> Stack:
        return NativeStack(self, layers, caches, shape)

    def greedy_chain(
        self, weights: Weights, shape: StackParams, caches: Sequence[LayerCache], block_size: int, config: ModelConfig
    ) -> GreedyChain | None:
        return None

    def view(self, plan: PassPlan, rows: int) -> PlanView:
        last, view = self._last_plan
        if plan is not last:
            view = PlanView.of(plan)
            self._last_plan = plan, view
        if view.rows != rows:
            raise ValueError(f"a plan of {view.rows} rows was given {rows}")
        return view

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate_up = _fp32(gate_up)
        rows, width = gate_up.shape
        out = gate_up.new_empty((rows, width // 2))
        self._silu_mul(gate_up.data_ptr(), out.data_ptr(), rows, width // 2, self.threads)
        return out


def _fp32(x: Tensor) -> Tensor:
    if x.dtype is not torch.float32:
        raise TypeError(f"native kernels compute in float32, not {x.dtype}")
    return x if x.is_contiguous() else x.contiguous()


def _optional(x: Tensor | None) -> Tensor | None:
    return None if x is None else _fp32(x)


def check_in_place(x: Tensor) -> torch.Size:
    """A tensor written through its pointer must not be a copy: contiguous float32 only."""
    if x.dtype is not torch.float32 or not x.is_contiguous():
        raise TypeError(f"native kernels write contiguous float32 tensors in place, got {x.dtype}, {x.stride()}")
    return x.shape


def address_of(array: np.ndarray[Any, Any]) -> int:
    """Of its first element; in a third of the time of `array.ctypes`. The array is writable and contiguous."""
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
