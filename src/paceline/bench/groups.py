"""Groups of prompts that run at once. Every engine answers a whole group, which is one pair of the statistics.

A group has prompts of one workload as long as there are enough; the remaining prompts fill mixed groups, which count
for "all" only. Conversations of a group have equal numbers of turns, so that it stays full from turn to turn. Prompts
that fill no group are left out, and the report gives their number.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.bench.intervals import MIN_PAIRS, MIN_TOKENS
from paceline.bench.prompts import Prompt
from paceline.errors import InvalidParameter


@dataclass(frozen=True)
class PromptGroup:
    prompts: tuple[Prompt, ...]

    @property
    def workload(self) -> str | None:
        """Return the workload; None for a mixed group."""
        names = {prompt.workload for prompt in self.prompts}
        return names.pop() if len(names) == 1 else None

    @property
    def turns(self) -> int:
        return len(self.prompts[0].turns)


def make_groups(prompts: Sequence[Prompt], concurrency: int, seed: int = 0) -> tuple[list[PromptGroup], list[Prompt]]:
    """Return the groups in the order to run them, and the prompts left out.

    Workloads take turns: an interrupted run has seen all of them, and what an engine learns during the run (suffixes,
    acceptance) is not learnt on one workload and used on the next.
    """
    noise = random.Random(seed)
    queues: list[list[PromptGroup]] = []

    def fill(members: list[Prompt]) -> list[Prompt]:
        """Add a queue of full groups; return the prompts that fill none."""
        noise.shuffle(members)
        whole = len(members) // concurrency * concurrency
        queues.append([PromptGroup(tuple(members[at : at + concurrency])) for at in range(0, whole, concurrency)])
        return members[whole:]

    alike: dict[tuple[str, int], list[Prompt]] = {}
    for prompt in prompts:
        alike.setdefault((prompt.workload, len(prompt.turns)), []).append(prompt)
    rest: dict[int, list[Prompt]] = {}
    for (_, turns), members in alike.items():
        rest.setdefault(turns, []).extend(fill(members))
    left_out = [prompt for members in rest.values() for prompt in fill(members)]
    return [group for each in itertools.zip_longest(*queues) for group in each if group is not None], left_out


def check_enough(
    prompts: Sequence[Prompt], concurrencies: Sequence[int], max_tokens: int, pairs: int = MIN_PAIRS
) -> None:
    """Refuse, before the run, one that could not give a figure, which takes `pairs` groups."""
    for concurrency in concurrencies:
        groups, _ = make_groups(prompts, concurrency)
        if len(groups) < pairs:
            raise InvalidParameter(
                "concurrency" if concurrency > 1 else "prompts",
                f"{len(prompts)} prompts fill {len(groups)} groups of {concurrency}, and a figure needs {pairs} "
                f"or more: give at least {pairs * concurrency} prompts with equally many turns"
                + (", or lower the concurrency" if concurrency > 1 else ""),
            )
        most = sum(concurrency * group.turns * max_tokens for group in groups)
        check_tokens(most)


def check_tokens(most: int) -> None:
    if most < MIN_TOKENS:
        raise InvalidParameter(
            "max_tokens",
            f"at most {most} tokens would be measured, and fewer than {MIN_TOKENS} are not enough: "
            "raise it or give more prompts",
        )
