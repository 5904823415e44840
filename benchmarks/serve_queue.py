"""The engine's process and its queue, without HTTP, against the engine alone: for machines that have no FastAPI.

    python benchmarks/serve_queue.py --device cuda               # the yardstick (random weights), 1 to 128 clients
    python benchmarks/serve_queue.py --device cuda --budget 256 --levels --long-clients 32
    python benchmarks/serve_queue.py --device cpu --tiny         # a small shape, to try the script itself

Tokens per second through `EngineClient` over those of the same engine stepped in this process, plainly, on the same
seeded jobs, whose tokens must be equal. Then times between the deliveries of one answer while long prompts arrive,
beside the time of a full pass at the end of such a prompt and of a plain step, and what the longest passes of the
engine alone were. The engine's process makes the yardstick itself. Of what serving needs only msgspec is used.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
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
from gpu_subject import Subject
from harness import finish, ratio
from serve_client import Answer
from serve_load import (
    Job,
    Prompt,
    Run,
    Send,
    alone,
    compare,
    full_pass_s,
    latencies,
    make_jobs,
    plain_step_s,
    random_prompt,
    show_head,
    show_line,
    show_ratio,
)
from serve_load import served as served_by

from paceline import build as building
from paceline.config import NONE, EngineConfig, SpeculationConfig
from paceline.engine.events import Delta, Ended, Failed
from paceline.models.load.open_model import LoadedModel
from paceline.server.process import engine_process, worker
from paceline.server.process.client import EngineClient, new_request_id
from paceline.server.process.messages import EngineSettings

SPECULATION = SpeculationConfig(method=NONE)
ENVIRONMENT = "PACELINE_BENCH_SUBJECT"  # tells the engine's process which model to make


def target_of(device: str, tiny: bool) -> building.LoadedTarget:
    """The yardstick from random weights, on which times do not depend; token ids only, so without a tokenizer."""
    decoder = Subject("random", torch.device(device), tiny=tiny).yardstick
    tokenizer: Any = SimpleNamespace(encode=lambda *_, **__: [], token_text=str)
    return building.LoadedTarget(Path("yardstick"), LoadedModel(decoder.config, decoder, tokenizer, {}), None)


def as_worker() -> None:
    """In the engine's process: its own code, with the yardstick in place of a model's folder."""
    device, tiny = json.loads(os.environ[ENVIRONMENT])
    worker.load = lambda model, **_: target_of(device, tiny)
    worker.build = functools.partial(building.build, remember=False)
    worker.main()


def over_queue(client: EngineClient) -> Send:
    async def send(job: Job) -> Answer:
        answer = Answer(time.perf_counter(), 200)
        stream = client.submit(list(job.prompt), job.params(NONE), streamed=True, request_id=new_request_id("bench"))
        while True:
            match await stream.get():
                case Delta(tokens=tokens, finish_reason=reason):
                    answer.tokens += tokens
                    answer.arrivals.append((time.perf_counter(), len(tokens)))
                    answer.finish_reason = reason or answer.finish_reason
                case Ended():
                    break
                case Failed(error=error):
                    answer.error = str(error)
                    break
        answer.ended = time.perf_counter()
        return answer

    return send


class PassLog:
    """What the passes of an engine were, by the time between two that were read."""

    def __init__(self, engine: Any) -> None:
        self.passes: list[dict[str, Any]] = []
        self._engine, self._observe, self._last = engine, engine._observe, 0.0
        engine._observe = self._note

    def _note(self, flight: Any, *rest: Any) -> Any:
        now, batch = time.perf_counter(), flight.batch
        about = {"ms": 1e3 * (now - self._last), "rows": flight.layout.tokens.shape[0], "sequences": len(batch)}
        about |= {"chunk": int(batch.count.max()), "context": int((batch.first + batch.count).max())}
        if (batch.count == 1).any():  # else no sequence is between two tokens
            self.passes.append({**about, "ahead": flight.ahead, "warm": flight.time_is_typical})
        self._last = now
        return self._observe(flight, *rest)

    def show(self, clients: int) -> dict[str, Any]:
        """The longest, and medians by size of full passes and of plain ones with all sequences."""
        known = self.passes
        for each in sorted(known, key=lambda one: -one["ms"])[:12]:
            print("  " + ", ".join(f"{name} {_shown(value)}" for name, value in each.items()), flush=True)
        most = max(each["rows"] for each in known)
        full = [each for each in known if each["rows"] == most]
        late = max(each["context"] for each in full)
        parts = {
            "full": full,
            "full, first half of the prompt": [each for each in full if each["context"] <= late / 2],
            "full, second half": [each for each in full if each["context"] > late / 2],
            "plain": [each for each in known if each["chunk"] == 1 and each["sequences"] > clients * 3 / 4],
            "not launched ahead": [each for each in known if not each["ahead"]],
            "not captured": [each for each in known if not each["warm"]],
        }
        found = {}
        for name, some in parts.items():
            times = sorted(each["ms"] for each in some)
            found[name] = {"passes": len(some), "median_ms": statistics.median(times) if some else None}
            if some:
                print(f"  {name}: {len(some)} passes, median {statistics.median(times):.2f} ms, most {times[-1]:.2f}")
        return found


def _shown(value: Any) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)


class Bench:
    def __init__(self, args: argparse.Namespace, engine: Any, send: Send) -> None:
        self.args, self.engine, self.send = args, engine, send
        self.until = time.perf_counter() + args.seconds
        noise = random.Random(1)
        self.prompts: list[Prompt] = [random_prompt(noise.randrange(32, 256), noise) for _ in range(256)]

    async def pair(self, clients: int, turn: int, long: int = 0, count: int | None = None) -> tuple[Run, Run]:
        """Through the queue, and alone."""
        jobs = make_jobs(self.prompts, count or 3 * clients + 6, self.args.max_tokens, clients * 100 + turn, long=long)
        return await served_by(jobs, clients, self.send), alone(self.engine, jobs, NONE, clients)

    async def level(self, clients: int, **given: Any) -> dict[str, Any]:
        await self.pair(clients, 99, **{**given, "count": clients + 4})  # warm-up
        pairs = [await self.pair(clients, 0, **given)]
        while len(pairs) < self.args.rounds and time.perf_counter() < self.until:
            pairs.append(await self.pair(clients, len(pairs), **given))
        queue, engine = zip(*pairs, strict=True)
        counts = sum((compare(*pair) for pair in pairs), Counter())
        names = ("requests", "errors", "wrong")
        rates = [[run.rate for run in each] for each in (queue, engine)]
        found = {
            "queue": {**{name: counts[name] for name in names}, **latencies(queue)},
            "engine": latencies(engine),
            "queue / engine": ratio(*rates),
        }
        show_head(clients, f", long prompts of {given['long']} tokens" if given else "")
        for name, each in zip(("queue", "engine"), rates, strict=True):
            found[name]["tokens_per_s"] = statistics.mean(each)
            show_line(name, found[name])
        show_ratio("queue / engine", found["queue / engine"])
        return found

    async def long(self, clients: int) -> dict[str, Any]:
        """Times between deliveries while long prompts arrive, over a full pass and over a plain step."""
        full = full_pass_s(self.engine, self.args.long)
        step = plain_step_s(self.engine, clients)
        log, late = PassLog(self.engine), self.engine.runner.late_captures
        found = await self.level(clients, long=self.args.long, count=6 * clients)
        print(f"captured after start-up: {late} before and {self.engine.runner.late_captures - late} among these:")
        found["passes"] = log.show(clients)
        found |= {"full_pass_s": full, "plain_step_s": step}
        for name in ("queue", "engine"):
            worst = found[name]["inter_token"]["p99"]
            found |= {f"{name}_p99_over_full_pass_s": worst - full, f"{name}_p99_in_plain_steps": worst / step}
            print(
                f"{name}: p99 between tokens {1e3 * worst:.2f} ms, the last full pass of such a prompt takes "
                f"{1e3 * full:.2f} ms, a plain step of {clients} rows {1e3 * step:.2f}: {worst / step:.2f} of them",
                flush=True,
            )
        return found


async def measure(args: argparse.Namespace, config: EngineConfig) -> dict[str, Any]:
    client = EngineClient(EngineSettings("yardstick", {}, config, SPECULATION))
    starting = asyncio.ensure_future(client.start())
    await asyncio.sleep(0.1)
    began = time.perf_counter()
    made = await asyncio.to_thread(target_of, args.device, args.tiny)
    engine = building.build(made, config, SPECULATION, remember=False).engine
    await starting
    print(f"both engines are ready after {time.perf_counter() - began:.1f} s", flush=True)
    try:
        bench = Bench(args, engine, over_queue(client))
        result: dict[str, Any] = {"levels": {str(each): await bench.level(each) for each in args.levels}}
        if args.long_clients:
            result["long_prompts"] = await bench.long(args.long_clients)
        return result
    finally:
        await client.close()


def main() -> None:
    if ENVIRONMENT in os.environ:
        as_worker()
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a small shape")
    parser.add_argument("--levels", type=int, nargs="*", default=[1, 8, 32, 128], help="clients")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=40.0, help="after which each level has one round only")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--budget", type=int, default=2048, help="tokens of a pass")
    parser.add_argument("--long", type=int, default=4096, help="tokens of a long prompt, every tenth")
    parser.add_argument(
        "--long-clients", type=int, default=0, help="clients while long prompts arrive; 0: not measured"
    )
    args = parser.parse_args()
    os.environ[ENVIRONMENT] = json.dumps([args.device, args.tiny])
    engine_process.WORKER = [sys.executable, str(Path(__file__).resolve())]
    config = EngineConfig(
        max_num_seqs=max(64, args.long_clients, *args.levels),
        max_num_batched_tokens=args.budget,
        max_model_len=args.long + args.max_tokens,
        kv_cache_bytes=(256 << 20) if args.tiny else 24 << 30,
    )
    result = asyncio.run(measure(args, config))
    settings = {name: getattr(args, name) for name in ("device", "tiny", "budget", "long", "max_tokens")}
    finish("serve_queue", {**result, **settings})


if __name__ == "__main__":
    main()
