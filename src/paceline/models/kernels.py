"""The interface of kernels: the operations of a decoder. No code above this file depends on the kind of device.

`TorchKernels` works everywhere and is the reference. `NativeKernels` (CPU) and `TritonKernels` (CUDA) keep one order of
summation for every row, so a row's bits do not depend on the other rows of its pass, and read weights at memory speed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from paceline.errors import DeviceError, InvalidParameter
from paceline.models.kv_cache import LayerCache
from paceline.models.plan import PassPlan
from paceline.models.spec import PARALLEL, SILU, LayerSpec
from paceline.models.weights import StoredWeight
from paceline.platform.triton import require_triton, triton_problem

KERNELS = ("auto", "native", "triton", "torch")
GET_NATIVE = "install paceline's wheel, or its checkout where there is a C++ compiler"
FLOAT32, INT8 = ACTIVATIONS = ("float32", "int8")
Packed = Any  # a `Linear` in the layout of its kernels, opaque to all other code


@dataclass(frozen=True)
class Layer:
    """One decoder layer: its shape and its weights. Norms that the shape does not have are None."""

    spec: LayerSpec
    input_norm: Tensor | None  # of the residual stream, before attention
    qkv: Packed
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: Packed
    attention_norm: Tensor | None  # of attention's output
    mlp_norm: Tensor | None  # of the residual stream, before the MLP
    gate_up: Packed
    down: Packed
    down_norm: Tensor | None  # of the MLP's output

    @property
    def products(self) -> tuple[Packed, ...]:
        return self.qkv, self.output, self.gate_up, self.down


class RopeArgs(NamedTuple):
    """The rotation of q and k in a layer. Halves of a head are a pair: (x1 cos - x2 sin, x2 cos + x1 sin)."""

    cos: Tensor  # (num_positions, D / 2), fp32
    sin: Tensor
    q_norm: Tensor | None  # (D,): RMSNorm of each head before, or (Hq * D,): of all heads as one
    k_norm: Tensor | None
    eps: float


@dataclass(frozen=True)
class StackParams:
    """Parameters of a model's layers."""

    tables: tuple[tuple[Tensor, Tensor], ...]  # cos and sin of each layer, (positions, D / 2) fp32; equal ones are one
    eps: float
    centred: bool = False  # norms of the residual stream subtract the mean first

    def rope(self, index: int, layer: Layer) -> RopeArgs:
        return RopeArgs(*self.tables[index], layer.q_norm, layer.k_norm, self.eps)

    @property
    def positions(self) -> int:
        return len(self.tables[0][0])


class Stack(Protocol):
    """A model's layers bound to their caches, ready to run."""

    caches: Sequence[LayerCache]

    def run(self, first: int, last: int, added: Tensor | None, residual: Tensor, plan: PassPlan) -> Tensor:
        """Run layers [first, last). `added`: output of the layer before, not yet in `residual`; None before layer 0.

        `residual` is updated in place; the last layer's output, not yet added to it, is returned.
        """


