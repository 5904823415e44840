"""Identity: greedy and seeded answers, and all ways an answer can end, token by token with plain decoding's."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager, nullcontext
from dataclasses import replace

from paceline.config import AUTO
from paceline.core.sequence import Sequence
from paceline.drafters import NONE
from paceline.engine.policy import DraftPlan, FixedPolicy, wish
from paceline.outputs import CompletionOutput
from paceline.prove.report import Check
from paceline.prove.subject import LENGTHS, ProofSubject, patched
from paceline.sampling_params import SamplingParams

BATCH = 4  # prompts
K = 4  # nodes of a draft where the length of an answer is swept
MOST_DRAFTED = 8  # nodes, by the policy that changes at every step


def alone(subject: ProofSubject, method: str, *, seeded: bool) -> Check:
    """Check every prompt alone with one method."""
    kind, answers = _words(seeded)
    check = Check(f"{kind} · {method} alone", f"{answers} with plain decoding's")
    for i, prompt in subject.each(check, subject.effort.few if seeded else None):
        params = _params(subject, i, method, LENGTHS[i % len(LENGTHS)], seeded)
        _compare(subject, check, [prompt], [params])
    return check


def batched(subject: ProofSubject, *, seeded: bool, changing: bool = False) -> Check:
    """Check batches of mixed methods and k; `changing`: which also change from step to step within an answer."""
    kind, answers = _words(seeded)
    name, how = (
        ("changing", "method and k new at every step,")
        if changing
        else (f"batches of {BATCH}", "of mixed methods and k")
    )
    check = Check(f"{kind} · {name}", f"{answers} in batches, {how} with plain decoding's, alone")
    mixed = (AUTO,) if changing else (*subject.methods, NONE)
    with _changing_policy(subject) if changing else nullcontext():
        for start in range(0, len(subject.prompts), BATCH):
            prompts = subject.prompts[start : start + BATCH]
            params = [
                _params(subject, i, mixed[i % len(mixed)], LENGTHS[(i + 1) % len(LENGTHS)], seeded)
                for i in range(start, start + len(prompts))
            ]
            _compare(subject, check, prompts, params)
    return check


def _words(seeded: bool) -> tuple[str, str]:
    return ("seeds", "sampled answers with a seed") if seeded else ("greedy", "answers")


def _params(subject: ProofSubject, i: int, method: str, k: int, seeded: bool) -> SamplingParams:
    if not seeded:
        return subject.params(method, k)
    filters = ({"top_p": 0.9}, {"top_k": 20}, {})[i % 3]
    return subject.params(method, k, temperature=0.7, seed=subject.seed + i, **filters)


def _compare(
    subject: ProofSubject, check: Check, prompts: SequenceOf[list[int]], params: SequenceOf[SamplingParams]
) -> None:
    """Compare the answers of requests that are sent at once with those of each alone and plain."""
    for prompt, one, answer in zip(prompts, params, subject.ask(prompts, params, check), strict=True):
        subject.compare(check, prompt, one, subject.plain(prompt, one), answer)


class ChangingPolicy(FixedPolicy):
    """A policy of another method and k at every step, by a hash of the committed length, which a policy may use."""

    def __init__(self, methods: SequenceOf[str]) -> None:
        self._choices = [NONE, *[method for method in methods for _ in range(3)]]

    def choose(self, sequence: Sequence) -> DraftPlan:
        if wish(sequence, AUTO, None)[0] == NONE:  # the plain answer to compare with
            return DraftPlan()
        drawn = zlib.crc32(f"{sequence.index} {len(sequence.tokens)}".encode())
        method = self._choices[drawn % len(self._choices)]
        max_nodes = min(1 + drawn // 97 % MOST_DRAFTED, sequence.remaining - 1)
        return DraftPlan(method, max_nodes) if method != NONE and max_nodes > 0 else DraftPlan()


@contextmanager
def _changing_policy(subject: ProofSubject) -> Iterator[None]:
    llm, policy = subject.llm, ChangingPolicy(subject.methods)
    with patched(llm, lambda engine: engine, policy=policy), patched(llm, lambda e: e.scheduler, policy=policy):
        yield


# -- what ends an answer


def lengths(subject: ProofSubject) -> Check:
    """Check every remainder: a draft of k must never exceed the limit, nor fall short of it."""
    check = Check("ends · max_tokens", f"1 to {K + 2} tokens more, at k {K}, with plain decoding's")
    for i, prompt in subject.each(check, subject.effort.few):
        method = subject.methods[i % len(subject.methods)]
        whole = subject.plain(prompt, subject.params(method, K)).token_ids
        half = [*prompt, *whole[: len(whole) // 2]]  # in mid-answer, where there is something to draft from
        params = [subject.params(method, K, max_tokens=limit) for limit in range(1, K + 3)]
        plain = subject.plain(half, params[-1])
        for limit, answer in enumerate(subject.ask([half] * len(params), params, check), start=1):
            ended = "stop" if plain.finish_reason == "stop" and len(plain.token_ids) <= limit else "length"
            right = answer.token_ids == plain.token_ids[:limit] and answer.finish_reason == ended
            check.expect(right, f"max_tokens {limit} gave {len(answer.token_ids)} tokens, {answer.finish_reason}")
    return check


def context_full(subject: ProofSubject) -> Check:
    """Check answers that fill the context."""
    check = Check("ends · context full", "answers that run into the end of the context with plain decoding's")
    context = subject.llm.call(lambda engine: engine.max_model_len)
    for i, prompt in subject.each(check, subject.effort.few):
        method = subject.methods[i % len(subject.methods)]
        params = subject.params(method, LENGTHS[i % len(LENGTHS)], max_tokens=None, ignore_eos=True)
        room = subject.effort.max_tokens - i % 3
        with patched(subject.llm, lambda engine: engine.admission, max_model_len=min(len(prompt) + room, context)):
            answer = _compare_anew(subject, check, prompt, params)
        check.expect(len(answer.token_ids) == room, f"{len(answer.token_ids)} tokens where {room} fit")
    return check


def stops(subject: ProofSubject) -> Check:
    """Check stop string, stop token and EOS, each put where a longer run of drafted tokens was accepted."""
    check = Check("ends · stop, EOS", "answers that stop inside an accepted run with plain decoding's")
    check.missing = "no stop fell inside an accepted run"
    for i, prompt in subject.each(check, subject.effort.few):
        method = subject.methods[i % len(subject.methods)]
        token = _inside_a_run(subject, prompt, method, check)
        if token is None:
            continue
        text = subject.llm.tokenizer.decode([token])
        ways: dict[str, dict[str, object]] = {"stop token": {"stop_token_ids": (token,)}, "EOS": {}}
        if text.strip():
            ways["stop string"] = {"stop": (text,)}
        for kind, more in ways.items():
            eos = {"eos": frozenset({token})} if kind == "EOS" else {}
            with patched(subject.llm, lambda engine: engine.admission, **eos):
                before = check.seen.committed
                answer = _compare_anew(subject, check, prompt, subject.params(method, K, **more))
            check.expect(answer.finish_reason == "stop", f"{kind} inside an accepted run did not stop the answer")
            if check.seen.committed - before > len(answer.token_ids):
                check.missing = None
    return check


def _compare_anew(subject: ProofSubject, check: Check, prompt: list[int], params: SamplingParams) -> CompletionOutput:
    """Compare with a new plain answer by the engine as patched now."""
    plain = subject.llm.generate(prompt, replace(params, speculation=NONE))[0].outputs[0]
    (answer,) = subject.ask([prompt], [params], check)
    subject.compare(check, prompt, params, plain, answer)
    return answer


def _inside_a_run(subject: ProofSubject, prompt: list[int], method: str, check: Check) -> int | None:
    """Return a token of the greedy answer after which drafted tokens of its step were accepted too."""
    with subject.tapped() as tap:
        answer = subject.llm.generate(prompt, subject.params(method, K))[0].outputs[0]
    check.seen.merge(tap.seen)
    at = 0
    for accepted in next(iter(tap.runs.values()), []):
        run = answer.token_ids[at : at + accepted]
        for offset, token in enumerate(run[:-1]):
            if token not in answer.token_ids[: at + offset]:
                return token
        at += accepted + 1
    return None
