"""`prove`: every check in turn, on one model, with or without a fault injected."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager

import torch

from paceline.engine.adaptive import AdaptivePolicy
from paceline.llm import LLM
from paceline.prove import identity, inject, rollback, sampling
from paceline.prove.prompts import PROMPTS
from paceline.prove.report import Report, Row
from paceline.prove.subject import Effort, Subject, chosen_methods, encoded_prompts
from paceline.prove.tap import Step


def prove(
    llm: LLM,
    *,
    methods: SequenceOf[str] = (),
    num_prompts: int | None = None,
    quick: bool = False,
    effort: Effort | None = None,
    seed: int = 0,
    fault: str | None = None,
    prompts: list[list[int]] | None = None,
    on_row: Callable[[str], None] = lambda name: None,
) -> Report:
    """Check that speculation by `methods` (all that are loaded if empty) changes nothing about this model's output."""
    inject.check(fault)
    started = time.perf_counter()
    effort = effort or Effort.of(quick, num_prompts)
    names = chosen_methods(llm, methods)
    settings = {
        "methods": list(names),
        "device": llm.device_name,
        "dtype": llm.dtype_name,
        "kernels": llm.kernels_name,
        "exact": llm.loaded.decoder.kernels.exact,
        "quick": quick,
        "replays": effort.replays,
        "seed": seed,
        "injected": fault,
    }
    report = Report(llm.name, settings)
    asked = prompts or encoded_prompts(llm, max(effort.prompts, len(PROMPTS)))
    with _policy_untouched(llm), inject.injected(llm.engine, fault) as verifier:
        subject = Subject(
            llm=llm,
            verify=verifier,
            methods=names,
            effort=effort,
            prompts=asked[: effort.prompts],
            spare=asked[effort.prompts :],
            generator=torch.Generator().manual_seed(seed),
            seed=seed,
        )
        with subject.prefix_caching(False):  # every answer from scratch
            for name, check in _checks(subject):
                on_row(name)
                begun = time.perf_counter()
                row = check()
                row.seconds = time.perf_counter() - begun
                report.rows.append(row)
    report.seconds = time.perf_counter() - started
    return report


@contextmanager
def _policy_untouched(llm: LLM) -> Iterator[None]:
    """What is kept between runs must not learn from faults, nor from drafts nobody would have made."""
    policy = llm.engine.policy
    before = copy.deepcopy(policy.state()) if isinstance(policy, AdaptivePolicy) else None
    try:
        yield
    finally:
        if before is not None and isinstance(policy, AdaptivePolicy):
            policy.load(before)


def _checks(subject: Subject) -> Iterator[tuple[str, Callable[[], Row]]]:
    """What is about to be checked, and how."""
    steps: dict[str, list[Step]] = {}

    def recorded(method: str) -> list[Step]:
        if method not in steps:
            steps[method] = sampling.record(subject, method)
        return steps[method]

    def pool() -> list[Step]:
        return [step for method in subject.methods for step in recorded(method)]

    for method in subject.methods:
        yield f"greedy {method}", lambda m=method: identity.greedy_alone(subject, m)  # type: ignore[misc]
    yield "greedy batches", lambda: identity.greedy_batch(subject)
    yield "greedy changing", lambda: identity.greedy_changing(subject)
    for method in subject.methods:
        yield f"sampling {method}", lambda m=method: sampling.replayed(subject, m, recorded(m))  # type: ignore[misc]
    yield "sampling chains", lambda: sampling.synthetic(subject, pool(), tree=False)
    yield "sampling trees", lambda: sampling.synthetic(subject, pool(), tree=True)
    yield "coins", lambda: sampling.two_steps(subject)
    yield "generations", lambda: sampling.generations(subject)
    for method in subject.methods:
        yield f"seeds {method}", lambda m=method: identity.seeds_alone(subject, m)  # type: ignore[misc]
    yield "seeds batches", lambda: identity.seeds_batch(subject)
    yield "seeds changing", lambda: identity.seeds_changing(subject)
    yield "max_tokens", lambda: identity.lengths(subject)
    yield "stops", lambda: identity.stops(subject)
    yield "context", lambda: identity.context_full(subject)
    for method in subject.methods:
        yield f"cache {method}", lambda m=method: rollback.cache_after_rollback(subject, m)  # type: ignore[misc]
