"""Counters and histograms while answers run, and after the"""

from __future__ import annotations

import re
import time

from paceline.engine.events import Delta, Ended, Failed, FinishedAnswer
from paceline.errors import RequestFailed
from paceline.outputs import SpeculationStats
from paceline.server.metrics import Metrics
from paceline.server.process.messages import Gauges

TOKENS, PASSES, FIRST = (
    "generation_tokens_total",
    "spec_decode_num_target_passes_total",
    "time_to_first_token_seconds_count",
)


def value(metrics: Metrics, name: str) -> float:
    found = re.findall(rf"^paceline:{name}(?:{{.*}})? (.*)$", metrics.render().decode(), re.MULTILINE)
    return sum(map(float, found))


def delta(count: int, answer: int = 0) -> Delta:
    return Delta("r", answer, [7] * count, [2] * count, "", None, None, None)


def ended(*counts: tuple[int, int]) -> Ended:
    """The end of a request; `counts`: tokens and passes of each answer."""
    stats = [SpeculationStats(num_target_passes=passes, num_committed_tokens=tokens) for tokens, passes in counts]
    answers = [
        FinishedAnswer(at, [7] * each.num_committed_tokens, "", "stop", None, None, each)
        for at, each in enumerate(stats)
    ]
    now = time.perf_counter()
    return Ended("r", answers, now, now, 0)


def test_a_streamed_answer_is_counted_while_it_runs() -> None:
    metrics = Metrics()
    metrics.submitted("r", 3, "chat")
    assert value(metrics, FIRST) == 0
    metrics.observe(delta(1))
    assert (value(metrics, FIRST), value(metrics, TOKENS), value(metrics, PASSES)) == (1, 1, 1)
    metrics.observe(delta(4))
    metrics.observe(delta(2, answer=1))
    assert (value(metrics, FIRST), value(metrics, TOKENS), value(metrics, PASSES)) == (1, 7, 3)
    assert value(metrics, "inter_token_latency_seconds_count") == 4
    metrics.observe(delta(1, answer=1))
    metrics.observe(ended((5, 2), (3, 2)))
    assert (value(metrics, FIRST), value(metrics, TOKENS), value(metrics, PASSES)) == (1, 8, 4)
    assert value(metrics, "e2e_request_latency_seconds_count") == 1


def test_an_answer_that_is_not_streamed_is_counted_at_its_end() -> None:
    metrics = Metrics()
    metrics.submitted("r", 3, None)
    metrics.observe(ended((5, 2), (3, 3)))
    assert (value(metrics, FIRST), value(metrics, TOKENS), value(metrics, PASSES)) == (1, 8, 5)


def test_tokens_of_a_cancelled_or_failed_answer_are_counted() -> None:
    metrics = Metrics()
    for end in (lambda: metrics.cancelled("r"), lambda: metrics.observe(Failed("r", RequestFailed("late")))):
        metrics.submitted("r", 3, None)
        metrics.observe(delta(2))
        end()
    assert (value(metrics, TOKENS), value(metrics, PASSES)) == (4, 2)


def test_an_engine_that_is_gone_runs_nothing() -> None:
    metrics = Metrics()
    metrics.observe(Gauges(3, 2, 0.5, 1, 1, 0.1, None, {}))
    assert value(metrics, "num_requests_running") == 3
    metrics.render(up=False)
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    assert [value(metrics, name) for name in names] == [0, 0, 0]
