"""A trained block drafter (dspark, dflash) in the engine: tokens a pass by number of nodes, and what a draft takes.

Prompts are answered one after the other, and with `--rows` so many at once. A draft's time is taken on the device, from
the first launch of `propose` to the end of the last, and on the host; on a CPU both are the same.

    python benchmarks/block_drafter.py --model smollm2 --drafter DIR --prompts mt_bench.jsonl gsm8k.jsonl
    python benchmarks/block_drafter.py --drafter DIR --prompts mt_bench.jsonl --rows 1 16 64 --temperature 0.7
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from common import finish
from speculation import read_prompts

from paceline import SamplingParams, build
from paceline.config import AUTO, EngineConfig, SpeculationConfig
from paceline.drafters.dspark import DSparkDrafter
from paceline.drafters.methods import available
from paceline.engine.adaptive import AdaptivePolicy
from paceline.engine.engine import Engine

SHAPES = {"chain 7": (1, 7), "tree 15": (8, 15), "tree 60": (8, 60)}  # beam and nodes


class Watch:
    """Times of a drafter's proposals."""

    def __init__(self, drafter: DSparkDrafter) -> None:
        self._propose, self._device = drafter.propose, drafter.device
        self.host_s: list[float] = []
        self._events: list[Any] = []
        drafter.propose = self._watched  # type: ignore[method-assign]

    def _watched(self, *args: Any) -> Any:
        cuda = self._device.type == "cuda"
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2)) if cuda else (None, None)
        if begin is not None:
            begin.record()
        started = time.perf_counter()
        draft = self._propose(*args)
        self.host_s.append(time.perf_counter() - started)
        if end is not None:
            end.record()
            self._events.append((begin, end))
        return draft

    def milliseconds(self) -> dict[str, float]:
        if self._events:
            torch.cuda.synchronize()
        device = [begin.elapsed_time(end) for begin, end in self._events] or [1e3 * one for one in self.host_s]
        return {"device_ms": statistics.median(device), "host_ms": 1e3 * statistics.median(self.host_s)}


def measure(
    target: build.Target, folder: str, beam: int, nodes: int, prompts: list[list[int]], rows: int, args: Any
) -> dict[str, Any]:
    speculation = SpeculationConfig(method=AUTO, drafter=folder)
    context = build.drafter_context(target.loaded, speculation)
    (method,) = (each for each in available(speculation, [context.checkpoint]) if each.method.recognise)
    drafter = DSparkDrafter.from_context(context, method.name, beam)
    config = EngineConfig(max_num_seqs=max(rows, 1), max_num_batched_tokens=max(512, 130 * rows))
    policy = AdaptivePolicy([drafter], method.name, nodes)
    engine = Engine(target.loaded.decoder, config, tokenizer=target.loaded.tokenizer, drafters=[drafter], policy=policy)
    watch, sampling = Watch(drafter), {"temperature": args.temperature, "max_tokens": args.max_tokens}
    if args.temperature:
        sampling["seed"] = 7
    sequences, started = [], time.perf_counter()
    for first in range(0, len(prompts), rows):
        for at, prompt in enumerate(prompts[first : first + rows], start=first):
            sequences += engine.add_request(str(at), prompt, SamplingParams(**sampling).resolve({}))
        while engine.has_work:
            engine.step()
    took = time.perf_counter() - started
    tokens, passes = (
        sum(getattr(one.stats, name) for one in sequences) for name in ("num_committed_tokens", "num_target_passes")
    )
    figures = {"tau": tokens / passes, "tokens": tokens, "tokens_s": tokens / took, **watch.milliseconds()}
    return {**figures, "failures": engine.drafters.failures}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--drafter", required=True)
    parser.add_argument("--prompts", nargs="+", required=True)
    parser.add_argument("--count", type=int, default=40, help="prompts of each file, first turns")
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--rows", type=int, nargs="+", default=[1], help="requests at once")
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()
    target, results = build.load(args.model, device=args.device), []
    tokenizer = target.loaded.tokenizer
    for path in args.prompts:
        turns = [prompt["turns"][0] for prompt in read_prompts([path], None)[: args.count]]
        asked = [tokenizer.apply_chat_template([{"role": "user", "content": turn}]) for turn in turns]
        for rows in args.rows:
            for shape in args.shapes:
                found = measure(target, args.drafter, *SHAPES[shape], asked, rows, args)
                results.append({"prompts": Path(path).stem, "rows": rows, "shape": shape, **found})
                print(
                    f"{Path(path).stem:10} rows {rows:3} {shape}: tau {found['tau']:.3f}, draft "
                    f"{found['device_ms']:.2f} ms (host {found['host_ms']:.2f}), {found['tokens_s']:.0f} tokens/s",
                    flush=True,
                )
    finish(
        "block_drafter", {"temperature": args.temperature, "device": str(target.loaded.decoder.device), "rows": results}
    )


if __name__ == "__main__":
    main()
