"""Numbers as the report writes them: few digits, units spelt out, and a dash for a figure that was not measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.bench.results import Cell, Speedup, Spread

DASH = "–"
INTERVAL = "95\N{NO-BREAK SPACE}% interval"
FASTER, SLOWER, LEVEL = "faster", "slower", "level"


def ratio(value: float) -> str:
    return f"{value:.2f}×" if value < 9.995 else f"{value:.1f}×"


def interval(speedup: Speedup) -> str:
    return f"{speedup.low:.2f} to {speedup.high:.2f}"


def figure(speedup: Speedup | None) -> str:
    return DASH if speedup is None else f"{ratio(speedup.ratio)} ({interval(speedup)})"


def outcome(speedup: Speedup) -> str:
    """Return the conclusion that the interval supports."""
    return FASTER if speedup.low > 1 else SLOWER if speedup.high < 1 else LEVEL


def rate(value: float | None) -> str:
    if value is None:
        return DASH
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def seconds(value: float) -> str:
    if value < 0.9995e-3:
        return f"{value * 1e6:.0f} µs"
    if value < 0.9995:
        return f"{value * 1e3:.{1 if value < 9.95e-3 else 0}f} ms"
    return f"{value:.{2 if value < 9.995 else 1}f} s"


def spread(times: Spread | None) -> str:
    return DASH if times is None else f"{seconds(times.p50)} / {seconds(times.p99)}"


def percent(share: float | None) -> str:
    if share is None:
        return DASH
    return f"{100 * share:.1f} %" if 0 < share < 0.0995 else f"{100 * share:.0f} %"


def decimal(value: float | None) -> str:
    return DASH if value is None else f"{value:.2f}"


def count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def at_once(concurrency: int) -> str:
    return "one request at a time" if concurrency == 1 else f"{concurrency} requests at a time"


def listed(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def unchanged(cell: Cell) -> str:
    return {None: DASH, True: "yes", False: "no"}[cell.identical]


def seeded(settings: Mapping[str, Any]) -> str | None:
    """Return for which requests a draft model's figures hold if answers are sampled; None if it makes no difference."""
    drafting = settings.get("draft_model") or settings.get("draft_models")
    if not drafting or not settings.get("temperature") or settings.get("seed") is None:
        return None
    return (
        "the requests were seeded, so a draft model's tokens were judged by the seeded rule, which accepts another "
        "share of them than ordinary requests have accepted"
    )
