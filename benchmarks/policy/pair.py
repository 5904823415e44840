"""A target and its draft model on the clock: plain decoding, `auto`, and `auto` with the draft model at hand.

Every configuration is an engine of its own over the same weights, with an empty store and a cold policy in each round;
they answer each prompt by turns, in an order drawn anew. Seconds are those after the first token. All answers of a
temperature are equal (above 0 they are seeded), so the comparison is paired.

    python -m benchmarks.policy.pair --target FILE --draft FILE --prompts spec_bench.jsonl --first 8 --rounds 5
"""

from __future__ import annotations

import argparse
import random
import statistics
from pathlib import Path
from typing import Any

from benchmarks.harness import Answers, finish, prompts_of, ratio, shown
from paceline import SamplingParams
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


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    loaded = load_model(args.target, device="cpu", activations=args.activations, threads=args.threads)
    prompts = [one for one in prompts_of(args.prompts, args.first) if one["category"] in args.categories]
    rows, noise = [], random.Random(0)
    for temperature in args.temperature:
        for turn in range(args.rounds):
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
                row = {"category": prompt["category"], "temperature": temperature, "round": turn, "equal": equal}
                rows.append({**row, "tokens": count, "seconds": seconds})
            for engine in made.values():
                engine.close()
    return rows


def report(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    cells = []
    for temperature in dict.fromkeys(row["temperature"] for row in rows):
        for category in CATEGORIES:
            some = [row for row in rows if (row["category"], row["temperature"]) == (category, temperature)]
            if not some:
                continue
            rates = {
                name: sum(row["tokens"] for row in some) / sum(row["seconds"][name] for row in some)
                for name in some[0]["seconds"]
            }
            by_round = [
                {name: sum(row["seconds"][name] for row in some if row["round"] == turn) for name in rates}
                for turn in dict.fromkeys(row["round"] for row in some)
            ]
            better = [min(one[PLAIN], one[AUTO]) for one in by_round]
            share = ratio(better, [one[WITH_DRAFT] for one in by_round])
            cell = {"category": category, "temperature": temperature, "tokens_per_s": rates, "share": share}
            cells.append({**cell, "all_equal": all(row["equal"] for row in some)})
            text = "  ".join(f"{name} {rate:.1f}" for name, rate in rates.items())
            equal = "equal" if cells[-1]["all_equal"] else "DIFFERENT"
            print(
                f"T {temperature} {category:15} {text}; of the better one {shown(share, 3)}; answers {equal}",
                flush=True,
            )
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--draft", type=Path, required=True)
    parser.add_argument("--prompts", nargs="+", required=True)
    parser.add_argument("--categories", nargs="+", default=list(CATEGORIES))
    parser.add_argument("--first", type=int, default=8, help="prompts of each category")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--batch", type=int, default=1, help="answers of each prompt at once")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0])
    parser.add_argument("--activations", default="int8")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    rows = measure(args)
    cells = report(rows)
    whole = statistics.geometric_mean([cell["share"]["median"] for cell in cells])
    print(f"geometric mean of the shares: {whole:.3f}")
    finish("policy_pair", {"activations": args.activations, "rounds": args.rounds, "cells": cells})


if __name__ == "__main__":
    main()
