"""Which rows the next step computes, which sequences wait, and which are preempted.

Order of arrival decides everything: admission, blocks, and preemption (the youngest first). The oldest sequence is
never preempted while another runs, and one sequence always fits, so all finish. Preemption forgets computed K/V, never
tokens.

A step is scheduled in one of two ways. `schedule` knows all committed tokens. `schedule_ahead` follows a plain step
whose verdict is not read yet: rows that sample take their token from that verdict, on the device.
"""

from __future__ import annotations

import bisect
import itertools
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from types import MappingProxyType
from typing import Protocol

import numpy as np

from paceline.config import MAX_K, NONE, EngineConfig
from paceline.core.sequence import Sequence, Status
from paceline.engine.batch import Batch, Row
from paceline.engine.block_manager import BlockManager
from paceline.engine.policy.interface import DraftPlan, Policy

NO_DRAFT = DraftPlan()
SPARE_BLOCKS = 2  # blocks a running sequence: with so many free, no step has to preempt


class SequenceListener(Protocol):
    """A part of the engine that keeps something for each running sequence."""

    def joined(self, sequence: Sequence) -> None:
        """The sequence runs from the step on that is being scheduled; it has blocks and a seat."""

    def left(self, sequence: Sequence) -> None:
        """The sequence is finished or preempted; its blocks are freed next."""


class Reservation:
    """Slots behind sequences' tokens that are kept while blocks of earlier steps are given back: a step under way, or
    a draft begun behind one, writes there."""

    def __init__(self, ends: Iterable[tuple[Sequence, int]]) -> None:
        self._ends = list(ends)
        for sequence, end in self._ends:
            sequence.reserved = end

    def release(self) -> None:
        for sequence, _ in self._ends:
            sequence.reserved = 0


