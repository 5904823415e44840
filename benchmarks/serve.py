"""The server against its engine alone, `auto` against plain, other servers beside them; every answer is compared.

    python -m benchmarks.serve                           # smollm2 on two cores, 1, 4, 16, 64 clients, under 6 minutes
    python -m benchmarks.serve --vllm VENV               # with vLLM's server on an equal load, under 12
    python -m benchmarks.serve --peer http://127.0.0.1:8000 --peer-model NAME     # any server that is running
    python -m benchmarks.serve cost --blocks 4 --minutes 6       # processor time, `auto` against plain
    python -m benchmarks.serve queue --device cuda               # the engine's process and queue without HTTP
    python -m benchmarks.serve circle                            # capture, train, reload under traffic

Each client streams its next request when the last one is answered, until there are none. The engine alone is an equal
engine in this process, stepped without queue, HTTP or text, with as many requests at once. Arms run one after the other
in an order drawn anew each round; a rate counts tokens while all clients have work. Every request has a seed, and none
is sent to an engine twice; the two arms of one engine have prompts and answers of equal lengths. The server's answers
with `auto` must have the tokens of the engine's plain ones, and the other way round. Clients share the machine's cores.

`queue` serves the yardstick from random weights: for machines without FastAPI. With `--long-clients` every tenth prompt
is long, and times between deliveries stand beside a full pass and a plain step.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import importlib.util
import itertools
import json
import os
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.harness import expanded_folder, finish, ratio, shown
from paceline import LLM, SamplingParams
from paceline.config import AUTO, NONE, EngineConfig, SpeculationConfig
from paceline.engine.engine import Engine
from paceline.text.tokenizer import Tokenizer

TEMPERATURE = 0.8
OWN_TOKENS = 3  # a prompt's first tokens, which no other prompt has
MODES = (AUTO, NONE)
PARTNER = {f"server {AUTO}": f"engine {NONE}", f"server {NONE}": f"engine {AUTO}"}  # arms with equal jobs
AGAIN = f"engine {NONE} again"
NEEDED = ("msgspec", "fastapi", "uvicorn", "prometheus_client")
VLLM_START_S = 240.0
ORDERS = (AUTO, NONE, NONE, AUTO), (NONE, AUTO, AUTO, NONE)  # of `cost`: a drift of the machine falls on both alike
SUBJECT = "PACELINE_BENCH_SUBJECT"  # names the model that the engine's process of `queue` makes
CIRCLE_PROMPTS = tuple(f"Tell me something about the number {number}." for number in range(24))
Prompt = tuple[int, ...]


# -- a server, and a client that costs little of two cores


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

    def processor_s(self) -> float:
        """Return the processor time of the engine's process."""
        command = ["pgrep", "-P", str(self.process.pid), "-f", "paceline.server.process.worker"]
        pid = int(subprocess.check_output(command))
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

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
        "request": percentiles([answer.ended - answer.sent for answer in done]),
    }


def show(name: str, row: dict[str, Any]) -> None:
    parts = {key: (1e3 * row[key]["p50"], 1e3 * row[key]["p99"]) for key in ("ttft", "inter_token")}
    times = " ".join(f"{key} {p50:.0f}/{p99:.0f}" for key, (p50, p99) in parts.items())
    counts = {key: row[key] for key in ("requests", "errors", "wrong") if key in row}
    print(f"{name:20} {row['tokens_per_s']:8.1f} tokens/s, p50/p99 ms: {times} {counts}", flush=True)


def prompts_for(tokenizer: Tokenizer, most: int) -> list[Prompt]:
    from paceline.bench.prompts import shipped

    encoded = [tuple(tokenizer.apply_chat_template(prompt.messages([]))) for prompt in shipped()]
    return [prompt for prompt in encoded if len(prompt) <= most]


# -- levels: the server against its engine


def levels(args: argparse.Namespace) -> None:
    from paceline.build import build, load
    from paceline.models.load.hub import resolve
    from paceline.models.load.store import cache_home

    if absent := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        raise SystemExit(f"not installed here: {', '.join(absent)}; nothing was measured")
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
    if args.vllm:
        folder = expanded_folder(resolve(args.model), cache_home() / "expanded")
        with vllm_server(args.vllm, folder) as url:
            result["vllm"] = measure_peer(args, url, "peer", prompts)
    finish("serve", {**result, "model": args.model, "rounds": args.rounds, "max_tokens": args.max_tokens})


