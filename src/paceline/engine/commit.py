"""The outcome of a verdict: tokens are appended up to the first stop, blocks published, finished sequences leave.

`read` is all that the next step waits for: tokens are appended, and sequences that a token or the length ends are
known. `publish` works out the rest: stop strings, logprobs, figures, shared blocks. Tokens past a stop are neither in
the output nor in the text nor in the statistics. A stop beats the length limit.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from paceline.core.sequence import Sequence, Status
from paceline.engine.batch import DraftOutcome, StepResult
from paceline.engine.block_manager import Reserved
from paceline.engine.drafter_set import DrafterSet
from paceline.engine.in_flight import InFlightStep
from paceline.engine.scheduler import Scheduler
from paceline.text.stop_strings import OutputText

UNDECODABLE = "the text of the answer could not be decoded"
NOT_FINITE = "the model's logits are not finite (NaN or infinity): its weights or its inputs are broken"


class Committer:
    def __init__(
        self, scheduler: Scheduler, drafters: DrafterSet, make_text: Callable[[Sequence], OutputText | None]
    ) -> None:
        self._scheduler, self._drafters, self._make_text = scheduler, drafters, make_text
        self._watched: set[str] = set()  # sequences that ask for more than tokens
        self._texts: dict[str, OutputText] = {}  # texts of sequences with stop strings

    def watch(self, sequence: Sequence) -> None:
        """Look closer at a sequence with stop strings, logprobs or a grammar."""
        self._watched.add(sequence.key)

    def forget(self, sequence: Sequence) -> None:
        self._watched.discard(sequence.key)
        self._texts.pop(sequence.key, None)

    def read(self, flight: InFlightStep) -> StepResult:
        """Wait for the verdict and append the tokens it commits; the one device-to-host copy of the step."""
        batch, result = flight.batch, StepResult()
        finished = Status.FINISHED
        tokens_of, accepted_of = ([], []) if flight.verdict_copy is None else flight.verdict_copy.read()
        if len(batch.sampling) < len(batch):  # chunks of prompts that yield no token
            for index in np.flatnonzero(~batch.samples):
                sequence = batch.sequences[index]
                if sequence.status is not finished:
                    sequence.num_computed = int(batch.ends[index])
        ends, sequences, committed, rows = batch.sampled_lengths.tolist(), result.sequences, result.tokens, result.rows
        for row, (sequence, tokens, end) in enumerate(zip(batch.sampled_sequences, tokens_of, ends, strict=True)):
            if sequence.status is finished:  # since the step was launched
                continue
            accepted = len(tokens) - 1
            if tokens[-1] < 0:  # verdict.INVALID: nothing of the step is trusted
                sequence.finish_reason, sequence.error = "error", NOT_FINITE
                tokens = []
            elif end + accepted + 1 < sequence.max_len and sequence.ends.isdisjoint(tokens):  # the most common
                sequence.tokens += tokens
                sequence.num_computed = end + accepted
            else:
                tokens = tokens[: _append(sequence, tokens)]
                sequence.num_computed = end + min(accepted, len(tokens))
            if sequence.finish_reason is not None:
                result.ended.append(len(sequences))
            sequence.stats.num_target_passes += 1
            sequence.stats.num_committed_tokens += len(tokens)
            sequences.append(sequence)
            committed.append(tokens)
            rows.append(row)
        if batch.drafts:
            self._add_drafts(flight, result, accepted_of)
        self._drafters.on_verdict(batch, sequences)
        if flight.feedback is not None and rows:
            self._drafters.on_feedback(flight.feedback.read(batch, flight.layout, rows))
        return result

    @staticmethod
    def _add_drafts(flight: InFlightStep, result: StepResult, accepted_of: list[int]) -> None:
        verdict_copy, rows, sampling = flight.verdict_copy, result.rows, flight.batch.sampling.tolist()
        assert verdict_copy is not None
        nodes, depths = flight.layout.shape.num_nodes.tolist(), flight.layout.depths.tolist()
        for at, row in enumerate(rows):
            index = sampling[row]
            if nodes[index]:
                method, _ = flight.batch.drafts[index]
                result.drafts[at] = DraftOutcome(method, nodes[index], accepted_of[row], depths[index])
        result.kinds = lambda at: verdict_copy.kinds(rows[at])
        result.paths = lambda at: verdict_copy.path(rows[at], accepted_of[rows[at]])

    def publish(self, flight: InFlightStep, result: StepResult, reserved: Reserved) -> None:
        """Work out the rest of a step that was read; sequences that have ended leave. `reserved`: slots written by the
        step or the drafts that were launched behind it."""
        batch = flight.batch
        if flight.prompts is not None:
            flight.prompts.hand_out()
        if self._watched:
            for at, sequence in enumerate(result.sequences):
                if sequence.key in self._watched:
                    self._look_closer(flight, result, at, sequence)
        for at, (method, nodes, accepted, depth) in result.drafts.items():
            result.sequences[at].stats.add_draft(nodes, depth, min(accepted, len(result.tokens[at])), method)
        # Sequences that have filled a block, or were given slots for a draft.
        grown = [batch.sequences[index] for index in sorted({*batch.filled, *batch.drafts})]
        grown = [sequence for sequence in grown if not sequence.finished]
        self._drafters.on_publish(batch, result, grown)
        self._scheduler.blocks.settle(grown, reserved)
        for at in result.ended:
            self._leave(result.sequences[at])

    def _look_closer(self, flight: InFlightStep, result: StepResult, at: int, sequence: Sequence) -> None:
        """Find stop strings, a grammar that takes too much work, and logprobs."""
        tokens, verdict_copy = result.tokens[at], flight.verdict_copy
        if sequence.params.stop and tokens:
            try:
                self._find_stops(result, at, sequence)
            except Exception as problem:  # an error of the tokenizer: it concerns no other request
                _fail(result, at, sequence, f"{UNDECODABLE}: {type(problem).__name__}: {problem}")
        if sequence.matcher is not None and (reason := sequence.matcher.problem) is not None:
            _fail(result, at, sequence, reason)
        if sequence.logprobs is not None and verdict_copy is not None:
            most = sequence.params.logprobs or 0
            sequence.logprobs += verdict_copy.logprobs(result.rows[at], result.tokens[at], most)

    def fail(self, sequence: Sequence, reason: str) -> None:
        """End a sequence whose step could not be computed."""
        sequence.finish_reason, sequence.error = "error", reason
        self._leave(sequence)

    def _leave(self, sequence: Sequence) -> None:
        self.forget(sequence)
        self._scheduler.finish(sequence, sequence.finish_reason or "stop", sequence.stop_reason)

    def _find_stops(self, result: StepResult, at: int, sequence: Sequence) -> None:
        """Decode the tokens of a sequence with stop strings, up to the first one that is found."""
        text = self._texts.get(sequence.key) or self._make_text(sequence)
        if text is None:
            return
        self._texts[sequence.key] = text
        tokens, before = result.tokens[at], sequence.num_output - len(result.tokens[at])
        for count, token in enumerate(tokens, start=1):
            if text.push(token, may_stop=before + count >= sequence.params.min_tokens):
                _cut(result, at, sequence, count, text.stop)
                break
        if sequence.finish_reason is not None:
            text.finish()
        result.texts[at] = text.take()
        sequence.text += result.texts[at]


def _fail(result: StepResult, at: int, sequence: Sequence, reason: str) -> None:
    if sequence.finish_reason is None:
        result.ended.append(at)
    sequence.finish_reason, sequence.error = "error", reason


def _cut(result: StepResult, at: int, sequence: Sequence, count: int, stop: str | None) -> None:
    """End the sequence with the first `count` of its new tokens, unless the last of them is a stop token itself."""
    beyond = len(result.tokens[at]) - count
    if not beyond and sequence.finish_reason == "stop":
        return
    if sequence.finish_reason is None:
        result.ended.append(at)
    sequence.finish_reason, sequence.stop_reason = "stop", stop
    if beyond:
        del sequence.tokens[-beyond:]
        sequence.stats.num_committed_tokens -= beyond
        result.tokens[at] = result.tokens[at][:count]
        sequence.num_computed = min(sequence.num_computed, len(sequence.tokens))


def _append(sequence: Sequence, tokens: list[int]) -> int:
    """Append tokens up to the first that ends the sequence, whatever its text; return their number."""
    params = sequence.params
    for count, token in enumerate(tokens, start=1):
        sequence.tokens.append(token)
        if sequence.num_output >= params.min_tokens and token in sequence.ends:
            sequence.finish_reason = "stop"
            sequence.stop_reason = token if token in params.stop_token_ids else None
        elif sequence.remaining == 0:
            sequence.finish_reason = "length"
        if sequence.finish_reason is not None:
            return count
    return len(tokens)
