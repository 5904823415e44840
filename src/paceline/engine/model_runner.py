"""One flight: draft, one target pass over everything scheduled, verify, move accepted paths into place. Plain decoding
is the empty draft."""

from __future__ import annotations

import time
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.draft import Draft, Verdict, packed_to, sent
from paceline.engine.batch import Batch, Stage
from paceline.engine.drafting import DrafterSet
from paceline.engine.layout import Layout, filled_in, lay_out
from paceline.engine.policy import DEEPEST
from paceline.engine.relay import Relay
from paceline.engine.sampler import Sampler
from paceline.models.chain import Said
from paceline.models.decoder import Model
from paceline.models.kv_cache import KVCache
from paceline.models.rehearse import verifying
from paceline.models.staging import Buffer, Staging

UNREAD = 4  # verdicts under way or still looked at, at most


class Reading:
    """A verdict on its way to the host: the copy is asked for at once, and waited for when it is read."""

    def __init__(self, verdict: Verdict, staging: Staging) -> None:
        self._verdict = verdict
        self._arrived: Any = None  # an event; None: it was here at once
        if verdict.tokens.is_cuda:
            self._comes_in(staging.fetch(verdict.pack().view(torch.int32)))

    def _comes_in(self, buffer: Buffer) -> None:
        rows, depth = self._verdict.path.shape
        places, _ = Verdict.places(self._verdict.packed_rows or rows, depth)
        self._arrived, packed = buffer.over, buffer.ints.view(np.uint8)
        self._said = packed[: places[1].stop].view(np.int64), packed[places[3]]
        self._counts = places[1].start // 8

    @property
    def parts(self) -> tuple[int, int, int]:
        """Addresses of the tokens and of how many were accepted, by row, and the places a row has for tokens."""
        tokens, accepted = self._verdict.tokens, self._verdict.num_accepted
        if self._arrived is None:
            return tokens.data_ptr(), accepted.data_ptr(), tokens.shape[1]
        at: int = self._said[0].ctypes.data
        return at, at + 8 * self._counts, tokens.shape[1]

    def wait(self) -> None:
        if self._arrived is not None:
            self._arrived.synchronize()

    @property
    def there(self) -> bool:
        """Whether reading it would wait no more; on a CPU it was there at once, which says nothing."""
        return self._arrived is not None and bool(self._arrived.query())

    def spoken(self) -> list[int]:
        """By row, where nothing was drafted: its token."""
        if self._arrived is None:
            return self._verdict.tokens[:, 0].tolist()
        self.wait()
        tokens: list[int] = self._said[0][: len(self._verdict.tokens)].tolist()
        return tokens

    def said(self) -> list[tuple[list[int], int, list[int]]]:
        """By row: committed tokens, how many of them were drafted, and the kind of each."""
        if self._arrived is None:
            of = self._verdict
            tokens, counts, kinds = of.tokens.flatten().tolist(), of.num_accepted.tolist(), of.kinds.flatten().tolist()
        else:
            self.wait()
            tokens, kinds = (part.tolist() for part in self._said)
            counts = tokens[self._counts :]
        rows, width = self._verdict.tokens.shape
        return [
            (tokens[begin : begin + count + 1], count, kinds[begin : begin + count + 1])
            for begin, count in zip(range(0, rows * width, width), counts, strict=False)  # there may be more
        ]


@dataclass
class Flight:
    """A step under way. Reading its verdict is the step's one copy from the device."""

    layout: Layout
    draft: Draft
    verdict: Verdict | None  # None: no row sampled
    reading: Reading | None  # the same, once it is on the host
    hidden: Tensor | None  # (M, T, H) taps of every row of the pass
    model_s: float
    warm: bool = field(default=True, kw_only=True)  # it took what its like will take again
    stage: Stage | None = field(default=None, kw_only=True)  # it was launched before the step before it was read

    @property
    def over(self) -> bool:
        return self.reading is not None and self.reading.there

    def read_verdicts(self) -> dict[int, tuple[list[int], int, list[int]]]:
        """By row of the batch: committed tokens, how many of them were drafted, and the kind of each."""
        return {} if self.reading is None else dict(zip(self.layout.sampled, self.reading.said(), strict=True))

    def logprobs(self, span: int) -> list[dict[int, tuple[float, int]]]:
        """Per committed token: the chosen token's and the most likely tokens' (logprob, rank), as many as asked for."""
        wanted = self.layout.rows[span].sequence.params.logprobs
        if wanted is None or self.verdict is None or self.verdict.logprobs is None:
            return []
        row, logprobs = self.layout.sampled.index(span), self.verdict.logprobs
        entries = []
        for at in range(int(self.verdict.num_accepted[row]) + 1):
            best = zip(
                logprobs.top_tokens[row, at, :wanted].tolist(), logprobs.top[row, at, :wanted].tolist(), strict=True
            )
            entry = {token: (value, rank) for rank, (token, value) in enumerate(best, start=1)}
            chosen = int(self.verdict.tokens[row, at])
            entries.append({chosen: (float(logprobs.chosen[row, at]), int(logprobs.rank[row, at]))} | entry)
        return entries

    def taps(self, span: int, accepted: int) -> Tensor | None:
        """(count + accepted, T, H): hidden states of the span's tokens, then of the accepted path."""
        if self.hidden is None:
            return None
        place = self.layout.spans[span]
        tokens = self.hidden[place.begin : place.nodes]
        if not accepted or self.verdict is None:
            return tokens
        path = self.verdict.path[self.layout.sampled.index(span), :accepted]
        return torch.cat([tokens, self.hidden[place.nodes + path]])


