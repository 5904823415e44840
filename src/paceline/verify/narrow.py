"""The part of the target's p that matters to a sampled draft when filters drop tokens. It reads values: for CPUs only.

A drafted token of probability 0 is never accepted, so its descendants need not be processed. A token of probability 0
everywhere cannot be recovered either: the tokens kept and those drafted represent the whole vocabulary, a few hundred
columns with the same numbers; of the rest of q only the sum matters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from paceline.draft import Draft, Proposal
from paceline.verify.outcome import has_children
from paceline.verify.processors import probabilities


def narrow(
    draft: Draft, row_of: Tensor, processed: Callable[[Tensor], Tensor], max_depth: int, *, remainder: bool
) -> tuple[Draft, Tensor, Tensor, Tensor]:
    """The draft over few columns, p (R, C + 1), each slot's row of p (B, N + 1; -1: none), and the tokens (C,) of the
    columns. `processed` returns the logits of some rows. With `remainder` the last column holds the rest of q."""
    assert draft.q is not None
    index, blocks = reach(draft, row_of, processed, max_depth)
    vocab = blocks[0].shape[1]
    wanted = np.zeros(vocab, bool)
    wanted[draft.tokens.numpy()] = True
    for block in blocks:
        for row in block.numpy():
            wanted |= row > -np.inf
    columns = torch.from_numpy(np.flatnonzero(wanted))
    p = probabilities(torch.cat([block[:, columns] for block in blocks]))
    q_row = torch.empty(p.shape[0], dtype=torch.int64)
    known = index >= 0
    q_row[index[known]] = draft.q.row_of[known]
    q = _columns(draft.q, q_row, columns, vocab)
    rest = torch.zeros_like(q_row)
    if remainder:
        rest = (draft.q.probs.sum(-1, dtype=torch.float64)[q_row] - q.sum(-1, dtype=torch.float64)).clamp_min_(0)
    place = torch.empty(vocab, dtype=torch.int64)
    place[columns] = torch.arange(columns.shape[0])
    proposal = Proposal(probs=torch.cat((q, rest[:, None].to(q.dtype)), 1), row_of=index)
    p = torch.cat((p, p.new_zeros(p.shape[0], 1)), 1)
    return replace(draft, tokens=place[draft.tokens], q=proposal), p, index, columns


def reach(
    draft: Draft, row_of: Tensor, processed: Callable[[Tensor], Tensor], max_depth: int
) -> tuple[Tensor, list[Tensor]]:
    """Process, level by level, the slots that have children and positive probability: slot -> row, and the rows."""
    tokens, above, parents = draft.tokens.numpy(), draft.parents.numpy() + 1, has_children(draft).numpy()
    rows, whose, index = row_of.numpy(), np.arange(draft.batch)[:, None], np.full(row_of.shape, -1)
    here, blocks, count = np.zeros_like(parents), [], 0
    here[:, 0] = parents[:, 0]
    for _ in range(max_depth):
        at = rows[here]
        if not at.size:
            break
        index[here] = np.arange(count, count + at.size)
        blocks.append(processed(torch.from_numpy(at)))
        below = np.where(here, index, -1)[whose, above] - count  # (B, N) row of the parent in this block
        can = (below >= 0) & (blocks[-1].numpy()[np.maximum(below, 0), tokens] > -np.inf)
        here[:, 0], here[:, 1:] = False, parents[:, 1:] & can
        count += at.size
    return torch.from_numpy(index), blocks


def _columns(q: Proposal, rows: Tensor, columns: Tensor, vocab: int) -> Tensor:
    """(R, C) of the tensor that was sampled from, 0 where the drafter has no such token."""
    if q.ids is None:
        return q.probs[rows[:, None], columns]
    place = torch.full((vocab,), -1)
    place[q.ids] = torch.arange(q.ids.shape[0])
    at = place[columns]
    return torch.where(at >= 0, q.probs[rows[:, None], at.clamp_min(0)], 0)
