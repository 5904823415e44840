"""What this machine takes: a step by sequences, drafted tokens and context, and what each drafter takes and holds.

Steps are timed whole, on the real engine, with drafts of a chosen size that are nonsense and so are rejected. The
sizes are measured in turn, round after round in an order drawn anew, and the median of each counts: a machine that is
slow for a second makes none of them look dear.
"""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch

from paceline.advisor.candidates import Drafted, draft_model_of
from paceline.advisor.machine import Advised
from paceline.advisor.pass_cost import PassCost, line, rising
from paceline.advisor.records import Record
from paceline.bench.draft_models import DraftModel
from paceline.bench.grid import Contender
from paceline.bench.runner import WARM_UP, OnProgress, Plan
from paceline.config import SpeculationConfig
from paceline.draft import Draft
from paceline.drafters import Commit, Drafter, DraftRow
from paceline.drafters.base import HostDrafter
from paceline.drafters.draft_model import CATCH_UP
from paceline.engine.drafting import READ_AHEAD
from paceline.engine.engine import Engine
from paceline.engine.policy import Choice, LearnsNothing
from paceline.sampling_params import SamplingParams
from paceline.sequence import Sequence as TokenSequence

SHORT = 48  # tokens of context
MOST_DRAFTED = 256  # of one step, all sequences together
ROUNDS, MOST_ROUNDS = 3, 12
LEVEL_S = 3.0  # of measuring each number of sequences
PROMPTS = (32, 128, 512)
DRAFT_DEPTH = 4
MOST_HELD = {"suffix": SpeculationConfig().suffix_bytes}  # by method: its store of earlier answers grows


@dataclass(frozen=True, kw_only=True)
class DrafterCost:
    """`seconds`: for each token drafted ahead, by sequences that draft together."""

    method: str
    draft_model: str | None = None
    seconds: Mapping[int, float]
    memory_bytes: int
    kv_bytes: int = 0  # more for every token of context
    most_bytes: int = 0  # what it may come to hold of answers; 0: no more than it holds

    def serves(self, contender: Contender) -> bool:
        return (self.method, self.draft_model) == (contender.method, draft_model_of(contender))

    def at(self, sequences: int) -> float:
        """Seconds for a token drafted ahead for so many sequences together."""
        return line(self.seconds, sequences)


class Nonsense(HostDrafter):
    """Drafts as much as it is asked for, and nothing that anybody would say."""

    name = "nonsense"

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def propose(self, rows: Sequence[DraftRow]) -> Draft:
        width = max(row.budget for row in rows)
        tokens = [
            [(31 * row.sequence.tokens[-1] + 7 * at + 11) % self._vocab_size for at in range(width)] for row in rows
        ]
        counts = torch.tensor([row.budget for row in rows], dtype=torch.int64)
        return Draft.chains(torch.tensor(tokens, dtype=torch.int64), counts)


class Told(LearnsNothing):
    """A policy that does as it is told."""

    def __init__(self) -> None:
        self.method, self.drafted = "nonsense", 0  # tokens of the next step, all sequences together

    def plan(self, sequences: Sequence[TokenSequence], other_rows: int, others_wait: bool) -> list[Choice]:
        each, rest = divmod(self.drafted, max(len(sequences), 1))
        return [Choice(self.method, each + (at < rest)) for at in range(len(sequences))]


def profile(
    subject: Advised, levels: Sequence[int], longest: int, plan: Plan, on_progress: OnProgress = lambda *_: None
) -> PassCost:
    """`longest`: tokens of the longest request with its answer."""
    sequences = probed_levels(max(levels))
    decode: dict[int, dict[int, float]] = {}
    for done, count in enumerate(sequences):
        on_progress(done, len(sequences) + 1, f"timing passes, {count} at once")
        decode[count] = rising(_decode_times(subject, count, SHORT, drafted_sizes(count), plan))
    on_progress(len(sequences), len(sequences) + 1, "timing prompts and long contexts")
    rounds = len(drafted_sizes(1)) * MOST_ROUNDS / 2
    return PassCost(
        decode=decode,
        context=SHORT + rounds / 2,
        row_context_s=_context_slope(subject, decode[1], longest, plan),
        prompt=_prompt_times(subject, longest, plan),
    )


def probed_levels(most: int) -> list[int]:
    """1, 4, 16, ... and the highest asked about."""
    return sorted({most, *(4**power for power in range(5) if 4**power < most)})


def drafted_sizes(sequences: int) -> list[int]:
    """Few tokens at first, for not every sequence has a draft in every step, up to 16 for each."""
    most = min(16 * sequences, MOST_DRAFTED)
    return sorted({0, most, *(size for size in (1, 2, 3, 4, 6, 8, 12, 16, 32, 64, 128) if size < most)})


def _decode_times(subject: Advised, sequences: int, context: int, sizes: Sequence[int], plan: Plan) -> dict[int, float]:
    policy, steps = Told(), len(sizes) * (MOST_ROUNDS + 1)
    engine = subject.probe(
        [Nonsense(subject.config.vocab_size)], policy, sequences=sequences, length=context + steps + max(sizes)
    )
    _fill(subject, engine, sequences, context, steps, plan)
    return _interleaved(subject, sizes, lambda size: _timed_step(subject, engine, policy, size))


