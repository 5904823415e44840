"""The server against its engine alone: tokens per second, latencies, and every token checked.

    python benchmarks/serve.py                                         # smollm2 on two cores, 1, 4, 16 and 64 clients
    python benchmarks/serve.py --levels 1 4 --seconds 5 --rounds 1     # a short one
    python benchmarks/serve.py --no-http --device cuda --levels 1 8 32 128 --model DIR
    python benchmarks/serve.py --peer http://127.0.0.1:8000 --peer-model NAME    # another server on the same load

Each of so many clients sends its next request when the last one is answered, for a bounded time; what is open then is
answered too, and is checked, but is not counted. The engine alone is the same engine in this process, stepped without
queue, HTTP or text, with as many requests at once. Both run with `auto` and with speculation off, one after the other
in an order drawn anew each round. Every request has a seed of its own, so that no drafter has seen its answer, and must
have the tokens of plain decoding offline. `--long N` mixes in long prompts: their effect on inter-token times is
seen beside the time of a full pass. `--no-http` puts the engine's process and its queue in the server's place, where
FastAPI is not installed. Run it on an idle machine: the engine's process has a session of its own, and Linux divides
cores among sessions first, so that beside other work the server may look faster than its engine.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import itertools
import math
import random
import statistics
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any

from common import finish, ratio, timed
from serve_client import Answer, Server, ask, percentiles

from paceline import SamplingParams
from paceline.bench.prompts import Prompt, from_file, shipped
from paceline.build import build, load
from paceline.config import AUTO, NONE, EngineConfig, SpeculationConfig
from paceline.engine.engine import Engine

MODES = (AUTO, NONE)
TEMPERATURE = 0.8


@dataclass(frozen=True)
class Job:
    """Its seed is its own: no drafter has seen its answer before."""

    prompt: tuple[int, ...]
    seed: int
    max_tokens: int

    def given(self, mode: str) -> dict[str, Any]:
        return {"max_tokens": self.max_tokens, "seed": self.seed, "temperature": TEMPERATURE, "speculation": mode}

    def params(self, mode: str) -> SamplingParams:
        return SamplingParams(**self.given(mode)).resolve({})


Seen = list[tuple[Job, Answer]]
Send = Callable[[Job], Awaitable[Answer]]


class Load:
    """Requests without end: the same prompts in the same order for all that are compared, with seeds of their own."""

    def __init__(self, prompts: list[list[int]], max_tokens: int, long: int) -> None:
        """`long`: every tenth request has a prompt of so many tokens, new ones, and one token of answer."""
        self._prompts, self._max_tokens, self._long = [tuple(each) for each in prompts], max_tokens, long
        self._seeds = itertools.count()

    def jobs(self, turn: int) -> Iterator[Job]:
        noise = random.Random(turn)
        while True:
            for prompt in noise.sample(self._prompts, len(self._prompts)):
                yield Job(prompt, next(self._seeds), self._max_tokens)
                if self._long and noise.random() < 1 / 9:
                    yield Job(random_prompt(self._long), next(self._seeds), 1)


def random_prompt(length: int, noise: random.Random = random.Random(7)) -> tuple[int, ...]:  # noqa: B008
    """That no cache holds."""
    return tuple(noise.randrange(100, 10_000) for _ in range(length))


def full_pass_s(engine: Engine, rounds: int = 5) -> float:
    """Seconds of a step that reads as many prompt tokens as a pass takes."""
    budget, times = engine.config.max_num_batched_tokens, []
    for at in range(rounds):
        params = SamplingParams(max_tokens=1, temperature=0).resolve({})
        engine.add_request(f"full-{at}", list(random_prompt(budget)), params)
        times.append(timed(lambda: [engine.step() for _ in iter(lambda: engine.has_work, False)]))
    return statistics.median(times[1:])


def alone(engine: Engine, jobs: Iterator[Job], mode: str, clients: int, seconds: float = math.inf) -> Seen:
    """The engine stepped in this process, with so many requests at once, new ones within that time."""
    until, seen, serial = time.perf_counter() + seconds, [], itertools.count()
    open_requests: dict[str, tuple[Job, Answer]] = {}

    def add() -> None:
        job = next(jobs, None) if time.perf_counter() < until else None
        if job is not None:
            request_id = f"alone-{next(serial)}"
            open_requests[request_id] = job, Answer(time.perf_counter(), 200)
            engine.add_request(request_id, list(job.prompt), job.params(mode))

    for _ in range(clients):
        add()
    while open_requests:
        outputs = engine.step()
        now = time.perf_counter()
        for at, sequence in enumerate(outputs.sequences):
            output, (_, answer) = outputs[at], open_requests[sequence.request_id]
            if output.tokens:
                answer.tokens += output.tokens
                answer.arrivals.append((now, len(output.tokens)))
            if output.finished:
                answer.finish_reason, answer.error, answer.ended = sequence.finish_reason, sequence.error, now
                seen.append(open_requests.pop(sequence.request_id))
                add()
    return seen


def check(plain: Engine, seen: Seen) -> dict[str, int]:
    """Against plain decoding offline, by an engine that only decodes plainly."""
    jobs = [job for job, _ in seen]
    wanted = {job: answer.tokens for job, answer in alone(plain, iter(jobs), NONE, plain.config.max_num_seqs)}
    found = Counter(
        "errors" if answer.error else "right" if answer.tokens == wanted[job] else "wrong" for job, answer in seen
    )
    return {"requests": len(seen), "errors": found["errors"], "wrong": found["wrong"]}


async def clients_of(jobs: Iterator[Job], clients: int, seconds: float, send: Send) -> Seen:
    seen: Seen = []
    until = time.perf_counter() + seconds

    async def client() -> None:
        while time.perf_counter() < until:
            job = next(jobs)
            seen.append((job, await send(job)))

    await asyncio.gather(*(client() for _ in range(clients)))
    return seen


def over_http(server: Server, mode: str) -> Send:
    extra = {"stream": True, "return_token_ids": True}
    return lambda job: ask(server.host, server.port, {"prompt": job.prompt, **job.given(mode), **extra})


def over_peer(url: str, model: str) -> Send:
    host, port = url.removeprefix("http://").rstrip("/").split(":")
    extra = {"stream": True, "return_token_ids": True, "model": model, "temperature": TEMPERATURE}
    return lambda job: ask(
        host, int(port), {"prompt": job.prompt, "seed": job.seed, "max_tokens": job.max_tokens, **extra}
    )


def over_queue(client: Any, mode: str) -> Send:
    """Through the engine's process and its queue, without HTTP and text."""
    from paceline.server import messages as m
    from paceline.server.engine_client import new_request_id

    async def send(job: Job) -> Answer:
        answer = Answer(time.perf_counter(), 200)
        stream = await client.submit(
            list(job.prompt), job.params(mode), streamed=True, request_id=new_request_id("bench")
        )
        while True:
            match await stream.get():
                case m.Delta(tokens=tokens, finish_reason=reason):
                    answer.tokens += tokens
                    answer.arrivals.append((time.perf_counter(), len(tokens)))
                    answer.finish_reason = reason or answer.finish_reason
                case m.Ended():
                    break
                case m.Failed(error=error):
                    answer.error = error
                    break
        answer.ended = time.perf_counter()
        return answer

    return send


