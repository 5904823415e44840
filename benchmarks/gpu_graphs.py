"""What capturing verification saves a step: the same engine with graphs and without, in turn.

    python benchmarks/gpu_graphs.py [--weights smollm2] [--tokens 192] [--rounds 3]

Medians over the steps of a round, and of the rounds after the first. Behind the
yardstick's pass of some milliseconds most of what the host launches is hidden; smollm2's own takes a fraction of that.
"""

from __future__ import annotations

import argparse
import statistics
import traceback
from typing import Any

import torch
from gpu_engine import Runs, many_prompts
from gpu_subject import Subject
from harness import finish

from paceline import SamplingParams
from paceline.engine.sampler import Sampler
from paceline.verify import verify

CELLS: tuple[tuple[str, str, int | None, dict[str, Any], int], ...] = (
    ("small", "none", None, {"top_p": 0.9}, 1),
    ("small", "none", None, {"top_p": 0.9}, 16),
    ("small", "ngram", 4, {"top_p": 0.9}, 1),
    ("small", "ngram", 4, {"top_p": 0.9}, 16),
    ("yardstick", "draft-model", 4, {}, 1),
    ("yardstick", "draft-model", 4, {"top_p": 0.9}, 1),
    ("yardstick", "draft-model", 4, {"seed": 1}, 1),
    ("yardstick", "draft-model", 4, {"top_p": 0.9}, 16),
    ("yardstick", "ngram", 4, {"top_p": 0.9}, 16),
)


def cell(runs: Runs, prompts: list[list[int]], params: SamplingParams, rounds: int) -> dict[str, Any]:
    engine, sampler = runs.engine, runs.engine.runner.sampler
    config = engine.model.config
    uncaptured = Sampler(config.vocab_size, frozenset(config.eos_token_ids), engine.model.device, verifier=verify)
    times: dict[str, list[float]] = {"uncaptured": [], "captured": []}
    for turn in range(rounds + 1):
        for name, step_ms in times.items():
            engine.runner.sampler = sampler if name == "captured" else uncaptured
            took = runs.answer(prompts, params)["step_ms"]
            if turn:
                step_ms.append(took)
    found = {name: statistics.median(step_ms) for name, step_ms in times.items()}
    late = {"uncaptured_steps": sampler.uncaptured, "captured_late": sampler.late_captures}
    return {**found, "rounds": times, "graphs": len(sampler._graphs), **late}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", default="smollm2", help="smollm2, a folder with it, or random")
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a small shape, to try the script itself")
    options = parser.parse_args()
    subject = Subject(options.weights, torch.device(options.device), tiny=options.tiny)
    found: dict[str, Any] = {}
    engines: dict[str, Runs] = {}
    for model, method, k, asked, batch in CELLS:
        name = f"{model}, {method} {k or ''}, {asked or 'T = 0.7'}, {batch} rows"
        decoder = subject.small if model == "small" else subject.yardstick
        try:
            if model not in engines:
                engines[model] = Runs(subject, decoder, "ngram" if model == "small" else "auto", batch=16)
            runs = Runs(subject, decoder, method, k, batch, engines[model])
            params = SamplingParams(temperature=0.7, max_tokens=options.tokens, ignore_eos=True, **asked).resolve({})
            got = found[name] = cell(runs, many_prompts(subject, 0, batch), params, options.rounds)
        except Exception:  # the other cells still count
            traceback.print_exc()
            continue
        counts = f"{got['graphs']} graphs, {got['captured_late']} kernels compiled late"
        print(f"{name}: step {got['uncaptured']:.2f} ms, captured {got['captured']:.2f} ms; {counts}", flush=True)
    finish("gpu_graphs", {"device": subject.device_name, "weights": options.weights, "cells": found})


if __name__ == "__main__":
    main()
