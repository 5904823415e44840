"""The drafters an engine runs, seen as one: proposals of a step, drafts begun behind it, taps, bookkeeping.

A drafter that raises, returns NaN or breaks the contract costs its rows the speculation of that step, never the answer;
one that fails at bookkeeping is switched off.
"""

from __future__ import annotations

import functools
import logging
import operator
import time
from collections.abc import Callable, Collection
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from paceline.config import AUTO
from paceline.core.draft import Draft
from paceline.core.sequence import Sequence
from paceline.core.verdict import UnreadVerdict
from paceline.drafters import Drafter, DraftRequest
from paceline.drafters.base import DeviceDrafter, HostDrafter, VerifiedDraft
from paceline.drafters.hidden_states import CommittedRow, PromptChunk, TapRing
from paceline.drafters.method_names import matches_method
from paceline.engine.batch import Batch
from paceline.engine.block_manager import BlockManager
from paceline.engine.in_flight import InFlightStep
from paceline.engine.policy import Offer
from paceline.models.kv_cache import KVCache, KVSpec
from paceline.platform.device_timer import Stopwatch

log = logging.getLogger("paceline")
# Drafts, and the share of them whose likeliest token is accepted. The packaged drafter has 0.5 at temperature 0.7, and
# 0.13 with its taps in the wrong order.
TRIAL, SUSPICIOUS = 50, 0.2
CATCHING_UP = 8  # tokens a drafter lags behind on average: with more, its time is not what a draft costs
FIRST_TOKENS, SMALL_LAG = 2, 8  # tokens; with a longer lag a drafter does not draft for an answer's first tokens


class StepOffers:
    """The offers of the drafters for the sequences of a step. A drafter is asked when its offer is first read."""

    def __init__(self, drafters: DrafterSet, sequences: SequenceOf[Sequence]) -> None:
        self._drafters, self._sequences = drafters, sequences

    @property
    def working(self) -> tuple[str, ...]:
        return self._drafters.working

    def methods(self, wish: str) -> tuple[str, ...]:
        return self._drafters.serving(wish)

    def of(self, wish: str, rows: SequenceOf[int], leave_out: Collection[str] = ()) -> list[Offer]:
        every, offers = len(rows) == len(self._sequences), []
        sequences = self._sequences if every else [self._sequences[row] for row in rows]
        for method in self._drafters.serving(wish):
            if method not in leave_out:
                levels = self._drafters.levels(method, sequences)
                if not all(levels):
                    supported = [row for row, level in zip(rows, levels, strict=True) if level]
                    offer = self._drafters.offer(method, supported, [level for level in levels if level])
                else:
                    offer = self._drafters.offer(method, rows, levels)
                if offer.rows:
                    offers.append(offer)
        return offers

    @property
    def awaits_model(self) -> bool:
        early = any(sequence.num_output < FIRST_TOKENS for sequence in self._sequences)
        return early and self._drafters.has_model


@dataclass
class EarlyDraft:
    """Drafts begun behind a step under way, for the step after it."""

    draft: Draft
    rows: dict[str, int]  # sequence -> row of the draft
    watch: Stopwatch | None  # None: it took longer than its like will take again
    read: bool = False  # the step it follows


@dataclass
class Timed:
    """When a drafter worked on a device, for the step that asked."""

    depth: int
    watch: Stopwatch | None
    before: bool  # behind the step before, so its time is no part of the step that asked