def rate(seen: Seen, seconds: float) -> float:
    """Tokens per second, while the clients send."""
    until = min(answer.sent for _, answer in seen) + seconds
    return sum(tokens for _, answer in seen for at, tokens in answer.arrivals if at <= until) / seconds


def latencies(answers: list[Answer]) -> dict[str, Any]:
    done = [answer for answer in answers if answer.arrivals]
    return {
        "ttft": percentiles([answer.arrivals[0][0] - answer.sent for answer in done]),
        "inter_token": percentiles(
            [late - early for answer in done for (early, _), (late, _) in itertools.pairwise(answer.arrivals)]
        ),
        "request": percentiles([answer.ended - answer.sent for answer in done]),
    }


def measure(
    args: argparse.Namespace, engine: Engine, plain: Engine, load: Load, served: Callable[[str], Send]
) -> dict[str, Any]:
    loop = asyncio.get_event_loop()
    senders = {f"server {mode}": served(mode) for mode in MODES}
    if args.peer:
        senders["peer"] = over_peer(args.peer, args.peer_model)

    def run(arm: str, clients: int, turn: int) -> Seen:
        jobs = load.jobs(turn)
        if arm in senders:
            return loop.run_until_complete(clients_of(jobs, clients, args.seconds, senders[arm]))
        return alone(engine, jobs, arm.removeprefix("engine "), clients, args.seconds)

    arms = [*senders, *(f"engine {mode}" for mode in MODES)]
    noise, result = random.Random(0), {}
    for clients in args.levels:
        rates: dict[str, list[float]] = {arm: [] for arm in arms}
        counted: dict[str, Seen] = {arm: [] for arm in arms}
        warm: dict[str, Seen] = {arm: [] for arm in arms}
        for turn in range(args.warm_up + args.rounds):
            for arm in noise.sample(arms, len(arms)):
                seen = run(arm, clients, turn)
                if turn < args.warm_up:
                    warm[arm] += seen
                else:
                    counted[arm] += seen
                    rates[arm].append(rate(seen, args.seconds))
        result[str(clients)] = found = {
            arm: {
                "tokens_per_s": sum(rates[arm]) / len(rates[arm]),
                **check(plain, warm[arm] + counted[arm]),
                **latencies([answer for _, answer in counted[arm]]),
            }
            for arm in arms
        }
        for mode in MODES:
            found[f"server / engine, {mode}"] = ratio(rates[f"server {mode}"], rates[f"engine {mode}"])
        for place in ("server", "engine"):
            found[f"{place}, {AUTO} / {NONE}"] = ratio(rates[f"{place} {AUTO}"], rates[f"{place} {NONE}"])
        show(clients, found, arms)
    return result


