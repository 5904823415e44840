"""A server and its clients: requests, answers with the time of every token, and runs of many clients at once.

The client costs little of two cores: it reads lines of events and keeps times, tokens and nothing else.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import re
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline import SamplingParams
from paceline.engine.engine import Engine

TEMPERATURE = 0.8
OWN_TOKENS = 3  # a prompt's first tokens, which no other prompt has
Prompt = tuple[int, ...]


class Server:
    """`paceline serve` on a free port."""

    def __init__(self, model: str, *flags: object) -> None:
        command = [sys.executable, "-m", "paceline", "serve", "--model", model, "--port", "0", *map(str, flags)]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE)
        self.log: list[str] = []
        assert self.process.stderr is not None
        for raw in self.process.stderr:
            self.log.append(raw.decode())
            if found := re.search(r" at http://(\S+):(\d+)", self.log[-1]):
                self.host, self.port = found.group(1), int(found.group(2))
                break
        else:
            raise SystemExit(f"the server did not start: {''.join(self.log)}")
        threading.Thread(target=lambda: self.log.extend(map(bytes.decode, self.process.stderr)), daemon=True).start()

    def metric(self, name: str) -> float:
        """Return the sum over its labels."""
        with urllib.request.urlopen(f"http://{self.host}:{self.port}/metrics", timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if re.match(rf"paceline:{name}[{{ ]", line))

    def processor_s(self) -> dict[str, float]:
        """Return the processor time of the engine's process, and of the one that speaks HTTP."""
        command = ["pgrep", "-P", str(self.process.pid), "-f", "paceline.server.process.worker"]
        pids = {"engine": int(subprocess.check_output(command)), "http": self.process.pid}
        stats = {name: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for name, pid in pids.items()}
        return {name: (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK") for name, stat in stats.items()}

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(60)


@dataclass
class Answer:
    """One request as its client saw it; times are of time.perf_counter."""

    sent: float
    status: int = 0
    tokens: list[int] = field(default_factory=list)
    arrivals: list[tuple[float, int]] = field(default_factory=list)  # time and tokens of each chunk that had any
    finish_reason: str | None = None
    usage: dict[str, Any] | None = None
    text: str = ""
    error: str | None = None
    ended: float = 0.0

    def take(self, chunk: dict[str, Any], now: float) -> None:
        if "error" in chunk:
            self.error = json.dumps(chunk["error"])
            return
        self.usage = chunk.get("usage") or self.usage
        for choice in chunk.get("choices", ()):
            self.text += choice.get("text") or ""
            tokens = choice.get("token_ids") or ()
            if tokens:
                self.tokens += tokens
                self.arrivals.append((now, len(tokens)))
            self.finish_reason = choice.get("finish_reason") or self.finish_reason


async def request(
    host: str, port: int, path: str, body: bytes, method: str = "POST", kind: str = "application/json"
) -> tuple[int, AsyncIterator[bytes], asyncio.StreamWriter]:
    """Return status and lines of the answer's body; the caller closes the writer."""
    reader, writer = await asyncio.open_connection(host, port, limit=1 << 24)
    head = f"{method} {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: {kind}\r\nConnection: close\r\n"
    writer.write(head.encode() + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
    head_of_answer = (await reader.readuntil(b"\r\n\r\n")).lower()
    return int(head_of_answer.split(b" ", 2)[1]), _body(reader, b"transfer-encoding: chunked" in head_of_answer), writer


async def _body(reader: asyncio.StreamReader, chunked: bool) -> AsyncIterator[bytes]:
    if not chunked:
        yield await reader.read()
        return
    while size := int(await reader.readline(), 16):
        data = await reader.readexactly(size + 2)
        yield data[:-2]


async def ask(
    host: str, port: int, body: dict[str, Any], path: str = "/v1/completions", answer: Answer | None = None
) -> Answer:
    """Stream a completion, its tokens counted as they arrive, into `answer` if one is given."""
    answer = answer or Answer(time.perf_counter())
    writer = None
    try:
        answer.status, chunks, writer = await request(host, port, path, json.dumps(body).encode())
        if answer.status != 200:
            answer.error = b"".join([chunk async for chunk in chunks]).decode(errors="replace")
            return answer
        async for data in chunks:
            now = time.perf_counter()
            for line in data.split(b"\n"):
                if line.startswith(b"data: {"):
                    answer.take(json.loads(line[6:]), now)
        if answer.finish_reason is None and answer.error is None:
            answer.error = "the stream ended without a finish_reason"
    except (OSError, EOFError, ValueError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    finally:
        answer.ended = time.perf_counter()
        if writer is not None:
            writer.close()
    return answer


# -- jobs and runs


@dataclass(frozen=True)
class Job:
    """A request with a seed of its own: no drafter of an engine has seen its answer before. Answers that end by
    themselves would make arms of equal prompts unequal work, so its length is fixed."""

    prompt: Prompt
    seed: int
    max_tokens: int

    def options(self) -> dict[str, Any]:
        return {"max_tokens": self.max_tokens, "ignore_eos": True, "seed": self.seed, "temperature": TEMPERATURE}

    def params(self, mode: str) -> Any:
        return SamplingParams(**self.options(), speculation=mode).resolve({})


Send = Callable[[Job], Awaitable[Answer]]


@dataclass
class Run:
    """Clients that sent jobs until there were none."""

    answers: list[tuple[Job, Answer]] = field(default_factory=list)
    began: float = field(default_factory=time.perf_counter)
    busy_until: float = 0.0  # time at which a client first found no job left

    @property
    def rate(self) -> float:
        """Tokens per second, while all clients had work."""
        tokens = sum(count for _, answer in self.answers for at, count in answer.arrivals if at <= self.busy_until)
        return tokens / (self.busy_until - self.began)

    def take(self, jobs: Iterator[Job]) -> Job | None:
        job = next(jobs, None)
        if job is None and not self.busy_until:
            self.busy_until = time.perf_counter()
        return job


def make_jobs(
    prompts: Sequence[Prompt], count: int, max_tokens: int, seed: int, *, group: int = 0, long: int = 0
) -> list[Job]:
    """Return jobs that depend on seed and group only; answers differ in length, so that clients do not keep step.

    Groups of one seed are equal work, prompt by prompt, but no answer and no prompt's beginning is equal, so that one
    group's run leaves nothing in a cache for another's. `long`: tokens of every tenth prompt, with an answer of one.
    """
    noise, own = random.Random(seed), random.Random(f"{seed} {group}")
    jobs = []
    for at in range(count):
        prompt, answer = noise.choice(prompts), noise.randint(max_tokens // 2, max_tokens * 3 // 2)
        if long and at % 10 == 5:
            jobs.append(Job(random_prompt(long, own), at, 1))
        else:
            jobs.append(Job((*random_prompt(OWN_TOKENS, own), *prompt[OWN_TOKENS:]), own.randrange(1 << 30), answer))
    return jobs


def random_prompt(length: int, noise: random.Random) -> Prompt:
    return tuple(noise.randrange(100, 500) for _ in range(length))  # ids that every vocabulary has


def alone(engine: Engine, jobs: Sequence[Job], mode: str, clients: int) -> Run:
    """Step the engine in this process, with `clients` requests at once."""
    run, left, serial = Run(), iter(jobs), itertools.count()
    open_requests: dict[str, tuple[Job, Answer]] = {}

    def add() -> None:
        job = run.take(left)
        if job is not None:
            request_id = f"alone-{next(serial)}"
            open_requests[request_id] = job, Answer(time.perf_counter(), 200)
            engine.add_request(request_id, list(job.prompt), job.params(mode))

    for _ in range(clients):
        add()
    while open_requests:
        result, now = engine.step(), time.perf_counter()
        ended = set(result.ended)
        for at, (sequence, tokens) in enumerate(zip(result.sequences, result.tokens, strict=True)):
            _, answer = open_requests[sequence.request_id]
            if tokens:
                answer.tokens += tokens
                answer.arrivals.append((now, len(tokens)))
            if at in ended:
                answer.finish_reason, answer.error, answer.ended = sequence.finish_reason, sequence.error, now
                run.answers.append(open_requests.pop(sequence.request_id))
                add()
    return run


def over_http(host: str, port: int, **extra: Any) -> Send:
    body = {"stream": True, "return_token_ids": True, **extra}
    return lambda job: ask(host, port, {"prompt": job.prompt, **job.options(), **body})


async def served(jobs: Sequence[Job], clients: int, send: Send) -> Run:
    run, left = Run(), iter(jobs)

    async def client() -> None:
        while (job := run.take(left)) is not None:
            run.answers.append((job, await send(job)))

    await asyncio.gather(*(client() for _ in range(clients)))
    return run


def compare(run: Run, reference: Run) -> Counter[str]:
    """Count requests, errors and wrong answers of equal jobs."""
    right = {job: answer.tokens for job, answer in reference.answers}
    assert set(right) == {job for job, _ in run.answers}
    errors = sum(answer.error is not None for _, answer in run.answers)
    wrong = sum(answer.error is None and answer.tokens != right[job] for job, answer in run.answers)
    return Counter(requests=len(run.answers), errors=errors, wrong=wrong)


def percentiles(values: list[float]) -> dict[str, float]:
    ordered = sorted(values) or [0.0]
    return {f"p{share}": ordered[min(share * len(ordered) // 100, len(ordered) - 1)] for share in (50, 99)}


def latencies(runs: Sequence[Run]) -> dict[str, Any]:
    """Return seconds; answers of one token, which long prompts have, are left out."""
    done = [answer for run in runs for job, answer in run.answers if answer.arrivals and job.max_tokens > 1]
    gaps = [late - early for answer in done for (early, _), (late, _) in itertools.pairwise(answer.arrivals)]
    return {
        "ttft": percentiles([answer.arrivals[0][0] - answer.sent for answer in done]),
        "inter_token": percentiles(gaps),
    }


def show(name: str, row: dict[str, Any]) -> None:
    parts = {key: (1e3 * row[key]["p50"], 1e3 * row[key]["p99"]) for key in ("ttft", "inter_token")}
    times = " ".join(f"{key} {p50:.0f}/{p99:.0f}" for key, (p50, p99) in parts.items())
    counts = {key: row[key] for key in ("requests", "errors", "wrong") if key in row}
    print(f"{name:20} {row['tokens_per_s']:8.1f} tokens/s, p50/p99 ms: {times} {counts}", flush=True)
