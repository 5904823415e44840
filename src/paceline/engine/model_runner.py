"""One flight: draft, one target pass over everything scheduled, verify, compact. Plain decoding is the empty draft."""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from paceline.draft import Draft, Verdict, packed_to
from paceline.engine.batch import Batch
from paceline.engine.budget import DEEPEST
from paceline.engine.drafting import DrafterSet
from paceline.engine.layout import Layout, filled_in, lay_out, slot
from paceline.engine.sampler import Sampler
from paceline.models.chain import Said
from paceline.models.decoder import Model
from paceline.models.kv_cache import KVCache
from paceline.models.rehearse import verifying
from paceline.models.staging import Staging

UNREAD = 4  # verdicts under way or still looked at, at most


class HostVerdict(NamedTuple):
    """As `Verdict`, in the host's memory."""

    tokens: np.ndarray[Any, np.dtype[np.int64]]
    num_accepted: np.ndarray[Any, np.dtype[np.int64]]
    path: np.ndarray[Any, np.dtype[np.int64]]
    kinds: np.ndarray[Any, np.dtype[np.uint8]]


class Reading:
    """A verdict on its way to the host: the copy is asked for at once, and waited for when it is read."""

    def __init__(self, verdict: Verdict, staging: Staging) -> None:
        self._verdict, self._arrived = verdict, None
        if verdict.tokens.is_cuda:
            places, _ = Verdict.places(*verdict.path.shape)
            buffer = staging.fetch(verdict.pack().view(torch.int32))
            self._arrived, self._packed = buffer.over, buffer.ints.view(np.uint8)
            self._said = self._packed[: places[1].stop].view(np.int64), self._packed[places[3]]
            self._counts = places[1].start // 8

    @property
    def there(self) -> bool:
        """Whether reading it would wait no more; on a CPU it was there at once, which says nothing."""
        return self._arrived is not None and bool(self._arrived.query())

    @functools.cached_property
    def verdict(self) -> HostVerdict:
        of = self._verdict
        if self._arrived is None:
            return HostVerdict(*(part.numpy() for part in (of.tokens, of.num_accepted, of.path, of.kinds)))
        self._arrived.synchronize()
        return unpack(self._packed, *of.path.shape)

    def said(self) -> list[tuple[list[int], int, list[int]]]:
        """By row: committed tokens, how many of them were drafted, and the kind of each."""
        if self._arrived is None:
            of = self._verdict
            tokens, counts, kinds = of.tokens.flatten().tolist(), of.num_accepted.tolist(), of.kinds.flatten().tolist()
        else:
            self._arrived.synchronize()
            tokens, kinds = (part.tolist() for part in self._said)
            counts = tokens[self._counts :]
        begins = range(0, len(kinds), self._verdict.tokens.shape[1])
        return [
            (tokens[begin : begin + count + 1], count, kinds[begin : begin + count + 1])
            for begin, count in zip(begins, counts, strict=True)
        ]


def unpack(packed: np.ndarray[Any, np.dtype[np.uint8]], batch: int, depth: int) -> HostVerdict:
    places, _ = Verdict.places(batch, depth)
    tokens, num_accepted, path = (packed[place].view(np.int64) for place in places[:3])
    kinds = packed[places[3]].reshape(batch, depth + 1)
    return HostVerdict(tokens.reshape(batch, depth + 1), num_accepted, path.reshape(batch, depth), kinds)


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
    ahead: bool = field(default=False, kw_only=True)  # it was launched before the step before it was read

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

    def prepare(self, most_sequences: int, most_rows: int) -> None:
        """Compile and record beforehand what steps would wait for when they first come, where that is so."""
        shapes = verifying(most_sequences, most_rows, DEEPEST if self.drafters.drafters else 0)
        if self.model.prepare(self._caches, self.cache.block_size, self.drafters.taps, shapes):
            self.sampler.rehearse()

    @torch.inference_mode()
    def launch(self, batch: Batch) -> Flight:
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
    def launch_after(self, flight: Flight, batch: Batch, going: list[int]) -> Flight:
        """Plain decoding of tokens the host has not seen: those the rows `going` of a flight say."""
        assert flight.verdict is not None
        tokens = flight.verdict.tokens[:, 0]
        if len(going) < len(tokens):
            (at,) = packed_to(tokens.device, torch.tensor(going))
            tokens = tokens[at]
        draft = self.drafters.propose(batch.rows)
        return self._fly(lay_out(batch, draft, self.cache.block_size, tokens), draft, ahead=1)

    def _fly(self, layout: Layout, draft: Draft, ahead: int = 0) -> Flight:
        started = time.perf_counter()
        output = self.model.forward(layout.tokens, layout.plan, self._caches, layout.logit_rows, self.drafters.taps)
        model_s = time.perf_counter() - started
        sequences = [layout.rows[index].sequence for index in layout.sampled]
        verdict = reading = None
        warm = output.warm
        if sequences:
            verdict = self.sampler.verify(
                sequences, draft, output.logits, layout.logit_row_of, only_chains=not layout.is_tree, ahead=ahead
            )
            reading, warm = Reading(verdict, self._staging), warm and self.sampler.warm
        return Flight(layout, draft, verdict, reading, output.taps, model_s, warm=warm, ahead=ahead > 0)

    @torch.inference_mode()
    def compact(self, flight: Flight) -> None:
        """Once a flight is over: move the K/V of accepted paths to where the block table expects them."""
        layout = flight.layout
        if not layout.is_tree or flight.reading is None:
            return
        size = self.cache.block_size
        source: list[int] = []
        target: list[int] = []
        for index, path in zip(layout.sampled, flight.reading.verdict.path.tolist(), strict=True):
            sequence = layout.rows[index].sequence
            if index not in layout.trees or sequence.finished:  # after the flight was launched
                continue
            length = len(sequence.tokens)
            for depth, node in enumerate(path):
                if node > depth:
                    source.append(slot(sequence, length + node, size))
                    target.append(slot(sequence, length + depth, size))
        if source:
            self.cache.move(*packed_to(self.model.device, torch.tensor(source), torch.tensor(target)))
