"""A trained block drafter (dspark, dflash) in the engine: tokens a pass by number of nodes, and what a draft takes.

Prompts are answered one after the other, and with `--rows` so many at once. A draft's time is taken on the device, from
the first launch of `propose` to the end of the last, and on the host; on a CPU both are the same. `--one-core` takes
processor time of one thread, whatever else the machine runs. What the native call has of a draft stands beside it.

    python benchmarks/block_drafter.py --model smollm2 --drafter DIR --prompts mt_bench.jsonl gsm8k.jsonl
    python benchmarks/block_drafter.py --drafter DIR --prompts mt_bench.jsonl --rows 1 16 64 --temperature 0.7
    python benchmarks/block_drafter.py --drafter DIR --prompts mt_bench.jsonl --count 6 --activations int8 --one-core
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import finish
from speculation import index_prompts

from paceline import SamplingParams, build
from paceline.config import AUTO, EngineConfig, SpeculationConfig
from paceline.drafters.block.drafter import DSparkDrafter
from paceline.drafters.method_names import drafter_specs
from paceline.engine.engine import Engine
from paceline.engine.policy.adaptive import AdaptivePolicy

SHAPES = {"chain 7": (1, 7), "tree 15": (8, 15), "tree 60": (8, 60)}  # beam and nodes


class Watch:
    """Times of a drafter's proposals."""

    def __init__(self, drafter: DSparkDrafter, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._propose, self._device = drafter.propose, drafter.device
        self.host_s: list[float] = []
        self.native_s: list[float] = []
        self.looked_at: list[int] = []
        self._native = drafter._native  # None: not a CPU's kernels
        if self._native is not None:
            kernels = self._native._kernels
            self._call, kernels.draft_blocks = kernels.draft_blocks, self._called
        self._events: list[Any] = []
        drafter.propose = self._watched  # type: ignore[method-assign]

    def _called(self, *args: Any) -> Any:
        started = self._clock()
        status = self._call(*args)
        self.native_s.append(self._clock() - started)
        return status

    def _watched(self, *args: Any) -> Any:
        cuda = self._device.type == "cuda"
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2)) if cuda else (None, None)
        if begin is not None:
            begin.record()
        started = self._clock()
        draft = self._propose(*args)
        self.host_s.append(self._clock() - started)
        if self._native is not None:
            self.looked_at.append(len(self._native.logits))
        if end is not None:
            end.record()
            self._events.append((begin, end))
        return draft

    def milliseconds(self) -> dict[str, float]:
        if self._events:
            torch.cuda.synchronize()
        device = [begin.elapsed_time(end) for begin, end in self._events] or [1e3 * one for one in self.host_s]
        found = {"device_ms": statistics.median(device), "host_ms": 1e3 * statistics.median(self.host_s)}
        if self.native_s:
            found |= {"native_ms": 1e3 * statistics.median(self.native_s), "positions": statistics.mean(self.looked_at)}
        return found


def measure(
    target: build.Target, folder: str, beam: int, nodes: int, prompts: list[list[int]], rows: int, args: Any
) -> dict[str, Any]:
    speculation = SpeculationConfig(method=AUTO, drafter=folder)
    context = build.drafter_context(target.loaded, speculation)
    (method,) = (each for each in drafter_specs(speculation, [context.checkpoint]) if each.method.recognise)
    drafter = DSparkDrafter.from_context(context, method.name, beam)
    config = EngineConfig(max_num_seqs=max(rows, 1), max_num_batched_tokens=max(512, 130 * rows))
    policy = AdaptivePolicy(method.name, nodes)
    engine = Engine(target.loaded.decoder, config, tokenizer=target.loaded.tokenizer, drafters=[drafter], policy=policy)
    clock = time.thread_time if args.one_core else time.perf_counter
    watch, sampling = Watch(drafter, clock), {"temperature": args.temperature, "max_tokens": args.max_tokens}
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


def native(found: dict[str, Any]) -> str:
    if "native_ms" not in found:
        return ""
    return f", native call {found['native_ms']:.2f} for logits of {found['positions']:.1f} positions"


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
    parser.add_argument("--activations", default="float32", choices=("float32", "int8"), help="of the target")
    parser.add_argument("--one-core", action="store_true", help="one thread, and its processor time")
    args = parser.parse_args()
    threads = 1 if args.one_core else None
    target = build.load(args.model, device=args.device, activations=args.activations, threads=threads)
    results: list[dict[str, Any]] = []
    tokenizer = target.loaded.tokenizer
    for path in args.prompts:
        turns = [prompt["turns"][0] for prompt in index_prompts([path], None)[: args.count]]
        asked = [tokenizer.apply_chat_template([{"role": "user", "content": turn}]) for turn in turns]
        for rows in args.rows:
            for shape in args.shapes:
                found = measure(target, args.drafter, *SHAPES[shape], asked, rows, args)
                results.append({"prompts": Path(path).stem, "rows": rows, "shape": shape, **found})
                print(
                    f"{Path(path).stem:10} rows {rows:3} {shape}: tau {found['tau']:.3f}, draft "
                    f"{found['device_ms']:.2f} ms (host {found['host_ms']:.2f}{native(found)}), "
                    f"{found['tokens_s']:.0f} tokens/s",
                    flush=True,
                )
    finish(
        "block_drafter", {"temperature": args.temperature, "device": str(target.loaded.decoder.device), "rows": results}
    )


if __name__ == "__main__":
    main()
