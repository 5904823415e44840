"""Common parts of all Triton kernels: overlapping a kernel's start with the end of the one before it.

With programmatic dependent launch a kernel's programs may start while the kernel before is still finishing. `wait`
comes before the first read of anything another kernel wrote, so completion is transitive along the stream: once a
kernel is done, so are all it waited for. Before the wait a small weight is fetched into the L2 cache: a small model's
kernels are bound by memory latency, not by bandwidth. (Prefetching large weights was tried too, before the wait and
from the small kernels between products: slower by 1 to 9 %.)
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

INTERPRETED = triton.knobs.runtime.interpret  # TRITON_INTERPRET=1: on the CPU, for tests


@triton.jit
def wait(OVERLAP: tl.constexpr):
    if OVERLAP:
        gdc_wait()


@triton.jit
def release(OVERLAP: tl.constexpr):
    if OVERLAP:
        gdc_launch_dependents()


@triton.jit
def fetch(lines):
    """Prefetch lines of memory into the L2 cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [lines], dtype=tl.int32, is_pure=False, pack=1
    )


def unfused() -> dict[str, bool]:
    """Launch options for kernels whose bits must not depend on which products and sums the compiler fuses."""
    return {} if INTERPRETED else {"enable_fp_fusion": False}


def overlapped(enabled: bool = True) -> dict[str, bool]:
    """Launch options; none for the interpreter."""
    return {"OVERLAP": True, "launch_pdl": True} if enabled and not INTERPRETED else {"OVERLAP": False}


def multiprocessors(device: torch.device) -> int:
    """How many programs are certain to run at the same time; the interpreter runs one."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
