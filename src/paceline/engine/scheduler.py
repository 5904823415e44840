"""The rows of the next step, the sequences that wait, and those that are preempted.

`FairQueue` decides whose prompt is computed next, and who begins. A sequence begins where there is a place and blocks;
where there are none it displaces a sequence of a client, or a request, that holds more than it would itself. Where
blocks run short, a sequence of the client with the most blocks is preempted. The oldest sequence is never preempted
while another runs, and one sequence always fits, so all finish. Preemption forgets computed K/V, never tokens.

A step is scheduled in one of two ways. `schedule` knows all committed tokens. `schedule_ahead` follows a plain step
whose verdict is not read yet: rows that sample take their token from that verdict, on the device.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Collection, Iterator
from collections.abc import Sequence as SequenceOf
from typing import Protocol

import numpy as np

from paceline.config import MAX_K, EngineConfig
from paceline.core.fair_queue import FairQueue, client_of, displaced_by, last_with_most, num_blocks
from paceline.core.sequence import Sequence, Status
from paceline.engine.batch import Batch, Row
from paceline.engine.block_manager import BlockManager, Reserved
from paceline.engine.drafter_set import DrafterSet
from paceline.engine.policy import NO_DRAFT, DraftPlan, Policy

SPARE_BLOCKS = 2  # free blocks for each running sequence with which no step has to preempt


class SequenceListener(Protocol):
    """A part of the engine that keeps something for each running sequence."""

    def joined(self, sequence: Sequence) -> None:
        """The sequence runs from the step on that is being scheduled; it has blocks and a request index."""

    def left(self, sequence: Sequence) -> None:
        """The sequence is finished or preempted; its blocks are freed next."""


class Scheduler:
    def __init__(
        self,
        config: EngineConfig,
        blocks: BlockManager,
        policy: Policy,
        drafters: DrafterSet,
        *,
        context: int,
        listeners: SequenceOf[SequenceListener],
    ) -> None:
        """`context`: the most tokens of a sequence, and slots for them."""
        self.config, self.blocks, self.policy, self.drafters = config, blocks, policy, drafters
        self._scratch_slots, self._depths, self._context = drafters.scratch_slots, drafters.depths, context
        # After a prefix hit the last shared token is computed once more, for drafters that keep K/V of pairs.
        self._recompute_last = drafters.shifted_kv
        self._listeners = listeners
        self._most_tokens = config.max_num_batched_tokens
        self._draft_cap = config.max_num_batched_tokens // 2  # drafts never crowd out prompts
        self._arrivals = itertools.count()
        self._arrival: dict[str, int] = {}
        self.waiting = FairQueue[Sequence]()
        self.running: list[Sequence] = []  # in order of arrival
        self._rows: dict[str, Row] = {}  # rows of the step being scheduled, by sequence key
        self._num_tokens = self._num_drafted = 0  # in these rows
        self._changes = 0  # sequences that joined or left since the start
        self._was_short = False  # a row of the step being scheduled had to preempt another
        self._defers = False  # parts of long prompts are left to the step after the one being scheduled
        self._displacing: tuple[int, str, bool] = 0, "", False  # `_changes`, key of the head, and `_can_displace` then
        self._looking: dict[str, Sequence] = {}  # running sequences whose next token may need the host

    def add(self, sequence: Sequence) -> None:
        self._arrival[sequence.key] = next(self._arrivals)
        self.waiting.add(sequence)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def has_place(self) -> bool:
        return len(self.running) < self.config.max_num_seqs

    def sequences(self) -> Iterator[Sequence]:
        return itertools.chain(self.running, self.waiting)

    def schedule(self, *, unpublished: bool = False) -> Batch:
        """Schedule decodes first, so that no long prompt delays them; then prompts, in the order of turns, with the
        rest. `unpublished`: the step before is not published yet, so no sequence may be displaced."""
        decodes: list[Sequence] = []
        prompts: list[Sequence] = []
        for sequence in self.running:
            if sequence.finish_reason is None:  # else it leaves once the step that ended it is published
                (decodes if len(sequence.tokens) - sequence.num_computed == 1 else prompts).append(sequence)
        plans = self._plan(decodes, sum(sequence.num_uncomputed for sequence in prompts))
        self._rows, self._num_tokens, self._num_drafted, self._was_short = {}, 0, 0, False
        promised = len(decodes)
        for sequence, plan in zip(decodes, plans, strict=True):
            promised -= 1
            self._continue(sequence, promised, plan)
        self.waiting.charge_all(decodes, [1] * len(decodes))
        self._compute_prompts(prompts, may_displace=not unpublished)
        rows, size = list(self._rows.values()), self.blocks.block_size
        filled = [at for at, row in enumerate(rows) if row.first % size + row.count >= size]
        return self._end(Batch.of(rows), filled, max([len(row.sequence.blocks) for row in rows], default=0))

    def schedule_ahead(self, batch: Batch) -> Batch | None:
        """Schedule the step after a plain one whose verdict is not read: every row that samples goes on by one token,
        prompts by a chunk, and waiting sequences join. A row whose sequence turns out to have ended is ignored when it
        is read.

        None where a committed token decides what comes next (drafts, penalties and the like), where a sequence has no
        row in `batch`, and where blocks are short: only `schedule` preempts.
        """
        if batch.num_drafted or any(sequence.looks_back for sequence in self._looking.values()):
            return None
        if self.waiting and (self._can_displace() if not self.has_place else self._comes_first(batch)):
            return None
        ahead = self._continued(batch)
        if ahead is None:
            return None
        growing = self._growing(ahead)
        if sum([self.blocks.missing(*one) for one in growing]) > self.blocks.num_free:
            return None
        decoding = ahead.sequences
        if not batch.all_sample and ahead.token_source is not None:
            decoding = [decoding[row] for row in np.flatnonzero(ahead.token_source >= 0)]
        if decoding:
            offers = self.drafters.offers(decoding)
            if not self.policy.skip_plan(decoding, offers):
                return None
        for sequence, end in growing:
            self.blocks.allocate(sequence, end)
        self._rows, self._num_tokens, self._num_drafted, self._was_short = {}, ahead.num_tokens, 0, False
        self.waiting.charge_all(ahead.sequences, ahead.count.tolist())
        self._compute_prompts([], may_displace=False)
        if self._rows:
            ahead = ahead.joined(Batch.of(list(self._rows.values())))
        size = self.blocks.block_size
        filled = np.flatnonzero(ahead.first % size + ahead.count >= size).tolist()
        return self._end(ahead, filled, self.blocks.blocks_for(int(ahead.ends.max())))

    def _continued(self, batch: Batch) -> Batch | None:
        """Return the rows that go on behind `batch`: one token of each that samples, and the next chunk of prompts.
        None where a running sequence has no row, and where a prompt gets no token of the step."""
        first = batch.ends
        limit = np.array([sequence.max_len for sequence in batch.sequences], np.int64)
        going = ~batch.samples | (first + 1 < limit)  # else the unread token is its last
        live = len(batch)
        if batch.changes != self._changes:
            running = np.array([sequence.status is Status.RUNNING for sequence in batch.sequences], np.bool_)
            going, live = going & running, int(running.sum())
        rows = np.flatnonzero(going)
        if live < len(self.running) or not len(rows):
            return None
        token_source = np.where(batch.samples, batch.samples.cumsum() - 1, -1)[rows]
        sequences = batch.sequences if len(rows) == len(batch) else [batch.sequences[row] for row in rows]
        first, count, samples = first[rows], np.ones(len(rows), np.int64), token_source >= 0
        if not batch.all_sample:
            left = self._most_tokens - int(samples.sum())
            for row in np.flatnonzero(~samples):
                uncomputed = len(sequences[row].tokens) - int(first[row])
                count[row] = min(uncomputed, left)
                samples[row] = uncomputed <= left
                left -= int(count[row])
            if not count.all():
                return None
        return Batch(sequences, first, count, samples, batch.req_indices[rows], token_source=token_source)

    def _growing(self, ahead: Batch) -> list[tuple[Sequence, int]]:
        """Return the sequences that need blocks, and the end of the slots they need."""
        size = self.blocks.block_size
        if ahead.only_decodes:
            needs = [(ahead.sequences[row], int(ahead.ends[row])) for row in np.flatnonzero(ahead.first % size == 0)]
        else:  # a drafter may store the last pair of a chunk one slot further
            ends = ahead.ends + ~ahead.samples
            needs = list(zip(ahead.sequences, ends.tolist(), strict=True))
        return [(sequence, end) for sequence, end in needs if len(sequence.blocks) * size < end]

    def reserve(self, batch: Batch, methods: Collection[str]) -> tuple[list[tuple[int, int]], Reserved]:
        """Return the rows that may draft again behind the step under way, each with its number of nodes, and the ends
        of the slots that these drafts write. In the step these rows draft by one of `methods`; their slots are
        allocated only if a free block is left for every running sequence."""
        rows, reserved = [], {}
        for row, (method, drafted) in batch.drafts.items():
            sequence = batch.sequences[row]
            if method not in methods or sequence.status is not Status.RUNNING:
                continue
            # The step commits one token at least, and the last token of an answer is never drafted.
            nodes = self._fitting(method, drafted, sequence.remaining - 2)
            end = min(len(sequence.tokens) + drafted + 1 + self._slots_behind(method, nodes), sequence.max_len)
            if nodes > 0 and self.blocks.num_free - self.blocks.missing(sequence, end) >= len(self.running):
                self.blocks.allocate(sequence, end)
                reserved[sequence.key] = end
                rows.append((row, nodes))
        return rows, reserved

    @property
    def has_spare_blocks(self) -> bool:
        """Return whether the next step may be scheduled before the last one is published: no waiting sequence could
        take the place of one that ends there, and there are blocks for all without preemption."""
        if self.waiting and (self.has_place or self._can_displace()):
            return False
        if self.waiting and any(sequence.finish_reason is not None for sequence in self.running):
            return False
        tokens = sum([len(sequence.tokens) - sequence.num_computed for sequence in self.running])
        return SPARE_BLOCKS * len(self.running) + tokens // self.blocks.block_size <= self.blocks.num_free

    def finish(self, sequence: Sequence, reason: str, stop_reason: int | str | None = None) -> None:
        """End a sequence, whether it runs, waits or is cancelled; its blocks are free when this returns."""
        if sequence.status is Status.WAITING:
            self.waiting.take(sequence)
        sequence.finish_reason, sequence.stop_reason = reason, stop_reason
        if sequence.status is not Status.FINISHED:  # also one that waits: it may have run before it was preempted
            self._leave(sequence)
            self.waiting.finished(sequence)
        self._arrival.pop(sequence.key, None)
        sequence.status = Status.FINISHED

    def _plan(self, sequences: list[Sequence], prompt_tokens: int) -> SequenceOf[DraftPlan]:
        """Return the plan of each sequence; those without an output token have no draft."""
        decoding = [sequence for sequence in sequences if len(sequence.tokens) > sequence.num_prompt]
        if not decoding:
            return [NO_DRAFT] * len(sequences)
        others = min(prompt_tokens, self._most_tokens - len(sequences))
        plans = self.policy.plan(decoding, self.drafters.offers(decoding), others, bool(self.waiting))
        if len(decoding) == len(sequences):
            return plans
        by_key = dict(zip([sequence.key for sequence in decoding], plans, strict=True))
        return [by_key.get(sequence.key, NO_DRAFT) for sequence in sequences]

    def _end(self, batch: Batch, filled: list[int], width: int) -> Batch:
        self._rows, batch.changes, batch.filled = {}, self._changes, filled
        batch.tables = self.blocks.tables_at(batch.req_indices, width)
        return batch

    def _continue(self, sequence: Sequence, promised: int = 0, plan: DraftPlan = NO_DRAFT) -> None:
        """Schedule a row, preempting where blocks are short; keep `promised` tokens, and blocks, for other decodes."""
        if sequence.status is not Status.RUNNING:  # preempted earlier in this step
            return
        length, first, nodes = len(sequence.tokens), sequence.num_computed, plan.max_nodes
        left, uncomputed = self._most_tokens - self._num_tokens, length - first
        count = uncomputed if uncomputed < left else left
        if count <= 0:
            return
        if nodes:  # never past what may be committed: the last token comes from the target itself
            most = left - count - promised, self._draft_cap - self._num_drafted, self._context - length - 1
            nodes = max(min(self._fitting(plan.method, nodes, sequence.max_len - length - 1), *most), 0)
        end = last = first + count + 1  # one slot more, for the token that the pass commits
        if nodes:
            last = max(min(end + self._slots_behind(plan.method, nodes), sequence.max_len), end + nodes)
        if len(sequence.blocks) * self.blocks.block_size < last:
            if nodes and self.blocks.missing(sequence, last) + promised > self.blocks.num_free:  # others may need one
                nodes, last = 0, end  # a draft never preempts
            while self.blocks.missing(sequence, end) > self.blocks.num_free:
                self._was_short, victim = True, self._with_most_blocks()
                self._preempt(victim)
                if victim is sequence:
                    return
            self.blocks.allocate(sequence, last)
        method = plan.method if nodes else NO_DRAFT.method
        self._rows[sequence.key] = Row(sequence, first, count, count == uncomputed, method, nodes)
        self._num_tokens += count + nodes
        self._num_drafted += nodes

    def _fitting(self, method: str, nodes: int, left: int) -> int:
        """Return the nodes of a draft that may commit `left` tokens: a draft commits at most its depth."""
        return nodes if left >= self._depths.get(method, MAX_K) else min(nodes, left)

    def _slots_behind(self, method: str, nodes: int) -> int:
        return max(nodes, self._scratch_slots.get(method, 0))

    def _compute_prompts(self, prompts: list[Sequence], *, may_displace: bool) -> None:
        """Give the step's other tokens to prompts in the order of turns: `prompts`, which run, and those that wait.

        Behind a prompt that begins and is complete in this step, no part of a longer one is computed: the first token
        would wait for it. Every second step is filled all the same.
        """
        passed, may_defer, self._defers = set[str](), not self._defers, False
        under_way, may_begin = sorted(prompts, key=self.waiting.turn, reverse=True), True
        while self._num_tokens < self._most_tokens:
            # None begins in a step that had to preempt: it would be preempted next.
            newcomer = self.waiting.head(passed) if may_begin and not self._was_short else None
            if newcomer is None and not under_way:
                return
            continues = newcomer is None or (under_way and not self.waiting.precedes(newcomer, under_way[-1]))
            following = under_way[-1] if newcomer is None or continues else newcomer
            if self._defers and following.num_uncomputed > self._most_tokens - self._num_tokens:
                return
            if newcomer is None or continues:
                self._charge(under_way.pop())
            elif self._waits_for_sibling(newcomer):
                passed.add(newcomer.request_id)
            else:  # none behind one that lacks blocks begins: it would take them for ever
                may_begin = self._begin(newcomer)
                row = self._rows.get(newcomer.key)
                self._defers |= may_defer and row is not None and row.samples
                if not may_begin and may_displace and (self.has_place or self._can_displace()):  # once in a step
                    may_begin, may_displace = self._displace_for(newcomer), False

    def _begin(self, sequence: Sequence) -> bool:
        """Admit a sequence that waits and schedule its row, or return False."""
        prefix, missing = self._missing(sequence)
        if missing > 0 or not self.has_place:
            return False
        self.waiting.take(sequence)
        self._start(sequence, prefix)
        self._charge(sequence)
        for listener in self._listeners:
            listener.joined(sequence)
        return True

    def _missing(self, sequence: Sequence) -> tuple[list[int], int]:
        """Return the cached blocks that a sequence begins with, and how many of the others are not free."""
        prefix = [] if sequence.lacks_prompt_logprobs else self.blocks.find_prefix(sequence)
        # Blocks for all its tokens, so that it is not preempted at once; alone it always fits.
        needed = self.blocks.blocks_for(len(sequence.tokens) + 1) - len(prefix)
        return prefix, needed - self.blocks.num_free_after(prefix)

    def _displace_for(self, newcomer: Sequence) -> bool:
        """Admit a sequence in the place of others, or return False."""
        victims = self._victims(newcomer, self._missing(newcomer)[1])
        for victim in victims:
            self._preempt(victim)
        return bool(victims) and self._begin(newcomer)

    def _charge(self, sequence: Sequence) -> None:
        """Schedule a part of a prompt, and charge its client."""
        self._continue(sequence)
        row = self._rows.get(sequence.key)
        if row is not None:
            self.waiting.charge(sequence.owner.client, row.count)

    def _victims(self, newcomer: Sequence, missing: int) -> list[Sequence]:
        """Return sequences whose places and blocks a newcomer takes; none: it has to wait. `missing`: blocks that it
        needs and that are not free."""
        lacks_place, victims = not self.has_place, list[Sequence]()
        blocks = self.blocks.blocks_for(len(newcomer.tokens) + 1)
        left = [one for one in self.running[1:] if one.finish_reason is None]
        while lacks_place or missing > 0:
            victim = displaced_by(newcomer, left, None if lacks_place else blocks)
            if victim is None:
                return []
            left.remove(victim)
            victims.append(victim)
            lacks_place, missing = False, missing - self.blocks.num_unshared(victim)
        return victims

    def _can_displace(self) -> bool:
        """Return whether the first sequence that waits, for want of a place, would take another's."""
        head = self.waiting.head()
        key = "" if head is None else head.key
        if self._displacing[:2] != (self._changes, key):
            self._displacing = self._changes, key, head is not None and bool(self._victims(head, 0))
        return self._displacing[2]

    def _comes_first(self, batch: Batch) -> bool:
        """Return whether a sequence that waits has its turn before a prompt of the batch that is not complete."""
        head = self.waiting.head()
        if head is None or batch.all_sample:
            return False
        under_way = [batch.sequences[row] for row in np.flatnonzero(~batch.samples)]
        running = [one for one in under_way if one.status is Status.RUNNING]
        return bool(running) and self.waiting.precedes(head, min(running, key=self.waiting.turn))

    def _with_most_blocks(self) -> Sequence:
        """Return the sequence to preempt: of the client with the most blocks the last in its order."""
        others = self.running[1:] or self.running
        return last_with_most(others, client_of, num_blocks) or others[-1]

    def _start(self, sequence: Sequence, prefix: list[int]) -> None:
        self.blocks.take_prefix(sequence, prefix)
        sequence.num_cached = len(prefix) * self.blocks.block_size
        sequence.num_computed = sequence.num_cached - (1 if self._recompute_last and prefix else 0)
        if not sequence.num_preemptions:
            sequence.num_cached_prompt = sequence.num_cached
        sequence.status = Status.RUNNING
        self._changes += 1
        if sequence.looks_back:
            self._looking[sequence.key] = sequence
        bisect.insort(self.running, sequence, key=lambda s: self._arrival[s.key])

    def _leave(self, sequence: Sequence) -> None:
        self._changes += 1
        self._looking.pop(sequence.key, None)
        if sequence.status is Status.RUNNING:
            self.running.remove(sequence)
        for listener in self._listeners:
            listener.left(sequence)
        self.blocks.free(sequence)

    def _waits_for_sibling(self, sequence: Sequence) -> bool:
        """Return whether another answer to the prompt is computing it: this one will find it in the prefix cache."""
        if sequence.params.n == 1 or not self.blocks.prefix_caching:
            return False
        shareable = (sequence.num_prompt - 1) // self.blocks.block_size * self.blocks.block_size
        return any(other.request_id == sequence.request_id and other.num_computed < shareable for other in self.running)

    def _preempt(self, sequence: Sequence) -> None:
        row = self._rows.pop(sequence.key, None)
        if row is not None:
            self._num_tokens -= row.count + row.max_nodes
            self._num_drafted -= row.max_nodes
        self._leave(sequence)
        sequence.status = Status.WAITING
        sequence.num_computed = sequence.num_cached = 0
        sequence.num_preemptions += 1
        self.waiting.put_back(sequence)
