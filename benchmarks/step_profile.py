"""Where the host's time of a step goes, by function.

Without a GPU the model is one that answers at once, so that a step is all host, and plain steps are launched ahead as
they are on one; with one it is the yardstick with random weights, or with --small smollm2's shape, and the wait for the
device shows as one line among the others.

    python benchmarks/step_profile.py                       # 1, 64 and 512 rows, plain, sampled and with lookup drafts
    python benchmarks/step_profile.py --device cuda --cells "ngram 2 64 0" --lines 30
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from common import finish

from paceline import SamplingParams
from paceline.config import EngineConfig, SpeculationConfig
from paceline.drafters import METHODS, DrafterContext
from paceline.engine.batch import StepResult
from paceline.engine.block_manager import Reserved
from paceline.engine.engine import Engine
from paceline.engine.in_flight import InFlightStep
from paceline.engine.policy.adaptive import AdaptivePolicy
from paceline.models.decoder import Model
from paceline.models.kv_cache import KVSpec, LayerCache
from paceline.models.plan import ModelOutput, PassPlan
from paceline.testing import toy_config

CELLS = ["none 0 1 0", "ngram 4 1 0", "none 0 64 0", "ngram 2 64 0", "none 0 512 0", "none 0 512 1"]
VOCAB, PERIOD, PROMPT = 512, 37, 40


class InstantModel:
    """Says the tokens 0, 1, 2, ... round and round, so that looking up finds a draft; takes no time for it."""

    def __init__(self) -> None:
        self.config = toy_config(vocab_size=VOCAB, max_positions=4096)
        self.kv_specs = (KVSpec(num_kv_heads=1, head_dim=1),)
        self.device, self.cache_dtype = torch.device("cpu"), torch.float32
        self.torch_threads: int | None = 1
        self._logits = torch.zeros(VOCAB, VOCAB)
        self._logits[torch.arange(VOCAB), (torch.arange(VOCAB) + 1) % PERIOD] = 30.0
        self.begun = 0.0  # when the last pass was asked for

    def prepare(self, *_: object) -> bool:
        return False

    def forward(
        self,
        tokens: torch.Tensor,
        plan: PassPlan,
        caches: Sequence[LayerCache],
        logit_rows: torch.Tensor,
        taps: Any = (),
    ) -> ModelOutput:
        self.begun = time.perf_counter()
        return ModelOutput(self._logits[tokens[logit_rows]], None)


def engine_of(model: Model, method: str, k: int | None, rows: int) -> Engine:
    context = DrafterContext(model.config, model.device, SpeculationConfig(method=method))
    names = {"none": (), "auto": ("ngram", "suffix")}.get(method, (method,))
    drafters = [METHODS[name].make(context) for name in names]
    config = EngineConfig(
        prefix_caching=False,
        kv_cache_bytes=(64 << 20) if model.device.type == "cpu" else 8 << 30,
        max_num_seqs=rows,
        max_num_batched_tokens=2048,
        max_model_len=2048,
    )
    engine = Engine(model, config, drafters=drafters, policy=AdaptivePolicy(method, k))
    engine.runs_ahead = True  # as on a GPU
    return engine


def measure(model: Model, cell: str, steps: int, lines: int) -> dict[str, float]:
    method, k, rows, temperature = cell.split()
    engine = engine_of(model, method, int(k) or None, int(rows))
    params = SamplingParams(temperature=float(temperature), max_tokens=1900, ignore_eos=True).resolve({})
    generator = torch.Generator().manual_seed(0)
    # Each repeats one sentence four times, so that a lookup finds something.
    prompts = torch.randint(3, VOCAB, (int(rows), PROMPT // 4), generator=generator).repeat(1, 4).tolist()
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), prompt, params)
    run(engine, 60)
    waits = watched(engine) if isinstance(model, InstantModel) else []
    times = run(engine, steps)
    exposed = 1e3 * statistics.median(waits or [0.0])
    profiler = cProfile.Profile()
    profiler.enable()
    run(engine, steps)
    profiler.disable()
    spread = f"{1e3 * statistics.median(times):.3f} ms a step, {1e3 * min(times):.3f} at best"
    print(f"== {cell}: {spread}, {exposed:.3f} from a verdict to the next pass", flush=True)
    if lines:
        pstats.Stats(profiler).sort_stats("tottime").print_stats(lines)
    return {"median_ms": 1e3 * statistics.median(times), "best_ms": 1e3 * min(times), "exposed_ms": exposed}


def watched(engine: Engine) -> list[float]:
    """What a device would wait for the host in the steps that follow: from reading a verdict to the next pass."""
    waits: list[float] = []
    read, publish, model = engine.committer.read, engine.committer.publish, engine.model
    assert isinstance(model, InstantModel)
    read_at = 0.0

    def reading(flight: InFlightStep) -> StepResult:
        nonlocal read_at
        read_at = time.perf_counter()
        return read(flight)

    def publishing(flight: InFlightStep, result: StepResult, reserved: Reserved) -> None:
        if model.begun > read_at:  # else it was launched before this step was read
            waits.append(model.begun - read_at)
        publish(flight, result, reserved)

    engine.committer.read, engine.committer.publish = reading, publishing  # type: ignore[method-assign]
    return waits


def run(engine: Engine, steps: int) -> list[float]:
    times = []
    for _ in range(steps):
        begun = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - begun)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", nargs="*", default=CELLS, help='"method k rows temperature" each')
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--small", action="store_true", help="smollm2's shape instead of the yardstick's")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--lines", type=int, default=0)
    args = parser.parse_args()
    model: Model = InstantModel()
    if args.device != "cpu":
        from gpu_subject import Subject

        subject = Subject("random", torch.device(args.device))
        model = subject.small if args.small else subject.yardstick
    else:
        torch.set_num_threads(1)
    finish("step_profile", {cell: measure(model, cell, args.steps, args.lines) for cell in args.cells})


if __name__ == "__main__":
    main()
