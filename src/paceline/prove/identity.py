"""Greedy and seeded answers, and all ways an answer can end, compared by token with plain decoding by the engine."""

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
from paceline.prove.report import Row
from paceline.prove.subject import LENGTHS, Subject, on_engine, patched
from paceline.sampling_params import SamplingParams

BATCH = 4
K = 4  # where boundaries are swept
MOST_DRAFTED = 8  # tokens, by the policy that changes at every step


def alone(subject: Subject, method: str, *, seeded: bool) -> Row:
    kind, answers = _words(seeded)
    row = Row(f"{kind} · {method} alone", f"{answers} with plain decoding's")
    for i, prompt in subject.each(row, subject.effort.few if seeded else None):
        params = _params(subject, i, method, LENGTHS[i % len(LENGTHS)], seeded)
        _compare(subject, row, [prompt], [params])
    return row


def batched(subject: Subject, *, seeded: bool, changing: bool = False) -> Row:
    """In batches of mixed methods and k; `changing`: which also change from step to step within an answer."""
    kind, answers = _words(seeded)
    name, how = (
        ("changing", "method and k new at every step,")
        if changing
        else (f"batches of {BATCH}", "of mixed methods and k")
    )
    row = Row(f"{kind} · {name}", f"{answers} in batches, {how} with plain decoding's, alone")
    mixed = (AUTO,) if changing else (*subject.methods, NONE)
    with _changing_policy(subject) if changing else nullcontext():
        for start in range(0, len(subject.prompts), BATCH):
            prompts = subject.prompts[start : start + BATCH]
            params = [
                _params(subject, i, mixed[i % len(mixed)], LENGTHS[(i + 1) % len(LENGTHS)], seeded)
                for i in range(start, start + len(prompts))
            ]
            _compare(subject, row, prompts, params)
    return row


def _words(seeded: bool) -> tuple[str, str]:
    return ("seeds", "sampled answers with a seed") if seeded else ("greedy", "answers")


def _params(subject: Subject, i: int, method: str, k: int, seeded: bool) -> SamplingParams:
    if not seeded:
        return subject.params(method, k)
    filters = ({"top_p": 0.9}, {"top_k": 20}, {})[i % 3]
    return subject.params(method, k, temperature=0.7, seed=subject.seed + i, **filters)


def _compare(subject: Subject, row: Row, prompts: SequenceOf[list[int]], params: SequenceOf[SamplingParams]) -> None:
    """The answers of these requests, sent at once, with those of each alone and plain."""
    for prompt, one, answer in zip(prompts, params, subject.ask(prompts, params, row), strict=True):
        subject.compare(row, prompt, one, subject.plain(prompt, one), answer)


