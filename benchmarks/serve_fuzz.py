"""What hostile and careless clients do to the server: nothing. Four trials, each beside honest clients.

    python benchmarks/serve_fuzz.py                                    # all four, smollm2
    python benchmarks/serve_fuzz.py --trials malformed --malformed 500 # a short one

malformed: 10,000 wrong requests among valid ones (half from the OpenAPI document by schemathesis where it is installed,
the rest from malformed_requests.py): no 5xx, errors in OpenAI's shape, valid answers exact, none stuck, and no peak of
memory above what the processes may keep. `--repeat 3` sends all of them three times.
disconnect: 500 clients that leave at random points while 16 honest ones run: exact, and all blocks come back.
kill: kill -9 of the engine's process under load: no request hangs, and the time until service.
schema: 30 % of requests with a bounded JSON schema, 16 at once, under speculation: what stopped by itself validates.
The script ends with an error where a trial fails.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import itertools
import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from harness import finish
from malformed_requests import Raw, malformed
from serve_client import Answer, Server, ask, is_openai, leave, percentiles, send_raw

from paceline import LLM, SamplingParams
from paceline.config import SpeculationConfig
from paceline.text.grammar import CACHE_BYTES

BODIES_MIB = 64  # a body of the largest size for each client
STUCK_S = 300.0  # a valid request may ask for an answer as long as the context
NOTICED_S = 2.0  # on a busy machine; 0.05 s on an idle one
PROMPTS = tuple(f"Tell me something about the number {number}." for number in range(40))
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "kind": {"enum": ["cat", "dog", "bird"]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}


class Honest:
    """Seeded requests whose answers are known from plain decoding offline."""

    def __init__(self, model: str, max_tokens: int) -> None:
        self.bodies = [
            {"prompt": prompt, "max_tokens": max_tokens, "seed": at, "temperature": 0.8 * (at % 2)}
            for at, prompt in enumerate(PROMPTS)
        ]
        llm = LLM(model, method="none")
        answers = llm.generate(
            list(PROMPTS), [SamplingParams(**{k: v for k, v in each.items() if k != "prompt"}) for each in self.bodies]
        )
        self.wanted = [answer.outputs[0].token_ids for answer in answers]
        llm.close()
        self._turns = itertools.cycle(range(len(self.bodies)))
        self.counts: Counter[str] = Counter()

    async def one(self, server: Server) -> Answer:
        at = next(self._turns)
        body = {**self.bodies[at], "stream": True, "return_token_ids": True}
        answer = await asyncio.wait_for(ask(server.host, server.port, body), STUCK_S)
        right = answer.tokens == list(self.wanted[at])
        self.counts["errors" if answer.error else "right" if right else "wrong"] += 1
        return answer

    async def until(self, server: Server, done: asyncio.Event) -> None:
        while not done.is_set():
            await self.one(server)

    def taken(self) -> dict[str, int]:
        counts, self.counts = self.counts, Counter()
        return {name: counts[name] for name in ("right", "wrong", "errors")}


# -- malformed requests


def from_openapi(document: dict[str, Any], count: int, seed: int) -> Iterator[Raw]:
    """Half of them break the document, half keep it."""
    import schemathesis

    schema = schemathesis.openapi.from_dict(document)
    operations = [found.ok() for found in schema.get_all_operations() if found.ok().method.upper() == "POST"]
    modes = (schemathesis.GenerationMode.NEGATIVE, schemathesis.GenerationMode.POSITIVE)
    each = -(-count // (len(operations) * len(modes)))
    for operation, mode in itertools.product(operations, modes):
        for case in examples(operation.as_strategy(generation_mode=mode), each, seed):
            yield Raw(operation.path, as_bytes(case.body))


def examples(strategy: Any, count: int, seed: int) -> list[Any]:
    import hypothesis

    found: list[Any] = []

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(strategy)
    def collect(case: Any) -> None:
        found.append(case)

    collect()
    return found


def as_bytes(body: Any) -> bytes:
    if isinstance(body, bytes):
        return body
    try:
        return json.dumps(body).encode()
    except (TypeError, ValueError):
        return repr(body).encode(errors="replace")


async def malformed_trial(server: Server, honest: Honest, args: argparse.Namespace) -> dict[str, Any]:
    wrong = malformed(random.Random(args.seed))
    generated: Iterator[Raw] = iter(())
    if with_schemathesis := importlib.util.find_spec("schemathesis") is not None:
        generated = from_openapi(json.loads(server.get("/openapi.json")), args.malformed // 2, args.seed)
    ready = [*itertools.islice(generated, args.malformed // 2)]
    ready += itertools.islice(wrong, args.malformed - len(ready))
    random.Random(args.seed).shuffle(ready)
    ready *= args.repeat
    statuses: Counter[int] = Counter()
    bad: list[str] = []
    memory: list[tuple[int, int]] = []
    taken: list[tuple[float, str]] = []  # seconds of each request, and what it was
    left = iter(enumerate(ready))

    async def sender() -> None:
        for at, raw in left:
            started = time.perf_counter()
            try:
                status, body = await asyncio.wait_for(send_raw(server.host, server.port, raw), STUCK_S)
            except (OSError, EOFError, ValueError, asyncio.TimeoutError) as error:
                status, body = 599, f"{type(error).__name__}: {error}".encode()
            taken.append((time.perf_counter() - started, f"{status} {raw.method} {raw.path} {raw.body[:400]!r}"))
            statuses[status] += 1
            if status >= 500 or not is_openai(status, body, raw.method) or b'"type":"server_error"' in body:
                bad.append(f"{status} {raw.method} {raw.path} {raw.body[:150]!r} -> {body[:200]!r}")
            if at % max(len(ready) // 24, 1) == 0:
                memory.append(server.resident_mib())
            if at % 10 == 0:
                await honest.one(server)

    await asyncio.gather(*(sender() for _ in range(args.clients)))
    for line in sorted(bad, reverse=True)[:20]:
        print(line, flush=True)
    for took, what in sorted(taken, reverse=True)[:5]:
        print(f"{took:.1f} s: {what}", flush=True)
    return {
        "requests": len(ready),
        "schemathesis": with_schemathesis,
        "statuses": dict(sorted(statuses.items())),
        "bad": len(bad),
        "honest": honest.taken(),
        "seconds": {**percentiles([took for took, _ in taken]), "longest": max(taken)[0]},
        "memory_mib": dict(zip(("http", "engine"), zip(*memory, strict=True), strict=True)),
        "memory_beyond_mib": beyond(memory, args.cache_mib),
        "blocks_back": await blocks_back(server),
        "metrics_readable": bool(server.get("/metrics")),
    }


def beyond(memory: list[tuple[int, int]], cache_mib: int) -> int:
    """MiB by which a peak is above what the process took at first and all that it may keep: bodies under way in the
    server; in the engine the cache, whose pages are taken as they are used, past answers, and compiled grammars."""
    kept = cache_mib + (SpeculationConfig().suffix_bytes + CACHE_BYTES >> 20)
    return max(
        max(each) - each[0] - room for each, room in zip(zip(*memory, strict=True), (BODIES_MIB, kept), strict=True)
    )


async def blocks_back(server: Server, seconds: float = 30.0) -> bool:
    """Whether no request runs or waits, and no block is held, within that time."""
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not any([await asyncio.to_thread(server.metric, name) for name in names]):
            return True
        await asyncio.sleep(0.1)
    return False


# -- clients that leave


async def disconnect_trial(server: Server, honest: Honest, args: argparse.Namespace) -> dict[str, Any]:
    noise, left, done = random.Random(args.seed), iter(range(args.leaving)), asyncio.Event()
    honest_ones = [asyncio.create_task(honest.until(server, done)) for _ in range(args.clients)]

    async def leaver() -> None:
        for at in left:
            await leave(server.host, server.port, PROMPTS[at % len(PROMPTS)], noise, at)

    await asyncio.gather(*(leaver() for _ in range(args.clients)))
    done.set()
    await asyncio.gather(*honest_ones)
    return {"left": args.leaving, "honest": honest.taken(), "blocks_back": await blocks_back(server)}


# -- an engine that is killed


async def kill_trial(server: Server, honest: Honest, args: argparse.Namespace) -> dict[str, Any]:
    done = asyncio.Event()
    tasks = [asyncio.create_task(honest.until(server, done)) for _ in range(args.clients)]
    while await asyncio.to_thread(server.metric, "num_requests_running") < args.clients / 2:
        await asyncio.sleep(0.05)
    before = honest.taken()
    started = time.perf_counter()
    os.kill(server.worker_pid, signal.SIGKILL)
    noticed_s = await until_health(server, up=False) - started
    back_s = await until_health(server, up=True) - started
    during = honest.taken()
    await honest.one(server)
    done.set()
    await asyncio.wait_for(asyncio.gather(*tasks), STUCK_S)
    times = {"start_s": server.start_s, "noticed_s": noticed_s, "back_s": back_s}
    return {"before": before, "during": during, **times, "after": honest.taken()}


async def until_health(server: Server, *, up: bool) -> float:
    """When /health first said so."""
    deadline = time.perf_counter() + STUCK_S
    while (now := time.perf_counter()) < deadline:
        if await asyncio.to_thread(healthy, server) == up:
            return now
        await asyncio.sleep(0.02)
    raise SystemExit(f"/health did not turn {'green' if up else 'red'}")


def healthy(server: Server) -> bool:
    try:
        return bool(json.loads(server.get("/health"))["status"] == "ok")
    except OSError:
        return False


# -- structured answers under speculation


async def schema_trial(server: Server, honest: Honest, args: argparse.Namespace) -> dict[str, Any]:
    left, counts, problems = iter(range(args.structured)), Counter[str](), []
    accepted = 0

    async def client() -> None:
        nonlocal accepted
        for at in left:
            if at % 10 >= 3:
                await honest.one(server)
                continue
            body = {
                "prompt": f'A pet as JSON, like {{"name": "Tom", "age": 3, "kind": "cat"}}. Pet {at}: ',
                "structured_outputs": {"json": SCHEMA},
                "max_tokens": 20 if at % 4 == 0 else 80,
                "seed": at,
                "temperature": 0.7,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            answer = await asyncio.wait_for(ask(server.host, server.port, body), STUCK_S)
            counts[answer.error or answer.finish_reason or "none"] += 1
            accepted += (answer.usage or {}).get("speculation", {}).get("accepted", 0)
            if answer.finish_reason == "stop" and (problem := invalid(answer.text)):
                problems.append(f"{problem}: {answer.text!r}")

    await asyncio.gather(*(client() for _ in range(args.clients)))
    for line in problems[:5]:
        print(line, flush=True)
    ends = dict(counts)
    return {"structured": ends, "invalid": len(problems), "accepted_drafts": accepted, "honest": honest.taken()}


def invalid(text: str) -> str | None:
    """What is wrong with an answer, by SCHEMA; no validator need be installed."""
    try:
        found = json.loads(text)
    except ValueError as error:
        return str(error)
    fits = (
        isinstance(found, dict)
        and set(found) == {"name", "age", "kind"}
        and isinstance(found["name"], str)
        and len(found["name"]) <= 12
        and isinstance(found["age"], int)
        and 0 <= found["age"] <= 120
        and found["kind"] in ("cat", "dog", "bird")
    )
    return None if fits else "does not fit the schema"


TRIALS: dict[str, Callable[..., Awaitable[dict[str, Any]]]] = {
    "malformed": malformed_trial,
    "disconnect": disconnect_trial,
    "schema": schema_trial,
    "kill": kill_trial,
}


def failures(name: str, found: dict[str, Any]) -> list[str]:
    honest = found.get("honest", {})
    checks = {
        "an honest answer was wrong or failed": not (honest.get("wrong") or honest.get("errors")),
        "blocks did not come back": found.get("blocks_back", True),
        "answers with 5xx, or without OpenAI's shape": not found.get("bad"),
        "memory grew beyond what is kept": found.get("memory_beyond_mib", 0) <= 0,
        "structured answers do not validate": not found.get("invalid"),
        "no draft was accepted": found.get("accepted_drafts", 1) > 0,
        "the dead engine was not noticed at once": found.get("noticed_s", 0) < NOTICED_S,
        "answers after the restart were wrong": not any(found.get("after", {}).get(key) for key in ("wrong", "errors")),
        "answers were wrong while the engine was down": not found.get("during", {}).get("wrong"),
    }
    return [f"{name}: {what}" for what, passed in checks.items() if not passed]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--trials", nargs="+", choices=TRIALS, default=list(TRIALS))
    parser.add_argument("--malformed", type=int, default=10_000)
    parser.add_argument("--repeat", type=int, default=1, help="times that all malformed requests are sent")
    parser.add_argument("--leaving", type=int, default=500)
    parser.add_argument("--structured", type=int, default=200, help="requests of the schema trial, 30 %% with a schema")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=24, help="of an honest answer")
    parser.add_argument("--cache-mib", type=int, default=256, help="small enough to be in use as a whole soon")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    honest = Honest(args.model, args.max_tokens)
    server = Server(
        args.model, "--method", "auto", "--max-model-len", "512", "--kv-cache-bytes", str(args.cache_mib << 20)
    )
    result, failed = {}, []
    try:
        for name in args.trials:
            started = time.perf_counter()
            result[name] = found = asyncio.run(TRIALS[name](server, honest, args))
            found["took_s"] = time.perf_counter() - started
            failed += failures(name, found)
            print(f"{name}: {json.dumps(found)}", flush=True)
    finally:
        server.stop()
    for line in server.log[:40]:
        print(line.rstrip())
    finish("serve_fuzz", {"trials": result, "failed": failed, "model": args.model})
    if failed:
        raise SystemExit("; ".join(failed))


if __name__ == "__main__":
    main()
