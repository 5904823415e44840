"""Moments at which tokens came, and the cells computed from them: one for each workload, concurrency and contender.

The workload "all" is all of them together.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline import __version__
from paceline.bench.grid import Contender
from paceline.bench.intervals import MIN_TOKENS, Pair, loops, paired, speedup, spread, too_few_tokens, why_too_short
from paceline.bench.results import ALL, PLAIN, Cell, Results, WithoutLoops
from paceline.outputs import SpeculationStats


@dataclass(frozen=True)
class TimedAnswer:
    tokens: tuple[Any, ...]  # token ids; of a server, the pieces of its text
    commits: tuple[tuple[float, int], ...]  # (seconds, tokens that came then), on the clock of `sent`
    stats: SpeculationStats = field(default_factory=SpeculationStats)
    sent: float = 0.0  # 0 is the moment an engine receives the group
    ended: float | None = None  # None: with the last commit
    usage: int | None = None  # tokens by a server's own count
    prompt_tokens: int | None = None
    drafted: tuple[bool, ...] = ()  # whether each token is an accepted draft; empty: not known

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) if self.usage is None else self.usage

    @property
    def end(self) -> float:
        return self.commits[-1][0] if self.ended is None else self.ended

    def gaps(self) -> Iterator[float]:
        """Yield the wait for every token after the first commit; tokens committed together share it equally."""
        for (before, _), (moment, count) in itertools.pairwise(self.commits):
            yield from [(moment - before) / count] * count


@dataclass(frozen=True)
class Run:
    """One contender's answers to one group at one turn."""

    answers: tuple[TimedAnswer, ...]
    outside_s: float | None = None  # seconds outside the models; None: cannot be measured
    counted: SpeculationStats | None = None  # statistics by a server's own counters

    @property
    def seconds(self) -> float:
        """Return the time from the first request to the end of the last answer."""
        return max(answer.end for answer in self.answers) - min(answer.sent for answer in self.answers)

    @property
    def tokens(self) -> int:
        return sum(answer.num_tokens for answer in self.answers)

    def whole(self) -> tuple[float, int]:
        return self.seconds, self.tokens

    def reading(self) -> tuple[float, int | None]:
        """Return seconds until every request has its first token, and the tokens of the prompts, None if not known."""
        counts = [answer.prompt_tokens for answer in self.answers]
        first = max((answer.commits[0][0] for answer in self.answers if answer.commits), default=0.0)
        known = [count for count in counts if count is not None]
        return first - min(answer.sent for answer in self.answers), sum(known) if len(known) == len(counts) else None

    def decoding(self) -> tuple[float, int]:
        """Return seconds and tokens after every request has its first token."""
        start = max((answer.commits[0][0] for answer in self.answers if answer.commits), default=0.0)
        after = [commit for answer in self.answers for commit in answer.commits if commit[0] > start]
        return max((moment for moment, _ in after), default=start) - start, sum(count for _, count in after)


@dataclass(frozen=True)
class AnswerRow:
    """One group at one turn, answered by all contenders, one directly after the other."""

    group: int  # the pair it belongs to: all turns of a group are one
    workload: str | None  # None: mixed
    concurrency: int
    runs: dict[Contender, Run]
    question: str = ""  # the first prompt, as the user wrote it


@dataclass
class Measurement:
    """The rows so far. Every row is complete, even if the run is interrupted."""

    contenders: list[Contender]
    rows: list[AnswerRow] = field(default_factory=list)
    left_out: dict[int, int] = field(default_factory=dict)  # concurrency -> prompts that filled no group
    rounds: dict[int, int] = field(default_factory=dict)  # concurrency -> groupings of all prompts
    comparable: bool = True  # whether all contenders are to give the same tokens: greedy, or seeded
    complete: bool = False


def plain_of(contenders: Sequence[Contender]) -> Contender | None:
    """Return the contender without drafts; None for a server without a baseline."""
    return next((contender for contender in contenders if contender.method == PLAIN), None)


def results_of(
    measurement: Measurement,
    *,
    model: str,
    where: Mapping[str, Any],
    settings: Mapping[str, Any],
    endpoint: Mapping[str, Any] | None = None,
    decode: Callable[[Sequence[Any]], str] | None = None,
) -> Results:
    left_out = {str(level): count for level, count in measurement.left_out.items() if count}
    return Results(
        paceline=__version__,
        date=time.strftime("%Y-%m-%d"),
        model=model,
        where=where,
        settings={**settings, "left_out": left_out},
        complete=measurement.complete,
        endpoint=endpoint,
        sample=None if decode is None else sample(measurement, decode),
        cells=cells(measurement),
    )


