"""A server's own counters, read from /metrics before and after: tokens it generated, tokens drafted and accepted.

vLLM's names, under any prefix (vllm:, paceline:); SGLang tells only a running average of tokens per pass. Counters of
several engines or models behind one server are added up.
"""

from __future__ import annotations

import itertools
import math
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass

from paceline.bench.endpoint_errors import EndpointRefused, NotOpenAI, TokenCountMismatch
from paceline.bench.endpoint_http import Wire

SAMPLE = re.compile(r"^(\w+):(\w+)(?:\{(.*)\})?\s+(\S+)")
POSITION = re.compile(r'position="(\d+)"')
TOKENS = ("generation_tokens", "tokens_predicted")  # the second is llama.cpp's
SPECULATION = "spec_decode_num_"
LENGTH = "spec_accept_length"  # a gauge, so of several the mean
PAUSE_S, PATIENCE_S = 0.05, 1.0  # counters may lag behind the answers they count
TOLERANCE = 0.01  # of the tokens; besides, one for each answer, since some count EOS and some do not


@dataclass(frozen=True)
class Counters:
    """Of a server since its start, or of a stretch of time as the difference of two."""

    server: str = ""  # the prefix of its metrics
    generated: float | None = None
    drafts: float | None = None
    draft_tokens: float | None = None
    accepted_tokens: float | None = None
    accepted_per_position: tuple[float, ...] = ()
    drafted_per_position: tuple[float, ...] = ()  # only paceline tells
    accept_length: float | None = None  # SGLang's gauge: an average over the latest passes, the bonus included

    def since(self, before: Counters) -> Counters:
        return self._combined(before, -1)

    def plus(self, other: Counters) -> Counters:
        return self._combined(other, 1)

    def _combined(self, other: Counters, sign: int) -> Counters:
        return Counters(
            self.server,
            _sum(self.generated, other.generated, sign),
            _sum(self.drafts, other.drafts, sign),
            _sum(self.draft_tokens, other.draft_tokens, sign),
            _sum(self.accepted_tokens, other.accepted_tokens, sign),
            _sums(self.accepted_per_position, other.accepted_per_position, sign),
            _sums(self.drafted_per_position, other.drafted_per_position, sign),
            self.accept_length,
        )

    @property
    def acceptance_rate(self) -> float | None:
        if not self.draft_tokens or self.accepted_tokens is None:
            return None
        return self.accepted_tokens / self.draft_tokens

    def tau(self, tokens: int) -> float | None:
        """Every pass commits what it accepted and one more, so passes = tokens - accepted."""
        if self.accepted_tokens is None or tokens <= self.accepted_tokens:
            return self.accept_length or None
        return tokens / (tokens - self.accepted_tokens)

    @property
    def positions(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Drafted and accepted by position. Drafted is known when told, or when every draft had the same length."""
        accepted = self.accepted_per_position
        drafted = self.drafted_per_position
        if not drafted and self.drafts and self.draft_tokens == self.drafts * len(accepted):
            drafted = (self.drafts,) * len(accepted)
        if not drafted:
            return (), ()
        return tuple(map(round, drafted)), tuple(map(round, accepted))


def _sum(one: float | None, other: float | None, sign: int) -> float | None:
    return None if one is None and other is None else (one or 0.0) + sign * (other or 0.0)


def _sums(one: tuple[float, ...], other: tuple[float, ...], sign: int) -> tuple[float, ...]:
    return tuple(a + sign * b for a, b in itertools.zip_longest(one, other, fillvalue=0.0))


def parse(text: str) -> Counters:
    """Prometheus' text format; everything unknown is skipped."""
    sums: dict[str, float] = {}
    samples: dict[str, int] = {}
    positions: dict[str, dict[int, float]] = {}
    server = ""
    for line in text.splitlines():
        if not (found := SAMPLE.match(line)):
            continue
        prefix, name, labels, value = found[1], found[2].removesuffix("_total"), found[3] or "", _number(found[4])
        if value is None or not (name in TOKENS or name.startswith(SPECULATION) or name == LENGTH):
            continue
        server = server or prefix
        if name.endswith("_per_pos"):
            place = POSITION.search(labels)
            if place is not None:
                by_place = positions.setdefault(name, {})
                by_place[int(place[1])] = by_place.get(int(place[1]), 0.0) + value
        else:
            sums[name] = sums.get(name, 0.0) + value
            samples[name] = samples.get(name, 0) + 1
    return Counters(
        server,
        next((sums[name] for name in TOKENS if name in sums), None),
        sums.get(SPECULATION + "drafts"),
        sums.get(SPECULATION + "draft_tokens"),
        sums.get(SPECULATION + "accepted_tokens"),
        _in_order(positions.get(SPECULATION + "accepted_tokens_per_pos", {})),
        _in_order(positions.get(SPECULATION + "draft_tokens_per_pos", {})),
        sums[LENGTH] / samples[LENGTH] if LENGTH in sums else None,
    )


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _in_order(by_place: Mapping[int, float]) -> tuple[float, ...]:
    return tuple(by_place.get(place, 0.0) for place in range(max(by_place, default=-1) + 1))


def read(wire: Wire) -> Counters | None:
    """None where the server has no /metrics, or none of ours in it."""
    try:
        with wire.exchange("GET", wire.address.root + "/metrics") as exchange:
            exchange.expect_success()
            found = parse(exchange.read().decode("utf-8", "replace"))
    except (EndpointRefused, NotOpenAI):
        return None
    return found if found.server else None


def settled(wire: Wire) -> Counters | None:
    """As `read`, once two readings in a row agree: what was counted before must not be counted again."""
    before, deadline = read(wire), time.monotonic() + PATIENCE_S
    while before is not None and time.monotonic() < deadline:
        time.sleep(PAUSE_S)
        now = read(wire)
        if now == before:
            break
        before = now
    return before


def read_after(wire: Wire, before: Counters, tokens: int, answers: int) -> Counters:
    """The counters once they hold the answers that came since `before`; an error if they never agree with usage."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        now = read(wire)
        if now is None:
            raise TokenCountMismatch(wire.address.url, "its /metrics are gone since the run began; was it restarted?")
        try:
            compare(wire.address.url, now.since(before), tokens, answers)
        except TokenCountMismatch:
            if time.monotonic() > deadline:
                raise
            time.sleep(PAUSE_S)
        else:
            return now


def compare(url: str, counted: Counters, tokens: int, answers: int) -> None:
    """`tokens` are those of the answers, by usage."""
    slack = answers + TOLERANCE * tokens
    if counted.generated is not None and abs(counted.generated - tokens) > slack:
        why = "others use it too" if counted.generated > tokens else "it was restarted or usage is wrong"
        raise TokenCountMismatch(
            url, f"usage says {tokens} tokens, its /metrics counted {counted.generated:.0f}: {why}; measure it alone"
        )
    drafted, accepted = counted.draft_tokens, counted.accepted_tokens
    if accepted is not None and drafted is not None and accepted > drafted:
        raise TokenCountMismatch(url, f"its /metrics say {accepted:.0f} tokens accepted of {drafted:.0f} drafted")
    if accepted is not None and accepted > tokens + slack:
        raise TokenCountMismatch(url, f"usage says {tokens} tokens, its /metrics {accepted:.0f} accepted ones alone")
