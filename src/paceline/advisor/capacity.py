"""How many machines like this one serve a given traffic, with and without speculation.

Two engines over the same weights, one with drafters and one without, are measured in turn: the highest rate that the
engine keeps up with, then latencies while requests arrive at random (Poisson) at shares of it. The greatest rate
within the limits counts; it is narrowed down by halving. The engine is measured alone, without HTTP.
"""

from __future__ import annotations

import itertools
import math
import os
import random
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch

from paceline.bench.intervals import spread
from paceline.bench.results import Spread
from paceline.build import LoadedTarget, make_drafters, make_engine, make_policy
from paceline.config import MAX_K, EngineConfig, SpeculationConfig
from paceline.drafters import Drafter
from paceline.engine.engine import Engine
from paceline.errors import InvalidParameter
from paceline.models.kv_cache import KVCache
from paceline.platform.memory import cache_bytes
from paceline.sampling_params import SamplingParams

SHARES = (0.3, 0.6, 0.8, 0.95)  # shares of the rate that the engine keeps up with
HALVINGS = 2
MIN_REQUESTS, MAX_REQUESTS = 12, 400  # requests of one point of the curve
MEANINGS = {
    "rate": "requests a second",
    "prompt": "tokens of a prompt",
    "answer": "tokens of an answer",
    "ttft": "seconds to the first token, at most, in 99 of 100 requests",
    "inter_token": "seconds between deliveries of tokens, at most, in 99 of 100",
}


@dataclass(frozen=True, kw_only=True)
class Traffic:
    rate: float
    prompt: int
    answer: int
    ttft: float = math.inf
    inter_token: float = math.inf

    @classmethod
    def parse(cls, text: str) -> Traffic:
        """Read `rate=2,prompt=200,answer=100,ttft=1,inter_token=0.1`; the two limits may be left out."""
        values: dict[str, Any] = {}
        for item in text.split(","):
            name, _, number = item.strip().partition("=")
            name = name.replace("-", "_")
            if name not in MEANINGS or name in values:
                known = ", ".join(f"{each} ({meaning})" for each, meaning in MEANINGS.items())
                raise InvalidParameter("traffic", f"{item.strip()!r} is not NAME=VALUE, once, of {known}")
            try:
                values[name] = float(number)
            except ValueError:
                values[name] = math.nan
            if not 0 < values[name] < math.inf:
                raise InvalidParameter("traffic", f"{name} must be a number above 0, got {number!r}")
        for each in fields(cls):
            if each.default is MISSING and each.name not in values:
                raise InvalidParameter("traffic", f"{each.name} is missing: {MEANINGS[each.name]}")
        for name in ("prompt", "answer"):
            if values[name] != int(values[name]):
                raise InvalidParameter("traffic", f"{name} must be a whole number, got {values[name]:g}")
            values[name] = int(values[name])
        return cls(**values)


@dataclass(frozen=True, kw_only=True)
class LoadPoint:
    """Latencies at one rate."""

    rate: float
    requests: int
    finished: bool  # all of them, in time
    ttft_s: Spread | None
    inter_token_s: Spread | None  # None: every answer came at once

    def meets(self, traffic: Traffic) -> bool:
        limits = ((self.ttft_s, traffic.ttft), (self.inter_token_s, traffic.inter_token))
        return self.finished and all(seconds is None or seconds.p99 <= limit for seconds, limit in limits)


@dataclass
class LoadCurve:
    """The points of one setting; `saturated`: requests a second when a full batch comes at once."""

    saturated: float = 0.0
    points: list[LoadPoint] = field(default_factory=list)

    def within(self, traffic: Traffic) -> float:
        """Return the greatest rate up to which every point is within the limits; 0 where none is."""
        ordered = sorted(self.points, key=lambda point: point.rate)
        return max(
            (point.rate for point in itertools.takewhile(lambda point: point.meets(traffic), ordered)), default=0.0
        )

    def beyond(self, traffic: Traffic) -> float | None:
        """Return the smallest rate that is not within the limits."""
        return min((point.rate for point in self.points if not point.meets(traffic)), default=None)

    def next_rate(self, traffic: Traffic) -> float | None:
        """Return the rate between the two; None where nothing is left to narrow down."""
        beyond = self.beyond(traffic)
        return None if beyond is None else (self.within(traffic) + beyond) / 2


