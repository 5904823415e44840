"""What serve.py and serve_queue.py share: jobs, clients that send them, the engine alone on the same jobs, figures."""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from serve_client import Answer, Server, ask, percentiles

from paceline import SamplingParams
from paceline.config import NONE
from paceline.engine.engine import Engine

TEMPERATURE = 0.8
OWN_TOKENS = 3  # that a prompt begins with
ENDLESS = SamplingParams(max_tokens=None, ignore_eos=True, temperature=TEMPERATURE, seed=1, speculation=NONE).resolve(
    {}
)
Prompt = tuple[int, ...]


@dataclass(frozen=True)
class Job:
    """Its seed is its own: no drafter of an engine has seen its answer before. So is its length, whatever it says."""

    prompt: Prompt
    seed: int
    max_tokens: int

    def given(self, mode: str) -> dict[str, Any]:
        return {**self.wish(), "speculation": mode}

    def wish(self) -> dict[str, Any]:
        """As any server understands it. Answers that end by themselves make arms of the same prompts unequal work."""
        length = {"max_tokens": self.max_tokens, "ignore_eos": True}
        return {**length, "seed": self.seed, "temperature": TEMPERATURE}

    def params(self, mode: str) -> SamplingParams:
        return SamplingParams(**self.given(mode)).resolve({})


Send = Callable[[Job], Awaitable[Answer]]


@dataclass
class Run:
    """So many clients that sent jobs until there were none."""

    answers: list[tuple[Job, Answer]] = field(default_factory=list)
    began: float = field(default_factory=time.perf_counter)
    busy_until: float = 0.0  # when a client first found no job left

    @property
    def tokens(self) -> int:
        """While all clients had work."""
        return sum(count for _, answer in self.answers for at, count in answer.arrivals if at <= self.busy_until)

    @property
    def rate(self) -> float:
        """Tokens per second, while all clients had work."""
        return self.tokens / (self.busy_until - self.began)

    def take(self, jobs: Iterator[Job]) -> Job | None:
        job = next(jobs, None)
        if job is None and not self.busy_until:
            self.busy_until = time.perf_counter()
        return job


def make_jobs(
    prompts: Sequence[Prompt], count: int, max_tokens: int, seed: int, *, group: int = 0, long: int = 0
) -> list[Job]:
    """The same for the same seed and group; answers differ in length, so that clients do not keep step.

    Groups of one seed are the same work, prompt by prompt: lengths are equal, but no answer and no prompt's beginning,
    so that one group's run leaves nothing in a cache for another's. `long`: every tenth has a prompt of so many tokens,
    and one token of answer.
    """
    noise, own = random.Random(seed), random.Random(f"{seed} {group}")
    lengths = max_tokens // 2, max_tokens * 3 // 2
    jobs = []
    for at in range(count):
        prompt, answer = noise.choice(prompts), noise.randint(*lengths)
        if long and at % 10 == 5:
            jobs.append(Job(random_prompt(long, own), at, 1))
        else:
            jobs.append(Job((*random_prompt(OWN_TOKENS, own), *prompt[OWN_TOKENS:]), own.randrange(1 << 30), answer))
    return jobs


def random_prompt(length: int, noise: random.Random) -> Prompt:
    """That no cache holds; ids that every vocabulary has."""
    return tuple(noise.randrange(100, 500) for _ in range(length))


def alone(engine: Engine, jobs: Sequence[Job], mode: str, clients: int) -> Run:
    """The engine stepped in this process, without queue, HTTP or text, with as many requests at once."""
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
        outputs = engine.step()
        now = time.perf_counter()
        for at, sequence in enumerate(outputs.sequences):
            output, (_, answer) = outputs[at], open_requests[sequence.request_id]
            if output.tokens:
                answer.tokens += output.tokens
                answer.arrivals.append((now, len(output.tokens)))
            if output.finished:
                answer.finish_reason, answer.error, answer.ended = sequence.finish_reason, sequence.error, now
                run.answers.append(open_requests.pop(sequence.request_id))
                add()
    return run


def over_http(server: Server, mode: str) -> Send:
    extra = {"stream": True, "return_token_ids": True}
    return lambda job: ask(server.host, server.port, {"prompt": job.prompt, **job.given(mode), **extra})


async def served(jobs: Sequence[Job], clients: int, send: Send, run: Run | None = None) -> Run:
    """`run`: where it is noted."""
    run, left = Run() if run is None else run, iter(jobs)

    async def client() -> None:
        while (job := run.take(left)) is not None:
            run.answers.append((job, await send(job)))

    await asyncio.gather(*(client() for _ in range(clients)))
    return run


def compare(found: Run, wanted: Run) -> Counter[str]:
    """Answers of the same jobs by token: requests, errors, wrong."""
    right = {job: answer.tokens for job, answer in wanted.answers}
    assert set(right) == {job for job, _ in found.answers}
    errors = sum(answer.error is not None for _, answer in found.answers)
    wrong = sum(answer.error is None and answer.tokens != right[job] for job, answer in found.answers)
    return Counter(requests=len(found.answers), errors=errors, wrong=wrong)


def latencies(runs: Sequence[Run]) -> dict[str, Any]:
    """Seconds; answers of one token, which long prompts have, are left out."""
    done = [answer for run in runs for job, answer in run.answers if answer.arrivals and job.max_tokens > 1]
    gaps = [late - early for answer in done for (early, _), (late, _) in itertools.pairwise(answer.arrivals)]
    return {
        "ttft": percentiles([answer.arrivals[0][0] - answer.sent for answer in done]),
        "inter_token": percentiles(gaps),
        "request": percentiles([answer.ended - answer.sent for answer in done]),
    }


def full_pass_s(engine: Engine, length: int, rounds: int = 5) -> float:
    """Seconds of the longest pass that reads a part of such a prompt, which is the last full one: the longest time
    between two tokens of one sequence that decodes beside it. (A step that samples nothing waits for no device.)"""
    noise, longest = random.Random(7), []
    reads = SamplingParams(max_tokens=1, temperature=0, speculation=NONE).resolve({})
    for at in range(rounds):
        (beside,) = engine.add_request(f"beside-{at}", list(random_prompt(8, noise)), ENDLESS)
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
    """Seconds of a step in which so many sequences decode."""
    noise, times = random.Random(8), []
    for at in range(clients):
        (last,) = engine.add_request(f"plain-{at}", list(random_prompt(8, noise)), ENDLESS)
    while len(last.tokens) < 64:
        engine.step()
        times.append(time.perf_counter())
    for at in range(clients):
        engine.cancel(f"plain-{at}")
    return statistics.median(late - early for early, late in itertools.pairwise(times))


def show_head(clients: int, what: str = "") -> None:
    print(
        f"\n{clients} clients{what}\n{'':16}  tokens/s requests errors  wrong"
        f"  TTFT p50/p99 ms   inter-token ms    request ms",
        flush=True,
    )


def show_line(name: str, one: dict[str, Any]) -> None:
    times = [f"{1e3 * (one[key][p] or 0):8.1f}" for key in ("ttft", "inter_token", "request") for p in ("p50", "p99")]
    counts = [f"{one.get(key, '-'):>7}" for key in ("requests", "errors", "wrong")]
    print(f"{name:16}{one['tokens_per_s']:10.1f} {''.join(counts)} {' '.join(times)}", flush=True)


def show_ratio(name: str, one: dict[str, float]) -> None:
    print(f"{name}: {one['median']:.3f} [{one['low']:.3f}, {one['high']:.3f}]", flush=True)
