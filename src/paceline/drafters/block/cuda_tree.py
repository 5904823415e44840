"""Trees from one pass of a block drafter on a GPU, as `tree` defines them, in four launches.

1. `_candidates`: the likeliest tokens of each part of a position's logits, and the sum of its exponentials.
2. `_join`: the likeliest tokens of each position.
3. `_transitions`: for each candidate of a position, its likeliest children in the next, with the Markov head.
4. `_grow`: level by level the best nodes have children; the likeliest nodes become the tree.

Sorting is by one integer of a score and an index, so ties go to the lower index. No child scores more than its parent,
whatever the logits hold: trees are sound without being checked.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.drafters.block.tree import CANDIDATES, DEEPER

PART = 1024  # logits that one program reads
LAST = tl.constexpr(0x7FFFFFFF)
STEP = tl.constexpr(DEEPER)


@triton.jit
def _key(score, index):
    """Return an integer that sorts, descending, by score, the highest first, then by index, the lowest first."""
    bits = score.to(tl.int32, bitcast=True)
    bits ^= (bits >> 31) & LAST
    return (bits.to(tl.int64) << 32) | (index * -1 + LAST).to(tl.int64)


@triton.jit
def _score(key):
    bits = (key >> 32).to(tl.int32)
    bits ^= (bits >> 31) & LAST
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _index(key):
    return (key & LAST).to(tl.int32) * -1 + LAST


@triton.jit
def _log_share(x):
    """Return the log of a probability, at most 0; NaN becomes that of probability 0."""
    return tl.where(x <= 0, x, tl.where(x > 0, 0.0, float("-inf")))


@triton.jit
def _total(peak, share):
    """Return the log of a sum of exponentials, from peaks and shares relative to them."""
    highest = tl.max(peak)
    return highest + tl.log(tl.sum(share * tl.exp(peak - highest)))


@triton.jit(do_not_specialize=["batch_stride", "vocab"])
def _candidates(logits, keys, peaks, shares, batch_stride, vocab, DEPTH: tl.constexpr, COUNT: tl.constexpr,
                PART: tl.constexpr):  # fmt: skip
    row, part, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    at = part * PART + tl.arange(0, PART)
    begin = logits + (row // DEPTH).to(tl.int64) * batch_stride + (row % DEPTH).to(tl.int64) * vocab
    x = tl.load(begin + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
    highest = tl.max(x)
    out = row * parts + part
    tl.store(peaks + out, highest)
    tl.store(shares + out, tl.sum(tl.exp(x - highest)))
    tl.store(keys + out * COUNT + tl.arange(0, COUNT), tl.topk(_key(x, at), COUNT))


@triton.jit(do_not_specialize=["vocab"])
def _join(keys, peaks, shares, tokens, best, others, parts, vocab, COUNT: tl.constexpr, PARTS: tl.constexpr):
    """Write `others`, the log of the probability mass, before the Markov head, of tokens that are no candidates."""
    row = tl.program_id(0)
    at, lane = tl.arange(0, PARTS * COUNT), tl.arange(0, PARTS)
    candidates = tl.load(keys + row * parts * COUNT + at, mask=at < parts * COUNT, other=-(2**63))
    peak = tl.load(peaks + row * parts + lane, mask=lane < parts, other=float("-inf"))
    share = tl.load(shares + row * parts + lane, mask=lane < parts, other=0.0)
    top = tl.topk(candidates, COUNT)
    score, total = _score(top), _total(peak, share)
    highest = tl.max(score)
    among = tl.minimum(tl.sum(tl.exp(score - highest)) * tl.exp(highest - total), 1 - 1e-6)
    lanes = row * COUNT + tl.arange(0, COUNT)
    tl.store(tokens + lanes, tl.minimum(_index(top), vocab - 1))  # NaN may sort behind what is no token
    tl.store(best + lanes, score)
    tl.store(others + row, total + tl.log(1 - among))


@triton.jit
def _transitions(tokens, best, others, anchors, anchor_rows, w1, w2, child, child_score, rank,
                 DEPTH: tl.constexpr, COUNT: tl.constexpr, WIDE: tl.constexpr, RANK: tl.constexpr):  # fmt: skip
    """Write children (B, DEPTH, COUNT, WIDE) of each candidate before a position; the first uses one row of them."""
    sequence, level = tl.program_id(0), tl.program_id(1)
    row = sequence * DEPTH + level
    lane, wide = tl.arange(0, COUNT), tl.arange(0, WIDE)
    score = tl.load(best + row * COUNT + lane)[None, :] + tl.zeros((COUNT, COUNT), tl.float32)
    if RANK > 0:
        column = tl.arange(0, RANK)
        inside = column[None, :] < rank
        token = tl.load(tokens + row * COUNT + lane)
        into = tl.load(w2 + token[:, None] * rank + column[None, :], mask=inside, other=0)
        if level == 0:
            anchor = tl.zeros((COUNT,), tl.int64) + tl.maximum(tl.load(anchors + sequence), 0)  # not verdict.INVALID
            out = tl.load(anchor_rows + anchor[:, None] * rank + column[None, :], mask=inside, other=0)
        else:
            before = tl.load(tokens + (row - 1) * COUNT + lane)
            out = tl.load(w1 + before[:, None] * rank + column[None, :], mask=inside, other=0)
        score += tl.dot(out, tl.trans(into), input_precision="ieee")
    highest = tl.max(score, 1)
    sum_of = tl.sum(tl.exp(score - highest[:, None]), 1)
    other = tl.load(others + row)
    more = tl.maximum(highest, other)
    total = more + tl.log(sum_of * tl.exp(highest - more) + tl.exp(other - more))
    top = tl.topk(_key(score - total[:, None], lane[None, :] + tl.zeros((COUNT, COUNT), tl.int32)), WIDE)
    at = (row * COUNT + lane[:, None]) * WIDE + wide[None, :]
    tl.store(child + at, _index(top))
    tl.store(child_score + at, _score(top))


@triton.jit(do_not_specialize=["nodes", "batch"])
def _grow(tokens, child, child_score, ids, scores, places, parents, ranks, drafts, batch, nodes,
          DEPTH: tl.constexpr, COUNT: tl.constexpr, WIDE: tl.constexpr, ALL: tl.constexpr,
          CHOSEN: tl.constexpr):  # fmt: skip
    """Write the tree. `scores`, `places`, `parents`, `ranks` (B, ALL) are scratch: all nodes, level by level."""
    sequence = tl.program_id(0)
    scores += sequence * ALL
    places += sequence * ALL
    parents += sequence * ALL
    ranks += sequence * ALL
    wide = tl.arange(0, WIDE)
    every = tl.arange(0, ALL)
    tl.store(scores + every, tl.full((ALL,), float("-inf"), tl.float32))
    tl.store(parents + every, tl.full((ALL,), -1, tl.int32))
    tl.store(ranks + every, tl.full((ALL,), -1, tl.int32))
    tl.store(places + every, tl.zeros((ALL,), tl.int32))
    tl.debug_barrier()
    first = sequence * DEPTH * COUNT * WIDE + wide
    score, place, node = _log_share(tl.load(child_score + first)) - STEP, tl.load(child + first), wide
    tl.store(scores + wide, score)
    tl.store(places + wide, place)
    begin = WIDE
    for level in range(1, DEPTH):
        rows = ((sequence * DEPTH + level) * COUNT + place[:, None]) * WIDE + wide[None, :]
        scored = score[:, None] + _log_share(tl.load(child_score + rows)) - STEP
        at = wide[:, None] * WIDE + wide[None, :]
        tl.store(scores + begin + at, scored)
        tl.store(places + begin + at, tl.load(child + rows))
        tl.store(parents + begin + at, node[:, None] + tl.zeros((WIDE, WIDE), tl.int32))
        tl.debug_barrier()
        top = tl.topk(tl.reshape(_key(scored, at), (WIDE * WIDE,)), WIDE)
        score, node = _score(top), begin + _index(top)
        place = tl.load(places + node)
        begin += WIDE * WIDE
    tl.debug_barrier()
    top = tl.topk(_key(tl.load(scores + every), every), CHOSEN)
    chosen, order = _index(top), tl.arange(0, CHOSEN)
    tl.store(ranks + chosen, order)
    tl.debug_barrier()
    parent = tl.load(parents + chosen)
    parent = tl.where(parent < 0, -1, tl.load(ranks + tl.maximum(parent, 0)))
    depth = tl.where(chosen < WIDE, 0, (chosen - WIDE) // (WIDE * WIDE) + 1)
    exists = chosen < WIDE + (DEPTH - 1) * WIDE * WIDE  # lanes behind the last node have depths that no position has
    token = tl.load(tokens + (sequence * DEPTH + depth) * COUNT + tl.load(places + chosen), mask=exists, other=0)
    out, used, part = drafts + sequence * nodes + order, order < nodes, batch.to(tl.int64) * nodes
    tl.store(out, tl.load(ids + token), mask=used)
    tl.store(out + part, parent.to(tl.int64), mask=used)
    tl.store(out + 2 * part, (depth + 1).to(tl.int64), mask=used)


def serves(depth: int, vocab: int, beam: int, nodes: int) -> bool:
    """Return whether the kernels grow trees of this shape: the sizes that they sort are powers of two."""
    most = beam + (depth - 1) * beam * beam
    return vocab >= CANDIDATES and 2 <= beam < CANDIDATES and beam & (beam - 1) == 0 and nodes <= most


def device_trees(
    logits: Tensor,
    anchors: Tensor,
    anchor_rows: Tensor | None,
    w1: Tensor | None,
    w2: Tensor | None,
    ids: Tensor,
    nodes: int,
    beam: int,
    *,
    count: int = CANDIDATES,
    part: int = PART,
) -> Tensor:
    """Return tokens, parents and depths (3, B, nodes). `logits` (B, D, V): any stride between sequences, rows
    contiguous; `anchor_rows` (target's vocabulary, R), `w1`, `w2` (V, R): None without a Markov head; `ids` (V,).
    `count` candidates of a position, among `part` logits at a time: powers of two."""
    batch, depth, vocab = logits.shape
    assert logits.stride(1) == vocab
    rows, parts = batch * depth, triton.cdiv(vocab, part)
    device, rank = logits.device, 0 if w2 is None else w2.shape[1]

    def ints(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=device)

    def floats(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=device)

    keys = torch.empty(rows, parts, count, dtype=torch.int64, device=device)
    peaks, shares = floats(rows, parts), floats(rows, parts)
    _candidates[(rows, parts)](
        logits, keys, peaks, shares, logits.stride(0), vocab, DEPTH=depth, COUNT=count, PART=part
    )
    tokens, best, others = ints(rows, count), floats(rows, count), floats(rows)
    padded = triton.next_power_of_2(parts)
    _join[(rows,)](keys, peaks, shares, tokens, best, others, parts, vocab, COUNT=count, PARTS=padded)
    child, child_score = ints(rows, count, beam), floats(rows, count, beam)
    _transitions[(batch, depth)](
        tokens, best, others, anchors, anchor_rows, w1, w2, child, child_score, rank,
        DEPTH=depth, COUNT=count, WIDE=beam, RANK=max(triton.next_power_of_2(rank), 16) if rank else 0, num_warps=8,
    )  # fmt: skip
    every = triton.next_power_of_2(beam + (depth - 1) * beam * beam)
    chosen = max(triton.next_power_of_2(nodes), 2)
    drafts = torch.empty(3, batch, nodes, dtype=torch.int64, device=device)
    _grow[(batch,)](
        tokens, child, child_score, ids, floats(batch, every), ints(batch, every), ints(batch, every),
        ints(batch, every), drafts, batch, nodes,
        DEPTH=depth, COUNT=count, WIDE=beam, ALL=every, CHOSEN=chosen,
    )  # fmt: skip
    return drafts
