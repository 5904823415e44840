"""What becomes of a verdict: tokens are appended up to the first stop, blocks published, finished sequences leave.

`read` is all the next step has to wait for: tokens stand, and sequences that a token or the length ends are known.
`publish` works out the rest: stop strings, logprobs, figures, shared blocks. Tokens past a stop never existed: they are
not in the output, the text or the statistics. A stop beats the length limit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from paceline.engine.batch import StepOutputs
from paceline.engine.drafting import DrafterSet
from paceline.engine.runner import Flight
from paceline.engine.scheduler import Scheduler
from paceline.engine.text import OutputText
from paceline.sequence import Sequence, Status

NOT_FINITE = "the model's logits are not finite (NaN or infinity): its weights or its inputs are broken"


@dataclass(slots=True)
class Landed:
    """A flight whose tokens stand."""

    flight: Flight
    outputs: StepOutputs = field(default_factory=StepOutputs)
    indices: list[int] = field(default_factory=list)  # rows of the batch whose sequence is still there
    place: dict[int, int] = field(default_factory=dict)  # row of the batch -> its place among the outputs


class Committer:
    def __init__(
        self,
        scheduler: Scheduler,
        drafters: DrafterSet,
        make_text: Callable[[Sequence], OutputText | None],
    ) -> None:
        self._scheduler, self._drafters, self._make_text = scheduler, drafters, make_text
        self._texts: dict[str, OutputText] = {}  # of sequences with stop strings

    def forget(self, sequence: Sequence) -> None:
        self._texts.pop(sequence.key, None)

    def read(self, flight: Flight) -> Landed:
        """Wait for the verdict and append what it commits; the one device-to-host copy of the step."""
        landed = Landed(flight)
        outputs, indices, place = landed.outputs, landed.indices, landed.place
        layout, finished = flight.layout, Status.FINISHED
        drafted = flight.batch.num_drafted > 0
        tokens_of, accepted_of, kinds_of = ([], [], []) if flight.reading is None else flight.reading.read()
        verdict_row = -1
        for index, row in enumerate(flight.batch.rows):
            sequence, count = row.sequence, row.count
            verdict_row += row.samples
            if sequence.status is finished:  # after the flight was launched
                continue
            indices.append(index)
            if row.samples:
                tokens, kinds, accepted = tokens_of[verdict_row], kinds_of[verdict_row], accepted_of[verdict_row]
                at = place[index] = len(outputs.sequences)
                known = sequence.tokens
                if tokens[-1] < 0:  # draft.INVALID: nothing of the step is trusted
                    sequence.finish_reason, sequence.error = "error", NOT_FINITE
                    tokens, kinds = [], []
                elif len(known) + len(tokens) < sequence.max_len and sequence.ends.isdisjoint(
                    tokens
                ):  # the most common
                    known += tokens
                    count += accepted
                else:
                    kept = _append(sequence, tokens)
                    count += min(accepted, kept)
                    tokens, kinds = tokens[:kept], kinds[:kept]
                if sequence.finish_reason is not None:
                    outputs.ended.append(at)
                outputs.sequences.append(sequence)
                outputs.tokens.append(tokens)
                outputs.kinds.append(kinds)
                if drafted and layout.num_nodes[index]:
                    nodes, depth = int(layout.num_nodes[index]), int(layout.depths[index])
                    outputs.drafts[at] = row.method, nodes, accepted, depth
            sequence.num_computed = row.first + count
        self._drafters.landed(flight.batch, landed.indices)
        return landed

    def publish(self, landed: Landed) -> StepOutputs:
        """The rest of it; sequences that have ended leave."""
        outputs, flight = landed.outputs, landed.flight
        size, unsettled = self._scheduler.blocks.block_size, []
        for at, sequence in enumerate(outputs.sequences):
            if sequence.params.stop:
                self._find_stops(outputs, at, sequence)
            kept = len(outputs.tokens[at])
            draft = outputs.drafts.get(at)
            if draft is None:
                sequence.stats.num_target_passes += 1
                sequence.stats.num_committed_tokens += kept
            else:
                method, nodes, accepted, depth = draft
                sequence.stats.add(nodes, depth, min(accepted, kept), kept, method)
        for index in landed.indices:
            row = flight.batch.rows[index]
            sequence = row.sequence
            if sequence.logprobs is not None and row.samples and flight.reading is not None:
                tokens, most = outputs.tokens[landed.place[index]], sequence.params.logprobs or 0
                sequence.logprobs += flight.reading.logprobs(flight.batch.sampling.index(index), tokens, most)
            room = len(sequence.blocks) * size >= len(sequence.tokens) + size  # taken for a draft and not used
            if room or row.budget or sequence.num_computed // size > row.first // size:  # or a block is full
                unsettled.append(sequence)
        self._drafters.read_prompts(flight.batch, landed.indices)
        self._drafters.mark(unsettled)
        self._scheduler.blocks.settle(unsettled)
        for at in outputs.ended:
            self._leave(outputs.sequences[at])
        return outputs

    def fail(self, sequence: Sequence, reason: str) -> None:
        """End a sequence whose step could not be computed."""
        sequence.finish_reason, sequence.error = "error", reason
        self._leave(sequence)

    def _leave(self, sequence: Sequence) -> None:
        self.forget(sequence)
        self._scheduler.finish(sequence, sequence.finish_reason or "stop", sequence.stop_reason)

    def _find_stops(self, outputs: StepOutputs, at: int, sequence: Sequence) -> None:
        """Text of a sequence with stop strings. One that is found beats the length limit, and all that follows it."""
        text = self._texts.get(sequence.key)
        if text is None:
            made = self._make_text(sequence)
            if made is None:
                return
            text = self._texts[sequence.key] = made
        tokens, before = outputs.tokens[at], sequence.num_output - len(outputs.tokens[at])
        for kept, token in enumerate(tokens, start=1):
            if text.push(token, may_stop=before + kept >= sequence.params.min_tokens):
                self._cut(outputs, at, sequence, kept, text.stop)
                break
        if sequence.finish_reason is not None:
            text.finish()
        outputs.texts[at] = text.take()
        sequence.text += outputs.texts[at]

    def _cut(self, outputs: StepOutputs, at: int, sequence: Sequence, kept: int, stop: str | None) -> None:
        """The sequence ends with the first `kept` of these tokens, unless the last of them is a stop token itself."""
        beyond = len(outputs.tokens[at]) - kept
        if not beyond and sequence.finish_reason == "stop":
            return
        if sequence.finish_reason is None:
            outputs.ended.append(at)
        sequence.finish_reason, sequence.stop_reason = "stop", stop
        if beyond:
            del sequence.tokens[-beyond:]
            outputs.tokens[at], outputs.kinds[at] = outputs.tokens[at][:kept], outputs.kinds[at][:kept]
            sequence.num_computed = min(sequence.num_computed, len(sequence.tokens))


def _append(sequence: Sequence, tokens: list[int]) -> int:
    """Up to the first that ends the sequence, whatever its text; how many."""
    params = sequence.params
    for kept, token in enumerate(tokens, start=1):
        sequence.tokens.append(token)
        if sequence.num_output >= params.min_tokens and token in sequence.ends:
            sequence.finish_reason = "stop"
            sequence.stop_reason = token if token in params.stop_token_ids else None
        elif sequence.room == 0:
            sequence.finish_reason = "length"
        if sequence.finish_reason is not None:
            return kept
    return len(tokens)
