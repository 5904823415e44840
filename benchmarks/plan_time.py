"""Processor time of the policy's own work in a step: planning, and learning from what came of the plan.

The real policy on a known clock: answers, evidence and acceptance are drawn from a fixed seed and a step takes what a
pass of so many rows takes on an H200 or on two cores, so that every run takes the same decisions. `choices` is a digest
of all of them: two versions of the policy that agree on it have decided alike in every step.

    python benchmarks/plan_time.py [--rows 1 4 16 64 128] [--steps 300]
"""

from __future__ import annotations

import argparse
import cProfile
import hashlib
import pstats
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from common import finish

from paceline import SamplingParams
from paceline.config import AUTO, TRAINED_LEVEL
from paceline.core.draft import Draft
from paceline.core.sequence import Sequence as Answer
from paceline.drafters import DraftRequest
from paceline.drafters.base import HostDrafter
from paceline.engine.batch import DraftOutcome, StepResult, StepTiming
from paceline.engine.block_manager import BlockManager
from paceline.engine.drafter_set import DrafterSet
from paceline.engine.policy import DraftPlan
from paceline.engine.policy.adaptive import AdaptivePolicy
from paceline.engine.policy.priors import CPU, GPU, PassPrior

LONGEST = 300  # tokens of an answer; one that has ended makes way for the next
H200 = {1: 3.95, 8: 4.0, 16: 4.1, 32: 4.35, 64: 4.6, 128: 6.5, 256: 9.1, 512: 13.4, 1024: 23.7, 1536: 36.5}  # ms
TWO_CORES = {1: 25.0, 4: 26.5, 8: 28.0, 12: 30.3, 16: 37.3, 32: 52.5, 64: 95.0, 128: 185.0, 512: 740.0}
WARMUP = 100  # steps in which the policy learns


class Lookup(HostDrafter):
    """Finds something for one text in three, and is right the more often the more it has found."""

    name, seconds = "lookup", 2e-4

    def __init__(self) -> None:
        self.noise = random.Random(1)
        self.found: dict[str, int] = {}  # by sequence, as its text is now

    def read(self, sequence: Answer) -> None:
        """Its text has changed."""
        self.found[sequence.key] = self.noise.choice([0, 0, 0, 0, 2, 5, 12])

    def levels(self, sequences: Sequence[Answer]) -> list[int]:
        return [self.found[sequence.key] for sequence in sequences]

    def level(self, sequence: Answer) -> int:
        return self.found[sequence.key]

    def path(self, sequence: Answer, nodes: int) -> list[int]:
        path = list[int]()
        while len(path) < nodes and self.noise.random() < min(0.4 + 0.05 * self.level(sequence), 0.95):
            path.append(len(path))
        return path

    def propose(self, rows: Sequence[DraftRequest]) -> Draft:
        raise NotImplementedError


class Trees(Lookup):
    """As a block drafter: the n-th node is on the accepted path so often, and all nodes take one pass."""

    name, seconds, trees, depth = "trees", 7e-4, True, 7
    shares = 0.75 * (1 + np.arange(64) / 2) ** -1.4

    def read(self, sequence: Answer) -> None:
        pass

    def levels(self, sequences: Sequence[Answer]) -> None:  # type: ignore[override]
        return None

    def level(self, sequence: Answer) -> int:
        return TRAINED_LEVEL

    def unread_tokens(self, sequence: Answer) -> int:
        return 1

    def path(self, sequence: Answer, nodes: int) -> list[int]:
        return [node for node in range(nodes) if self.noise.random() < self.shares[node]][: self.depth]


@dataclass(frozen=True)
class Cell:
    drafters: tuple[type[Lookup], ...]
    pass_ms: dict[int, float]
    prior: PassPrior
    job: str | None = None  # answers are waited for together


CELLS = {
    "trees and lookups, H200": Cell((Trees, Lookup), H200, replace(GPU, padded_to=tuple(H200))),
    "trees and lookups, CPU": Cell((Trees, Lookup), TWO_CORES, CPU),
    "lookups, CPU": Cell((Lookup,), TWO_CORES, CPU),
    "lookups, CPU, one job": Cell((Lookup,), TWO_CORES, CPU, "job"),
}


