"""The launch of one step: one target pass over everything scheduled, verification, accepted paths moved into place,
taps gathered. Plain decoding is the empty draft.

Nothing in this file waits for the device: a verdict is copied to the host behind the step, and `VerdictCopy` waits for
it when the engine reads it.
"""

from __future__ import annotations

import time

import torch

from paceline.config import MAX_K
from paceline.core.draft import Draft, packed_to, sent
from paceline.engine.batch import Batch
from paceline.engine.drafter_set import DrafterSet
from paceline.engine.in_flight import FeedbackCopy, InFlightStep, VerdictCopy
from paceline.engine.layout import filled_in, lay_out
from paceline.engine.policy import DEEPEST
from paceline.engine.sampler import Sampler, look_at_prompts, moved_to_front, rows_with_logits
from paceline.models.decoder import Decoder, Model
from paceline.models.kv_cache import KVCache
from paceline.models.warmup import verifying
from paceline.platform.staging import Staging

Q_ROWS = 512  # rows of q of a captured verification; each takes the memory of a row of the vocabulary
UNREAD = 4  # verdicts under way or still in use, at most


class Runner:
    def __init__(self, model: Model, cache: KVCache, drafters: DrafterSet, sampler: Sampler) -> None:
        self.model, self.cache, self.drafters, self.sampler = model, cache, drafters, sampler
        self._caches = cache.layers[: len(model.kv_specs)]
        self._staging, self._staging_feedback = Staging(model.device, UNREAD), Staging(model.device, UNREAD)
        self._threads: int = getattr(getattr(model, "kernels", None), "threads", 1)

    def prepare(self, most_sequences: int, most_rows: int) -> None:
        """Compile and capture all that steps would otherwise wait for when they first need it."""
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
    def late_captures(self) -> int:
        """Passes captured and kernels compiled after start-up, in steps, which waited for them."""
        graphs = getattr(self.model, "graphs", None)
        return self.sampler.late_captures + (0 if graphs is None else graphs.late_captures)

    def launch(self, batch: Batch, draft: Draft, after: InFlightStep | None = None) -> InFlightStep:
        """Launch a step; `after`: the step whose unread verdict has tokens of its rows."""
        # Trees that only the device knows stay there where passes are captured; else they are read first.
        captured, vocab_size = getattr(self.model, "graphs", None) is not None, self.model.config.vocab_size
        draft = draft.repaired(vocab_size) if captured else draft.on_host(vocab_size)
        layout = lay_out(batch, draft, self.cache.block_size)
        tokens_on_device = draft.tokens.flatten() if layout.tokens_on_device else None
        if after is not None and after.verdict is not None:
            tokens_on_device = after.verdict.tokens[:, 0].clamp_min(0)  # verdict.INVALID is no token
        if tokens_on_device is not None:
            (codes,) = packed_to(tokens_on_device.device, layout.tokens.long())
            layout.tokens = filled_in(codes, tokens_on_device)
        started = time.perf_counter()
        rows = rows_with_logits(layout)
        output = self.model.forward(layout.tokens, layout.plan, self._caches, rows, self.drafters.taps)
        model_s = time.perf_counter() - started
        logits, typical = output.logits, output.time_is_typical
        flight = InFlightStep(batch, layout, draft, model_s, typical, ahead=after is not None)
        if layout.prompts:  # such a pass computes more logits than others, so its time is not typical
            flight.prompts, flight.time_is_typical = look_at_prompts(layout, rows, logits), False
            logits = moved_to_front(logits, torch.searchsorted(rows, layout.shape.logit_rows))
        if len(batch.sampling):
            verdict = self.sampler.verify(
                batch.sampled_sequences,
                draft,
                logits,
                layout.shape.logit_row_of,
                lengths=batch.sampled_lengths,
                req_indices=batch.sampled_req_indices,
            )
            flight.verdict, flight.verdict_copy = verdict, VerdictCopy(verdict, self._staging)
            flight.time_is_typical &= self.sampler.time_is_typical
            if n := self.drafters.feedback_of(batch):
                top = self.sampler.top_tokens(logits[: len(layout.shape.logit_rows)], n, self._threads)
                flight.feedback = FeedbackCopy(top, n, draft, self._staging_feedback)
            if layout.is_tree and verdict.moves:
                # The slots are still the sequences' own, also of those that end in this step.
                self.cache.compact(sent(layout.tree_slots, verdict.path.device), verdict.path)
        if output.taps is not None:
            self.drafters.gather(flight, output.taps)
        return flight
