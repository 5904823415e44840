"""Shapes that passes are padded to: few, since each is captured once, and close enough that padding costs little.

Products take up to 8 (with codes), 16, 32, 64, 128 and 192 rows in one tile and more in several, so padding to the next
of these costs almost nothing; attention skips tiles without rows, and the width of a tree's paths costs memory only.
"""

from __future__ import annotations

import bisect
import functools
from typing import NamedTuple

STEPS = (1, 8, 16, 32, 64, 128, 192, 256, 384, 512, 640, 768, 1024, 1280, 1536, 2048)
BEYOND = 512  # rows; passes of more rows than the last step are padded to multiples of it
TILES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
PATHS = (0, 64)
FEW = 64  # rows; up to here products choose their tiles by powers of two


class Bucket(NamedTuple):
    """The padded shape of a pass."""

    rows: int
    tiles: int
    tile: int
    path: int
    logits: int  # rows with logits; 0: every row
    taps: tuple[int, ...]
    from_hidden: bool = False  # the input is hidden states, not tokens

    def kernels(self, direct: bool, tails: int) -> tuple[object, ...]:
        """Return a key that is equal for buckets of the same kernels."""
        return alike(self.rows), self.tile, direct, tails, alike(self.logits), self.taps


@functools.cache
def up(count: int, steps: tuple[int, ...] = STEPS) -> int:
    if count > steps[-1]:
        return -(-count // BEYOND) * BEYOND
    return steps[bisect.bisect_left(steps, count)] if count else 0


@functools.cache
def path_up(width: int) -> int:
    return PATHS[bisect.bisect_left(PATHS, width)] if width <= PATHS[-1] else width


def alike(rows: int) -> int:
    """Return a number that is equal for padded row counts of the same kernels; above `FEW` each has its own."""
    return rows if rows > FEW or not rows else max(1 << (rows - 1).bit_length(), 8)