class ModelRunner:
    def __init__(self, model: Model, cache: KVCache, drafters: DrafterSet, sampler: Sampler) -> None:
        self.model, self.cache, self.drafters, self.sampler = model, cache, drafters, sampler
        self._caches = cache.layers[: len(model.kv_specs)]
        self._staging = Staging(model.device, UNREAD)
        # What is begun early taps nothing.
        self.relay = None if drafters.taps else Relay.of(model, drafters.drafters, cache.block_size)

    def prepare(self, most_sequences: int, most_rows: int) -> None:
        """Compile and record beforehand what steps would wait for when they first come, where that is so."""
        shapes = verifying(most_sequences, most_rows, DEEPEST if self.drafters.drafters else 0)
        if self.model.prepare(self._caches, self.cache.block_size, self.drafters.taps, shapes):
            self.sampler.rehearse()
            if self.drafters.drafters:
                self.cache.rehearse()

    @torch.inference_mode()
    def launch(self, batch: Batch) -> Flight:
        if self.relay is not None and self.relay.works:
            try:
                self.relay.begin(batch)
            except Exception as problem:  # the step is taken as ever
                self.relay.give_up(problem)
        draft = self.drafters.propose([row for row in batch.rows if row.samples])
        layout = lay_out(batch, draft, self.cache.block_size)
        if draft.width and draft.unseen:
            layout.tokens = filled_in(layout.tokens, draft)
        return self._fly(layout, draft)

    @torch.inference_mode()
    def draft_ahead(self, flight: Flight, rows: list[tuple[int, int]]) -> None:
        """Let drafters that can go on behind a flight: rows of its batch, each with the nodes it may have next."""
        if flight.verdict is not None and rows:
            places = {index: at for at, index in enumerate(flight.layout.sampled)}
            said = Said(flight.verdict.tokens, flight.verdict.num_accepted, [places[index] for index, _ in rows])
            self.drafters.draft_ahead([(flight.layout.rows[index], budget) for index, budget in rows], said)

    @torch.inference_mode()
    def launch_after(self, flight: Flight, batch: Batch, going: SequenceOf[int]) -> Flight:
        """Plain decoding of tokens the host has not seen: those the rows `going` of a flight say."""
        assert flight.verdict is not None
        tokens = flight.verdict.tokens[:, 0]
        if len(going) < len(tokens):
            (at,) = packed_to(tokens.device, torch.tensor(going))
            tokens = tokens[at]
        draft = self.drafters.nothing(len(batch.rows))
        layout = lay_out(batch, draft, self.cache.block_size, tokens)
        return self._fly(layout, draft, batch.stage)

    def _fly(self, layout: Layout, draft: Draft, stage: Stage | None = None) -> Flight:
        started = time.perf_counter()
        output = self.model.forward(layout.tokens, layout.plan, self._caches, layout.logit_rows, self.drafters.taps)
        model_s = time.perf_counter() - started
        if stage is None:
            sequences, lengths = [layout.rows[index].sequence for index in layout.sampled], None
        else:
            sequences, lengths = stage.company.sequences, stage.first + 1
        verdict = reading = None
        warm = output.warm
        if sequences:
            verdict = self.sampler.verify(
                sequences, draft, output.logits, layout.logit_row_of, only_chains=not layout.is_tree, lengths=lengths
            )
            reading, warm = Reading(verdict, self._staging), warm and self.sampler.warm
            if layout.is_tree:  # so far the slots are their sequences' own, whoever ends before the verdict is read
                self.cache.compact(sent(branched(layout), verdict.path.device), verdict.path)
        return Flight(layout, draft, verdict, reading, output.taps, model_s, warm=warm, stage=stage)


def branched(layout: Layout) -> Tensor:
    """(T, 1 + N) of the sequences whose draft branches: which of those that sample it is, and the slots of its nodes;
    there may be any slot beyond the last."""
    rows = np.array([at for at, index in enumerate(layout.sampled) if index in layout.trees])
    nodes = layout.logit_rows.numpy()[layout.logit_row_of.numpy()[rows, 1:]]  # rows of the pass
    return torch.from_numpy(np.column_stack((rows, layout.plan.slots.numpy()[nodes])))