class ChangingPolicy(FixedPolicy):
    """Another method and k at every step, by a hash of the committed length: a policy may use committed tokens."""

    def __init__(self, methods: SequenceOf[str]) -> None:
        self._choices = [NONE, *[method for method in methods for _ in range(3)]]

    def choose(self, sequence: Sequence) -> DraftPlan:
        if wish(sequence, AUTO, None)[0] == NONE:  # the plain answer to compare with
            return DraftPlan()
        drawn = zlib.crc32(f"{sequence.index} {len(sequence.tokens)}".encode())
        method = self._choices[drawn % len(self._choices)]
        budget = min(1 + drawn // 97 % MOST_DRAFTED, sequence.remaining - 1)
        return DraftPlan(method, budget) if method != NONE and budget > 0 else DraftPlan()


@contextmanager
def _changing_policy(subject: Subject) -> Iterator[None]:
    llm, policy = subject.llm, ChangingPolicy(subject.methods)
    with patched(llm, lambda engine: engine, policy=policy), patched(llm, lambda e: e.scheduler, policy=policy):
        yield


# -- what ends an answer


def lengths(subject: Subject) -> Row:
    """Every remainder: a draft of k must never exceed the limit, nor fall short of it."""
    row = Row("ends · max_tokens", f"1 to {K + 2} tokens more, at k {K}, with plain decoding's")
    for i, prompt in subject.each(row, subject.effort.few):
        method = subject.methods[i % len(subject.methods)]
        whole = subject.plain(prompt, subject.params(method, K)).token_ids
        begun = [*prompt, *whole[: len(whole) // 2]]  # in mid-answer, where there is something to draft from
        params = [subject.params(method, K, max_tokens=limit) for limit in range(1, K + 3)]
        plain = subject.plain(begun, params[-1])
        for limit, answer in enumerate(subject.ask([begun] * len(params), params, row), start=1):
            ended = "stop" if plain.finish_reason == "stop" and len(plain.token_ids) <= limit else "length"
            right = answer.token_ids == plain.token_ids[:limit] and answer.finish_reason == ended
            row.expect(right, f"max_tokens {limit} gave {len(answer.token_ids)} tokens, {answer.finish_reason}")
    return row


def context_full(subject: Subject) -> Row:
    row = Row("ends · context full", "answers that run into the end of the context with plain decoding's")
    context = on_engine(subject.llm, lambda engine: engine.max_model_len)
    for i, prompt in subject.each(row, subject.effort.few):
        method = subject.methods[i % len(subject.methods)]
        params = subject.params(method, LENGTHS[i % len(LENGTHS)], max_tokens=None, ignore_eos=True)
        room = subject.effort.max_tokens - i % 3
        with patched(subject.llm, lambda engine: engine.admission, max_model_len=min(len(prompt) + room, context)):
            answer = _compare_anew(subject, row, prompt, params)
        row.expect(len(answer.token_ids) == room, f"{len(answer.token_ids)} tokens where {room} fit")
    return row


def stops(subject: Subject) -> Row:
    """Stop string, stop token and EOS, each put where a longer run of drafted tokens was accepted."""
    row = Row("ends · stop, EOS", "answers that stop inside an accepted run with plain decoding's")
    row.missing = "no stop fell inside an accepted run"
    for i, prompt in subject.each(row, subject.effort.few):
        method = subject.methods[i % len(subject.methods)]
        token = _inside_a_run(subject, prompt, method, row)
        if token is None:
            continue
        text = subject.llm.tokenizer.decode([token])
        ways: dict[str, dict[str, object]] = {"stop token": {"stop_token_ids": (token,)}, "EOS": {}}
        if text.strip():
            ways["stop string"] = {"stop": (text,)}
        for kind, more in ways.items():
            eos = {"eos": frozenset({token})} if kind == "EOS" else {}
            with patched(subject.llm, lambda engine: engine.admission, **eos):
                before = row.seen.committed
                answer = _compare_anew(subject, row, prompt, subject.params(method, K, **more))
            row.expect(answer.finish_reason == "stop", f"{kind} inside an accepted run did not stop the answer")
            if row.seen.committed - before > len(answer.token_ids):
                row.missing = None
    return row


def _compare_anew(subject: Subject, row: Row, prompt: list[int], params: SamplingParams) -> CompletionOutput:
    """Compare with a new plain answer by the engine as patched now."""
    plain = subject.llm.generate(prompt, replace(params, speculation=NONE))[0].outputs[0]
    (answer,) = subject.ask([prompt], [params], row)
    subject.compare(row, prompt, params, plain, answer)
    return answer


def _inside_a_run(subject: Subject, prompt: list[int], method: str, row: Row) -> int | None:
    """A token of the greedy answer after which drafted tokens of the same step were accepted too."""
    with subject.tapped() as tap:
        answer = subject.llm.generate(prompt, subject.params(method, K))[0].outputs[0]
    row.seen.merge(tap.seen)
    at = 0
    for accepted in next(iter(tap.runs.values()), []):
        run = answer.token_ids[at : at + accepted]
        for offset, token in enumerate(run[:-1]):
            if token not in answer.token_ids[: at + offset]:
                return token
        at += accepted + 1
    return None
