"""What the benchmark scripts share: interleaved rounds, paired intervals, read bandwidth, the JSON line."""

from __future__ import annotations

import json
import platform
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from paceline import __version__
from paceline.platform import cpu as machine

clock: Callable[[], float] = time.perf_counter


def timed(work: Callable[[], Any]) -> float:
    started = clock()
    work()
    return clock() - started


def interleaved(works: Mapping[str, Callable[[], Any]], rounds: int, warmup: int = 1) -> dict[str, list[float]]:
    """Seconds of every piece of work in every round; one after the other, in an order drawn anew each round."""
    order, noise = list(works), random.Random(0)
    times: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(warmup + rounds):
        noise.shuffle(order)
        for name in order:
            seconds = timed(works[name])
            if turn >= warmup:
                times[name].append(seconds)
    return times


def ratio(numerators: Sequence[float], denominators: Sequence[float], draws: int = 2000) -> dict[str, float]:
    """Median of the paired ratios with a 95 % bootstrap interval over rounds."""
    pairs = [a / b for a, b in zip(numerators, denominators, strict=True)]
    noise = random.Random(1)
    medians = sorted(statistics.median(noise.choices(pairs, k=len(pairs))) for _ in range(draws))
    return {
        "median": statistics.median(pairs),
        "low": medians[int(0.025 * draws)],
        "high": medians[int(0.975 * draws) - 1],
    }


def read_bandwidth_probe(num_bytes: int = 600_000_000) -> tuple[Callable[[], Any], int]:
    """Work that reads `num_bytes` of memory once, with all threads, and does next to nothing with it."""
    block = torch.zeros(num_bytes // 8, dtype=torch.float64)
    return lambda: block.sum(), block.numel() * 8


def finish(name: str, result: dict[str, Any]) -> None:
    """The last line of every benchmark: one JSON object with the figures and where they were taken."""
    where = {
        "cpu": machine.cpu_name(),
        "cores": machine.usable_cores(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "paceline": __version__,
        "date": time.strftime("%Y-%m-%d"),
    }
    print(json.dumps({"benchmark": name, **result, "where": where}))
