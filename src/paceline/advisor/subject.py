"""Times on this machine: of a step by sequences and drafted tokens, each drafter's time and memory, int8 activations.

Steps are timed whole, on the real engine, with drafts of a chosen size that are rejected. The sizes are measured in
turn, round after round in a new random order, and the median of each counts: a machine that is slow for a second does
not make one size look expensive.
"""

from __future__ import annotations

import itertools
import random
import tracemalloc
from collections.abc import Callable, Sequence
from statistics import median

import torch

from paceline.advisor.choice import Drafted
from paceline.advisor.cost import ActivationsCost, DrafterCost, PassCost
from paceline.advisor.machine import Machine
from paceline.bench.draft_models import DraftModel
from paceline.bench.grid import Contender
from paceline.bench.runner import WARM_UP, OnProgress, Plan
from paceline.config import SpeculationConfig
from paceline.core.draft import Draft
from paceline.core.sequence import Sequence as TokenSequence
from paceline.drafters import Drafter, DraftRequest
from paceline.drafters.base import HostDrafter
from paceline.drafters.model.draft_model import CATCH_UP, DraftModelDrafter
from paceline.engine.drafter_set import CATCHING_UP
from paceline.engine.policy.interface import DraftPlan, LearnsNothing
from paceline.models.load.open_model import LoadedModel
from paceline.models.quant.distance import Alone, distance
from paceline.sampling_params import SamplingParams

SHORT = 48  # tokens of context
MOST_DRAFTED = 256  # tokens of one step, all sequences together
ROUNDS, MOST_ROUNDS = 3, 12
LEVEL_S = 3.0  # of measuring each number of sequences
DRAFT_DEPTH = 4


class RejectedDrafter(HostDrafter):
    """Drafts as many tokens as its budget; the target hardly ever agrees."""

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


class FixedPlan(LearnsNothing):
    """`drafted` tokens in every step, all sequences together, by one method."""

    def __init__(self, method: str, drafted: int) -> None:
        self.method, self.drafted = method, drafted

    def plan(self, sequences: Sequence[TokenSequence], other_rows: int, others_wait: bool) -> list[DraftPlan]:
        each, rest = divmod(self.drafted, max(len(sequences), 1))
        return [DraftPlan(self.method, each + (at < rest)) for at in range(len(sequences))]


def profile(subject: Machine, levels: Sequence[int], plan: Plan, on_progress: OnProgress = lambda *_: None) -> PassCost:
    sequences = probed_levels(max(levels))
    decode: dict[int, dict[int, float]] = {}
    for done, count in enumerate(sequences):
        on_progress(done, len(sequences), f"timing passes, {count} at once")
        times = _decode_times(subject, RejectedDrafter(subject.config.vocab_size), count, drafted_sizes(count), plan)
        # More rows never take less time: where they seem to, it is noise.
        decode[count] = dict(zip(times, itertools.accumulate(times.values(), max), strict=True))
    return PassCost(decode=decode)


def probed_levels(most: int) -> list[int]:
    """1, 4, 16, ... and the highest concurrency given."""
    return sorted({most, *(4**power for power in range(5) if 4**power < most)})


def drafted_sizes(sequences: int) -> list[int]:
    """Few tokens at first, for not every sequence has a draft in every step, up to 16 for each."""
    most = min(16 * sequences, MOST_DRAFTED)
    return sorted({0, most, *(size for size in (1, 2, 3, 4, 6, 8, 12, 16, 32, 64, 128) if size < most)})