class Scheduler:
    def __init__(
        self,
        config: EngineConfig,
        blocks: BlockManager,
        policy: Policy,
        *,
        recompute_last: bool = False,
        scratch_slots: Mapping[str, int] = MappingProxyType({}),
        depths: Mapping[str, int] = MappingProxyType({}),
        context: int = sys.maxsize,
        listeners: SequenceOf[SequenceListener] = (),
    ) -> None:
        """`recompute_last`: after a prefix hit compute the last shared token once more, for the drafters' taps.
        `scratch_slots`: slots behind a sequence's tokens that drafts of a method need, if more than their nodes.
        `depths`: of each method's deepest draft. `context`: tokens of a sequence, or slots for them, at most."""
        self.config, self.blocks, self.policy, self._scratch_slots = config, blocks, policy, scratch_slots
        self._depths, self._context = depths, context
        self.recompute_last = recompute_last
        self._listeners = tuple(listeners)
        self._most_tokens = config.max_num_batched_tokens
        self._draft_cap = config.max_num_batched_tokens // 2  # drafts never crowd out prompts
        self._arrivals = itertools.count()
        self._arrival: dict[str, int] = {}
        self.waiting: list[Sequence] = []  # both lists in order of arrival
        self.running: list[Sequence] = []
        self._rows: dict[str, Row] = {}  # of the step being scheduled, by sequence
        self._num_tokens = self._num_drafted = 0  # in them
        self._changes = 0  # sequences that joined or left, so far
        self._early = Reservation(())  # of drafts begun behind the step under way
        self._looking: dict[str, Sequence] = {}  # running sequences whose tokens may decide what is asked of a pass

    def add(self, sequence: Sequence) -> None:
        self._arrival[sequence.key] = next(self._arrivals)
        self.waiting.append(sequence)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def has_place(self) -> bool:
        return len(self.running) < self.config.max_num_seqs

    def sequences(self) -> Iterator[Sequence]:
        return itertools.chain(self.running, self.waiting)

    def schedule(self) -> Batch:
        """Decodes first, so that no long prompt delays them; then prompts, oldest first, with what is left."""
        decodes: list[Sequence] = []
        prompts: list[Sequence] = []
        for sequence in self.running:
            if sequence.finish_reason is None:  # else its last token stands, and it leaves once that is published
                (decodes if len(sequence.tokens) - sequence.num_computed == 1 else prompts).append(sequence)
        choices = self._plan(decodes, sum(sequence.num_uncomputed for sequence in prompts))
        self._begin()
        promised = len(decodes)
        for sequence, choice in zip(decodes, choices, strict=True):
            promised -= 1
            self._continue(sequence, promised, choice)
        for sequence in prompts:
            self._continue(sequence)
        if all(sequence.status is Status.RUNNING for sequence in (*decodes, *prompts)):
            self._admit()  # not in a step that had to preempt: the newcomer would be next
        rows = list(self._rows.values())
        batch, size = Batch.of(rows), self.blocks.block_size
        batch.tables = self.blocks.tables_at(
            batch.req_indices, max([len(row.sequence.blocks) for row in rows], default=0)
        )
        filled = [at for at, row in enumerate(rows) if row.first % size + row.count >= size]
        return self._made(batch, filled)

    def schedule_ahead(self, batch: Batch) -> Batch | None:
        """The step after a plain one whose verdict is not read: every row that samples goes on by one token, prompts by
        a chunk, and waiting sequences join. A row whose sequence turns out to have ended is ignored when it is read.

        None where a committed token decides what comes next (drafts, penalties and the like), where a sequence has no
        row in `batch`, and where blocks are short: only `schedule` preempts.
        """
        if batch.num_drafted or (self._looking and any(self._looking[key].looks_back for key in self._looking)):
            return None
        first, size = batch.first + batch.count, self.blocks.block_size
        limit = np.array([sequence.max_len for sequence in batch.sequences], np.int64)
        going = ~batch.samples | (first + 1 < limit)  # else the unread token is its last
        live = len(batch)
        if batch.changes != self._changes:
            running = np.array([sequence.status is Status.RUNNING for sequence in batch.sequences], np.bool_)
            going, live = going & running, int(running.sum())
        kept = np.flatnonzero(going)
        if live < len(self.running) or not len(kept):
            return None
        token_source = np.where(batch.samples, batch.samples.cumsum() - 1, -1)[kept]
        sequences = batch.sequences if len(kept) == len(batch) else [batch.sequences[index] for index in kept]
        first, count, samples = first[kept], np.ones(len(kept), np.int64), token_source >= 0
        short: list[tuple[Sequence, int]] = []
        left = self._most_tokens - int(samples.sum())
        for index in np.flatnonzero(~samples):  # prompts go on by a chunk
            sequence, at = sequences[index], int(first[index])
            count[index] = min(len(sequence.tokens) - at, left)
            left -= int(count[index])
            end = at + int(count[index])
            samples[index] = end == len(sequence.tokens)
            # A drafter may store the last pair of a chunk one slot further.
            short.append((sequence, end + (not samples[index])))
        short += [
            (sequences[index], int(first[index]) + 1)
            for index in np.flatnonzero((first % size == 0) & (token_source >= 0))
        ]
        short = [(sequence, end) for sequence, end in short if len(sequence.blocks) * size < end]
        drafting = (
            sequences
            if len(sequences) == len(batch.sampling)
            else [sequences[i] for i in np.flatnonzero(token_source >= 0)]
        )
        needed = sum([self.blocks.blocks_for(end) - len(sequence.blocks) for sequence, end in short])
        if not count.all() or needed > self.blocks.num_free or (drafting and not self.policy.next_is_plain(drafting)):
            return None
        for sequence, end in short:
            self.blocks.allocate(sequence, end)
        req_indices = batch.req_indices[kept]
        self._begin(int(count.sum()))
        self._admit()
        if self._rows:
            newcomers = Batch.of(list(self._rows.values()))
            sequences = [*sequences, *newcomers.sequences]
            first, count = np.append(first, newcomers.first), np.append(count, newcomers.count)
            samples, req_indices = np.append(samples, newcomers.samples), np.append(req_indices, newcomers.req_indices)
            token_source = np.append(token_source, np.full(len(newcomers), -1))
        width = self.blocks.blocks_for(int((first + count).max()))
        tables = self.blocks.tables_at(req_indices, width)
        filled = np.flatnonzero(first % size + count >= size).tolist()
        return self._made(
            Batch(sequences, first, count, samples, tables, req_indices, token_source=token_source), filled
        )

    def reserve(self, batch: Batch, methods: Collection[str]) -> list[tuple[int, int]]:
        """Rows of a step under way that may draft as far again behind it by one of these methods: (row, nodes).

        Their room is taken where enough is left for all, and kept until the next step is scheduled.
        """
        going, ends = [], []
        for index, (method, drafted) in batch.drafts.items():
            sequence = batch.sequences[index]
            if method not in methods:
                continue
            # The step commits one token at least, and the last token of an answer is never drafted.
            running = sequence.status is Status.RUNNING
            budget = self._fitting(method, drafted, sequence.remaining - 2) if running else 0
            end = min(len(sequence.tokens) + drafted + 1 + self._slots_behind(method, budget), sequence.max_len)
            more = self.blocks.blocks_for(end) - len(sequence.blocks)
            if budget > 0 and self.blocks.num_free - more >= len(self.running):
                self.blocks.allocate(sequence, end)
                ends.append((sequence, end))
                going.append((index, budget))
        self._early = Reservation(ends)
        return going

    @property
    def has_spare_blocks(self) -> bool:
        """A step may be scheduled before the last one is published: no sequence that ends there would make room for
        another, and none is preempted."""
        if self.waiting and (self.has_place or any(sequence.finish_reason is not None for sequence in self.running)):
            return False
        tokens = sum([len(sequence.tokens) - sequence.num_computed for sequence in self.running])
        return SPARE_BLOCKS * len(self.running) + tokens // self.blocks.block_size <= self.blocks.num_free

    def hold(self, batch: Batch) -> Reservation:
        """Keep the slots of a step under way while blocks of the step before it are given back."""
        ends = enumerate(zip(batch.sequences, batch.ends.tolist(), strict=True))
        return Reservation((one, end + 1 + batch.drafts.get(index, (NONE, 0))[1]) for index, (one, end) in ends)

    def finish(self, sequence: Sequence, reason: str, stop_reason: int | str | None = None) -> None:
        """The sequence leaves and its blocks are free at once; also the way to cancel."""
        self._changes += 1
        self._looking.pop(sequence.key, None)
        if sequence.status is Status.RUNNING:
            self.running.remove(sequence)
        elif sequence.status is Status.WAITING:
            self.waiting.remove(sequence)
        sequence.finish_reason, sequence.stop_reason = reason, stop_reason
        if sequence.status is not Status.FINISHED:  # also of one that waits: it may have run before it was preempted
            self._release(sequence)
        self.blocks.free(sequence)
        self._arrival.pop(sequence.key, None)
        sequence.status = Status.FINISHED

    def _plan(self, sequences: list[Sequence], prompt_tokens: int) -> SequenceOf[DraftPlan]:
        """The drafts that are wanted, by sequence."""
        decoding = [sequence for sequence in sequences if len(sequence.tokens) > sequence.num_prompt]
        others = min(prompt_tokens, self._most_tokens - len(sequences))
        choices = self.policy.plan(decoding, others, bool(self.waiting)) if decoding else []
        if len(decoding) == len(sequences):
            return choices
        chosen = dict(zip([sequence.key for sequence in decoding], choices, strict=True))
        return [chosen.get(sequence.key, NO_DRAFT) for sequence in sequences]

    def _begin(self, num_tokens: int = 0) -> None:
        self._early.release()
        self._rows, self._num_tokens, self._num_drafted = {}, num_tokens, 0

    def _made(self, batch: Batch, filled: list[int]) -> Batch:
        self._rows, batch.changes, batch.filled = {}, self._changes, filled
        return batch

    def _continue(self, sequence: Sequence, promised: int = 0, choice: DraftPlan = NO_DRAFT) -> None:
        """Give the sequence its row, at younger ones' cost if need be; `promised` tokens are other decodes'."""
        if sequence.status is not Status.RUNNING:  # preempted earlier in this step
            return
        length, first, budget = len(sequence.tokens), sequence.num_computed, choice.max_nodes
        left, uncomputed = self._most_tokens - self._num_tokens, length - first
        count = uncomputed if uncomputed < left else left
        if count <= 0:
            return
        if budget:  # never past what may be committed: the last token comes from the target itself
            most = left - count - promised, self._draft_cap - self._num_drafted, self._context - length - 1
            budget = max(min(self._fitting(choice.method, budget, sequence.max_len - length - 1), *most), 0)
        end = first + count + 1  # one slot more: what the pass commits
        last = (
            max(min(end + self._slots_behind(choice.method, budget), sequence.max_len), end + budget) if budget else end
        )
        if len(sequence.blocks) * self.blocks.block_size < last:
            more = self.blocks.blocks_for(last) - len(sequence.blocks)
            if budget and more + promised > self.blocks.num_free:  # the other decodes may need a block each
                budget, last = 0, end  # rather give up the draft than another's cache
            if not self._make_room(sequence, end):
                return
            self.blocks.allocate(sequence, last)
        method = choice.method if budget else NO_DRAFT.method
        self._rows[sequence.key] = Row(sequence, first, count, count == uncomputed, method, budget)
        self._num_tokens += count + budget
        self._num_drafted += budget

    def _fitting(self, method: str, nodes: int, left: int) -> int:
        """Nodes of a draft that may commit `left` tokens: as many as the draft is deep can come of it."""
        return nodes if left >= self._depths.get(method, MAX_K) else min(nodes, left)

    def _slots_behind(self, method: str, budget: int) -> int:
        return max(budget, self._scratch_slots.get(method, 0))

    def _make_room(self, sequence: Sequence, end: int) -> bool:
        """Preempt the youngest until the sequence can hold `end` tokens; False: it was the youngest itself."""
        while not self.blocks.can_allocate(sequence, end):
            victim = self.running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _admit(self) -> None:
        while self.waiting and self.has_place:
            sequence = self.waiting[0]
            if self._num_tokens >= self._most_tokens or self._waits_for_sibling(sequence):
                return
            prefix = [] if sequence.lacks_prompt_logprobs else self.blocks.find_prefix(sequence)
            # Room for all its tokens, so that it is not preempted at once; alone it always fits.
            needed = self.blocks.blocks_for(len(sequence.tokens) + 1) - len(prefix)
            if needed > self.blocks.num_free_after(prefix):
                return
            self.waiting.pop(0)
            self._start(sequence, prefix)
            self._continue(sequence)
            for listener in self._listeners:
                listener.joined(sequence)

    def _start(self, sequence: Sequence, prefix: list[int]) -> None:
        self.blocks.take_prefix(sequence, prefix)
        sequence.num_cached = len(prefix) * self.blocks.block_size
        sequence.num_computed = sequence.num_cached - (1 if self.recompute_last and prefix else 0)
        if not sequence.num_preemptions:
            sequence.num_cached_prompt = sequence.num_cached
        sequence.status = Status.RUNNING
        self._changes += 1
        if sequence.looks_back:
            self._looking[sequence.key] = sequence
        bisect.insort(self.running, sequence, key=lambda s: self._arrival[s.key])

    def _release(self, sequence: Sequence) -> None:
        for listener in self._listeners:
            listener.left(sequence)

    def _waits_for_sibling(self, sequence: Sequence) -> bool:
        """Of n answers to one prompt the first computes it; the others find it in the prefix cache."""
        if sequence.params.n == 1 or not self.blocks.prefix_caching:
            return False
        shareable = (sequence.num_prompt - 1) // self.blocks.block_size * self.blocks.block_size
        return any(other.request_id == sequence.request_id and other.num_computed < shareable for other in self.running)

    def _preempt(self, sequence: Sequence) -> None:
        row = self._rows.pop(sequence.key, None)
        if row is not None:
            self._num_tokens -= row.count + row.max_nodes
            self._num_drafted -= row.max_nodes
        self._changes += 1
        self._looking.pop(sequence.key, None)
        self.running.remove(sequence)
        self._release(sequence)
        self.blocks.free(sequence)
        sequence.status = Status.WAITING
        sequence.num_computed = sequence.num_cached = 0
        sequence.num_preemptions += 1
        bisect.insort(self.waiting, sequence, key=lambda s: self._arrival[s.key])
