"""The division of attention's work: contexts into blocks and chunks of keys, rows into tiles, dealt to programs.

The positions where a sum is split are fixed (KEYS, EARLY, CHUNK), since bits depend on them; all else may depend on the
batch. Programs are dealt to tiles by the lengths of their contexts: a chunk of a long prompt beside many decodes is a
few tiles with most of the work.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.models.plan import PassPlan

Array = np.ndarray[Any, Any]
HEADER = 4  # ints before the shares: width of the block tables, whether a unit is a block, two unused
KEYS = 64  # keys of a block
EARLY = 16  # blocks, in chunks of half the size
CHUNK = 8  # blocks of a chunk
SPLIT_BLOCKS = 40  # blocks of all tiles of 64 rows, up to which a pass is divided block by block
PROGRAMS = 256  # programs that run at once, about two for every multiprocessor
NARROW = 16  # q rows of a tile where every sequence has one token; with more, the pass is divided block by block
TILE = 64
MOST_PARTS = 2_400_000  # parts of rows of all heads in scratch, 1.2 GB for heads of 128; trees may have more
WIDE_FROM = 64  # q rows of a sequence; with more, tiles have twice as many rows
KNOWN = 256  # cached deals


@dataclass(frozen=True)
class Division:
    """The shape of the kernels' grids. `Work`, which changes from pass to pass, is read from memory, so one division
    serves many passes, among them all replays of a captured graph."""

    tile: int  # q rows (tokens x heads of a group) of a tile
    num_tiles: int
    direct: bool  # a program reads all of its tile's context, and nothing is merged
    units: int  # parts a row's context may be divided into
    tails: int  # blocks at the end of a tree node's context that are its own
    shares: int  # programs for each K/V head: one for every tile, and those that long tiles have besides

    @staticmethod
    def of(q_rows: int, num_tiles: int, tile: int, path_width: int, kv_heads: int, max_len: int) -> Division:
        """Divide `q_rows` rows of all tiles; grids and scratch are sized for contexts of `max_len`."""
        blocks = max(-(-max_len // KEYS), 1)
        # Undivided, a pass takes no longer with enough full tiles for all multiprocessors, and far longer with fewer
        # and with contexts that differ. Divided, it keeps all parts of all rows in scratch.
        rows, parts = q_rows * kv_heads, int(chunks_of(blocks))
        direct = path_width == 0 and (rows > PROGRAMS // 2 * tile or rows * parts > MOST_PARTS)
        units = 1 if direct else max(int(chunks_of(blocks)), min(blocks, most_by_block(num_tiles * tile)))
        tails = -(-(KEYS - 1 + path_width) // KEYS) if path_width else 0
        more = 0 if direct else max(PROGRAMS // kv_heads, 1)
        return Division(tile, num_tiles, direct, units, tails, num_tiles + more)

    def by_block(self, max_len: int) -> bool:
        """Return whether a unit is a block, in a pass of contexts up to `max_len`; else it is a chunk."""
        return -(-max_len // KEYS) <= most_by_block(self.num_tiles * self.tile)

    def header(self, max_len: int, table_width: int) -> list[int]:
        """Return the HEADER ints that the kernels read beside the shares."""
        return [table_width, int(self.by_block(max_len)), 0, 0]

    def dealt(self, begin: Array, count: Array, reach: Array, max_len: int) -> Array:
        """Return (4 * shares,): first row, number of rows, turn and turns of every share, whose program takes each
        `turns`-th unit of a tile, from `turn` on.

        `begin` and `count` are of `tiles_of`; `reach` (M,) int32 may be an estimate where only the device knows it:
        the program that computes a unit depends on it, the result does not.
        """
        blocks = np.ones(len(begin), np.int32)
        if not self.direct:
            blocks = (np.maximum.reduceat(reach, begin) + (KEYS - 1)) // KEYS
        return _dealt(self, self.by_block(max_len), begin.tobytes(), count.tobytes(), blocks.tobytes())


@functools.lru_cache(KNOWN)
def _dealt(division: Division, by_block: bool, begin_bytes: bytes, count_bytes: bytes, block_bytes: bytes) -> Array:
    """Deal units to shares; cached, since a context has one block more every 64 tokens only.

    No share has more than an equal part of all blocks, rounded to units. Each tile begins a share of its own, so there
    are at most as many shares as parts and tiles.
    """
    begin, count = np.frombuffer(begin_bytes, np.int64), np.frombuffer(count_bytes, np.int64)
    blocks = np.frombuffer(block_bytes, np.int32)
    most = max(-(-int(blocks.sum()) // max(division.shares - division.num_tiles, 1)), 1)
    turns = np.maximum(np.minimum(-(-blocks // most), blocks if by_block else chunks_of(blocks)), 1)
    order = np.argsort(-blocks / turns, kind="stable")  # the largest shares begin first
    turns = turns[order]
    of = np.repeat(np.arange(len(order)), turns)
    shares = np.zeros((4, division.shares), np.int32)  # shares of no tile have no rows
    turn = np.arange(len(of)) - np.repeat(np.cumsum(turns) - turns, turns)
    shares[:, : len(of)] = begin[order][of], count[order][of], turn, turns[of]
    return shares.reshape(-1)


def most_by_block(q_rows: int) -> int:
    """Return the blocks of a context up to which a pass of `q_rows` rows in tiles is divided block by block."""
    return ((SPLIT_BLOCKS + 1) * TILE - 1) // max(q_rows, 1)


def chunks_of(blocks: Any) -> Any:
    """Count the chunks of a number of blocks, or of each of several numbers."""
    early = np.minimum(blocks, EARLY)
    return -(-early // (CHUNK // 2)) + -(-(blocks - early) // CHUNK)


@dataclass(frozen=True)
class Work:
    division: Division
    shares: Tensor  # (HEADER + 4 * shares,) int32: header, then the shares as dealt


def work_of(plan: PassPlan, group: int, kv_heads: int) -> Work:
    """Divide the work of a pass; a plan on the device is read back."""
    tile, begin, count = tiles_of(plan.sequence.cpu().numpy(), group)
    rows, path_width = plan.path.shape
    division = Division.of(rows * group, len(begin), tile, path_width, kv_heads, plan.max_len)
    header = np.array(division.header(plan.max_len, plan.block_tables.shape[1]), np.int32)
    dealt = division.dealt(begin, count, plan.reach.cpu().numpy(), plan.max_len)
    return Work(division, torch.from_numpy(np.concatenate([header, dealt])).to(plan.sequence.device))


def tiles_of(sequence: Array, group: int) -> tuple[int, Array, Array]:
    """Return (tile, first row of each tile, its number of rows): runs of rows of one sequence, cut to fit.

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
    """Return q rows of a tile, and its rows, for `runs` sequences' runs of rows, the longest of `longest` rows."""
    tile = TILE if longest * group <= WIDE_FROM else 2 * TILE
    if longest == 1 < runs and group <= NARROW:
        tile = NARROW
    if group > tile:
        raise ValueError(f"{group} query heads for one K/V head: at most {tile} are supported")
    return tile, tile // group
