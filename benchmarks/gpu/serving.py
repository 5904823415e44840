"""The engine's process and its queue, without HTTP, against an equal engine stepped in this process.

    python -m benchmarks.gpu.serving [--levels 1 8 32 128] [--long-clients 32] [--tokens 256]

The yardstick from random weights is served, so neither FastAPI nor a model is needed. With `--long-clients` every tenth
prompt is long, and the p99 between tokens stands beside a plain step.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import itertools
import json
import os
import random
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.clients import Answer, Job, Run, Send, alone, compare, latencies, make_jobs, random_prompt, served, show
from benchmarks.gpu.subject import Subject
from benchmarks.harness import finish, ratio, shown
from paceline import SamplingParams, build
from paceline.config import NONE, EngineConfig, SpeculationConfig
from paceline.engine.engine import Engine
from paceline.engine.events import Delta, Ended, Failed
from paceline.models.load.open_model import LoadedModel
from paceline.server.process import engine_process
from paceline.server.process.client import EngineClient, new_request_id
from paceline.server.process.messages import EngineSettings

SUBJECT = "PACELINE_BENCH_SUBJECT"  # names the model that the engine's process makes


def target_of(device: str, tiny: bool) -> Any:
    """Return the yardstick from random weights, on which times do not depend; without a tokenizer."""
    decoder = Subject("random", torch.device(device), tiny=tiny).yardstick
    tokenizer: Any = SimpleNamespace(encode=lambda *_, **__: [], token_text=str)
    return build.LoadedTarget(Path("yardstick"), LoadedModel(decoder.config, decoder, tokenizer, {}), None)


def be_worker() -> None:
    """Run the engine's process, with the yardstick in place of a model's folder."""
    from paceline.server.process import worker

    device, tiny = json.loads(os.environ[SUBJECT])
    worker.load = lambda model, **_: target_of(device, tiny)
    worker.build = functools.partial(build.build, remember=False)
    worker.main()


def over_queue(client: Any) -> Send:
    async def send(job: Job) -> Answer:
        answer = Answer(time.perf_counter(), 200)
        stream = client.submit(list(job.prompt), job.params(NONE), streamed=True, request_id=new_request_id("bench"))
        while not answer.ended:
            match await stream.get():
                case Delta(tokens=tokens, finish_reason=reason):
                    answer.tokens += tokens
                    answer.arrivals.append((time.perf_counter(), len(tokens)))
                    answer.finish_reason = reason or answer.finish_reason
                case Ended():
                    answer.ended = time.perf_counter()
                case Failed(error=error):
                    answer.error, answer.ended = str(error), time.perf_counter()
        return answer

    return send


async def queue_level(args: argparse.Namespace, engine: Engine, send: Send, clients: int, long: int) -> dict[str, Any]:
    noise = random.Random(1)
    prompts = [random_prompt(noise.randrange(32, 256), noise) for _ in range(256)]

    async def pair(turn: int, count: int) -> tuple[Run, Run]:
        jobs = make_jobs(prompts, count, args.max_tokens, clients * 100 + turn, long=long)
        return await served(jobs, clients, send), alone(engine, jobs, NONE, clients)

    await pair(99, clients + 4)  # warm-up
    pairs = [await pair(turn, (6 if long else 3) * clients + 6) for turn in range(args.rounds)]
    queue, engine_runs = zip(*pairs, strict=True)
    counts = sum((compare(*each) for each in pairs), Counter[str]())
    rates = [[run.rate for run in each] for each in (queue, engine_runs)]
    row = {
        "queue": {"tokens_per_s": statistics.fmean(rates[0]), **dict(counts), **latencies(queue)},
        "engine": {"tokens_per_s": statistics.fmean(rates[1]), **latencies(engine_runs)},
        "queue / engine": ratio(*rates),
    }
    print(f"\n{clients} clients, {shown(row['queue / engine'], 3)} of the engine alone")
    for name in ("queue", "engine"):
        show(name, row[name])
    if long:
        row["plain_step_s"] = plain_step_s(engine, clients)
        print(f"plain step {1e3 * row['plain_step_s']:.2f} ms")
    return row


def plain_step_s(engine: Engine, clients: int) -> float:
    """Return seconds of a step in which `clients` sequences decode."""
    noise, times = random.Random(8), []
    endless = SamplingParams(max_tokens=None, ignore_eos=True, temperature=0, speculation=NONE).resolve({})
    for at in range(clients):
        (last,) = engine.add_request(f"plain-{at}", list(random_prompt(8, noise)), endless)
    while len(last.tokens) < 64:
        engine.step()
        times.append(time.perf_counter())
    for at in range(clients):
        engine.cancel(f"plain-{at}")
    return statistics.median(late - early for early, late in itertools.pairwise(times))


async def measure_queue(args: argparse.Namespace) -> None:
    os.environ[SUBJECT] = json.dumps([args.device, args.tiny])
    engine_process.WORKER = [sys.executable, "-m", "benchmarks.gpu.serving"]
    config = EngineConfig(
        max_num_seqs=max(64, args.long_clients, *args.levels),
        max_num_batched_tokens=args.tokens,
        max_model_len=args.long + args.max_tokens,
        kv_cache_bytes=(256 << 20) if args.tiny else 24 << 30,
    )
    speculation = SpeculationConfig(method=NONE)
    client = EngineClient(EngineSettings("yardstick", {}, config, speculation))
    starting = asyncio.ensure_future(client.start())
    await asyncio.sleep(0.1)
    target = await asyncio.to_thread(target_of, args.device, args.tiny)
    engine = build.build(target, config, speculation, remember=False).engine
    await starting
    try:
        send = over_queue(client)
        result: dict[str, Any] = {str(n): await queue_level(args, engine, send, n, 0) for n in args.levels}
        if args.long_clients:
            result["long prompts"] = await queue_level(args, engine, send, args.long_clients, args.long)
    finally:
        await client.close()
    finish("serve_queue", {"levels": result, "device": args.device, "tokens_of_a_pass": args.tokens})


def main() -> None:
    if SUBJECT in os.environ:
        be_worker()
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--levels", type=int, nargs="*", default=[1, 8, 32, 128], help="clients")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=48, help="of an answer, on average")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a small shape, to try the script")
    parser.add_argument("--tokens", type=int, default=2048, help="of a pass")
    parser.add_argument("--long", type=int, default=4096, help="tokens of a long prompt")
    parser.add_argument("--long-clients", type=int, default=0, help="clients while long prompts arrive")
    asyncio.run(measure_queue(parser.parse_args()))


if __name__ == "__main__":
    main()
