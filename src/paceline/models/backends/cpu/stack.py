"""A pass of a decoder in one native call (native/pass.h), from token ids to logits and taps. What passes share is
prepared once."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_int64, c_void_p

import torch
from torch import Tensor

from paceline.models.backends.cpu.kernels import NativeKernels, NativeStack, TapsView, check_in_place, check_status
from paceline.models.backends.cpu.weights import PackedRows, PackedWeight, ProductView, rows_view
from paceline.models.plan import ModelOutput, PassPlan


class ModelView(ctypes.Structure):
    _fields_ = (
        *((name, ProductView) for name in ("embedding", "head")),
        ("norm", c_void_p),
        ("vocab", c_int64),
    )


class NativePass:
    def __init__(
        self, kernels: NativeKernels, embedding: Tensor | PackedRows, norm: Tensor, head: PackedWeight
    ) -> None:
        check_in_place(norm)
        self._kernels, self._kept = kernels, (embedding, norm, head)  # the view points into these
        self._view = ModelView(rows_view(embedding), head.view, norm.data_ptr(), embedding.shape[0])
        (self._vocab, self._hidden), self._address = head.shape, ctypes.addressof(self._view)
        self._taps: dict[tuple[int, ...], ctypes.Array[c_int64]] = {}  # as native code reads them

    def __call__(
        self, stack: NativeStack, tokens: Tensor, plan: PassPlan, chosen: Tensor | None, taps: Sequence[int]
    ) -> ModelOutput:
        """`chosen`: rows whose logits are wanted, ascending; None: all. `taps`: layers before which the residual stream
        is read."""
        rows, kernels = tokens.shape[0], self._kernels
        if tokens.dtype is not torch.int32 or not tokens.is_contiguous():
            tokens = tokens.to(torch.int32).contiguous()
        out = torch.empty(rows, len(taps), self._hidden) if taps else None
        logits = torch.empty(rows if chosen is None else chosen.shape[0], self._vocab)
        view, wanted = kernels.view(plan, rows), self._tapped(tuple(taps), out)
        heads, layers, count = stack.addresses
        status = kernels.whole_pass(
            *(self._address, ctypes.addressof(view), heads, layers, count, tokens.data_ptr()),
            *(None if chosen is None else chosen.data_ptr(), logits.shape[0], ctypes.addressof(wanted)),
            *(logits.data_ptr(), kernels.threads),
        )
        check_status(status)
        return ModelOutput(logits, out)

    def _tapped(self, taps: tuple[int, ...], out: Tensor | None) -> TapsView:
        layers = self._taps.get(taps)
        if layers is None:
            layers = self._taps[taps] = (c_int64 * len(taps))(*taps)
        return TapsView(ctypes.addressof(layers), None if out is None else out.data_ptr(), len(taps))
