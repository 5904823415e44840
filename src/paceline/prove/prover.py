"""`prove`: every check in turn, on one model, with or without a fault injected."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from functools import partial

import torch

from paceline.engine.policy.adaptive import AdaptivePolicy
from paceline.llm import LLM
from paceline.prove import identity, inject, rollback, sampling
from paceline.prove.report import Report, Row
from paceline.prove.subject import PROMPTS, Effort, Subject, chosen_methods, encoded_prompts, on_engine
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
        "kv_dtype": llm.kv_dtype,
        "kernels": llm.kernels_name,
        "exact": llm.loaded.decoder.kernels.exact,
        "quick": quick,
        "replays": effort.replays,
        "seed": seed,
        "injected": fault,
    }
    report = Report(llm.name, settings)
    asked = prompts or encoded_prompts(llm, max(effort.prompts, len(PROMPTS)))
    with _policy_untouched(llm), inject.injected(llm, fault) as verifier:
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
    """The stored policy must not learn from faults, nor from drafts that no policy would have made."""
    policy = on_engine(llm, lambda engine: engine.policy)
    if not isinstance(policy, AdaptivePolicy):
        yield
        return
    before = on_engine(llm, lambda engine: copy.deepcopy(policy.state()))
    try:
        yield
    finally:
        on_engine(llm, lambda engine: policy.load(before))


def _checks(subject: Subject) -> Iterator[tuple[str, Callable[[], Row]]]:
    """The name of each check, and its function."""
    steps: dict[str, list[Step]] = {}

    def recorded(*methods: str) -> list[Step]:
        for method in methods:
            if method not in steps:
                steps[method] = sampling.record(subject, method)
        return [step for method in methods for step in steps[method]]

    methods = subject.methods
    for m in methods:
        yield f"greedy {m}", partial(identity.alone, subject, m, seeded=False)
    yield "greedy batches", partial(identity.batched, subject, seeded=False)
    yield "greedy changing", partial(identity.batched, subject, seeded=False, changing=True)
    for m in methods:
        yield f"sampling {m}", lambda m=m: sampling.replayed(subject, m, recorded(m))  # type: ignore[misc]
    yield "sampling chains", lambda: sampling.synthetic(subject, recorded(*methods), tree=False)
    yield "sampling trees", lambda: sampling.synthetic(subject, recorded(*methods), tree=True)
    yield "coins", partial(sampling.two_steps, subject)
    yield "generations", partial(sampling.generations, subject)
    for m in methods:
        yield f"seeds {m}", partial(identity.alone, subject, m, seeded=True)
    yield "seeds batches", partial(identity.batched, subject, seeded=True)
    yield "seeds changing", partial(identity.batched, subject, seeded=True, changing=True)
    yield "max_tokens", partial(identity.lengths, subject)
    yield "stops", partial(identity.stops, subject)
    yield "context", partial(identity.context_full, subject)
    for m in methods:
        yield f"cache {m}", partial(rollback.cache_after_rollback, subject, m)
