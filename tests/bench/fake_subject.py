"""A model that costs what we say it costs: engines with a clock of their own, so that the true speed-up is known."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from paceline.bench.grid import Contender
from paceline.bench.measurement import Run, TimedAnswer
from paceline.bench.prompts import Prompt
from paceline.outputs import SpeculationStats
from paceline.sampling_params import SamplingParams

PLAIN = Contender("none")
FAST = Contender("ngram", 4)


def prompts(count: int, workload: str = "chat", turns: int = 1) -> list[Prompt]:
    return [
        Prompt(
            workload=workload,
            turns=tuple(f"{workload} question {n}, part {t}" for t in range(turns)),
            origin=f"line {n}",
        )
        for n in range(count)
    ]


def repetitive(count: int) -> list[Prompt]:
    """Prompts in which every other word is the same: something to draft from."""
    texts = [" ".join(f"w{7 if n % 2 else (first + n) % 90}" for n in range(12)) for first in range(count)]
    return [Prompt(workload="words", turns=(text,), origin=f"line {n}") for n, text in enumerate(texts, start=1)]


class FakeEngine:
    """A token takes 30 ms plainly. `speed` is how much faster this engine is; `luck` spreads it from group to group."""

    def __init__(self, subject: FakeSubject, contender: Contender, speed: float, luck: float) -> None:
        self.subject, self.contender, self.speed, self.luck = subject, contender, speed, luck

    def answer(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> Run:
        subject = self.subject
        subject.on_answer(self.contender)
        noise = subject.noise
        # The mean of the time a token takes is exactly 0.03 / speed, however unlike the groups are.
        pace = 0.03 / self.speed * math.exp(noise.gauss(-(self.luck**2) / 2, self.luck)) * noise.lognormvariate(0, 0.05)
        pace *= subject.slowness(subject.now)
        answers = []
        for prompt in prompts:
            tokens = subject.say(self.contender, prompt)
            each = 2 if self.speed > 1 else 1  # two at a time: a step commits both at its end
            commits = [(pace, 1)]
            for start in range(1, len(tokens), each):
                count = min(each, len(tokens) - start)
                commits.append((pace * (start + count), count))
            answers.append(TimedAnswer(tuple(tokens), tuple(commits), subject.stats(len(tokens), len(commits))))
        run = Run(tuple(answers), outside_s=0.1 * pace)
        subject.now += run.seconds
        subject.log.append((self.contender, tuple(map(tuple, prompts)), len(prompts)))
        return run


class FakeSubject:
    defaults: Mapping[str, Any] = {}

    def __init__(
        self,
        speeds: Mapping[Contender, float],
        *,
        luck: float = 0.2,
        seed: int = 0,
        slowness: Callable[[float], float] = lambda now: 1.0,
    ) -> None:
        self.speeds, self.luck, self.noise, self.slowness = speeds, luck, random.Random(seed), slowness
        self.now = 0.0
        self.log: list[tuple[Contender, Any, int]] = []
        self.opened: list[int] = []
        self.on_answer: Callable[[Contender], None] = lambda contender: None
        self.lengths: dict[tuple[int, ...], int] = {}
        self.answers: dict[Contender, Callable[[Sequence[int]], list[int]]] = {}

    def say(self, contender: Contender, prompt: Sequence[int]) -> list[int]:
        if contender in self.answers:
            return self.answers[contender](prompt)
        length = self.lengths.setdefault(tuple(prompt), max(41, int(self.noise.lognormvariate(math.log(80), 0.5))))
        return list(range(length))

    @staticmethod
    def stats(tokens: int, passes: int) -> SpeculationStats:
        return SpeculationStats(
            num_target_passes=passes,
            num_committed_tokens=tokens,
            num_drafts=passes,
            num_draft_tokens=2 * passes,
            num_accepted_tokens=tokens - passes,
            drafted_per_position=[passes, passes],
            accepted_per_position=[tokens - passes, 0],
        )

    def encode(self, prompt: Prompt, answers: Sequence[str]) -> list[int]:
        return [*(prompt.origin + prompt.workload).encode(), *"|".join(answers).encode(), len(answers)]

    def decode(self, tokens: Sequence[int]) -> str:
        return f"{len(tokens)} tokens from {tokens[0]}"

    def open(self, concurrency: int) -> dict[Contender, FakeEngine]:
        self.opened.append(concurrency)
        return {contender: FakeEngine(self, contender, speed, self.luck) for contender, speed in self.speeds.items()}
