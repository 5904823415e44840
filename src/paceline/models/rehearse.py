"""Passes over nothing, run when an engine starts, so that no answer waits for kernels to be compiled or recorded.

They write to no cache slot and nobody looks at their logits. What is rehearsed is what one answer at a time needs, with
chains and with trees, and plain decoding of many; a batch that drafts records its shapes when they first occur.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.models.plan import PassPlan

CHAINS = (1, 8, 16, 32, 64)  # rows of one sequence
TREES = ((8, 8), (16, 8), (16, 16), (32, 8), (32, 16), (32, 32))  # rows, depth
PROMPT = 128
BATCHES = (2, 4, 8, 16, 32, 64, 128, 256, 512)


class Shape(NamedTuple):
    sequences: int
    rows: int  # of each
    depth: int = 0  # of a tree
    logits: int | None = None  # of so many rows, the last; None: of all


def shapes(most_sequences: int, most_rows: int) -> Iterator[Shape]:
    yield from (Shape(1, rows) for rows in CHAINS)
    yield from (Shape(1, rows, depth) for rows, depth in TREES)
    yield Shape(1, min(PROMPT, most_rows), logits=1)
    yield from (Shape(count, 1) for count in BATCHES if count <= min(most_sequences, most_rows))


def rehearsal(shape: Shape, block_size: int) -> tuple[Tensor, PassPlan, Tensor]:
    """Tokens, plan and logit rows of a pass of that shape."""
    count = shape.sequences * shape.rows
    zeros = torch.zeros(count, dtype=torch.int32)
    plan = PassPlan(
        positions=zeros + min(shape.depth, 1),
        slots=zeros - 1,
        sequence=torch.arange(shape.sequences, dtype=torch.int32).repeat_interleave(shape.rows),
        prefix=zeros + 1,
        path=torch.zeros((count, shape.depth), dtype=torch.int32),
        path_len=zeros + min(shape.depth, 1),
        block_tables=torch.zeros((shape.sequences, 1), dtype=torch.int32),
        block_size=block_size,
        max_len=2,
    )
    logit_rows = torch.arange(count)
    return (
        torch.zeros(count, dtype=torch.int64),
        plan,
        logit_rows if shape.logits is None else logit_rows[-shape.logits :],
    )
