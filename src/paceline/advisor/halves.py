"""The prompts in two halves that are alike: one to predict from, one to check on. No torch.

Of every workload each half has every other prompt, so that neither is all code and the other all chat.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.bench.groups import make_groups
from paceline.bench.prompts import Prompt
from paceline.bench.statistics import MIN_PAIRS, MIN_TOKENS
from paceline.errors import InvalidParameter


def halves(prompts: Sequence[Prompt]) -> tuple[list[Prompt], list[Prompt]]:
    """The second has a prompt less at most, for each workload in which they do not come out even."""
    alike: dict[tuple[str, int], list[Prompt]] = {}
    for prompt in prompts:
        alike.setdefault((prompt.workload, len(prompt.turns)), []).append(prompt)
    first: list[Prompt] = []
    second: list[Prompt] = []
    for members in alike.values():
        shorter, longer = sorted((first, second), key=len)
        shorter += members[::2]
        longer += members[1::2]
    return first, second


def check_halves(halves: Sequence[Sequence[Prompt]], levels: Sequence[int], max_tokens: int) -> None:
    """Refuse, before minutes are spent, a run that could not end in advice."""
    for half in halves:
        if len(half) < MIN_PAIRS:
            total = sum(map(len, halves))
            raise InvalidParameter(
                "prompts",
                f"{total} prompts are too few: half of them are to predict from and half to check on, and fewer than "
                f"{MIN_PAIRS} in a half say nothing; give at least {2 * MIN_PAIRS}",
            )
        for level in levels:
            if not make_groups(half, level)[0]:
                raise InvalidParameter(
                    "concurrency",
                    f"half of the prompts ({len(half)}) never make {level} requests at once with equally many turns: "
                    f"give at least {2 * level} prompts, or lower the concurrency",
                )
        if len(half) * max_tokens < MIN_TOKENS:
            raise InvalidParameter(
                "max_tokens",
                f"at most {len(half) * max_tokens} tokens would be measured, and fewer than {MIN_TOKENS} say nothing: "
                "raise it or give more prompts",
            )
