"""Hidden states of the target that drafters read (taps): the ring that buffers them, and batches taken from it.

Behind every pass the hidden states of committed positions, and the token after each, are written into a ring. A
device writes them from a verdict that the host has not read. `tapped.TappedDrafter` reads the ring before it drafts.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.config import MAX_K
from paceline.core.sequence import Sequence
from paceline.core.verdict import UnreadVerdict, VerdictRow
from paceline.models.backends.cpu.kernels import native_ring_store

CAPACITY = MAX_K + 1  # positions of a request in the ring; the most that one step commits


class CommittedRow(NamedTuple):
    """The tokens that a step committed for one request, on the host."""

    req_index: int
    length: int  # tokens before the step
    node_row: int  # the pass's row of the draft's first node; the row before is the last token's
    row: VerdictRow


class TapRing:
    """Hidden states of the newest committed positions of each request, and the token after each position."""

    def __init__(self, capacity: int = CAPACITY, *, native: bool = True) -> None:
        """`native`: write float32 taps of the host by the native library, where there is one."""
        self.capacity = capacity
        self._states: Tensor | None = None  # (S * R + 1, T, H); the last row receives what is not committed
        self._tokens = torch.empty(0, dtype=torch.int64)  # (S * R + 1,)
        self._req_indices = 0
        self._addresses = 0, 0, 0  # addresses of states and of tokens; numbers in a row of states
        self._native = native_ring_store() if native else None

    def store(self, unread: UnreadVerdict, taps: Tensor, req_indices: int) -> None:
        """Write the taps (M, T, H) of the rows that a verdict on the device commits; `req_indices` bounds theirs."""
        states = self._reserve(taps, req_indices)
        step = torch.arange(unread.most, device=taps.device)
        rows = torch.cat((unread.node_row[:, None] - 1, unread.node_row[:, None] + unread.path.clamp_min(0)), 1)
        at = unread.req_index[:, None] * self.capacity + (unread.length[:, None] - 1 + step) % self.capacity
        at = torch.where(step <= unread.num_accepted[:, None], at, len(states) - 1).flatten()
        states[at] = taps[rows.flatten().clamp_max(len(taps) - 1)]  # padding copies any row
        self._tokens[at] = unread.tokens.flatten()

    def put(self, req_index: int, position: int, taps: Tensor, token: int) -> None:
        """Write one position of a request: its taps (T, H) and the token after it."""
        states, at = self._reserve(taps[None], req_index + 1), req_index * self.capacity + position % self.capacity
        states[at], self._tokens[at] = taps, token

    def store_on_host(self, committed: Iterable[CommittedRow], taps: Tensor, req_indices: int) -> None:
        """Write the taps (M, T, H), in the host's memory, of rows that the host knows."""
        stored = array("q")
        for req_index, length, node_row, row in committed:
            for step, (node, token) in enumerate(zip((-1, *row.path), row.tokens, strict=True)):
                stored.extend((req_index * self.capacity + (length - 1 + step) % self.capacity, node_row + node, token))
        states = self._reserve(taps, req_indices)
        if self._native is not None and taps.dtype is torch.float32 and taps.is_contiguous():
            (to_states, to_tokens, width), (address, size) = self._addresses, stored.buffer_info()
            self._native(to_states, to_tokens, taps.data_ptr(), width, address, size // 3)
            return
        places, rows, tokens = torch.tensor(stored).view(-1, 3).unbind(1)
        states[places], self._tokens[places] = taps[rows], tokens

    def load(self, req_indices: Tensor, positions: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
        """Return taps (..., T', H) of positions and the tokens (...) after them; `columns` (T',) selects taps."""
        assert self._states is not None
        at = req_indices * self.capacity + positions % self.capacity
        return self._states[at].index_select(-2, columns), self._tokens[at]

    @property
    def stored(self) -> tuple[Tensor, Tensor, int]:
        """Hidden states (S * R + 1, T, H) and tokens (S * R + 1,) of all requests, and R, the positions of each."""
        assert self._states is not None
        return self._states, self._tokens, self.capacity

    def tokens_after(self, req_indices: Tensor, positions: Tensor) -> Tensor:
        return self._tokens[req_indices * self.capacity + positions % self.capacity]

    def _reserve(self, taps: Tensor, req_indices: int) -> Tensor:
        """Return the states, enlarged where they have no rows for `req_indices` requests."""
        before = self._req_indices
        if self._states is None or req_indices > before:
            self._req_indices = max(req_indices, 2 * before)
            size = self._req_indices * self.capacity + 1
            states = taps.new_zeros(size, *taps.shape[1:])
            tokens = torch.zeros(size, dtype=torch.int64, device=taps.device)
            if self._states is not None:
                states[: before * self.capacity] = self._states[:-1]
                tokens[: before * self.capacity] = self._tokens[:-1]
            self._states, self._tokens = states, tokens
            self._addresses = states.data_ptr(), tokens.data_ptr(), states.stride(0)
        return self._states


class TapBatch(NamedTuple):
    """Hidden states whose K/V are to be written, of all rows at once; A is an upper bound that the host knows."""

    taps: Tensor  # (A, T, H) hidden states of positions t
    tokens: Tensor  # (A,) at positions t + 1
    positions: Tensor  # (A,) t
    slots: Tensor  # (A,) of position t + 1 for shifted K/V, else of t; -1: padding
    end: int  # exceeds every position


class PromptChunk(NamedTuple):
    """Positions of a prompt that a pass computed and whose next tokens the host knows."""

    sequence: Sequence
    first: int
    size: int
    begin: int  # row of the pass
