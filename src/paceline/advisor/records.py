"""What plain decoding said, kept to be said again: greedy or seeded, it is the same tokens under any draft.

So one plain answer to a prompt is enough to know what any drafter would have had accepted on it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from paceline.advisor.machine import Advised
from paceline.bench.grid import Contender
from paceline.bench.prompts import Prompt
from paceline.bench.results import PLAIN
from paceline.bench.runner import WARM_UP, WARM_UP_TOKENS, OnProgress, Plan
from paceline.sampling_params import SamplingParams

AT_ONCE = 16

Tokens = tuple[int, ...]


@dataclass(frozen=True)
class Record:
    prompt: Tokens
    answer: Tokens
    params: SamplingParams  # as it was asked, seed included


class Records(dict[Tokens, Record]):
    """By prompt. Grows as the answers come; what is in it is whole, whenever the run ends."""

    @property
    def longest(self) -> int:
        return max(len(record.prompt) + len(record.answer) for record in self.values())


def record(
    subject: Advised, prompts: Sequence[Prompt], plan: Plan, records: Records, on_progress: OnProgress
) -> list[Prompt]:
    """Answer every turn of every prompt once, plainly, many at a time; returns the prompts answered whole."""
    subject.contenders = [Contender(PLAIN)]
    answerer = subject.open(AT_ONCE)[Contender(PLAIN)]
    done: list[Prompt] = []
    for chunk in [[WARM_UP], *_chunks(prompts)]:
        most = WARM_UP_TOKENS if chunk == [WARM_UP] else plan.max_tokens
        said: list[list[str]] = [[] for _ in chunk]
        for _ in chunk[0].turns:
            asked = [subject.encode(prompt, answers) for prompt, answers in zip(chunk, said, strict=True)]
            params = [_params(plan, most, tokens).resolve(subject.defaults) for tokens in asked]
            run = answerer.answer(asked, params)
            for tokens, answer, each, answers in zip(asked, run.answers, params, said, strict=True):
                records[tuple(tokens)] = Record(tuple(tokens), answer.tokens, each)
                answers.append(subject.decode(answer.tokens))
        done += [prompt for prompt in chunk if prompt is not WARM_UP]
        on_progress(len(done), len(prompts), "answering half of the prompts plainly")
    return done


def _chunks(prompts: Sequence[Prompt]) -> Iterator[list[Prompt]]:
    """Conversations that are asked together have equally many turns."""
    by_turns: dict[int, list[Prompt]] = {}
    for prompt in prompts:
        by_turns.setdefault(len(prompt.turns), []).append(prompt)
    for members in by_turns.values():
        for start in range(0, len(members), AT_ONCE):
            yield members[start : start + AT_ONCE]


def _params(plan: Plan, max_tokens: int, prompt: Sequence[int]) -> SamplingParams:
    seed = random.Random(f"{plan.seed}/{list(prompt)}").getrandbits(62) if plan.temperature > 0 else None
    return SamplingParams(temperature=plan.temperature, max_tokens=max_tokens, seed=seed)
