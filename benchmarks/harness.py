"""Shared by all scripts: interleaved rounds, paired intervals, processor time, a quiet machine, the JSON line."""

from __future__ import annotations

import json
import os
import platform
import random
import shutil
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

WINDOW_S, PATIENCE_S = 0.1, 10.0
QUIET = 0.05  # share of the cores that others may take before an answer is begun

ROOT = Path(__file__).resolve().parents[1]
COPYING = Path(__file__).parent / "copying.jsonl"  # quoting, editing code, JSON printed again
TOPICS = ("rivers", "clocks", "bread", "chess", "violins", "comets", "moss", "trains")
TOPICS += ("lenses", "salt", "kites", "maps", "bees", "glass", "tides", "ink")

clock: Callable[[], float] = time.perf_counter


# -- rounds and intervals


def timed(work: Callable[[], Any]) -> float:
    started = clock()
    work()
    return clock() - started


def interleaved(works: Mapping[str, Callable[[], Any]], rounds: int, warmup: int = 1) -> dict[str, list[float]]:
    """Return the seconds of every piece of work in every round; the order is drawn anew each round."""
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
    """Return the median of the paired ratios with a 95 % bootstrap interval over rounds."""
    pairs = [a / b for a, b in zip(numerators, denominators, strict=True)]
    noise = random.Random(1)
    medians = sorted(statistics.median(noise.choices(pairs, k=len(pairs))) for _ in range(draws))
    return {
        "median": statistics.median(pairs),
        "low": medians[int(0.025 * draws)],
        "high": medians[int(0.975 * draws) - 1],
    }


def shown(of: Mapping[str, float], digits: int = 2) -> str:
    """Return a ratio with its interval, as text."""
    middle = of["median"] if "median" in of else of["ratio"]
    interval = f" [{of['low']:.{digits}f}, {of['high']:.{digits}f}]" if "low" in of else ""
    return f"{middle:.{digits}f}x{interval}"


def median_ms(seconds: Sequence[float]) -> float:
    return 1e3 * statistics.median(seconds)


