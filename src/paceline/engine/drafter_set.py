"""The drafters of an engine as one: offers and proposals of a step, drafts begun behind it, taps, bookkeeping.

A drafter that raises, returns NaN or breaks the contract costs its rows the speculation of that step, never the answer;
one that fails at bookkeeping is switched off.
"""

from __future__ import annotations

import functools
import logging
import operator
from collections.abc import Callable, Collection
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from paceline.config import AUTO
from paceline.core.device_draft import merge_drafts
from paceline.core.draft import Draft
from paceline.core.feedback import Feedback
from paceline.core.sequence import Sequence
from paceline.core.verdict import UnreadVerdict
from paceline.drafters import Drafter, DraftRequest
from paceline.drafters.base import DeviceDrafter, HostDrafter, VerifiedDraft
from paceline.drafters.hidden_states import CommittedRow, PromptChunk, TapRing
from paceline.drafters.method_names import matches_method
from paceline.engine.batch import Batch, DraftWork, StepResult
from paceline.engine.block_manager import BlockManager
from paceline.engine.in_flight import InFlightStep
from paceline.engine.policy import Offer
from paceline.models.kv_cache import KVCache
from paceline.platform.device_timer import Stopwatch

log = logging.getLogger("paceline")
# Drafts, and the share of them whose likeliest token is accepted, below which a trained drafter is reported. The
# packaged drafter has 0.5 at temperature 0.7, and 0.13 with its taps in the wrong order.
TRIAL, SUSPICIOUS = 50, 0.2
FIRST_TOKENS, SMALL_LAG = 2, 8  # tokens; with a longer lag a drafter does not draft for an answer's first tokens


@dataclass
class EarlyDraft:
    """Drafts begun behind a step under way, for the step after it."""

    draft: Draft
    rows: dict[str, int]  # sequence key -> row of the draft
    passes: int
    watch: Stopwatch | None  # None: the time was not typical
    read: bool = False  # the step under way has been read


class _Timed(NamedTuple):
    """The work of a method's draft. `before`: it was launched in the step before, so this step's time does not include
    it."""

    passes: int  # as in DraftWork
    unread: int
    watch: Stopwatch
    before: bool = False


class StepOffers:
    """The offers of the drafters for the sequences of a step. A drafter is asked when its offer is first read."""

    def __init__(self, drafters: DrafterSet, sequences: SequenceOf[Sequence]) -> None:
        self._drafters, self._sequences, self.working = drafters, sequences, drafters.working

    def methods(self, wish: str) -> tuple[str, ...]:
        return self._drafters.serving(wish)

    def of(self, wish: str, rows: SequenceOf[int], leave_out: Collection[str] = ()) -> list[Offer]:
        every, offers = len(rows) == len(self._sequences), list[Offer]()
        sequences = self._sequences if every else [self._sequences[row] for row in rows]
        for method in self._drafters.serving(wish):
            if method not in leave_out:
                offers.append(self._drafters.offer(method, rows, sequences))
        return [offer for offer in offers if offer.rows]

    @property
    def awaits_model(self) -> bool:
        early = any(sequence.num_output < FIRST_TOKENS for sequence in self._sequences)
        return early and self._drafters.has_model


