"""From one step to the next without Python between them, where drafts are looked up and how many is fixed.

What the next pass is follows then from the verdict alone, as long as everybody goes on. So all else is prepared while
that is waited for, and native code (models/native/relay.h) takes in what was said, drafts, and writes the pass, which
begins at once. The engine goes through the step as ever, with the device busy meanwhile, and finds the pass it asks for
under way. Should it ask for another, that is computed as if this one had never been: what is begun here changes when
an answer comes, never what it says.
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Mapping
from collections.abc import Sequence as SequenceOf
from typing import Any

import numpy as np
import torch

from paceline.drafters import Drafter
from paceline.drafters.lookup import LookupDrafter
from paceline.drafters.native_lookup import PLANES, NativeForm
from paceline.engine.batch import Room
from paceline.engine.model_runner import Reading
from paceline.models.decoder import Model
from paceline.models.graphs import Coming, PassGraphs
from paceline.models.native_kernels import Library, load_library
from paceline.models.native_relay import Place, Step
from paceline.sequence import Sequence

Lookups = Mapping[str, tuple[LookupDrafter[Any], NativeForm[Any]]]


class Relay:
    def __init__(self, graphs: PassGraphs, vocab_size: int, library: Library, lookups: Lookups) -> None:
        self._graphs, self._lookups = graphs, lookups
        self._write = library.function("relay_pass")
        self._step = Step(vocab=vocab_size)
        self._at = ctypes.addressof(self._step)
        self.begun = 0  # passes

    @staticmethod
    def of(model: Model, drafters: SequenceOf[Drafter]) -> Relay | None:
        """None where no pass is recorded, or nobody looks drafts up in native code: there is nothing to win."""
        graphs, library = getattr(model, "graphs", None), load_library()
        lookups = {
            one.name: (one, one.form)
            for one in drafters
            if isinstance(one, LookupDrafter) and isinstance(one.form, NativeForm)
        }
        if graphs is None or library is None or not lookups:
            return None
        return Relay(graphs, model.config.vocab_size, library, lookups)

    def knows(self, method: str) -> bool:
        return method in self._lookups

    @torch.inference_mode()
    def hand_over(
        self,
        reading: Reading,
        sequences: SequenceOf[Sequence],
        method: str,
        budgets: SequenceOf[int],
        room: Room,
        ends: Collection[int],
    ) -> None:
        """Wait for the verdict on these sequences and begin the pass after it. `ends`: what may be somebody's last."""
        (lookup, form), step, rows, most = self._lookups[method], self._step, len(sequences), max(budgets)
        said, accepted, width = reading.parts
        states = [lookup.state_of(sequence) for sequence in sequences]
        for state in states:
            form.ready(state, width)
        lengths, limits = [len(one.tokens) for one in sequences], [one.max_len for one in sequences]
        given = np.array([*(state.address for state in states), *lengths, *limits, *budgets, *ends], np.int64)
        found, tables = np.empty((3 + PLANES * most, rows), np.int64), np.ascontiguousarray(room.tables)
        step.said, step.accepted, step.width, step.rows, step.most = said, accepted, width, rows, most
        at, each = given.ctypes.data, given.itemsize * rows
        step.texts, step.lengths, step.limits, step.budgets, step.ends = range(at, at + 5 * each, each)
        step.num_ends, step.block_size = len(ends), room.block_size
        step.tables, step.table_width = tables.ctypes.data, tables.shape[1]
        step.evidence, step.nodes = found.ctypes.data, found.ctypes.data + 2 * each
        reading.wait()
        answer = 0
        try:
            answer = form.relay(self._at)
            if answer > 0:
                coming = Coming(step.pass_rows, step.longest, rows, step.path, step.max_len, step.table_width)
                self.begun += self._graphs.begin(coming, self._written)
        finally:
            for state, evidence, length in zip(states, *found[:2].tolist(), strict=True) if answer else ():
                state.evidence, state.at, state.indexed = evidence, length, length

    def forget_unsaid(self, sequences: SequenceOf[Sequence]) -> None:
        """A step was interrupted: what it would have said is perhaps taken in already, and may be said otherwise."""
        for lookup, _ in self._lookups.values():
            for sequence in sequences:
                if lookup.state_of(sequence).indexed > len(sequence.tokens):
                    lookup.admit(sequence, 0, 0)  # from the beginning

    def _written(self, place: Place, address: int) -> None:
        self._write(self._at, ctypes.addressof(place), address)
