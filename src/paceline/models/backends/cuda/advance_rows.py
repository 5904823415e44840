"""Kernels between two passes of a chain: each row's most probable or sampled token becomes its row in the next pass.

Position, slot and reach of a row advance with it. A row at the end of its blocks stays there and writes no K/V: its
later tokens are arbitrary but harmless, since drafts are verified.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.core.verdict import UnreadVerdict
from paceline.models.graphs import Placed
from paceline.models.pass_chain import READ

BLOCK = 8192  # tokens of the vocabulary that one argmax covers


def begin_rows(after: UnreadVerdict, known: Tensor, into: Placed) -> None:
    """Place the READ last tokens of each row as the rows of a pass; `known` is made by `known_of`."""
    plan = into.plan
    _begin[(known.shape[1],)](
        after.tokens, after.tokens.stride(0), after.num_accepted, known, known.shape[1],
        *(into.tokens, plan.positions, plan.slots, plan.prefix, plan.reach, plan.block_tables, into.header),
        BLOCK_SIZE=plan.block_size, READ=READ,
    )  # fmt: skip


def advance_rows(
    logits: Tensor,
    chosen: Tensor | None,
    known: Tensor,
    drafted: Tensor,
    depth: int,
    seen: Placed,
    each: int,
    into: Placed,
) -> None:
    """Write column `depth` of `drafted` (R, K) from the logits of a pass with `each` rows a sequence, and place these
    tokens as the next pass, one row a sequence. `chosen` (R,): tokens that were sampled."""
    plan = into.plan
    _advance[(len(drafted),)](
        logits, logits.stride(0), logits.shape[1], chosen, drafted, drafted.shape[1], depth, known, len(drafted),
        seen.plan.positions,
        *(into.tokens, plan.positions, plan.slots, plan.prefix, plan.reach, plan.block_tables, into.header),
        BLOCK_SIZE=plan.block_size, EACH=each, BLOCK=min(BLOCK, triton.next_power_of_2(logits.shape[1])),
        num_warps=8,
    )  # fmt: skip


def known_of(rows: Sequence[tuple[int, int, int, int]]) -> Tensor:
    """Return (4, R) on the host: row of the verdict, position and value of the last token before it, blocks' end."""
    return torch.tensor(rows, dtype=torch.int64).T.contiguous()


@triton.jit(do_not_specialize=["width", "rows"])
def _begin(
    committed, width, accepted, known, rows, tokens, positions, slots, prefix, reach, tables, header,
    BLOCK_SIZE: tl.constexpr, READ: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    which = tl.load(known + row)
    last = tl.load(known + rows + row)
    end = tl.load(known + 3 * rows + row)
    more = tl.load(accepted + which) + 1
    for at in tl.static_range(READ):
        behind = more + 1 - READ + at  # tokens behind the last known one
        token = tl.load(committed + which * width + behind - 1, mask=behind > 0, other=0)
        token = tl.where(behind > 0, token, tl.load(known + 2 * rows + row))
        tl.store(tokens + row * READ + at, token.to(tl.int32))
        _put(row * READ + at, row, last + behind, end, positions, slots, prefix, reach, tables, header, BLOCK_SIZE)


@triton.jit(do_not_specialize=["stride", "vocab", "width", "depth", "rows"])
def _advance(
    logits, stride, vocab, chosen, drafted, width, depth, known, rows, seen, tokens, positions, slots, prefix, reach,
    tables, header,
    BLOCK_SIZE: tl.constexpr, EACH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    token = tl.program_id(0) * 0
    if chosen is not None:
        token = tl.load(chosen + row)
    else:
        best = float("-inf")
        for first in range(0, vocab, BLOCK):
            at = first + tl.arange(0, BLOCK)
            logit = tl.load(logits + row.to(tl.int64) * stride + at, mask=at < vocab, other=float("-inf"))
            highest = tl.max(logit, 0)
            place = first + tl.argmax(logit, 0)
            token = tl.where(highest > best, place, token)
            best = tl.maximum(highest, best)
    tl.store(drafted + row * width + depth, token.to(tl.int64))
    tl.store(tokens + row, token.to(tl.int32))
    position = tl.load(seen + row * EACH + EACH - 1).to(tl.int64) + 1
    end = tl.load(known + 3 * rows + row)
    _put(row, row, position, end, positions, slots, prefix, reach, tables, header, BLOCK_SIZE)


@triton.jit
def _put(place, owner, position, end, positions, slots, prefix, reach, tables, header, BLOCK_SIZE: tl.constexpr):
    """Write a row of a pass at a position; where no block is left for it, its K/V are not written."""
    inside = position < end
    position = tl.minimum(position, end - 1)
    block = tl.load(tables + owner * tl.load(header) + position // BLOCK_SIZE)
    slot = tl.where(inside, block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE, -1)
    tl.store(slots + place, slot.to(tl.int32))
    tl.store(positions + place, position.to(tl.int32))
    tl.store(prefix + place, (position + 1).to(tl.int32))
    tl.store(reach + place, (position + 1).to(tl.int32))
