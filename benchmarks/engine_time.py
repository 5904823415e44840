"""The host's time of a step: the engine's own share phase by phase, a step without a model, and the policy alone.

    python -m benchmarks.engine_time [--steps 200]         # one row on a CPU, beside the model's pass
    python -m benchmarks.engine_time host [--lines 25]     # 1 to 512 rows of a model that answers at once
    python -m benchmarks.engine_time policy                # planning and learning on a known clock

Everything is processor time of one thread, so other programs' time does not count. In `phases` a pass is the target's,
`drafter` the native call of a drafter; the rest is the engine's own, split by purpose. Steps that draft stand apart.
In `policy` answers, levels and acceptance come from a fixed seed and steps take times of a table, so every run decides
alike: `choices` is a digest of all decisions. `--lines` profiles instead, and prints that many functions.
"""

from __future__ import annotations

import argparse
import cProfile
import hashlib
import pstats
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from benchmarks.harness import finish
from benchmarks.policy_replay import H200, RELATIVE
from paceline import LLM, SamplingParams
from paceline.config import AUTO, TRAINED_LEVEL, EngineConfig, SpeculationConfig
from paceline.core.draft import Draft
from paceline.core.sequence import Sequence as Answer
from paceline.drafters import METHODS, DrafterContext, DraftRequest
from paceline.drafters.base import HostDrafter
from paceline.engine import runner
from paceline.engine.batch import DraftOutcome, StepResult, StepTiming
from paceline.engine.block_manager import BlockManager
from paceline.engine.drafter_set import DrafterSet
from paceline.engine.engine import Engine
from paceline.engine.policy import DraftPlan
from paceline.engine.policy.adaptive import AdaptivePolicy
from paceline.engine.policy.priors import CPU, GPU, PassPrior
from paceline.models.kv_cache import KVSpec
from paceline.models.plan import ModelOutput
from paceline.testing import toy_config

STORY = "Write a short story about a lighthouse keeper who finds a letter, and tell what the letter says."
COUNT = "Write the numbers from one to two hundred as words, each on a line of its own."
CELLS: dict[str, tuple[dict[str, Any], float, str]] = {
    "plain, greedy": ({"method": "none"}, 0.0, STORY),
    "plain, T 0.7": ({"method": "none"}, 0.7, STORY),
    "dspark k=4, greedy": ({"method": "dspark", "k": 4}, 0.0, STORY),
    "dspark k=4, T 0.7": ({"method": "dspark", "k": 4}, 0.7, STORY),
    "auto, greedy": ({"method": "auto"}, 0.0, STORY),
    "auto, T 0.7": ({"method": "auto"}, 0.7, STORY),
    "auto, drafts pay": ({"method": "auto"}, 0.0, COUNT),
}
KINDS = {"plain": False, "drafted": True}
OUTSIDE = ("pass", "drafter")  # not the engine's own
# What is watched, by phase: names of functions of the engine's parts. Inner ones count apart from outer ones.
PHASES = {
    "pass": {"model": ("forward",)},
    "schedule": {"scheduler": ("schedule",)},
    "policy": {"policy": ("plan", "observe", "learn", "plain_seconds")},
    "propose": {"drafters": ("propose",)},
    "verify": {"runner.sampler": ("verify",)},
    "taps": {"drafters": ("gather",)},
    "commit": {"committer": ("read",)},
    "publish": {"committer": ("publish",)},
}


