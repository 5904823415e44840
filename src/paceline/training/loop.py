"""The training loop: one page, no framework.

A run is bounded by steps or by minutes; the learning rate falls along a cosine to the end of the bound. Every random
number is keyed by seed and step and every counter is in the checkpoint, which replaces the last one by a rename: after
kill -9 a run bounded by steps continues to the very weights it would have had. Nothing in a step waits for the device;
losses are read a few times a minute.

Under torchrun each process takes its share of one global batch and gradients are summed, so the curve is that of one
process up to rounding.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.errors import InvalidParameter, PacelineError
from paceline.training.data.batch import DeviceRows
from paceline.training.data.rows import RowSampler
from paceline.training.output_folder import STATE, check_settings, damaged, read_state, write_state
from paceline.training.registry import Measure
from paceline.training.trainee import StepLoss, Trainee
from paceline.training.trainees.target import FrozenTarget

SEEDS = 1 << 32  # a draw is keyed by 64 bits, half of them the step
CLOCK_STEPS = 8  # steps between two readings of the clock
Report = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class LoopConfig:
    rows: int = 64  # rows of a step, over all processes
    steps: int | None = None
    minutes: float | None = None  # length of the training, over all its runs
    stop_minutes: float | None = None  # length of this run; the next one continues
    lr: float = 1e-3
    warmup: int = 200  # steps
    weight_decay: float = 0.05
    clip: float = 1.0
    ema: float = 0.999  # decay of the averaged weights, which are measured and saved; 0: the last weights
    optimizer: str = "adamw"  # or muon, for the matrices of products
    seed: int = 0
    log_s: float = 10.0
    save_s: float = 60.0
    measure_s: float = 180.0

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.minutes is None):
            raise InvalidParameter("minutes", "give either a number of steps or of minutes")
        if self.optimizer not in ("adamw", "muon"):
            raise InvalidParameter("optimizer", f"must be adamw or muon, got {self.optimizer!r}")
        if not 0 <= self.seed < SEEDS:
            raise InvalidParameter("seed", f"must be between 0 and {SEEDS - 1}, got {self.seed}")
        for name in ("minutes", "stop_minutes", "lr"):
            value = getattr(self, name)
            if value is not None and not math.isfinite(value):
                raise InvalidParameter(name, f"must be a finite number, got {value}")


@dataclass
class TrainingProgress:
    step: int = 0
    elapsed_s: float = 0.0  # seconds in steps, over all runs
    curve: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Processes:
    """The number of this process and of all processes of torchrun."""

    rank: int = 0
    world: int = 1

    @staticmethod
    def current() -> Processes:
        return Processes(dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else Processes()

    @staticmethod
    def join(device: torch.device) -> torch.device:
        """Join the other processes of torchrun; return this one's device, a GPU each."""
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            return device
        if not dist.is_initialized():
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        if device.type == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
            return torch.device("cuda", torch.cuda.current_device())
        return device

    def wait_for_all(self) -> None:
        if self.world > 1:
            dist.barrier()

    def summed(self, value: Tensor) -> Tensor:
        if self.world > 1:
            dist.all_reduce(value)
        return value

    def sum_gradients(self, parameters: list[Tensor]) -> None:
        if self.world == 1:
            return
        flat = torch.cat([one.grad.flatten() for one in parameters if one.grad is not None])
        dist.all_reduce(flat)
        start = 0
        for one in parameters:
            if one.grad is not None:
                one.grad.copy_(flat[start : start + one.numel()].view_as(one))
                start += one.numel()

    def agreed(self, *values: float) -> list[float]:
        """Return the first process's values."""
        if self.world == 1:
            return list(values)
        shared = torch.tensor(values, dtype=torch.float64)
        if dist.get_backend() == "nccl":
            shared = shared.cuda()
        dist.broadcast(shared, 0)
        return [float(one) for one in shared.tolist()]


