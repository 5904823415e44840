"""Passes written by native code (native/relay.h): what it is told, and where it writes."""

from __future__ import annotations

import ctypes
from ctypes import c_int32, c_int64, c_void_p

HEADER = 4  # ints before the tiles: width of the block tables, whether a unit is a block, most units of a tile, nothing


class Step(ctypes.Structure):
    """A verdict that is waited for, and what is known of the step after it. See native/relay.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("said", "accepted")),
        *((name, c_int64) for name in ("width", "rows")),
        *((name, c_void_p) for name in ("texts", "lengths", "limits", "budgets", "ends")),
        ("num_ends", c_int64),
        ("tables", c_void_p),
        *((name, c_int64) for name in ("table_width", "block_size", "most", "vocab", "found")),
        *((name, c_void_p) for name in ("evidence", "nodes")),
        *((name, c_int64) for name in ("pass_rows", "longest", "path", "max_len")),
    )


class Place(ctypes.Structure):
    """Where the parts of a pass lie, in ints from the start of its buffer."""

    _fields_ = (
        *((name, c_int64) for name in ("tiles", "num_tiles", "fields", "stride", "rows")),
        *((name, c_int64) for name in ("path", "path_stride", "tables")),
        ("header", c_int32 * HEADER),
    )
