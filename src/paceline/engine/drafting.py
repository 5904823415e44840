"""The drafters an engine runs, seen as one: who drafts for which row, who receives which taps.

A drafter that raises, returns NaN or breaks the contract costs its rows the speculation of that step, never the answer;
one that fails at bookkeeping is switched off.
"""

from __future__ import annotations

import functools
import logging
import operator
import time
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from paceline.draft import NO_METHOD, Draft
from paceline.drafters import Commit, Drafter, DraftRow
from paceline.drafters.base import DraftsAhead, HostDrafter
from paceline.engine.batch import Row
from paceline.engine.block_manager import BlockManager
from paceline.models.chain import Said
from paceline.models.kv_cache import KVCache, KVSpec
from paceline.sequence import Sequence

log = logging.getLogger("paceline")
READ_AHEAD = 8  # tokens a drafter may be behind in the ordinary course, on average

Computed = tuple[Sequence, int, int, Tensor | None, str]  # as `Commit`, with the taps of all drafters


class DrafterSet:
    def __init__(self, drafters: SequenceOf[Drafter], vocab_size: int) -> None:
        self.drafters = tuple(drafters)
        self._vocab_size = vocab_size
        self._by_name = {drafter.name: drafter for drafter in drafters}
        # Those on the host look at the tokens when they are asked, so they may be told of them later.
        self.patient = tuple(drafter for drafter in drafters if isinstance(drafter, HostDrafter))
        self.at_once = tuple(drafter for drafter in drafters if not isinstance(drafter, HostDrafter))
        self._on_device = {drafter.name: drafter for drafter in drafters if isinstance(drafter, DraftsAhead)}
        self.taps: tuple[int, ...] = tuple(dict.fromkeys(tap for drafter in drafters for tap in drafter.taps))
        self.failures = 0
        self.retired: frozenset[str] = frozenset()  # methods switched off
        self._complained: set[tuple[str, type]] = set()
        self.seconds: dict[str, tuple[int, float]] = {}  # of the last step: method -> (largest budget, seconds)
        self._empty = functools.lru_cache(64)(_empty)

    @property
    def kv_specs(self) -> tuple[KVSpec, ...]:
        return tuple(spec for drafter in self.drafters for spec in drafter.kv_layers)

    def bind(self, cache: KVCache, first_layer: int) -> None:
        """Hand every drafter its layers, which follow the target's."""
        for drafter in self.drafters:
            last = first_layer + len(drafter.kv_layers)
            drafter.bind(cache.layers[first_layer:last], cache.block_size)
            first_layer = last

    def propose(self, rows: SequenceOf[Row]) -> Draft:
        """One draft row per sampling row; rows without a method, or whose drafter failed, stay empty."""
        wanted: dict[str, list[int]] = {}
        for index, row in enumerate(rows):
            if row.budget > 0 and row.method not in self.retired:
                wanted.setdefault(row.method, []).append(index)
        parts = []
        self.seconds = {}
        for method, indices in wanted.items():
            drafter, wanting = self._by_name[method], [DraftRow(rows[i].sequence, rows[i].budget) for i in indices]
            behind = self._behind(drafter, wanting)
            started = time.perf_counter()
            draft = self._propose(drafter, wanting)
            if behind <= READ_AHEAD:  # catching up is not what a draft costs
                self.seconds[method] = max(row.budget for row in wanting), time.perf_counter() - started
            if draft is not None:
                parts.append((indices, draft))
        if not parts:
            return self._empty(len(rows))
        return Draft.merge(parts, len(rows), self._vocab_size)

    def nothing(self, batch: int) -> Draft:
        """For rows of which none drafts."""
        self.seconds = {}
        return self._empty(batch)

    @property
    def ahead(self) -> frozenset[str]:
        """Methods that may begin drafts behind a step under way."""
        return frozenset(self._on_device) - self.retired

    def draft_ahead(self, rows: SequenceOf[tuple[Row, int]], said: Said) -> None:
        """Rows whose drafts are judged in a step under way, with the nodes they may have in the next."""
        for name in self.ahead:
            drafter, mine = self._on_device[name], [at for at, (row, _) in enumerate(rows) if row.method == name]
            if mine:
                wanting = [DraftRow(rows[at][0].sequence, rows[at][1]) for at in mine]
                try:
                    drafter.draft_ahead(wanting, replace(said, rows=[said.rows[at] for at in mine]))
                except Exception as problem:
                    self._complain(self._by_name[name], problem)

    def time_devices(self) -> float:
        """Once a step is over: put what devices took to draft into `seconds`; how much of it was before the step."""
        before = 0.0
        for name, drafter in self._on_device.items():
            times = drafter.times() if name in self.seconds else None
            if times is not None:
                del self.seconds[name]
                if times.watch is not None:
                    self.seconds[name] = times.depth, times.watch.seconds
                    before += times.watch.seconds if times.ahead else 0.0
        return before

    @staticmethod
    def _behind(drafter: Drafter, rows: SequenceOf[DraftRow]) -> int:
        try:
            return sum(drafter.lag(row.sequence) for row in rows) // len(rows)
        except Exception:  # it will say so when it is asked to draft
            return READ_AHEAD + 1

    def _propose(self, drafter: Drafter, rows: list[DraftRow]) -> Draft | None:
        try:
            draft = drafter.propose(rows)
            draft.validate(self._vocab_size)
            if draft.batch != len(rows):
                raise ValueError(f"{draft.batch} drafts for {len(rows)} rows")
            budgets = [row.budget for row in rows]
            if draft.width > min(budgets) and any(map(operator.gt, draft.num_nodes.tolist(), budgets)):
                raise ValueError("more nodes than the budget of a row")
            # Of an unseen draft the drafter vouches for q: to look at it is to wait.
            if draft.q is not None and not draft.unseen and not bool(torch.isfinite(draft.q.probs).all()):
                raise ValueError("q is not finite")
            shape = () if draft.is_even else (draft.parents, draft.depth, draft.num_nodes)
            if any(part.dtype != torch.int64 for part in (draft.tokens, *shape)):
                raise ValueError("tokens, parents, depth and num_nodes must be int64")
        except Exception as problem:  # whatever it is, the answer does not depend on it
            self._complain(drafter, problem)
            return None
        return draft

    def _complain(self, drafter: Drafter, problem: Exception) -> None:
        self.failures += 1
        again = (drafter.name, type(problem)) in self._complained  # said once: it may fail at every step
        self._complained.add((drafter.name, type(problem)))
        level = logging.DEBUG if again else logging.WARNING
        log.log(level, "drafter %s failed, decoding plainly where it does: %r", drafter.name, problem)

    def overlap(self) -> None:
        """What may run while the device computes: host-side methods take in what was committed."""
        for drafter in self.patient:
            if drafter.name not in self.retired:
                with self._guarded(drafter):
                    drafter.overlap()

    def commit(self, drafters: SequenceOf[Drafter], commits: SequenceOf[Computed], blocks: BlockManager) -> None:
        """Tell some drafters what was computed, with their own taps, and mark the blocks they have completed."""
        for drafter in drafters:
            if drafter.name in self.retired:
                continue
            with self._guarded(drafter):
                columns = [self.taps.index(tap) for tap in drafter.taps]
                drafter.commit(
                    [
                        Commit(
                            sequence, first, count, None if taps is None or not columns else taps[:, columns], method
                        )
                        for sequence, first, count, taps, method in commits
                    ]
                )
                if drafter.kv_layers:
                    for sequence, *_ in commits:
                        blocks.mark(sequence, drafter.version, *drafter.absorbed(sequence))

    def admit(self, sequence: Sequence, blocks: BlockManager) -> None:
        """A sequence enters with a prefix of cached blocks: each drafter may use those marked for it."""
        for drafter in self._working():
            with self._guarded(drafter):
                start = blocks.marked_from(sequence, drafter.version) if drafter.kv_layers else sequence.num_cached
                drafter.admit(sequence, start, sequence.num_cached)

    def release(self, sequence: Sequence) -> None:
        for drafter in self._working():
            with self._guarded(drafter):
                drafter.release(sequence)

    def _working(self) -> list[Drafter]:
        return [drafter for drafter in self.drafters if drafter.name not in self.retired]

    @contextmanager
    def _guarded(self, drafter: Drafter) -> Iterator[None]:
        """A drafter that fails at bookkeeping no longer knows where its sequences stand: it drafts no more."""
        try:
            yield
        except Exception as problem:
            self.failures += 1
            self.retired |= {drafter.name}
            log.warning("drafter %s failed and is switched off: %r", drafter.name, problem)


def _empty(batch: int) -> Draft:
    return Draft.even(torch.empty(batch, 0, dtype=torch.int64), NO_METHOD)