@dataclass(frozen=True, kw_only=True)
class CacheHolds:
    """Sequences of the traffic that the cache holds at once, with the drafters' memory and without."""

    plain: int
    drafting: int
    weight_bytes: int
    kv_bytes: int  # more per token of context


@dataclass
class Capacity:
    traffic: Traffic
    curves: dict[str, LoadCurve]
    cache_holds: CacheHolds | None = None
    price: float | None = None  # price of one machine for an hour

    def machines(self, label: str) -> int | None:
        """Return the machines that serve the traffic; None: one is too slow for the limits at any rate measured."""
        each = self.curves[label].within(self.traffic)
        return math.ceil(self.traffic.rate / each - 1e-9) if each else None

    def per_million(self, label: str) -> float | None:
        """Return the price of a million tokens of answers, with this traffic on that many machines."""
        machines = self.machines(label)
        if machines is None or self.price is None:
            return None
        return self.price * machines / (3600 * self.traffic.rate * self.traffic.answer) * 1e6

    def to_json(self) -> dict[str, Any]:
        curves = {
            label: {
                **asdict(curve),
                "within_limits": curve.within(self.traffic),
                "machines": self.machines(label),
                "price_per_million_tokens": self.per_million(label),
            }
            for label, curve in self.curves.items()
        }
        return {
            "traffic": {name: None if value == math.inf else value for name, value in asdict(self.traffic).items()},
            "curves": curves,
            "cache_holds": None if self.cache_holds is None else asdict(self.cache_holds),
            "price_per_hour": self.price,
        }


# -- measuring


class LoadDriver:
    """Sends requests of the traffic to an engine and follows their tokens."""

    def __init__(self, engine: Engine, prompts: Iterator[list[int]], traffic: Traffic, temperature: float) -> None:
        self._engine, self._prompts, self._traffic = engine, prompts, traffic
        self._temperature, self._serial = temperature, itertools.count()

    def saturate(self, requests: int) -> float:
        """Return the requests a second when all come at once, from the first prompt to the last token."""
        started = time.perf_counter()
        for _ in range(requests):
            self._add()
        while self._engine.has_work:
            self._engine.step()
        return requests / (time.perf_counter() - started)

    def point(self, rate: float, seconds: float) -> LoadPoint:
        count = min(max(round(rate * seconds), MIN_REQUESTS), MAX_REQUESTS)
        noise = random.Random(0)
        due = list(itertools.accumulate(noise.expovariate(rate) for _ in range(count)))
        arrived: dict[str, float] = {}
        last: dict[str, float] = {}
        first: list[float] = []
        between: list[float] = []
        started, sent, done = time.perf_counter(), 0, 0
        limit = started + due[-1] + max(2 * seconds, 10.0)
        while done < count and (now := time.perf_counter()) < limit:
            while sent < count and started + due[sent] <= now:
                arrived[self._add()] = started + due[sent]
                sent += 1
            if not self._engine.has_work:
                time.sleep(max(started + due[sent] - now, 0))
                continue
            result = self._engine.step()
            now = time.perf_counter()
            for at, sequence in enumerate(result.sequences):
                key = sequence.request_id
                if result.tokens[at]:
                    if key in last:
                        between.append(now - last[key])
                    else:
                        first.append(now - arrived[key])
                    last[key] = now
                done += at in result.ended
        self._clear()
        return LoadPoint(
            rate=rate, requests=count, finished=done == count, ttft_s=spread(first), inter_token_s=spread(between)
        )

    def _add(self) -> str:
        serial = next(self._serial)
        params = SamplingParams(
            max_tokens=self._traffic.answer,
            ignore_eos=True,
            temperature=self._temperature,
            seed=serial if self._temperature else None,
        ).resolve({})
        self._engine.add_request(f"traffic-{serial}", next(self._prompts), params)
        return f"traffic-{serial}"

    def _clear(self) -> None:
        scheduler = self._engine.scheduler
        for sequence in [*scheduler.running, *scheduler.waiting]:
            self._engine.cancel(sequence.request_id)


