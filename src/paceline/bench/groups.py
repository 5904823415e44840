"""Which prompts are asked at once. A group is answered as a whole by every engine, and is one pair of the statistics.

Groups are filled from one workload as far as its prompts go; what is left over fills mixed groups, which count for
"all" only. Conversations in a group have the same number of turns, so that it stays full from turn to turn. What fills
no group is left out and said.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.bench.prompts import Prompt
from paceline.bench.statistics import MIN_PAIRS, MIN_TOKENS
from paceline.errors import InvalidParameter


@dataclass(frozen=True)
class Group:
    workload: str | None  # None: mixed
    prompts: tuple[Prompt, ...]

    @property
    def turns(self) -> int:
        return len(self.prompts[0].turns)


def make_groups(prompts: Sequence[Prompt], concurrency: int, seed: int = 0) -> tuple[list[Group], list[Prompt]]:
    """The groups in the order to run them, and the prompts left out.

    One group of each workload in turn: an interrupted run has seen all of them, and what an engine learns on the way
    (suffixes, acceptance) is not learnt on one workload and used on the next.
    """
    noise = random.Random(seed)
    alike: dict[tuple[str, int], list[Prompt]] = {}
    for prompt in prompts:
        alike.setdefault((prompt.workload, len(prompt.turns)), []).append(prompt)
    queues: list[list[Group]] = []
    rest: dict[int, list[Prompt]] = {}
    for (workload, turns), members in alike.items():
        noise.shuffle(members)
        full, left = _cut(members, concurrency)
        queues.append([Group(workload, chunk) for chunk in full])
        rest.setdefault(turns, []).extend(left)
    left_out: list[Prompt] = []
    for members in rest.values():
        noise.shuffle(members)
        full, left = _cut(members, concurrency)
        queues.append([Group(_common(chunk), chunk) for chunk in full])
        left_out += left
    return _in_turn(queues), left_out


def _cut(members: Sequence[Prompt], size: int) -> tuple[list[tuple[Prompt, ...]], Sequence[Prompt]]:
    whole = len(members) // size * size
    return [tuple(members[start : start + size]) for start in range(0, whole, size)], members[whole:]


def _common(prompts: Sequence[Prompt]) -> str | None:
    names = {prompt.workload for prompt in prompts}
    return names.pop() if len(names) == 1 else None


def _in_turn(queues: Sequence[Sequence[Group]]) -> list[Group]:
    longest = max(map(len, queues), default=0)
    return [queue[turn] for turn in range(longest) for queue in queues if turn < len(queue)]


def check_enough(prompts: Sequence[Prompt], concurrencies: Sequence[int], max_tokens: int) -> None:
    """Refuse, before minutes are spent, a run that could not end in a figure."""
    for concurrency in concurrencies:
        groups, _ = make_groups(prompts, concurrency)
        if len(groups) < MIN_PAIRS:
            raise InvalidParameter(
                "concurrency" if concurrency > 1 else "prompts",
                f"{len(prompts)} prompts fill {len(groups)} groups of {concurrency}, and a speed-up needs {MIN_PAIRS} "
                f"or more to say anything: give at least {MIN_PAIRS * concurrency} prompts with equally many turns"
                + (", or lower the concurrency" if concurrency > 1 else ""),
            )
        most = sum(concurrency * group.turns * max_tokens for group in groups)
        if most < MIN_TOKENS:
            raise InvalidParameter(
                "max_tokens",
                f"at most {most} tokens would be measured, and fewer than {MIN_TOKENS} say nothing: "
                "raise it or give more prompts",
            )
