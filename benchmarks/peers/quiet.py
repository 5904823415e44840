"""Measuring on a shared machine: taking turns with other processes, and recording the time they used.

`Turns` holds a lock file (flock) that other benchmarks on the machine take as well, and hands it on every few minutes.
`busy_seconds` is what all processes together, and the hypervisor's other guests, took from the cores.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from benchmarks.peers.workers import Worker

HOLD_S = 200.0
WINDOW_S, PATIENCE_S = 0.1, 10.0
QUIET = 0.05  # share of the cores that others may take before an answer is begun


class Turns:
    def __init__(self, path: Path | None, hold_s: float = HOLD_S) -> None:
        self._file: IO[str] | None = None if path is None else path.open("a")
        self._hold_s = hold_s
        self._since: float | None = None  # when it became our turn

    def take(self) -> None:
        """Returns when it is our turn; gives others theirs first if we have had the machine for long."""
        if self._file is None:
            return
        import fcntl

        if self._since is not None and time.perf_counter() - self._since > self._hold_s:
            fcntl.flock(self._file, fcntl.LOCK_UN)
            self._since = None
            time.sleep(1.0)  # else a waiting process would not wake up in time
        if self._since is None:
            fcntl.flock(self._file, fcntl.LOCK_EX)
            self._since = time.perf_counter()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()  # and with it the lock


def busy_seconds(stat: Path = Path("/proc/stat")) -> float:
    """Of all cores together since the start, other guests' included; 0 where the system does not say."""
    try:
        user, nice, system, _, _, irq, softirq, steal = map(int, stat.read_text().split("\n", 1)[0].split()[1:9])
    except (OSError, ValueError):
        return 0.0
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


class Watch:
    """CPU time of the workers and of all other processes since it was made."""

    def __init__(self, workers: Sequence[Worker], cores: int) -> None:
        self._workers, self._cores = workers, cores
        self._started, self._busy, self._ours = time.perf_counter(), busy_seconds(), self._spent()

    def _spent(self) -> list[float]:
        return [worker.cpu_seconds() for worker in self._workers]

    def shares(self) -> tuple[list[float], float]:
        """Of all cores, so far: each worker's share, and that of everything which is not a worker."""
        room = (time.perf_counter() - self._started) * self._cores
        spent = [after - before for after, before in zip(self._spent(), self._ours, strict=True)]
        foreign = busy_seconds() - self._busy - sum(spent)
        return [each / room for each in spent], max(0.0, foreign / room)


def settle(workers: Sequence[Worker], cores: int, patience_s: float = PATIENCE_S) -> None:
    """Waits, for a bounded time, until no process computes: thread pools spin for a while after their work is done."""
    end = time.perf_counter() + patience_s
    while time.perf_counter() < end:
        watch = Watch(workers, cores)
        time.sleep(WINDOW_S)
        spent, foreign = watch.shares()
        if sum(spent) + foreign <= QUIET:
            return
