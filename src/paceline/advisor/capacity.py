"""How many machines like this one serve a given traffic, with and without speculation.

The load curve is measured, not computed: the highest rate that the engine keeps up with, then latencies while requests
arrive at random (Poisson) at shares of it, speculation and plain decoding in turn. The greatest rate within the limits
counts; it is narrowed down by halving. The engine is measured alone: HTTP comes on top (benchmarks/serve.py).
"""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from paceline.engine.engine import Engine
from paceline.errors import InvalidParameter
from paceline.sampling_params import SamplingParams

SHARES = (0.3, 0.6, 0.8, 0.95)  # of the rate that the engine keeps up with
HALVINGS = 2
FEWEST, MOST = 12, 400  # requests of one point of the curve
FIELDS = {
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
        """`rate=2,prompt=200,answer=100,ttft=1,inter_token=0.1`; the two limits may be left out."""
        given: dict[str, float] = {}
        for item in text.split(","):
            name, _, value = item.strip().partition("=")
            name = name.replace("-", "_")
            if name not in FIELDS or name in given:
                known = ", ".join(f"{each} ({meaning})" for each, meaning in FIELDS.items())
                raise InvalidParameter("traffic", f"{item.strip()!r} is not NAME=VALUE, once, of {known}")
            try:
                given[name] = float(value)
            except ValueError:
                given[name] = math.nan
            if not 0 < given[name] < math.inf:
                raise InvalidParameter("traffic", f"{name} must be a number above 0, got {value!r}")
        if missing := [name for name in ("rate", "prompt", "answer") if name not in given]:
            raise InvalidParameter("traffic", f"{missing[0]} is missing: {FIELDS[missing[0]]}")
        for name in ("prompt", "answer"):
            if given[name] != int(given[name]):
                raise InvalidParameter("traffic", f"{name} must be a whole number, got {given[name]:g}")
        return cls(
            rate=given["rate"],
            prompt=int(given["prompt"]),
            answer=int(given["answer"]),
            ttft=given.get("ttft", math.inf),
            inter_token=given.get("inter_token", math.inf),
        )


@dataclass(frozen=True, kw_only=True)
class Point:
    """Latencies at one rate; p99 of fewer than 100 requests is their worst."""

    rate: float
    requests: int
    finished: bool  # all of them, in time
    ttft_p50: float
    ttft_p99: float
    inter_token_p50: float
    inter_token_p99: float

    def meets(self, traffic: Traffic) -> bool:
        return self.finished and self.ttft_p99 <= traffic.ttft and self.inter_token_p99 <= traffic.inter_token


@dataclass
class Curve:
    """Of one setting; `saturated`: requests a second when a full batch comes at once."""

    saturated: float = 0.0
    points: list[Point] = field(default_factory=list)

    def within(self, traffic: Traffic) -> float:
        """The greatest rate up to which every point is within the limits; 0 where none is."""
        ordered = sorted(self.points, key=lambda point: point.rate)
        return max(
            (each.rate for each in itertools.takewhile(lambda point: point.meets(traffic), ordered)), default=0.0
        )

    def beyond(self, traffic: Traffic) -> float | None:
        """The smallest rate that is not within the limits."""
        return min((point.rate for point in self.points if not point.meets(traffic)), default=None)

    def next_rate(self, traffic: Traffic) -> float | None:
        """Between the two; None where nothing is left to narrow down."""
        beyond = self.beyond(traffic)
        return None if beyond is None else (self.within(traffic) + beyond) / 2


@dataclass(frozen=True, kw_only=True)
class Seats:
    """Sequences of this traffic that the cache holds at once, with the drafters' memory and without."""

    plain: int
    drafting: int
    weight_bytes: int
    kv_bytes: int  # more per token of context


@dataclass
class Capacity:
    traffic: Traffic
    curves: dict[str, Curve]
    seats: Seats | None = None
    price: float | None = None  # of one machine for an hour

    def machines(self, label: str) -> int | None:
        """How many serve the traffic; None: one machine is too slow for the limits at any rate measured."""
        each = self.curves[label].within(self.traffic)
        return math.ceil(self.traffic.rate / each - 1e-9) if each else None

    def per_million(self, label: str) -> float | None:
        """The price of a million tokens of answers, with this traffic on that many machines."""
        machines = self.machines(label)
        if machines is None or self.price is None:
            return None
        return self.price * machines / (3600 * self.traffic.rate * self.traffic.answer) * 1e6

    def to_json(self) -> dict[str, Any]:
        limits = {name: None if value == math.inf else value for name, value in asdict(self.traffic).items()}
        found = {
            label: {
                **asdict(curve),
                "within_limits": curve.within(self.traffic),
                "machines": self.machines(label),
                "price_per_million_tokens": self.per_million(label),
            }
            for label, curve in self.curves.items()
        }
        seats = None if self.seats is None else asdict(self.seats)
        return {"traffic": limits, "curves": found, "cache_holds": seats, "price_per_hour": self.price}


class Driver:
    """Sends requests of the traffic to an engine and follows their tokens."""

    def __init__(self, engine: Engine, prompts: Iterator[list[int]], traffic: Traffic, temperature: float) -> None:
        self._engine, self._prompts, self._traffic = engine, prompts, traffic
        self._temperature, self._serial = temperature, itertools.count()

    def saturate(self, requests: int) -> float:
        """Requests a second when so many come at once, from the first prompt to the last token."""
        started = time.perf_counter()
        for _ in range(requests):
            self._add()
        while self._engine.has_work:
            self._engine.step()
        return requests / (time.perf_counter() - started)

    def point(self, rate: float, seconds: float) -> Point:
        count = min(max(round(rate * seconds), FEWEST), MOST)
        noise = random.Random(0)
        gaps = [noise.expovariate(rate) for _ in range(count)]
        due = list(itertools.accumulate(gaps))
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
                if result.tokens[at]:
                    key = sequence.request_id
                    if key in last:
                        between.append(now - last[key])
                    else:
                        first.append(now - arrived[key])
                    last[key] = now
                done += at in result.ended
        self._clear()
        return Point(
            rate=rate,
            requests=count,
            finished=done == count,
            ttft_p50=percentile(first, 0.5),
            ttft_p99=percentile(first, 0.99),
            inter_token_p50=percentile(between, 0.5),
            inter_token_p99=percentile(between, 0.99),
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
    """Prompts of that length without end: each text with others before it, cut at the front. No two are alike until
    every text had every other one before it."""
    for shift in itertools.count(1):
        for at, text in enumerate(texts):
            tokens = list(text)
            for back in itertools.count(shift):
                if len(tokens) >= length:
                    break
                tokens = [*texts[(at + back) % len(texts)], *tokens]
            yield tokens[-length:]


def percentile(values: Sequence[float], share: float) -> float:
    """The value that this share does not exceed; of none, 0."""
    ordered = sorted(values)
    return ordered[min(math.ceil(share * len(ordered)), len(ordered)) - 1] if ordered else 0.0


def measure(
    drivers: dict[str, Driver],
    traffic: Traffic,
    *,
    at_once: int,
    seconds: float,
    on_progress: Callable[[float, float, str], None] = lambda done, total, what: None,
) -> dict[str, Curve]:
    """`at_once`: requests that find the highest rate; `seconds`: of each point."""
    curves = {label: Curve() for label in drivers}
    total = len(drivers) * (1 + len(SHARES) + HALVINGS)
    done = itertools.count(1)
    for label, driver in drivers.items():
        on_progress(next(done), total, f"{label}: as fast as it can")
        curves[label].saturated = driver.saturate(at_once)
    for share in SHARES:
        for label, driver in drivers.items():
            rate = share * curves[label].saturated
            on_progress(next(done), total, f"{label}: {rate:.2f} requests a second")
            curves[label].points.append(driver.point(rate, seconds))
    for _ in range(HALVINGS):
        for label, driver in drivers.items():
            if (between := curves[label].next_rate(traffic)) is not None:
                on_progress(next(done), total, f"{label}: {between:.2f} requests a second")
                curves[label].points.append(driver.point(between, seconds))
    return curves
