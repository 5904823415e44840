"""The server against its engine alone, `auto` against plain, other servers beside them; every answer is compared.

    python -m benchmarks.serve                           # smollm2 on two cores, 1, 4, 16, 64 clients, under 6 minutes
    python -m benchmarks.serve --peer http://127.0.0.1:8000 --peer-model NAME     # and a server that is running
    python -m benchmarks.serve cost --blocks 4 --minutes 6       # processor time, `auto` against plain, and of HTTP
    python -m benchmarks.serve circle                            # capture, train, reload under traffic

Each client streams its next request when the last one is answered, until there are none. The engine alone is an equal
engine in this process, stepped without queue, HTTP or text, with as many requests at once. Arms run one after the other
in an order drawn anew each round; a rate counts tokens while all clients have work. Every request has a seed, and none
is sent to an engine twice; the two arms of one engine have prompts and answers of equal lengths. The server's answers
with `auto` must have the tokens of the engine's plain ones, and the other way round. Clients share the machine's cores.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.clients import (
    TEMPERATURE,
    Job,
    Prompt,
    Run,
    Server,
    alone,
    ask,
    compare,
    latencies,
    make_jobs,
    over_http,
    request,
    served,
    show,
)
from benchmarks.harness import finish, ratio, shown
from paceline import LLM, SamplingParams
from paceline.config import AUTO, NONE, EngineConfig, SpeculationConfig
from paceline.engine.engine import Engine
from paceline.text.tokenizer import Tokenizer

MODES = (AUTO, NONE)
PARTNER = {f"server {AUTO}": f"engine {NONE}", f"server {NONE}": f"engine {AUTO}"}  # arms with equal jobs
ORDERS = (AUTO, NONE, NONE, AUTO), (NONE, AUTO, AUTO, NONE)  # for `cost`: a drift of the machine falls on both alike
CIRCLE_PROMPTS = tuple(f"Tell me something about the number {number}." for number in range(24))


def prompts_for(tokenizer: Tokenizer, most: int) -> list[Prompt]:
    from paceline.bench.prompts import shipped

    encoded = [tuple(tokenizer.apply_chat_template(prompt.messages([]))) for prompt in shipped()]
    return [prompt for prompt in encoded if len(prompt) <= most]


# -- levels: the server against its engine


def levels(args: argparse.Namespace) -> None:
    from paceline.build import build, load

    cache = 2 << 30
    target = load(args.model)
    config = EngineConfig(max_model_len=2048, kv_cache_bytes=cache)
    engine = build(target, config, SpeculationConfig(method=AUTO)).engine
    prompts = prompts_for(target.loaded.tokenizer, 2047 - args.max_tokens * 2)
    server = Server(args.model, "--method", AUTO, "--max-model-len", 2048, "--kv-cache-bytes", cache)
    try:
        result: dict[str, Any] = {"levels": measure_levels(args, engine, server, prompts)}
    finally:
        server.stop()
    if args.peer:
        result["peer"] = measure_peer(args, args.peer, args.peer_model, prompts)
    finish("serve", {**result, "model": args.model, "rounds": args.rounds, "max_tokens": args.max_tokens})


def measure_levels(args: argparse.Namespace, engine: Engine, server: Server, prompts: list[Prompt]) -> dict[str, Any]:
    """Measure every level; one ends before its last round if its share of `--minutes` is over."""
    arms = [*PARTNER, *PARTNER.values()]

    def run(arm: str, clients: int, turn: int) -> Run:
        # Partners have equal jobs; the two arms of one engine have equal work, but other answers.
        group = arm.endswith(AUTO) == arm.startswith("server")
        jobs = make_jobs(prompts, clients * 3 // 2 + 6, args.max_tokens, clients * 100 + turn, group=group)
        place, mode = arm.split()
        if place == "engine":
            return alone(engine, jobs, mode, clients)
        return asyncio.run(served(jobs, clients, over_http(server.host, server.port, speculation=mode)))

    for arm in arms:
        run(arm, 4, 99)  # warm-up
    noise, result = random.Random(0), {}
    shares = {clients: clients**0.4 for clients in args.levels}
    for clients in args.levels:
        runs: dict[str, list[Run]] = {arm: [] for arm in arms}
        until = time.perf_counter() + 60 * args.minutes * shares[clients] / sum(shares.values())
        longest = 0.0
        for turn in range(args.rounds):
            began = time.perf_counter()
            if turn and began + longest > until:
                break
            for arm in noise.sample(arms, len(arms)):
                runs[arm].append(run(arm, clients, turn))
            longest = max(longest, time.perf_counter() - began)
        result[str(clients)] = figures(clients, runs)
    return result


def figures(clients: int, runs: dict[str, list[Run]]) -> dict[str, Any]:
    rates = {arm: [run.rate for run in each] for arm, each in runs.items()}
    row: dict[str, Any] = {}
    print(f"\n{clients} clients")
    for arm in runs:
        counts = Counter[str]()
        for pair in zip(runs[arm], runs[PARTNER[arm]], strict=True) if arm in PARTNER else ():
            counts.update(compare(*pair))
        compared = {name: counts[name] for name in ("requests", "errors", "wrong")} if arm in PARTNER else {}
        row[arm] = {"tokens_per_s": statistics.fmean(rates[arm]), **compared, **latencies(runs[arm])}
        show(arm, row[arm])
    ratios = {f"server / engine, {mode}": (f"server {mode}", f"engine {mode}") for mode in MODES}
    ratios |= {f"{place}, {AUTO} / {NONE}": (f"{place} {AUTO}", f"{place} {NONE}") for place in ("server", "engine")}
    for name, (above, below) in ratios.items():
        row[name] = ratio(rates[above], rates[below])
        print(f"{name}: {shown(row[name], 3)}", flush=True)
    return row


def measure_peer(args: argparse.Namespace, url: str, model: str, prompts: list[Prompt]) -> dict[str, Any]:
    host, port = url.removeprefix("http://").rstrip("/").split(":")
    send, result = over_http(host, int(port), model=model), {}
    for clients in (4, *args.levels):  # the first warms up
        jobs = make_jobs(prompts, clients * 3 // 2 + 6, args.max_tokens, clients * 100, group=3)
        run = asyncio.run(served(jobs, clients, send))
        errors = sum(answer.error is not None for _, answer in run.answers)
        counts = {"requests": len(run.answers), "errors": errors}
        result[str(clients)] = {"tokens_per_s": run.rate, **counts, **latencies([run])}
        show(f"{model}, {clients} clients", result[str(clients)])
    return result


# -- cost: `auto` with many clients, by processor time


def cost(args: argparse.Namespace) -> None:
    """Measure blocks of `auto`, plain, plain, `auto`, and the other way round. Every client has two answers, whose
    lengths sum to the same for all, so that all have work until nearly the end. The engine has one thread, which never
    waits for another, so the processor time of its process is its work whatever else the machine does."""
    from paceline.models.load.hub import resolve

    prompts = prompts_for(Tokenizer.from_path(resolve(args.model)), 1900)
    server = Server(args.model, "--method", AUTO, "--max-model-len", 2048, "--kv-cache-bytes", 2 << 30, "--threads", 1)
    try:
        result = {str(clients): cost_level(args, server, prompts, clients) for clients in args.levels}
    finally:
        server.stop()
    finish("serve_cost", {"levels": result, "model": args.model})


def cost_level(args: argparse.Namespace, server: Server, prompts: list[Prompt], clients: int) -> dict[str, Any]:
    until, longest = time.perf_counter() + 60 * args.minutes / len(args.levels), 0.0
    spent: dict[str, dict[str, list[float]]] = {unit: {AUTO: [], NONE: []} for unit in ("engine", "http", "clock")}

    async def answered(pairs: list[list[Job]], mode: str) -> None:
        send = over_http(server.host, server.port, speculation=mode)

        async def client(jobs: list[Job]) -> None:
            for job in jobs:
                answer = await send(job)
                assert answer.error is None, answer.error
                assert len(answer.tokens) == job.max_tokens

        await asyncio.gather(*map(client, pairs))

    def run(mode: str, seed: int, group: int, most: int = clients) -> dict[str, float]:
        jobs = make_jobs(prompts, 2 * clients, args.max_tokens, seed, group=group)
        pairs = [
            [first, replace(second, max_tokens=2 * args.max_tokens - first.max_tokens)]
            for first, second in zip(jobs[:clients], jobs[clients:], strict=True)
        ]
        began, before = time.perf_counter(), server.processor_s()
        asyncio.run(answered(pairs[:most], mode))
        after = server.processor_s()
        return {"clock": time.perf_counter() - began} | {name: after[name] - before[name] for name in after}

    for mode in MODES:  # warm-up
        run(mode, 99, mode == AUTO, 6)
    for block in range(args.blocks):
        began = time.perf_counter()
        if block and began + longest > until:
            break
        runs = [(mode, run(mode, block, group)) for group, mode in enumerate(ORDERS[block % 2])]
        for unit, by_mode in spent.items():
            for mode in MODES:
                by_mode[mode].append(sum(times[unit] for each, times in runs if each == mode))
        longest = max(longest, time.perf_counter() - began)
    tokens = 2 * 2 * clients * args.max_tokens  # tokens of a mode in a block
    result: dict[str, Any] = {"blocks": len(spent["clock"][AUTO])}
    for unit, times in spent.items():
        result[unit] = {f"{mode}, ms a token": 1e3 * statistics.median(each) / tokens for mode, each in times.items()}
        result[unit]["auto / none"] = ratio(times[NONE], times[AUTO])
        print(f"{clients} clients, {AUTO} / {NONE} by {unit}: {shown(result[unit]['auto / none'], 3)}", flush=True)
    return result


# -- circle: capture, train, reload


def train(args: argparse.Namespace, data: Path, out: Path, *more: object) -> float:
    began = time.perf_counter()
    sizes = ["--steps", args.steps, "--rows", 4, "--length", 128, "--warmup", 1, "--device", "cpu"]
    command = [sys.executable, "-m", "paceline", "train", args.method, "--target", args.model, "--data", data]
    done = subprocess.run([*map(str, [*command, "--out", out, *sizes, *more])], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"the training failed: {done.stderr[-2000:]}")
    return time.perf_counter() - began


def circle(args: argparse.Namespace) -> None:
    """Train a drafter on plain answers, serve with it, capture the traffic, train on and reload, while clients send
    seeded requests: every answer must have the tokens of plain decoding offline, and none may fail."""
    sampling = [{"max_tokens": 24, "seed": at, "temperature": TEMPERATURE * (at % 2)} for at in range(24)]
    with LLM(args.model, method=NONE) as llm:
        answers = llm.generate(list(CIRCLE_PROMPTS), [SamplingParams(**each) for each in sampling])
    texts, tokens = ([getattr(answer.outputs[0], name) for answer in answers] for name in ("text", "token_ids"))
    jobs = [
        ({"prompt": prompt, **each, "stream": True, "return_token_ids": True}, list(right))
        for prompt, each, right in zip(CIRCLE_PROMPTS, sampling, tokens, strict=True)
    ]
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        pairs = zip(CIRCLE_PROMPTS, texts, strict=True)
        (work / "first.jsonl").write_text("\n".join(json.dumps({"text": a + b}) for a, b in pairs))
        train(args, work / "first.jsonl", work / "drafter-1")
        flags = ("--drafter", work / "drafter-1", "--capture", work / "traffic.jsonl", "--max-model-len", 512)
        server = Server(args.model, *flags)
        try:
            result = asyncio.run(reload_under_traffic(args, server, jobs, work))
            result["engine_starts"] = server.metric("engine_starts_total")
        finally:
            server.stop()
    finish("serve_circle", {**result, "model": args.model})
    if result["reload"] != 200 or result["engine_starts"] != 2 or set(result["answers"]) != {"right"}:
        raise SystemExit("the circle was not closed, or an answer was wrong or failed")


async def reload_under_traffic(args: argparse.Namespace, server: Server, jobs: list[Any], work: Path) -> dict[str, Any]:
    done, turns, counts = asyncio.Event(), itertools.cycle(jobs), Counter[str]()

    async def client() -> None:
        while not done.is_set():
            body, right = next(turns)
            answer = await ask(server.host, server.port, body)
            counts["errors" if answer.error else "right" if answer.tokens == right else "wrong"] += 1

    async def answered(count: int) -> None:
        count += counts.total()
        while counts.total() < count:
            await asyncio.sleep(0.05)

    clients = [asyncio.create_task(client()) for _ in range(4)]
    await answered(args.requests)
    second = work / "drafter-2"
    train_s = await asyncio.to_thread(train, args, work / "traffic.jsonl", second, "--init-from", work / "drafter-1")
    began = time.perf_counter()
    body = json.dumps({"drafter": str(second)}).encode()
    status, chunks, writer = await request(server.host, server.port, "/v1/drafters/reload", body)
    async for _ in chunks:
        pass
    writer.close()
    reload_s = time.perf_counter() - began
    await answered(args.requests)
    done.set()
    await asyncio.gather(*clients)
    return {"reload": status, "answers": dict(counts), "train_s": train_s, "reload_s": reload_s}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", default="levels", choices=("levels", "cost", "circle"))
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--levels", type=int, nargs="*", help="clients")
    parser.add_argument("--rounds", type=int, default=8, help="at most; --minutes may allow fewer")
    parser.add_argument("--minutes", type=float, default=4.5, help="of all rounds; one round is run anyway")
    parser.add_argument("--max-tokens", type=int, default=48, help="of an answer, on average")
    parser.add_argument("--peer", help="URL of another server that is running")
    parser.add_argument("--peer-model", default="", help="the model's name there")
    parser.add_argument("--blocks", type=int, default=4, help="of cost, at most")
    parser.add_argument("--method", default="medusa", help="of circle")
    parser.add_argument("--steps", type=int, default=8, help="of each training of circle")
    parser.add_argument("--requests", type=int, default=32, help="of circle: before the training, after the reload")
    args = parser.parse_args()
    if args.levels is None:
        args.levels = [16] if args.what == "cost" else [1, 4, 16, 64]
    {"levels": levels, "cost": cost, "circle": circle}[args.what](args)


if __name__ == "__main__":
    main()
