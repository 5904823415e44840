"""Trees that only the device knows, written into a pass: tokens, positions, reach and paths of their nodes.

A program has a tree, a lane a node. A parent that does not come before its node is replaced by the node before it, so a
broken drafter lowers acceptance and changes no answer; depths are clipped to `max_depth`.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.config import MAX_K
from paceline.models.plan import DeviceTrees, PassPlan


@triton.jit
def _above(parents, node, mask):
    parent = tl.load(parents + node, mask=mask, other=-1)  # int64, narrowed only once it is known to fit
    return tl.maximum(tl.minimum(parent, (node - 1).to(tl.int64)), -1).to(tl.int32)


SIZES = ["stride", "tokens_stride", "path_width", "max_depth"]
POINTERS = ["parents_ptr", "drafted_ptr"]  # parts of larger tensors, aligned or not
NUMBERS = tl.constexpr(4)  # columns of `DeviceTrees.numbers`


@triton.jit(do_not_specialize=[*SIZES, *POINTERS])
def _place(
    parents_ptr, drafted_ptr, numbers, slots, tokens, positions, reach, path, stride, tokens_stride, path_width,
    max_depth, LANES: tl.constexpr,
):  # fmt: skip
    numbers += tl.program_id(0) * NUMBERS
    row, first, count, length = tl.load(numbers), tl.load(numbers + 1), tl.load(numbers + 2), tl.load(numbers + 3)
    node = tl.arange(0, LANES)
    used, at = node < count, first + node
    token = tl.load(drafted_ptr + row * tokens_stride + node, mask=used, other=0)
    tl.store(tokens + at, token.to(tl.int32), mask=used)
    parents = parents_ptr + row * stride
    depth = used.to(tl.int32)
    above = _above(parents, node, used)
    for _ in range(max_depth - 1):
        going = used & (above >= 0)
        depth += going.to(tl.int32)
        above = tl.where(going, _above(parents, above, going), -1)
    tl.store(positions + at, length - 1 + depth, mask=used)
    tl.store(reach + at, length + depth, mask=used)
    above, column = node, depth - 1
    for _ in range(max_depth):
        going = used & (above >= 0) & (column >= 0)
        slot = tl.load(slots + first + above, mask=going, other=-1)
        tl.store(path + at * path_width + column, slot, mask=going)
        above = tl.where(going, _above(parents, above, going), -1)
        column -= 1


def place_trees(plan: PassPlan, tokens: Tensor, numbers: Tensor, trees: DeviceTrees) -> None:
    """Write trees into a pass on the device, after the copy of the rest of it; `tokens` (M,) are the pass's, `numbers`
    (at least 4 T,) the trees' own, on the device."""
    device = plan.positions.device
    with torch.cuda.device(device) if device.type == "cuda" else torch.inference_mode():
        _place[(len(trees.numbers),)](
            trees.parents, trees.tokens, numbers, plan.slots, tokens, plan.positions, plan.reach, plan.path,
            trees.parents.stride(0), trees.tokens.stride(0), plan.path.shape[1], trees.max_depth,
            LANES=max(triton.next_power_of_2(trees.parents.shape[1]), MAX_K),
        )  # fmt: skip


def compile_place(plan: PassPlan, tokens: Tensor, numbers: Tensor) -> None:
    """Compile the kernel by a launch whose output is overwritten before the pass is run."""
    one = torch.zeros(1, 1, dtype=torch.int64, device=plan.positions.device)
    place_trees(plan, tokens, numbers, DeviceTrees(np.zeros((1, 4), np.int32), one, one - 1, max_depth=1))
