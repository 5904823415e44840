"""Speculation against our own plain decoding: copy-heavy work of our own, or any file of prompts, by category.

Every configuration is an engine of its own over the same weights, with its own suffix store, and sees each prompt
once: no answer is memorised. They are interleaved step by step: each takes one in turn, in a new order every time, so a
machine that slows down for a second does so for all that are still answering. But then each pass finds the caches as
another engine left them, which passes of a user's engine do not: with `--whole` every configuration answers a prompt to
its end before the next one does, in a new order for each prompt. At temperature 0.7 requests are seeded, so all give
the same tokens and the comparison is paired. EOS is respected. Answers that repeat a 16-gram are looping and reported
apart, since loops flatter lookup.

`--rounds`: all of it again by new engines with empty stores and cold policies, at temperature 0.7 with another seed, so
that few groups of a category become enough for an interval. It is one over runs of these prompts: greedily the groups
are the same, timed once more.

`auto` starts cold. Users' policies are remembered between runs: `--remembered` adds an `auto` whose policy has answered
other prompts before, with a suffix store that is empty all the same.

    python benchmarks/speculation.py                                   # copy-heavy prompts
    python benchmarks/speculation.py --prompts mt_bench.jsonl --per-category 2 --batch 4
    python benchmarks/speculation.py --prompts mt_bench.jsonl --per-category 2 --whole
    python benchmarks/speculation.py --prompts mt_bench.jsonl --batch 4 --fixed suffix:2 suffix:2  # what chance does
    python benchmarks/speculation.py --prompts mt_bench.jsonl --remembered gsm8k_train.jsonl
    python benchmarks/speculation.py --prompts mt_bench.jsonl --lookups --fixed dspark:3 --activations int8
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from common import finish
from copy_prompts import copy_prompts

from paceline import SamplingParams
from paceline.bench.intervals import Pair, loops
from paceline.bench.intervals import speedup as paired_speedup
from paceline.build import make_drafters, make_engine, make_policy
from paceline.config import AUTO, NONE, EngineConfig, SpeculationConfig
from paceline.models.load.hub import resolve
from paceline.models.load.open_model import LoadedModel, load_model

NO_LOOPS = "all but loops"
LOOKUPS = "lookups"  # `auto` without the model's trained drafter
REMEMBERED, AGAIN = "auto remembered", " again"


class Configuration:
    """An engine with drafters of its own on shared weights."""

    def __init__(self, loaded: LoadedModel, method: str, k: int | None) -> None:
        self.name = method if k is None else f"{method} k={k}"
        asked = SpeculationConfig(method=AUTO if method == LOOKUPS else method, k=k)
        drafters = []
        if method != NONE:  # all that `auto` has; a fixed method is alone, since others would index texts beside it
            every = replace(asked, method=AUTO, k=None, drafter=(NONE,) if method == LOOKUPS else ())
            drafters = [one for one in make_drafters(loaded, every) if method in (AUTO, LOOKUPS, one.name)]
        self.policy = make_policy(loaded, asked)
        # All prompts of a group are read in one step: no row is ahead when timing starts.
        config = EngineConfig(prefix_caching=False, kv_cache_bytes=1 << 29, max_num_batched_tokens=1 << 14)
        self.engine = make_engine(loaded, config, drafters, self.policy)

    def begin(self, prompts: Sequence[list[int]], params: SamplingParams) -> None:
        """Up to the first token of each, and no further."""
        self.sequences = [
            self.engine.add_request(str(index), prompt, params, wait_group="group")[0]
            for index, prompt in enumerate(prompts)
        ]
        while any(sequence.num_output == 0 for sequence in self.sequences):
            self.engine.step()
        assert all(sequence.num_output == 1 for sequence in self.sequences), "some were ahead of the others"
        self.seconds = 0.0

    def step(self) -> bool:
        """One more, timed; whether there was one."""
        if not self.engine.has_work:
            return False
        started = time.perf_counter()
        self.engine.step()
        self.seconds += time.perf_counter() - started
        return True

    def end(self) -> tuple[float, list[list[int]], Any]:
        """Seconds of decoding a token, the answers, and the statistics of all of them."""
        stats = self.sequences[0].stats
        for sequence in self.sequences[1:]:
            stats.merge(sequence.stats)
        answers = [sequence.output_tokens for sequence in self.sequences]
        decoded = sum(map(len, answers)) - len(answers)
        return (self.seconds / decoded if decoded else 0.0), answers, stats

    def answer(self, prompts: Sequence[list[int]], params: SamplingParams) -> tuple[float, list[list[int]], Any]:
        self.begin(prompts, params)
        while self.step():
            pass
        return self.end()


def index_prompts(paths: Sequence[str], per_category: int | None) -> list[dict[str, Any]]:
    if paths:
        lines = [line for path in paths for line in Path(path).read_text().split("\n")]
        prompts = [json.loads(line) for line in lines if line.strip()]
    else:
        prompts = copy_prompts()
    if per_category is None:
        return prompts
    kept: dict[str, list[dict[str, Any]]] = {}
    for prompt in prompts:
        kept.setdefault(prompt["category"], []).append(prompt)
    return [prompt for category in kept.values() for prompt in category[:per_category]]


def remembered(
    loaded: LoadedModel, others: Sequence[dict[str, Any]], params: SamplingParams, batch: int
) -> Configuration:
    """`auto` with what a policy learnt from the first turns of other prompts, and nothing else of it."""
    before = Configuration(loaded, "auto", None)
    asked = [loaded.tokenizer.apply_chat_template([{"role": "user", "content": one["turns"][0]}]) for one in others]
    for start in range(0, len(asked), batch):
        before.answer(asked[start : start + batch], params)
    made = Configuration(loaded, "auto", None)
    made.name = REMEMBERED
    made.policy.load(json.loads(json.dumps(before.policy.state())))
    return made


def other_prompts(paths: Sequence[str], count: int, measured: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """So many, from all over the files; none of those that are measured."""
    first = {prompt["turns"][0] for prompt in measured}
    others = [prompt for prompt in index_prompts(paths, None) if prompt["turns"][0] not in first]
    return others[:: max(len(others) // count, 1)][:count]


def speedup(rows: list[dict[str, Any]], name: str, over: str = "none") -> dict[str, float]:
    """Time per token of `over` over that of `name`, all groups together, with a paired interval over groups where there
    are enough of them."""
    pairs = [
        Pair(row["seconds"][over] * row["tokens"], row["tokens"], row["seconds"][name] * row["tokens"], row["tokens"])
        for row in rows
    ]
    found = paired_speedup(pairs)
    if found is None:
        return {"ratio": sum(pair.plain_s for pair in pairs) / sum(pair.own_s for pair in pairs)}
    return {"ratio": found.ratio, "low": found.low, "high": found.high}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", nargs="*", default=[])
    parser.add_argument("--mixed", action="store_true", help="batches of all categories")
    parser.add_argument("--per-category", type=int)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 0.7])
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--whole", action="store_true", help="one answer after the other, not step by step")
    parser.add_argument("--rounds", type=int, default=1, choices=range(1, 100), metavar="N")
    parser.add_argument("--fixed", nargs="*", default=["ngram:4", "ngram:8", "suffix:4", "suffix:8"])
    parser.add_argument("--lookups", action="store_true", help="auto without the trained drafter beside it")
    parser.add_argument("--remembered", nargs="+", default=[], help="files of other prompts that a policy learnt from")
    parser.add_argument("--dtype", default="auto", help="of the weights; float32: expanded")
    parser.add_argument("--activations", default="float32", choices=("float32", "int8"))
    parser.add_argument("--remembered-answers", type=int, default=24)
    args = parser.parse_args()

    loaded = load_model(resolve("smollm2"), dtype=args.dtype, device="cpu", activations=args.activations)
    fixed = [(name.split(":")[0], int(name.split(":")[1])) for name in args.fixed]
    prompts = index_prompts(args.prompts, args.per_category)
    if args.mixed:
        prompts = [{"category": "mixed", "turns": prompt["turns"]} for prompt in prompts]
        random.Random(0).shuffle(prompts)
    result: dict[str, Any] = {"prompts": len(prompts), "batch": args.batch, "max_tokens": args.max_tokens}
    result["whole"] = args.whole
    result |= {"dtype": args.dtype, "activations": args.activations}
    result |= {"rounds": args.rounds, "seed": args.seed, "cells": []}
    others = other_prompts(args.remembered, args.remembered_answers, prompts) if args.remembered else []
    if others:
        result["remembered"] = {"answers": len(others), "of": [Path(path).name for path in args.remembered]}
        print(f"auto starts cold; {REMEMBERED}: its policy has answered {len(others)} other prompts before")
    for temperature in args.temperature:
        rows = []
        for seed in range(args.seed, args.seed + args.rounds):
            chosen = {"seed": seed} if temperature else {}
            params = SamplingParams(temperature=temperature, max_tokens=args.max_tokens, **chosen).resolve({})
            configurations = [
                Configuration(loaded, method, k)
                for method, k in [(NONE, None), (AUTO, None), *([(LOOKUPS, None)] if args.lookups else []), *fixed]
            ]
            tell_apart(configurations)
            if others:
                configurations.append(remembered(loaded, others, params, args.batch))
            rows += run(configurations, loaded, prompts, params, args.batch, random.Random(seed), args.whole)
        report([one.name for one in configurations if one.name != "none"], rows, temperature, result)
    finish("speculation", result)


def tell_apart(configurations: list[Configuration]) -> None:
    """The same method and k may run twice, to see what differs by chance."""
    names = set[str]()
    for one in configurations:
        while one.name in names:
            one.name += AGAIN
        names.add(one.name)


def answer_by_turns(
    configurations: list[Configuration], prompts: Sequence[list[int]], params: SamplingParams, noise: random.Random
) -> None:
    """A step of each in turn, in a new order every time."""
    for configuration in configurations:
        configuration.begin(prompts, params)
    going = configurations[:]
    while going:
        noise.shuffle(going)
        going = [configuration for configuration in going if configuration.step()]


def run(
    configurations: list[Configuration],
    loaded: LoadedModel,
    prompts: list[dict[str, Any]],
    params: SamplingParams,
    batch: int,
    noise: random.Random,
    whole: bool,
) -> list[dict[str, Any]]:
    """One row per batch of conversations and turn; the second turn continues from plain decoding's first answer."""
    rows = []
    for configuration in configurations:  # warm up: the first passes fault pages in
        configuration.answer([loaded.tokenizer.encode("Hello there, how are you today?")] * batch, params)
    by_category: dict[str, list[dict[str, Any]]] = {}
    for prompt in prompts:
        by_category.setdefault(prompt["category"], []).append(prompt)
    for category, members in by_category.items():
        for start in range(0, len(members) - batch + 1, batch):
            group = members[start : start + batch]
            talks: list[list[dict[str, str]]] = [[] for _ in group]
            for turn in range(min(len(prompt["turns"]) for prompt in group)):
                for talk, prompt in zip(talks, group, strict=True):
                    talk.append({"role": "user", "content": prompt["turns"][turn]})
                tokens = [loaded.tokenizer.apply_chat_template(talk) for talk in talks]
                alone = [[one] for one in noise.sample(configurations, len(configurations))]
                for together in alone if whole else [configurations]:
                    answer_by_turns(together, tokens, params, noise)
                answers, row = {}, {"category": category, "seconds": {}, "tau": {}}
                for configuration in configurations:
                    seconds, answers[configuration.name], stats = configuration.end()
                    row["seconds"][configuration.name] = seconds
                    row["tau"][configuration.name] = stats.mean_acceptance_length
                same = all(answer == answers["none"] for answer in answers.values())
                row |= {"identical": same, "tokens": sum(map(len, answers["none"]))}
                row["loops"] = any(map(loops, answers["none"]))
                if all(row["seconds"].values()):
                    rows.append(row)
                for talk, answer in zip(talks, answers["none"], strict=True):
                    talk.append({"role": "assistant", "content": loaded.tokenizer.decode(answer)})
    return rows


