"""All drafting methods in one table: whole answers, one configuration after the other in a new order for each prompt.

Every configuration is an engine of its own over the same weights, whose policy begins cold, and sees each prompt once.
At a temperature requests are seeded, so all answers are equal and every comparison is paired. Answers that repeat a
16-gram are loops and reported apart. A run ends after `--minutes`; with `--rows FILE` the next one goes on behind the
prompts that the file has, and the table is of all its rows.

A method is `auto` (all drafters), `auto-NAME` (all but one), `NAME+NAME` (these alone, chosen by the policy) or
`NAME:K` (one, K nodes at every step). Each method is compared with the first one too.

    python -m benchmarks.methods --workloads json --methods auto-grammar auto suffix suffix+grammar
    python -m benchmarks.methods --target FILE --draft FILE --prompts mt_bench.jsonl --activations int8 --first 3
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks.harness import Answers, finish, shown
from benchmarks.speculation import NONE, params_of, speedup

AUTO = "auto"
WARM_UP = "Hello there, how are you today?"
Row = dict[str, Any]


def drafters_of(loaded: Any, method: str, draft: list[str]) -> list[Any]:
    """Return the drafters of a configuration."""
    from paceline.build import make_drafters
    from paceline.config import SpeculationConfig

    names, left_out = method.partition(":")[0].split("+"), method.partition("auto-")[2]
    if method == NONE:
        return []
    every = make_drafters(loaded, SpeculationConfig(method=AUTO, draft_model=tuple(draft)))
    if method == AUTO or left_out:
        return [one for one in every if one.name != left_out]
    chosen = [one for one in every if one.name in names]
    if len(chosen) < len(names):
        raise SystemExit(f"{method}: choose from {', '.join(one.name for one in every)}")
    return chosen


def engine_of(loaded: Any, method: str, draft: list[str]) -> Any:
    from paceline.build import make_engine, make_policy
    from paceline.config import EngineConfig, SpeculationConfig

    name, _, k = method.partition(":")
    wanted = SpeculationConfig(method=name if k or method == NONE else AUTO, k=int(k) if k else None)
    config = EngineConfig(prefix_caching=False, kv_cache_bytes=1 << 28)
    engine = make_engine(loaded, config, drafters_of(loaded, method, draft), make_policy(loaded, wanted))
    _ = engine.admission.grammars  # made once, and not for a prompt
    Answers(engine, [loaded.tokenizer.encode(WARM_UP)], params_of(0.0, 32, 0).resolve({})).finished()
    return engine


def prompts_of(args: argparse.Namespace) -> list[Any]:
    """Return the prompts, one of each workload after the other, so that every part of a run has all of them."""
    from paceline.bench.prompts import from_file, shipped

    found = [from_file(path, per_workload=args.first) for path in args.prompts]
    found += [shipped(args.workloads, args.first)] if args.workloads or not found else []
    by_workload: dict[str, list[Any]] = {}
    for prompt in (prompt for prompts in found for prompt in prompts):
        by_workload.setdefault(prompt.workload, []).append(prompt)
    longest = max(map(len, by_workload.values()))
    return [prompts[at] for at in range(longest) for prompts in by_workload.values() if at < len(prompts)]


def answer_all(engines: dict[str, Any], loaded: Any, prompt: Any, params: Any, noise: random.Random) -> Row | None:
    """Return the row of a prompt; None where a single token ends the answer."""
    from paceline.bench.intervals import loops

    tokens = loaded.tokenizer.apply_chat_template(prompt.messages([]))
    ends = {
        name: Answers(engines[name], [tokens], params).finished() for name in noise.sample([*engines], len(engines))
    }
    if not all(end.decoded for end in ends.values()):
        return None
    stats, plain = {name: end.stats() for name, end in ends.items()}, ends[NONE].tokens[0]
    return {
        "seconds": {name: sum(end.steps_s) / end.decoded for name, end in ends.items()},
        "tau": {name: one.mean_acceptance_length for name, one in stats.items()},
        "accepted": {name: one.num_accepted_tokens for name, one in stats.items()},
        "drafted": {name: one.num_draft_tokens for name, one in stats.items()},
        "identical": all(end.tokens[0] == plain for end in ends.values()),
        "tokens": len(plain),
        "loops": loops(plain),
    }


def measure(args: argparse.Namespace, rows: list[Row]) -> None:
    """Add rows until the prompts or the minutes end."""
    from paceline.models.load.hub import resolve
    from paceline.models.load.open_model import load_model

    loaded = load_model(resolve(args.target), dtype="auto", device="cpu", activations=args.activations)
    begun, done = time.perf_counter(), {row["key"] for row in rows}
    for turn in range(args.rounds):
        for temperature in args.temperature:
            engines: dict[str, Any] = {}
            for prompt in prompts_of(args):
                key = f"{args.target} {args.activations} T {temperature} round {turn}: {prompt.origin}"
                if key in done:
                    continue
                if time.perf_counter() - begun > 60 * args.minutes:
                    return
                names = dict.fromkeys([NONE, *args.methods])
                engines = engines or {name: engine_of(loaded, name, args.draft) for name in names}
                structured = {} if prompt.schema is None else {"structured_outputs": {"json": prompt.schema}}
                params = params_of(temperature, args.max_tokens, args.seed + turn, **structured).resolve({})
                row = answer_all(engines, loaded, prompt, params, random.Random(key))
                if row is not None:
                    rows.append({"key": key, "temperature": temperature, "workload": prompt.workload, **row})


def cell_of(rows: list[Row], methods: list[str]) -> dict[str, Any]:
    """Return the figures of each method over some rows."""
    cell: dict[str, Any] = {"answers": len(rows), "identical": all(row["identical"] for row in rows)}
    for name in methods:
        drafted = sum(row["drafted"][name] for row in rows)
        cell[name] = speedup(rows, name) | {
            "tau": statistics.mean(row["tau"][name] for row in rows),
            "acceptance": sum(row["accepted"][name] for row in rows) / drafted if drafted else None,
            f"over {methods[0]}": speedup(rows, name, over=methods[0]),
        }
    return cell


def report(rows: list[Row], methods: list[str]) -> list[dict[str, Any]]:
    cells = []
    for temperature in dict.fromkeys(row["temperature"] for row in rows):
        for workload in ("all", *dict.fromkeys(row["workload"] for row in rows)):
            for are_loops in (False, True):
                part = [row for row in rows if row["temperature"] == temperature and row["loops"] == are_loops]
                part = [row for row in part if workload in ("all", row["workload"])]
                if not part:
                    continue
                cell = cell_of(part, methods)
                kind = f"{workload}, loops" if are_loops else workload
                cells.append({"temperature": temperature, "workload": kind, **cell})
                print(f"\nT {temperature}, {kind}: {len(part)} answers, identical {cell['identical']}")
                print(f"  {'method':24} {'over plain [95 %]':22} {'τ':>5}  accepted  over {methods[0]}")
                for name in methods:
                    one = cell[name]
                    share = "" if one["acceptance"] is None else f"{one['acceptance']:.2f}"
                    over = shown(one[f"over {methods[0]}"])
                    print(f"  {name:24} {shown(one):22} {one['tau']:5.2f}  {share:8}  {over}")
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--draft", nargs="*", default=[], help="draft models beside the drafters at hand")
    parser.add_argument("--methods", nargs="+", default=[AUTO])
    parser.add_argument("--workloads", nargs="*", default=[], help="packaged ones: chat, code, json, translation, ...")
    parser.add_argument("--prompts", nargs="*", type=Path, default=[])
    parser.add_argument("--first", type=int, help="prompts of each workload")
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0])
    parser.add_argument("--activations", default="float32", choices=("float32", "int8"))
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--rows", type=Path, help="file of the rows so far, which is continued")
    args = parser.parse_args()
    rows: list[Row] = json.loads(args.rows.read_text()) if args.rows is not None and args.rows.exists() else []
    try:
        measure(args, rows)
    finally:
        if args.rows is not None:
            args.rows.write_text(json.dumps(rows))
    settings = {
        name: getattr(args, name) for name in ("target", "draft", "activations", "max_tokens", "rounds", "seed")
    }
    finish("methods", {**settings, "cells": report(rows, args.methods)})


if __name__ == "__main__":
    main()
