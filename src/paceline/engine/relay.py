"""From one step to the next with little Python between them, where drafts are looked up.

With k fixed, what the next pass is follows from the verdict alone, as long as everybody goes on. So all else is
prepared while that is waited for, and native code (models/native/relay.h) takes in what was said, drafts, and writes
the pass, which begins at once (`hand_over`). Elsewhere it is planned first, and then drafted for and written in the
same way (`begin`). The engine goes through the step as ever, with the device busy meanwhile, and finds the pass it asks
for under way. Should it ask for another, that is computed as if this one had never been: what is begun here changes
when an answer comes, never what it says.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Collection, Mapping
from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from paceline.drafters import Drafter
from paceline.drafters.lookup import LookupDrafter
from paceline.drafters.native_lookup import PLANES, NativeForm
from paceline.engine.batch import Batch, Ints, Tables
from paceline.models.decoder import Model
from paceline.models.graphs import Coming, PassGraphs
from paceline.models.native_kernels import Library, load_library
from paceline.models.native_relay import Place, Step
from paceline.sequence import Sequence

log = logging.getLogger("paceline")
if TYPE_CHECKING:
    from paceline.engine.model_runner import Reading

Lookups = Mapping[str, tuple[LookupDrafter[Any], NativeForm[Any]]]


class Relay:
    def __init__(
        self, graphs: PassGraphs, vocab_size: int, block_size: int, library: Library, lookups: Lookups
    ) -> None:
        self._graphs, self._lookups = graphs, lookups
        self._write = library.function("relay_pass")
        self._step = Step(vocab=vocab_size, block_size=block_size)
        self._at = ctypes.addressof(self._step)
        self._handed_over = False  # the pass of the next step is begun, or was refused
        self.works = True
        self.begun = 0  # passes

    @staticmethod
    def of(model: Model, drafters: SequenceOf[Drafter], block_size: int) -> Relay | None:
        """None where no pass is recorded, or nobody looks drafts up in native code: there is nothing to win."""
        graphs, library = getattr(model, "graphs", None), load_library()
        lookups = {
            one.name: (one, one.form)
            for one in drafters
            if isinstance(one, LookupDrafter) and isinstance(one.form, NativeForm)
        }
        if graphs is None or library is None or not lookups:
            return None
        return Relay(graphs, model.config.vocab_size, block_size, library, lookups)

    def knows(self, method: str) -> bool:
        return method in self._lookups

    @torch.inference_mode()
    def hand_over(
        self,
        reading: Reading,
        sequences: SequenceOf[Sequence],
        method: str,
        budgets: SequenceOf[int],
        tables: Tables,
        ends: Collection[int],
    ) -> None:
        """Wait for the verdict on these sequences and begin the pass after it, for which `tables` have room.

        `ends`: what may be somebody's last.
        """
        lookup, form = self._lookups[method]
        said, accepted, width = reading.parts
        states = [lookup.state_of(sequence) for sequence in sequences]
        for state in states:
            form.ready(state, width)
        lengths, limits = [len(one.tokens) for one in sequences], [one.max_len for one in sequences]
        given = np.array([*(state.address for state in states), *lengths, *limits, *budgets, *ends], np.int64)
        found = np.empty((3 + PLANES * max(budgets), len(states)), np.int64)
        self._point_to(given, found, tables)
        step = self._step
        step.said, step.accepted, step.width = said, accepted, width
        step.num_ends, step.found = len(ends), 0
        reading.wait()
        answer = None
        try:
            answer = form.relay(self._at)
            self._handed_over = answer != 0
            if answer > 0:
                self._begin()
        finally:
            for state, evidence, length in zip(states, *found[:2].tolist(), strict=True) if answer else ():
                state.evidence, state.at, state.indexed = evidence, length, length
            for state in states if answer is None else ():  # what was taken in is not known
                lookup.admit(state.sequence, 0, 0)

    @torch.inference_mode()
    def begin(self, batch: Batch) -> None:
        """Begin the pass of a batch that is planned, before its drafts are made and it is laid out by the book."""
        if self._handed_over:
            self._handed_over = False
            return
        rows = batch.rows
        drafting: dict[str, list[int]] = {}
        for at, row in enumerate(rows):
            if row.budget:
                drafting.setdefault(row.method, []).append(at)
        by_lookup = drafting and self._lookups.keys() >= drafting.keys()
        if not by_lookup or not batch.only_decodes or not all(row.samples for row in rows):
            return
        texts, none = [0] * len(rows), [0] * len(rows)
        for method, members in drafting.items():
            states = self._lookups[method][0].looked_up([rows[at].sequence for at in members])
            for at, state in zip(members, states, strict=True):
                texts[at] = state.address
        budgets, limits = [row.budget for row in rows], [row.sequence.max_len for row in rows]
        tokens = [row.sequence.tokens[row.first] for row in rows]
        given = np.array([*texts, *(row.first for row in rows), *limits, *budgets, *tokens, *none], np.int64)
        found = np.zeros((3 + PLANES * max(budgets), len(rows)), np.int64)
        self._point_to(given, found, batch.tables)
        step = self._step
        step.said, step.accepted, step.width = step.ends, step.ends + 8 * len(rows), 1
        step.num_ends, step.found = 0, 1
        for method, members in drafting.items():
            found[0] = 0
            found[0, members] = 1
            if self._lookups[method][1].relay(self._at) < 0:
                return
        self._begin()

    def _point_to(self, given: Ints, found: Ints, tables: Tables) -> None:
        """`given`: by row texts, lengths, limits and budgets, and then ends; all must outlive the call that follows."""
        step, rows = self._step, found.shape[1]
        at, each = given.ctypes.data, given.itemsize * rows
        step.texts, step.lengths, step.limits, step.budgets, step.ends = range(at, at + 5 * each, each)
        step.rows, step.most = rows, (len(found) - 3) // PLANES
        step.tables, step.table_width = tables.ctypes.data, tables.shape[1]
        step.evidence, step.nodes = found.ctypes.data, found.ctypes.data + 2 * each

    def _begin(self) -> None:
        step = self._step
        coming = Coming(step.pass_rows, step.longest, step.rows, step.path, step.max_len, step.table_width)
        self.begun += self._graphs.begin(coming, self._written)

    def give_up(self, problem: Exception) -> None:
        log.warning("passes are no longer begun by native code: %r", problem)
        self.works = False

    def forget_unsaid(self, sequences: SequenceOf[Sequence]) -> None:
        """A step was interrupted: what it would have said is perhaps taken in already, and may be said otherwise."""
        for lookup, _ in self._lookups.values():
            for sequence in sequences:
                if lookup.state_of(sequence).indexed > len(sequence.tokens):
                    lookup.admit(sequence, 0, 0)  # from the beginning

    def _written(self, place: Place, address: int) -> None:
        self._write(self._at, ctypes.addressof(place), address)
