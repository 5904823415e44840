"""The subject of advice: a loaded model whose engines are measured and probed, and what its steps and drafters cost.

A draft model is loaded once and shared by all engines that use it. One that cannot serve this target is left out with
its reason; one that does not exist is an error, like any other name that is wrong.

Steps are timed whole (pass, verification, bookkeeping), on the real engine, with drafts of a chosen size that are
rejected. The sizes are measured in turn, round after round in a new random order, and the median of each counts: a
machine that is slow for a second does not make one size look expensive.
"""

from __future__ import annotations

import bisect
import itertools
import random
import time
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from paceline.advisor.choice import OFF
from paceline.bench.draft_models import MEMORY_SHARE, DraftModel, load_draft_model
from paceline.bench.engines import Engines, room_for
from paceline.bench.grid import Contender
from paceline.bench.runner import WARM_UP, OnProgress, RunPlan
from paceline.build import make_engine, trained_folders
from paceline.config import AUTO, SpeculationConfig
from paceline.core.draft import Draft
from paceline.core.sequence import Sequence as TokenSequence
from paceline.drafters import Drafter, DraftRequest
from paceline.drafters.base import HostDrafter
from paceline.drafters.model.draft_model import CATCH_UP
from paceline.engine.drafter_set import SMALL_LAG
from paceline.engine.engine import Engine
from paceline.engine.policy import DraftPlan, FixedPolicy, Policy
from paceline.errors import DeviceError, InvalidParameter, UnsupportedModel
from paceline.models.kernels import INT8
from paceline.models.kv_cache import KVCache
from paceline.models.load.hub import PullProgress, resolve
from paceline.models.load.open_model import LoadedModel, load_model
from paceline.models.quant.distance import Alone, distance
from paceline.models.spec import ModelConfig
from paceline.platform import cpu
from paceline.sampling_params import SamplingParams

CONTEXT = 48  # tokens; of every sequence when its steps are timed
MAX_DRAFTED = 256  # tokens; of one step, all sequences together
MIN_ROUNDS, MAX_ROUNDS = 3, 12
LEVEL_S = 3.0  # seconds; of measuring each number of sequences, beyond MIN_ROUNDS
DRAFT_DEPTH = 4  # tokens; of a draft whose drafter is timed
PASS_ROWS = (1, 4, 8, 16)  # rows; of the passes that compare activations
PASS_ROUNDS = 7  # the least of them counts: other processes only add time
MAX_COMPARED, LONGEST = 16, 128  # prompts that compare activations, and tokens of each


class AdviceSubject(Engines):
    def __init__(
        self, model: str, *, draft_models: Sequence[str] = (), progress: PullProgress | None = None, **options: Any
    ) -> None:
        super().__init__(model, [OFF], progress=progress, **options)
        self.clock: Callable[[], float] = time.perf_counter
        self._options = {name: options[name] for name in ("dtype", "device", "threads") if name in options}
        self.draft_models: list[DraftModel] = []
        self.refused: dict[str, str] = {}  # draft model -> reason why it is left out
        for name in dict.fromkeys(draft_models):
            try:
                self.draft_models.append(load_draft_model(name, resolve(name, progress), self.loaded))
            except (InvalidParameter, UnsupportedModel, DeviceError) as problem:
                self.refused[name] = str(problem).removeprefix("draft_model: ")

    def with_int8(self) -> LoadedModel | None:
        """Load the model again with int8 activations; None without kernels, weights or memory for it."""
        if not self.loaded.kind.is_blocks or not _fits_twice(self.path):
            return None
        try:
            return load_model(self.path, activations=INT8, **self._options)
        except (InvalidParameter, DeviceError):
            return None

    @property
    def config(self) -> ModelConfig:
        return self.loaded.config

    @property
    def methods(self) -> list[str]:
        """The methods that `auto` has without a draft model: lookups and trained drafters."""
        return [drafter.name for drafter in self.drafters(Contender(AUTO))]

    def draft_models_for(self, contender: Contender) -> list[DraftModel]:
        return [model for model in self.draft_models if model.name == contender.draft_model]

    def drafter(self, contender: Contender) -> Drafter:
        """Make the contender's one drafter."""
        drafters = self.drafters(contender)
        if contender.draft_model is not None:
            return drafters[-1]
        return next(drafter for drafter in drafters if drafter.name == contender.method)

    def weight_bytes(self, contender: Contender) -> int:
        """Return the size of the contender's draft model, or trained drafter."""
        if models := self.draft_models_for(contender):
            return models[0].weight_bytes
        folders = trained_folders(self.loaded, SpeculationConfig(method=contender.method, drafter=self._drafter))
        return sum(file.stat().st_size for folder in folders for file in folder.glob("*.safetensors"))

    def probe(self, drafters: Sequence[Drafter], policy: Policy, *, sequences: int, length: int) -> Engine:
        """Build an engine for `sequences` sequences of up to `length` tokens, which shares no prefixes."""
        return make_engine(self.loaded, room_for(sequences, length, prefix_caching=False), drafters, policy)