def show(clients: int, found: dict[str, Any], arms: list[str]) -> None:
    print(
        f"\n{clients} clients      tokens/s  requests  errors  wrong   TTFT p50/p99 ms  inter-token    request",
        flush=True,
    )
    for arm in arms:
        one = found[arm]
        times = [
            f"{1e3 * (one[key][p] or 0):7.1f}" for key in ("ttft", "inter_token", "request") for p in ("p50", "p99")
        ]
        wrong = "-" if arm == "peer" else one["wrong"]
        print(f"{arm:16}{one['tokens_per_s']:10.1f}{one['requests']:10}{one['errors']:8}{wrong:>7} {' '.join(times)}")
    for name, each in found.items():
        if name not in arms:
            print(f"{name}: {each['median']:.3f} [{each['low']:.3f}, {each['high']:.3f}]", flush=True)


@contextlib.contextmanager
def server_of(args: argparse.Namespace, config: EngineConfig) -> Iterator[Callable[[str], Send]]:
    if not args.no_http:
        flags = ("--max-num-seqs", config.max_num_seqs, "--max-num-batched-tokens", config.max_num_batched_tokens)
        flags += ("--kv-cache-bytes", config.kv_cache_bytes)
        more = ("--device", args.device, "--method", AUTO, "--max-model-len", args.max_model_len)
        server = Server(args.model, *map(str, flags + more))
        try:
            yield lambda mode: over_http(server, mode)
        finally:
            server.stop()
        return
    from paceline.server.engine_client import EngineClient, EngineSettings

    loop = asyncio.get_event_loop()
    client = EngineClient(EngineSettings(args.model, {"device": args.device}, config, SpeculationConfig(method=AUTO)))
    loop.run_until_complete(client.start())
    try:
        yield lambda mode: over_queue(client, mode)
    finally:
        loop.run_until_complete(client.close())


def missing(args: argparse.Namespace) -> list[str]:
    needed = ["zmq", "msgspec"] if args.no_http else ["zmq", "msgspec", "fastapi", "uvicorn", "prometheus_client"]
    return [name for name in needed if importlib.util.find_spec(name) is None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--levels", type=int, nargs="+", default=[1, 4, 16, 64], help="clients")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each level, arm and round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warm-up", type=int, default=1, help="rounds that are checked, and not timed")
    parser.add_argument("--num-prompts", type=int, default=128, help="different ones")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--budget", type=int, default=512, help="tokens of a pass")
    parser.add_argument("--cache-gib", type=float, default=2, help="of each of the three engines")
    parser.add_argument("--long", type=int, default=0, help="every tenth request has a prompt of so many tokens")
    parser.add_argument("--prompts", help="a file of prompts; else the package's own")
    parser.add_argument("--no-http", action="store_true", help="the engine's process and its queue, without HTTP")
    parser.add_argument("--peer", help="URL of another server")
    parser.add_argument("--peer-model", default="", help="the model's name there")
    args = parser.parse_args()
    if absent := missing(args):
        raise SystemExit(f"not installed here: {', '.join(absent)}; nothing was measured")
    asyncio.set_event_loop(asyncio.new_event_loop())
    config = EngineConfig(
        max_num_seqs=max(64, *args.levels),
        max_num_batched_tokens=max(args.budget, *args.levels),
        max_model_len=args.max_model_len,
        kv_cache_bytes=int(args.cache_gib * 2**30),
    )
    with server_of(args, config) as served:
        target = load(args.model, device=args.device)
        engine = build(target, config, SpeculationConfig(method=AUTO)).engine
        plain = build(target, config, SpeculationConfig(method=NONE), remember=False).engine
        made = Load(chosen(args, target.loaded.tokenizer), args.max_tokens, args.long)
        full = full_pass_s(plain) if args.max_model_len > config.max_num_batched_tokens else None
        print(f"a full pass of {config.max_num_batched_tokens} tokens: {full} s")
        levels = measure(args, engine, plain, made, served)
    settings = {
        name: getattr(args, name)
        for name in ("model", "device", "seconds", "rounds", "max_tokens", "budget", "long", "no_http")
    }
    finish("serve", {"levels": levels, "full_pass_s": full, **settings})


def chosen(args: argparse.Namespace, tokenizer: Any) -> list[list[int]]:
    found: list[Prompt] = from_file(args.prompts) if args.prompts else shipped()
    room = args.max_model_len - args.max_tokens - 1
    encoded = [tokenizer.apply_chat_template(prompt.messages([])) for prompt in found]
    fitting = [prompt for prompt in encoded if len(prompt) <= room]
    return random.Random(0).sample(fitting, min(args.num_prompts, len(fitting)))


if __name__ == "__main__":
    main()
