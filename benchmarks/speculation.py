"""Speculation against our own plain decoding: copying, or any file of prompts, by category.

Every configuration is an engine of its own over the same weights, with its own suffix store, and sees each prompt once:
no answer is memorised. They are interleaved step by step, in a new order every time, so a machine that slows down for a
second does so for all that still answer. But then each pass finds the caches as another engine left them: with
`--whole` a configuration answers a prompt to its end before the next one does. At temperature 0.7 requests are seeded,
so all give equal tokens and the comparison is paired. EOS is respected. Answers that repeat a 16-gram are looping and
reported apart, since loops flatter lookup. `--rounds`: all of it again by new engines with empty stores and cold
policies, at temperature 0.7 with another seed.

    python -m benchmarks.speculation                                   # copying
    python -m benchmarks.speculation --prompts mt_bench.jsonl --per-category 2 --lookups --fixed dspark:4 --whole
    python -m benchmarks.speculation --model FILE --draft-model universal --prompts mt_bench.jsonl --lookups --fixed
    python -m benchmarks.speculation --prompts mt_bench.jsonl --batch 4 --fixed suffix:1 suffix:2
    python -m benchmarks.speculation --prompts mt_bench.jsonl --lookups --fixed recycling recycling+table --whole
    python -m benchmarks.speculation drafter --drafter DIR --prompts mt_bench.jsonl   # τ of a block drafter
    python -m benchmarks.speculation drafter --drafter DIR --answers W/answers.json   # τ on kept answers
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import Answers, finish, prompts_of, shown
from paceline import SamplingParams

NONE, AUTO = "none", "auto"
NO_LOOPS = "all but loops"
LOOKUPS = "lookups"  # `auto` without the model's trained drafter and without draft models
WARM = "+table"  # behind `recycling`: with the table that `paceline warm` filled; else its table is empty at first
SHAPES = {"chain 7": (1, 7), "tree 15": (8, 15), "tree 60": (8, 60)}  # beam and nodes of a block drafter
GREEDY, SAMPLED = 0.0, 0.7


class Configuration:
    """An engine with drafters of its own on shared weights."""

    def __init__(self, loaded: Any, method: str, k: int | None, draft_models: Sequence[str] = ()) -> None:
        from paceline.build import drafter_context, make_drafters, make_engine, make_policy
        from paceline.config import EngineConfig, SpeculationConfig
        from paceline.drafters.methods import METHODS, RECYCLING

        self.name = method if k is None else f"{method} k={k}"
        method, warm, _ = method.partition(WARM)
        speculation = SpeculationConfig(method=AUTO if method == LOOKUPS else method, k=k)
        drafters = []
        if method != NONE:  # all of `auto`; a fixed method is alone, since others would index texts beside it
            lookups = method == LOOKUPS
            every = replace(speculation, k=None, drafter=(NONE,) if lookups else ())
            every = replace(every, draft_model=() if lookups else tuple(draft_models))
            if method == RECYCLING:
                context = drafter_context(loaded, every)
                drafters = [METHODS[RECYCLING].make(context if warm else replace(context, embedding=None))]
            else:
                drafters = [one for one in make_drafters(loaded, every) if method in (AUTO, LOOKUPS, one.name)]
        self.policy = make_policy(loaded, speculation)
        # All prompts of a group are read in one step: no row is ahead when timing starts.
        config = EngineConfig(prefix_caching=False, kv_cache_bytes=1 << 29, max_num_batched_tokens=1 << 14)
        self.engine = make_engine(loaded, config, drafters, self.policy)

    def begin(self, prompts: Sequence[list[int]], params: Any) -> None:
        """Decode the first token of each, and no further."""
        self.answers = Answers(self.engine, prompts, params)
        assert self.answers.first_tokens == len(prompts), "some were ahead of the others"

    def answer(self, prompts: Sequence[list[int]], params: Any) -> list[list[int]]:
        return Answers(self.engine, prompts, params).finished().tokens


def params_of(temperature: float, max_tokens: int, seed: int, **options: Any) -> SamplingParams:
    seeded = {"seed": seed} if temperature else {}
    return SamplingParams(temperature=temperature, max_tokens=max_tokens, **seeded, **options)


def chat(tokenizer: Any, text: str) -> list[int]:
    return tokenizer.apply_chat_template([{"role": "user", "content": text}])


# -- configurations by turns


def compare(args: argparse.Namespace) -> None:
    from paceline.models.load.hub import resolve
    from paceline.models.load.open_model import load_model

    loaded = load_model(resolve(args.model), dtype=args.dtype, device="cpu", activations=args.activations)
    methods = [(NONE, None), (AUTO, None), *([(LOOKUPS, None)] if args.lookups else [])]
    methods += [(name, int(k) if k else None) for name, _, k in (each.partition(":") for each in args.fixed)]
    prompts = prompts_of(args.prompts, args.per_category)
    if args.mixed:
        prompts = [{"category": "mixed", "turns": prompt["turns"]} for prompt in prompts]
        random.Random(0).shuffle(prompts)
    names = ("batch", "max_tokens", "whole", "dtype", "activations", "rounds", "seed")
    result: dict[str, Any] = {"prompts": len(prompts), **{name: getattr(args, name) for name in names}, "cells": []}
    for temperature in args.temperature:
        rows = []
        for seed in range(args.seed, args.seed + args.rounds):
            params = params_of(temperature, args.max_tokens, seed).resolve({})
            configurations = [Configuration(loaded, method, k, args.draft_model) for method, k in methods]
            rows += run(configurations, loaded, prompts, params, args, random.Random(seed))
        report([one.name for one in configurations if one.name != NONE], rows, temperature, result)
    finish("speculation", result)


def answer_by_turns(together: list[Configuration], prompts: Sequence[list[int]], params: Any, noise: Any) -> None:
    for configuration in together:
        configuration.begin(prompts, params)
    going = together[:]
    while going:
        noise.shuffle(going)
        going = [configuration for configuration in going if configuration.answers.step()]


def run(
    configurations: list[Configuration], loaded: Any, prompts: list[dict[str, Any]], params: Any, args: Any, noise: Any
) -> list[dict[str, Any]]:
    """Return one row per batch of conversations and turn; second turns continue from plain decoding's first answer."""
    from paceline.bench.intervals import loops

    rows, tokenizer, batch = [], loaded.tokenizer, args.batch
    for configuration in configurations:  # warm up: the first passes fault pages in
        configuration.answer([tokenizer.encode("Hello there, how are you today?")] * batch, params)
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
                tokens = [tokenizer.apply_chat_template(talk) for talk in talks]
                alone = [[one] for one in noise.sample(configurations, len(configurations))]
                for together in alone if args.whole else [configurations]:
                    answer_by_turns(together, tokens, params, noise)
                ends = {one.name: one.answers for one in configurations}
                plain = ends[NONE].tokens
                if all(end.decoded for end in ends.values()):
                    rows.append(
                        {
                            "category": category,
                            "seconds": {name: sum(end.steps_s) / end.decoded for name, end in ends.items()},
                            "tau": {name: end.stats().mean_acceptance_length for name, end in ends.items()},
                            "identical": all(end.tokens == plain for end in ends.values()),
                            "tokens": sum(map(len, plain)),
                            "loops": any(map(loops, plain)),
                        }
                    )
                for talk, answer in zip(talks, plain, strict=True):
                    talk.append({"role": "assistant", "content": tokenizer.decode(answer)})
    return rows


