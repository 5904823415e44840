"""A target and its draft model on the clock: plain decoding, `auto`, and `auto` with the draft model at hand.

Every configuration is an engine of its own over the same weights, with an empty store and a cold policy in each round;
they answer each prompt by turns, in an order drawn anew. Seconds are those after the first token. All answers of a
temperature are equal (above 0 they are seeded), so the comparison is paired: intervals are the jackknife's over the
answers of all rounds.

    python -m benchmarks.policy.pair --target FILE --draft FILE --prompts spec_bench.jsonl --first 8 --rounds 5
    python -m benchmarks.policy.pair ... --categories qa --rounds 1 --rows pair.jsonl       # a part of it: some minutes
    python -m benchmarks.policy.pair --rows pair.jsonl                                      # the table of all parts

With `--rows` each answer's row is appended to a file, and the table is of all rows in it; rounds are numbered on, so
parts may be repeated. Without `--target` nothing is measured.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.harness import Answers, finish, prompts_of, shown
from paceline import SamplingParams
from paceline.bench.intervals import Pair, speedup
from paceline.build import make_drafters, make_engine, make_policy
from paceline.config import EngineConfig, SpeculationConfig
from paceline.models.load.open_model import LoadedModel, load_model

PLAIN, AUTO, WITH_DRAFT = "plain", "auto", "auto with the draft model"
CATEGORIES = ("code", "qa", "math_reasoning", "summarization")


def engines(loaded: LoadedModel, draft: Path) -> dict[str, Any]:
    """Make an engine of each configuration."""
    speculations = {
        PLAIN: SpeculationConfig(method="none"),
        AUTO: SpeculationConfig(method="auto"),
        WITH_DRAFT: SpeculationConfig(method="auto", draft_model=(str(draft),)),
    }
    config = EngineConfig(prefix_caching=False, kv_cache_bytes=1 << 29, max_num_batched_tokens=1 << 12)
    made = {}
    for name, speculation in speculations.items():
        drafters = [] if name == PLAIN else make_drafters(loaded, speculation)
        made[name] = make_engine(loaded, config, drafters, make_policy(loaded, speculation))
    return made


def measure(args: argparse.Namespace, first_round: int) -> Iterator[dict[str, Any]]:
    loaded = load_model(args.target, device="cpu", activations=args.activations, threads=args.threads)
    prompts = [one for one in prompts_of(args.prompts, args.first) if one["category"] in args.categories]
    noise = random.Random(first_round)
    for temperature in args.temperature:
        for turn in range(first_round, first_round + args.rounds):
            sampling = {"seed": turn} if temperature else {}
            params = SamplingParams(temperature=temperature, max_tokens=args.tokens, **sampling).resolve({})
            made = engines(loaded, args.draft)
            for prompt in prompts:
                text = [{"role": "user", "content": prompt["turns"][0]}]
                tokens, answers, seconds = loaded.tokenizer.apply_chat_template(text), {}, {}
                for name in noise.sample(list(made), len(made)):
                    answer = Answers(made[name], [tokens] * args.batch, params).finished()
                    answers[name], seconds[name] = answer.tokens, sum(answer.steps_s)
                equal = all(answer == answers[PLAIN] for answer in answers.values())
                count = sum(len(answer) - 1 for answer in answers[PLAIN])
                row = {"activations": args.activations, "temperature": temperature, "batch": args.batch}
                row |= {"category": prompt["category"], "round": turn, "equal": equal}
                yield {**row, "tokens": count, "seconds": seconds}
            for engine in made.values():
                engine.close()


def report(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    keys = ("activations", "temperature", "batch", "category")
    cells = []
    for key in dict.fromkeys(tuple(row[name] for name in keys) for row in rows):
        some = [row for row in rows if tuple(row[name] for name in keys) == key and row["tokens"]]
        tokens = sum(row["tokens"] for row in some)
        rates = {name: tokens / sum(row["seconds"][name] for row in some) for name in (PLAIN, AUTO, WITH_DRAFT)}
        better = max((PLAIN, AUTO), key=rates.__getitem__)
        sides = [(row["seconds"][better], row["tokens"], row["seconds"][WITH_DRAFT], row["tokens"]) for row in some]
        interval = speedup([Pair(*side) for side in sides])
        share = {"ratio": rates[WITH_DRAFT] / rates[better]}
        share |= {"low": interval.low, "high": interval.high} if interval else {}
        equal = all(row["equal"] for row in some)
        cells.append(dict(zip(keys, key, strict=True)) | {"answers": len(some), "tokens_per_s": rates, "share": share})
        cells[-1]["all_equal"] = equal
        text = "  ".join(f"{name} {rate:.1f}" for name, rate in rates.items())
        print(
            f"{key[0]} T {key[1]} batch {key[2]} {key[3]:15} {text}; {shown(share, 3)} of {better}; "
            f"{len(some)} answers {'equal' if equal else 'DIFFERENT'}",
            flush=True,
        )
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, help="without one the stored rows are summarised")
    parser.add_argument("--draft", type=Path)
    parser.add_argument("--rows", type=Path, help="JSON lines: rows of earlier parts, to which these are appended")
    parser.add_argument("--prompts", nargs="+", default=[])
    parser.add_argument("--categories", nargs="+", default=list(CATEGORIES))
    parser.add_argument("--first", type=int, default=8, help="prompts of each category")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--batch", type=int, default=1, help="answers of each prompt at once")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0])
    parser.add_argument("--activations", default="int8")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    if args.target and not (args.draft and args.prompts):
        parser.error("--target needs --draft and --prompts")
    rows = [json.loads(line) for line in args.rows.read_text().splitlines()] if args.rows and args.rows.exists() else []
    if args.target:
        for row in measure(args, 1 + max((row["round"] for row in rows), default=-1)):
            rows.append(row)
            if args.rows:
                with args.rows.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    cells = report(rows)
    if not cells:
        parser.error("no rows; name a --target, or a file of --rows")
    print(f"geometric mean of the shares: {statistics.geometric_mean(cell['share']['ratio'] for cell in cells):.3f}")
    finish("policy_pair", {"rows": len(rows), "cells": cells})


if __name__ == "__main__":
    main()
