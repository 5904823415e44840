"""A block drafter's trees in the engine on a CPU, without seeds: drawn (law 2) against the likeliest nodes (law 1).

Both ways answer each prompt in turn, in an order that alternates. Seconds are the processor's, of all threads, so that
other programs on the machine disturb less. The answers differ, being drawn; τ and time are compared over all prompts.

    python benchmarks/drawn_trees.py --prompts mt_bench.jsonl --nodes 7 15
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from common import finish

from paceline import SamplingParams, build
from paceline.config import AUTO, EngineConfig, SpeculationConfig
from paceline.drafters import drawn_tree
from paceline.drafters.dspark import DSparkDrafter
from paceline.drafters.methods import available
from paceline.engine.adaptive import AdaptivePolicy
from paceline.engine.engine import Engine

DRAWING = drawn_tree.drawing


class Way:
    """An engine with one drafter."""

    def __init__(self, target: build.Target, draws: bool, nodes: int | None) -> None:
        speculation = SpeculationConfig(method=AUTO)
        context = build.drafter_context(target.loaded, speculation)
        assert context.checkpoint is not None
        (method,) = (each for each in available(speculation, [context.checkpoint]) if each.method.recognise)
        drafter, self.draws = DSparkDrafter.from_context(context, method.name), draws
        policy = AdaptivePolicy([drafter], method.name, nodes)
        loaded = target.loaded
        config = EngineConfig(max_num_seqs=1)
        self.engine = Engine(loaded.decoder, config, tokenizer=loaded.tokenizer, drafters=[drafter], policy=policy)
        self.tokens = self.passes = 0
        self.cpu_s = 0.0

    def answer(self, prompt: list[int], params: SamplingParams) -> None:
        drawn_tree.drawing = DRAWING if self.draws else lambda *_: []
        sequences = self.engine.add_request(str(self.tokens), prompt, params.resolve({}))
        started = time.process_time()
        while self.engine.has_work:
            self.engine.step()
        self.cpu_s += time.process_time() - started
        self.tokens += sequences[0].stats.num_committed_tokens
        self.passes += sequences[0].stats.num_target_passes

    @property
    def figures(self) -> dict[str, Any]:
        return {
            "tau": self.tokens / self.passes,
            "cpu_ms_a_token": 1e3 * self.cpu_s / self.tokens,
            "cpu_ms_a_pass": 1e3 * self.cpu_s / self.passes,
            "tokens": self.tokens,
            "failures": self.engine.drafters.failures,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--nodes", type=int, nargs="*", default=[7, 15], help="none: the policy decides")
    args = parser.parse_args()
    target = build.load(args.model, device="cpu")
    lines = [json.loads(line) for line in Path(args.prompts).read_text().splitlines() if line.strip()]
    texts = [line["turns"][0] if "turns" in line else line["prompt"] for line in lines]
    texts = texts[:: max(1, len(texts) // args.count)][: args.count]
    params = SamplingParams(temperature=args.temperature, top_p=args.top_p, top_k=0, max_tokens=args.max_tokens)
    results: dict[str, dict[str, Any]] = {}
    for nodes in args.nodes or [None]:
        ways = {"drawn": Way(target, True, nodes), "likeliest": Way(target, False, nodes)}
        for at, text in enumerate(texts):
            prompt = target.loaded.tokenizer.apply_chat_template([{"role": "user", "content": text}])
            for name in ways if at % 2 else reversed(ways):
                ways[name].answer(prompt, params)
        for name, way in ways.items():
            results[f"{name}, {nodes or AUTO} nodes"] = way.figures
            print(f"{name}, {nodes or AUTO} nodes: {way.figures}", flush=True)
    finish("drawn_trees", {"temperature": args.temperature, "top_p": args.top_p, "ways": results})


if __name__ == "__main__":
    main()
