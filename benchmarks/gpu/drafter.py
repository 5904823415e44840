"""The packaged drafter and lookups on the yardstick: tokens/s of plain, drafted and automatic decoding.

One engine serves all of them, by the request's own speculation, so weights, graphs and prompts are the same. A batch is
kept full while it is timed. No past answer is drafted from, and each request has tables of successors of its own: the
ways answer the same prompts.

    python -m benchmarks.gpu.drafter --weights smollm2 --prompts mt_bench.jsonl --batches 1 16 64 128
"""

from __future__ import annotations

import argparse
import itertools
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.subject import Subject
from benchmarks.gpu.yardstick import Size, large_drafter
from benchmarks.harness import finish, prompts_of
from paceline import SamplingParams, build
from paceline.config import AUTO, NONE, EngineConfig, SpeculationConfig
from paceline.drafters.block.checkpoint import read
from paceline.drafters.block.drafter import DSparkDrafter, draft_ids, head_rows
from paceline.drafters.methods import RECYCLING, SHIPPED, SUFFIX
from paceline.engine.engine import Engine
from paceline.models.weights import Dtypes
from paceline.outputs import SpeculationStats

WAYS: dict[str, Any] = {
    "plain": NONE,
    "tree 7": {"method": "dspark", "k": 7},
    "tree 15": {"method": "dspark", "k": 15},
    "tree 60": {"method": "dspark", "k": 60},
    "auto": AUTO,
    **{f"{method} {nodes}": {"method": method, "k": nodes} for method in (SUFFIX, RECYCLING) for nodes in (8, 30, 60)},
}
DEFAULT_WAYS = ["plain", "tree 7", "tree 15", "tree 60", "auto"]


def make_engine(subject: Subject, folder: Path, rows: int, size: Size, *, with_drafter: bool) -> Engine:
    decoder = subject.yardstick
    config, tensors = large_drafter(*read(folder), size, device=subject.device, dtype=subject.dtype)
    ids = draft_ids(config, tensors).to(subject.device)
    drafter = DSparkDrafter(
        config,
        tensors,
        embedding=decoder.embedding,
        head=head_rows(decoder.head, decoder.kernels, ids, size.hidden, subject.dtype),
        kernels=decoder.kernels,
        device=subject.device,
        dtypes=Dtypes.of(subject.dtype, subject.device),
    )
    loaded = subject.loaded(decoder)
    speculation = SpeculationConfig(method=AUTO, suffix_answers=False)
    others = build.make_drafters(loaded, replace(speculation, drafter=NONE))
    drafters = [*others, drafter] if with_drafter else others
    policy = build.make_policy(loaded, speculation)
    engine_config = EngineConfig(
        max_num_seqs=rows, max_num_batched_tokens=max(1024, 8 * rows), num_blocks=80 * rows + 256, max_model_len=1024
    )
    return build.make_engine(loaded, engine_config, drafters, policy)


def answer(
    engine: Engine, prompts: list[list[int]], way: Any, temperature: float, tokens: int, batch: int = 1
) -> tuple[int, float, list]:
    """Tokens and seconds while `batch` answers are made at once, a new one as soon as one ends, and all sequences. Time
    begins when the first `batch` prompts are read and ends with the last prompt's beginning, so the batch is full."""
    params = SamplingParams(
        temperature=temperature, seed=7 if temperature else None, max_tokens=tokens, speculation=way
    ).resolve({})
    waiting, sequences = list(enumerate(prompts)), []

    def refill() -> None:
        while waiting and sum(not one.finished for one in sequences[-4 * batch :]) < batch:
            at, prompt = waiting.pop(0)
            sequences.extend(engine.add_request(f"{time.perf_counter()}/{at}", prompt, params))

    refill()
    while not all(one.num_output for one in sequences):
        engine.step()
    torch.cuda.synchronize() if torch.cuda.is_available() else None
    before, started = sum(one.num_output for one in sequences), time.perf_counter()
    while engine.has_work and (waiting or len(prompts) <= batch):
        engine.step()
        refill()
    took, made = time.perf_counter() - started, sum(one.num_output for one in sequences) - before
    while engine.has_work:
        engine.step()
    return made, took, sequences


