"""The change detector: how rarely it cries wolf, and how soon it finds a fall."""

import numpy as np
import pytest

from paceline.server.drift import DROP, LEARN, THRESHOLD, DriftMonitor, Watch


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
    expected = Watch(rate=rate).expected_delay()
    assert expected is not None
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
