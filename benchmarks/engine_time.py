"""Processor time of a step at one row on a CPU, beside the model's pass: the engine's own share, phase by phase.

A real model, one sequence, one thread, so that a thread's processor time is the whole of it whatever else the machine
runs. `pass` is the target's pass and `drafter` the native call of a drafter; everything else is the engine's own, and
is split by what it is for. Steps that draft stand apart from those that do not: with `auto` how many do is chance.

    python -m benchmarks.engine_time [--steps 200] [--lines 25]
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import time
from collections.abc import Callable
from typing import Any

from benchmarks.harness import finish
from paceline import LLM, SamplingParams
from paceline.engine import runner
from paceline.engine.engine import Engine

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
    "policy": {"policy": ("plan", "observe", "meanwhile", "plain_seconds")},
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
                profiler = cProfile.Profile(time.thread_time)
                profiler.enable()
                for _ in range(steps):
                    engine.step()
                profiler.disable()
                pstats.Stats(profiler).sort_stats("tottime").print_stats(lines)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--cells", nargs="*", default=list(CELLS), choices=list(CELLS))
    parser.add_argument("--activations", default="int8")
    parser.add_argument("--lines", type=int, default=0, help="profile instead: this many functions")
    args = parser.parse_args()
    found = {}
    for cell in args.cells:
        found[cell] = measure(cell, args.activations, args.steps, args.lines)
        for kind, parts in found[cell].items():
            if parts["steps"]:
                medians = ", ".join(f"{part} {ms['median_ms']:.2f}" for part, ms in parts.items() if part != "steps")
                print(f"{cell}, {parts['steps']} {kind} steps, ms: {medians}", flush=True)
    finish("engine_time", {"activations": args.activations, "steps": args.steps, "cells": found})


if __name__ == "__main__":
    main()
