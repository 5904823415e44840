"""What the peers are asked: copy-heavy work, where lookup finds much, and chat, where it finds little."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from benchmarks.copy_prompts import copy_prompts

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


def default_prompts(per_workload: int) -> list[Prompt]:
    copies = [Prompt(name=f"copy/{at}", workload="copy", text=text) for at, text in enumerate(_copy_texts())]
    chats = [Prompt(name=f"chat/{at}", workload="chat", text=text) for at, text in enumerate(CHAT)]
    return _alternating([copies[:: max(1, len(copies) // per_workload)], chats], per_workload)


def _copy_texts() -> list[str]:
    return [str(turns[0]) for prompt in copy_prompts() if isinstance(turns := prompt["turns"], list)]


def read_prompts(path: Path, per_workload: int) -> list[Prompt]:
    """jsonl of {"category", "turns"}: the first turn of each."""
    workloads: dict[str, list[Prompt]] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            workload, text = str(entry["category"]), str(entry["turns"][0])
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise SystemExit(f'{path}, line {number}: not {{"category": ..., "turns": [...]}} ({error})') from error
        workloads.setdefault(workload, []).append(Prompt(name=f"{workload}/{number}", workload=workload, text=text))
    if not workloads:
        raise SystemExit(f"{path} holds no prompts")
    return _alternating(list(workloads.values()), per_workload)


def _alternating(workloads: list[list[Prompt]], per_workload: int) -> list[Prompt]:
    """One of each workload in turn, so that a run that ends early has some of all."""
    turns = zip_longest(*(prompts[:per_workload] for prompts in workloads))
    return [prompt for turn in turns for prompt in turn if prompt is not None]
