"""What becomes of a verdict: tokens are appended up to the first stop, blocks published, finished sequences leave.

Tokens past a stop never existed: they are not in the output, the text or the statistics. A stop beats the length limit.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import numpy as np

from paceline.draft import Kind
from paceline.drafters import Drafter
from paceline.engine.batch import Company, Row, Stage, StepOutput
from paceline.engine.drafting import Computed, DrafterSet
from paceline.engine.model_runner import Flight
from paceline.engine.scheduler import Scheduler
from paceline.engine.text import OutputText
from paceline.outputs import SpeculationStats
from paceline.sequence import Sequence, Status


@dataclass(slots=True)
class _Watch:
    """What may end a sequence."""

    text: OutputText | None
    ends: frozenset[int]  # tokens
    quiet: bool  # nothing but its tokens is asked of it: neither text nor logprobs


@dataclass(slots=True)
class _Watches:
    """The same for a company."""

    company: Company | None = None
    ends: frozenset[int] = frozenset()  # of any
    quiet: bool = False  # all are


_Expected = tuple[int, Row, Sequence, _Watch | None, StepOutput | None]  # the last two of a row that samples
_NOTHING: list[int] = []  # not said yet


@dataclass(slots=True)
class Collected:
    """A step whose tokens stand, up to those that end their sequence; what they mean is not told yet."""

    flight: Flight
    outputs: list[StepOutput] = field(default_factory=list)
    rows: list[tuple[int, int, StepOutput | None]] = field(default_factory=list)  # index, tokens computed, what it said
    ends: bool = False  # a sequence has said its last
    # Of a company, where each output is one token; `rows` are then there only if somebody asks for them.
    stats: list[SpeculationStats] | None = None


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
        self._together = _Watches()
        self._expected: tuple[Flight | None, list[_Expected]] = None, []

    def forget(self, sequence: Sequence) -> None:
        self._watches.pop(sequence.key, None)

    def collect(self, flight: Flight) -> Collected:
        """The one device-to-host copy of the step. What follows is all the next step has to wait for."""
        if flight.stage is not None:
            return self._collect_together(flight, flight.stage)
        if self._expected[0] is not flight:
            self.expect(flight)
        (_, expected), self._expected = self._expected, (None, [])
        verdicts, collected = flight.read_verdicts(), Collected(flight)
        rows, outputs = collected.rows, collected.outputs
        for index, row, sequence, watch, output in expected:
            count = row.count
            if output is not None and watch is not None:
                tokens, accepted, kinds = verdicts[index]
                known = sequence.tokens
                if len(known) + accepted + 1 < sequence.max_len and watch.ends.isdisjoint(tokens):  # the most common
                    known += tokens
                    count += accepted
                else:
                    kept = self._append(sequence, tokens)
                    count += min(accepted, kept)
                    output.finished = sequence.finish_reason is not None
                    collected.ends |= output.finished
                    tokens, kinds = tokens[:kept], kinds[:kept]
                output.tokens, output.kinds, output.accepted = tokens, kinds, accepted
                outputs.append(output)
            sequence.num_computed = row.first + count
            rows.append((index, count, output))
        self._inform(self._drafters.at_once, collected)
        return collected

    def expect(self, flight: Flight) -> None:
        """What collecting takes and no verdict changes, while that is waited for; a company's is at hand."""
        if flight.stage is not None:
            return
        expected: list[_Expected] = []
        layout, watches, finished = flight.layout, self._watches, Status.FINISHED
        for index, row in enumerate(layout.rows):
            sequence, watch, output = row.sequence, None, None
            if sequence.status is finished:  # after the flight was launched
                continue
            if row.samples:
                watch = watches.get(sequence.key) or self._watch(sequence)
                nodes, depth = layout.num_nodes[index], len(layout.nodes_by_depth(index))
                output = StepOutput(sequence, _NOTHING, "", _NOTHING, False, row.method, nodes, depth=depth)
            expected.append((index, row, sequence, watch, output))
        self._expected = flight, expected

    @property
    def may_end(self) -> frozenset[int]:
        """Tokens that may end one of those whose verdict is expected."""
        watches = {watch.ends for *_, watch, _ in self._expected[1] if watch is not None}
        return frozenset[int]().union(*watches)

    def _collect_together(self, flight: Flight, stage: Stage) -> Collected:
        """The same for a company: everybody says one token, and few end."""
        assert flight.reading is not None
        company, tokens, bonus = stage.company, flight.reading.spoken(), int(Kind.BONUS)
        sequences, stats, watches = company.sequences, company.stats, self._watches_of(company)
        live: SequenceOf[int] = range(len(tokens))
        ending: set[int] = set()  # perhaps
        if not self._scheduler.is_whole(stage):
            finished = Status.FINISHED
            live = [index for index, sequence in enumerate(sequences) if sequence.status is not finished]
            ending.update(np.flatnonzero(stage.first[live] + 2 >= company.max_len[live]).tolist())
            sequences, stats = [sequences[index] for index in live], [stats[index] for index in live]
            tokens = [tokens[index] for index in live]
        if not watches.ends.isdisjoint(tokens):
            ending.update(index for index, token in enumerate(tokens) if token in watches.ends)
        for index in ending:
            self._append(sequences[index], tokens[index : index + 1])
            sequences[index].num_computed += 1
        said = list(zip(sequences, tokens, strict=True))
        for sequence, token in [one for at, one in enumerate(said) if at not in ending] if ending else said:
            sequence.tokens.append(token)
            sequence.num_computed += 1
        outputs = [StepOutput(sequence, [token], "", [bonus], False) for sequence, token in said]
        for index in ending:
            outputs[index].finished = sequences[index].finish_reason is not None
        collected = Collected(flight, outputs, stats=stats)
        collected.ends = any(outputs[index].finished for index in ending)
        if self._drafters.drafters or not watches.quiet:
            collected.rows.extend((index, 1, output) for index, output in zip(live, outputs, strict=True))
        self._inform(self._drafters.at_once, collected)
        return collected

    def _tell_together(self, collected: Collected, stage: Stage) -> list[StepOutput]:
        for stats in collected.stats or ():
            stats.num_target_passes += 1
            stats.num_committed_tokens += 1
        self._inform(self._drafters.patient, collected)
        full = np.flatnonzero((stage.first + 1) % self._scheduler.blocks.block_size == 0)
        sequences = [stage.company.sequences[index] for index in full]
        self._scheduler.blocks.settle([sequence for sequence in sequences if not sequence.finished])
        if collected.ends:
            self._dismiss([output.sequence for output in collected.outputs if output.finished])
        return collected.outputs

    def _dismiss(self, ended: list[Sequence]) -> None:
        for sequence in ended:
            self.forget(sequence)
            self._scheduler.finish(sequence, sequence.finish_reason or "stop", sequence.stop_reason)

    def _watches_of(self, company: Company) -> _Watches:
        if self._together.company is not company:
            live = [sequence for sequence in company.sequences if not sequence.finished]
            each = [self._watches.get(sequence.key) or self._watch(sequence) for sequence in live]
            ends = frozenset[int]().union(*{watch.ends for watch in each})
            self._together = _Watches(company, ends, all(watch.quiet for watch in each))
        return self._together

    def tell(self, collected: Collected) -> list[StepOutput]:
        """The rest: text, which may end a sequence before its last token, figures, blocks; who has finished leaves."""
        stage = collected.flight.stage
        if stage is not None and self._watches_of(stage.company).quiet:
            return self._tell_together(collected, stage)
        flight, layout, size = collected.flight, collected.flight.layout, self._scheduler.blocks.block_size
        unsettled: list[Sequence] = []
        ended: list[Sequence] = []
        for index, count, output in collected.rows:
            row = layout.rows[index]
            sequence = row.sequence
            if output is not None:
                watch = self._watches[sequence.key]
                if not watch.quiet:
                    self._speak(flight, index, output, watch)
                if output.drafted:
                    kept = len(output.tokens)
                    sequence.stats.add(layout.nodes_by_depth(index), min(output.accepted, kept), kept, row.method)
                else:
                    sequence.stats.add_plain()
                if output.finished:
                    ended.append(sequence)
            more = len(sequence.blocks) * size >= len(sequence.tokens) + size  # room was made that a draft did not take
            if more or row.budget or sequence.num_computed % size < count:  # or a block is full
                unsettled.append(sequence)
        self._inform(self._drafters.patient, collected)
        self._scheduler.blocks.settle(unsettled)
        self._dismiss(ended)
        return collected.outputs

    def _inform(self, drafters: SequenceOf[Drafter], collected: Collected) -> None:
        if not drafters:
            return
        flight, rows = collected.flight, collected.flight.layout.rows
        computed: list[Computed] = []
        for index, count, _ in collected.rows:
            row = rows[index]
            taps = None if flight.hidden is None else flight.taps(index, count - row.count)
            computed.append((row.sequence, row.first, count, taps, row.method))
        self._drafters.commit(drafters, computed, self._scheduler.blocks)

    def _append(self, sequence: Sequence, tokens: list[int]) -> int:
        """Up to the first that ends the sequence, whatever its text; how many."""
        params = sequence.params
        for kept, token in enumerate(tokens, start=1):
            sequence.tokens.append(token)
            may_stop = sequence.num_output >= params.min_tokens
            if may_stop and token in params.stop_token_ids:
                sequence.finish_reason, sequence.stop_reason = "stop", token
            elif may_stop and token in self._eos and not params.ignore_eos:
                sequence.finish_reason = "stop"
            elif sequence.room == 0:
                sequence.finish_reason = "length"
            if sequence.finish_reason is not None:
                return kept
        return len(tokens)

    def _speak(self, flight: Flight, index: int, output: StepOutput, watch: _Watch) -> None:
        """Text and logprobs. A stop string beats the length limit, and all that follows it."""
        sequence, text, params = output.sequence, watch.text, output.sequence.params
        if text is not None:
            spoken = sequence.num_output - len(output.tokens)
            for kept, token in enumerate(output.tokens, start=1):
                if text.push(token, may_stop=spoken + kept >= params.min_tokens):
                    self._cut(output, kept, text.stop)
                    break
            if output.finished:
                text.finish()
            output.text = text.take()
            sequence.text += output.text
        if sequence.logprobs is not None:
            sequence.logprobs += flight.logprobs(index)[: len(output.tokens)]

    def _cut(self, output: StepOutput, kept: int, stop: str | None) -> None:
        """The sequence ends with the first `kept` of these tokens, by a stop string, unless the last is one itself."""
        sequence, beyond = output.sequence, len(output.tokens) - kept
        if not beyond and sequence.finish_reason == "stop":
            return
        sequence.finish_reason, sequence.stop_reason, output.finished = "stop", stop, True
        if beyond:
            del sequence.tokens[-beyond:]
            output.tokens, output.kinds = output.tokens[:kept], output.kinds[:kept]
            sequence.num_computed = min(sequence.num_computed, len(sequence.tokens))

    def _watch(self, sequence: Sequence) -> _Watch:
        eos = frozenset[int]() if sequence.params.ignore_eos else self._eos
        text, ends = self._make_text(sequence), eos.union(sequence.params.stop_token_ids)
        watch = _Watch(text, ends, quiet=text is None and sequence.logprobs is None)
        self._watches[sequence.key] = watch
        return watch