class Spent:
    """Processor seconds of this thread in watched functions, by part; an inner function's count apart."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.seconds = Counter[str]()
        self._inner = [0.0]  # seconds of watched functions within each one under way; first: outside all of them

    @property
    def watched_s(self) -> float:
        return self._inner[0]

    def watch(self, owner: Any, name: str, part: str) -> None:
        function: Callable[..., Any] = getattr(owner, name)

        def watched(*args: Any, **options: Any) -> Any:
            self._inner.append(0.0)
            begun = time.thread_time()
            try:
                return function(*args, **options)
            finally:
                taken = time.thread_time() - begun
                self.seconds[part] += taken - self._inner.pop()
                self._inner[-1] += taken

        setattr(owner, name, watched)


def finish(name: str, result: dict[str, Any]) -> None:
    """Print the last line of every benchmark: one JSON object with the figures and where they were taken."""
    import torch

    from paceline import __version__
    from paceline.platform import cpu

    where = {
        "cpu": cpu.cpu_name(),
        "cores": cpu.usable_cores(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "paceline": __version__,
        "date": time.strftime("%Y-%m-%d"),
    }
    if torch.cuda.is_available():
        where["gpu"] = torch.cuda.get_device_name()
    print(json.dumps({"benchmark": name, **result, "where": where}))


# -- prompts


def prompts_of(paths: Sequence[str] = (), per_category: int | None = None) -> list[dict[str, Any]]:
    """Return {"category", "turns"} from JSON lines; without a path, 24 prompts that ask for copies."""
    lines = [line for path in paths or (COPYING,) for line in Path(path).read_text(encoding="utf-8").split("\n")]
    prompts = [json.loads(line) for line in lines if line.strip()]
    by_category: dict[str, list[dict[str, Any]]] = {}
    for prompt in prompts:
        by_category.setdefault(prompt["category"], []).append(prompt)
    return prompts if per_category is None else [one for each in by_category.values() for one in each[:per_category]]


# -- answers of an engine


class Answers:
    """Requests of an engine that are waited for together, and the time of each step after the first tokens of all."""

    def __init__(self, engine: Any, prompts: Sequence[list[int]], params: Any) -> None:
        self._engine = engine
        self.sequences = [
            engine.add_request(str(at), prompt, params, wait_group="group")[0] for at, prompt in enumerate(prompts)
        ]
        while any(sequence.num_output == 0 for sequence in self.sequences):
            engine.step()
        self.first_tokens = sum(sequence.num_output for sequence in self.sequences)
        self.steps_s: list[float] = []

    def step(self) -> bool:
        """Run one more step; return whether there was one."""
        if not self._engine.has_work:
            return False
        self.steps_s.append(timed(self._engine.step))
        return True

    def finished(self) -> Answers:
        while self.step():
            pass
        return self

    @property
    def tokens(self) -> list[list[int]]:
        return [sequence.output_tokens for sequence in self.sequences]

    @property
    def decoded(self) -> int:
        """Tokens that the timed steps brought."""
        return sum(map(len, self.tokens)) - self.first_tokens

    def stats(self) -> Any:
        """Return the statistics of all answers together."""
        from paceline.outputs import SpeculationStats

        stats = SpeculationStats()
        for sequence in self.sequences:
            stats.merge(sequence.stats)
        return stats


# -- models for other software


def expanded_folder(folder: Path, work: Path) -> Path:
    """Return a model folder that other software reads: blocks expanded to float32, everything else copied."""
    from paceline.models.load.loader import load_config, load_weights
    from paceline.models.quant.block_file import BLOCK_WEIGHTS, write_blocks
    from paceline.models.weights import WeightKind

    out = work / f"{folder.name}-fp32"
    if not (folder / BLOCK_WEIGHTS).exists():
        return folder
    if not out.exists():
        partial = out.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        for file in folder.glob("*.json"):
            shutil.copyfile(file, partial / file.name)
        weights = load_weights(folder, load_config(folder))
        entries = [(name, WeightKind.FLOAT32, weights[name].shape) for name in weights]
        write_blocks(partial / "model.safetensors", entries, weights.__getitem__, lambda done, total: None)
        partial.rename(out)
    return out


# -- a machine that others use too


class Computes(Protocol):
    def cpu_seconds(self) -> float: ...


def busy_seconds(stat: Path = Path("/proc/stat")) -> float:
    """Return busy seconds of all cores since the start, the hypervisor's other guests included; 0 if unknown."""
    try:
        user, nice, system, _, _, irq, softirq, steal = map(int, stat.read_text().split("\n", 1)[0].split()[1:9])
    except (OSError, ValueError):
        return 0.0
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


class Watch:
    """CPU time of the workers and of all other processes since it was made."""

    def __init__(self, workers: Sequence[Computes], cores: int) -> None:
        self._workers, self._cores = workers, cores
        self._started, self._busy, self._before = time.perf_counter(), busy_seconds(), self._spent()

    def _spent(self) -> list[float]:
        return [worker.cpu_seconds() for worker in self._workers]

    def shares(self) -> tuple[list[float], float]:
        """Return the share of all cores that each worker took, and the share of all other processes."""
        room = (time.perf_counter() - self._started) * self._cores
        spent = [after - before for after, before in zip(self._spent(), self._before, strict=True)]
        foreign = busy_seconds() - self._busy - sum(spent)
        return [each / room for each in spent], max(0.0, foreign / room)


def settle(workers: Sequence[Computes], cores: int, patience_s: float = PATIENCE_S) -> None:
    """Wait, for a bounded time, until no process computes: thread pools spin for a while after their work is done."""
    end = time.perf_counter() + patience_s
    while time.perf_counter() < end:
        watch = Watch(workers, cores)
        time.sleep(WINDOW_S)
        spent, foreign = watch.shares()
        if sum(spent) + foreign <= QUIET:
            return
