"""Sampling recorded once and replayed: what a row of a chain says is dozens of small kernels, and one launch.

Every number `propose` looks at lies in a fixed place. That is done for few rows that all draw in one way; for more, the
device has so much to do that launching kernel by kernel hides behind it.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import replace

import torch
from torch import Tensor

from paceline.controls import ControlsBuilder
from paceline.recorder import Recorder, Recording
from paceline.verify import Controls, Draws, Nodes, propose

log = logging.getLogger("paceline")
MOST_ROWS = 16
MOST = 48  # booths; the one not used for longest gives way
CONTROLS = ("temperature", "top_k", "top_p", "min_p")


class Booths:
    """One for each number of rows, rounded up, and way of drawing; made and recorded when it first occurs."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.builder = ControlsBuilder(vocab_size, frozenset(), device)
        self.vocab_size, self.device = vocab_size, device
        self._made: OrderedDict[tuple[object, ...], Booth] = OrderedDict()
        self._logits = torch.empty(0)  # what booths read, one at a time
        self._recorder = Recorder()

    def of(self, controls: Controls, draws: Draws) -> Booth | None:
        """None: too many rows, or rows that draw in different ways."""
        rows, seeded = len(draws.key), draws.coins is None
        drawing = draws.seeded if seeded else draws.coins
        if drawing is None or len(drawing) < rows or rows > MOST_ROWS or controls.edits:
            return None
        rows = 1 << (rows - 1).bit_length()
        key = (rows, seeded, *(getattr(controls, name) is None for name in CONTROLS))
        if key not in self._made:
            if not self._made:
                self._logits = torch.zeros(MOST_ROWS, self.vocab_size, device=self.device)
            self._made[key] = Booth(self._logits[:rows], controls, seeded, self._recorder)
            if len(self._made) > MOST:
                self._made.popitem(last=False)
        self._made.move_to_end(key)
        return self._made[key]


class Booth:
    """`propose` for up to so many rows. Rows nobody needs draw too, from nothing."""

    def __init__(self, logits: Tensor, like: Controls, seeded: bool, recorder: Recorder) -> None:
        self._logits, rows = logits, len(logits)
        every = self._every = torch.arange(rows, device=logits.device)
        self._key, self._committed, self._depth = (torch.zeros_like(every) for _ in range(3))

        def blank(part: Tensor | None) -> Tensor | None:
            return None if part is None else torch.ones(rows, dtype=part.dtype, device=part.device)

        self._controls = Controls(
            temperature=blank(like.temperature),
            top_k=blank(like.top_k),
            top_p=blank(like.top_p),
            min_p=blank(like.min_p),
        )
        self._draws = Draws(
            key=self._key, committed=self._committed, coins=None if seeded else every, seeded=every if seeded else None
        )
        self._recorder, self._records = recorder, logits.is_cuda
        self._recording: Recording | None = None

    def begin(self, controls: Controls, draws: Draws) -> None:
        """What is said next belongs to these requests, and nothing is drafted yet."""
        rows = len(draws.key)
        for name in CONTROLS:
            if (mine := getattr(self._controls, name)) is not None:
                mine[:rows] = getattr(controls, name)
        self._key[:rows] = draws.key
        self._committed[:rows] = draws.committed
        self._depth.zero_()

    def say(self, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        """As `propose`, each time for one token further. What it gives stands until the next time."""
        rows = len(logits)
        torch.nan_to_num(logits, out=self._logits[:rows])
        if self._recording is not None:
            self._recording.replay()
            tokens, q = self._recording.result
        else:
            tokens, q = self._propose()
            if self._records:
                self._record()
        return tokens[:rows], None if q is None else q[:rows]

    def _propose(self) -> tuple[Tensor, Tensor | None]:
        depth = self._depth.clone()
        nodes = Nodes(seq=self._every, node=depth - 1, depth=depth, path=depth.new_empty(len(depth), 0))
        controls = replace(self._controls)  # which remember, on a host, what their numbers were when first read
        said = propose(self._logits, controls, self._draws, nodes)
        self._depth += 1
        return said

    def _record(self) -> None:
        """Its kernels have just run, so they are compiled and loaded. What cannot be recorded runs as it is."""
        self._records = False
        try:
            self._recording = self._recorder.record(self._propose)
        except RuntimeError as problem:
            log.warning(
                "a way to draw drafts cannot be recorded, and runs as it is: %s", str(problem).partition("\n")[0]
            )
