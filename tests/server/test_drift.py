"""The change detector: how rarely it cries wolf, and how soon it finds a fall."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from paceline.engine.events import Ended, FinishedAnswer
from paceline.outputs import SpeculationStats
from paceline.server.app import on_drift
from paceline.server.drift import DROP, LEARN, THRESHOLD, DriftMonitor, Watch
from paceline.server.metrics import Metrics
from paceline.server.process.channel import Channel, framed
from paceline.server.process.messages import Relearn, encode_command, join_commands
from paceline.server.process.worker import Worker
from tests.server.api.test_api import post
from tests.server.conftest import Server


def drafts_until_alarm(rng: np.random.Generator, rate: float, fallen: float, limit: int) -> int | None:
    """Drafts after the fall until the alarm; answers have about 10 drafts each."""
    watch = Watch(rate=rate)
    for count in range(0, limit, 10):
        if watch.add(10, int(rng.binomial(10, fallen))):
            return count + 10
    return None


@pytest.mark.parametrize("rate", [0.2, 0.5, 0.8])
def test_a_fall_is_found_within_twice_the_expected_delay(rate: float) -> None:
    rng = np.random.default_rng(0)
    delays = [drafts_until_alarm(rng, rate, DROP * rate, 1_000_000) for _ in range(60)]
    fallen = DROP * rate
    divergence = fallen * np.log(DROP) + (1 - fallen) * np.log((1 - fallen) / (1 - rate))
    expected = THRESHOLD / divergence
    assert 0.5 * expected < np.mean([delay for delay in delays if delay is not None]) < 2 * expected
    assert None not in delays


@pytest.mark.parametrize("rate", [0.2, 0.5, 0.8])
def test_false_alarms_are_rarer_than_stated(rate: float) -> None:
    """400,000 drafts without a fall: four alarms are the stated bound's mean, more than eleven have p < 0.001."""
    rng = np.random.default_rng(1)
    alarms, watch = 0, Watch(rate=rate)
    for hits in rng.binomial(10, rate, size=40_000):
        if watch.add(10, int(hits)):
            alarms, watch = alarms + 1, Watch(rate=rate)
    assert np.exp(THRESHOLD) == pytest.approx(100_000)
    assert alarms <= 11


def test_after_an_alarm_the_new_rate_is_learnt() -> None:
    monitor = DriftMonitor()
    for _ in range(LEARN // 10):
        assert monitor.add("suffix", 10, 8) is None
    alarms = [before for _ in range(100) if (before := monitor.add("suffix", 10, 2)) is not None]
    assert alarms == [pytest.approx(0.8)]
    assert all(monitor.add("suffix", 10, 2) is None for _ in range(1000))


def test_methods_are_watched_separately() -> None:
    monitor = DriftMonitor()
    for _ in range(LEARN):
        monitor.add("suffix", 10, 8)
        monitor.add("ngram", 10, 3)
    assert all(monitor.add("ngram", 10, 3) is None for _ in range(200))


def test_an_alarm_is_counted_and_the_engine_is_told() -> None:
    told: list[str] = []
    client: Any = SimpleNamespace(relearn=told.append)
    metrics = Metrics(lambda method, rate: on_drift(client, method, rate))

    def answer(hits: int) -> None:
        metrics.submitted("r", 3, None)
        stats = SpeculationStats(num_drafts=10, drafts_by_method={"suffix": 10}, hits_by_method={"suffix": hits})
        now = time.perf_counter()
        metrics.observe(Ended("r", [FinishedAnswer(0, [1], "", "stop", None, None, stats)], now, now, 0))

    for _ in range(LEARN // 10):
        answer(8)
    assert told == []
    for _ in range(100):
        answer(2)
    assert told == ["suffix"]
    assert b'paceline:drafter_drift_total{method="suffix"} 1.0' in metrics.render()


def test_the_engine_process_has_the_policy_measure_again_and_ends_with_its_commands() -> None:
    told, methods = threading.Event(), list[str]()
    policy = SimpleNamespace(relearn=lambda method: (methods.append(method), told.set()))
    built: Any = SimpleNamespace(
        engine=SimpleNamespace(has_work=False, at_work=nullcontext), policy=policy, close=lambda: None
    )
    outbox: Any = SimpleNamespace(put=lambda event: None, flush=lambda: None)
    own, its = socket.socketpair()
    with own, its:
        thread = threading.Thread(target=Worker(Channel(its), built).run, args=(outbox,))
        thread.start()
        own.sendall(framed(join_commands([encode_command(Relearn("suffix"))])))
        assert told.wait(60)
        own.shutdown(socket.SHUT_WR)
        thread.join(60)
    assert methods == ["suffix"]
    assert not thread.is_alive()


def test_a_live_server_finds_a_fall_and_recovers(server: Server) -> None:
    """Answers that repeat themselves, then ones that no draft foresees, then the first kind again."""
    body = {"prompt": "one two three four " * 4, "max_tokens": 64, "ignore_eos": True}
    forced = {"speculation": {"method": "suffix", "k": 4}}
    drafts = 'spec_decode_num_drafts_total{method="suffix"'
    accepted = 'spec_decode_num_accepted_tokens_total{method="suffix"'

    def ask(seed: int, **more: Any) -> dict[str, Any]:
        status, answer = post(server, "/v1/completions", {**body, "seed": seed, **more})
        assert status == 200, answer
        return answer["usage"]["speculation"]

    def ask_many(rounds: range, until: Callable[[], bool], **more: Any) -> None:
        with ThreadPoolExecutor(8) as pool:
            for at in rounds:
                list(pool.map(lambda seed: ask(seed, **more), range(8 * at, 8 * at + 8)))
                if until():
                    return

    # Other tests share the server: an alarm for the fall from their rate may come first.
    begun = server.metric(drafts)
    ask_many(range(60), lambda: server.metric(drafts) > begun + 2 * LEARN, temperature=0, **forced)
    begun, alarms = server.metric(drafts), server.metric("drafter_drift_total")
    ask_many(range(40), lambda: server.metric(drafts) > begun + LEARN / 2, temperature=0, **forced)
    assert server.metric("drafter_drift_total") == alarms
    ask_many(
        range(100),
        lambda: server.metric("drafter_drift_total") > alarms,
        **{"temperature": 1.5, "max_tokens": 6, **forced},
    )
    assert server.metric('drafter_drift_total{method="suffix"}') > 0
    assert any("suffix" in line and "measured again" in line for line in server.log)
    before = server.metric(accepted)
    ask_many(range(40), lambda: server.metric(accepted) > before + 100, temperature=0)  # the policy decides
    assert server.metric(accepted) > before + 100
    assert server.metric("drafter_drift_total") == alarms + 1