class Watch:
    """Milliseconds of one step, phase by phase."""

    def __init__(self, engine: Engine) -> None:
        self.spent: dict[str, float] = {}
        self._inner = [0.0]  # seconds of phases within each phase under way
        for phase, owners in PHASES.items():
            for owner, names in owners.items():
                found: Any = engine
                for part in owner.split("."):
                    found = getattr(found, part)
                for name in names:
                    self._watch(found, name, phase)
        self._watch(runner, "lay_out", "layout")
        for drafter in engine.drafters.drafters:
            kernels = getattr(getattr(drafter, "_decoder", None), "kernels", None)
            if hasattr(kernels, "draft_blocks"):
                self._watch(kernels, "draft_blocks", "drafter")

    def _watch(self, owner: Any, name: str, phase: str) -> None:
        function: Callable[..., Any] = getattr(owner, name)

        def watched(*args: Any, **options: Any) -> Any:
            self._inner.append(0.0)
            begun = time.thread_time()
            try:
                return function(*args, **options)
            finally:
                taken = time.thread_time() - begun
                self.spent[phase] += taken - self._inner.pop()
                self._inner[-1] += taken

        setattr(owner, name, watched)

    def step(self, engine: Engine) -> tuple[bool, dict[str, float]]:
        """Whether it drafted, and its phases."""
        self.spent = dict.fromkeys((*PHASES, "layout", "drafter"), 0.0)
        self._inner = [0.0]
        begun = time.thread_time()
        outputs = engine.step()
        whole = time.thread_time() - begun
        engine_s = whole - sum(self.spent[name] for name in OUTSIDE)
        parts = self.spent | {"rest": whole - self._inner[0], "engine": engine_s}
        return bool(outputs.drafts), {name: 1e3 * seconds for name, seconds in parts.items()}


def measure(cell: str, activations: str, steps: int, lines: int) -> dict[str, Any]:
    speculation, temperature, asked = CELLS[cell]
    options = {"activations": activations, "kv_cache_bytes": 1 << 27, **speculation}
    with LLM("smollm2", device="cpu", threads=1, **options) as llm:
        prompt = llm.tokenizer.apply_chat_template([{"role": "user", "content": asked}])
        seed = 7 if temperature else None
        given = SamplingParams(temperature=temperature, seed=seed, max_tokens=1500, ignore_eos=True).resolve({})

        def on_the_engines_thread(engine: Engine) -> list[tuple[bool, dict[str, float]]]:
            engine.add_request("measured", prompt, given)
            for _ in range(40):
                engine.step()
            if lines:
                with profiled(lines):
                    for _ in range(steps):
                        engine.step()
                return []
            watch = Watch(engine)
            with engine.at_work():
                measured = [watch.step(engine) for _ in range(steps) if engine.has_work]
            engine.cancel("measured")
            return measured

        measured = llm.call(on_the_engines_thread)
    return {name: summary([ms for drafted, ms in measured if drafted == kind]) for name, kind in KINDS.items()}


def summary(steps: list[dict[str, float]]) -> dict[str, Any]:
    parts = {part: [step[part] for step in steps] for part in steps[0]} if steps else {}
    found = {part: {"median_ms": statistics.median(ms), "best_ms": min(ms)} for part, ms in parts.items()}
    return {"steps": len(steps), **found}


@contextmanager
def profiled(lines: int) -> Iterator[None]:
    if not lines:
        yield
        return
    profiler = cProfile.Profile(time.thread_time)
    profiler.enable()
    yield
    profiler.disable()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(lines)


def phases(args: argparse.Namespace) -> None:
    result = {}
    for cell in args.cells or CELLS:
        result[cell] = measure(cell, args.activations, args.steps, args.lines)
        for kind, parts in result[cell].items():
            if parts["steps"]:
                medians = ", ".join(f"{part} {ms['median_ms']:.2f}" for part, ms in parts.items() if part != "steps")
                print(f"{cell}, {parts['steps']} {kind} steps, ms: {medians}", flush=True)
    finish("engine_time", {"activations": args.activations, "steps": args.steps, "cells": result})


# -- a step without a model


VOCAB, PERIOD, PROMPT = 512, 37, 40
HOST_CELLS = ("none 0 1 0", "ngram 4 1 0", "none 0 64 0", "ngram 2 64 0", "none 0 512 0", "none 0 512 1")


class InstantModel:
    """A model that answers 0, 1, 2, ... round and round in no time, so that a lookup finds drafts."""

    def __init__(self) -> None:
        self.config = toy_config(vocab_size=VOCAB, max_positions=4096)
        self.kv_specs = (KVSpec(num_kv_heads=1, head_dim=1),)
        self.device, self.cache_dtype = torch.device("cpu"), torch.float32
        self.torch_threads: int | None = 1
        self._logits = torch.zeros(VOCAB, VOCAB)
        self._logits[torch.arange(VOCAB), (torch.arange(VOCAB) + 1) % PERIOD] = 30.0

    def prepare(self, *_: object) -> bool:
        return False

    def forward(self, tokens: Any, plan: Any, caches: Any, logit_rows: Any, taps: Any = ()) -> ModelOutput:
        return ModelOutput(self._logits[tokens[logit_rows]], None)


