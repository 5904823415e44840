"""Benchmark of any server that speaks OpenAI's protocol, alone or against a second one without speculation.

Every group of prompts is answered by the one and then by the other, in an order drawn anew, before the next group is
begun: the same plan as for our own engines, so the same report reads both. Whatever ends the run, what was measured
stands, and the reason comes with it.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from paceline.bench.endpoint_cells import BASELINE, ENDPOINT, Row, cells
from paceline.bench.endpoint_client import Messages, Sampling
from paceline.bench.endpoint_load import Run, Target, open_target
from paceline.bench.endpoint_metrics import Counters
from paceline.bench.groups import Group, make_groups
from paceline.bench.prompts import Prompt
from paceline.bench.results import Cell
from paceline.errors import InvalidParameter

OnProgress = Callable[[float, float, str], None]  # answers so far, answers in all, what is under way


@dataclass(frozen=True, kw_only=True)
class Measured:
    """`stopped` is what ended the run early, to be raised again once what was measured is written down."""

    cells: tuple[Cell, ...]
    endpoint: Mapping[str, Any]
    model: str
    left_out: Mapping[int, int] = field(default_factory=dict)  # concurrency -> prompts that filled no group
    stopped: BaseException | None = None


def measure(
    url: str,
    prompts: Sequence[Prompt],
    *,
    model: str | None = None,
    api_key: str | None = None,
    concurrency: Sequence[int] = (1,),
    max_tokens: int = 128,
    temperature: float = 0.0,
    seed: int | None = 0,
    timeout_s: float = 300.0,
    baseline_url: str | None = None,
    counters: bool = True,
    on_progress: OnProgress = lambda done, total, what: None,
) -> Measured:
    """Raises what keeps it from beginning; what happens later is in `stopped`."""
    if not timeout_s > 0:
        raise InvalidParameter("timeout", f"must be more than 0 seconds; got {timeout_s:g}")
    if api_key is not None and not re.fullmatch(r"[!-~]+", api_key):
        raise InvalidParameter("api_key", "holds characters no key has, or nothing at all; was it copied whole?")
    plan = _Plan(prompts, concurrency, Sampling(max_tokens=max_tokens, temperature=temperature, seed=seed))
    reach = partial(open_target, model=model, api_key=api_key, timeout_s=timeout_s, sampling=plan.sampling)
    targets = {ENDPOINT: reach(url, "endpoint")}
    if baseline_url is not None:
        targets[BASELINE] = reach(baseline_url, "baseline_endpoint")
    rows: list[Row] = []
    stopped: BaseException | None = None
    try:
        _run(targets, plan, counters, rows, on_progress)
    except BaseException as reason:  # whatever it is: minutes of measurement are not thrown away
        stopped = reason
    return Measured(
        cells=cells(rows, comparable=temperature == 0),
        endpoint=_described(targets, rows),
        model=targets[ENDPOINT].client.model,
        left_out={level: len(left) for level, (_, left) in plan.groups.items()},
        stopped=stopped,
    )


class _Plan:
    def __init__(self, prompts: Sequence[Prompt], concurrency: Sequence[int], sampling: Sampling) -> None:
        self.sampling = sampling
        self.groups = {level: make_groups(prompts, level, sampling.seed or 0) for level in concurrency}
        for level, (groups, _) in self.groups.items():
            if not groups:
                problem = f"{len(prompts)} prompts never make {level} requests at once; give more prompts or lower it"
                raise InvalidParameter("concurrency", problem)

    @property
    def answers(self) -> int:
        return sum(group.turns * len(group.prompts) for groups, _ in self.groups.values() for group in groups)

    def request(self, messages: Messages, group: int, turn: int, place: int) -> tuple[Messages, Sampling]:
        """Seeded differently for every request, so that none shares its luck; the same for both servers."""
        chosen, seed = self.sampling, None
        if chosen.seed is not None and chosen.temperature > 0:
            seed = random.Random(f"{chosen.seed}/{group}/{turn}/{place}").getrandbits(31)
        return messages, Sampling(max_tokens=chosen.max_tokens, temperature=chosen.temperature, seed=seed)


def _run(targets: Mapping[str, Target], plan: _Plan, counters: bool, rows: list[Row], on_progress: OnProgress) -> None:
    noise = random.Random(plan.sampling.seed)
    total, done, number = plan.answers * len(targets), 0, 0
    for level, (groups, _) in plan.groups.items():
        with ThreadPoolExecutor(level) as pool:
            on_progress(done, total, "warming up")
            for target in targets.values():
                target.warm_up(pool, level, plan.sampling.temperature, counters)
            for group in groups:
                for row in _rows(pool, targets, plan, group, number, noise):
                    rows.append(row)
                    done += level * len(targets)
                    on_progress(done, total, f"{group.workload or 'mixed'}, {level} at once")
                number += 1


def _rows(
    pool: Executor, targets: Mapping[str, Target], plan: _Plan, group: Group, number: int, noise: random.Random
) -> Iterator[Row]:
    """One row per turn; the next turn continues from what the baseline said, or the endpoint where it is alone."""
    said: list[list[str]] = [[] for _ in group.prompts]
    for turn in range(group.turns):
        talks = [prompt.messages(answers) for prompt, answers in zip(group.prompts, said, strict=True)]
        requests = [plan.request(talk, number, turn, place) for place, talk in enumerate(talks)]
        order = list(targets)
        noise.shuffle(order)
        runs: dict[str, Run] = {who: targets[who].run(pool, requests) for who in order}
        yield Row(number, group.workload, len(group.prompts), runs)
        for answers, answer in zip(said, runs.get(BASELINE, runs[ENDPOINT]).answers, strict=True):
            answers.append(answer.text)


def _described(targets: Mapping[str, Target], rows: Sequence[Row]) -> dict[str, Any]:
    found = _who(targets[ENDPOINT])
    counted = [row.runs[ENDPOINT].counted for row in rows]
    found["acceptance"] = _acceptance([one for one in counted if one is not None])
    if BASELINE in targets:
        found["baseline"] = _who(targets[BASELINE])
    return found


def _who(target: Target) -> dict[str, Any]:
    return {"url": target.wire.address.url, "model": target.client.model, "server": target.server}


def _acceptance(counted: Sequence[Counters]) -> dict[str, Any] | None:
    """By its own counters, over the whole run; None where it has none."""
    total = Counters()
    for one in counted:
        total = total.plus(one)
    if total.draft_tokens is None:
        return None
    return {
        "drafts": total.drafts,
        "draft_tokens": total.draft_tokens,
        "accepted_tokens": total.accepted_tokens,
        "accepted_per_position": list(total.accepted_per_position),
        "acceptance_rate": total.acceptance_rate,
    }