class DrafterSet:
    def __init__(self, drafters: SequenceOf[Drafter], vocab_size: int, blocks: BlockManager) -> None:
        self.drafters = tuple(drafters)
        self._vocab_size, self._blocks = vocab_size, blocks
        self._by_name = {drafter.name: drafter for drafter in drafters}
        self._on_device: dict[str, DeviceDrafter] = {
            drafter.name: cast(DeviceDrafter, drafter) for drafter in drafters if drafter.on_device
        }
        self.taps: tuple[int, ...] = tuple(dict.fromkeys(tap for drafter in drafters for tap in drafter.taps))
        self._tapped = [drafter for drafter in self._on_device.values() if drafter.taps]
        self._ring = TapRing()
        self._on_cuda = False
        self._early: dict[str, EarlyDraft] = {}
        self._timed: dict[str, Timed] = {}
        self.failures = 0
        self.first_drafts = {
            drafter.name: (0, 0) for drafter in self._tapped
        }  # drafts, and those that were right at first
        self._models = frozenset(drafter.name for drafter in drafters if _needs_model(drafter))
        self._complained: set[tuple[str, type]] = set()
        self._warned: set[tuple[str, type]] = set()
        self.seconds: dict[str, tuple[int, float]] = {}  # of the last step: method -> (largest budget, seconds)
        self._empty = functools.lru_cache(64)(Draft.empty)
        self.retire(())

    @property
    def kv_specs(self) -> tuple[KVSpec, ...]:
        return tuple(spec for drafter in self.drafters for spec in drafter.kv_layers)

    def retire(self, names: Collection[str]) -> None:
        """Switch drafters off for good."""
        self.retired = frozenset(names)
        self.working = tuple(drafter.name for drafter in self._working())
        automatic = tuple(drafter.name for drafter in self._working() if not _is_only_by_name(drafter))
        self._serving: dict[str, tuple[str, ...]] = {AUTO: automatic}
        self.has_model = not self._models.isdisjoint(automatic)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(drafter.name for drafter in self.drafters)

    def close(self) -> None:
        """Free the drafters and what is kept for them."""
        for drafter in self.drafters:
            drafter.close()
        self.drafters = ()

    @property
    def shifted_kv(self) -> bool:
        """Some drafter keeps K/V of (hidden state of t, token t + 1): no pair may be missing after a prefix hit."""
        return any(drafter.taps and drafter.kv_layers and drafter.shifted_kv for drafter in self.drafters)

    @property
    def scratch_slots(self) -> dict[str, int]:
        """Slots behind a sequence's tokens that a draft of each method writes to, whatever its number of nodes."""
        return {drafter.name: drafter.scratch_slots for drafter in self.drafters if drafter.scratch_slots}

    @property
    def depths(self) -> dict[str, int]:
        """That no draft of a method exceeds."""
        return {drafter.name: drafter.depth for drafter in self.drafters}

    @property
    def begins(self) -> frozenset[str]:
        """Methods that may begin drafts behind a step under way."""
        return frozenset(self._on_device) - self.retired

    def bind(self, cache: KVCache, first_layer: int) -> None:
        """Hand every drafter its layers, which follow the target's, and its taps."""
        self._on_cuda = bool(cache.layers) and cache.layers[0].k.is_cuda
        for drafter in self.drafters:
            last = first_layer + len(drafter.kv_layers)
            drafter.bind(cache.layers[first_layer:last], cache.block_size)
            first_layer = last
        for tapped in self._tapped:
            tapped.bind_taps(self._ring, [self.taps.index(tap) for tap in tapped.taps])

    def offers(self, sequences: SequenceOf[Sequence]) -> StepOffers:
        return StepOffers(self, sequences)

    def serving(self, wish: str) -> tuple[str, ...]:
        """Return the working drafters that may draft for a request of this method, or by a name of their own."""
        if wish not in self._serving:
            self._serving[wish] = tuple(one.name for one in self._working() if matches_method(one.name, wish))
        return self._serving[wish]

    def offer(self, method: str, rows: SequenceOf[int], levels: SequenceOf[int]) -> Offer:
        drafter = self._by_name[method]
        return Offer(method, rows, levels, method in self._models, drafter.trees, drafter.depth)

    def levels(self, method: str, sequences: SequenceOf[Sequence]) -> list[int]:
        """Return how well a draft of each sequence is supported; 0: there would be none, or the drafter failed."""
        drafter = self._by_name[method]
        if isinstance(drafter, HostDrafter):
            try:
                levels = drafter.levels(sequences)
                if levels is not None and len(levels) != len(sequences):
                    raise ValueError(f"{len(levels)} answers for {len(sequences)} sequences")
                if levels is not None:
                    return levels
            except Exception as problem:  # one sequence may be the cause: ask for each alone
                self._warn(method, problem)
        return [self._level(drafter, sequence) for sequence in sequences]

    def _level(self, drafter: Drafter, sequence: Sequence) -> int:
        try:
            first = len(sequence.tokens) - sequence.num_prompt < FIRST_TOKENS
            return 0 if first and drafter.unread_tokens(sequence) > SMALL_LAG else drafter.level(sequence)
        except Exception as problem:
            self._warn(drafter.name, problem)
            return 0

    def propose(self, batch: Batch, min_node_probability: float = 0.0) -> Draft:
        """Return one draft row per sampling row; a row without a method, or whose drafter failed, stays empty.

        `min_node_probability`: as in `DraftRequest`.
        """
        early, self._early, self.seconds, self._timed = self._early, {}, {}, {}
        if not batch.num_drafted:
            return self._empty(len(batch.sampling))
        place = batch.place
        wanted: dict[str, list[tuple[int, DraftRequest]]] = {}  # method -> row of the draft, and its wish
        for index, (method, max_nodes) in batch.drafts.items():
            if method not in self.retired:
                wanted.setdefault(method, []).append(
                    (place[index], DraftRequest(batch.sequences[index], max_nodes, min_node_probability))
                )
        parts: list[tuple[list[int], Draft]] = []
        for method, asking in wanted.items():
            of = early.get(method)
            ready = [] if of is None or not of.read else [one for one in asking if one[1].sequence.key in of.rows]
            if of is not None and ready:
                parts.append(([at for at, _ in ready], self._adopt(of, method, [row for _, row in ready])))
            fresh = [one for one in asking if one not in ready] if ready else asking
            if fresh:
                draft = self._timely(method, [row for _, row in fresh], bool(ready))
                if draft is not None:
                    parts.append(([at for at, _ in fresh], draft))
        rows = len(batch.sampling)
        return Draft.merge(parts, rows, self._vocab_size) if parts else self._empty(rows)

    def begin_early(self, batch: Batch, going: SequenceOf[tuple[int, int]], unread: UnreadVerdict | None) -> None:
        """Begin drafts behind a step under way, for rows of its batch with the nodes each may have in the next."""
        if unread is None:
            return
        place = batch.place
        for name in self.begins:
            mine = [(index, nodes) for index, nodes in going if batch.drafts[index][0] == name]
            if not mine:
                continue
            rows = [DraftRequest(batch.sequences[index], nodes) for index, nodes in mine]
            drafter, behind = self._on_device[name], replace(unread, rows=[place[index] for index, _ in mine])
            with Stopwatch(unread.tokens.is_cuda) as watch:
                draft = self._propose(drafter, rows, behind)
            if draft is not None and draft.width:
                counts = draft.num_nodes.tolist()
                at = {row.sequence.key: i for i, row in enumerate(rows) if counts[i]}
                self._early[name] = EarlyDraft(draft, at, watch if drafter.time_is_typical else None)

    def _adopt(self, of: EarlyDraft, method: str, rows: list[DraftRequest]) -> Draft:
        """What was begun for these rows, as far as it is wanted now."""
        at = [of.rows[row.sequence.key] for row in rows]
        there = of.draft.num_nodes.tolist()
        counts = [min(row.max_nodes, there[i]) for row, i in zip(rows, at, strict=True)]
        self._timed[method] = Timed(self._steps(self._on_device[method], of.draft), of.watch, before=True)
        self.seconds[method] = max(counts), 0.0
        self._on_device[method].use_early(
            [DraftRequest(*pair) for pair in zip([r.sequence for r in rows], counts, strict=True)]
        )
        return of.draft.take(at, counts)

    def _timely(self, method: str, rows: list[DraftRequest], more: bool) -> Draft | None:
        """A draft from the start, and what it took; `more`: other rows' drafts were begun before."""
        drafter, on_device = self._by_name[method], self._on_device.get(method)
        unread_tokens, most = self._unread_tokens(drafter, rows), max([row.max_nodes for row in rows])
        if on_device is None:
            started = time.perf_counter()
            draft = self._propose(drafter, rows, None)
            if unread_tokens <= CATCHING_UP:
                self.seconds[method] = most, time.perf_counter() - started
            return draft
        with Stopwatch(self._on_cuda) as watch:
            draft = self._propose(drafter, rows, None)
        if draft is not None and unread_tokens <= CATCHING_UP:
            self.seconds[method] = most, 0.0
            watch_or_none = watch if on_device.time_is_typical and not more else None
            self._timed[method] = Timed(self._steps(on_device, draft), watch_or_none, before=False)
        return draft

    def time_devices(self) -> float:
        """Once a step is over: put what devices took to draft into `seconds`; how much of it was before the step."""
        before = 0.0
        for method, timed in self._timed.items():
            del self.seconds[method]
            if timed.watch is not None:
                self.seconds[method] = timed.depth, timed.watch.seconds
                before += timed.watch.seconds if timed.before else 0.0
        self._timed = {}
        return before

    @staticmethod
    def _steps(drafter: Drafter, draft: Draft) -> int:
        """What a draft's time grows with: its depth, unless all of it is made at once."""
        return 1 if drafter.trees else draft.max_depth

    @staticmethod
    def _unread_tokens(drafter: Drafter, rows: SequenceOf[DraftRequest]) -> int:
        try:
            return sum([drafter.unread_tokens(row.sequence) for row in rows]) // len(rows)
        except Exception:  # it will say so when it is asked to draft
            return CATCHING_UP + 1

    def _propose(self, drafter: Drafter, rows: list[DraftRequest], after: UnreadVerdict | None) -> Draft | None:
        try:
            draft = drafter.propose(rows) if after is None else self._on_device[drafter.name].propose(rows, after)
            draft.validate(self._vocab_size)
            if draft.batch != len(rows):
                raise ValueError(f"{draft.batch} drafts for {len(rows)} rows")
            if any(map(operator.gt, draft.trees.num_nodes, [row.max_nodes for row in rows])):
                raise ValueError("more nodes than the budget of a row")
            # Of an unseen draft the drafter vouches for q: to look at it is to wait.
            if draft.q is not None and not draft.tokens_on_device and not bool(torch.isfinite(draft.q.probs).all()):
                raise ValueError("q is not finite")
            return draft.repaired(self._vocab_size)  # here, where a draft begun behind a step costs no time
        except Exception as problem:  # whatever it is, the answer does not depend on it
            self._complain(drafter, problem)
            return None

    def _warn(self, method: str, problem: Exception) -> None:
        if (method, type(problem)) not in self._warned:  # once: it may fail at every step
            log.warning("drafter %s failed to say what it knows: %r", method, problem)
            self._warned.add((method, type(problem)))

    def _complain(self, drafter: Drafter, problem: Exception) -> None:
        self.failures += 1
        again = (drafter.name, type(problem)) in self._complained  # once is enough: it may fail at every step
        self._complained.add((drafter.name, type(problem)))
        level = logging.DEBUG if again else logging.WARNING
        log.log(level, "drafter %s failed, decoding plainly where it does: %r", drafter.name, problem)

    def gather(self, flight: InFlightStep, taps: Tensor) -> None:
        """Behind a launched pass: keep the taps of committed positions, and absorb those of prompts at once."""
        batch, layout, verdict = flight.batch, flight.layout, flight.verdict
        chunks: list[PromptChunk] = []
        for index in batch.chunks:
            row = batch.row(index)
            known = row.count - row.samples  # the token after the last one is the verdict's, where the row samples
            if known > 0:
                chunks.append(PromptChunk(row.sequence, row.first, known, int(layout.begin[index])))
            tokens, last = row.sequence.tokens, row.first + row.count - 1
            if not row.samples and last == len(tokens) - 2 and len(tokens) > row.sequence.num_prompt:
                # Computed anew but for its last token: the next step may draft, and no verdict tells the ring of it.
                self._ring.put(row.sequence.req_index, last, taps[int(layout.begin[index]) + row.count - 1], tokens[-1])
        working = [drafter for drafter in self._tapped if drafter.name not in self.retired]
        for drafter in working if chunks else ():
            self._safely(drafter, drafter.read_chunks, chunks, taps)
        if verdict is not None:
            sequences = batch.sampled_sequences
            req_indices = [sequence.req_index for sequence in sequences]
            for drafter in working:
                self._safely(drafter, drafter.before_store, sequences, flight.draft.max_depth + 1)
            if taps.is_cpu:
                numbers = batch.sampled_lengths.tolist(), layout.node_rows.tolist()
                self._ring.store_on_host(
                    map(CommittedRow, req_indices, *numbers, verdict.rows), taps, 1 + max(req_indices)
                )
            elif flight.unread is not None:
                self._ring.store(flight.unread, taps, 1 + max(req_indices))

    def on_verdict(self, batch: Batch, sequences: SequenceOf[Sequence]) -> None:
        """A step was read: drafters learn which of their own drafts were judged, and which begun drafts may be used.

        `sequences` committed something.
        """
        for of in self._early.values():
            of.read = True
        if not batch.drafts:
            return
        drafts = {batch.sequences[index].key: method for index, (method, _) in batch.drafts.items()}
        for name, drafter in self._on_device.items():
            if name in self.retired:
                continue
            mine = [sequence for sequence in sequences if drafts.get(sequence.key) == name]
            behind = self._early.get(name)
            early = [] if behind is None else [sequence for sequence in sequences if sequence.key in behind.rows]
            if mine or early:
                verified = [VerifiedDraft(sequence, sequence.num_computed) for sequence in mine]
                self._safely(drafter, drafter.on_verdict, verified, early)

    def count_first(self, method: str, right: bool) -> None:
        """A draft of a method on trial was verified; `right`: its first node, the likeliest token, was accepted. A
        trained drafter that is hardly ever right was trained for another model or reads the wrong layers: no output
        shows that, so it is reported, once. A tree's other tokens do not count: of eight, one is often right."""
        drafts, hits = self.first_drafts[method]
        self.first_drafts[method] = drafts, hits = drafts + 1, hits + right
        if drafts == TRIAL:
            del self.first_drafts[method]
            if hits < SUSPICIOUS * TRIAL:
                log.warning(
                    "drafter %s: only %d of its first %d drafts were right about the next token; is it for this model?",
                    *(method, hits, drafts),
                )

    def mark(self, sequences: SequenceOf[Sequence]) -> None:
        """Note which blocks of these sequences hold a drafter's own K/V too."""
        for drafter in self._on_device.values():
            if sequences and drafter.kv_layers and drafter.name not in self.retired:
                self._safely(drafter, self._mark, drafter, sequences)

    def _mark(self, drafter: DeviceDrafter, sequences: SequenceOf[Sequence]) -> None:
        for sequence in sequences:
            self._blocks.mark(sequence, drafter.version, *drafter.kv_range(sequence))

    def index_prompts(self, batch: Batch) -> None:
        """Chunks of prompts were computed: host drafters index them, so that this is spread over the chunks."""
        chunks = batch.chunks
        if not chunks:
            return
        verdict_copy = [drafter for drafter in self._working() if isinstance(drafter, HostDrafter)]
        for index in chunks:
            sequence, end = batch.sequences[index], int(batch.first[index] + batch.count[index])
            for drafter in verdict_copy if not sequence.finished else ():
                self._safely(drafter, drafter.index_prompt, sequence, min(end, sequence.num_prompt))

    def joined(self, sequence: Sequence) -> None:
        """A sequence enters with a prefix of cached blocks: each drafter may use those marked for it."""
        for drafter in self._working():
            start = sequence.num_cached
            if drafter.kv_layers:
                start = self._blocks.marked_from(sequence, drafter.version)
            self._safely(drafter, drafter.admit, sequence, start, sequence.num_cached)

    def left(self, sequence: Sequence) -> None:
        for early in self._early.values():
            early.rows.pop(sequence.key, None)
        for drafter in self._working():
            self._safely(drafter, drafter.release, sequence)

    def _working(self) -> list[Drafter]:
        return [drafter for drafter in self.drafters if drafter.name not in self.retired]

    def _safely(self, drafter: Drafter, work: Callable[..., None], *args: Any) -> None:
        """A drafter that fails at bookkeeping no longer knows where its sequences stand: it drafts no more."""
        try:
            work(*args)
        except Exception as problem:
            self.failures += 1
            self.retire(self.retired | {drafter.name})
            log.warning("drafter %s failed and is switched off: %r", drafter.name, problem)


def _needs_model(drafter: Drafter) -> bool:
    """A token ahead costs a pass: the drafter is no lookup, or reads tokens before it drafts."""
    own_unread_tokens: object = type(drafter).unread_tokens
    return not isinstance(drafter, HostDrafter) or own_unread_tokens is not HostDrafter.unread_tokens


def _is_only_by_name(drafter: Drafter) -> bool:
    return isinstance(drafter, HostDrafter) and drafter.only_by_name