def _fits_twice(path: Path) -> bool:
    """Return whether the free memory holds a model's weights once more."""
    files = path.iterdir() if path.is_dir() else [path]
    size = sum(file.stat().st_size for file in files if file.suffix in (".safetensors", ".gguf"))
    free = cpu.memory().available
    return not free or size <= MEMORY_SHARE * free


# -- costs


@dataclass(frozen=True, kw_only=True)
class PassCost:
    """Seconds of a step without drafting. Measured within one minute, so ratios hold when the machine slows down."""

    decode: Mapping[int, Mapping[int, float]]  # sequences -> drafted tokens of all of them together -> seconds

    def step_s(self, sequences: int, drafted: int) -> float:
        return interpolated({count: interpolated(curve, drafted) for count, curve in self.decode.items()}, sequences)

    def verify_cost(self, sequences: int, k: int) -> float:
        """Return v(k): seconds of a pass with k drafted tokens per sequence, divided by those of a plain pass for the
        same number of sequences."""
        return self.step_s(sequences, sequences * k) / self.step_s(sequences, 0)


@dataclass(frozen=True, kw_only=True)
class DrafterCost:
    method: str
    draft_model: str | None = None
    seconds: Mapping[int, float]  # sequences that draft together -> seconds of each token drafted ahead
    memory_bytes: int
    kv_bytes: int = 0  # more for every token of context
    most_bytes: int = 0  # upper bound of its store of earlier answers; 0: it has none

    def serves(self, contender: Contender) -> bool:
        return (self.method, self.draft_model) == (contender.method, contender.draft_model)

    def at(self, sequences: int) -> float:
        """Return the seconds of a token drafted ahead for `sequences` sequences together."""
        return interpolated(self.seconds, sequences)


@dataclass(frozen=True, kw_only=True)
class ActivationsCost:
    """Cost and effect of int8 activations."""

    float32_s: Mapping[int, float]  # rows of a pass -> its seconds
    int8_s: Mapping[int, float]
    distance: Mapping[str, float]

    def share(self, rows: int) -> float:
        return self.int8_s[rows] / self.float32_s[rows]


def interpolated(points: Mapping[int, float], at: float) -> float:
    """Interpolate linearly; constant before the first point, as steep as before it after the last."""
    known = sorted(points)
    if len(known) == 1 or at <= known[0]:
        return points[known[0]]
    above = min(bisect.bisect_left(known, at), len(known) - 1)
    low, high = known[above - 1], known[above]
    return points[low] + (points[high] - points[low]) * (at - low) / (high - low)


# -- steps


class RejectedDrafter(HostDrafter):
    """Drafts `max_nodes` tokens, which the target almost never accepts."""

    name = "rejected"

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def propose(self, rows: Sequence[DraftRequest]) -> Draft:
        width = max(row.max_nodes for row in rows)
        tokens = [
            [(31 * row.sequence.tokens[-1] + 7 * at + 11) % self._vocab_size for at in range(width)] for row in rows
        ]
        counts = torch.tensor([row.max_nodes for row in rows], dtype=torch.int64)
        return Draft.chains(torch.tensor(tokens, dtype=torch.int64), counts)


