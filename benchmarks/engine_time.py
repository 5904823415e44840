"""Processor time of a step at one row on a CPU, beside the model's pass: the engine's own share, and the drafters'.

A real model, one sequence, one thread, so that a thread's processor time is the whole of it whatever else the machine
runs. A step is split in three: the pass of the target, what the drafters spend, and the rest. With `auto` steps that
draft stand apart from those that do not: how many of them do is chance.

    python benchmarks/engine_time.py [--steps 200] [--lines 25]
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import time
from collections.abc import Callable
from typing import Any

from common import finish

from paceline import LLM, SamplingParams
from paceline.engine.engine import Engine

PROMPT = "Write a short story about a lighthouse keeper who finds a letter, and tell what the letter says."
CELLS = {"plain, greedy": ("none", 0.0), "plain, T 0.7": ("none", 0.7), "auto, greedy": ("auto", 0.0)}
KINDS = {"plain": False, "drafted": True}


class Parts:
    """Milliseconds of one step, part by part."""

    def __init__(self, engine: Engine) -> None:
        self.spent = {"pass": 0.0, "draft": 0.0}
        self._depth = 0
        self._watch(engine.model, "forward", "pass")
        for name in ("propose", "observe", "read"):
            if hasattr(engine.drafters, name):
                self._watch(engine.drafters, name, "draft")

    def _watch(self, owner: Any, name: str, part: str) -> None:
        function: Callable[..., Any] = getattr(owner, name)

        def watched(*args: Any, **options: Any) -> Any:
            self._depth += 1
            begun = time.thread_time()
            try:
                return function(*args, **options)
            finally:
                self._depth -= 1
                if not self._depth:  # a drafter may run passes of its own
                    self.spent[part] += time.thread_time() - begun

        setattr(owner, name, watched)

    def step(self, engine: Engine) -> tuple[bool, dict[str, float]]:
        """Whether it drafted, and its parts."""
        self.spent = dict.fromkeys(self.spent, 0.0)
        begun = time.thread_time()
        outputs = engine.step()
        whole = time.thread_time() - begun
        parts = self.spent | {"engine": whole - sum(self.spent.values())}
        return bool(outputs.drafts), {name: 1e3 * seconds for name, seconds in parts.items()}


def measure(method: str, temperature: float, activations: str, steps: int, lines: int) -> dict[str, Any]:
    with LLM("smollm2", device="cpu", threads=1, method=method, activations=activations, kv_cache_bytes=1 << 27) as llm:
        prompt = llm.tokenizer.apply_chat_template([{"role": "user", "content": PROMPT}])
        seed = 7 if temperature else None
        given = SamplingParams(temperature=temperature, seed=seed, max_tokens=1500, ignore_eos=True).resolve({})

        def on_the_engines_thread(engine: Engine) -> list[tuple[bool, dict[str, float]]]:
            parts = Parts(engine)
            engine.add_request("measured", prompt, given)
            for _ in range(40):
                engine.step()
            profiler = cProfile.Profile(time.thread_time)
            if lines:
                profiler.enable()
            measured = [parts.step(engine) for _ in range(steps) if engine.has_work]
            profiler.disable()
            if lines:
                pstats.Stats(profiler).sort_stats("cumtime").print_stats(lines)
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
    parser.add_argument("--lines", type=int, default=0, help="also profile: this many functions")
    args = parser.parse_args()
    found = {}
    for cell in args.cells:
        found[cell] = measure(*CELLS[cell], args.activations, args.steps, args.lines)
        for kind, parts in found[cell].items():
            medians = {part: f"{ms['median_ms']:.2f} ms" for part, ms in parts.items() if part != "steps"}
            print(f"{cell}, {parts['steps']} {kind} steps: {medians}", flush=True)
    finish("engine_time", {"activations": args.activations, "steps": args.steps, "cells": found})


if __name__ == "__main__":
    main()
