"""A benchmark of our own engines, from the user's settings to the results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.bench.engines import Engines, weights_facts
from paceline.bench.grid import Contender, contenders
from paceline.bench.groups import check_enough
from paceline.bench.measurement import results_of
from paceline.bench.prompts import Prompt
from paceline.bench.results import Results
from paceline.bench.runner import OnProgress, RunPlan, collect
from paceline.config import AUTO, SpeculationConfig
from paceline.drafters.method_names import method_names
from paceline.drafters.methods import METHODS, is_packaged
from paceline.models.load.hub import PullProgress

K = "4"  # where neither methods nor k are given


def choose(methods: str | None = None, k: str | None = None, **drafts_with: Sequence[str]) -> list[Contender]:
    """Return the engines to compare; refuse unknown methods and files before the model is loaded.

    `methods` and `k` have commas, as the user wrote them; None: the first method of the table, and auto. `drafts_with`:
    models and folders to draft with, by option."""
    k = k if k is not None else K if methods is None else AUTO
    names = f"{next(iter(METHODS))},{AUTO}" if methods is None else methods
    needs = {name: method.needs for name, method in METHODS.items()}
    packaged = [name for name in METHODS if is_packaged(name)]
    return contenders(names, k, known=(*method_names(), AUTO), drafts_with=drafts_with, needs=needs, packaged=packaged)


def run(
    model: str,
    prompts: Sequence[Prompt],
    plan: RunPlan,
    settings: Mapping[str, Any],
    *,
    methods: str | None = None,
    k: str | None = None,
    draft_model: Sequence[str] | None = None,
    drafter: Sequence[str] | None = None,
    on_load: PullProgress | None = None,
    on_progress: OnProgress = lambda done, total, what: None,
    **options: Any,
) -> tuple[Results, BaseException | None]:
    """Raise an error that prevents the run; return a later one beside the results. `options`: of the engines."""
    drafting = SpeculationConfig(draft_model=tuple(draft_model or ()), drafter=tuple(drafter or ()))
    drafts_with = {"draft_model": list(drafting.draft_model), "drafter": list(drafting.drafter)}
    chosen = choose(methods, k, **drafts_with)
    check_enough(prompts, plan.concurrencies, plan.max_tokens)
    subject = Engines(
        model, chosen, progress=on_load, draft_model=drafting.draft_model, drafter=drafting.drafter, **options
    )
    subject.check(prompts, plan.max_tokens)
    measurement, stopped = collect(subject, prompts, plan, chosen, on_progress)
    described = {
        "methods": list(dict.fromkeys(contender.method for contender in chosen)),
        "k": list(dict.fromkeys(contender.k or AUTO for contender in chosen if contender.takes_k)),
        **drafts_with,
        "raw": options.get("raw", False),
        **settings,
    }
    where = {**subject.where(), **weights_facts(subject.path)}
    return results_of(measurement, model=model, where=where, settings=described, decode=subject.decode), stopped