def _decode_times(
    subject: Machine, drafter: Drafter, sequences: int, sizes: Sequence[int], plan: Plan
) -> dict[int, float]:
    """Seconds of a step by the tokens drafted in it; empty where the drafter never finishes reading the prompts."""
    policy, steps = FixedPlan(drafter.name, sequences), len(sizes) * (MOST_ROUNDS + 1)
    reading = 4 + 2 * sequences * SHORT // CATCH_UP  # steps: all sequences go on while the last are being read
    length = SHORT + 2 * reading + (steps + 1) * (1 + -(-max(sizes) // sequences))
    engine = subject.probe([drafter], policy, sequences=sequences, length=length)
    seed = 7 if plan.temperature > 0 else None
    params = SamplingParams(
        temperature=plan.temperature, max_tokens=engine.max_model_len, seed=seed, ignore_eos=True
    ).resolve(subject.defaults)
    text = list(subject.encode(WARM_UP, [])) * SHORT
    for index in range(sequences):
        engine.add_request(str(index), text[index % SHORT :][:SHORT], params)
    running = engine.scheduler.sequences
    while any(not sequence.decoding for sequence in running()):
        engine.step()
    while any(drafter.unread_tokens(sequence) > CATCHING_UP for sequence in running()):
        if not reading:
            return {}
        engine.step()
        reading -= 1

    def step(size: int) -> None:
        policy.drafted = size
        engine.step()

    return _interleaved(subject.clock, sizes, step)


def _interleaved(clock: Callable[[], float], sizes: Sequence[int], run: Callable[[int], None]) -> dict[int, float]:
    """Median seconds of each size, run 3 times at least, more while there is time; the first round is not counted."""
    times: dict[int, list[float]] = {size: [] for size in sizes}
    noise, order = random.Random(0), list(sizes)
    began = clock()
    for turn in range(MOST_ROUNDS + 1):
        if turn > ROUNDS and clock() - began > LEVEL_S:
            break
        noise.shuffle(order)
        for size in order:
            started = clock()
            run(size)
            if turn:
                times[size].append(clock() - started)
    return {size: median(found) for size, found in times.items()}


# -- drafters


def method_cost(subject: Machine, method: str, cost: PassCost, plan: Plan, tokens: Sequence[int]) -> DrafterCost:
    """Measure a lookup alone, a trained drafter in the steps of an engine."""
    drafter = next(each for each in subject.drafters(Contender(method)) if each.name == method)
    if drafter.taps or drafter.kv_layers:
        return _trained_drafter(subject, method, cost, plan)
    return _lookup(subject, drafter, tokens)


def _lookup(subject: Machine, drafter: Drafter, tokens: Sequence[int]) -> DrafterCost:
    """Measure a drafter without a model: its memory after reading a prompt, and its time to draft then."""
    sequence = TokenSequence("0", tokens[:1], SamplingParams().resolve(subject.defaults), max_len=len(tokens))
    tracemalloc.start()
    drafter.admit(sequence, 0, 0)
    for token in tokens[1:]:
        sequence.tokens.append(token)
        drafter.level(sequence)  # indexes what was committed
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    spent = []
    for _ in range(2 * ROUNDS):
        started = subject.clock()
        drafter.propose([DraftRequest(sequence, DRAFT_DEPTH)])
        spent.append(subject.clock() - started)
    bound = getattr(SpeculationConfig(), f"{drafter.name}_bytes", 0)  # of a store of earlier answers
    seconds = {1: median(spent) / DRAFT_DEPTH}
    return DrafterCost(method=drafter.name, seconds=seconds, memory_bytes=held, most_bytes=bound)


def _trained_drafter(subject: Machine, method: str, cost: PassCost, plan: Plan) -> DrafterCost:
    def made() -> Drafter:
        return next(each for each in subject.drafters(Contender(method)) if each.name == method)

    value_bytes = subject.loaded.decoder.cache_dtype.itemsize
    return DrafterCost(
        method=method,
        seconds=_seconds_in_steps(subject, made, cost, plan),
        memory_bytes=subject.trained_bytes(method),
        kv_bytes=sum(2 * spec.num_kv_heads * spec.head_dim * value_bytes for spec in made().kv_layers),
    )


def model_drafter(subject: Machine, model: DraftModel, cost: PassCost, plan: Plan) -> DrafterCost:
    def made() -> Drafter:
        return subject.drafters(Drafted(DraftModelDrafter.name, None, model.name))[-1]

    seconds = _seconds_in_steps(subject, made, cost, plan)
    return DrafterCost(
        method=DraftModelDrafter.name,
        draft_model=model.name,
        seconds=seconds,
        memory_bytes=model.weight_bytes,
        kv_bytes=model.kv_bytes,
    )


def _seconds_in_steps(subject: Machine, made: Callable[[], Drafter], cost: PassCost, plan: Plan) -> dict[int, float]:
    """Return the seconds that one drafted token adds to a step, by sequences: against free drafts of the same size.

    Numbers of sequences for which the drafter never finishes reading the prompts are left out and extrapolated from
    fewer.
    """
    seconds: dict[int, float] = {}
    for count in cost.decode:
        drafted = DRAFT_DEPTH * count
        for took in _decode_times(subject, made(), count, [drafted], plan).values():
            seconds[count] = max(took - cost.decoding(count, drafted), 0.0) / DRAFT_DEPTH
    return seconds


# -- activations

PASS_ROWS = (1, 4, 8, 16)
PASS_ROUNDS = 7  # the least of them counts: other processes only add time
MOST_PROMPTS, LONGEST = 16, 128  # that are compared, and tokens of each


def activations_cost(
    loaded: LoadedModel,
    rounded: LoadedModel,
    prompts: Sequence[Sequence[int]],
    clock: Callable[[], float],
) -> ActivationsCost:
    """`rounded`: the same model with int8 activations."""
    longest = SHORT + max(PASS_ROWS)
    tokens = [at % loaded.config.vocab_size for at in range(3, 3 + longest)]
    sequences = [Alone(model.decoder, longest) for model in (loaded, rounded)]
    for sequence in sequences:
        sequence.logits(tokens)
    least: list[dict[int, float]] = [dict.fromkeys(PASS_ROWS, float("inf")) for _ in sequences]
    for _ in range(PASS_ROUNDS):
        for rows in PASS_ROWS:
            for sequence, found in zip(sequences, least, strict=True):
                begun = clock()
                sequence.logits(tokens[SHORT : SHORT + rows], SHORT)
                found[rows] = min(found[rows], clock() - begun)
    compared = [prompt[:LONGEST] for prompt in prompts[:: max(1, len(prompts) // MOST_PROMPTS)][:MOST_PROMPTS]]
    float32_s, int8_s = least
    moved = distance(loaded.decoder, rounded.decoder, compared)
    return ActivationsCost(float32_s=float32_s, int8_s=int8_s, distance=moved)
