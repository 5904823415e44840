"""One flight: one target pass over everything scheduled, verification, accepted paths moved into place, taps gathered.

Plain decoding is the empty draft. Nothing here waits for the device: a verdict is copied to the host behind the
flight, and `Reading` waits for it when the engine reads it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.config import MAX_K
from paceline.draft import Draft, Logprobs, UnreadVerdict, Verdict, packed_to, sent
from paceline.engine.batch import Batch
from paceline.engine.drafting import DrafterSet
from paceline.engine.layout import Layout, filled_in, lay_out
from paceline.engine.policy import DEEPEST
from paceline.engine.prompt_logprobs import (
    PromptLogprobs,
    logprob_entries,
    look_at_prompts,
    moved_to_front,
    rows_with_logits,
)
from paceline.engine.sampler import Sampler
from paceline.models.decoder import Decoder, Model
from paceline.models.kv_cache import KVCache
from paceline.models.staging import Staging
from paceline.models.warmup import verifying
from paceline.sequence import Sequence, TokenLogprobs

Q_ROWS = 512  # rows of q of a captured verification: they take a row of the vocabulary each
UNREAD = 4  # verdicts under way or still looked at, at most


class Reading:
    """A verdict on its way to the host: the copy is asked for at once, and waited for when it is read."""

    def __init__(self, verdict: Verdict, staging: Staging) -> None:
        self._verdict = verdict
        self._arrived: Any = None  # an event; None: it was here at once
        self._logprobs = verdict.logprobs
        if verdict.tokens.is_cuda:
            if verdict.logprobs is not None:  # ahead of the verdict in the stream, so the same event covers them
                parts = {name: part.to("cpu", non_blocking=True) for name, part in vars(verdict.logprobs).items()}
                self._logprobs = Logprobs(**parts)
            self._fetch(staging)

    def _fetch(self, staging: Staging) -> None:
        buffer = staging.fetch(self._verdict.pack().view(torch.int32))
        rows, depth = self._verdict.path.shape
        places, _ = Verdict.places(self._verdict.packed_rows or rows, depth)
        self._arrived, packed = buffer.over, buffer.ints.view(np.uint8)
        numbers = [packed[place].view(np.int64) for place in places[:3]]
        self._parts: list[Any] = [*numbers, packed[places[3]]]  # tokens, accepted, path, kinds

    @property
    def there(self) -> bool:
        """Whether reading it would wait no more; on a CPU it was there at once, which says nothing."""
        return self._arrived is not None and bool(self._arrived.query())

    def read(self) -> tuple[list[list[int]], list[int]]:
        """By row: the tokens it commits, and how many of them were drafted."""
        rows, width = self._verdict.tokens.shape
        if self._arrived is None:
            tokens, accepted = self._verdict.tokens.flatten().tolist(), self._verdict.num_accepted.tolist()
        else:
            self._arrived.synchronize()
            tokens, accepted = (
                self._parts[0][: rows * width].tolist(),
                self._parts[1][:rows].tolist(),
            )  # more are packed
        if width == 1:
            return [[token] for token in tokens], accepted
        begins = range(0, rows * width, width)
        return [tokens[begin : begin + count + 1] for begin, count in zip(begins, accepted, strict=True)], accepted

    def kinds(self, row: int) -> list[int]:
        """Of a row's places for tokens, once it was read."""
        width = self._verdict.tokens.shape[1]
        part = self._verdict.kinds[row] if self._arrived is None else self._parts[3][row * width : (row + 1) * width]
        kinds: list[int] = part.tolist()
        return kinds

    def path(self, row: int, accepted: int) -> list[int]:
        """The nodes of a row's draft that were accepted, once it was read."""
        depth = self._verdict.path.shape[1]
        part = self._verdict.path[row] if self._arrived is None else self._parts[2][row * depth : (row + 1) * depth]
        path: list[int] = part[:accepted].tolist()
        return path

    def logprobs(self, row: int, tokens: list[int], most: int) -> list[TokenLogprobs]:
        """Of committed tokens of a row: the chosen token's, and those of the `most` most likely."""
        of = self._logprobs
        assert of is not None
        row_of = Logprobs(chosen=of.chosen[row], rank=of.rank[row], top_tokens=of.top_tokens[row], top=of.top[row])
        return logprob_entries(row_of, tokens, most)


@dataclass
class Flight:
    """A step under way. Reading its verdict is the step's one copy from the device."""

    batch: Batch
    layout: Layout
    draft: Draft
    unread: UnreadVerdict | None  # on the device; None: no row sampled
    reading: Reading | None
    model_s: float
    warm: bool  # it took what its like will take again
    ahead: bool = False  # launched before the step before it was read
    prompts: PromptLogprobs | None = None

    @property
    def over(self) -> bool:
        return self.reading is not None and self.reading.there

    @property
    def sequences(self) -> list[Sequence]:
        return self.batch.sequences


