"""A server's own counters, read from /metrics before and after: tokens it generated, tokens drafted and accepted.

vLLM's names, under any prefix (vllm:, paceline:); SGLang has only a running average of tokens per pass. Counters of
several engines or models behind one server are summed.
"""

from __future__ import annotations

import dataclasses
import math
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from paceline.bench.endpoint_http import EndpointRefused, NotOpenAI, TokenCountMismatch, Wire
from paceline.outputs import SpeculationStats

SAMPLE = re.compile(r"^(\w+):(\w+?)(?:_total)?(?:\{(.*)\})?\s+(\S+)")
POSITION = re.compile(r'position="(\d+)"')
TOKENS = ("generation_tokens", "tokens_predicted")  # the second is llama.cpp's
DRAFTS, DRAFTED, ACCEPTED = (f"spec_decode_num_{what}" for what in ("drafts", "draft_tokens", "accepted_tokens"))
AT_DEPTH = "_per_pos"
BY_DEPTH = (DRAFTED + AT_DEPTH, ACCEPTED + AT_DEPTH)  # a sample for each position
LENGTH = "spec_accept_length"  # SGLang's gauge: an average over the latest passes, the bonus included
PASSES, USAGE = "passes", "usage"  # of an interval, computed from the others
PAUSE_S, PATIENCE_S = 0.05, 1.0  # counters may lag behind the answers they count
TOLERANCE = 0.01  # of the tokens; besides, one for each answer, since some count EOS and some do not


@dataclass(frozen=True)
class Counters:
    """Counters of a server since its start, or of an interval as the difference of two. Positions count from 0."""

    server: str = ""  # the prefix of its metrics
    values: Mapping[str, float] = field(default_factory=dict)  # by name; of a position, by name and position
    accept_length: float | None = None

    def since(self, before: Counters) -> Counters:
        change = {name: value - before.values.get(name, 0.0) for name, value in self.values.items()}
        return dataclasses.replace(self, values=change)

    def plus(self, other: Counters) -> Counters:
        names = dict.fromkeys([*self.values, *other.values])
        total = {name: self.values.get(name, 0.0) + other.values.get(name, 0.0) for name in names}
        return dataclasses.replace(self, server=self.server or other.server, values=total)

    @property
    def generated(self) -> float | None:
        return next((self.values[name] for name in TOKENS if name in self.values), None)

    def at_depth(self, name: str) -> list[int]:
        found = {
            int(key.rpartition("/")[2]): value
            for key, value in self.values.items()
            if key.startswith(f"{name}{AT_DEPTH}/")
        }
        return [round(found.get(place, 0.0)) for place in range(max(found, default=-1) + 1)]

    def of_answers(self, tokens: int) -> Counters:
        """With the passes that made those tokens: every pass commits the tokens it accepted and one more."""
        accepted = self.values.get(ACCEPTED)
        passes = None if accepted is None or tokens <= accepted else tokens - accepted
        if passes is None and self.accept_length:
            passes = tokens / self.accept_length
        return self if passes is None else self.plus(Counters(values={PASSES: passes, USAGE: tokens}))

    def stats(self) -> SpeculationStats:
        """As an engine counts. The number of steps that drafted to a depth is known where the server counts it
        (paceline's own), or where every draft had the same length; else there are no figures by position."""
        drafts, drafted = self.values.get(DRAFTS, 0.0), self.values.get(DRAFTED, 0.0)
        accepted_at, drafted_at = self.at_depth(ACCEPTED), self.at_depth(DRAFTED)
        if not drafted_at and drafts and drafted == drafts * len(accepted_at):
            drafted_at = [round(drafts)] * len(accepted_at)
        return SpeculationStats(
            num_drafts=round(drafts),
            num_draft_tokens=round(drafted),
            num_accepted_tokens=round(self.values.get(ACCEPTED, 0.0)),
            num_target_passes=round(self.values.get(PASSES, 0.0)),
            num_committed_tokens=round(self.values.get(USAGE, 0.0)),
            drafted_per_position=drafted_at,
            accepted_per_position=accepted_at if drafted_at else [],
        )


def parse(text: str) -> Counters:
    """Prometheus' text format; everything unknown is skipped."""
    values: dict[str, float] = {}
    lengths: list[float] = []
    server = ""
    for found in filter(None, map(SAMPLE.match, text.splitlines())):
        prefix, name, labels, value = found[1], found[2], found[3] or "", _number(found[4])
        if name in BY_DEPTH and (place := POSITION.search(labels)):
            name = f"{name}/{place[1]}"
        elif name not in (*TOKENS, DRAFTS, DRAFTED, ACCEPTED, LENGTH):
            continue
        if value is None:
            continue
        server = server or prefix
        if name == LENGTH:
            lengths.append(value)
        else:
            values[name] = values.get(name, 0.0) + value
    return Counters(server, values, sum(lengths) / len(lengths) if lengths else None)


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def read(wire: Wire) -> Counters | None:
    """None where the server has no /metrics, or none of these counters in it."""
    try:
        found = parse(wire.get(wire.metrics_url).decode("utf-8", "replace"))
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
            raise TokenCountMismatch(wire.url, "its /metrics are gone since the run began; was it restarted?")
        problem = disagreement(now.since(before), tokens, answers)
        if problem is None:
            return now
        if time.monotonic() > deadline:
            raise TokenCountMismatch(wire.url, problem)
        time.sleep(PAUSE_S)


def disagreement(counted: Counters, tokens: int, answers: int) -> str | None:
    """The contradiction between a server's counters and its usage, by which the answers held `tokens`; None: none."""
    slack = answers + TOLERANCE * tokens
    generated, drafted, accepted = counted.generated, counted.values.get(DRAFTED), counted.values.get(ACCEPTED)
    if generated is not None and abs(generated - tokens) > slack:
        why = "other clients use it too" if generated > tokens else "it was restarted or usage is wrong"
        return f"usage is {tokens} tokens, its /metrics counted {generated:.0f}: {why}; measure it alone"
    if accepted is not None and drafted is not None and accepted > drafted:
        return f"its /metrics count {accepted:.0f} tokens accepted of {drafted:.0f} drafted"
    if accepted is not None and accepted > tokens + slack:
        return f"usage is {tokens} tokens, its /metrics {accepted:.0f} accepted ones alone"
    return None
