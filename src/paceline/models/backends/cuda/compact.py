"""Accepted paths of token trees moved into place in every layer: one launch, without the paths on the host.

The node accepted at depth d (counted from 0) moves to the slot of node d. Nodes come after their ancestors, so it is
node d itself, which stays, or a later one. Hence, in ascending order of depth, no slot is read after it was written:
the slots written before are those of nodes below d. A slot that is read may be written at a later depth; a barrier
separates the two. Programs share no element.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST = 1024  # elements of a slot that one program moves
WARP = 256  # elements of one warp


def compact(storage: Tensor, nodes: Tensor, path: Tensor) -> None:
    """Move paths in `storage` (L, 2, num_slots, heads, dim); `nodes` and `path` are those of `KVCache.compact`."""
    layers, _, _, heads, dim = storage.shape
    if storage.itemsize == 1:  # bytes of any dtype, also on GPUs without it
        storage = storage.view(torch.uint8)
    block = min(triton.next_power_of_2(heads * dim), MOST)
    _compact[(len(nodes), 2 * layers, triton.cdiv(heads * dim, block))](
        storage, storage.stride(1), nodes, nodes.shape[1], path.contiguous(), path.shape[1],
        SIZE=heads * dim, BLOCK=block,
        num_warps=max(block // WARP, 1),
    )  # fmt: skip


@triton.jit(do_not_specialize=["width", "depth"])
def _compact(storage, plane, nodes, width, path, depth, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Move some elements of K or V of one layer, for one sequence."""
    at = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    elements = storage + tl.program_id(1).to(tl.int64) * plane + at
    nodes += tl.program_id(0) * width
    path += tl.load(nodes) * depth
    slots = nodes + 1
    for d in range(depth):
        node = tl.load(path + d)
        if node > d:
            moved = tl.load(elements + tl.load(slots + node) * SIZE, mask=at < SIZE)
            tl.store(elements + tl.load(slots + d) * SIZE, moved, mask=at < SIZE)
            tl.debug_barrier()