class Runner:
    def __init__(self, model: Model, cache: KVCache, drafters: DrafterSet, sampler: Sampler) -> None:
        self.model, self.cache, self.drafters, self.sampler = model, cache, drafters, sampler
        self._caches = cache.layers[: len(model.kv_specs)]
        self._staging = Staging(model.device, UNREAD)

    def prepare(self, most_sequences: int, most_rows: int) -> None:
        """Compile and capture beforehand what steps would wait for when they first come, where that is so."""
        trees = any(drafter.trees for drafter in self.drafters.drafters)
        deepest = DEEPEST if self.drafters.drafters else 0
        shapes = verifying(most_sequences, most_rows, deepest, MAX_K if trees else deepest)
        if self.model.prepare(self._caches, self.cache.block_size, self.drafters.taps, shapes):
            assert isinstance(self.model, Decoder)  # no other model prepares anything
            samples = any(drafter.on_device for drafter in self.drafters.drafters)
            q_rows = min(most_rows, Q_ROWS) if samples else 0
            self.sampler.warmup(self.model.logits_buffer, most_sequences, most_rows, q_rows=q_rows)
            if self.drafters.drafters:
                self.cache.warmup()

    @property
    def captured_late(self) -> int:
        """What steps have waited for because no warm-up met it."""
        graphs = getattr(self.model, "graphs", None)
        return self.sampler.captured_late + (0 if graphs is None else graphs.captured_late)

    def launch(self, batch: Batch, draft: Draft, after: Flight | None = None) -> Flight:
        """`after`: rows of the batch take tokens from its unread verdict."""
        draft = self._soundly(draft)
        layout = lay_out(batch, draft, self.cache.block_size)
        unseen = draft.tokens.flatten() if layout.unseen else None
        if after is not None and after.unread is not None:
            unseen = after.unread.tokens[:, 0].clamp_min(0)  # draft.INVALID is no token
        if unseen is not None:
            (codes,) = packed_to(unseen.device, layout.tokens.long())
            layout.tokens = filled_in(codes, unseen)
        started = time.perf_counter()
        rows = rows_with_logits(layout)
        output = self.model.forward(layout.tokens, layout.plan, self._caches, rows, self.drafters.taps)
        model_s = time.perf_counter() - started
        warm, unread, reading, logits, prompts = output.warm, None, None, output.logits, None
        if layout.prompts:  # more logits than such a pass computes otherwise: no measure for others
            prompts, warm = look_at_prompts(layout, rows, logits), False
            logits = moved_to_front(logits, torch.searchsorted(rows, layout.logit_rows))
        if len(batch.sampling):
            verdict = self.sampler.verify(
                batch.sampled_sequences,
                draft,
                logits,
                layout.logit_row_of,
                only_chains=not layout.is_tree,
                lengths=batch.sampled_lengths,
                seats=batch.sampled_seats,
            )
            reading, warm = Reading(verdict, self._staging), warm and self.sampler.warm
            if layout.tree_slots is not None:  # the slots are still the sequences' own, also of those that end here
                self.cache.compact(sent(layout.tree_slots, verdict.path.device), verdict.path)
            unread = self._unread(batch, layout, verdict, draft.max_depth, output.taps)
        if output.taps is not None:
            self.drafters.gather(batch, layout, unread, output.taps)
        return Flight(batch, layout, draft, unread, reading, model_s, warm, after is not None, prompts)

    def _soundly(self, draft: Draft) -> Draft:
        """Trees that only the device knows are placed there, where passes are captured; else they are read first."""
        if draft.device_parents is None:
            return draft
        vocab = self.model.config.vocab_size
        return draft.on_host(vocab) if getattr(self.model, "graphs", None) is None else draft.sound(vocab)

    def _unread(self, batch: Batch, layout: Layout, verdict: Verdict, depth: int, taps: Tensor | None) -> UnreadVerdict:
        """A captured verification's verdict is as wide as its graph: beyond the draft's depth nothing is committed, and
        drafters would absorb as many positions more."""
        at = batch.sampling
        rows, tokens, path = range(len(at)), verdict.tokens[:, : depth + 1], verdict.path[:, :depth]
        if taps is None and not self.drafters.begins:
            return UnreadVerdict(tokens=tokens, num_accepted=verdict.num_accepted, path=path, rows=rows)
        nodes_begin = layout.begin[at] + batch.count[at]
        columns = [torch.from_numpy(one) for one in (batch.sampled_lengths, nodes_begin, batch.sampled_seats)]
        length, node_row, seat = packed_to(verdict.tokens.device, *columns)
        return UnreadVerdict(
            tokens=tokens,
            num_accepted=verdict.num_accepted,
            path=path,
            rows=rows,
            length=length,
            node_row=node_row,
            seat=seat,
        )