class Loop:
    def __init__(
        self,
        trainee: Trainee,
        target: FrozenTarget,
        rows: DeviceRows,
        sampler: RowSampler,
        config: LoopConfig,
        folder: Path,
        *,
        report: Report = print,
        measure: Measure | None = None,
        settings: Mapping[str, Any] | None = None,  # values that stay when the training is continued
    ) -> None:
        self.trainee, self.target, self.rows, self.sampler = trainee, target, rows, sampler
        self.config, self.folder, self.report, self.measure = config, folder, report, measure
        self.settings = dict(settings or {})
        self.processes = Processes.current()
        if config.rows % self.processes.world:
            raise InvalidParameter("rows", f"{config.rows} rows do not divide among {self.processes.world} processes")
        self.names = list(trainee.parameters)
        self.weights = [trainee.parameters[name] for name in self.names]
        self.ema = [weight.detach().clone() for weight in self.weights]
        self.optimizers = make_optimizers(trainee.parameters, config)
        self.progress = TrainingProgress()
        self._sums: list[Tensor] | None = None
        self._since = (time.perf_counter(), 0)

    # -- the run

    def run(self) -> TrainingProgress:
        config, progress = self.config, self.progress
        began = time.perf_counter()
        before = progress.elapsed_s
        logged = saved = measured = began
        done, stop = self._position()
        while not stop:
            loss = self.step(self._learning_rate(done))
            self._add(loss)
            if progress.step % CLOCK_STEPS == 0 or config.steps is not None:
                now = time.perf_counter()
                progress.elapsed_s = before + now - began
                late = config.stop_minutes is not None and now - began > 60 * config.stop_minutes
                done, stop = self._position(late)
                due = [
                    now - since > seconds
                    for since, seconds in ((logged, config.log_s), (saved, config.save_s), (measured, config.measure_s))
                ]
                log, save, measure = (bool(one) for one in self.processes.agreed(*map(float, due)))
                if log or save or measure or stop:
                    logged = now
                    entry = self._log(done)
                if measure and self.measure is not None and not stop:
                    self._measure(entry)
                    measured = time.perf_counter()
                if save or stop:
                    saved = now
                    self.save()
        return progress

    def forecast(self) -> None:
        """Report how long the steps will take on a CPU, from a first one that does not count."""
        steps = self.config.steps
        if self.target.device.type != "cpu" or steps is None or self.processes.world > 1:
            return
        which = torch.arange(self.config.rows) % len(self.rows.tokens)
        began = time.perf_counter()
        batch = self.rows.batch(which, self.target, self.trainee.taps, (0, 0))
        self.trainee.loss(batch).loss.backward()  # type: ignore[no-untyped-call]
        for weight in self.weights:
            weight.grad = None
        hours = (time.perf_counter() - began) * (steps - self.progress.step) / 3600
        if hours > 0.1:
            self.report(f"on this CPU {steps} steps take about {hours:.1f} hours; a GPU is far faster")

    def step(self, lr: float) -> StepLoss:
        config, progress = self.config, self.progress
        which = torch.from_numpy(self.sampler.next(config.rows)).to(self.target.device)
        share = self.processes.rank, self.processes.world
        batch = self.rows.batch(which, self.target, self.trainee.taps, (config.seed, progress.step), share)
        loss = self.trainee.loss(batch)
        weight = self.processes.summed(loss.weight.detach().clone()).clamp(min=1)
        (loss.loss / weight).backward()  # type: ignore[no-untyped-call]
        self.processes.sum_gradients(self.weights)
        torch.nn.utils.clip_grad_norm_(self.weights, config.clip, foreach=True)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        progress.step += 1
        with torch.no_grad():
            torch._foreach_lerp_(self.ema, self.weights, 1 - self._ema_decay())
        return loss

    def _ema_decay(self) -> float:
        """Return a shorter average at the beginning, which would otherwise hold the initial weights for long."""
        return min(self.config.ema, 1 - 10 / (10 + self.progress.step)) if self.config.ema else 0.0

    def _position(self, late: bool = False) -> tuple[float, bool]:
        """Return how much of the training is done, and whether this run ends now; equal in all processes."""
        config, progress = self.config, self.progress
        if config.steps is not None:
            done = progress.step / config.steps
        else:
            assert config.minutes is not None
            done = progress.elapsed_s / (60 * config.minutes)
        done, stop = self.processes.agreed(min(done, 1.0), float(late or done >= 1))
        return done, bool(stop)

    def _learning_rate(self, done: float) -> float:
        warm = min(1.0, (self.progress.step + 1) / max(self.config.warmup, 1))
        return self.config.lr * warm * max(0.5 * (1 + math.cos(math.pi * done)), 0.01)

    # -- figures

    def _add(self, loss: StepLoss) -> None:
        parts = [
            loss.loss.detach().double().clone(),
            loss.weight,
            loss.hits,
            loss.counts,
            loss.walked,
            loss.anchors,
        ]
        values = [part.detach().double() for part in parts]
        self._sums = values if self._sums is None else [old + new for old, new in zip(self._sums, values, strict=True)]

    def _log(self, done: float) -> dict[str, Any]:
        """Report the steps since the last line. NaN ends the run before anything is saved."""
        assert self._sums is not None
        loss, weight, hits, counts, walked, anchors = (self.processes.summed(one).cpu() for one in self._sums)
        self._sums = None
        progress, now = self.progress, time.perf_counter()
        since, step = self._since
        self._since = now, progress.step
        if not math.isfinite(float(loss)):
            raise PacelineError(f"the loss is not a number at step {progress.step}; {self._way_on()}")
        tokens = (progress.step - step) * self.config.rows * self.rows.tokens.shape[1]
        entry = {
            "step": progress.step,
            "seconds": progress.elapsed_s,
            "epochs": self.sampler.epochs,
            "loss": float(loss / weight.clamp(min=1)),
            "block_tau": float(walked / anchors.clamp(min=1)),
            "hits": [round(float(one), 4) for one in (hits / counts.clamp(min=1))],
            "tokens_per_s": tokens / max(now - since, 1e-9),
            "lr": self._learning_rate(done),
        }
        progress.curve.append(entry)
        if self.processes.rank == 0:
            left = progress.elapsed_s * (1 - done) / done if done > 0 else 0.0
            self.report(
                f"step {progress.step} · loss {entry['loss']:.4f} · τ≈{entry['block_tau']:.2f} by block · "
                f"{entry['tokens_per_s']:,.0f} tok/s · epoch {entry['epochs']:.1f} · {duration(left)} left"
            )
        return entry

    def _way_on(self) -> str:
        if (self.folder / STATE).exists():
            return f"{self.folder} keeps the last good state: continue from it with --resume and a lower --lr"
        return "nothing was saved yet: begin again with a lower --lr"

    def _measure(self, entry: dict[str, Any]) -> None:
        if self.processes.rank == 0 and self.measure is not None:
            figures = self.measure(self.averaged())
            entry.update(figures)
            self.report("  ".join(f"{name} {_figure(value)}" for name, value in figures.items()))

    def averaged(self) -> dict[str, Tensor]:
        return dict(zip(self.names, self.ema, strict=True))

    # -- checkpoints

    def save(self) -> None:
        if self.processes.rank:
            return
        if not all(bool(torch.isfinite(weight).all()) for weight in self.weights):
            raise PacelineError(f"weights are not finite at step {self.progress.step}; {self._way_on()}")
        state = {
            "weights": dict(zip(self.names, self.weights, strict=True)),
            "ema": self.averaged(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "sampler": self.sampler.state(),
            "progress": asdict(self.progress),
            "config": asdict(self.config),
            "settings": self.settings,
        }
        write_state(self.folder / STATE, state)

    def resume(self, state: Mapping[str, Any] | None = None) -> None:
        """Continue from the folder's state, which may have been read before."""
        path = self.folder / STATE
        state = read_state(path) if state is None else state
        check_settings(path, state, self.settings)
        try:
            self._restore(state)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise damaged(path, error) from error

    def _restore(self, state: Mapping[str, Any]) -> None:
        if list(state["weights"]) != self.names or any(
            state["weights"][name].shape != weight.shape for name, weight in zip(self.names, self.weights, strict=True)
        ):
            path = self.folder / STATE
            raise InvalidParameter("resume", f"{path} is of a drafter of another shape; give the same sizes again")
        with torch.no_grad():
            for name, weight, average in zip(self.names, self.weights, self.ema, strict=True):
                weight.copy_(state["weights"][name])
                average.copy_(state["ema"][name])
        for optimizer, optimizer_state in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(optimizer_state)
        self.sampler.restore(state["sampler"])
        self.progress = TrainingProgress(**state["progress"])
        self._since = time.perf_counter(), self.progress.step


def make_optimizers(parameters: Mapping[str, Tensor], config: LoopConfig) -> list[torch.optim.Optimizer]:
    """Make optimizers. Matrices decay; norms, biases and embeddings do not. Muon takes the matrices of products."""
    matrices = [one for name, one in parameters.items() if is_matrix(name, one)]
    others = [one for name, one in parameters.items() if not is_matrix(name, one)]
    fused = all(one.device.type in ("cpu", "cuda") for one in parameters.values())
    adamw: dict[str, Any] = {"lr": config.lr, "betas": (0.9, 0.95), "fused": fused}
    if config.optimizer == "muon":
        muon = torch.optim.Muon(
            matrices, lr=config.lr, weight_decay=config.weight_decay, adjust_lr_fn="match_rms_adamw"
        )
        return [muon, torch.optim.AdamW(others, weight_decay=0.0, **adamw)]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return [torch.optim.AdamW([group for group in groups if group["params"]], **adamw)]


def is_matrix(name: str, parameter: Tensor) -> bool:
    return parameter.dim() == 2 and name.endswith(("_proj.weight", "fc.weight", "linear.weight"))


def duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.1f} min"


def _figure(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)