class FixedPlan(FixedPolicy):
    """`drafted` tokens in every step, all sequences together, by one method."""

    def __init__(self, method: str, drafted: int) -> None:
        self.method, self.drafted = method, drafted

    def plan(self, sequences: Sequence[TokenSequence], *_: object) -> list[DraftPlan]:
        each, rest = divmod(self.drafted, max(len(sequences), 1))
        return [DraftPlan(self.method, each + (at < rest)) for at in range(len(sequences))]


def pass_cost(subject: AdviceSubject, plan: RunPlan, on_progress: OnProgress = lambda *_: None) -> PassCost:
    """Time steps of 1, 4, 16, ... sequences, up to the plan's highest concurrency."""
    most = max(plan.concurrencies)
    counts = sorted({most, *(4**power for power in range(5) if 4**power < most)})
    decode: dict[int, dict[int, float]] = {}
    for done, count in enumerate(counts):
        on_progress(done, len(counts), f"timing passes, {count} at once")
        drafter = RejectedDrafter(subject.config.vocab_size)
        seconds = _step_seconds(subject, drafter, count, drafted_sizes(count), plan)
        # More rows never take less time: where they seem to, it is noise.
        decode[count] = dict(zip(seconds, itertools.accumulate(seconds.values(), max), strict=True))
    return PassCost(decode=decode)


def drafted_sizes(sequences: int) -> list[int]:
    """Return numbers of tokens: dense where few sequences have a draft, up to 16 for each sequence."""
    most = min(16 * sequences, MAX_DRAFTED)
    return sorted({0, most, *(size for size in (1, 2, 3, 4, 6, 8, 12, 16, 32, 64, 128) if size < most)})


