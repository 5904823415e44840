"""Who computes what in the next step, who waits, and who has to give way.

Order of arrival decides everything: who is admitted, who keeps its blocks, who is preempted (the youngest). The oldest
sequence is never preempted while another runs, and one sequence always fits, so everyone finishes. Preemption forgets
computed K/V, never tokens.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Collection, Iterator
from collections.abc import Sequence as SequenceOf

import numpy as np

from paceline.config import EngineConfig
from paceline.drafters import NONE
from paceline.engine.batch import Batch, Company, Ints, Row, Stage, Tables
from paceline.engine.block_manager import BlockManager
from paceline.engine.policy import Choice, Policy
from paceline.sequence import Sequence, Status

NO_DRAFT = Choice()
SPARE = 2  # free blocks for each that runs, at least: then nobody gives way


class Scheduler:
    def __init__(
        self,
        config: EngineConfig,
        blocks: BlockManager,
        policy: Policy,
        *,
        recompute_last: bool = False,
        on_admit: Callable[[Sequence], None] = lambda sequence: None,
        on_release: Callable[[Sequence], None] = lambda sequence: None,
    ) -> None:
        """`recompute_last`: after a prefix hit compute the last shared token once more, for the drafters' taps."""
        self.config, self.blocks, self.policy = config, blocks, policy
        self.recompute_last = recompute_last
        self._on_admit, self._on_release = on_admit, on_release
        self._most_tokens = config.max_num_batched_tokens
        self._draft_cap = config.max_num_batched_tokens // 2  # drafts never crowd out prompts
        self._arrivals = itertools.count()
        self._arrival: dict[str, int] = {}
        self.waiting: list[Sequence] = []  # both lists in order of arrival
        self.running: list[Sequence] = []
        self._changes = 0  # who joined or left, so far

    def add(self, sequence: Sequence) -> None:
        self._arrival[sequence.key] = next(self._arrivals)
        self.waiting.append(sequence)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def sequences(self) -> Iterator[Sequence]:
        return itertools.chain(self.running, self.waiting)

    def schedule(self) -> Batch:
        """Decodes first, so that no long prompt delays them; then prompts, oldest first, with what is left."""
        batch = Batch()
        decodes: list[Sequence] = []
        prompts: list[Sequence] = []
        for sequence in self.running:
            if sequence.finish_reason is None:  # else it has said its last, and leaves
                (decodes if len(sequence.tokens) - sequence.num_computed == 1 else prompts).append(sequence)
        self._decode(decodes, self._plan(decodes, sum(sequence.num_uncomputed for sequence in prompts)), batch)
        for sequence in prompts:
            self._continue(sequence, batch)
        if self.waiting and all(sequence.status is Status.RUNNING for sequence in decodes + prompts):
            self._admit(batch)  # not in a step that had to preempt: the newcomer would be next
        batch.tables = self.blocks.tables([row.sequence for row in batch.rows])
        return batch

    def early(self, *, ends: bool) -> Batch | None:
        """The step after one whose tokens stand but are not told yet, where that makes no difference: nobody is to be
        admitted, and there are blocks for all. `ends`: somebody leaves.
        """
        if self.waiting and (ends or self.has_place):
            return None
        tokens = 0
        for sequence in self.running:
            if sequence.logprobs is not None:  # reading them would wait for the device
                return None
            tokens += len(sequence.tokens) - sequence.num_computed
        needed = SPARE * len(self.running) + tokens // self.blocks.block_size
        return self.schedule() if needed <= self.blocks.num_free else None

    def keep(self, batch: Batch) -> None:
        """The room of a step that is under way before the one before it is told, when blocks are taken back."""
        for row in batch.rows:
            row.sequence.reserved = row.first + row.count + 1 + row.budget

    def let_go(self, batch: Batch) -> None:
        for row in batch.rows:
            row.sequence.reserved = 0

    def ahead(self, batch: Batch) -> tuple[Batch, SequenceOf[int]] | None:
        """The batch after one that is still computed, and which of its rows go on, as if none of them ended there.

        Only where plain decoding goes on anyway: nobody drafts, is admitted or gives way, and no token that is not
        known yet has a say in what is asked. A sequence that turns out to have ended is left out of the result.
        """
        if batch.num_drafted or (self.waiting and self.has_place):
            return None
        if batch.stage is not None:
            return self._further(batch, batch.stage)
        live, size, running = 0, self.blocks.block_size, Status.RUNNING
        going: list[int] = []
        rows: list[Row] = []
        short: list[Sequence] = []
        for index, row in enumerate(batch.rows):
            sequence = row.sequence
            if row.samples and sequence.status is running:
                live += 1
                length = len(sequence.tokens)
                if length + 1 < sequence.max_len:
                    if sequence.looks_back:
                        return None
                    going.append(index)
                    rows.append(Row(sequence, length, 1, True, NONE, 0))
                    if len(sequence.blocks) * size <= length:
                        short.append(sequence)
        if live < len(self.running) or not going:  # somebody has a prompt to read, or all end
            return None
        sequences = [row.sequence for row in rows]
        if not self.policy.rests(sequences) or len(short) > self.blocks.num_free:
            return None
        for sequence in short:
            self.blocks.allocate(sequence, len(sequence.tokens) + 1)
        company, first = Company.of(sequences), np.array([row.first for row in rows], np.int64)
        return self._together(rows, self._stage(company, first, None)), going

    def _further(self, batch: Batch, stage: Stage) -> tuple[Batch, SequenceOf[int]] | None:
        """The same for a company: who is still there and has room goes on, one position further."""
        going: SequenceOf[int] = range(len(batch.rows))
        company, first, last, spare = stage.company, stage.first + 1, batch.rows, stage.spare
        if not self.is_whole(stage):
            running, fits = Status.RUNNING, (first + 1 < company.max_len).tolist()
            going = [at for at, one in enumerate(company.sequences) if fits[at] and one.status is running]
            if not going:
                return None
            company, first, last = company.part(going), first[going], [last[index] for index in going]
            spare = None if spare is None else [spare[index] for index in going]
        size = self.blocks.block_size
        begin = [company.sequences[index] for index in np.flatnonzero(first % size == 0)]  # a block each
        short = [sequence for sequence in begin if len(sequence.blocks) * size <= len(sequence.tokens)]
        if not self.policy.rests(company.sequences) or len(short) > self.blocks.num_free:
            return None
        for sequence in short:
            self.blocks.allocate(sequence, len(sequence.tokens) + 1)
            company.width = max(company.width, len(sequence.blocks))
        if spare is None:
            rows = [Row(row.sequence, row.first + 1, 1, True, NONE, 0) for row in last]
        else:
            rows = spare
            for row in rows:
                row.first += 2
        return self._together(rows, self._stage(company, first, last)), going

    def is_whole(self, stage: Stage) -> bool:
        """Nobody has joined or left since the step was planned, and nobody must end with it."""
        return stage.changes == self._changes and stage.room > 2

    def _stage(self, company: Company, first: Ints, spare: list[Row] | None) -> Stage:
        return Stage(company, first, int((company.max_len - first).min()), self._changes, spare)

    def _together(self, rows: list[Row], stage: Stage) -> Batch:
        tables = self.blocks.tables_at(stage.company.seats, stage.company.width)
        return Batch(rows, num_tokens=len(rows), tables=tables, stage=stage)

    def drafting_on(self, batch: Batch, methods: Collection[str]) -> list[tuple[int, int]]:
        """Rows of a batch still computed that may draft as far again behind it by one of these methods, and how far.

        Room for that is made where enough is left for everybody, and kept until the next step is planned.
        """
        going = []
        for index, row in enumerate(batch.rows):
            sequence = row.sequence
            if row.method not in methods:
                continue
            # It will say one token at least, and the last one is the target's own.
            budget = min(row.budget, sequence.room - 2) if sequence.status is Status.RUNNING else 0
            end = min(len(sequence.tokens) + row.budget + 1 + budget, sequence.max_len)
            more = self.blocks.blocks_for(end) - len(sequence.blocks)
            if budget > 0 and self.blocks.num_free - more >= len(self.running):
                self.blocks.allocate(sequence, end)
                sequence.reserved = end
                going.append((index, budget))
        return going

    def make_room(self, batch: Batch, said: int, budgets: SequenceOf[int]) -> Tables | None:
        """For the step after one that is still computed, if nobody ends with it: each may say so many tokens in it, and
        have such a draft in the next. Their block tables; None: it may come otherwise, or there are too few blocks.

        Room is kept until the next step is planned.
        """
        rows, size, running = batch.rows, self.blocks.block_size, Status.RUNNING
        spare = min(self._draft_cap, self._most_tokens - len(rows))
        if (self.waiting and self.has_place) or len(rows) < len(self.running) or sum(budgets) > spare:
            return None
        needed, lengths = len(rows) // size, []  # as `early` will want it
        for row, budget in zip(rows, budgets, strict=True):
            sequence = row.sequence
            if not row.samples or sequence.status is not running or sequence.logprobs is not None:
                return None
            length = min(len(sequence.tokens) + said + budget + 1, sequence.max_len)
            lengths.append(length)
            needed += max(-(-length // size) - len(sequence.blocks), 0)
        if needed + SPARE * len(rows) > self.blocks.num_free:
            return None
        for row, length in zip(rows, lengths, strict=True):
            self.blocks.allocate(row.sequence, length)
            row.sequence.reserved = length
        return self.blocks.tables([row.sequence for row in rows])

    @property
    def has_place(self) -> bool:
        return len(self.running) < self.config.max_num_seqs

    def finish(self, sequence: Sequence, reason: str, stop_reason: int | str | None = None) -> None:
        """The sequence leaves and its blocks are free at once; also the way to cancel."""
        self._changes += 1
        if sequence.status is Status.RUNNING:
            self.running.remove(sequence)
            self._on_release(sequence)
        elif sequence.status is Status.WAITING:
            self.waiting.remove(sequence)
            self._on_release(sequence)  # it may have been asked for a draft after it gave way
        self.blocks.free(sequence)
        self._arrival.pop(sequence.key, None)
        sequence.status = Status.FINISHED
        sequence.finish_reason, sequence.stop_reason = reason, stop_reason

    def _plan(self, sequences: list[Sequence], prompt_tokens: int) -> SequenceOf[Choice]:
        """The drafts that are wanted, by sequence."""
        decoding = [sequence for sequence in sequences if len(sequence.tokens) > sequence.num_prompt]
        others = min(prompt_tokens, self._most_tokens - len(sequences))
        choices = self.policy.plan(decoding, others, bool(self.waiting)) if decoding else []
        if len(decoding) == len(sequences):
            return choices
        chosen = dict(zip([sequence.key for sequence in decoding], choices, strict=True))
        return [chosen.get(sequence.key, NO_DRAFT) for sequence in sequences]

    def _decode(self, sequences: list[Sequence], choices: SequenceOf[Choice], batch: Batch) -> None:
        """As `_continue`, where there is room already, in fewer operations: a step waits for it."""
        reserved, size, rows, running = len(sequences), self.blocks.block_size, batch.rows, Status.RUNNING
        spare = min(self._draft_cap, self._most_tokens - reserved)  # tokens for drafts
        for sequence, choice in zip(sequences, choices, strict=True):
            reserved -= 1
            length, budget = len(sequence.tokens), choice.budget
            end = length + budget
            fits = end < len(sequence.blocks) * size and (not budget or end < sequence.max_len)
            if fits and batch.num_drafted + budget <= spare and sequence.status is running:
                sequence.reserved = 0
                rows.append(Row(sequence, length - 1, 1, True, choice.method if budget else NONE, budget))
                batch.num_tokens += 1 + budget
                batch.num_drafted += budget
            else:
                self._continue(sequence, batch, reserved, choice)

    def _continue(self, sequence: Sequence, batch: Batch, reserved: int = 0, choice: Choice = NO_DRAFT) -> None:
        """Give the sequence its row, at younger ones' cost if need be; `reserved` tokens are promised to others."""
        if sequence.status is not Status.RUNNING:  # preempted earlier in this step
            return
        sequence.reserved = 0
        length, first, budget = len(sequence.tokens), sequence.num_computed, choice.budget
        left, uncomputed = self._most_tokens - batch.num_tokens, length - first
        count = uncomputed if uncomputed < left else left
        if count <= 0:
            return
        if budget:  # never past what may be committed: the last token comes from the target itself
            most = left - count - reserved, self._draft_cap - batch.num_drafted, sequence.max_len - length - 1
            budget = min(budget, *most)
        if budget <= 0:
            choice, budget = NO_DRAFT, 0
        end = first + count + 1  # one slot more: what the pass commits
        if len(sequence.blocks) * self.blocks.block_size < end + budget:
            more = self.blocks.blocks_for(end + budget) - len(sequence.blocks)
            if budget and more + reserved > self.blocks.num_free:  # who is still to come may need a block
                choice, budget = NO_DRAFT, 0  # rather give up the draft than another's cache
            if not self._make_room(sequence, end, batch):
                return
            self.blocks.allocate(sequence, end + budget)
        batch.add(Row(sequence, first, count, count == uncomputed, choice.method, budget))

    def _make_room(self, sequence: Sequence, end: int, batch: Batch) -> bool:
        """Preempt the youngest until the sequence can hold `end` tokens; False: it was the youngest itself."""
        while not self.blocks.can_allocate(sequence, end):
            victim = self.running[-1]
            self._preempt(victim, batch)
            if victim is sequence:
                return False
        return True

    def _admit(self, batch: Batch) -> None:
        while self.waiting and self.has_place:
            sequence = self.waiting[0]
            if batch.num_tokens >= self._most_tokens or self._waits_for_sibling(sequence):
                return
            prefix = self.blocks.find_prefix(sequence)
            # Room for all its tokens, so that it is not preempted at once; alone it always fits.
            needed = self.blocks.blocks_for(len(sequence.tokens) + 1) - len(prefix)
            if needed > self.blocks.num_free_after(prefix):
                return
            self.waiting.pop(0)
            self._start(sequence, prefix)
            self._continue(sequence, batch)

    def _start(self, sequence: Sequence, prefix: list[int]) -> None:
        self.blocks.take_prefix(sequence, prefix)
        sequence.num_cached = len(prefix) * self.blocks.block_size
        sequence.num_computed = sequence.num_cached - (1 if self.recompute_last and prefix else 0)
        if not sequence.num_preemptions:
            sequence.num_cached_prompt = sequence.num_cached
        sequence.status = Status.RUNNING
        self._changes += 1
        bisect.insort(self.running, sequence, key=lambda s: self._arrival[s.key])
        self._on_admit(sequence)

    def _waits_for_sibling(self, sequence: Sequence) -> bool:
        """Of n answers to one prompt the first computes it; the others find it in the prefix cache."""
        shareable = (sequence.num_prompt - 1) // self.blocks.block_size * self.blocks.block_size
        return self.blocks.prefix_caching and any(
            other.request_id == sequence.request_id and other.num_computed < shareable for other in self.running
        )

    def _preempt(self, sequence: Sequence, batch: Batch) -> None:
        batch.remove(sequence)
        self._changes += 1
        self.running.remove(sequence)
        self._on_release(sequence)
        self.blocks.free(sequence)
        sequence.status = Status.WAITING
        sequence.num_computed = sequence.num_cached = 0
        sequence.num_preemptions += 1
        bisect.insort(self.waiting, sequence, key=lambda s: self._arrival[s.key])