class Kernels(Protocol):
    """The operations of a decoder on one kind of device."""

    name: str
    exact: bool  # the bits of a row do not depend on the other rows of its pass
    captures: bool  # a pass may be captured as a graph and replayed
    torch_threads: int | None  # threads for torch's own operations beside these kernels; None: unchanged
    keeps_codes: bool  # quantised weights stay codes or blocks in memory where the layout fits; False: all are expanded
    activations: str  # dtype of activations in products with blocks: float32, or int8 in blocks of 32 with a scale

    def pack(self, weight: Tensor | StoredWeight | Sequence[StoredWeight], bias: Tensor | None = None) -> Packed:
        """Lay out a (N, K) weight at load; it is widened where these kernels cannot compute with its kind.

        Several weights of any kinds are one product, their rows one after the other.
        """

    def embedding(self, weight: StoredWeight, packed: Packed | None) -> Any:
        """Return an object that maps (M,) token ids to (M, H) by indexing; `packed`: this weight as a tied head."""

    def linear(self, x: Tensor, weight: Packed) -> Tensor:
        """Multiply (M, K) -> (M, N), in the activation dtype."""

    def logits(self, x: Tensor, weight: Packed, out: Tensor | None = None) -> Tensor:
        """Multiply (M, K) -> (M, V) in fp32, into `out` if given."""

    def cap(self, logits: Tensor, softcap: float) -> Tensor:
        """Compute softcap * tanh(logits / softcap) in place."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, centred: bool = False) -> Tensor:
        """Normalise (M, H) -> (M, H); `centred`: after subtraction of the row's mean."""

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, centred: bool = False) -> Tensor:
        """Add x to the residual in place; return rms_norm(residual)."""

    def rope_and_store(self, qkv: Tensor, plan: PassPlan, rope: RopeArgs, cache: LayerCache) -> Tensor:
        """Norm and rotate q and k of (M, (Hq + 2 Hkv) * D), which may be overwritten; write k and v to plan.slots
        except -1; return q as (M, Hq, D)."""

    def attention(
        self, q: Tensor, plan: PassPlan, cache: LayerCache, scale: float, window: int | None, softcap: float = 0.0
    ) -> Tensor:
        """Attend (M, Hq, D) -> (M, Hq * D). A row at position t sees keys [max(0, t - window + 1), reach), or without a
        window [0, reach). A score s becomes c tanh(s / c) with a `softcap` c."""

    def gate(self, gate_up: Tensor, activation: str = SILU) -> Tensor:
        """Compute (M, 2 I) -> (M, I): activation(first half) * second half."""

    def stack(self, layers: Sequence[Layer], caches: Sequence[LayerCache], shape: StackParams) -> Stack:
        """Bind a model's layers to their caches. `LayerByLayer` is the default implementation."""


class LayerByLayer:
    """A stack that calls the kernels one by one."""

    def __init__(
        self, kernels: Kernels, layers: Sequence[Layer], caches: Sequence[LayerCache], shape: StackParams
    ) -> None:
        self.kernels, self.layers, self.caches, self.shape = kernels, layers, caches, shape

    def run(self, first: int, last: int, added: Tensor | None, residual: Tensor, plan: PassPlan) -> Tensor:
        kernels, shape = self.kernels, self.shape
        for index in range(first, last):
            layer, cache = self.layers[index], self.caches[index]
            hidden = self._enter(added, residual, layer.input_norm)
            q = kernels.rope_and_store(kernels.linear(hidden, layer.qkv), plan, shape.rope(index, layer), cache)
            spec = layer.spec
            attended = kernels.attention(q, plan, cache, spec.scale, spec.window, spec.softcap)
            added = self._normed(kernels.linear(attended, layer.output), layer.attention_norm)
            if spec.norms == PARALLEL:
                added = added + self._mlp(hidden, layer)
            else:
                added = self._mlp(self._enter(added, residual, layer.mlp_norm), layer)
        assert added is not None, "a stack runs at least one layer"
        return added

    def _enter(self, added: Tensor | None, residual: Tensor, norm: Tensor | None) -> Tensor:
        """Add the output before to the residual; return the input of a layer's half."""
        kernels, eps, centred = self.kernels, self.shape.eps, self.shape.centred
        if norm is None:
            return residual if added is None else residual.add_(added)
        if added is None:
            return kernels.rms_norm(residual, norm, eps, centred)
        return kernels.add_rms_norm(added, residual, norm, eps, centred)

    def _mlp(self, hidden: Tensor, layer: Layer) -> Tensor:
        kernels = self.kernels
        gated = kernels.gate(kernels.linear(hidden, layer.gate_up), layer.spec.activation)
        return self._normed(kernels.linear(gated, layer.down), layer.down_norm)

    def _normed(self, x: Tensor, norm: Tensor | None) -> Tensor:
        return x if norm is None else self.kernels.rms_norm(x, norm, self.shape.eps, self.shape.centred)


