"""From what servers answered to cells, as `summary` does for our own engines. Of a server we have text, not token ids,
and counters of whole groups, not of answers; and there may be no second server to compare with.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

from paceline.bench.endpoint_load import Run
from paceline.bench.endpoint_metrics import Counters
from paceline.bench.endpoint_tokens import Answer
from paceline.bench.results import ALL, PLAIN, Cell, WithoutLoops
from paceline.bench.statistics import MIN_TOKENS, loops, paired, speedup, spread, whole, why_too_short

ENDPOINT, BASELINE = "endpoint", "baseline"
UNIT = re.compile(r"\s*\w{1,6}|\s*[^\w\s]")  # stands in for a token where only text is known


@dataclass(frozen=True)
class Row:
    """One group at one turn, answered by the endpoint and by the baseline, where there is one."""

    group: int  # the pair it belongs to: all turns of a group are one
    workload: str | None  # None: mixed
    concurrency: int
    runs: dict[str, Run]  # by ENDPOINT and BASELINE


def cells(rows: Sequence[Row], comparable: bool) -> tuple[Cell, ...]:
    """`comparable`: whether both servers are to say the same."""
    found: list[Cell] = []
    for concurrency in dict.fromkeys(row.concurrency for row in rows):
        level = [row for row in rows if row.concurrency == concurrency]
        names = [name for name in dict.fromkeys(row.workload for row in level) if name is not None]
        for workload in [ALL, *sorted(names)]:
            mine = [row for row in level if workload in (ALL, row.workload)]
            found += [_cell(workload, who, mine, comparable) for who in (BASELINE, ENDPOINT) if who in mine[0].runs]
    return tuple(found)


def _cell(workload: str, who: str, rows: Sequence[Row], comparable: bool) -> Cell:
    runs = [row.runs[who] for row in rows]
    answers = [answer for run in runs for answer in run.answers]
    tokens, seconds = sum(run.tokens for run in runs), sum(run.seconds for run in runs)
    compared = who == ENDPOINT and BASELINE in rows[0].runs
    pairs = paired(_beside_baseline(rows), whole) if compared else []
    calm = [row for row in rows if not any(map(_loops, _everything(row)))]
    counted = reduce(Counters.plus, [run.counted for run in runs if run.counted is not None], Counters())
    drafted, accepted = counted.positions
    return Cell(
        workload=workload,
        concurrency=rows[0].concurrency,
        method=ENDPOINT if who == ENDPOINT else PLAIN,
        label=who,
        answers=len(answers),
        tokens=tokens,
        seconds=seconds,
        tokens_per_s=tokens / seconds if tokens >= MIN_TOKENS else None,
        speedup=speedup(pairs),
        decode_speedup=speedup(paired(_beside_baseline(rows), Run.decoding)) if compared else None,
        too_short=why_too_short(pairs) if compared else _too_few(tokens),
        tau=_tau(runs),
        acceptance_rate=counted.acceptance_rate,
        drafted_per_position=drafted,
        accepted_per_position=accepted,
        ttft_s=spread(answer.commits[0][0] for answer in answers if answer.commits),
        inter_token_s=spread(gap for answer in answers for gap in answer.gaps()),
        request_s=spread(answer.request_s for answer in answers),
        looping=sum(map(_loops, answers)),
        without_loops=WithoutLoops(
            answers=sum(len(row.runs[who].answers) for row in calm),
            speedup=speedup(paired(_beside_baseline(calm), whole)) if compared else None,
        ),
        identical=all(map(_same, rows)) if compared and comparable else None,
    )


def _too_few(tokens: int) -> str | None:
    if tokens >= MIN_TOKENS:
        return None
    return (
        f"{tokens} tokens measured, and fewer than {MIN_TOKENS} say nothing: give more prompts, or more tokens to each"
    )


def _beside_baseline(rows: Sequence[Row]) -> list[tuple[int, Run, Run]]:
    return [(row.group, row.runs[BASELINE], row.runs[ENDPOINT]) for row in rows]


def _tau(runs: Sequence[Run]) -> float | None:
    """Of those runs that were counted; of a server that tells only averages, the mean of them."""
    counted = [(run.tokens, run.counted) for run in runs if run.counted is not None]
    if any(found.accepted_tokens is not None for _, found in counted):
        tokens, total = sum(tokens for tokens, _ in counted), reduce(Counters.plus, (found for _, found in counted))
        return total.tau(tokens)
    lengths = [found.accept_length for _, found in counted if found.accept_length]
    return sum(lengths) / len(lengths) if lengths else None


def _everything(row: Row) -> list[Answer]:
    return [answer for run in row.runs.values() for answer in run.answers]


def _loops(answer: Answer) -> bool:
    return loops(UNIT.findall(answer.text))


def _same(row: Row) -> bool:
    pairs = zip(row.runs[ENDPOINT].answers, row.runs[BASELINE].answers, strict=True)
    return all(mine.text == theirs.text for mine, theirs in pairs)
