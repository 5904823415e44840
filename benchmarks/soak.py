"""Eight honest clients beside all attackers: are their answers right and in time, and is the server as it was?

    python -m benchmarks.soak [--model smollm2] [--minutes 30]

Answers without attackers and without drafts come first; every later one, greedy or seeded, must have their tokens.
Attackers send long bodies, many long prompts, hostile grammars and many answers, each for some seconds. The last line
has wrong answers, errors, the first tokens' p50 and p99, restarts, and memory and descriptors at a quarter and
at the end of the time; the status is 1 where an answer is wrong, p99 is above 2 s, or a process was started again.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.clients import Answer, Server, ask, percentiles, request
from benchmarks.harness import TOPICS, finish
from benchmarks.neighbours import ATTACKS
from tests.helpers.hostile_bodies import Body, hostile_bodies
from tests.helpers.hostile_grammars import hostile_grammars

HONEST, ATTACKERS = 8, 4  # clients at once
LEAVES_S = 20.0  # seconds after which an attacker leaves a request
MOST_FIRST_S = 2.0
OPTIONS = {"max_tokens": 24, "ignore_eos": True, "stream": True, "return_token_ids": True}


def honest_bodies() -> list[dict[str, Any]]:
    prompts = [
        f"Write a sentence about {topic}, and another one about {other}." for topic in TOPICS for other in TOPICS
    ]
    ways = itertools.cycle([{"temperature": 0}, {"temperature": 0.8, "seed": 7}])
    return [{"prompt": prompt, **way, **OPTIONS} for prompt, way in zip(prompts, ways, strict=False)]


def hostile_requests(seed: int) -> list[Body]:
    completions = [body for bodies in ATTACKS.values() for body in bodies[:1]]
    completions += [{"prompt": "Go on", "structured_outputs": each} for each in hostile_grammars(100, seed)]
    return [("/v1/completions", json.dumps(body).encode()) for body in completions] + 3 * [*hostile_bodies().values()]


async def attack(server: Server, requests: list[Body], noise: random.Random, until: float) -> int:
    sent = 0
    while time.monotonic() < until:
        route, body = noise.choice(requests)
        sent += 1
        try:
            await asyncio.wait_for(_read(server, route, body), LEAVES_S)
        except (OSError, EOFError, ValueError, asyncio.TimeoutError):
            continue
    return sent


async def _read(server: Server, route: str, body: bytes) -> None:
    _, chunks, writer = await request(server.host, server.port, route, body)
    try:
        async for _ in chunks:
            pass
    finally:
        writer.close()


async def honest(server: Server, bodies: list[dict[str, Any]], first: int, until: float) -> list[tuple[int, Answer]]:
    answers = list[tuple[int, Answer]]()
    for at in itertools.count(first):
        if time.monotonic() > until:
            return answers
        answers.append((at % len(bodies), await ask(server.host, server.port, bodies[at % len(bodies)])))
    return answers


def held(server: Server) -> dict[str, Any]:
    """Return memory and descriptors of the server's processes, and their numbers."""
    children = subprocess.run(["pgrep", "-P", str(server.process.pid)], capture_output=True, text=True).stdout.split()
    pids = [str(server.process.pid), *children]
    mib = sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids) * os.sysconf("SC_PAGE_SIZE") >> 20
    return {"mib": mib, "descriptors": sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in pids)}


async def soak(server: Server, minutes: float, seed: int) -> dict[str, Any]:
    bodies, noise = honest_bodies(), random.Random(seed)
    plain = [(await ask(server.host, server.port, {**body, "speculation": "off"})).tokens for body in bodies]
    requests, began = hostile_requests(seed), time.monotonic()
    until, before = began + 60 * minutes, held(server)
    attackers = [asyncio.create_task(attack(server, requests, noise, until)) for _ in range(ATTACKERS)]
    clients = [asyncio.create_task(honest(server, bodies, 8 * at, until)) for at in range(HONEST)]
    await asyncio.sleep(15 * minutes)
    quarter = held(server)
    answers = [pair for each in await asyncio.gather(*clients) for pair in each]
    sent, end = sum(await asyncio.gather(*attackers)), held(server)
    done = [(at, answer) for at, answer in answers if answer.error is None]
    return {
        "answers": len(answers),
        "attacks": sent,
        "errors": sorted({answer.error for _, answer in answers if answer.error is not None})[:5],
        "wrong": sum(answer.tokens != plain[at] for at, answer in done),
        "first_token_s": percentiles([answer.arrivals[0][0] - answer.sent for _, answer in done]),
        "restarts": sum("started again" in line or "is killed" in line for line in server.log),
        "held": {"before": before, "quarter": quarter, "end": end},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    server = Server(arguments.model)
    try:
        result = asyncio.run(soak(server, arguments.minutes, arguments.seed))
    finally:
        server.stop()
    fits = not result["wrong"] and not result["restarts"] and result["first_token_s"]["p99"] <= MOST_FIRST_S
    finish("soak", {**result, "minutes": arguments.minutes, "fits": fits})
    sys.exit(0 if fits else 1)


if __name__ == "__main__":
    main()
