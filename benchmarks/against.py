"""This source tree against another, by turns and through the public API: passes, batches or prompts.

    python -m benchmarks.against TREE passes                    # plain steps of 1 to 16 rows, and a prompt
    python -m benchmarks.against TREE batches --one-core        # 1 and 16 requests, plain and `auto`; processor time
    python -m benchmarks.against TREE prompts --prompts mt_bench.jsonl --per-category 3      # `auto`, one by one

Each tree has a process. Both run the cells by turns; a pair of runs follow each other, in an order drawn anew. A figure
is the other tree's seconds over this one's. The first round warms up. The interval of the geometric mean is Student's.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha1
from pathlib import Path
from typing import Any

from benchmarks.harness import ROOT, TOPICS, finish, prompts_of, ratio, shown
from paceline import LLM, SamplingParams
from paceline.bench.intervals import MIN_PAIRS, student

ACTIVATIONS = ("float32", "int8")
SIZES, PROMPT = (1, 4, 8, 16), 256
KINDS: dict[str, dict[str, Any]] = {"greedy": {"temperature": 0}, "sampled": {"temperature": 0.8, "top_p": 0.9}}

Cells = dict[str, Callable[[LLM], Any]]  # key: "ACTIVATIONS rest"; outputs of an LLM with these activations


# -- cells


def passes() -> Cells:
    def run(llm: LLM, rows: int) -> Any:
        length, count, tokens = (PROMPT, 1, 1) if rows == PROMPT else (8, rows, 24)
        prompts = [{"prompt_token_ids": [(37 * i + at) % 40_000 for i in range(length)]} for at in range(count)]
        return llm.generate(prompts, SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True))

    pairs = itertools.product(ACTIVATIONS, (*SIZES, PROMPT))
    return {f"{activations} {n} rows": lambda llm, n=n: run(llm, n) for activations, n in pairs}


def batches() -> Cells:
    def run(llm: LLM, method: str, rows: int, kind: str) -> Any:
        talks = [[{"role": "user", "content": f"Tell me something about {topic}."}] for topic in TOPICS[:rows]]
        params = SamplingParams(max_tokens=64, ignore_eos=True, seed=7, speculation=method, **KINDS[kind])
        return llm.chat(talks, params)

    cells = itertools.product(ACTIVATIONS, ("none", "auto"), (1, 16), KINDS)
    return {" ".join(map(str, cell)): lambda llm, cell=cell: run(llm, *cell[1:]) for cell in cells}


def prompts(paths: Sequence[str], per_category: int | None) -> Cells:
    every = prompts_of(paths, per_category)

    def run(llm: LLM, temperature: float, category: str) -> Any:
        params = SamplingParams(temperature=temperature, max_tokens=96, seed=7)
        talks = [[{"role": "user", "content": one["turns"][0]}] for one in every if one["category"] == category]
        return [output for talk in talks for output in llm.chat(talk, params)]

    cells = itertools.product(ACTIVATIONS, (0.0, 0.7), dict.fromkeys(one["category"] for one in every))
    return {f"{a} T{t} {c}": lambda llm, t=t, c=c: run(llm, t, c) for a, t, c in cells}


# -- one tree's process


def serve(args: argparse.Namespace, cells: Cells) -> None:
    """Run one cell for each line of input; null loads the models again."""
    options = {"device": "cpu", "threads": 1 if args.one_core else None, "prefix_caching": False}
    options |= {"kv_cache_bytes": 1 << 28, "method": "none" if args.what == "passes" else "auto"}
    llms: dict[str, LLM] = {}
    print(json.dumps(list(cells)), flush=True)
    for line in sys.stdin:
        cell = json.loads(line)
        if cell is None:  # where a model's memory lies makes a difference that no round of one process averages out
            for llm in llms.values():
                llm.close()
            for name in ACTIVATIONS:
                llms[name] = LLM(args.model, activations=name, **options)
                llms[name].generate(["Hello there."], SamplingParams(max_tokens=8))
            print("{}", flush=True)
            continue
        cpu_s, wall_s = time.process_time(), time.perf_counter()
        outputs = cells[cell](llms[cell.split()[0]])
        cpu_s, wall_s = time.process_time() - cpu_s, time.perf_counter() - wall_s
        answers = [output.outputs[0].token_ids for output in outputs]
        digest = sha1(repr(answers).encode()).hexdigest()
        print(json.dumps({"cpu": cpu_s, "wall": wall_s, "digest": digest}), flush=True)


@contextmanager
def process_of(tree: Path) -> Iterator[tuple[list[str], Callable[[str | None], Any]]]:
    """Run this script on the source of a tree, with a cache folder of its own for what policies learn."""
    from paceline.models.load.store import cache_home

    with tempfile.TemporaryDirectory() as home:
        (Path(home) / "models").symlink_to(cache_home() / "models")
        env = {**os.environ, "PYTHONPATH": f"{tree.resolve() / 'src'}{os.pathsep}{ROOT}", "PACELINE_HOME": home}
        command = [sys.executable, "-m", "benchmarks.against", *sys.argv[1:], "--worker"]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        process = subprocess.Popen(command, env=env, cwd=ROOT, **pipes)
        assert process.stdin is not None
        assert process.stdout is not None

        def ask(cell: str | None) -> Any:
            process.stdin.write(json.dumps(cell) + "\n")
            process.stdin.flush()
            return json.loads(process.stdout.readline())

        try:
            yield json.loads(process.stdout.readline()), ask
        finally:
            process.stdin.close()
            process.wait()


# -- both


def compare(other: Path, rounds: int, unit: str) -> dict[str, Any]:
    noise = random.Random(0)
    with process_of(ROOT) as (cells, ours), process_of(other) as (_, theirs):
        ratios: dict[str, list[float]] = {cell: [] for cell in cells}
        same = dict.fromkeys(cells, True)
        for turn in range(rounds + 1):
            for ask in (ours, theirs):
                ask(None)
            for cell in noise.sample(cells, len(cells)):
                pair = {ask: ask(cell) for ask in noise.sample((ours, theirs), 2)}
                same[cell] &= pair[ours]["digest"] == pair[theirs]["digest"]
                if turn:
                    ratios[cell].append(pair[theirs][unit] / pair[ours][unit])
    by_round = [statistics.fmean(map(math.log, row)) for row in zip(*ratios.values(), strict=True)]
    reach = student(rounds - 1) * statistics.stdev(by_round) / math.sqrt(rounds)
    centre = statistics.fmean(by_round)
    result: dict[str, Any] = {cell: ratio(pairs, [1.0] * rounds) for cell, pairs in ratios.items()}
    for cell in cells:
        print(f"{cell:32} {shown(result[cell], 3)}{'' if same[cell] else '   DIFFERENT ANSWERS'}")
    mean = {"ratio": math.exp(centre), "low": math.exp(centre - reach), "high": math.exp(centre + reach)}
    print(f"geometric mean of {len(cells)} cells, {rounds} pairs: {shown(mean, 3)}")
    return {"cells": result, "geometric_mean": mean, "rounds": rounds, "unit": unit, "same_answers": all(same.values())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tree", type=Path, help="another source tree of this package")
    parser.add_argument("what", choices=("passes", "batches", "prompts"))
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rounds", type=int, default=7, help="at least five, for the interval")
    parser.add_argument("--one-core", action="store_true", help="one thread, processor time")
    parser.add_argument("--prompts", nargs="*", default=[], help="of prompts; without one, prompts that ask for copies")
    parser.add_argument("--per-category", type=int, help="of prompts")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rounds < MIN_PAIRS:
        parser.error(f"--rounds is at least {MIN_PAIRS}, for the interval")
    if args.worker:
        families = {"passes": passes, "batches": batches, "prompts": lambda: prompts(args.prompts, args.per_category)}
        serve(args, families[args.what]())
    else:
        finish(f"{args.what}_against", compare(args.tree, args.rounds, "cpu" if args.one_core else "wall"))


if __name__ == "__main__":
    main()
