"""Prometheus metrics, under vLLM's names with the prefix `paceline:`; fed by the events of the engine.

Queries make ratios from counters: accepted over drafted tokens per position or method, and the realised speed-up as
estimated_plain_seconds over decode_seconds. The first token, tokens and passes of a streamed answer are counted while
it runs; everything else is counted at the end of an answer.
"""

from __future__ import annotations

import bisect
import itertools
import time
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector

from paceline.engine.events import Delta, Ended, Failed
from paceline.outputs import SpeculationStats
from paceline.server.drift import DriftMonitor
from paceline.server.process.messages import Gauges, Ready, WorkerEvent

MAX_TAGS = 32  # values of a client's tag that have counters; later ones count as "other"
_SECONDS = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2, 5, 10, 30, 60)


class Metrics:
    def __init__(self, on_drift: Callable[[str, float], None] = lambda method, rate: None) -> None:
        """`on_drift(method, rate)`: acceptance of the method fell from `rate`."""
        self.registry = CollectorRegistry()
        self._on_drift, self._drift = on_drift, DriftMonitor()
        self._open: dict[str, _RequestCounts] = {}
        self._tags: set[str] = set()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"paceline:{name}", text, labels, registry=self.registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"paceline:{name}", text, labels, registry=self.registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...] = _SECONDS, *labels: str) -> Histogram:
            return Histogram(f"paceline:{name}", text, labels, buckets=buckets, registry=self.registry)

        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens", "tag")
        self.cached_tokens = counter("prompt_tokens_cached", "Prompt tokens found in the prefix cache", "tag")
        self.generation_tokens = counter("generation_tokens", "Committed tokens", "tag")
        self.requests = counter("request_success", "Requests that ended", "finished_reason", "tag")
        self.failed = counter("request_failure", "Requests that failed", "error")
        self.refused = counter("http_errors", "Answers with an error status", "status")
        self.drafts = counter("spec_decode_num_drafts", "Steps of a sequence that carried a draft", "method", "tag")
        self.draft_tokens = counter("spec_decode_num_draft_tokens", "Drafted tokens", "method", "tag")
        self.accepted = counter("spec_decode_num_accepted_tokens", "Accepted drafted tokens", "method", "tag")
        self.drafted_at = counter("spec_decode_num_draft_tokens_per_pos", "Drafts that reached a depth", "position")
        self.accepted_at = counter("spec_decode_num_accepted_tokens_per_pos", "Drafts accepted to a depth", "position")
        self.passes = counter("spec_decode_num_target_passes", "Passes that committed a token of a sequence", "tag")
        self.spent = counter("spec_decode_decode_seconds", "Seconds of decoding", "tag")
        self.plain = counter("spec_decode_estimated_plain_seconds", "Seconds of plain decoding, by estimate", "tag")
        self.draft_length = histogram(
            "spec_decode_draft_length", "Mean nodes of a draft, by answer", (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
        )
        self.drift = counter("drafter_drift", "Falls of a method's acceptance that were found", "method")
        self.drafter_failed = gauge("drafter_failed", "1: the drafter failed and is off", "method")
        self.running = gauge("num_requests_running", "Sequences in the batch")
        self.waiting = gauge("num_requests_waiting", "Sequences that wait for a place")
        self.cache = gauge("kv_cache_usage_perc", "Share of the cache in use, 0 to 1")
        self.gain = gauge("spec_decode_expected_gain", "Gain over plain decoding that the last plan expected")
        self.up = gauge("engine_up", "1: the engine serves")
        self.starts = counter("engine_starts", "Starts of the engine's process")
        self.ttft = histogram("time_to_first_token_seconds", "From arrival to the first token", _SECONDS, "tag")
        self.between = TokenGaps("paceline:inter_token_latency_seconds", "Between tokens of one answer")
        self.registry.register(self.between)
        self.whole = histogram("e2e_request_latency_seconds", "From arrival to the end", _SECONDS, "tag")

    def submitted(self, request_id: str, prompt_tokens: int, tag: str | None) -> None:
        label = self._tag(tag)
        self._open[request_id] = _RequestCounts(label)
        self.prompt_tokens.labels(label).inc(prompt_tokens)

    def cancelled(self, request_id: str) -> None:
        request = self._close(request_id)
        if request is not None:
            self.requests.labels("abort", request.tag).inc()

    def observe(self, event: WorkerEvent) -> None:
        match event:
            case Delta():
                self._delta(event)
            case Ended():
                self._ended(event)
            case Failed():
                self._close(event.request_id)
                self.failed.labels(type(event.error).__name__).inc()
            case Gauges():
                self._gauges(event)
            case Ready():  # a new process may have another drafter
                self.starts.inc()
                self._drift = DriftMonitor()
                self.drafter_failed.clear()

    def render(self, *, up: bool = True) -> bytes:
        """Return the metrics as text. `up`: the engine serves; if not, the gauges of its work are 0."""
        self.up.set(up)
        if not up:
            for gauge in (self.running, self.waiting, self.cache):
                gauge.set(0)
        for request in self._open.values():
            self._count(request)
        return bytes(generate_latest(self.registry))

    def _delta(self, event: Delta) -> None:
        request = self._open.get(event.request_id)
        if request is None:
            return
        now, count = time.perf_counter(), len(event.tokens)
        if not request.last:
            self.ttft.labels(request.tag).observe(now - request.arrival)
        last = request.last.get(event.answer)
        if last is not None and count:
            self.between.add((now - last) / count, count)
        request.last[event.answer] = now
        request.tokens += count
        request.passes += 1

    def _ended(self, event: Ended) -> None:
        request = self._open.get(event.request_id)
        if request is None:
            return
        tag = request.tag
        if not request.last:  # not streamed
            self.ttft.labels(tag).observe(event.first_token_time - request.arrival)
            request.tokens = sum(len(answer.tokens) for answer in event.answers)
            request.passes = sum(answer.stats.num_target_passes for answer in event.answers)
        self._close(event.request_id)
        self.whole.labels(tag).observe(event.finished_time - request.arrival)
        self.cached_tokens.labels(tag).inc(event.num_cached)
        for answer in event.answers:
            self.requests.labels(answer.finish_reason, tag).inc()
            if not request.last and len(answer.tokens) > 1:  # not streamed: the mean of its tokens
                mean = (event.finished_time - event.first_token_time) / (len(answer.tokens) - 1)
                self.between.add(mean, 1)
            self._speculation(answer.stats, tag)

    def _close(self, request_id: str) -> _RequestCounts | None:
        request = self._open.pop(request_id, None)
        if request is not None:
            self._count(request)
        return request

    def _count(self, request: _RequestCounts) -> None:
        """Move a request's sums to the counters, which take longer than integers."""
        self.generation_tokens.labels(request.tag).inc(request.tokens)
        self.passes.labels(request.tag).inc(request.passes)
        request.tokens = request.passes = 0

    def _speculation(self, stats: SpeculationStats, tag: str) -> None:
        self.spent.labels(tag).inc(max(stats.spent_s, 0))
        self.plain.labels(tag).inc(max(stats.plain_s, 0))
        if stats.mean_draft_length is not None:
            self.draft_length.observe(stats.mean_draft_length)
        for position, drafted in enumerate(stats.drafted_per_position):
            self.drafted_at.labels(str(position)).inc(drafted)
            self.accepted_at.labels(str(position)).inc(stats.accepted_per_position[position])
        for method, drafts in stats.drafts_by_method.items():
            hits = stats.hits_by_method.get(method, 0)
            self.drafts.labels(method, tag).inc(drafts)
            self.draft_tokens.labels(method, tag).inc(stats.draft_tokens_by_method.get(method, 0))
            self.accepted.labels(method, tag).inc(stats.accepted_by_method.get(method, 0))
            before = self._drift.add(method, drafts, hits)
            if before is not None:
                self.drift.labels(method).inc()
                self._on_drift(method, before)

    def _gauges(self, event: Gauges) -> None:
        self.running.set(event.running)
        self.waiting.set(event.waiting)
        self.cache.set(event.cache_usage)
        if event.expected_gain is not None:
            self.gain.set(event.expected_gain)
        for method in event.failed_drafters:
            self.drafter_failed.labels(method).set(1)

    def _tag(self, tag: str | None) -> str:
        if tag is None:
            return ""
        if tag not in self._tags and len(self._tags) >= MAX_TAGS:
            return "other"
        self._tags.add(tag)
        return tag


class TokenGaps(Collector):
    """A histogram without locks, for one thread that fills it at every token."""

    def __init__(self, name: str, text: str) -> None:
        self._name, self._text = name, text
        self._counts, self._sum = [0] * (len(_SECONDS) + 1), 0.0

    def add(self, seconds: float, count: int) -> None:
        self._counts[bisect.bisect_left(_SECONDS, seconds)] += count
        self._sum += seconds * count

    def collect(self) -> Iterator[HistogramMetricFamily]:
        bounds = [*(str(float(bound)) for bound in _SECONDS), "+Inf"]
        buckets = list(zip(bounds, itertools.accumulate(self._counts), strict=True))
        yield HistogramMetricFamily(self._name, self._text, buckets, self._sum)


class _RequestCounts:
    """Times and sums of a request under way."""

    def __init__(self, tag: str) -> None:
        self.tag, self.arrival = tag, time.perf_counter()
        self.last: dict[int, float] = {}  # time of the last tokens, by answer
        self.tokens = self.passes = 0  # not yet added to a counter
