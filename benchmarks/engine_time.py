"""The engine's own share of a step on a CPU, phase by phase, beside the model's pass: one row.

    python -m benchmarks.engine_time [--steps 200] [--activations int8]

Everything is processor time of one thread, so other programs' time does not count. `pass` is the target's, `drafter`
the native call of a drafter; the rest is the engine's own, split by purpose. Steps that draft stand apart.
"""

from __future__ import annotations

import argparse
import statistics
import time
from operator import attrgetter
from typing import Any

from benchmarks.harness import Spent, finish
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
# Functions that are timed, by phase and part of the engine. Inner ones count apart from outer ones.
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


def watched(engine: Engine) -> Spent:
    spent = Spent()
    for phase, owners in PHASES.items():
        for owner, names in owners.items():
            for name in names:
                spent.watch(attrgetter(owner)(engine), name, phase)
    spent.watch(runner, "lay_out", "layout")
    for drafter in engine.drafters.drafters:
        kernels = getattr(getattr(drafter, "_decoder", None), "kernels", None)
        if hasattr(kernels, "draft_blocks"):
            spent.watch(kernels, "draft_blocks", "drafter")
    return spent


def timed_step(engine: Engine, spent: Spent) -> tuple[bool, dict[str, float]]:
    """Return whether the step drafted, and milliseconds by phase."""
    spent.clear()
    begun = time.thread_time()
    result = engine.step()
    whole = time.thread_time() - begun
    phases = {phase: spent.seconds[phase] for phase in (*PHASES, "layout", "drafter")}
    phases["rest"] = whole - spent.watched_s
    phases["engine"] = whole - sum(phases[name] for name in OUTSIDE)
    return bool(result.drafts), {name: 1e3 * seconds for name, seconds in phases.items()}


def measure(cell: str, activations: str, steps: int) -> dict[str, Any]:
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
            spent = watched(engine)
            with engine.at_work():
                measured = [timed_step(engine, spent) for _ in range(steps) if engine.has_work]
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
    args = parser.parse_args()
    result = {}
    for cell in args.cells:
        result[cell] = measure(cell, args.activations, args.steps)
        for kind, parts in result[cell].items():
            if parts["steps"]:
                medians = ", ".join(f"{part} {ms['median_ms']:.2f}" for part, ms in parts.items() if part != "steps")
                print(f"{cell}, {parts['steps']} {kind} steps, ms: {medians}", flush=True)
    finish("engine_time", {"activations": args.activations, "steps": args.steps, "cells": result})


if __name__ == "__main__":
    main()
