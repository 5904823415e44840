"""Prompts of the comparison: copy-heavy work, where lookup finds much, and chat, where it finds little."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from benchmarks.harness import prompts_of

CHAT = [
    "My neighbour plays loud music late at night. How do I bring it up without starting a quarrel?",
    "What should I look at before I buy a used bicycle?",
    "Explain to a ten-year-old why the sky is blue and sunsets are red.",
    "I have two hours in a city I do not know and twelve euros. What would you do?",
    "Write a short birthday message for a colleague who is about to retire.",
    "How does a heat pump warm a house when it is freezing outside?",
    "Give me a plan for learning to bake bread in four weekends.",
    "What is the difference between a virus and a bacterium?",
    "My tomato plants have yellow leaves. What may be wrong, and what can I do about it?",
    "Tell me a story about a lighthouse keeper who finds a letter.",
    "Should I learn Python or JavaScript first if I want to make small web pages?",
    "How can I sleep better when I work in shifts?",
]


@dataclass(frozen=True, kw_only=True)
class Prompt:
    name: str  # unique: what a resumed run goes by
    workload: str
    text: str
    temperature: float = 0.0


def make_prompts(per_workload: int, temperatures: Sequence[float], chat: Path | None = None) -> list[Prompt]:
    """Copying and chat, every prompt at every temperature; `chat` is a file of prompts to ask instead of our own."""
    title, texts = (chat.stem, first_turns(chat)) if chat else ("chat", CHAT)
    workloads = [
        [
            Prompt(name=f"{workload}/{at} T={t:g}", workload=f"{workload}, T {t:g}", text=text, temperature=t)
            for at, text in _spread(texts, per_workload)
        ]
        for workload, texts in (("copy", first_turns()), (title, texts))
        for t in temperatures
    ]
    return _alternating(workloads)


def first_turns(*paths: Path) -> list[str]:
    return [str(prompt["turns"][0]) for prompt in prompts_of([*map(str, paths)])]


def _spread(texts: Sequence[str], count: int) -> list[tuple[int, str]]:
    """`count` of them from all over the list, which may be sorted by subject."""
    return list(enumerate(texts))[:: max(1, len(texts) // count)][:count]


def _alternating(workloads: list[list[Prompt]]) -> list[Prompt]:
    """One of each workload in turn, so that a run that ends early has some of all."""
    return [prompt for turn in zip_longest(*workloads) for prompt in turn if prompt is not None]
