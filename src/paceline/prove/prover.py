"""`prove`: every check in turn, on one model, with or without an injected fault."""

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
from paceline.prove.report import Check, Report
from paceline.prove.subject import PROMPTS, Effort, ProofSubject, chosen_methods, encoded_prompts, is_structured


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
    on_check: Callable[[str], None] = lambda name: None,
) -> Report:
    """Check that speculation by `methods` (all that are loaded if empty) changes nothing about this model's output."""
    inject.validate(fault)
    started = time.perf_counter()
    effort = effort or Effort.of(quick, num_prompts)
    names = chosen_methods(llm, methods)
    proof = {"quick": quick, "replays": effort.replays, "seed": seed, "injected": fault}
    exact = llm.loaded.decoder.kernels.exact
    engine = {"dtype": llm.dtype_name, "kv_dtype": llm.kv_dtype, "kernels": llm.kernels_name, "exact": exact}
    report = Report(llm.name, {"methods": list(names), "device": llm.device_name, **engine, **proof})
    asked = prompts or encoded_prompts(llm, max(effort.prompts, len(PROMPTS)))
    with _policy_untouched(llm), inject.injected(llm, fault) as verifier:
        subject = ProofSubject(
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
            for name, run in _checks(subject):
                on_check(name)
                check_started = time.perf_counter()
                check = run()
                check.seconds = time.perf_counter() - check_started
                report.checks.append(check)
    report.seconds = time.perf_counter() - started
    return report


@contextmanager
def _policy_untouched(llm: LLM) -> Iterator[None]:
    """Restore the policy afterwards: it must not learn from faults, nor from drafts that no policy would have made."""
    policy = llm.call(lambda engine: engine.policy)
    if not isinstance(policy, AdaptivePolicy):
        yield
        return
    before = llm.call(lambda engine: copy.deepcopy(policy.state()))
    try:
        yield
    finally:
        llm.call(lambda engine: policy.load(before))


def _checks(subject: ProofSubject) -> Iterator[tuple[str, Callable[[], Check]]]:
    """Yield the name of each check, and its function."""
    methods = subject.methods
    for m in methods:
        yield f"greedy {m}", partial(identity.alone, subject, m, seeded=False)
    yield "greedy batches", partial(identity.batched, subject, seeded=False)
    yield "greedy changing", partial(identity.batched, subject, seeded=False, changing=True)
    for m in methods:
        yield f"sampling {m}", partial(sampling.replayed, subject, m)
    yield "coins", partial(sampling.two_steps, subject)
    if not all(map(is_structured, methods)):
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
