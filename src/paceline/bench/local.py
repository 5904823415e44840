"""A benchmark of our own engines from the wishes to the results; what ends it early comes with what was measured."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline import __version__
from paceline.bench.engines import Engines
from paceline.bench.grid import Contender, contenders
from paceline.bench.groups import check_enough
from paceline.bench.measurement import Measurement
from paceline.bench.prompts import Prompt
from paceline.bench.results import PLAIN, Results
from paceline.bench.runner import OnProgress, Plan, measure
from paceline.bench.summary import cells
from paceline.drafters import method_names
from paceline.engine.policy import AUTO
from paceline.models.hub import Progress


@dataclass(frozen=True, kw_only=True)
class Wish:
    model: str
    methods: str  # comma-separated, as the user wrote them
    k: str
    draft_model: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    threads: int | None = None
    raw: bool = False


def choose(wish: Wish) -> list[Contender]:
    """Before the model is loaded: refuses what does not exist."""
    known = (*method_names(), AUTO)
    return contenders(wish.methods, wish.k, known=known, draft_model=wish.draft_model is not None)


def run(
    wish: Wish,
    prompts: Sequence[Prompt],
    plan: Plan,
    settings: Mapping[str, Any],
    *,
    on_load: Progress | None = None,
    on_progress: OnProgress = lambda done, total, what: None,
) -> tuple[Results, BaseException | None]:
    """Raises what keeps it from measuring anything; what happens later is returned beside the results."""
    chosen = choose(wish)
    check_enough(prompts, plan.concurrencies, plan.max_tokens)
    subject = Engines(
        wish.model,
        chosen,
        draft_model=wish.draft_model,
        dtype=wish.dtype,
        device=wish.device,
        threads=wish.threads,
        raw=wish.raw,
        progress=on_load,
    )
    subject.check(prompts, plan.max_tokens)
    measurement, stopped = Measurement(chosen), None
    try:
        measure(subject, prompts, plan, measurement, on_progress)
    except BaseException as reason:  # Ctrl-C, no memory: minutes of measurement are not thrown away
        if not measurement.rows:
            raise
        stopped = reason
    results = Results(
        paceline=__version__,
        date=time.strftime("%Y-%m-%d"),
        model=wish.model,
        where=subject.where(),
        settings={
            "methods": list(dict.fromkeys(contender.method for contender in chosen)),
            "k": list(
                dict.fromkeys(contender.k or AUTO for contender in chosen if contender.method not in (PLAIN, AUTO))
            ),
            "draft_model": wish.draft_model,
            "raw": wish.raw,
            **settings,
            "left_out": {str(level): count for level, count in measurement.left_out.items() if count},
        },
        complete=measurement.complete,
        cells=cells(measurement),
    )
    return results, stopped