def measure_levels(args: argparse.Namespace, engine: Engine, server: Server, prompts: list[Prompt]) -> dict[str, Any]:
    """Measure every level; one ends before its last round if its share of `--minutes` is over."""
    arms = [*PARTNER, *PARTNER.values(), *([AGAIN] if args.again else [])]

    def run(arm: str, clients: int, turn: int) -> Run:
        # Partners have equal jobs; the two arms of one engine have equal work, but other answers.
        group = 2 if arm == AGAIN else arm.endswith(AUTO) == arm.startswith("server")
        jobs = make_jobs(prompts, clients * 3 // 2 + 6, args.max_tokens, clients * 100 + turn, group=group)
        place, mode = arm.split()[:2]
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
    if AGAIN in runs:
        ratios[f"engine, {NONE} / {NONE}"] = (AGAIN, f"engine {NONE}")
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


@contextlib.contextmanager
def vllm_server(venv: Path, model: Path) -> Iterator[str]:
    """Run vLLM's own server in fp32 from a virtual environment."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [venv / "bin" / "python", "-m", "vllm.entrypoints.openai.api_server"]  # its CPU wheel has no `vllm serve`
    command += ["--model", model, "--served-model-name", "peer", "--port", port]
    command += ["--dtype", "float32", "--max-model-len", 2048, "--max-num-seqs", 64]
    settings = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
    environment = {**os.environ, **settings, "PATH": f"{venv / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [*map(str, command)], stdout=log, stderr=log, env=environment, start_new_session=True
        )
        try:
            deadline = time.monotonic() + VLLM_START_S
            while not _healthy(f"http://127.0.0.1:{port}"):
                if process.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    raise SystemExit(f"vLLM's server did not start:\n{log.read().decode(errors='replace')[-3000:]}")
                time.sleep(0.5)
            yield f"http://127.0.0.1:{port}"
        finally:
            os.killpg(process.pid, signal.SIGKILL)  # it may be compiling, and its workers with it
            process.wait()


def _healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


# -- cost: `auto` with many clients, by processor time


def cost(args: argparse.Namespace) -> None:
    """Measure blocks of `auto`, plain, plain, `auto`, and the other way round. Every client has two answers, whose
    lengths sum to the same for all, so that all have work until nearly the end. With one thread, which never waits for
    another, the processor time of the engine's process is its work whatever else the machine does."""
    from paceline.models.load.hub import resolve

    prompts = prompts_for(Tokenizer.from_path(resolve(args.model)), 1900)
    flags = ("--method", AUTO, "--max-model-len", 2048, "--kv-cache-bytes", 2 << 30, "--threads", args.threads)
    server, result = Server(args.model, *flags), {}
    try:
        for clients in args.levels:
            result[str(clients)] = cost_level(args, server, prompts, clients)
    finally:
        server.stop()
    finish("serve_cost", {"levels": result, "model": args.model, "threads": args.threads})


def cost_level(args: argparse.Namespace, server: Server, prompts: list[Prompt], clients: int) -> dict[str, Any]:
    until, longest = time.perf_counter() + 60 * args.minutes / len(args.levels), 0.0
    spent: dict[str, dict[str, list[float]]] = {unit: {AUTO: [], NONE: []} for unit in ("processor", "clock")}

    async def answered(pairs: list[list[Job]], mode: str) -> None:
        send = over_http(server.host, server.port, speculation=mode)

        async def client(jobs: list[Job]) -> None:
            for job in jobs:
                answer = await send(job)
                assert answer.error is None, answer.error
                assert len(answer.tokens) == job.max_tokens

        await asyncio.gather(*map(client, pairs))

    def run(mode: str, seed: int, group: int, most: int = clients) -> tuple[float, float]:
        jobs = make_jobs(prompts, 2 * clients, args.max_tokens, seed, group=group)
        pairs = [
            [first, replace(second, max_tokens=2 * args.max_tokens - first.max_tokens)]
            for first, second in zip(jobs[:clients], jobs[clients:], strict=True)
        ]
        began, before = time.perf_counter(), server.processor_s()
        asyncio.run(answered(pairs[:most], mode))
        return server.processor_s() - before, time.perf_counter() - began

    for mode in MODES:  # warm-up
        run(mode, 99, mode == AUTO, 6)
    for block in range(args.blocks):
        began = time.perf_counter()
        if block and began + longest > until:
            break
        runs = [(mode, *run(mode, block, group)) for group, mode in enumerate(ORDERS[block % 2])]
        for mode in MODES:
            for at, unit in enumerate(spent, start=1):
                spent[unit][mode].append(sum(each[at] for each in runs if each[0] == mode))
        longest = max(longest, time.perf_counter() - began)
    tokens = 2 * 2 * clients * args.max_tokens  # of a mode in a block
    result: dict[str, Any] = {"blocks": len(spent["clock"][AUTO])}
    for unit, times in spent.items():
        result[f"{unit}: ms a token"] = {mode: 1e3 * statistics.median(each) / tokens for mode, each in times.items()}
        result[f"{unit}: auto / none"] = ratio(times[NONE], times[AUTO])
        print(f"{clients} clients, {AUTO} / {NONE} by {unit}: {shown(result[f'{unit}: auto / none'], 3)}", flush=True)
    return result


# -- queue: the engine's process without HTTP


def target_of(device: str, tiny: bool) -> Any:
    """Return the yardstick from random weights, on which times do not depend; without a tokenizer."""
    import torch

    from benchmarks.gpu.subject import Subject
    from paceline.build import LoadedTarget
    from paceline.models.load.open_model import LoadedModel

    decoder = Subject("random", torch.device(device), tiny=tiny).yardstick
    tokenizer: Any = SimpleNamespace(encode=lambda *_, **__: [], token_text=str)
    return LoadedTarget(Path("yardstick"), LoadedModel(decoder.config, decoder, tokenizer, {}), None)


def be_worker() -> None:
    """Run the engine's process, with the yardstick in place of a model's folder."""
    from paceline import build
    from paceline.server.process import worker

    device, tiny = json.loads(os.environ[SUBJECT])
    worker.load = lambda model, **_: target_of(device, tiny)
    worker.build = functools.partial(build.build, remember=False)
    worker.main()


def over_queue(client: Any) -> Send:
    from paceline.engine.events import Delta, Ended, Failed
    from paceline.server.process.client import new_request_id

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
        row |= {"full_pass_s": full_pass_s(engine, long), "plain_step_s": plain_step_s(engine, clients)}
        print(f"full pass {1e3 * row['full_pass_s']:.2f} ms, plain step {1e3 * row['plain_step_s']:.2f} ms")
    return row


def endless() -> Any:
    return SamplingParams(max_tokens=None, ignore_eos=True, temperature=0, speculation=NONE).resolve({})


def full_pass_s(engine: Engine, length: int, rounds: int = 5) -> float:
    """Return seconds of the longest pass that reads a part of a long prompt: the longest time between two tokens of a
    sequence that decodes beside it."""
    noise, longest = random.Random(7), []
    reads = SamplingParams(max_tokens=1, temperature=0, speculation=NONE).resolve({})
    for at in range(rounds):
        (beside,) = engine.add_request(f"beside-{at}", list(random_prompt(8, noise)), endless())
        while len(beside.tokens) < 12:
            engine.step()
        (reading,) = engine.add_request(f"full-{at}", list(random_prompt(length, noise)), reads)
        times = [time.perf_counter()]
        while not reading.finished:
            engine.step()
            times.append(time.perf_counter())
        engine.cancel(f"beside-{at}")
        longest.append(max(late - early for early, late in itertools.pairwise(times)))
    return statistics.median(longest[1:])


def plain_step_s(engine: Engine, clients: int) -> float:
    """Return seconds of a step in which `clients` sequences decode."""
    noise, times = random.Random(8), []
    for at in range(clients):
        (last,) = engine.add_request(f"plain-{at}", list(random_prompt(8, noise)), endless())
    while len(last.tokens) < 64:
        engine.step()
        times.append(time.perf_counter())
    for at in range(clients):
        engine.cancel(f"plain-{at}")
    return statistics.median(late - early for early, late in itertools.pairwise(times))


async def measure_queue(args: argparse.Namespace) -> None:
    from paceline import build
    from paceline.server.process import engine_process
    from paceline.server.process.client import EngineClient
    from paceline.server.process.messages import EngineSettings

    os.environ[SUBJECT] = json.dumps([args.device, args.tiny])
    engine_process.WORKER = [sys.executable, "-m", "benchmarks.serve"]
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
    if SUBJECT in os.environ:
        be_worker()
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", default="levels", choices=("levels", "cost", "queue", "circle"))
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--levels", type=int, nargs="*", help="clients")
    parser.add_argument("--rounds", type=int, default=8, help="at most; --minutes may allow fewer")
    parser.add_argument("--minutes", type=float, default=4.5, help="of all rounds; one round is run anyway")
    parser.add_argument("--max-tokens", type=int, default=48, help="of an answer, on average")
    parser.add_argument("--again", action="store_true", help="measure the plain engine twice, to see what chance does")
    parser.add_argument("--vllm", type=Path, help="a virtual environment with vLLM, whose server is measured too")
    parser.add_argument("--peer", help="URL of another server that is running")
    parser.add_argument("--peer-model", default="", help="the model's name there")
    parser.add_argument("--blocks", type=int, default=4, help="of cost, at most")
    parser.add_argument("--threads", type=int, default=1, help="of the engine of cost")
    parser.add_argument("--device", default="cuda", help="of queue")
    parser.add_argument("--tiny", action="store_true", help="of queue: a small shape, to try the script")
    parser.add_argument("--tokens", type=int, default=2048, help="of queue: tokens of a pass")
    parser.add_argument("--long", type=int, default=4096, help="of queue: tokens of a long prompt")
    parser.add_argument("--long-clients", type=int, default=0, help="of queue: clients while long prompts arrive")
    parser.add_argument("--method", default="medusa", help="of circle")
    parser.add_argument("--steps", type=int, default=8, help="of each training of circle")
    parser.add_argument("--requests", type=int, default=32, help="of circle: before the training, after the reload")
    args = parser.parse_args()
    if args.levels is None:
        args.levels = {"cost": [16], "queue": [1, 8, 32, 128]}.get(args.what, [1, 4, 16, 64])
    if args.what == "queue":
        args.rounds = min(args.rounds, 3)
        asyncio.run(measure_queue(args))
    else:
        {"levels": levels, "cost": cost, "circle": circle}[args.what](args)


if __name__ == "__main__":
    main()