class DrafterSet:
    def __init__(
        self, drafters: SequenceOf[Drafter], vocab_size: int, blocks: BlockManager, pass_bytes: int = 0
    ) -> None:
        """`pass_bytes`: weights that a pass of the target reads; 0: unknown."""
        self.drafters, self.names = tuple(drafters), tuple(drafter.name for drafter in drafters)
        self._vocab_size, self._blocks = vocab_size, blocks
        self._by_name = {drafter.name: drafter for drafter in drafters}
        self._on_device = {one.name: cast(DeviceDrafter, one) for one in drafters if one.on_device}
        self.taps: tuple[int, ...] = tuple(dict.fromkeys(tap for drafter in drafters for tap in drafter.taps))
        self._models = {drafter.name for drafter in drafters if _needs_model(drafter)}
        self._ring, self._on_cuda = TapRing(), False
        self._early: dict[str, EarlyDraft] = {}
        self._timed: dict[str, _Timed] = {}  # key: method; drafts of the step that was proposed last
        self._first_drafts = {one.name: (0, 0) for one in drafters if one.taps}  # drafts, and those right at first
        self.failures = 0
        self._reported: set[tuple[str, str, type]] = set()
        self._empty = functools.lru_cache(64)(Draft.empty)
        # True: a drafter stores K/V of (hidden state of t, token t + 1); the last shared token is recomputed after a
        # prefix hit to supply the missing pair.
        self.shifted_kv = any(one.taps and one.kv_layers and one.shifted_kv for one in drafters)
        self.scratch_slots = {one.name: one.scratch_slots for one in drafters if one.scratch_slots}
        self.depths = {drafter.name: drafter.depth for drafter in drafters}
        self._prices = {drafter.name: drafter.pass_bytes / pass_bytes if pass_bytes else 0.0 for drafter in drafters}
        self.retire(())

    def bind(self, cache: KVCache, first_layer: int) -> None:
        """Hand every drafter its layers, which follow the target's, and its taps."""
        self._on_cuda = bool(cache.layers) and cache.layers[0].k.is_cuda
        target_layers = cache.layers[:first_layer]
        for drafter in self.drafters:
            last = first_layer + len(drafter.kv_layers)
            drafter.bind(cache.layers[first_layer:last], cache.block_size)
            first_layer = last
            if drafter.reads_kv:
                drafter.bind_target(target_layers, cache.block_size)
        for tapped in self._devices:
            if tapped.taps:
                tapped.bind_taps(self._ring, [self.taps.index(tap) for tap in tapped.taps])

    def retire(self, names: Collection[str]) -> None:
        """Switch drafters off for good."""
        self.retired = frozenset(names)
        self._working = [drafter for drafter in self.drafters if drafter.name not in self.retired]
        self._hosts = [drafter for drafter in self._working if isinstance(drafter, HostDrafter)]
        self._devices = [drafter for name, drafter in self._on_device.items() if name not in self.retired]
        self.working = tuple(drafter.name for drafter in self._working)
        named = {drafter.name for drafter in self._hosts if drafter.only_by_name}
        automatic = tuple(name for name in self.working if name not in named)
        self._serving: dict[str, tuple[str, ...]] = {AUTO: automatic}
        self.has_model = not self._models.isdisjoint(automatic)
        self._learning = [drafter for drafter in self._working if drafter.feedback]
        self._feedback = max([drafter.feedback for drafter in self._learning if drafter.name not in named], default=0)
        self.begins = frozenset(drafter.name for drafter in self._devices)  # they may begin drafts behind a step

    def close(self) -> None:
        """Close the drafters, which store what the next run can use."""
        for drafter in self.drafters:
            drafter.close()
        self.drafters = ()
        self.retire(())

    # -- offers

    def offers(self, sequences: SequenceOf[Sequence]) -> StepOffers:
        return StepOffers(self, sequences)

    def serving(self, wish: str) -> tuple[str, ...]:
        """Return the working drafters that may draft for a request of this method, or by a name of their own."""
        if wish not in self._serving:
            self._serving[wish] = tuple(name for name in self.working if matches_method(name, wish))
        return self._serving[wish]

    def offer(self, method: str, rows: SequenceOf[int], sequences: SequenceOf[Sequence]) -> Offer:
        """Return one drafter's offer for sequences; `rows` are their rows in the step."""
        drafter = self._by_name[method]
        levels = self._levels(drafter, sequences)
        if not all(levels):
            rows, sequences = list(compress(rows, levels)), list(compress(sequences, levels))
            levels = [level for level in levels if level]
        needs_model = method in self._models
        unread = [self._unread_tokens(drafter, one) for one in sequences] if needs_model else ()
        return Offer(method, rows, levels, unread, self._prices[method], needs_model, drafter.trees, drafter.depth)

    def _levels(self, drafter: Drafter, sequences: SequenceOf[Sequence]) -> list[int]:
        """Return the level of each sequence; 0: its draft would be empty, or the drafter failed."""
        if isinstance(drafter, HostDrafter):
            try:
                levels = drafter.levels(sequences)
                if levels is not None and len(levels) != len(sequences):
                    raise ValueError(f"{len(levels)} answers for {len(sequences)} sequences")
                if levels is not None:
                    return levels
            except Exception as problem:  # one sequence may be the cause: ask for each alone
                self._report(drafter, "failed to say what it knows", problem)
        return [self._level(drafter, sequence) for sequence in sequences]

    def _level(self, drafter: Drafter, sequence: Sequence) -> int:
        try:
            first = len(sequence.tokens) - sequence.num_prompt < FIRST_TOKENS
            return 0 if first and drafter.unread_tokens(sequence) > SMALL_LAG else drafter.level(sequence)
        except Exception as problem:
            self._report(drafter, "failed to say what it knows", problem)
            return 0

    # -- proposals

    def propose(self, batch: Batch, min_node_probability: float = 0.0) -> Draft:
        """Return one draft row per sampling row; a row without a method, or whose drafter failed, stays empty.

        `min_node_probability`: as in `DraftRequest`.
        """
        early, self._early, self._timed = self._early, {}, {}
        if not batch.num_drafted:
            return self._empty(len(batch.sampling))
        rows, place = len(batch.sampling), batch.place
        requests: dict[str, list[tuple[int, DraftRequest]]] = {}  # method -> row of the draft, and its request
        for index, (method, max_nodes) in batch.drafts.items():
            if method not in self.retired:
                request = DraftRequest(batch.sequences[index], max_nodes, min_node_probability)
                requests.setdefault(method, []).append((place[index], request))
        parts: list[tuple[list[int], Draft]] = []
        for method, asked in requests.items():
            begun, ready = early.get(method), list[tuple[int, DraftRequest]]()
            if begun is not None and begun.read:
                ready = [one for one in asked if one[1].sequence.key in begun.rows]
                asked = [one for one in asked if one[1].sequence.key not in begun.rows]
                if ready:
                    parts.append(([row for row, _ in ready], self._use_early(begun, method, [one for _, one in ready])))
            if asked:
                draft = self._draft(method, [one for _, one in asked], alone=not ready)
                if draft is not None:
                    parts.append(([row for row, _ in asked], draft))
        return merge_drafts(parts, rows, self._vocab_size) if parts else self._empty(rows)

    def begin_early(self, batch: Batch, rows: SequenceOf[tuple[int, int]], unread: UnreadVerdict | None) -> None:
        """Begin drafts behind a step under way, for rows of its batch with the nodes each may have in the next."""
        if unread is None:
            return
        place = batch.place
        for drafter in self._devices:
            its_own = [(index, nodes) for index, nodes in rows if batch.drafts[index][0] == drafter.name]
            if not its_own:
                continue
            requests = [DraftRequest(batch.sequences[index], nodes) for index, nodes in its_own]
            behind = replace(unread, rows=[place[index] for index, _ in its_own])
            with Stopwatch(unread.tokens.is_cuda) as watch:
                draft = self._propose(drafter, requests, behind)
            if draft is not None and draft.width:
                counts = draft.num_nodes.tolist()
                row_of = {one.sequence.key: row for row, one in enumerate(requests) if counts[row]}
                watch_or_none = watch if drafter.time_is_typical else None
                self._early[drafter.name] = EarlyDraft(draft, row_of, drafter.passes, watch_or_none)

    def _use_early(self, begun: EarlyDraft, method: str, requests: list[DraftRequest]) -> Draft:
        """Return the rows of an early draft, cut to the nodes that are requested now."""
        drafter, rows = self._on_device[method], [begun.rows[one.sequence.key] for one in requests]
        begun_nodes = begun.draft.num_nodes.tolist()
        counts = [min(one.max_nodes, begun_nodes[row]) for one, row in zip(requests, rows, strict=True)]
        if begun.watch is not None:
            self._timed[method] = _Timed(begun.passes, 0, begun.watch, before=True)
        drafter.use_early([DraftRequest(one.sequence, count) for one, count in zip(requests, counts, strict=True)])
        return begun.draft.take(rows, counts)

    def _draft(self, method: str, requests: list[DraftRequest], *, alone: bool) -> Draft | None:
        """Draft now, and time it; `alone`: no other rows' early drafts of the method are used in the step."""
        drafter, on_device = self._by_name[method], self._on_device.get(method)
        unread = sum([self._unread_tokens(drafter, one.sequence) for one in requests])
        with Stopwatch(on_device is not None and self._on_cuda) as watch:
            draft = self._propose(drafter, requests)
        if draft is not None:
            self._timed.pop(method, None)
            if on_device is None or (on_device.time_is_typical and alone):
                self._timed[method] = _Timed(drafter.passes, unread, watch)
        return draft

    def draft_work(self) -> tuple[dict[str, DraftWork], float]:
        """Return the work of each method's drafts, and the seconds of those launched in the step before."""
        work = {name: DraftWork(one.passes, one.unread, one.watch.seconds) for name, one in self._timed.items()}
        return work, sum([work[name].seconds for name, one in self._timed.items() if one.before])

    def _unread_tokens(self, drafter: Drafter, sequence: Sequence) -> int:
        """Return the tokens that a drafter reads before it drafts; a lookup reads none."""
        if drafter.name not in self._models:
            return 0
        try:
            return drafter.unread_tokens(sequence)
        except Exception:  # it fails again, and is reported, when it drafts
            return 0

    def _propose(self, drafter: Drafter, rows: list[DraftRequest], after: UnreadVerdict | None = None) -> Draft | None:
        try:
            draft = drafter.propose(rows) if after is None else self._on_device[drafter.name].propose(rows, after)
            draft.validate(self._vocab_size)
            if draft.batch != len(rows):
                raise ValueError(f"{draft.batch} drafts for {len(rows)} rows")
            if any(map(operator.gt, draft.shape.num_nodes, [row.max_nodes for row in rows])):
                raise ValueError("more nodes than max_nodes of its row")
            # A draft that is only on the device is not checked: to look at its q is to wait.
            if draft.q is not None and not draft.tokens_on_device and not bool(torch.isfinite(draft.q.probs).all()):
                raise ValueError("q is not finite")
            return draft.repaired(self._vocab_size)  # in this place a draft begun behind a step costs no time
        except Exception as problem:  # whatever it is, the answer does not depend on it
            self.failures += 1
            self._report(drafter, "failed, decoding plainly where it does", problem)
            return None

    def _report(self, drafter: Drafter, failure: str, problem: Exception) -> None:
        """Warn once of each kind of failure: it may come at every step."""
        again = (drafter.name, failure, type(problem)) in self._reported
        self._reported.add((drafter.name, failure, type(problem)))
        log.log(logging.DEBUG if again else logging.WARNING, "drafter %s %s: %r", drafter.name, failure, problem)

    # -- bookkeeping

    def gather(self, flight: InFlightStep, taps: Tensor) -> None:
        """Keep the taps of a launched pass: of committed positions in the ring; those of prompts are read at once."""
        batch, layout, verdict = flight.batch, flight.layout, flight.verdict
        chunks: list[PromptChunk] = []
        for index in batch.chunks:
            sequence, begin = batch.sequences[index], int(layout.shape.begin[index])
            first, count, samples = int(batch.first[index]), int(batch.count[index]), bool(batch.samples[index])
            if count > samples:  # the token after the last one is the verdict's, where the row samples
                chunks.append(PromptChunk(sequence, first, count - samples, begin))
            tokens, last = sequence.tokens, first + count - 1
            if not samples and last == len(tokens) - 2 and len(tokens) > sequence.num_prompt:
                # All but the last token of a resumed sequence are recomputed, so the next step may draft. No verdict
                # covers this position: its taps are written here.
                self._ring.put(sequence.req_index, last, taps[begin + count - 1], tokens[-1])
        tapped = [drafter for drafter in self._devices if drafter.taps]
        for drafter in tapped if chunks else ():
            self._safely(drafter, drafter.read_chunks, chunks, taps)
        if verdict is not None:
            sequences, most = batch.sampled_sequences, flight.draft.max_depth + 1
            req_indices = [sequence.req_index for sequence in sequences]
            for drafter in tapped:
                self._safely(drafter, drafter.before_store, sequences, most)
            if taps.is_cpu:
                numbers = batch.sampled_lengths.tolist(), layout.shape.node_rows.tolist()
                rows = map(CommittedRow, req_indices, *numbers, verdict.rows)
                self._ring.store_on_host(rows, taps, 1 + max(req_indices))
            elif flight.unread is not None:
                self._ring.store(flight.unread, taps, 1 + max(req_indices))

    def on_verdict(self, batch: Batch, sequences: SequenceOf[Sequence]) -> None:
        """Hand each drafter its drafts that were verified, and the sequences with early drafts, among those that
        committed tokens in the step."""
        for begun in self._early.values():
            begun.read = True
        if not batch.drafts:
            return
        method_of = {batch.sequences[index].key: method for index, (method, _) in batch.drafts.items()}
        for drafter in self._devices:
            name = drafter.name
            rows = self._early[name].rows if name in self._early else {}
            verified = [VerifiedDraft(one, one.num_computed) for one in sequences if method_of.get(one.key) == name]
            early = [sequence for sequence in sequences if sequence.key in rows]
            if verified or early:
                self._safely(drafter, drafter.on_verdict, verified, early)

    def feedback_of(self, batch: Batch) -> int:
        """Return the number of likeliest tokens of each verified row that drafters want of a step. A drafter that
        `auto` never chooses wants those of its own drafts."""
        if not self._learning or not batch.drafts:
            return self._feedback
        methods = {method for method, _ in batch.drafts.values()}
        return max([self._feedback, *(drafter.feedback for drafter in self._learning if drafter.name in methods)])

    def on_feedback(self, feedback: Feedback) -> None:
        """Hand the likeliest tokens of the verified rows to each drafter that asks for them."""
        for drafter in self._learning:
            self._safely(drafter, drafter.on_feedback, feedback.first(drafter.feedback))

    def on_publish(self, batch: Batch, result: StepResult, grown: SequenceOf[Sequence]) -> None:
        """Count first drafts, index computed chunks of prompts, and mark blocks of sequences that have `grown`."""
        for at, draft in result.drafts.items() if self._first_drafts else ():
            if draft.method in self._first_drafts:
                path = range(draft.accepted) if result.paths is None else result.paths(at)
                self._count_first(draft.method, draft.accepted > 0 and path[0] == 0)
        for index in batch.chunks:
            sequence, end = batch.sequences[index], int(batch.ends[index])
            for host in self._hosts if not sequence.finished else ():
                self._safely(host, host.index_prompt, sequence, min(end, sequence.num_prompt))
        for drafter in self._devices if grown else ():
            if drafter.kv_layers:
                self._safely(drafter, self._mark, drafter, grown)

    def _count_first(self, method: str, right: bool) -> None:
        """Count a drafter's first drafts; `right`: the first node, the likeliest token, was accepted. A trained drafter
        that is hardly ever right was trained for another model or reads the wrong layers; no output shows that, so it
        is reported, once. A tree's other nodes do not count: of eight, one is often right."""
        drafts, hits = self._first_drafts[method]
        self._first_drafts[method] = drafts, hits = drafts + 1, hits + right
        if drafts == TRIAL:
            del self._first_drafts[method]
            if hits < SUSPICIOUS * TRIAL:
                log.warning(
                    "drafter %s: only %d of its first %d drafts were right about the next token; is it for this model?",
                    *(method, hits, drafts),
                )

    def _mark(self, drafter: DeviceDrafter, sequences: SequenceOf[Sequence]) -> None:
        for sequence in sequences:
            self._blocks.mark(sequence, drafter.version, *drafter.kv_range(sequence))

    def joined(self, sequence: Sequence) -> None:
        """Admit a sequence with a prefix of cached blocks; each drafter may use those marked for it."""
        for drafter in self._working:
            marked = bool(drafter.kv_layers)
            start = self._blocks.marked_from(sequence, drafter.version) if marked else sequence.num_cached
            self._safely(drafter, drafter.admit, sequence, start, sequence.num_cached)

    def left(self, sequence: Sequence) -> None:
        for begun in self._early.values():
            begun.rows.pop(sequence.key, None)
        for drafter in self._working:
            self._safely(drafter, drafter.release, sequence)

    def _safely(self, drafter: Drafter, work: Callable[..., None], *args: Any) -> None:
        """Switch off a drafter that fails at bookkeeping: it no longer knows where its sequences are."""
        try:
            work(*args)
        except Exception as problem:
            self.failures += 1
            self.retire(self.retired | {drafter.name})
            log.warning("drafter %s failed and is switched off: %r", drafter.name, problem)


def _needs_model(drafter: Drafter) -> bool:
    """Return whether a token ahead costs a pass: the drafter is no lookup, or reads tokens before it drafts."""
    own_unread_tokens: object = type(drafter).unread_tokens
    return not isinstance(drafter, HostDrafter) or own_unread_tokens is not HostDrafter.unread_tokens
