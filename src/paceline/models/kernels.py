"""The hardware seam: the few operations a decoder is made of. Nothing above this file asks what device it runs on.

`TorchKernels` works everywhere and is the reference. `NativeKernels` (CPU) keeps one reduction order for every row, so
a row's bits do not depend on what shares its pass, and reads packed weights at the speed of memory.
"""

from __future__ import annotations

import os
from typing import Any, Protocol

import torch
from torch import Tensor

from paceline.errors import DeviceError, InvalidParameter
from paceline.models.kv_cache import LayerCache
from paceline.models.plan import PassPlan

Packed = Any  # a weight in the form its kernels like best; opaque to everyone else


class Kernels(Protocol):
    name: str
    exact: bool  # a row's result has the same bits whatever rows share the pass

    def pack(self, weight: Tensor, bias: Tensor | None = None) -> Packed:
        """Take a (N, K) weight once, at load."""

    def linear(self, x: Tensor, weight: Packed) -> Tensor:
        """(M, K) -> (M, N), in the activation dtype."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """(M, H) -> (M, H)."""

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """residual += x in place; returns rms_norm(residual)."""

    def rope_and_store(
        self,
        qkv: Tensor,  # (M, (Hq + 2 Hkv) * D), may be overwritten
        plan: PassPlan,
        cos: Tensor,  # (max_positions, D / 2), fp32; halves rotate as a pair (x1 cos - x2 sin, x2 cos + x1 sin)
        sin: Tensor,
        cache: LayerCache,
        q_norm: Tensor | None,  # (D,) RMSNorm over each head before RoPE (Qwen3)
        k_norm: Tensor | None,
        eps: float,
    ) -> Tensor:
        """Norm and rotate q and k, write k and v to plan.slots (except -1), return q as (M, Hq, D)."""

    def attention(self, q: Tensor, plan: PassPlan, cache: LayerCache, scale: float, window: int | None) -> Tensor:
        """(M, Hq, D) -> (M, Hq * D). A row at position t sees max(0, t - window + 1)..t, all of 0..t without window."""

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """(M, 2 I) -> (M, I): silu(first half) * second half."""


def kernels_for(device: torch.device) -> Kernels:
    """The best kernels this machine can run, or those PACELINE_KERNELS (auto, native, torch) asks for."""
    from paceline.models.native_kernels import NativeKernels, library_status, load_library
    from paceline.models.torch_kernels import TorchKernels

    choice = os.environ.get("PACELINE_KERNELS", "") or "auto"
    if choice not in ("auto", "native", "torch"):
        raise InvalidParameter("PACELINE_KERNELS", f"{choice!r} is not one of auto, native, torch")
    if choice == "native" and device.type != "cpu":
        raise DeviceError(f"PACELINE_KERNELS=native runs on cpu only, not on {device}; unset it")
    if choice != "torch" and device.type == "cpu":
        if (library := load_library()) is not None:
            return NativeKernels(library)
        if choice == "native":
            raise DeviceError(f"PACELINE_KERNELS=native: {library_status()}")
    return TorchKernels()
