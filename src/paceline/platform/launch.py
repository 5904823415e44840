"""Launches of all Triton kernels: their options, and overlapping a kernel's start with the end of the one before it.

With programmatic dependent launch a kernel's programs may start while the kernel before is still finishing. `wait`
comes before the first read of anything that another kernel wrote, so completion is transitive along the stream: once a
kernel is done, so are all that it waited for. Before the wait a small weight is fetched into the L2 cache: the kernels
of a small model are bound by memory latency, not by bandwidth. Prefetching large weights, before the wait or from the
small kernels between products, was slower by 1 to 9 %.
"""

from __future__ import annotations

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
    """Return launch options for kernels whose bits must not depend on how the compiler fuses products and sums."""
    return {} if INTERPRETED else {"enable_fp_fusion": False}


def overlapped(enabled: bool = True) -> dict[str, bool]:
    """Return launch options for a kernel that starts before the one before it ends; not under the interpreter."""
    return {"OVERLAP": True, "launch_pdl": True} if enabled and not INTERPRETED else {"OVERLAP": False}
