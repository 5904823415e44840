"""Distributions: recorded steps replayed, made-up q on recorded p, coins over several steps, whole generations."""

from __future__ import annotations

import math
from collections import Counter

import torch

from paceline.drafters import NONE
from paceline.prove.g_test import g_test
from paceline.prove.replay import Fixed, Stream, exact_p, perturbed, toy
from paceline.prove.report import Row
from paceline.prove.subject import Subject
from paceline.prove.tap import Step
from paceline.sampling_params import SamplingParams

TEMPERATURE, TOP_K, TOP_P = 1.0, 8, 0.95  # few tokens are kept, so cells are full and replays cheap
K = 3
RAW_SHARE = 10  # one replay in so many goes through the processors again
FIRST_TOKENS = 3  # of whole generations
FEW, FLATTER = 3, 2.5  # their top_k and temperature: few outcomes, none of them rare


def record(subject: Subject, method: str) -> list[Step]:
    """Steps of real generations, sampled without a seed."""
    with subject.tapped(keep=True) as tap:
        for i, prompt in enumerate(subject.prompts[: subject.effort.few + 1]):
            wanted = subject.params(
                method, (K, 2, 4)[i % 3], temperature=TEMPERATURE, top_k=TOP_K, top_p=TOP_P, max_tokens=16
            )
            subject.llm.generate(prompt, wanted)
    return tap.steps


def replayed(subject: Subject, method: str, steps: list[Step]) -> Row:
    """The verifier on recorded steps. Steps are chosen by p and q alone, those of the highest entropy first."""
    sampled = [step for step in steps if step.q is not None and len(step.tokens) > 1]
    if sampled:
        row = Row(f"sampling · {method} replayed", "tokens of recorded p and q, drafts redrawn from q, with exact p")
        for stream in _best_streams(sampled, subject.effort.steps):
            _stream(subject, row, stream, k=min(K, stream.p.shape[0]))
        return row
    row = Row(f"sampling · {method} replayed", "what recorded steps commit with its exact distribution")
    fixed = [Fixed.of(step) for step in steps if step.q is None]
    times = subject.effort.replays
    for one in sorted(fixed, key=_openness, reverse=True)[: subject.effort.steps]:
        row.tests += one.replay(subject.verify, times, subject.generator, row.seen)
        row.tests += one.replay(subject.verify, times // RAW_SHARE, subject.generator, row.seen, processed=False)
    return row


def synthetic(subject: Subject, steps: list[Step], *, tree: bool) -> Row:
    """Drafts drawn from q without a draft model: q is made up, p recorded."""
    kind = "trees" if tree else "chains"
    row = Row(f"sampling · synthetic q, {kind}", f"tokens of recorded p, {kind} from a made-up q, with exact p")
    for step in _by_entropy(steps)[: subject.effort.steps]:
        p = exact_p(step.logits, step.params)
        stream = Stream.of(step.logits, perturbed(p, subject.generator), step.params)
        for k in (1, 2) if tree else (1, K):  # at k 1 the bonus is among the tokens looked at
            _stream(subject, row, stream, k=k, tree=tree)
    return row


def two_steps(subject: Subject) -> Row:
    """A toy of three tokens, sharp enough to show a coin that is used in two steps."""
    row = Row(
        "sampling · coins over steps", "first tokens of a toy chain over several steps with their exact joint law"
    )
    stream = toy(subject.llm.loaded.decoder.device)
    times = subject.effort.replays
    for k, tree, tokens in ((3, False, 3), (2, True, 3)):
        row.tests += stream.replay(subject.verify, times, subject.generator, row.seen, k=k, tree=tree, tokens=tokens)
    return row


def generations(subject: Subject) -> Row:
    """End to end, at small N: many answers to one prompt, against the exact law of their first tokens."""
    row = Row("sampling · whole generations", f"first {FIRST_TOKENS} tokens of answers with their exact joint law")
    prompt = _copying_prompt(subject)
    with subject.prefix_caching(True):
        law = _exact_law(subject, prompt)
    each = max(subject.effort.generations // len(subject.methods), 1)
    counts: Counter[tuple[int, ...]] = Counter()
    with subject.prefix_caching(True), subject.tapped() as tap:
        for method in subject.methods:
            more = {"temperature": FLATTER, "top_k": FEW, "ignore_eos": True, "n": each}
            params = subject.params(method, 2, max_tokens=FIRST_TOKENS + 2, **more)
            answers = subject.llm.generate(prompt, params)[0].outputs
            counts.update(tuple(answer.token_ids[:FIRST_TOKENS]) for answer in answers)
    row.seen.merge(tap.seen)
    cells = sorted({*law, *counts})
    row.tests.append(g_test([counts[cell] for cell in cells], [law.get(cell, 0.0) for cell in cells]))
    return row


def _stream(subject: Subject, row: Row, stream: Stream, *, k: int, tree: bool = False) -> None:
    times = subject.effort.replays
    for count, processed in ((times, True), (times // RAW_SHARE, False)):
        row.tests += stream.replay(
            subject.verify, count, subject.generator, row.seen, k=k, tree=tree, processed=processed
        )


def _openness(fixed: Fixed) -> float:
    """The least likely of an accept, a reject and a bonus."""
    law = fixed.outcomes().sum(1)  # by the slot where the step stops
    inner = {parent + 1 for parent in fixed.parents}
    reject = sum(float(law[slot]) for slot in inner)
    return min(1 - float(law[0]), reject, 1 - reject)


def _by_entropy(steps: list[Step]) -> list[Step]:
    """Steps whose least open node still leaves the most open; p must leave more than one token open."""

    def least(step: Step) -> float:
        p = exact_p(step.logits, step.params)
        return float(-(p * p.clamp_min(1e-30).log()).sum(-1).min())

    return sorted(steps, key=least, reverse=True)


def _best_streams(steps: list[Step], count: int) -> list[Stream]:
    streams = []
    for step in steps:
        assert step.q is not None
        n = len(step.tokens)
        stream = Stream.of(step.logits[:n], step.q[:n], step.params)
        agreement = torch.minimum(stream.p, stream.q.double()).sum(-1)
        streams.append((float(torch.minimum(agreement, 1 - agreement).max()), stream))
    streams.sort(key=lambda pair: -pair[0])
    return [stream for _, stream in streams[:count]]


def _copying_prompt(subject: Subject) -> list[int]:
    """A prompt and a piece of its own plain answer, so that the first tokens already have something to copy."""
    prompt = subject.prompts[0]
    answer = subject.plain(prompt, subject.params(NONE, 1)).token_ids
    return [*prompt, *answer, *answer[: max(len(answer) // 2, 1)]]


def _exact_law(subject: Subject, prompt: list[int]) -> dict[tuple[int, ...], float]:
    """Of the first tokens, from the logits of plain passes over every beginning."""
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