class Run:
    def __init__(self, cell: Cell, rows: int) -> None:
        self.cell, self.noise, self.made = cell, random.Random(0), 0
        self.drafters = {kind.name: kind() for kind in cell.drafters}
        self.drafter_set = DrafterSet(list(self.drafters.values()), 100, BlockManager(1, 1))
        self.policy = AdaptivePolicy(AUTO, None, cell.prior)
        self.answers = [self._answer() for _ in range(rows)]
        self._read()
        self.chosen = hashlib.blake2b(digest_size=8)

    def _answer(self) -> Answer:
        self.made += 1
        sampled = {"temperature": 0.7, "seed": 7} if self.made % 8 == 0 else {"temperature": 0.0}
        params = SamplingParams(**sampled, max_tokens=LONGEST).resolve({})
        length = self.noise.randrange(20, LONGEST)
        made = Answer(str(self.made), [5], params, max_len=1 + length, wait_group=self.cell.job)
        made.tokens += [1, 1]
        made.num_computed = 2
        return made

    def _read(self) -> None:
        for drafter in self.drafters.values():
            for answer in self.answers:
                drafter.read(answer)

    def step(self) -> tuple[bool, dict[str, float]]:
        """Whether it drafted, and microseconds of each part of the policy's work."""
        spent: dict[str, float] = {}
        drafters = self.drafter_set
        choices = _timed(spent, "plan", lambda: self.policy.plan(self.answers, drafters.offers(self.answers), 0, False))
        self.chosen.update(repr([(choice.method, choice.max_nodes) for choice in choices]).encode())
        _timed(spent, "learn", self.policy.learn)
        result, timing = self._result(choices)
        _timed(spent, "observe", lambda: self.policy.observe(result, timing))
        for at in result.ended:
            self.policy.forget(self.answers[at])
            self.answers[at] = self._answer()
        self._read()
        return bool(timing.draft_s), spent

    def _result(self, choices: Sequence[DraftPlan]) -> tuple[StepResult, StepTiming]:
        """The step is taken."""
        result, paths = StepResult(list(self.answers)), []
        for at, (answer, choice) in enumerate(zip(self.answers, choices, strict=True)):
            drafter = self.drafters.get(choice.method)
            path = drafter.path(answer, choice.max_nodes) if drafter else []
            result.tokens.append([1] * min(len(path) + 1, answer.remaining))
            answer.tokens += result.tokens[at]
            if drafter is not None:
                depth = min(choice.max_nodes, drafter.depth)
                result.drafts[at] = DraftOutcome(choice.method, choice.max_nodes, len(path), depth)
            if not answer.remaining:
                result.ended.append(at)
            paths.append(path)
        result.paths = paths.__getitem__
        rows = len(choices) + sum(choice.max_nodes for choice in choices)
        draft_s = {}
        for method, drafter in self.drafters.items():
            most = max((choice.max_nodes for choice in choices if choice.method == method), default=0)
            if most:
                draft_s[method] = 1 if drafter.trees else most, drafter.seconds
        pass_s = 1e-3 * float(np.interp(rows, list(self.cell.pass_ms), list(self.cell.pass_ms.values())))
        seconds = (pass_s + sum(each for _, each in draft_s.values())) * self.noise.lognormvariate(0, 0.03)
        return result, StepTiming(len(choices), rows, seconds, draft_s)


def _timed(spent: dict[str, float], part: str, work: Callable[[], Any]) -> Any:
    begun = time.thread_time()
    result = work()
    spent[part] = 1e6 * (time.thread_time() - begun)
    return result


def measure(cell: Cell, rows: int, steps: int, lines: int) -> dict[str, Any]:
    run = Run(cell, rows)
    for _ in range(WARMUP):
        run.step()
    profiler = cProfile.Profile(time.thread_time)
    if lines:
        profiler.enable()
    taken = [run.step() for _ in range(steps)]
    profiler.disable()
    if lines:
        pstats.Stats(profiler).sort_stats("tottime").print_stats(lines)
    drafted = [spent for drafts, spent in taken if drafts] or [{"plan": 0.0, "learn": 0.0, "observe": 0.0}]
    return {
        "drafted_steps": sum(drafts for drafts, _ in taken),
        "mean_us": statistics.mean(sum(spent.values()) for _, spent in taken),
        "drafted_decile_us": statistics.quantiles([sum(spent.values()) for spent in drafted] * 2, n=10)[0],
        "drafted_median_us": {part: statistics.median(spent[part] for spent in drafted) for part in drafted[0]},
        "choices": run.chosen.hexdigest(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 64, 128])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--cells", nargs="*", default=list(CELLS), choices=list(CELLS))
    parser.add_argument("--lines", type=int, default=0, help="also profile: this many functions")
    args = parser.parse_args()
    found: dict[str, dict[str, Any]] = {}
    for name in args.cells:
        for rows in args.rows:
            cell = measure(CELLS[name], rows, args.steps, args.lines)
            parts = {part: f"{us:.0f}" for part, us in cell["drafted_median_us"].items()}
            print(f"{name}, {rows} rows: {cell['mean_us']:.0f} us a step, {cell['drafted_steps']} drafted: {parts}")
            found.setdefault(name, {})[str(rows)] = cell
    finish("plan_time", {"steps": args.steps, "cells": found})


if __name__ == "__main__":
    main()