def host(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    result = {}
    for cell in args.cells or HOST_CELLS:  # method, k, rows, temperature
        method, k, rows, temperature = cell.split()
        model: Any = InstantModel()
        context = DrafterContext(model.config, model.device, SpeculationConfig(method=method))
        drafters = [] if method == "none" else [METHODS[method].make(context)]
        sizes = {"max_num_seqs": int(rows), "max_num_batched_tokens": 2048, "max_model_len": 2048}
        config = EngineConfig(prefix_caching=False, kv_cache_bytes=64 << 20, **sizes)
        engine = Engine(model, config, drafters=drafters, policy=AdaptivePolicy(method, int(k) or None))
        engine.runs_ahead = True  # as on a GPU
        params = SamplingParams(temperature=float(temperature), max_tokens=1900, ignore_eos=True).resolve({})
        noise = torch.Generator().manual_seed(0)
        prompts = torch.randint(3, VOCAB, (int(rows), PROMPT // 4), generator=noise).repeat(1, 4).tolist()
        for index, prompt in enumerate(prompts):  # each repeats a sentence four times
            engine.add_request(str(index), prompt, params)
        for _ in range(60):
            engine.step()
        times = []
        with profiled(args.lines):
            for _ in range(args.steps):
                begun = time.thread_time()
                engine.step()
                times.append(1e3 * (time.thread_time() - begun))
        result[cell] = {"median_ms": statistics.median(times), "best_ms": min(times)}
        print(f"{cell}: {result[cell]}", flush=True)
    finish("host_time", result)


# -- the policy alone


LONGEST = 300  # tokens of an answer; one that has ended makes way for the next
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
class PolicyCell:
    drafters: tuple[type[Lookup], ...]
    pass_ms: dict[int, float]
    prior: PassPrior
    job: str | None = None  # answers are waited for together


TWO_CORES = {rows: 25 * share for rows, share in RELATIVE.items()}  # ms
POLICY_CELLS = {
    "trees and lookups, H200": PolicyCell((Trees, Lookup), H200, replace(GPU, padded_to=tuple(H200))),
    "trees and lookups, CPU": PolicyCell((Trees, Lookup), TWO_CORES, CPU),
    "lookups, CPU": PolicyCell((Lookup,), TWO_CORES, CPU),
    "lookups, CPU, one job": PolicyCell((Lookup,), TWO_CORES, CPU, "job"),
}


class Run:
    def __init__(self, cell: PolicyCell, rows: int) -> None:
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


def policy(args: argparse.Namespace) -> None:
    result: dict[str, dict[str, Any]] = {}
    for name in args.cells or POLICY_CELLS:
        for rows in args.rows:
            run = Run(POLICY_CELLS[name], rows)
            for _ in range(WARMUP):
                run.step()
            with profiled(args.lines):
                taken = [run.step() for _ in range(args.steps)]
            drafted = [spent for drafts, spent in taken if drafts] or [{"plan": 0.0, "learn": 0.0, "observe": 0.0}]
            row = {
                "drafted_steps": sum(drafts for drafts, _ in taken),
                "mean_us": statistics.fmean(sum(spent.values()) for _, spent in taken),
                "drafted_median_us": {part: statistics.median(spent[part] for spent in drafted) for part in drafted[0]},
                "choices": run.chosen.hexdigest(),
            }
            print(f"{name}, {rows} rows: {row}", flush=True)
            result.setdefault(name, {})[str(rows)] = row
    finish("plan_time", {"steps": args.steps, "cells": result})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", default="phases", choices=("phases", "host", "policy"))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--cells", nargs="*", help="names; all if unset")
    parser.add_argument("--activations", default="int8")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 64, 128], help="of policy")
    parser.add_argument("--lines", type=int, default=0, help="profile: this many functions")
    args = parser.parse_args()
    {"phases": phases, "host": host, "policy": policy}[args.what](args)


if __name__ == "__main__":
    main()
