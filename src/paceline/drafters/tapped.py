"""Drafters that read the target's hidden states (taps), and keep K/V made of them.

A drafter with K/V of its own writes them in one batch for all rows: of the pair (hidden state of t, token t + 1) into
slot t + 1, or of the hidden state of t alone into slot t. It writes when it drafts, before its ring would overflow, and
with every chunk of a prompt. So a plain step costs only the ring's write, and a drafter may lag behind the target.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.config import TRAINED_LEVEL
from paceline.core.draft import Draft, packed_to, sent
from paceline.core.sequence import Sequence
from paceline.core.verdict import UnreadVerdict
from paceline.drafters.base import DrafterDefaults, DraftRequest, VerifiedDraft, excluded
from paceline.drafters.hidden_states import PromptChunk, TapBatch, TapRing
from paceline.models.kv_cache import LayerCache, slots_of
from paceline.models.plan import padded_tables

Floats = np.ndarray[Any, np.dtype[np.float32]]


@dataclass
class TapState:
    """Valid slots [start, end) of one sequence. Slot 0 has no pair and counts as valid for shifted K/V."""

    start: int
    end: int


class TappedDrafter(DrafterDefaults):
    """A subclass writes `draft`, and `write_context_kv` where it has `kv_layers`; both launch and never wait."""

    name: str
    on_device = time_is_typical = shifted_kv = trees = True

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.block_size = 0  # block size of the cache; known once `bind` was called
        self._states: dict[str, TapState] = {}
        self._shift = int(self.shifted_kv)  # from a hidden state's position to its slot
        self._columns = torch.empty(0, dtype=torch.int64)  # on the device: indexing with a host tensor synchronises
        self._ring = TapRing()

    def draft(self, rows: SequenceOf[DraftRequest], req_indices: Tensor, lengths: Tensor) -> Draft:
        """Draft for sequences of these lengths (B,), which are on the device; the K/V of all their taps are written."""
        raise NotImplementedError

    def write_context_kv(self, batch: TapBatch) -> None:
        raise NotImplementedError

    def bind(self, caches: SequenceOf[LayerCache], block_size: int) -> None:
        self.block_size = block_size
        if caches:
            self.device = caches[0].k.device

    def bind_taps(self, ring: TapRing, columns: list[int]) -> None:
        self._ring, self._columns = ring, torch.tensor(columns, device=self.device)

    def last_taps(self, req_indices: Tensor, lengths: Tensor) -> Tensor:
        """Return the hidden states (B, T, H) from which the target picked each sequence's last token."""
        return self._ring.load(req_indices, lengths - 2, self._columns)[0]

    def last_tokens(self, req_indices: Tensor, lengths: Tensor) -> Tensor:
        """Return each sequence's last token (B,)."""
        return self._ring.tokens_after(req_indices, lengths - 2)

    def _complete(self, length: int) -> int:
        """Return the end of the valid slots of a sequence of this length once all of its K/V are written."""
        return length - 1 + self._shift

    def propose(self, rows: SequenceOf[DraftRequest], after: UnreadVerdict | None = None) -> Draft:
        sequences = [row.sequence for row in rows]
        req_indices, lengths = self._where(sequences, after)
        if self.kv_layers:
            self._catch_up(sequences, req_indices, lengths, 0 if after is None else after.most)
        if after is None:
            self._caught_up(sequences)
        return self.draft(rows, req_indices, lengths)

    def _take_pending(self, sequence: Sequence, unread: int) -> range:
        """Return the slots of a sequence whose K/V are not written, and up to `unread` more; slots whose hidden states
        the ring no longer holds become invalid."""
        state, last = self._states[sequence.key], self._complete(len(sequence.tokens)) + unread
        if last - state.end > self._ring.capacity:
            state.start = state.end = last - self._ring.capacity
        return range(state.end, last)

    def _where(self, sequences: list[Sequence], after: UnreadVerdict | None) -> tuple[Tensor, Tensor]:
        """Return request indices and committed lengths (B,), with the tokens that `after` commits."""
        if after is not None:
            rows = packed_to(self.device, torch.tensor(after.rows))[0]
            return after.req_index[rows], after.length[rows] + after.num_accepted[rows] + 1
        columns = torch.tensor([[one.req_index for one in sequences], [len(one.tokens) for one in sequences]])
        req_indices, lengths = packed_to(self.device, columns)[0]
        return req_indices, lengths

    def _catch_up(self, sequences: list[Sequence], req_indices: Tensor, lengths: Tensor, unread: int) -> None:
        """Write the K/V of all positions in the ring: those the host knows, and up to `unread` more."""
        pending = [self._take_pending(sequence, unread) for sequence in sequences]
        most = max(map(len, pending))
        if not most:
            return
        if self.device.type == "cpu" and not unread:
            self._catch_up_on_host(sequences, pending)
            return
        ends = [each.start for each in pending]
        tables = padded_tables([sequence.blocks for sequence in sequences]).long()
        end, tables = packed_to(self.device, torch.tensor(ends), tables)
        at = end[:, None] + torch.arange(most, device=self.device)  # slots
        position = at - self._shift
        taps, tokens = self._ring.load(req_indices[:, None], position, self._columns)
        slots = tables.gather(1, (at // self.block_size).clamp_max(tables.shape[1] - 1)) * self.block_size
        slots = torch.where(position < lengths[:, None] - 1, slots + at % self.block_size, -1)
        parts = taps.flatten(0, 1), tokens.flatten(), position.flatten(), slots.flatten()
        self.write_context_kv(TapBatch(*parts, max(ends) + most))

    def _catch_up_on_host(self, sequences: list[Sequence], pending: list[range]) -> None:
        at = np.concatenate([np.arange(each.start, each.stop) for each in pending])
        owner = np.arange(len(sequences)).repeat([len(each) for each in pending])
        position = at - self._shift
        req_indices = torch.from_numpy(np.array([one.req_index for one in sequences])[owner])
        taps, tokens = self._ring.load(req_indices, torch.from_numpy(position), self._columns)
        slots = np.concatenate([self._slots_in(*each) for each in zip(sequences, pending, strict=True)])
        numbers = torch.from_numpy(position), torch.from_numpy(slots)
        self.write_context_kv(TapBatch(taps, tokens, *numbers, max(each.stop for each in pending)))

    def _slots_in(self, sequence: Sequence, at: range) -> Any:
        return slots_of(np.array([sequence.blocks]), 0, np.arange(at.start, at.stop), self.block_size)

    def _caught_up(self, sequences: SequenceOf[Sequence]) -> None:
        for sequence in sequences:
            self._states[sequence.key].end = self._complete(len(sequence.tokens))

    def before_store(self, sequences: list[Sequence], most: int) -> None:
        """Write the K/V of what the ring would lose when up to `most` positions of each sequence are stored."""
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

    def read_chunks(self, chunks: SequenceOf[PromptChunk], taps: Tensor) -> None:
        """Write the K/V of prompts from the taps (M, T, H) of the pass that computed them."""
        own = [chunk for chunk in chunks if not excluded(chunk.sequence, self.name)] if self.kv_layers else []
        if not own:
            return
        rows, tokens, positions, slots = [], [], [], []
        for sequence, first, count, begin in own:
            state, at = self._states[sequence.key], first + self._shift
            if at != state.end:
                state.start = at  # the hidden states before it were never seen
            state.end = at + count
            rows.append(np.arange(begin, begin + count))
            tokens += sequence.tokens[first + 1 : first + 1 + count]
            positions.append(np.arange(first, first + count))
            slots.append(self._slots_in(sequence, range(at, at + count)))
        columns = np.array([np.concatenate(rows), tokens, np.concatenate(positions), np.concatenate(slots)])
        row, token, position, slot = sent(torch.from_numpy(columns), taps.device)
        end = max(chunk.first + chunk.size for chunk in own)
        self.write_context_kv(TapBatch(taps[row].index_select(1, self._columns), token, position, slot, end))

    def on_verdict(self, verified: SequenceOf[VerifiedDraft], early: SequenceOf[Sequence]) -> None:
        """Count the tokens of `early` sequences as read: their early drafts wrote the K/V of all of them."""
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


def likely_nodes(scores: Floats, rows: SequenceOf[DraftRequest], counts: SequenceOf[int]) -> list[int]:
    """Return for each row how many of its first `counts` nodes are as likely as it asks for, but at least one.

    `scores` (B, N) are log probabilities, the highest first.
    """
    likely = list(counts)
    for at, (row, count) in enumerate(zip(rows, counts, strict=True)):
        if row.min_node_probability:
            least = math.log(row.min_node_probability)
            likely[at] = next((node for node in range(min(count, 1), count) if scores[at, node] < least), count)
    return likely