def _fill(subject: Advised, engine: Engine, sequences: int, context: int, steps: int, plan: Plan) -> None:
    """Requests that are past their prompts and will go on for so many steps, and more."""
    text = subject.encode(WARM_UP, [])
    params = _params(subject, plan, max_tokens=engine.max_model_len)
    for index in range(sequences):
        prompt = (text[index % len(text) :] + text * (context // len(text) + 1))[:context]
        engine.add_request(str(index), prompt, params)
    while any(not sequence.decoding for sequence in engine.scheduler.sequences()):
        engine.step()


def _params(subject: Advised, plan: Plan, max_tokens: int) -> SamplingParams:
    seed = 7 if plan.temperature > 0 else None
    params = SamplingParams(temperature=plan.temperature, max_tokens=max_tokens, seed=seed, ignore_eos=True)
    return params.resolve(subject.defaults)


def _timed_step(subject: Advised, engine: Engine, policy: Told, drafted: int) -> float:
    policy.drafted = drafted
    started = subject.clock()
    engine.step()
    return subject.clock() - started


def _interleaved(subject: Advised, sizes: Sequence[int], measure: Callable[[int], float]) -> dict[int, float]:
    """Each size at least 3 times, more while there is time; the first round is not counted."""
    times: dict[int, list[float]] = {size: [] for size in sizes}
    noise, order = random.Random(0), list(sizes)
    started = subject.clock()
    for turn in range(MOST_ROUNDS + 1):
        if turn > ROUNDS and subject.clock() - started > LEVEL_S:
            break
        noise.shuffle(order)
        for size in order:
            took = measure(size)
            if turn:
                times[size].append(took)
    return {size: median(found) for size, found in times.items()}


def _context_slope(subject: Advised, short: Mapping[int, float], longest: int, plan: Plan) -> float:
    """Per row and token of context; 0 where requests are too short to tell."""
    steps = 2 * (MOST_ROUNDS + 1)
    context = min(longest, subject.config.max_positions - 2 * steps - 9)
    if context < 4 * SHORT:
        return 0.0
    long = _decode_times(subject, 1, context, (0, 8), plan)
    return max(sum((long[size] - short[size]) / (1 + size) for size in (0, 8)) / 2 / (context - SHORT), 0.0)


def _prompt_times(subject: Advised, longest: int, plan: Plan) -> dict[int, float]:
    """A prompt in a step of its own, by its length."""
    sizes = [size for size in PROMPTS if size < longest] or [SHORT]
    engine = subject.probe([], Told(), sequences=2, length=max(sizes) + 1)
    text, params = subject.encode(WARM_UP, []), _params(subject, plan, max_tokens=1)

    def read(size: int) -> float:
        engine.add_request("prompt", (text * (size // len(text) + 1))[:size], params)
        started = subject.clock()
        while engine.has_work:
            engine.step()
        return subject.clock() - started

    return _interleaved(subject, sizes, read)


# -- drafters


def host_drafter(subject: Advised, method: str, record: Record) -> DrafterCost:
    """One that needs no model: what it takes to draft on the way through a recorded answer, and what it holds then."""
    drafter = next(each for each in subject.drafters(Contender(method)) if each.name == method)
    sequence = TokenSequence("0", record.prompt, record.params, max_len=len(record.prompt) + len(record.answer))
    spent: list[float] = []
    tracemalloc.start()
    drafter.admit(sequence, 0, 0)
    drafter.commit([Commit(sequence, 0, len(record.prompt), None)])
    for token in record.answer:
        sequence.tokens.append(token)
        drafter.commit([Commit(sequence, len(sequence.tokens) - 2, 1, None)])
        drafter.evidence(sequence)  # it takes in what was committed when it is asked
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    for _ in range(2 * ROUNDS):
        started = subject.clock()
        drafter.propose([DraftRow(sequence, DRAFT_DEPTH)])
        spent.append(subject.clock() - started)
    seconds = {1: median(spent) / DRAFT_DEPTH}
    return DrafterCost(method=method, seconds=seconds, memory_bytes=held, most_bytes=MOST_HELD.get(method, 0))


def model_drafter(subject: Advised, model: DraftModel, levels: Sequence[int], plan: Plan) -> DrafterCost:
    """Timed where it works: in the engine, behind the target's passes.

    So many sequences that it never gets through reading are left out: what fewer cost says what they do.
    """
    seconds: dict[int, float] = {}
    for count in probed_levels(max(levels)):
        policy = Told()
        policy.method = "draft-model"
        drafter = subject.drafters(Drafted("draft-model", DRAFT_DEPTH, model.name))[-1]
        reading = 4 + 2 * count * SHORT // CATCH_UP  # steps: they all go on while the last are being read
        length = SHORT + 2 * reading + (ROUNDS + 3) * (DRAFT_DEPTH + 1)
        engine = subject.probe([drafter], policy, sequences=count, length=length)
        _fill(subject, engine, count, SHORT, reading, plan)
        if spent := _draft_times(engine, drafter, policy, count, reading):
            seconds[count] = median(spent)
    return DrafterCost(
        method="draft-model",
        draft_model=model.name,
        seconds=seconds,
        memory_bytes=model.weight_bytes,
        kv_bytes=model.kv_bytes,
    )


def _draft_times(engine: Engine, drafter: Drafter, policy: Told, sequences: int, reading: int) -> list[float]:
    """Of a token drafted ahead, once the prompts are read; nothing where that takes more steps than `reading`."""
    policy.drafted = sequences
    while any(drafter.lag(sequence) > READ_AHEAD for sequence in engine.scheduler.sequences()):
        if not reading:
            return []
        engine.step()
        reading -= 1
    policy.drafted = DRAFT_DEPTH * sequences
    spent = []
    for turn in range(ROUNDS + 3):
        engine.step()
        if turn and "draft-model" in engine.drafters.seconds:
            depth, took = engine.drafters.seconds["draft-model"]
            spent.append(took / depth)
    return spent