def draft_ms(engine: Engine, sequences: int) -> float:
    """Return milliseconds of a captured draft alone: the block's pass and its largest tree."""
    drafter = next(one for one in engine.drafters.drafters if isinstance(one, DSparkDrafter))
    assert drafter._passes is not None
    _, graph = drafter._passes._captured[sequences]
    begun, over = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for turn in range(45):
        if turn == 5:
            begun.record()
        graph.replay()
    over.record()
    over.synchronize()
    return begun.elapsed_time(over) / 40


def measured(
    engine: Engine, groups: list[list[list[int]]], way: Any, temperature: float, tokens: int, batch: int
) -> tuple[dict[str, Any], list[list[list[int]]]]:
    """Return the figures of a way to draft, and the answers of each group."""
    late, made, spent, stats = engine.runner.late_captures, 0, 0.0, SpeculationStats()
    texts = []
    for group in groups:
        count, took, sequences = answer(engine, group, way, temperature, tokens, batch)
        made, spent = made + count, spent + took
        texts.append([one.output_tokens for one in sequences])
        for one in sequences:
            stats.merge(one.stats)
    methods = stats.drafts_by_method
    return {
        "tokens_s": made / spent,
        "tau": stats.mean_acceptance_length,
        "drafts": methods,
        "nodes": stats.num_draft_tokens / max(sum(methods.values()), 1),
        "captured_late": engine.runner.late_captures - late,
    }, texts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", default="smollm2")
    parser.add_argument("--prompts", nargs="+", required=True)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64, 128])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7])
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--groups", type=int, default=20, help="prompts answered one at a time")
    parser.add_argument(
        "--ways", nargs="+", default=DEFAULT_WAYS, choices=list(WAYS), help="plain is always among them"
    )
    parser.add_argument("--lookups", action="store_true", help="without the packaged drafter")
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--tiny", action="store_true", help="a small size, to try the script on a CPU")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    subject, deadline = Subject(args.weights, device), time.perf_counter() + 60 * args.minutes
    size = Size()
    if args.tiny:
        size = Size(hidden=640, layers=30, heads=12, kv_heads=4, head_dim=128, intermediate=1664)
        subject.sizes = size
    engine = make_engine(subject, SHIPPED / "smollm2", max(args.batches), size, with_drafter=not args.lookups)
    timed = device.type == "cuda" and not args.lookups
    drafts = {count: draft_ms(engine, count) for count in (1, 16, 64)} if timed else {}
    print("a draft, ms by sequences:", {count: round(ms, 3) for count, ms in drafts.items()}, flush=True)
    turns = [prompt["turns"][0] for prompt in prompts_of(args.prompts)]
    asked = [subject.tokenizer.apply_chat_template([{"role": "user", "content": turn}]) for turn in turns]
    results = []
    for temperature, batch in itertools.product(args.temperatures, args.batches):
        # One answer at a time: prompts from all over the files. Else three answers for each place in the batch.
        spread = asked[:: max(1, len(asked) // args.groups)][: args.groups]
        groups = [[one] for one in spread] if batch == 1 else [[asked[at % len(asked)] for at in range(3 * batch)]]
        ways = {name: way for name, way in WAYS.items() if name in ("plain", *args.ways)}
        for way in ways.values():  # compiles and captures what is not yet
            answer(engine, groups[0][: 2 * batch], way, temperature, 16, batch)
        for name, way in ways.items():
            if batch > 16 and name in ("tree 15", "tree 60"):
                continue
            if time.perf_counter() > deadline:
                break
            row, texts = measured(engine, groups, way, temperature, args.max_tokens, batch)
            if name == "plain":
                base, plain = row["tokens_s"], texts
            row |= {"speedup": row["tokens_s"] / base, "same_tokens": texts == plain}
            results.append({"temperature": temperature, "batch": batch, "way": name, **row})
            print(results[-1], flush=True)
    found = {"device": subject.device_name, "draft_ms": drafts, "rows": results}
    finish("gpu_drafter", found | {"failures": engine.drafters.failures})


if __name__ == "__main__":
    main()
