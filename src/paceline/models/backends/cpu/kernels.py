"""CPU kernels from the native library: a row's bits do not depend on other rows or on the number of threads."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, get_num_threads

from paceline.models.backends.cpu.stack import (
    CacheView,
    HeadsView,
    NativeStack,
    PlanView,
    check_in_place,
    check_status,
    fp32,
)
from paceline.models.backends.cpu.weights import CPU, PackedRows, PackedWeight, joined_shape, runs_of_a_kind
from paceline.models.kernels import FLOAT32, INT8, Layer, RopeArgs, Stack, StackParams
from paceline.models.kv_cache import LayerCache
from paceline.models.plan import PassPlan
from paceline.models.spec import ACTIVATIONS, SILU
from paceline.models.weights import StoredWeight, joined
from paceline.native.library import Library, load_library


def native_draw(library: Library | None) -> Callable[[Tensor], Callable[..., int | None] | None] | None:
    """Return a function that draws tokens of rows of logits (R, V), for `verify.host`; None without a library."""
    if library is None:
        return None
    draw_token = library.function("draw_token")

    def of_rows(logits: Tensor) -> Callable[..., int | None] | None:
        if logits.dtype is not torch.float32 or not logits.is_contiguous():
            return None
        first, size = logits.data_ptr(), logits.shape[1]

        def draw(row: int, *params: float) -> int | None:
            token: int = draw_token(first + 4 * size * row, size, *params)
            return None if token < 0 else token

        return draw

    return of_rows


def native_top_tokens(library: Library | None) -> Callable[[Tensor, int, int], Tensor] | None:
    """Return the native function of `verify.top_tokens`; None without a library."""
    if library is None:
        return None
    find = library.function("top_tokens")

    def of_rows(logits: Tensor, n: int, threads: int) -> Tensor:
        logits, (rows, size) = logits.float().contiguous(), logits.shape
        packed = torch.empty(rows * (2 * n + 1), dtype=torch.int32)
        find(logits.data_ptr(), size, rows, n, packed.data_ptr(), threads)
        return packed

    return of_rows


def native_ring_store() -> Callable[..., None] | None:
    """Return `store_in_ring` of native/layers.h; None without a library."""
    library = load_library()
    return None if library is None else library.function("store_in_ring")


class NativeKernels:
    exact = True
    captures = False
    keeps_codes = True
    torch_threads: int | None = 1

    def __init__(self, library: Library, threads: int | None = None, activations: str = FLOAT32) -> None:
        """`threads` None: torch's number of threads at each call."""
        self.name, self.activations = f"native-{library.variant}", activations
        self._library, self._threads = library, threads
        self._panel_bytes, self._pack = library.function("panel_bytes"), library.function("pack")
        self._linear, self._gather = library.function("linear"), library.function("gather")
        self._rms_norm = library.function("rms_norm")
        self._gate, self._cap = library.function("gate"), library.function("cap")
        self._rope_and_store = library.function("rope_and_store")
        self._attention = library.function("attention")
        self.layers, self.write_context_kv = library.function("layers"), library.function("write_context_kv")
        self.draft_blocks, self.whole_pass = library.function("draft_blocks"), library.function("pass")
        self._last_plan: tuple[PassPlan | None, PlanView] = (None, PlanView())

    @property
    def threads(self) -> int:
        return self._threads or get_num_threads()

    def rounding(self) -> NativeKernels:
        """Return kernels with int8 activations, for drafters: no output depends on their rounding."""
        return NativeKernels(self._library, self._threads, INT8)

    def pack(self, weight: Tensor | StoredWeight | Sequence[StoredWeight], bias: Tensor | None = None) -> PackedWeight:
        """Pack a weight: blocks, bf16 and fp16 keep their kind; everything else is stored as fp32."""
        weights = [weight] if isinstance(weight, Tensor | StoredWeight) else weight
        parts = [self._panels(run) for run in runs_of_a_kind(weights)]
        bias = None if bias is None else bias.detach().to(CPU, torch.float32).contiguous()
        return PackedWeight.of(parts, bias, self.activations == INT8)

    def _panels(self, run: Sequence[StoredWeight]) -> StoredWeight:
        """Pack weights of one kind. Those that end at the end of a panel are not joined before."""
        kind, (n, k) = run[0].kind, joined_shape(run)
        if any(
            self._panel_bytes(kind, rows, k) == self._panel_bytes(kind, rows + 1, k)
            for rows, _ in (stored.shape for stored in run[:-1])
        ):
            run = [joined(run)]
        panels, at = torch.empty(self._panel_bytes(kind, n, k), dtype=torch.uint8), 0
        for stored in run:
            rows = stored.data.contiguous()
            self._pack(kind, rows.data_ptr(), panels.data_ptr() + at, len(rows), k, self.threads)
            at += self._panel_bytes(kind, len(rows), k)
        return StoredWeight(kind, panels, (n, k))

    def embedding(self, weight: StoredWeight, packed: PackedWeight | None) -> Tensor | PackedRows:
        """Return the rows of an embedding; blocks are read from `packed`, the head, if that is the same weight."""
        if not weight.kind.is_blocks:
            return weight.numbers()
        return PackedRows(self.pack(weight) if packed is None else packed, self.gather)

    def gather(self, weight: PackedWeight, ids: Tensor) -> Tensor:
        """Read rows of a weight of blocks: (...,) -> (..., K)."""
        n, k = weight.shape
        rows = ids.to(CPU, torch.int64).contiguous()
        if rows.numel() and not 0 <= int(rows.min()) <= int(rows.max()) < n:
            raise IndexError(f"a token id is outside the vocabulary of {n}")
        out = torch.empty((*rows.shape, k))
        self._gather(ctypes.addressof(weight.view), rows.data_ptr(), out.data_ptr(), rows.numel(), self.threads)
        return out

    def linear(self, x: Tensor, weight: PackedWeight) -> Tensor:
        rows, inputs = x.shape
        n, k = weight.shape
        if inputs != k:
            raise ValueError(f"a linear layer of {k} inputs was given {inputs}")
        x = fp32(x)
        out = x.new_empty((rows, n))
        check_status(self._linear(ctypes.addressof(weight.view), x.data_ptr(), out.data_ptr(), rows, self.threads))
        return out

    def logits(self, x: Tensor, weight: PackedWeight, out: Tensor | None = None) -> Tensor:
        logits = self.linear(x, weight)
        return logits if out is None else out.copy_(logits)

    def cap(self, logits: Tensor, softcap: float) -> Tensor:
        check_in_place(logits)
        self._cap(logits.data_ptr(), *logits.shape, softcap, self.threads)
        return logits

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, centred: bool = False) -> Tensor:
        return self._norm(x, None, weight, eps, centred)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, centred: bool = False) -> Tensor:
        check_in_place(residual)
        return self._norm(x, residual, weight, eps, centred)

    def _norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, centred: bool) -> Tensor:
        x, weight = fp32(x), fp32(weight)
        rows, hidden = x.shape
        out, to = torch.empty_like(x), None if residual is None else residual.data_ptr()
        norm = (weight.data_ptr(), out.data_ptr(), rows, hidden, eps, centred)
        self._rms_norm(x.data_ptr(), to, *norm, self.threads)
        return out

    def rope_and_store(self, qkv: Tensor, plan: PassPlan, rope: RopeArgs, cache: LayerCache) -> Tensor:
        qkv, q_norm, k_norm = fp32(qkv), _optional(rope.q_norm), _optional(rope.k_norm)
        rows, width = qkv.shape
        _, kv_heads, dim = cache.k.shape
        q_heads = width // dim - 2 * kv_heads
        whole = q_norm is not None and len(q_norm) != dim
        heads = HeadsView.of(rope.cos, rope.sin, q_heads, cache, rope.eps, 1.0, whole_norm=whole)
        stored = CacheView.of(cache)
        q = qkv.new_empty((rows, q_heads, dim))
        view = self.view(plan, rows)  # a reference of its own: another thread may replace the last plan
        status = self._rope_and_store(
            ctypes.addressof(view),
            ctypes.addressof(heads),
            qkv.data_ptr(),
            ctypes.addressof(stored),
            q.data_ptr(),
            None if q_norm is None else q_norm.data_ptr(),
            None if k_norm is None else k_norm.data_ptr(),
            self.threads,
        )
        check_status(status)
        return q

    def attention(
        self, q: Tensor, plan: PassPlan, cache: LayerCache, scale: float, window: int | None, softcap: float = 0.0
    ) -> Tensor:
        q = fp32(q)
        rows, q_heads, dim = q.shape
        heads, stored = (
            HeadsView.of(q, q, q_heads, cache, 0.0, scale, softcap),
            CacheView.of(cache),
        )  # q: no rotary table is read
        out = q.new_empty((rows, q_heads * dim))
        view = self.view(plan, rows)
        status = self._attention(
            ctypes.addressof(view),
            ctypes.addressof(heads),
            q.data_ptr(),
            ctypes.addressof(stored),
            out.data_ptr(),
            window or 0,
            self.threads,
        )
        check_status(status)
        return out

    def stack(self, layers: Sequence[Layer], caches: Sequence[LayerCache], shape: StackParams) -> Stack:
        return NativeStack(self, layers, caches, shape)

    def view(self, plan: PassPlan, rows: int) -> PlanView:
        last, view = self._last_plan
        if plan is not last:
            view = PlanView.of(plan)
            self._last_plan = plan, view
        if view.rows != rows:
            raise ValueError(f"a plan of {view.rows} rows was given {rows}")
        return view

    def gate(self, gate_up: Tensor, activation: str = SILU) -> Tensor:
        gate_up = fp32(gate_up)
        rows, width = gate_up.shape
        out = gate_up.new_empty((rows, width // 2))
        kind = ACTIVATIONS.index(activation)
        self._gate(gate_up.data_ptr(), out.data_ptr(), rows, width // 2, kind, self.threads)
        return out


def _optional(x: Tensor | None) -> Tensor | None:
    return None if x is None else fp32(x)
