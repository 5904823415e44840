"""The circle of a drafter for one's own traffic, on a live server, without downtime: capture, train, reload.

    python benchmarks/serve_circle.py                                   # smollm2
    python benchmarks/serve_circle.py --model DIR --steps 2 --requests 16

A first drafter is trained on plain answers. The server starts with it and captures what clients ask
and get; `paceline train --init-from` continues the drafter on the captured file, and POST /v1/drafters/reload exchanges
it. Clients send seeded requests from the first to the last moment: every answer must have the tokens of plain decoding
offline, and none may fail. The script ends with an error where one does.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from harness import finish
from serve_client import Answer, Server, ask, percentiles, request

from paceline import LLM, SamplingParams

PROMPTS = tuple(f"Tell me something about the number {number}." for number in range(24))


def train(args: argparse.Namespace, data: Path, out: Path, *more: str) -> float:
    began = time.perf_counter()
    sizes = ["--steps", str(args.steps), "--rows", "4", "--length", "128", "--warmup", "1", "--device", "cpu"]
    command = [sys.executable, "-m", "paceline", "train", args.method, "--target", args.model, "--data", str(data)]
    done = subprocess.run([*command, "--out", str(out), *sizes, *more], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"the training failed: {done.stderr[-2000:]}")
    return time.perf_counter() - began


class Traffic:
    """Seeded requests whose answers are known, one after the other from each client."""

    def __init__(self, args: argparse.Namespace) -> None:
        sampling = [{"max_tokens": 24, "seed": at, "temperature": 0.8 * (at % 2)} for at in range(len(PROMPTS))]
        llm = LLM(args.model, method="none")
        answers = llm.generate(list(PROMPTS), [SamplingParams(**each) for each in sampling])
        llm.close()
        self.texts = [answer.outputs[0].text for answer in answers]
        self._jobs = itertools.cycle(
            [
                (
                    {"prompt": prompt, **each, "stream": True, "return_token_ids": True},
                    list(answer.outputs[0].token_ids),
                )
                for prompt, each, answer in zip(PROMPTS, sampling, answers, strict=True)
            ]
        )
        self.counts: Counter[str] = Counter()
        self.answers: list[Answer] = []

    async def client(self, server: Server, done: asyncio.Event) -> None:
        while not done.is_set():
            body, wanted = next(self._jobs)
            answer = await ask(server.host, server.port, body)
            self.counts["errors" if answer.error else "right" if answer.tokens == wanted else "wrong"] += 1
            self.answers.append(answer)

    async def sent(self, count: int) -> None:
        count += len(self.answers)
        while len(self.answers) < count:
            await asyncio.sleep(0.05)


async def circle(args: argparse.Namespace, server: Server, traffic: Traffic, work: Path) -> dict[str, Any]:
    done = asyncio.Event()
    clients = [asyncio.create_task(traffic.client(server, done)) for _ in range(args.clients)]
    await traffic.sent(args.requests)
    captured = sum(1 for _ in (work / "traffic.jsonl").open())
    second, more = work / "drafter-2", ("--init-from", str(work / "drafter-1"))
    train_s = await asyncio.to_thread(train, args, work / "traffic.jsonl", second, *more)
    began = time.perf_counter()
    status, chunks, writer = await request(
        server.host, server.port, "/v1/drafters/reload", json.dumps({"drafter": str(second)}).encode()
    )
    answer = json.loads(b"".join([chunk async for chunk in chunks]))
    writer.close()
    reload_s = time.perf_counter() - began
    during = len(traffic.answers)
    await traffic.sent(args.requests)
    done.set()
    await asyncio.gather(*clients)
    longest = percentiles([each.ended - each.sent for each in traffic.answers])
    times = {"train_s": train_s, "reload_s": reload_s, "request_s": longest}
    found = {"captured": captured, "reload": status, "methods": answer.get("methods"), **times}
    return {**found, "before_the_reload": during, "answers": dict(traffic.counts)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--method", default="medusa")
    parser.add_argument("--steps", type=int, default=8, help="of each training: what is measured is the circle, not τ")
    parser.add_argument("--requests", type=int, default=32, help="before the training, and after the reload")
    parser.add_argument("--clients", type=int, default=4)
    args = parser.parse_args()
    traffic = Traffic(args)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        lines = [json.dumps({"text": prompt + text}) for prompt, text in zip(PROMPTS, traffic.texts, strict=True)]
        (work / "first.jsonl").write_text("\n".join(lines))
        train(args, work / "first.jsonl", work / "drafter-1")
        flags = ("--drafter", work / "drafter-1", "--capture", work / "traffic.jsonl", "--max-model-len", 512)
        server = Server(args.model, *map(str, flags))
        try:
            result = asyncio.run(circle(args, server, traffic, work))
            result["engine_starts"] = server.metric("engine_starts_total")
        finally:
            server.stop()
    finish("serve_circle", {**result, "model": args.model})
    if result["reload"] != 200 or result["engine_starts"] != 2 or set(result["answers"]) != {"right"}:
        raise SystemExit("the circle was not closed, or an answer was wrong or failed")


if __name__ == "__main__":
    main()