def speedup(rows: list[dict[str, Any]], name: str, over: str = NONE) -> dict[str, float]:
    """Return time per token of `over` over that of `name`, with an interval over groups if there are enough."""
    from paceline.bench.intervals import Pair
    from paceline.bench.intervals import speedup as paired

    pairs = [
        Pair(row["seconds"][over] * row["tokens"], row["tokens"], row["seconds"][name] * row["tokens"], row["tokens"])
        for row in rows
    ]
    gain = paired(pairs)
    if gain is None:
        return {"ratio": sum(pair.plain_s for pair in pairs) / sum(pair.own_s for pair in pairs)}
    return {"ratio": gain.ratio, "low": gain.low, "high": gain.high}


def report(names: list[str], rows: list[dict[str, Any]], temperature: float, result: dict[str, Any]) -> None:
    print(f"\ntemperature {temperature}: speed-up over plain decoding [95 %], τ; {torch.get_num_threads()} threads")
    for category in ["all", NO_LOOPS, *dict.fromkeys(row["category"] for row in rows)]:
        part = [
            row for row in rows if category in ("all", row["category"]) or (category == NO_LOOPS and not row["loops"])
        ]
        if not part:
            continue
        cell: dict[str, Any] = {"temperature": temperature, "category": category, "answers": len(part)}
        for name in names:
            cell[name] = speedup(part, name) | {"tau": statistics.mean(row["tau"][name] for row in part)}
        fixed = [name for name in names if name != AUTO]
        best = max(fixed, key=lambda name: cell[name]["ratio"], default=None)
        if best is not None:
            cell[AUTO] |= {"of": best, "share": speedup(part, AUTO, over=best)}
        if LOOKUPS in names:
            cell["auto over lookups"] = speedup(part, AUTO, over=LOOKUPS)
        cell |= {"identical": all(row["identical"] for row in part), "looping": sum(row["loops"] for row in part)}
        result["cells"].append(cell)
        print(f"{category:16} {len(part):3} answers, {cell['looping']} looping, identical {cell['identical']}:")
        for name in [*names, *(["auto over lookups"] if LOOKUPS in names else [])]:
            entry = cell[name]
            share = f", {shown(entry['share'], 3)} of {entry['of']}" if "share" in entry else ""
            print(f"    {name:18} {shown(entry)}" + (f" τ {entry['tau']:.2f}" if "tau" in entry else "") + share)


