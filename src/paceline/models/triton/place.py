"""Writes trees whose shape only the device knows into a pass: positions, reach and paths of their nodes.

One program a tree, one lane a node. A parent that does not come before its node is replaced by the node before it, so a
broken drafter costs acceptance and nothing else; depths are clipped to `max_depth`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from paceline.config import MAX_K
from paceline.draft import packed_to
from paceline.models.plan import DeviceTrees, PassPlan


@triton.jit
def _above(parents, node, mask):
    parent = tl.load(parents + node, mask=mask, other=-1)  # int64, narrowed only once it is known to fit
    return tl.maximum(tl.minimum(parent, (node - 1).to(tl.int64)), -1).to(tl.int32)


SIZES = ["width", "stride", "path_width", "max_depth"]
POINTERS = ["parents_ptr", "rows_ptr", "at_ptr", "slots_ptr", "length_ptr"]  # parts of larger tensors, aligned or not


@triton.jit(do_not_specialize=[*SIZES, *POINTERS])
def _place(
    parents_ptr, rows_ptr, at_ptr, slots_ptr, length_ptr, positions, reach, path, width, stride, path_width, max_depth,
    LANES: tl.constexpr,
):  # fmt: skip
    tree = tl.program_id(0)
    node = tl.arange(0, LANES)
    at = tl.load(at_ptr + tree * width + node, mask=node < width, other=-1)
    used = at >= 0
    parents = parents_ptr + tl.load(rows_ptr + tree) * stride
    depth = used.to(tl.int32)
    above = _above(parents, node, used)
    for _ in range(max_depth - 1):
        going = used & (above >= 0)
        depth += going.to(tl.int32)
        above = tl.where(going, _above(parents, above, going), -1)
    length = tl.load(length_ptr + tree).to(tl.int32)
    tl.store(positions + at, length - 1 + depth, mask=used)
    tl.store(reach + at, length + depth, mask=used)
    above, column = node, depth - 1
    for _ in range(max_depth):
        going = used & (above >= 0) & (column >= 0)
        slot = tl.load(slots_ptr + tree * width + above, mask=going, other=-1).to(tl.int32)
        tl.store(path + at * path_width + column, slot, mask=going)
        above = tl.where(going, _above(parents, above, going), -1)
        column -= 1


def place_trees(plan: PassPlan, trees: DeviceTrees) -> None:
    """Write trees into a pass on the device, after the copy of the rest of it."""
    device = plan.positions.device
    count, width = trees.at.shape
    rows, at, slots, length = packed_to(device, trees.rows, trees.at, trees.slots, trees.length)
    with torch.cuda.device(device) if device.type == "cuda" else torch.inference_mode():
        _place[(count,)](
            trees.parents, rows, at, slots, length, plan.positions, plan.reach, plan.path,
            width, trees.parents.stride(0), plan.path.shape[1], trees.max_depth,
            LANES=max(triton.next_power_of_2(width), MAX_K),
        )  # fmt: skip


def compile_place(plan: PassPlan) -> None:
    """Compile the kernel; what it writes into the pass is overwritten before that is run."""
    one = torch.zeros(1, dtype=torch.int64)
    parents = one.to(plan.positions.device)[None] - 1
    place_trees(plan, DeviceTrees(rows=one, at=one[None], slots=one[None], length=one, parents=parents, max_depth=1))