def sample(measurement: Measurement, decode: Callable[[Sequence[Any]], str]) -> dict[str, Any] | None:
    """Return the answer with most accepted drafts as pieces of text: accepted drafts, and others."""
    answers = [(row, contender, run.answers[0]) for row in measurement.rows for contender, run in row.runs.items()]
    if not any(any(answer.drafted) for _, _, answer in answers):
        return None
    row, contender, answer = max(answers, key=lambda one: sum(one[2].drafted))
    pieces: list[tuple[str, bool]] = []
    end, before = 0, ""
    for drafted, group in itertools.groupby(answer.drafted):
        end += len(list(group))
        whole = decode(answer.tokens[:end])
        pieces.append((whole[len(before) :], drafted))
        before = whole
    return {"label": contender.label, "workload": row.workload, "prompt": row.question, "pieces": pieces}


def cells(measurement: Measurement) -> tuple[Cell, ...]:
    cells: list[Cell] = []
    for concurrency in dict.fromkeys(row.concurrency for row in measurement.rows):
        rows = [row for row in measurement.rows if row.concurrency == concurrency]
        names = [name for name in dict.fromkeys(row.workload for row in rows) if name is not None]
        for workload in [ALL, *sorted(names)]:
            chosen = [row for row in rows if workload in (ALL, row.workload)]
            cells += [_cell(workload, contender, chosen, measurement) for contender in measurement.contenders]
    return tuple(cells)


def _cell(workload: str, contender: Contender, rows: Sequence[AnswerRow], measurement: Measurement) -> Cell:
    plain = plain_of(measurement.contenders)
    compared = plain is not None and contender != plain
    calm = [row for row in rows if not any(loops(one.tokens) for one in _answers([row], contender, plain))]
    answers = _answers(rows, contender)
    runs = [row.runs[contender] for row in rows]
    tokens, seconds = sum(run.tokens for run in runs), sum(run.seconds for run in runs)
    outside = [run.outside_s for run in runs if run.outside_s is not None]
    pairs, stats = _pairs(rows, contender, plain, Run.whole), _speculation(runs)
    return Cell(
        workload=workload,
        concurrency=rows[0].concurrency,
        method=contender.method,
        k=contender.k,
        label=contender.label,
        answers=len(answers),
        tokens=tokens,
        seconds=seconds,
        tokens_per_s=tokens / seconds if tokens >= MIN_TOKENS else None,
        prompt_tokens_per_s=_reading_rate(runs),
        speedup=speedup(pairs) if compared else None,
        decode_speedup=speedup(_pairs(rows, contender, plain, Run.decoding)) if compared else None,
        too_short=too_few_tokens(tokens) if plain is None else why_too_short(pairs),
        tau=stats.mean_acceptance_length,
        acceptance_rate=stats.acceptance_rate,
        drafted_per_position=tuple(stats.drafted_per_position),
        accepted_per_position=tuple(stats.accepted_per_position),
        ttft_s=spread(answer.commits[0][0] - answer.sent for answer in answers if answer.commits),
        inter_token_s=spread(gap for answer in answers for gap in answer.gaps()),
        request_s=spread(answer.end - answer.sent for answer in answers),
        engine_share=sum(outside) / seconds if len(outside) == len(runs) else None,
        looping=sum(loops(answer.tokens) for answer in answers),
        without_loops=WithoutLoops(
            answers=len(_answers(calm, contender)),
            speedup=speedup(_pairs(calm, contender, plain, Run.whole)) if compared else None,
        ),
        identical=_identical(rows, contender, plain) if plain is not None and measurement.comparable else None,
    )


def _reading_rate(runs: Sequence[Run]) -> float | None:
    seconds, tokens = zip(*(run.reading() for run in runs), strict=True)
    known = [count for count in tokens if count is not None]
    return sum(known) / sum(seconds) if len(known) == len(runs) and sum(seconds) > 0 else None


def _pairs(
    rows: Sequence[AnswerRow], contender: Contender, plain: Contender | None, part: Callable[[Run], tuple[float, int]]
) -> list[Pair]:
    return paired((row.group, part(row.runs[plain or contender]), part(row.runs[contender])) for row in rows)


def _answers(rows: Sequence[AnswerRow], *contenders: Contender | None) -> list[TimedAnswer]:
    return [answer for row in rows for each in contenders if each is not None for answer in row.runs[each].answers]


def _identical(rows: Sequence[AnswerRow], contender: Contender, plain: Contender) -> bool:
    pairs = zip(_answers(rows, contender), _answers(rows, plain), strict=True)
    return all(one.tokens == other.tokens for one, other in pairs)


def _speculation(runs: Sequence[Run]) -> SpeculationStats:
    """Merge the statistics of the engines' requests, or those of a server's counters."""
    merged = SpeculationStats()
    for run in runs:
        for stats in [answer.stats for answer in run.answers] if run.counted is None else [run.counted]:
            merged.merge(stats)
    return merged