def _step_seconds(
    subject: AdviceSubject, drafter: Drafter, sequences: int, sizes: Sequence[int], plan: RunPlan
) -> dict[int, float]:
    """Time a step by the tokens drafted in it; empty where the drafter never finishes reading the prompts."""
    policy, steps = FixedPlan(drafter.name, sequences), len(sizes) * (MAX_ROUNDS + 1)
    reading = 4 + 2 * sequences * CONTEXT // CATCH_UP  # steps: all sequences go on while the last are being read
    length = CONTEXT + 2 * reading + (steps + 1) * (1 + -(-max(sizes) // sequences))
    engine = subject.probe([drafter], policy, sequences=sequences, length=length)
    seed = 7 if plan.temperature > 0 else None
    params = SamplingParams(
        temperature=plan.temperature, max_tokens=engine.max_model_len, seed=seed, ignore_eos=True
    ).resolve(subject.defaults)
    text = list(subject.encode(WARM_UP, [])) * CONTEXT
    for index in range(sequences):
        engine.add_request(str(index), text[index % CONTEXT :][:CONTEXT], params)
    running = engine.scheduler.sequences
    while any(not sequence.decoding for sequence in running()):
        engine.step()
    while any(drafter.unread_tokens(sequence) > SMALL_LAG for sequence in running()):
        if not reading:
            return {}
        engine.step()
        reading -= 1

    def step(size: int) -> None:
        policy.drafted = size
        engine.step()

    return _interleaved(subject.clock, sizes, step)


def _interleaved(clock: Callable[[], float], sizes: Sequence[int], run: Callable[[int], None]) -> dict[int, float]:
    """Return the median seconds of each size; the first round is not counted."""
    seconds: dict[int, list[float]] = {size: [] for size in sizes}
    noise, order = random.Random(0), list(sizes)
    began = clock()
    for turn in range(MAX_ROUNDS + 1):
        if turn > MIN_ROUNDS and clock() - began > LEVEL_S:
            break
        noise.shuffle(order)
        for size in order:
            started = clock()
            run(size)
            if turn:
                seconds[size].append(clock() - started)
    return {size: median(values) for size, values in seconds.items()}


# -- drafters


def drafter_cost(
    subject: AdviceSubject, contender: Contender, cost: PassCost, plan: RunPlan, tokens: Sequence[int]
) -> DrafterCost:
    """Measure a lookup alone, on a prompt's `tokens`, and a drafter with a model in the steps of an engine."""
    drafter = subject.drafter(contender)
    if not drafter.taps and not drafter.kv_layers:
        return _lookup_cost(subject, drafter, tokens)
    return DrafterCost(
        method=contender.method,
        draft_model=contender.draft_model,
        seconds=_seconds_in_steps(subject, contender, cost, plan),
        memory_bytes=subject.weight_bytes(contender),
        kv_bytes=KVCache.bytes_per_block(drafter.kv_layers, 1, subject.loaded.decoder.cache_dtype),
    )


def _lookup_cost(subject: AdviceSubject, drafter: Drafter, tokens: Sequence[int]) -> DrafterCost:
    """Measure a lookup's memory after reading a prompt, and its time to draft then."""
    sequence = TokenSequence("0", tokens[:1], SamplingParams().resolve(subject.defaults), max_len=len(tokens))
    tracemalloc.start()
    drafter.admit(sequence, 0, 0)
    for token in tokens[1:]:
        sequence.tokens.append(token)
        drafter.level(sequence)  # indexes what was committed
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    spent = []
    for _ in range(2 * MIN_ROUNDS):
        started = subject.clock()
        drafter.propose([DraftRequest(sequence, DRAFT_DEPTH)])
        spent.append(subject.clock() - started)
    bound = getattr(SpeculationConfig(), f"{drafter.name}_bytes", 0)  # size of a store of earlier answers
    seconds = {1: median(spent) / DRAFT_DEPTH}
    return DrafterCost(method=drafter.name, seconds=seconds, memory_bytes=held, most_bytes=bound)


def _seconds_in_steps(subject: AdviceSubject, contender: Contender, cost: PassCost, plan: RunPlan) -> dict[int, float]:
    """Return the seconds that one drafted token adds to a step, by sequences: against free drafts of the same size.

    Numbers of sequences for which the drafter never finishes reading the prompts are left out, to be extrapolated.
    """
    seconds: dict[int, float] = {}
    for count in cost.decode:
        drafted = DRAFT_DEPTH * count
        for took in _step_seconds(subject, subject.drafter(contender), count, [drafted], plan).values():
            seconds[count] = max(took - cost.step_s(count, drafted), 0.0) / DRAFT_DEPTH
    return seconds


# -- activations


def activations_cost(
    loaded: LoadedModel, rounded: LoadedModel, prompts: Sequence[Sequence[int]], clock: Callable[[], float]
) -> ActivationsCost:
    """`rounded`: the same model with int8 activations."""
    longest = CONTEXT + max(PASS_ROWS)
    tokens = [at % loaded.config.vocab_size for at in range(3, 3 + longest)]
    sequences = [Alone(model.decoder, longest) for model in (loaded, rounded)]
    for sequence in sequences:
        sequence.logits(tokens)
    least: list[dict[int, float]] = [dict.fromkeys(PASS_ROWS, float("inf")) for _ in sequences]
    for _ in range(PASS_ROUNDS):
        for rows in PASS_ROWS:
            for sequence, seconds in zip(sequences, least, strict=True):
                started = clock()
                sequence.logits(tokens[CONTEXT : CONTEXT + rows], CONTEXT)
                seconds[rows] = min(seconds[rows], clock() - started)
    compared = [prompt[:LONGEST] for prompt in prompts[:: max(1, len(prompts) // MAX_COMPARED)][:MAX_COMPARED]]
    float32_s, int8_s = least
    return ActivationsCost(
        float32_s=float32_s, int8_s=int8_s, distance=distance(loaded.decoder, rounded.decoder, compared)
    )
