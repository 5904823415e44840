"""From rows to cells: one per workload, concurrency and engine, and the workload "all" for all of them together."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.bench.grid import Contender
from paceline.bench.measurement import Answer, Measurement, Row, Run
from paceline.bench.results import ALL, PLAIN, Cell, WithoutLoops
from paceline.bench.statistics import MIN_TOKENS, loops, paired, speedup, spread, whole, why_too_short
from paceline.outputs import SpeculationStats


def cells(measurement: Measurement) -> tuple[Cell, ...]:
    found: list[Cell] = []
    for concurrency in dict.fromkeys(row.concurrency for row in measurement.rows):
        rows = [row for row in measurement.rows if row.concurrency == concurrency]
        names = [name for name in dict.fromkeys(row.workload for row in rows) if name is not None]
        for workload in [ALL, *sorted(names)]:
            mine = [row for row in rows if workload in (ALL, row.workload)]
            found += [_cell(workload, contender, mine, measurement) for contender in measurement.contenders]
    return tuple(found)


def _cell(workload: str, contender: Contender, rows: Sequence[Row], measurement: Measurement) -> Cell:
    runs = [row.runs[contender] for row in rows]
    answers = [answer for run in runs for answer in run.answers]
    tokens, seconds = sum(run.tokens for run in runs), sum(run.seconds for run in runs)
    stats = _merged(answers)
    pairs = paired(_beside_plain(rows, contender), whole)
    compared = contender.method != PLAIN
    calm = [row for row in rows if not _any_loops(row, contender)]
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
        speedup=speedup(pairs) if compared else None,
        decode_speedup=speedup(paired(_beside_plain(rows, contender), Run.decoding)) if compared else None,
        too_short=why_too_short(pairs),
        tau=stats.mean_acceptance_length,
        acceptance_rate=stats.acceptance_rate,
        drafted_per_position=tuple(stats.drafted_per_position),
        accepted_per_position=tuple(stats.accepted_per_position),
        ttft_s=spread(answer.first_s for answer in answers),
        inter_token_s=spread(gap for answer in answers for gap in answer.gaps()),
        request_s=spread(answer.last_s for answer in answers),
        engine_share=_share(runs, seconds),
        looping=sum(loops(answer.tokens) for answer in answers),
        without_loops=WithoutLoops(
            answers=sum(len(row.runs[contender].answers) for row in calm),
            speedup=speedup(paired(_beside_plain(calm, contender), whole)) if compared else None,
        ),
        identical=_identical(rows, contender) if measurement.comparable else None,
    )


def _beside_plain(rows: Sequence[Row], contender: Contender) -> list[tuple[int, Run, Run]]:
    return [(row.group, row.runs[Contender(PLAIN)], row.runs[contender]) for row in rows]


def _merged(answers: Sequence[Answer]) -> SpeculationStats:
    merged = SpeculationStats()
    for answer in answers:
        merged.merge(answer.stats)
    return merged


def _share(runs: Sequence[Run], seconds: float) -> float | None:
    outside = [run.outside_s for run in runs if run.outside_s is not None]
    return sum(outside) / seconds if len(outside) == len(runs) else None


def _any_loops(row: Row, contender: Contender) -> bool:
    return any(loops(answer.tokens) for who in {Contender(PLAIN), contender} for answer in row.runs[who].answers)


def _identical(rows: Sequence[Row], contender: Contender) -> bool:
    return all(
        mine.tokens == theirs.tokens
        for row in rows
        for mine, theirs in zip(row.runs[contender].answers, row.runs[Contender(PLAIN)].answers, strict=True)
    )
