"""Token for token: greedy and seeded answers, and what ends an answer, against plain decoding by the same engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from paceline.drafters import NONE
from paceline.engine.policy import AUTO
from paceline.prove.report import Row
from paceline.prove.restless import restless
from paceline.prove.subject import LENGTHS, Subject
from paceline.prove.tap import Tap
from paceline.sampling_params import SamplingParams

BATCH = 4
K = 4  # where boundaries are swept


def greedy_alone(subject: Subject, method: str) -> Row:
    row = Row(f"greedy · {method} alone", f"answers to {len(subject.prompts)} prompts with plain decoding's")
    _alone(subject, method, row, lambda i, name, k: subject.params(name, k))
    return row


def greedy_batch(subject: Subject) -> Row:
    row = Row("greedy · batches of 4", "answers in batches of mixed methods and k with plain decoding's, alone")
    _batched(subject, row, lambda i, name, k: subject.params(name, k))
    return row


def greedy_changing(subject: Subject) -> Row:
    """As `auto` does: other methods and other k from step to step within an answer."""
    row = Row("greedy · changing", "answers in batches, method and k new at every step, with plain decoding's, alone")
    with restless(subject.llm.engine, subject.methods):
        _batched(subject, row, lambda i, name, k: subject.params(AUTO, k))
    return row


def seeds_changing(subject: Subject) -> Row:
    row = Row("seeds · changing", "sampled answers with a seed, method and k new at every step, with plain decoding's")
    seeded = _seeded(subject)
    with restless(subject.llm.engine, subject.methods):
        _batched(subject, row, lambda i, name, k: seeded(i, AUTO, k))
    return row


def seeds_alone(subject: Subject, method: str) -> Row:
    row = Row(f"seeds · {method} alone", "sampled answers with a seed with plain decoding's, same seed")
    _alone(subject, method, row, _seeded(subject), subject.effort.few)
    return row


def seeds_batch(subject: Subject) -> Row:
    row = Row("seeds · batches of 4", "sampled answers with a seed in mixed batches with plain decoding's, alone")
    _batched(subject, row, _seeded(subject))
    return row


Ask = Callable[[int, str, int], SamplingParams]  # (prompt, method, k)


def _seeded(subject: Subject) -> Ask:
    def params(i: int, method: str, k: int) -> SamplingParams:
        filters = ({"top_p": 0.9}, {"top_k": 20}, {})[i % 3]
        return subject.params(method, k, temperature=0.7, seed=subject.seed + i, **filters)

    return params


def _alone(subject: Subject, method: str, row: Row, ask: Ask, count: int | None = None) -> None:
    for i, prompt in subject.each(row, count):
        params = ask(i, method, LENGTHS[i % len(LENGTHS)])
        (answer,) = subject.ask([prompt], [params], row, together=False)
        subject.compare(row, prompt, params, subject.plain(prompt, params), answer)


def _batched(subject: Subject, row: Row, ask: Ask) -> None:
    mixed = (*subject.methods, NONE)
    for start in range(0, len(subject.prompts), BATCH):
        prompts = subject.prompts[start : start + BATCH]
        places = range(start, start + len(prompts))
        params = [ask(i, mixed[i % len(mixed)], LENGTHS[(i + 1) % len(LENGTHS)]) for i in places]
        answers = subject.ask(prompts, params, row, together=True)
        for prompt, param, answer in zip(prompts, params, answers, strict=True):
            subject.compare(row, prompt, param, subject.plain(prompt, param), answer)


# -- what ends an answer


def lengths(subject: Subject) -> Row:
    """Every remainder: a draft of k must never lead past the limit, nor fall short of it."""
    row = Row("ends · max_tokens", f"1 to {K + 2} tokens more, at k {K}, with plain decoding's")
    for i, prompt in subject.each(row, subject.effort.few):
        method = subject.methods[i % len(subject.methods)]
        whole = subject.plain(prompt, subject.params(method, K)).token_ids
        begun = [*prompt, *whole[: len(whole) // 2]]  # in mid-answer, where there is something to draft from
        params = [subject.params(method, K, max_tokens=limit) for limit in range(1, K + 3)]
        plain = subject.plain(begun, params[-1])
        for limit, answer in enumerate(subject.ask([begun] * len(params), params, row, together=True), start=1):
            ended = "stop" if plain.finish_reason == "stop" and len(plain.token_ids) <= limit else "length"
            right = answer.token_ids == plain.token_ids[:limit] and answer.finish_reason == ended
            row.expect(right, f"max_tokens {limit} gave {len(answer.token_ids)} tokens, {answer.finish_reason}")
    return row


def context_full(subject: Subject) -> Row:
    row = Row("ends · context full", "answers that run into the end of the context with plain decoding's")
    for i, prompt in subject.each(row, subject.effort.few):
        method = subject.methods[i % len(subject.methods)]
        params = subject.params(method, LENGTHS[i % len(LENGTHS)], max_tokens=None, ignore_eos=True)
        room = subject.effort.max_tokens - i % 3
        with subject.context_of(len(prompt) + room):
            plain = subject.llm.generate(prompt, _plainly(params))[0].outputs[0]
            (answer,) = subject.ask([prompt], [params], row, together=False)
        subject.compare(row, prompt, params, plain, answer)
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
            params = subject.params(method, K, **more)
            with _eos(subject, token if kind == "EOS" else None):
                plain = subject.llm.generate(prompt, _plainly(params))[0].outputs[0]
                before = row.seen.committed
                (answer,) = subject.ask([prompt], [params], row, together=False)
            subject.compare(row, prompt, params, plain, answer)
            row.expect(answer.finish_reason == "stop", f"{kind} inside an accepted run did not stop the answer")
            if row.seen.committed - before > len(answer.token_ids):
                row.missing = None
    return row


def _inside_a_run(subject: Subject, prompt: list[int], method: str, row: Row) -> int | None:
    """A token of the greedy answer after which drafted tokens of the same step were accepted too."""
    with Tap().on(subject.llm.engine) as tap:
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


@contextmanager
def _eos(subject: Subject, token: int | None) -> Iterator[None]:
    """Let a token end answers as EOS does."""
    committer = subject.llm.engine.committer
    before = committer._eos
    committer._eos = before if token is None else frozenset({token})
    try:
        yield
    finally:
        committer._eos = before


def _plainly(params: SamplingParams) -> SamplingParams:
    return replace(params, speculation=NONE)
