"""τ of a trained drafter as the engine counts it, over the prompts that train_smollm2.py keeps to be measured on.

    python benchmarks/drafter_tau.py --target smollm2 --drafter W/eagle3 --answers W/answers.json --nodes 60 [--chain]

The engine answers the prompts itself; greedy answers are compared with the plain ones of the file. `--chain`: chains
instead of trees, by EAGLE and block drafters.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from common import finish

from paceline import SamplingParams, build
from paceline.config import EngineConfig, SpeculationConfig
from paceline.drafters.block.drafter import DSparkDrafter
from paceline.drafters.eagle.drafter import EagleDrafter
from paceline.engine.engine import Engine
from paceline.outputs import SpeculationStats
from paceline.training.export import method_of


def make_engine(args: argparse.Namespace, method: str) -> Engine:
    loaded = build.load(args.target, device=args.device).loaded
    speculation = SpeculationConfig(method=method, k=args.nodes, drafter=str(args.drafter))
    drafters = build.make_drafters(loaded, speculation)
    for drafter in drafters:
        # Before the engine binds it: it captures drafts of this width.
        if args.chain and isinstance(drafter, EagleDrafter):
            drafter.top_k = 1
        elif args.chain and isinstance(drafter, DSparkDrafter):
            drafter._beam, drafter._most = 1, drafter.depth
    config = EngineConfig(
        max_num_seqs=args.rows,
        max_num_batched_tokens=max(1024, 2 * (args.nodes + 1) * args.rows),  # drafts may have half of them
        num_blocks=48 * args.rows,
        max_model_len=768,
    )
    return build.make_engine(loaded, config, drafters, build.make_policy(loaded, speculation))


def measured(
    engine: Engine, prompts: list[list[int]], way: dict[str, Any], temperature: float, tokens: int
) -> tuple[SpeculationStats, list[list[int]]]:
    """What drafting did, and the answers."""
    seed = 7 if temperature else None
    given = SamplingParams(temperature=temperature, top_p=1.0, top_k=0, seed=seed, max_tokens=tokens, speculation=way)
    params, sequences, total = given.resolve({}), [], SpeculationStats()
    for at, prompt in enumerate(prompts):
        sequences += engine.add_request(f"{time.perf_counter()}/{at}", prompt, params)
    while engine.has_work:
        engine.step()
    for one in sequences:
        total.merge(one.stats)
    return total, [one.output_tokens for one in sequences]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--drafter", type=Path, required=True)
    parser.add_argument("--answers", type=Path, required=True)
    parser.add_argument("--nodes", type=int, default=60)
    parser.add_argument("--chain", action="store_true")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--limit", type=int, help="prompts of each set")
    parser.add_argument("--max-tokens", type=int, default=256)
    args = parser.parse_args()
    method = method_of(args.drafter)
    began = time.perf_counter()
    engine = make_engine(args, method)
    print(f"engine started in {time.perf_counter() - began:.0f} s", flush=True)
    found = {}
    for name, answers in json.loads(args.answers.read_text()).items():
        temperature = float(name.rpartition(" T ")[2])
        prompts = [prompt for prompt, _ in answers[: args.limit]]
        way = {"method": method, "k": args.nodes}
        stats, given = measured(engine, prompts, way, temperature, args.max_tokens)
        found[name] = stats.mean_acceptance_length
        shares = [round(each / stats.num_drafts, 3) for each in stats.accepted_per_position]
        each = 1 + stats.num_accepted_tokens / stats.num_drafts
        print(f"{name}: τ {found[name]:.2f}, {each:.2f} a drafted pass, accepted to each depth {shares}", flush=True)
        if not temperature:
            plain = [answer[: args.max_tokens] for _, answer in answers[: args.limit]]
            same = sum(one == other for one, other in zip(given, plain, strict=True))
            print(f"{name}: {same} of {len(plain)} answers are the plain ones", flush=True)
    finish("drafter_tau", {"method": method, "nodes": args.nodes, "chain": args.chain, "tau": found})


if __name__ == "__main__":
    main()
