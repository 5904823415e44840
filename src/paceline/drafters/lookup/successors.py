"""Tables of successors: the 8 likeliest tokens behind a context, which is a last token or the last two (after token
recycling, 2408.08696, which keeps the last token's alone).

They are filled from the likeliest tokens at every verified row (`core.feedback`), rejected ones too. A context seen
again is mixed half and half with what stands there. A table is sets of `WAYS` entries by hash; it doubles while its
domain has room, and in a full set the entry that was written longest ago is replaced.

As past answers do (`store`), tables belong to a trust domain and have one bound: the table of the domain that was used
least recently is dropped first.
"""

from __future__ import annotations

import ctypes
from collections import OrderedDict
from collections.abc import Callable
from ctypes import c_int64, c_void_p
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.drafters.lookup.store import LARGEST

WIDTH = 8  # successors of a context
WAYS = 4  # entries of a set
ANY = -1  # in place of the token before the last: the context is one token
FIRST_SETS = 256
FULL = 0.6  # share of used entries from which a table doubles; beyond it sets overflow
ENTRY = np.dtype(
    [("before", "<i4"), ("last", "<i4"), ("stamp", "<u4"), ("ids", "<i4", (WIDTH,)), ("probs", "u1", (WIDTH,))]
)  # probs: in 1 / 255; stamp 0: unused
Entries = npt.NDArray[Any]
Move = Callable[[int, int], None]  # moves all entries: addresses of a table and of a larger one


class TableView(ctypes.Structure):
    _fields_ = (("entries", c_void_p), *((name, c_int64) for name in ("sets", "used", "clock")))


class SuccessorTable:
    """One table, which native code reads and writes through its view."""

    def __init__(self, sets: int = 0) -> None:
        self.view = TableView()
        self.address = ctypes.addressof(self.view)
        self._use(np.zeros(sets * WAYS, ENTRY))

    def _use(self, entries: Entries) -> None:
        self.entries = entries
        self.view.entries, self.view.sets = entries.ctypes.data, len(entries) // WAYS
        self.nbytes = entries.nbytes

    @classmethod
    def of(cls, entries: Entries, move: Move) -> SuccessorTable:
        """Return a table of these entries, in any order, with room for all."""
        given, table = cls(), cls()
        if len(entries):
            padded = np.zeros(-(-len(entries) // WAYS) * WAYS, ENTRY)
            padded[: len(entries)] = entries
            given._use(padded)
            sets = 1 << int(len(entries) / FULL / WAYS).bit_length()
            table = cls(sets)
            move(given.address, table.address)
        return table

    @property
    def used(self) -> int:
        """Contexts in the table."""
        used: int = self.view.used
        return used

    def is_full(self, more: int) -> bool:
        """Return whether `more` contexts fill the table beyond FULL."""
        return self.used + more > FULL * len(self.entries)

    def double(self, move: Move) -> None:
        larger = SuccessorTable(2 * len(self.entries) // WAYS or FIRST_SETS)
        move(self.address, larger.address)
        self._use(larger.entries)
        self.view.used = larger.used


class SuccessorTables:
    """The tables of all domains, within one bound."""

    def __init__(self, max_bytes: int, move: Move) -> None:
        self._max_bytes, self.move = max_bytes, move
        self.known: OrderedDict[str, SuccessorTable] = OrderedDict()  # by domain, least recent use first

    @property
    def nbytes(self) -> int:
        return sum([table.nbytes for table in self.known.values()])

    def of(self, domain: str) -> SuccessorTable:
        """Return the table of a domain, which counts as a use of it."""
        table = self.known.get(domain)
        if table is None:
            table = self.known[domain] = SuccessorTable()
        else:
            self.known.move_to_end(domain)
        return table

    def make_room(self, table: SuccessorTable, domain: str, contexts: int) -> None:
        """Make room for more contexts, as far as the bound allows."""
        most = self._max_bytes if not domain else self._max_bytes // LARGEST
        while table.is_full(contexts):
            size = max(2 * table.nbytes, FIRST_SETS * WAYS * ENTRY.itemsize)
            while self.nbytes - table.nbytes + size > self._max_bytes and next(iter(self.known)) != domain:
                self.known.popitem(last=False)
            if size > most or self.nbytes - table.nbytes + size > self._max_bytes:
                return
            table.double(self.move)

    def drop(self, domain: str) -> None:
        self.known.pop(domain, None)