def prompts_of(texts: Sequence[Sequence[int]], length: int) -> Iterator[list[int]]:
    """Yield prompts without end: each text with others before it, cut at the front. No two are alike until every text
    had every other one before it."""
    for shift in itertools.count(1):
        for at, text in enumerate(texts):
            tokens = list(text)
            for back in itertools.count(shift):
                if len(tokens) >= length:
                    break
                tokens = [*texts[(at + back) % len(texts)], *tokens]
            yield tokens[-length:]


def measure(
    drivers: dict[str, LoadDriver],
    traffic: Traffic,
    *,
    at_once: int,
    seconds: float,
    on_progress: Callable[[float, float, str], None] = lambda done, total, what: None,
) -> dict[str, LoadCurve]:
    """`at_once`: requests that find the highest rate; `seconds`: of each point."""
    curves = {label: LoadCurve() for label in drivers}
    total = len(drivers) * (1 + len(SHARES) + HALVINGS)
    done = itertools.count(1)

    def add_point(label: str, rate: float) -> None:
        on_progress(next(done), total, f"{label}: {rate:.2f} requests a second")
        curves[label].points.append(drivers[label].point(rate, seconds))

    for label, driver in drivers.items():
        on_progress(next(done), total, f"{label}: as fast as it can")
        curves[label].saturated = driver.saturate(at_once)
    for share, label in itertools.product(SHARES, drivers):
        add_point(label, share * curves[label].saturated)
    for _, label in itertools.product(range(HALVINGS), drivers):
        if (rate := curves[label].next_rate(traffic)) is not None:
            add_point(label, rate)
    return curves


# -- the two engines


def build_pair(
    target: LoadedTarget, speculation: SpeculationConfig, traffic: Traffic, config: EngineConfig
) -> tuple[Engine, Engine, CacheHolds]:
    """Build an engine without drafters and one with them, and count the sequences that each one's cache holds.

    On a GPU the cache gets the memory that weights leave, so a drafter's weights cost sequences; on a CPU the cache has
    a size of its own, and only the drafter's K/V, which lie in it, do.
    """
    loaded, length = target.loaded, traffic.prompt + traffic.answer
    most, device = loaded.config.max_positions, loaded.decoder.device
    if length >= most:
        raise InvalidParameter("traffic", f"prompt and answer have {length} tokens, and the model's context is {most}")
    whole, before = cache_bytes(device, config.gpu_memory_fraction), used_bytes(device)
    drafters = make_drafters(loaded, speculation)
    weights = max(used_bytes(device) - before, 0)

    def block_bytes(drafters: Sequence[Drafter]) -> int:
        specs = (*loaded.decoder.kv_specs, *(spec for drafter in drafters for spec in drafter.kv_layers))
        return KVCache.bytes_per_block(specs, config.block_size, loaded.decoder.cache_dtype)

    plain_block, drafting_block = block_bytes([]), block_bytes(drafters)
    left = max(whole - weights, 0) if device.type == "cuda" else whole
    each = -(-length // config.block_size)  # blocks of a sequence
    holds = CacheHolds(
        plain=whole // (each * plain_block),
        drafting=left // (each * drafting_block),
        weight_bytes=weights,
        kv_bytes=(drafting_block - plain_block) // config.block_size,
    )
    needed = -(-(length + MAX_K + 1) // config.block_size) * config.max_num_seqs + 2
    fitting = left // (plain_block + drafting_block)  # both engines exist at once
    sized = replace(config, num_blocks=max(min(needed, fitting), 1), prefix_caching=False)
    plain = make_engine(loaded, sized, [], make_policy(loaded, SpeculationConfig()))
    return plain, make_engine(loaded, sized, drafters, make_policy(loaded, speculation)), holds


def used_bytes(device: torch.device) -> int:
    """Return the memory in use on the device that holds the weights."""
    if device.type == "cuda":
        return int(torch.cuda.memory_allocated(device))
    pages = Path("/proc/self/statm")
    if pages.exists():
        return int(pages.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # its peak, in bytes on macOS
