"""Common parts of drafters that read the target's hidden states: the ring that buffers them, and absorbing them.

Behind every pass the hidden states of committed positions, and the token after each, are written into a ring by seat,
on the device, from a verdict the host has not read. A drafter with K/V of its own absorbs them in one batch for all
rows: the pair (hidden state of t, token t + 1) into slot t + 1, or the hidden state of t alone into slot t. It does so
when it drafts, when its ring would overflow, and for prompts at once. So a plain step costs the ring's write only, and
a drafter may lag behind the target.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from paceline.config import MAX_K
from paceline.core.draft import Draft, packed_to, sent
from paceline.core.sequence import Sequence
from paceline.core.verdict import UnreadVerdict, VerdictRow
from paceline.drafters.base import TRAINED_LEVEL, DraftRequest, VerifiedDraft, excluded
from paceline.models.backends.cpu.kernels import native_ring_store
from paceline.models.kv_cache import KVSpec, LayerCache
from paceline.models.plan import slots_of

Floats = np.ndarray[Any, np.dtype[np.float32]]
CAPACITY = MAX_K + 1  # positions of a sequence in the ring: the most that a step commits, or a lag absorbed at once


class Committed(NamedTuple):
    """What a step committed of one sequence, on the host."""

    req_index: int
    length: int  # when the step started
    node_row: int  # of the pass: the first of its draft's nodes; the row before is its last token's
    row: VerdictRow


class TapRing:
    """Hidden states of each sequence's newest committed positions, and the tokens after them, by seat."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self.capacity = capacity
        self._states: Tensor | None = None  # (S * R + 1, T, H); the last row takes what is not committed
        self._tokens = torch.empty(0, dtype=torch.int64)  # (S * R + 1,)
        self._req_indices = 0
        self._addresses = 0, 0, 0  # of both, and the numbers of a row of states
        self._native = native_ring_store()

    def store(self, unread: UnreadVerdict, taps: Tensor, req_indices: int) -> None:
        """Write the taps (M, T, H) of the rows that the pass's verdict commits; seats are below `req_indices`."""
        assert unread.length is not None
        assert unread.node_row is not None
        assert unread.req_index is not None
        states = self._room(taps, req_indices)
        step = torch.arange(unread.most, device=taps.device)
        rows = torch.cat((unread.node_row[:, None] - 1, unread.node_row[:, None] + unread.path.clamp_min(0)), 1)
        at = unread.req_index[:, None] * self.capacity + (unread.length[:, None] - 1 + step) % self.capacity
        at = torch.where(step <= unread.num_accepted[:, None], at, len(states) - 1).flatten()
        states[at] = taps[rows.flatten().clamp_max(len(taps) - 1)]  # padding copies any row
        self._tokens[at] = unread.tokens.flatten()

    def put(self, req_index: int, position: int, taps: Tensor, token: int) -> None:
        """Write one position of a sequence: its taps (T, H) and the token after it."""
        states, at = self._room(taps[None], req_index + 1), req_index * self.capacity + position % self.capacity
        states[at], self._tokens[at] = taps, token

    def store_on_host(self, committed: Iterable[Committed], taps: Tensor, req_indices: int) -> None:
        """The same of rows that the host knows, taps in its memory."""
        stored = array("q")
        for req_index, length, node_row, row in committed:
            for step, (node, token) in enumerate(zip((-1, *row.path), row.tokens, strict=True)):
                stored.extend((req_index * self.capacity + (length - 1 + step) % self.capacity, node_row + node, token))
        states = self._room(taps, req_indices)
        if self._native is not None and taps.dtype is torch.float32 and taps.is_contiguous():
            (to_states, to_tokens, width), (address, size) = self._addresses, stored.buffer_info()
            self._native(to_states, to_tokens, taps.data_ptr(), width, address, size // 3)
            return
        places, rows, tokens = torch.tensor(stored).view(-1, 3).unbind(1)
        states[places], self._tokens[places] = taps[rows], tokens

    def load(self, req_indices: Tensor, positions: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
        """(..., T', H) taps of positions, and (...) the tokens after them."""
        assert self._states is not None
        at = req_indices * self.capacity + positions % self.capacity
        return self._states[at].index_select(-2, columns), self._tokens[at]

    @property
    def stored(self) -> tuple[Tensor, Tensor, int]:
        """Hidden states (S * R + 1, T, H) and tokens (S * R + 1,) of all seats, and R, the positions of each."""
        assert self._states is not None
        return self._states, self._tokens, self.capacity

    def tokens_after(self, req_indices: Tensor, positions: Tensor) -> Tensor:
        return self._tokens[req_indices * self.capacity + positions % self.capacity]

    def _room(self, taps: Tensor, req_indices: int) -> Tensor:
        have = self._req_indices
        if self._states is None or req_indices > have:
            self._req_indices = max(req_indices, 2 * have)
            size = self._req_indices * self.capacity + 1
            states = taps.new_zeros(size, *taps.shape[1:])
            tokens = torch.zeros(size, dtype=torch.int64, device=taps.device)
            if self._states is not None:
                states[: have * self.capacity] = self._states[:-1]
                tokens[: have * self.capacity] = self._tokens[:-1]
            self._states, self._tokens = states, tokens
            self._addresses = states.data_ptr(), tokens.data_ptr(), states.stride(0)
        return self._states


class TapBatch(NamedTuple):
    """Hidden states of all rows, to be absorbed in one batch; A is an upper bound that the host knows."""

    taps: Tensor  # (A, T, H) hidden states of positions t
    tokens: Tensor  # (A,) t + 1
    positions: Tensor  # (A,) t
    slots: Tensor  # (A,) of position t + 1 for pairs, else of t; -1: padding
    end: int  # no position is as large


class Chunk(NamedTuple):
    """Positions of a prompt that a pass computed and whose next tokens the host knows."""

    sequence: Sequence
    first: int
    size: int
    begin: int  # row of the pass


@dataclass
class TapState:
    """Valid slots [start, end) of one sequence. Slot 0 has no pair and counts as valid for a drafter of pairs."""

    start: int
    end: int


class TappedDrafter:
    """A subclass writes `draft`, and `write_context_kv` where it has `kv_layers`; both launch and never wait."""

    name: str
    version = "1"
    on_device = True
    time_is_typical = True
    taps: tuple[int, ...] = ()
    kv_layers: tuple[KVSpec, ...] = ()
    shifted_kv = (
        True  # K/V of (hidden state of t, token t + 1) in slot t + 1; False: of the hidden state of t in slot t
    )
    scratch_slots = 0
    depth = MAX_K
    trees = True

    def __init__(self) -> None:
        self._states: dict[str, TapState] = {}
        self._shift = int(self.shifted_kv)  # from a hidden state's position to its slot
        self._block_size = 0
        self._columns = torch.empty(0, dtype=torch.int64)  # on the device: indexing with a host tensor synchronises
        self._ring = TapRing()
        self.device = torch.device("cpu")

    def draft(self, rows: SequenceOf[DraftRequest], req_indices: Tensor, lengths: Tensor) -> Draft:
        """Drafts for sequences of these lengths, which are on the device. All their pairs are absorbed."""
        raise NotImplementedError

    def write_context_kv(self, batch: TapBatch) -> None:
        raise NotImplementedError

    def bind(self, caches: SequenceOf[LayerCache], block_size: int) -> None:
        self._block_size = block_size
        if caches:
            self.device = caches[0].k.device

    def bind_taps(self, ring: TapRing, columns: list[int]) -> None:
        """`columns` of the ring's taps are this drafter's."""
        self._ring, self._columns = ring, torch.tensor(columns, device=self.device)

    def last_taps(self, req_indices: Tensor, lengths: Tensor) -> Tensor:
        """(B, T, H) hidden states from which the target picked each sequence's last token."""
        return self._ring.load(req_indices, lengths - 2, self._columns)[0]

    def last_tokens(self, req_indices: Tensor, lengths: Tensor) -> Tensor:
        """(B,) each sequence's last token."""
        return self._ring.tokens_after(req_indices, lengths - 2)

    def _complete(self, length: int) -> int:
        """Where valid slots end once everything known of a sequence of this length is absorbed."""
        return length - 1 + self._shift

    def propose(self, rows: SequenceOf[DraftRequest], after: UnreadVerdict | None = None) -> Draft:
        sequences = [row.sequence for row in rows]
        req_indices, lengths = self._where(sequences, after)
        if self.kv_layers:
            self._catch_up(sequences, req_indices, lengths, 0 if after is None else after.most)
        if after is None:
            self._caught_up(sequences)
        return self.draft(rows, req_indices, lengths)

    def _in_ring(self, sequence: Sequence, unread: int) -> range:
        """Slots of a sequence that are not absorbed yet, and up to `unread` more; without those that the ring no longer
        holds the hidden states of."""
        state, last = self._states[sequence.key], self._complete(len(sequence.tokens)) + unread
        if last - state.end > self._ring.capacity:
            state.start = state.end = last - self._ring.capacity
        return range(state.end, last)

    def _where(self, sequences: list[Sequence], after: UnreadVerdict | None) -> tuple[Tensor, Tensor]:
        """(B,) seats and committed lengths; with `after`, including what the unread verdict commits."""
        if after is not None:
            assert after.length is not None
            assert after.req_index is not None
            rows = packed_to(self.device, torch.tensor(after.rows))[0]
            return after.req_index[rows], after.length[rows] + after.num_accepted[rows] + 1
        columns = torch.tensor([[one.req_index for one in sequences], [len(one.tokens) for one in sequences]])
        req_indices, lengths = packed_to(self.device, columns)[0]
        return req_indices, lengths

    def _catch_up(self, sequences: list[Sequence], req_indices: Tensor, lengths: Tensor, unread: int) -> None:
        """Absorb all positions in the ring: those the host knows, and up to `unread` more."""
        waiting = [self._in_ring(sequence, unread) for sequence in sequences]
        most = max(map(len, waiting))
        if not most:
            return
        if self.device.type == "cpu" and not unread:
            self._catch_up_on_host(sequences, waiting)
            return
        ends = [each.start for each in waiting]
        width = max(len(sequence.blocks) for sequence in sequences)
        tables = torch.tensor([[*one.blocks, *[0] * (width - len(one.blocks))] for one in sequences])
        end, tables = packed_to(self.device, torch.tensor(ends), tables)
        at = end[:, None] + torch.arange(most, device=self.device)  # t + 1 for pairs, else t
        position = at - self._shift
        taps, tokens = self._ring.load(req_indices[:, None], position, self._columns)
        slots = tables.gather(1, (at // self._block_size).clamp_max(width - 1)) * self._block_size
        slots = torch.where(position < lengths[:, None] - 1, slots + at % self._block_size, -1)
        parts = taps.flatten(0, 1), tokens.flatten(), position.flatten(), slots.flatten()
        self.write_context_kv(TapBatch(*parts, max(ends) + most))

    def _catch_up_on_host(self, sequences: list[Sequence], waiting: list[range]) -> None:
        at = np.concatenate([np.arange(each.start, each.stop) for each in waiting])
        owner = np.arange(len(sequences)).repeat([len(each) for each in waiting])
        position = at - self._shift
        req_indices = torch.from_numpy(np.array([one.req_index for one in sequences])[owner])
        taps, tokens = self._ring.load(req_indices, torch.from_numpy(position), self._columns)
        slots = np.concatenate([self._slots_in(*each) for each in zip(sequences, waiting, strict=True)])
        numbers = torch.from_numpy(position), torch.from_numpy(slots)
        self.write_context_kv(TapBatch(taps, tokens, *numbers, max(each.stop for each in waiting)))

    def _slots_in(self, sequence: Sequence, at: range) -> np.ndarray[Any, np.dtype[np.int64]]:
        tables = np.array([sequence.blocks])
        found: np.ndarray[Any, np.dtype[np.int64]] = slots_of(tables, 0, np.arange(at.start, at.stop), self._block_size)
        return found

    def _caught_up(self, sequences: SequenceOf[Sequence]) -> None:
        for sequence in sequences:
            self._states[sequence.key].end = self._complete(len(sequence.tokens))

    def before_store(self, sequences: list[Sequence], most: int) -> None:
        """Up to `most` positions of each sequence are about to be stored: absorb what they would overwrite."""
        if self.kv_layers:
            full = [
                one
                for one in sequences
                if not excluded(one, self.name)
                and len(one.tokens) + most + 1 - self._states[one.key].end > self._ring.capacity
                and self._complete(len(one.tokens)) > self._states[one.key].end
            ]
            if full:
                self._catch_up(full, *self._where(full, None), 0)
                self._caught_up(full)

    def read_chunks(self, chunks: SequenceOf[Chunk], taps: Tensor) -> None:
        """Absorb prompts as they are computed, from the taps (M, T, H) of the pass itself."""
        mine = [chunk for chunk in chunks if not excluded(chunk.sequence, self.name)] if self.kv_layers else []
        if not mine:
            return
        rows, tokens, positions, slots = [], [], [], []
        for sequence, first, count, begin in mine:
            state, at = self._states[sequence.key], first + self._shift
            if at != state.end:
                state.start = at  # what lies between was never seen
            state.end = at + count
            rows.append(np.arange(begin, begin + count))
            tokens += sequence.tokens[first + 1 : first + 1 + count]
            positions.append(np.arange(first, first + count))
            slots.append(self._slots_in(sequence, range(at, at + count)))
        columns = np.array([np.concatenate(rows), tokens, np.concatenate(positions), np.concatenate(slots)])
        row, token, position, slot = sent(torch.from_numpy(columns), taps.device)
        end = max(chunk.first + chunk.size for chunk in mine)
        self.write_context_kv(TapBatch(taps[row].index_select(1, self._columns), token, position, slot, end))

    def on_verdict(self, verified: SequenceOf[VerifiedDraft], early: SequenceOf[Sequence]) -> None:
        """The step behind which drafts were begun was read: all tokens it committed are absorbed."""
        self._caught_up(early)

    def use_early(self, rows: SequenceOf[DraftRequest]) -> None:
        pass

    def admit(self, sequence: Sequence, start: int, end: int) -> None:
        self._states[sequence.key] = TapState(start, max(end, self._shift))

    def kv_range(self, sequence: Sequence) -> tuple[int, int]:
        state = self._states[sequence.key]
        return state.start, state.end

    def release(self, sequence: Sequence) -> None:
        self._states.pop(sequence.key, None)

    def level(self, sequence: Sequence) -> int:
        return TRAINED_LEVEL

    def unread_tokens(self, sequence: Sequence) -> int:
        return self._complete(len(sequence.tokens)) - self._states[sequence.key].end if self.kv_layers else 0

    def close(self) -> None:
        pass


def likely_nodes(scores: Floats, rows: SequenceOf[DraftRequest], counts: SequenceOf[int]) -> list[int]:
    """How many of the first `counts` nodes are as likely as their row asks for, and at least one. `scores` (B, N) are
    log probabilities, the highest first."""
    kept = list(counts)
    for at, (row, count) in enumerate(zip(rows, counts, strict=True)):
        if row.min_node_probability:
            min_node_probability = math.log(row.min_node_probability)
            kept[at] = next(
                (node for node in range(min(count, 1), count) if scores[at, node] < min_node_probability), count
            )
    return kept