def kernels_for(device: torch.device, threads: int | None = None, activations: str = FLOAT32) -> Kernels:
    """Return the best kernels this machine can run, or those named by PACELINE_KERNELS.

    `activations` int8 is another model: native kernels only.
    """
    if activations not in ACTIVATIONS:
        raise InvalidParameter("activations", f"{activations!r} is not one of {', '.join(ACTIVATIONS)}")
    kernels = _kernels_for(device, threads, activations)
    if kernels.activations != activations:
        raise InvalidParameter(
            "activations", f"{activations} needs the native kernels of a CPU, not {kernels.name} on {device.type}"
        )
    return kernels


def _kernels_for(device: torch.device, threads: int | None, activations: str) -> Kernels:
    from paceline.models.backends.torch import TorchKernels

    choice = os.environ.get("PACELINE_KERNELS", "") or "auto"
    if choice not in KERNELS:
        raise InvalidParameter("PACELINE_KERNELS", f"{choice!r} is not one of {', '.join(KERNELS)}")
    for name, where in (("native", "cpu"), ("triton", "cuda")):
        if choice == name and device.type != where:
            raise DeviceError(f"PACELINE_KERNELS={name} runs on {where} only, not on {device}; unset it")
    if choice == "torch":
        return TorchKernels()
    if device.type == "cpu":
        return _for_cpu(choice, threads, activations) or TorchKernels()
    return _for_gpu(choice, device) or TorchKernels()


class SlowKernels(NamedTuple):
    """The reason for torch's kernels, and the remedy."""

    reason: str
    advice: str

    def __str__(self) -> str:
        return (
            f"slow kernels serve: {self.reason}; {self.advice}. Meanwhile a drafted answer may differ from the plain "
            "one where two tokens are nearly as likely"
        )


def why_slow(kernels: Kernels, device: torch.device) -> SlowKernels | None:
    """Return why torch's kernels serve; None where kernels made for the device do."""
    if kernels.name != "torch":
        return None
    if os.environ.get("PACELINE_KERNELS", "") == "torch":
        return SlowKernels("PACELINE_KERNELS=torch asks for them", "unset it")
    if device.type == "cpu":
        from paceline.native.library import library_status

        return SlowKernels(library_status(), GET_NATIVE)
    return SlowKernels(*(triton_problem() or (f"there are no others for {device.type}", "use cpu or cuda")))


def _for_cpu(choice: str, threads: int | None, activations: str) -> Kernels | None:
    from paceline.models.backends.cpu.kernels import NativeKernels
    from paceline.native.library import library_status, load_library

    if (library := load_library()) is not None:
        return NativeKernels(library, threads, activations)
    if choice == "native":
        raise DeviceError(f"PACELINE_KERNELS=native: {library_status()}; {GET_NATIVE}")
    return None


def _for_gpu(choice: str, device: torch.device) -> Kernels | None:
    if device.type != "cuda":
        return None
    try:
        require_triton()
        from paceline.models.backends.cuda.kernels import TritonKernels
    except ImportError as problem:
        if choice == "triton":
            raise DeviceError(f"PACELINE_KERNELS=triton: {problem}; pip install triton") from None
        return None
    return TritonKernels(device)


def draw_of(device: torch.device) -> Callable[[Tensor], Callable[..., int | None] | None] | None:
    """Return the native function that draws a token from a row of logits, for `verify.host`; None without one."""
    if device.type != "cpu" or os.environ.get("PACELINE_KERNELS", "") == "torch":
        return None
    from paceline.models.backends.cpu.kernels import native_draw
    from paceline.native.library import load_library

    return native_draw(load_library())


def top_tokens_of(device: torch.device) -> Callable[[Tensor, int, int], Tensor] | None:
    """Return the native `verify.top_tokens`, of logits (M, V), n and a number of threads; None without one."""
    if device.type != "cpu" or os.environ.get("PACELINE_KERNELS", "") == "torch":
        return None
    from paceline.models.backends.cpu.kernels import native_top_tokens
    from paceline.native.library import load_library

    return native_top_tokens(load_library())