def report(names: list[str], rows: list[dict[str, Any]], temperature: float, result: dict[str, Any]) -> None:
    print(f"\ntemperature {temperature}: speed-up over plain decoding [95 %], τ; {torch.get_num_threads()} threads")
    categories = ["all", NO_LOOPS, *dict.fromkeys(row["category"] for row in rows)]
    for category in categories:
        mine = [
            row for row in rows if category in ("all", row["category"]) or (category == NO_LOOPS and not row["loops"])
        ]
        cell: dict[str, Any] = {"temperature": temperature, "category": category, "answers": len(mine)}
        for name in names:
            if mine:
                cell[name] = speedup(mine, name) | {"tau": statistics.mean(row["tau"][name] for row in mine)}
        fixed = [name for name in names if name in cell and not name.startswith("auto") and not name.endswith(AGAIN)]
        best = max(fixed, key=lambda name: cell[name]["ratio"], default=None)
        for name in [name for name in names if name in cell and name.startswith("auto") and best]:
            cell[name] |= {"of": best, "share": speedup(mine, name, over=str(best))}
        if mine and LOOKUPS in names:
            cell["auto over lookups"] = speedup(mine, AUTO, over=LOOKUPS)
        cell["identical"] = all(row["identical"] for row in mine)
        cell["looping"] = sum(row["loops"] for row in mine)
        result["cells"].append(cell)
        figures = "  ".join(f"{name} {figure(cell[name])}" for name in names if name in cell)
        if over := cell.get("auto over lookups"):
            figures += f"  auto over lookups {over['ratio']:.2f}x{interval(over, 2)}"
        print(
            f"{category:16} {len(mine):3} answers, {cell['looping']} looping, identical {cell['identical']}: {figures}"
        )


def figure(entry: dict[str, Any]) -> str:
    said = f"{entry['ratio']:.2f}x{interval(entry, 2)} τ {entry['tau']:.2f}"
    if share := entry.get("share"):  # of the best fixed method, the same groups compared
        said += f" ({share['ratio']:.3f}{interval(share, 3)} of {entry['of']})"
    return said


def interval(of: dict[str, float], digits: int) -> str:
    return f" [{of['low']:.{digits}f}, {of['high']:.{digits}f}]" if "low" in of else ""


if __name__ == "__main__":
    main()