# -- τ of a trained drafter


def drafter(args: argparse.Namespace) -> None:
    """Tokens a pass by the engine's count. `--answers`: {"set T 0.7": [[prompt, plain answer], ...]}."""
    from paceline import build

    target = build.load(args.model, device=args.device, activations=args.activations)
    if args.answers:
        sets = {name: pairs[: args.count] for name, pairs in json.loads(Path(args.answers).read_text()).items()}
    else:
        sets = {
            f"{Path(path).stem} T {temperature}": [
                [chat(target.loaded.tokenizer, prompt["turns"][0]), None] for prompt in prompts_of([path])[: args.count]
            ]
            for path in args.prompts
            for temperature in args.temperature
        }
    results = []
    for shape in args.shapes:
        engine = engine_with(target, args.drafter, *SHAPES[shape], args.rows)
        for name, pairs in sets.items():
            temperature = float(name.rpartition(" T ")[2])
            params = params_of(temperature, args.max_tokens, args.seed, top_p=1.0, top_k=0).resolve({})
            groups = [
                Answers(engine, [prompt for prompt, _ in pairs[first : first + args.rows]], params).finished()
                for first in range(0, len(pairs), args.rows)
            ]
            stats = groups[0].stats()
            for group in groups[1:]:
                stats.merge(group.stats())
            answers = [answer for group in groups for answer in group.tokens]
            plain = [answer and answer[: args.max_tokens] for _, answer in pairs]
            row = {
                "set": name,
                "shape": shape,
                "tau": stats.mean_acceptance_length,
                "by_depth": [round(each / stats.num_drafts, 3) for each in stats.accepted_per_position],
                "plain_answers": sum(one == other for one, other in zip(answers, plain, strict=True)),
            }
            results.append(row)
            print(row, flush=True)
        engine.close()
    finish("drafter", {"device": str(target.loaded.decoder.device), "rows": args.rows, "cells": results})


def engine_with(target: Any, folder: str, beam: int, nodes: int, rows: int) -> Any:
    """Return an engine with the block drafter of a folder."""
    from paceline import build
    from paceline.config import EngineConfig, SpeculationConfig
    from paceline.drafters.block.drafter import DSparkDrafter
    from paceline.drafters.methods import DSPARK
    from paceline.engine.engine import Engine
    from paceline.engine.policy.adaptive import AdaptivePolicy

    context = build.drafter_context(target.loaded, SpeculationConfig(method=AUTO, drafter=folder))
    one = DSparkDrafter.from_context(context, DSPARK, beam)
    config = EngineConfig(max_num_seqs=rows, max_num_batched_tokens=max(1024, 2 * (nodes + 1) * rows))
    policy, loaded = AdaptivePolicy(DSPARK, nodes), target.loaded
    return Engine(loaded.decoder, config, tokenizer=loaded.tokenizer, drafters=[one], policy=policy)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", default="compare", choices=("compare", "drafter"))
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--prompts", nargs="*", default=[])
    parser.add_argument("--mixed", action="store_true", help="batches of all categories")
    parser.add_argument("--per-category", type=int)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, nargs="+", default=[GREEDY, SAMPLED])
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--whole", action="store_true", help="one answer after the other, not step by step")
    parser.add_argument("--rounds", type=int, default=1, choices=range(1, 100), metavar="N")
    parser.add_argument("--fixed", nargs="*", default=["ngram:4", "ngram:8", "suffix:4", "suffix:8"])
    parser.add_argument("--lookups", action="store_true", help="auto without the trained drafter beside it")
    parser.add_argument("--draft-model", nargs="*", default=[], help="models that draft beside the lookups")
    parser.add_argument("--dtype", default="auto", help="of the weights; float32: expanded")
    parser.add_argument("--activations", default="float32", choices=("float32", "int8"))
    parser.add_argument("--drafter", help="of drafter: folder of a trained block drafter")
    parser.add_argument("--answers", help="of drafter: prompts and plain answers that train_smollm2.py keeps")
    parser.add_argument("--count", type=int, default=40, help="prompts of each set")
    parser.add_argument("--rows", type=int, default=1, help="of drafter: requests at once")
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    {"compare": compare, "drafter": drafter}[args.what](args)


if __name__ == "__main__":
    main()
