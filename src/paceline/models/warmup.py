"""Passes run when an engine starts, so that no answer waits for kernels to be compiled or graphs to be captured.

They write to no cache slot and their logits are not read. They cover every shape of decoding, with and without drafts,
for one sequence and for shrinking batches, and prompts of common lengths; other shapes are captured when they first
occur.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.models.buckets import PATHS, STEPS, TILES, up
from paceline.models.plan import PassPlan

FEW, APART = 64, 8  # decodes beside a long prompt: every number below FEW, then every multiple of APART
CHAIN = 64  # rows; the longest chain of a single sequence
LAG = 8  # tokens that a draft model reads of a sequence for which another method drafted
TREES = 512  # rows; the largest pass with trees, since attention keeps partial results of each row
JOINING = 4  # rows for each sequence; the largest pass in which some sequences read prompts and others decode
PROMPT, PROMPTS = 128, (1, 4, 16, 64)  # tokens of a prompt; numbers of prompts that are read together


class PassShape(NamedTuple):
    """The shape of a pass that is run beforehand."""

    counts: tuple[int, ...]  # rows of each sequence
    tree: bool = False
    last: bool = False  # only the last row of each sequence has logits
    unfinished: bool = False  # the last sequence has no logits: its prompt goes on

    @property
    def rows(self) -> int:
        return sum(self.counts)


def verifying(sequences: int, most_rows: int, nodes: int, tree_nodes: int = 0) -> Iterator[PassShape]:
    """Yield passes of a target for up to `sequences` sequences with chains of up to `nodes` nodes each, or trees of up
    to `nodes` or `tree_nodes`."""
    for count in _sizes(sequences, most_rows):
        yield PassShape((1,) * count)
        for rows in _totals(count, min(count * (1 + nodes), most_rows)):
            for counts in _spread(count, rows, 1 + nodes):
                yield PassShape(counts)
                if nodes and count < rows <= TREES:
                    yield PassShape(counts, tree=True)
        for rows in _totals(count * (2 + nodes), min(count * (1 + tree_nodes), most_rows, TREES)):
            yield PassShape(_spread(count, rows, 1 + tree_nodes)[0], tree=True)
    if nodes:
        yield from (PassShape((rows,)) for rows in STEPS if 1 + nodes < rows <= min(CHAIN, most_rows))
    yield from reading(sequences, most_rows)
    yield from joining(sequences, most_rows)
    yield from filled(sequences, most_rows)


def joining(sequences: int, most_rows: int) -> Iterator[PassShape]:
    """Yield passes of sequences that decode beside some that read their prompts, as in a batch with churn."""
    for count in (count for count in TILES if 4 <= count <= sequences):
        for rows in _totals(count + 16, min(JOINING * count, most_rows)):
            for prompts in {1, max(count // 16, 1)}:
                decodes = count - prompts
                yield PassShape((1,) * decodes + _spread(prompts, rows - decodes, rows)[0], last=True)


def filled(sequences: int, most_rows: int) -> Iterator[PassShape]:
    """Yield passes that a long prompt fills, alone or beside sequences that decode."""
    most = min(sequences, most_rows)
    for decodes in (*range(min(most, FEW)), *range(FEW, most, APART)):
        yield PassShape((1,) * decodes + (most_rows - decodes,), last=True, unfinished=True)


def drafting(sequences: int, most_rows: int) -> Iterator[PassShape]:
    """Yield passes of a draft model: the last tokens of each sequence, then a token each, and prompts."""
    for count in _sizes(sequences, most_rows):
        yield PassShape((1,) * count)
        most = min(LAG * count, most_rows)
        yield from (PassShape(_spread(count, rows, LAG)[0], last=True) for rows in _totals(count, most) if rows > count)
    yield from reading(sequences, most_rows)


def reading(sequences: int, most_rows: int) -> Iterator[PassShape]:
    """Yield passes of prompts that are read as a whole."""
    for count in (count for count in PROMPTS if count <= sequences):
        least = 2 if count == 1 else 16 * count  # most of a single prompt may be cached
        for rows in _totals(least, min(PROMPT * count, most_rows)):
            yield PassShape(_spread(count, rows, rows)[0], last=True)


def _sizes(sequences: int, most_rows: int) -> list[int]:
    """Return numbers of sequences: the fewest and the most for each number of tiles."""
    most = min(sequences, most_rows)
    ends = [(below + 1, min(tiles, most)) for below, tiles in zip((0, *TILES), TILES, strict=False)]
    return sorted({count for pair in ends for count in pair if count <= most})


def _totals(least: int, most: int) -> list[int]:
    """Return numbers of rows from least to most, one for each padded size."""
    padded = [rows for rows in STEPS if up(least) <= rows <= up(most)] if least <= most else []
    return [max(min(rows, most), least) for rows in padded]


def _spread(count: int, rows: int, most: int) -> list[tuple[int, ...]]:
    """Divide `rows` rows among `count` sequences: evenly, and with `most` of them for one sequence."""
    each, more = divmod(rows, count)
    spread = [(each + 1,) * more + (each,) * (count - more)]
    if count > 1 and rows - most >= count - 1 and spread[0][0] < most:
        each, more = divmod(rows - most, count - 1)
        spread.append((most, *(each + 1,) * more, *(each,) * (count - 1 - more)))
    return spread


def warmup_pass(shape: PassShape, block_size: int) -> tuple[Tensor, PassPlan, Tensor]:
    """Return tokens, plan and logit rows of a pass of the shape."""
    counts = torch.tensor(shape.counts)
    zeros = torch.zeros(shape.rows, dtype=torch.int32)
    plan = PassPlan(
        positions=zeros + int(shape.tree),
        slots=zeros - 1,
        sequence=torch.arange(len(counts), dtype=torch.int32).repeat_interleave(counts),
        prefix=zeros + 1,
        path=torch.zeros((shape.rows, PATHS[1] if shape.tree else 0), dtype=torch.int32),
        reach=zeros + 1 + int(shape.tree),
        block_tables=torch.zeros((len(counts), 1), dtype=torch.int32),
        block_size=block_size,
        max_len=2,
    )
    logit_rows = counts.cumsum(0) - 1 if shape.last else torch.arange(shape.rows)
    if shape.unfinished:
        logit_rows = logit_rows[:-1]
    return torch.zeros(shape.rows, dtype=torch.int64), plan, logit_rows
