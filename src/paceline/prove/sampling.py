"""Distributions: recorded steps replayed, coins over several steps, whole generations."""

from __future__ import annotations

import math
from collections import Counter

import torch

from paceline.drafters import NONE
from paceline.prove.g_test import g_test
from paceline.prove.replay import FixedReplay, ReplayStream, toy
from paceline.prove.report import Check
from paceline.prove.subject import ProofSubject, is_structured
from paceline.prove.tap import Step
from paceline.sampling_params import SamplingParams

TEMPERATURE, TOP_K, TOP_P = 1.0, 8, 0.95  # few tokens pass, so cells are full and replays cheap
K = 3  # nodes of a draft
RAW_SHARE = 10  # one replay in RAW_SHARE goes through the processors again
FIRST_TOKENS = 3  # tokens of whole generations that are counted
FEW, FLATTER = 3, 2.5  # top_k and temperature of whole generations: few outcomes, none of them rare


def record(subject: ProofSubject, method: str) -> list[Step]:
    """Record steps of real generations, sampled without a seed."""
    with subject.tapped(keep=True) as tap:
        for i, prompt in enumerate(subject.prompts[: subject.effort.few + 1]):
            filters = {"temperature": TEMPERATURE, "top_k": TOP_K, "top_p": TOP_P}
            subject.llm.generate(prompt, subject.params(method, (K, 2, 4)[i % 3], max_tokens=16, **filters))
    return tap.steps


def replayed(subject: ProofSubject, method: str) -> Check:
    """Replay recorded steps. They are chosen by p and q, never by what was drawn: first those where acceptance and
    rejection are both likely."""
    steps = record(subject, method)
    sampled = [step for step in steps if step.q is not None and len(step.tokens) > 1]
    if sampled:
        check = Check(
            f"sampling · {method} replayed", "tokens of recorded p and q, drafts redrawn from q, with exact p"
        )
        for stream in _best_streams(sampled, subject.effort.steps):
            for times, processed in _times(subject):
                k = min(K, stream.p.shape[0])
                check.tests += stream.replay(
                    subject.verify, times, subject.generator, check.seen, k=k, processed=processed
                )
        return check
    check = Check(f"sampling · {method} replayed", "what recorded steps commit with its exact distribution")
    fixed = [FixedReplay.of(step) for step in steps if step.q is None]
    for one in sorted(fixed, key=_openness, reverse=True)[: subject.effort.steps]:
        for times, processed in _times(subject):
            check.tests += one.replay(subject.verify, times, subject.generator, check.seen, processed=processed)
    return check


def two_steps(subject: ProofSubject) -> Check:
    """Generate by a toy of three tokens, sharp enough to show a coin that is used in two steps."""
    check = Check(
        "sampling · coins over steps", "first tokens of a toy chain over several steps with their exact joint law"
    )
    stream, times = toy(subject.llm.loaded.decoder.device), subject.effort.replays
    for k in (1, 3):  # at k 1 the bonus is among the tokens that are counted
        check.tests += stream.replay(subject.verify, times, subject.generator, check.seen, k=k, tokens=3)
    return check


def generations(subject: ProofSubject) -> Check:
    """Compare many answers to one prompt with the exact law of their first tokens."""
    check = Check("sampling · whole generations", f"first {FIRST_TOKENS} tokens of answers with their exact joint law")
    prompt = _copying_prompt(subject)
    with subject.prefix_caching(True):
        law = _exact_law(subject, prompt)
    methods = [method for method in subject.methods if not is_structured(method)]
    each = max(subject.effort.generations // len(methods), 1)
    counts: Counter[tuple[int, ...]] = Counter()
    with subject.prefix_caching(True), subject.tapped() as tap:
        for method in methods:
            more = {"temperature": FLATTER, "top_k": FEW, "ignore_eos": True, "n": each}
            params = subject.params(method, 2, max_tokens=FIRST_TOKENS + 2, **more)
            answers = subject.llm.generate(prompt, params)[0].outputs
            counts.update(tuple(answer.token_ids[:FIRST_TOKENS]) for answer in answers)
    check.seen.merge(tap.seen)
    cells = sorted({*law, *counts})
    check.tests.append(g_test([counts[cell] for cell in cells], [law.get(cell, 0.0) for cell in cells]))
    return check


def _times(subject: ProofSubject) -> tuple[tuple[int, bool], ...]:
    """Return numbers of replays, and whether they start from processed logits."""
    return (subject.effort.replays, True), (subject.effort.replays // RAW_SHARE, False)


def _openness(fixed: FixedReplay) -> float:
    """Return the probability of the least likely of an accept, a reject and a bonus."""
    law = fixed.outcomes().sum(1)  # probability of each slot to be the one where the step stops
    inner = {parent + 1 for parent in fixed.parents}
    reject = sum(float(law[slot]) for slot in inner)
    return min(1 - float(law[0]), reject, 1 - reject)


def _best_streams(steps: list[Step], count: int) -> list[ReplayStream]:
    streams = []
    for step in steps:
        assert step.q is not None
        n = len(step.tokens)
        stream = ReplayStream.of(step.logits[:n], step.q[:n], step.params)
        agreement = torch.minimum(stream.p, stream.q.double()).sum(-1)
        streams.append((float(torch.minimum(agreement, 1 - agreement).max()), stream))
    streams.sort(key=lambda pair: -pair[0])
    return [stream for _, stream in streams[:count]]


def _copying_prompt(subject: ProofSubject) -> list[int]:
    """Return a prompt and a piece of its own plain answer, so that the first tokens can be copied."""
    prompt = subject.prompts[0]
    answer = subject.plain(prompt, subject.params(NONE, 1)).token_ids
    return [*prompt, *answer, *answer[: max(len(answer) // 2, 1)]]


def _exact_law(subject: ProofSubject, prompt: list[int]) -> dict[tuple[int, ...], float]:
    """Return the law of the first tokens, from the logits of plain passes over every beginning."""
    wanted = SamplingParams(temperature=0.0, max_tokens=1, logprobs=FEW, ignore_eos=True, speculation=NONE)
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(FIRST_TOKENS):
        outputs = subject.llm.generate([[*prompt, *begun] for begun in law], wanted)
        longer: dict[tuple[int, ...], float] = {}
        for (begun, p), output in zip(law.items(), outputs, strict=True):
            (entry,) = output.outputs[0].logprobs or [{}]
            weights = {token: math.exp(logprob.logprob / FLATTER) for token, logprob in entry.items()}
            total = sum(weights.values())
            longer |= {(*begun, token): p * weight / total for token, weight in weights.items()}
        law = longer
    return law
