"""A benchmark of our own engines, from the user's settings to the results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.bench.engines import Engines
from paceline.bench.grid import AUTO, Contender, contenders
from paceline.bench.groups import check_enough
from paceline.bench.measurement import results_of
from paceline.bench.prompts import Prompt
from paceline.bench.results import Results
from paceline.bench.runner import OnProgress, Plan, collect
from paceline.drafters.methods import METHODS, method_names
from paceline.models.hub import Progress

K = "4"  # where neither methods nor k are given


@dataclass(frozen=True, kw_only=True)
class Wish:
    model: str
    methods: str | None = None  # comma-separated, as the user wrote them; None: the first of the table, and auto
    k: str | None = None
    draft_model: str | None = None
    drafter: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    threads: int | None = None
    raw: bool = False


def choose(wish: Wish) -> list[Contender]:
    """Checked before the model is loaded: refuses unknown methods and files."""
    methods = f"{next(iter(METHODS))},{AUTO}" if wish.methods is None else wish.methods
    k = wish.k if wish.k is not None else K if wish.methods is None else AUTO
    given = {"draft_model": wish.draft_model, "drafter": wish.drafter}
    needs = {name: method.needs for name, method in METHODS.items()}
    return contenders(methods, k, known=(*method_names(), AUTO), given=given, needs=needs)


def run(
    wish: Wish,
    prompts: Sequence[Prompt],
    plan: Plan,
    settings: Mapping[str, Any],
    *,
    on_load: Progress | None = None,
    on_progress: OnProgress = lambda done, total, what: None,
) -> tuple[Results, BaseException | None]:
    """Raises what keeps it from measuring anything; a later reason to stop is returned beside the results."""
    chosen = choose(wish)
    check_enough(prompts, plan.concurrencies, plan.max_tokens)
    subject = Engines(
        wish.model,
        chosen,
        draft_model=wish.draft_model,
        drafter=wish.drafter,
        dtype=wish.dtype,
        device=wish.device,
        threads=wish.threads,
        raw=wish.raw,
        progress=on_load,
    )
    subject.check(prompts, plan.max_tokens)
    measurement, stopped = collect(subject, prompts, plan, chosen, on_progress)
    given = {
        "methods": list(dict.fromkeys(contender.method for contender in chosen)),
        "k": list(dict.fromkeys(contender.k or AUTO for contender in chosen if contender.takes_k)),
        "draft_model": wish.draft_model,
        "drafter": wish.drafter,
        "raw": wish.raw,
        **settings,
    }
    return results_of(measurement, model=wish.model, where=subject.where(), settings=given), stopped
