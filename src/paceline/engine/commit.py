"""What becomes of a verdict: tokens are appended up to the first stop, blocks published, finished sequences leave.

Tokens past a stop never existed: they are not in the output, the text or the statistics. A stop beats the length limit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from paceline.engine.batch import StepOutput
from paceline.engine.drafting import DrafterSet
from paceline.engine.model_runner import Flight
from paceline.engine.scheduler import Scheduler
from paceline.engine.text import OutputText
from paceline.sequence import Sequence, Status


@dataclass(slots=True)
class _Watch:
    """What may end a sequence."""

    text: OutputText | None
    ends: frozenset[int]  # tokens
    quiet: bool  # nothing but its tokens is asked of it: neither text nor logprobs


class Committer:
    def __init__(
        self,
        scheduler: Scheduler,
        drafters: DrafterSet,
        eos_token_ids: frozenset[int],
        make_text: Callable[[Sequence], OutputText | None],
    ) -> None:
        self._scheduler, self._drafters, self._eos, self._make_text = scheduler, drafters, eos_token_ids, make_text
        self._watches: dict[str, _Watch] = {}

    def forget(self, sequence: Sequence) -> None:
        self._watches.pop(sequence.key, None)

    def collect(self, flight: Flight) -> list[StepOutput]:
        """The one device-to-host copy of the step, then bookkeeping."""
        verdicts, taps = flight.read_verdicts(), flight.taps if flight.hidden is not None else None
        layout, watches, told = flight.layout, self._watches, bool(self._drafters.drafters)
        size, finished = self._scheduler.blocks.block_size, Status.FINISHED
        outputs: list[StepOutput] = []
        computed: list[tuple[Sequence, int, int, Tensor | None, str]] = []
        unsettled: list[Sequence] = []
        for index, row in enumerate(layout.rows):
            sequence, first, count, accepted = row.sequence, row.first, row.count, 0
            if sequence.status is finished:  # after the flight was launched
                continue
            if row.samples:
                tokens, accepted, kinds = verdicts[index]
                watch = watches.get(sequence.key) or self._watch(sequence)
                known, drafted = sequence.tokens, layout.num_nodes[index]
                # By far the most common, and there may be hundreds of it: only tokens are asked for, and it goes on.
                if watch.quiet and len(known) + len(tokens) < sequence.max_len and watch.ends.isdisjoint(tokens):
                    known += tokens
                    if drafted:
                        sequence.stats.add(layout.nodes_by_depth(index), accepted, len(tokens), row.method)
                    else:
                        sequence.stats.add_plain()
                    output = StepOutput(sequence, tokens, "", kinds, False, row.method, drafted, accepted)
                else:
                    output = self._extend(flight, index, tokens, accepted, kinds, watch)
                    accepted = min(accepted, len(output.tokens))
                outputs.append(output)
                count += accepted
            sequence.num_computed = end = first + count
            if row.budget or end % size < count:  # room was reserved for a draft, or a block is full
                unsettled.append(sequence)
            if told:
                computed.append((sequence, first, count, None if taps is None else taps(index, accepted), row.method))
        self._drafters.commit(computed, self._scheduler.blocks)
        self._scheduler.blocks.settle(unsettled)
        for output in outputs:
            if output.finished:
                sequence = output.sequence
                self._scheduler.finish(sequence, sequence.finish_reason or "stop", sequence.stop_reason)
        return outputs

    def _extend(
        self, flight: Flight, index: int, tokens: list[int], accepted: int, kinds: list[int], watch: _Watch
    ) -> StepOutput:
        layout = flight.layout
        row, drafted = layout.rows[index], layout.num_nodes[index]
        sequence = row.sequence
        kept = self._append(sequence, tokens, watch)
        if kept < len(tokens):
            tokens, kinds = tokens[:kept], kinds[:kept]
        if sequence.logprobs is not None:
            sequence.logprobs += flight.logprobs(index)[:kept]
        by_depth = layout.nodes_by_depth(index) if drafted else ()
        sequence.stats.add(by_depth, min(accepted, kept), kept, row.method)
        finished, text, piece = sequence.finish_reason is not None, watch.text, ""
        if text is not None:
            if finished:
                text.finish()
            piece = text.take()
            sequence.text += piece
        if finished:
            self.forget(sequence)
        return StepOutput(sequence, tokens, piece, kinds, finished, row.method, drafted, accepted)

    def _append(self, sequence: Sequence, tokens: list[int], watch: _Watch) -> int:
        """Up to the first stop; how many."""
        for kept, token in enumerate(tokens, start=1):
            sequence.tokens.append(token)
            if self._stops(sequence, token, watch.text):
                return kept
        return len(tokens)

    def _watch(self, sequence: Sequence) -> _Watch:
        eos = frozenset[int]() if sequence.params.ignore_eos else self._eos
        text, ends = self._make_text(sequence), eos.union(sequence.params.stop_token_ids)
        watch = _Watch(text, ends, quiet=text is None and sequence.logprobs is None)
        self._watches[sequence.key] = watch
        return watch

    def _stops(self, sequence: Sequence, token: int, text: OutputText | None) -> bool:
        """Note why the sequence ends with this token, if it does."""
        params = sequence.params
        may_stop = sequence.num_output >= params.min_tokens
        stopped_by_text = text is not None and text.push(token, may_stop=may_stop)
        if may_stop and token in params.stop_token_ids:
            sequence.finish_reason, sequence.stop_reason = "stop", token
        elif may_stop and token in self._eos and not params.ignore_eos:
            sequence.finish_reason = "stop"
        elif stopped_by_text and text is not None:
            sequence.finish_reason, sequence.stop_reason = "stop", text.stop
        elif sequence.room == 0:
            sequence.finish_reason = "length"
        return sequence.finish_reason is not None
