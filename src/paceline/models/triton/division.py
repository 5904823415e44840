"""How the work of attention is divided: contexts into blocks and chunks of keys, rows into tiles, assigned to programs.

Where a sum is split depends on the position alone (KEYS, EARLY, CHUNK), for bits depend on it; everything else may
depend on the batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.models.plan import PassPlan

HEADER = 4  # ints before the tiles: width of the block tables, whether a unit is a block, most units of a tile, unused
KEYS = 64  # of a block
EARLY = 16  # blocks, in chunks of half the size
CHUNK = 8  # blocks
SPLIT_BLOCKS = 40  # a pass of no more blocks than this, over all its tiles of 64 rows, is divided block by block
PROGRAMS = 512  # about four for every multiprocessor
MOST_SPLITS = 68
NARROW = 16  # q rows of a tile where every sequence has one token; with more, the pass is divided block by block
TILE = 64
WIDE_FROM = 64  # q rows of a sequence; with more, tiles have twice as many rows


@dataclass(frozen=True)
class Division:
    """How the work of a pass is divided: these numbers shape the kernels' grids. What changes from pass to pass
    (`Work`) is read from memory, so one division serves many passes, among them all replays of a captured graph."""

    tile: int  # q rows (tokens x heads of a group) of a tile
    num_tiles: int
    direct: bool  # a program reads all of its tile's context, and nothing is merged
    units: int  # parts a row's context may be divided into
    tails: int  # blocks at the end of a tree node's context that are its own
    splits: int  # programs that share a tile's units

    @staticmethod
    def of(num_tiles: int, tile: int, path_width: int, kv_heads: int, max_len: int) -> Division:
        """`max_len`: the longest context for which these grids and their scratch are sized."""
        blocks = max(-(-max_len // KEYS), 1)
        direct = path_width == 0 and num_tiles * kv_heads >= PROGRAMS // 4
        units = 1 if direct else max(chunks_of(blocks), min(blocks, most_by_block(num_tiles * tile)))
        tails = -(-(KEYS - 1 + path_width) // KEYS) if path_width else 0
        splits = 1 if direct else max(min(PROGRAMS // max(num_tiles * kv_heads, 1), MOST_SPLITS), 1)
        return Division(tile, num_tiles, direct, units, tails, splits)

    def header(self, max_len: int, table_width: int) -> list[int]:
        """HEADER ints that the kernels read beside the tiles."""
        blocks = -(-max_len // KEYS)
        by_block = blocks <= most_by_block(self.num_tiles * self.tile)
        return [table_width, int(by_block), blocks if by_block else chunks_of(blocks), 0]


def most_by_block(q_rows: int) -> int:
    """Blocks of a context up to which a pass of so many q rows in tiles is divided block by block."""
    return ((SPLIT_BLOCKS + 1) * TILE - 1) // max(q_rows, 1)


def chunks_of(blocks: int) -> int:
    """The number of chunks of so many blocks."""
    half = CHUNK // 2
    return -(-min(blocks, EARLY) // half) + -(-max(blocks - EARLY, 0) // CHUNK)


@dataclass(frozen=True)
class Work:
    division: Division
    tiles: Tensor  # (HEADER + 2 * num_tiles,) int32: header, then first row and number of rows of each tile


def work_of(plan: PassPlan, group: int, kv_heads: int) -> Work:
    """The work of a pass; a plan on the device is read back."""
    tile, begin, count = tiles_of(plan.sequence.cpu().numpy(), group)
    division = Division.of(len(begin), tile, plan.path.shape[1], kv_heads, plan.max_len)
    header = division.header(plan.max_len, plan.block_tables.shape[1])
    numbers = torch.from_numpy(np.concatenate([np.array(header), begin, count]).astype(np.int32))
    return Work(division, numbers.to(plan.sequence.device))


def tiles_of(sequence: np.ndarray[Any, Any], group: int) -> tuple[int, np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """(tile, first row of each tile, its number of rows): runs of rows of one sequence, cut to fit.

    `group` q heads share a K/V head.
    """
    (edges,) = (sequence[1:] != sequence[:-1]).nonzero()
    starts = np.zeros(min(len(edges) + 1, len(sequence)), np.int64)
    starts[1:] = edges + 1
    lengths = np.empty_like(starts)
    lengths[:-1], lengths[-1:] = starts[1:] - starts[:-1], len(sequence) - starts[-1:]
    longest = int(np.maximum.reduce(lengths, initial=0))
    tile, per_tile = tile_of(longest, len(lengths), group)
    if longest <= per_tile:
        return tile, starts, lengths
    parts = -(-lengths // per_tile)
    within = (np.arange(int(parts.sum())) - np.repeat(np.cumsum(parts) - parts, parts)) * per_tile
    return tile, np.repeat(starts, parts) + within, np.minimum(np.repeat(lengths, parts) - within, per_tile)


def tile_of(longest: int, runs: int, group: int) -> tuple[int, int]:
    """q rows of a tile, and its rows, for `runs` runs of rows of one sequence each, the longest of `longest` rows."""
    tile = TILE if longest * group <= WIDE_FROM else 2 * TILE
    if longest == 1 < runs and group <= NARROW:
        tile = NARROW
    if group > tile:
        raise ValueError(f"{group} query heads for one K/V head: at most {tile} are supported")
    return tile, tile // group
