"""The policy on a clock that is known: recorded plain answers, the real lookups, the real policy, costs from a table.

A recording (`record`) decides what each draft would have gained. A step costs what a pass of its rows cost on two cores
or on an H200, and the time of drafting. The policy learns from times with noise and slow phases (`noise`) or without,
and is judged by the table alone. A batch is one wait group: its time ends with its last answer. Groups come one after
the other, so the first shows a cold policy.

A draft model is played from the recording: it is right where the recording says so, a pass of it takes `price` of a
pass of the target, and so does reading. The policy reads another price, `stated`, where one is given.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from benchmarks.harness import Spent
from paceline import SamplingParams
from paceline.config import TRAINED_LEVEL, SpeculationConfig
from paceline.core.draft import Draft
from paceline.core.sequence import Sequence as Answer
from paceline.drafters import METHODS, Drafter, DrafterContext, DraftRequest
from paceline.drafters.base import HostDrafter
from paceline.engine.batch import DraftOutcome, DraftWork, StepResult, StepTiming
from paceline.engine.block_manager import BlockManager
from paceline.engine.drafter_set import DrafterSet
from paceline.engine.policy import DraftPlan
from paceline.engine.policy import priors as pass_prior
from paceline.engine.policy.adaptive import AdaptivePolicy
from paceline.engine.policy.priors import PassPrior

Record = dict[str, Any]  # file, category, sampled, prompt and answer as token ids, ranks of a draft model
VOCABULARY = 200_000
TARGET_BYTES = 1_000_000  # of a pass of the target, in the units of a price
DRAFT_MODEL = "draft-model"


@dataclass(frozen=True)
class Drafting:
    """Seconds of one draft: for any, for each of its sequences, and for each pass by the sequences drafting."""

    any_s: float
    row_s: float
    pass_s: tuple[tuple[int, float], ...] = ()  # (up to this many rows, each)
    read_s: float = 0.0  # each token that it reads first

    def seconds(self, rows: int, passes: int, unread: int) -> float:
        each = next((each for most, each in self.pass_s if rows <= most), 0.0)
        return self.any_s + self.row_s * rows + each * passes + self.read_s * unread


@dataclass(frozen=True)
class Clock:
    pass_s: dict[int, float]  # rows -> seconds of a pass
    padded: bool  # to the next number of rows in the table; otherwise the seconds between are interpolated
    step_s: float
    row_s: float  # each sequence
    drafted_s: float  # a step with drafts in it
    node_s: float
    drafting: dict[str, Drafting]
    prior: PassPrior
    waits: bool  # the host does nothing else during a pass, and no step is launched ahead
    fixed: tuple[tuple[str, int], ...]  # settings to compare with
    price: float = 0.1  # of a pass of the draft model, as its offers state it
    true_price: float | None = None  # of its passes and of reading; None: `drafting` has them

    def with_draft_model(self, price: float, stated: float | None = None) -> Clock:
        return replace(self, price=price if stated is None else stated, true_price=price)

    def steeper(self, times: float) -> Clock:
        """Return the clock of a machine with slower cores, which the policy's prior does not know."""
        one = self.pass_s[1]
        return replace(self, pass_s={rows: one + times * (seconds - one) for rows, seconds in self.pass_s.items()})

    def forward(self, rows: int) -> float:
        """Return the seconds of a pass."""
        at = list(self.pass_s)
        if rows > at[-1]:
            return self.pass_s[at[-1]] * rows / at[-1]
        if self.padded:
            return next(seconds for most, seconds in self.pass_s.items() if rows <= most)
        return float(np.interp(rows, at, list(self.pass_s.values())))

    def step(self, sequences: int, nodes: int, *, ahead: bool = False) -> float:
        """`ahead`: launched before the one before was read, so that the host's work hides behind the device's."""
        taken = self.forward(sequences + nodes)
        if ahead:
            return taken
        return taken + self.step_s + self.row_s * sequences + (self.drafted_s + self.node_s * nodes if nodes else 0.0)

    def draft(self, method: str, rows: int, passes: int, unread: int) -> float:
        if method != DRAFT_MODEL or self.true_price is None:
            return self.drafting[method].seconds(rows, passes, unread)
        more = self.forward(unread) - self.forward(rows) if unread > 2 * rows else 0.0
        return self.true_price * (passes * self.forward(rows) + max(more, 0.0))


LOOKUPS = tuple((method, k) for method in ("ngram", "suffix") for k in (2, 4, 8))
MODELS = tuple((DRAFT_MODEL, k) for k in (1, 2, 3, 4, 6, 8))
RELATIVE = {1: 1.0, 2: 1.02, 4: 1.06, 8: 1.12, 12: 1.21, 13: 1.4, 16: 1.49, 24: 1.74, 32: 2.1, 64: 3.8, 128: 7.4}
# Qwen2.5-Coder-1.5B in Q4_K_M with int8 activations on two cores.
INT8 = {1: 1.0, 2: 1.04, 4: 1.14, 8: 1.5, 12: 2.0, 16: 2.6, 24: 3.5, 32: 4.4, 64: 8.0, 128: 15.2, 512: 59.0}
H200 = {  # ms by rows of a bucket
    1: 3.95,
    8: 4.0,
    16: 4.1,
    32: 4.35,
    64: 4.6,
    128: 6.5,
    256: 9.1,
    384: 11.6,
    512: 13.4,
    640: 18.8,
    768: 21.0,
    1024: 23.7,
    1280: 31.5,
    1536: 36.5,
}
LOOKUP_CPU = {"ngram": Drafting(0.05e-3, 22e-6), "suffix": Drafting(0.05e-3, 25e-6)}
CLOCKS = {
    "cpu": Clock(
        pass_s={rows: 25e-3 * share for rows, share in RELATIVE.items()},
        padded=False,
        step_s=0.8e-3,
        row_s=0.06e-3,
        drafted_s=0.4e-3,
        node_s=0.08e-3,
        drafting=LOOKUP_CPU,
        prior=pass_prior.CPU,
        waits=True,
        fixed=LOOKUPS,
    ),
    "pair": Clock(
        pass_s={rows: 20e-3 * share for rows, share in INT8.items()},
        padded=False,
        step_s=0.8e-3,
        row_s=0.06e-3,
        drafted_s=0.4e-3,
        node_s=0.08e-3,
        drafting={**LOOKUP_CPU, DRAFT_MODEL: Drafting(0.0, 0.0)},
        prior=pass_prior.CPU_INT8,
        waits=True,
        fixed=(*LOOKUPS, *MODELS),
        true_price=0.44,
        price=0.44,
    ),
    "gpu": Clock(
        pass_s={rows: 1e-3 * ms for rows, ms in H200.items()},
        padded=True,
        step_s=0.55e-3,
        row_s=7e-6,
        drafted_s=0.3e-3,
        node_s=5e-6,
        drafting={
            "ngram": Drafting(0.1e-3, 15e-6),
            "suffix": Drafting(0.1e-3, 30e-6),
            DRAFT_MODEL: Drafting(
                0.2e-3, 10e-6, ((1, 0.38e-3), (16, 0.73e-3), (32, 0.9e-3), (64, 0.95e-3), (128, 1.1e-3)), 2e-6
            ),
        },
        prior=replace(pass_prior.GPU, padded_to=tuple(H200)),
        waits=False,
        fixed=(*((DRAFT_MODEL, k) for k in (1, 2, 4, 8, 16)), *LOOKUPS),
    ),
}


class PlayedModel(HostDrafter):
    """A draft model that is right where its recording says so (without one: at 95 % of the positions), and that reads
    what it drafts from. With `useless` it is never right."""

    name, right = DRAFT_MODEL, 0.95

    def __init__(self, *, useless: bool = False, pass_bytes: int = 0) -> None:
        self.records: dict[str, Record] = {}
        self.pass_bytes, self._useless = pass_bytes, useless
        self._read: dict[str, int] = {}

    def level(self, sequence: Answer) -> int:
        return TRAINED_LEVEL

    def unread_tokens(self, sequence: Answer) -> int:
        return len(sequence.tokens) - min(self._read.get(sequence.key, 0), len(sequence.tokens) - 1)

    def propose(self, rows: Sequence[DraftRequest]) -> Draft:
        chains = []
        for row in rows:
            self._read[row.sequence.key] = len(row.sequence.tokens) + row.max_nodes - 1
            done = row.sequence.num_output
            chains.append([self._guess(row.sequence, done + ahead) for ahead in range(row.max_nodes)])
        self.passes = width = max(map(len, chains))
        tokens = torch.tensor([chain + [0] * (width - len(chain)) for chain in chains])
        return Draft.chains(tokens, torch.tensor(list(map(len, chains))))

    def judged(self, sequences: Sequence[Answer]) -> None:
        for sequence in sequences:
            self._read[sequence.key] = min(self._read.get(sequence.key, 0), len(sequence.tokens) - 1)

    def admit(self, sequence: Answer, start: int, end: int) -> None:
        self._read[sequence.key] = 0

    def _guess(self, sequence: Answer, at: int) -> int:
        record = self.records[sequence.key]
        coming = record["answer"]
        if at >= len(coming) or self._useless:
            return VOCABULARY - 1
        ranks = record.get("ranks")
        if ranks is None:
            is_right = random.Random(hash((sequence.num_prompt, at))).random() < self.right
        else:
            is_right = ranks[at] == "0"
        return int(coming[at]) if is_right else VOCABULARY - 1


class Times:
    """The step times that are reported to the policy."""

    def __init__(self, seed: int | None) -> None:
        """`seed`: of noise and slow phases; None: none."""
        self._noise, self._noisy, self._level, self._left = random.Random(seed), seed is not None, 1.0, 0.0

    def factor(self, seconds: float) -> float:
        if not self._noisy:
            return 1.0
        if self._left <= 0:  # a slow phase, or the end of one
            self._level, self._left = self._noise.choice([1, 1, 1.15, 1.3, 1.6]), self._noise.expovariate(1 / 1.5)
        self._left -= seconds
        return self._level * self._noise.lognormvariate(0, 0.06)


class Replay:
    """One configuration, from cold, through groups of records."""

    def __init__(
        self,
        method: str,
        k: int | None,
        clock: Clock,
        seed: int | None = None,
        *,
        leave_out: Sequence[str] = (),
        useless: bool = False,
        max_tokens: int = 128,
    ) -> None:
        config = SimpleNamespace(vocab_size=VOCABULARY)  # all that lookup drafters ask of a model
        context = DrafterContext(config, torch.device("cpu"), SpeculationConfig(method=method, k=k))  # type: ignore[arg-type]
        names = {"none": [], "auto": [name for name in clock.drafting if name not in leave_out]}.get(method, [method])
        self.model = PlayedModel(useless=useless, pass_bytes=round(TARGET_BYTES * clock.price))
        self.drafters: list[Drafter] = [
            self.model if name == DRAFT_MODEL else METHODS[name].make(context) for name in names
        ]
        self.clock, self.times, self.max_tokens = clock, Times(seed), max_tokens
        self.drafter_set = DrafterSet(self.drafters, VOCABULARY, BlockManager(1, 1), TARGET_BYTES)
        self.policy = AdaptivePolicy(method, k, clock.prior)
        self.resting, self.steps, self.spent = False, 0, Spent()
        self.reported: list[DraftWork] = []  # of every draft
        self.draft_s = 0.0  # seconds of every draft, by the clock
        for name in ("plan", "observe", "learn"):
            self.spent.watch(self.policy, name, "policy")

    def seconds(self, group: Sequence[Record]) -> float:
        """Return seconds from the first tokens of all to the last of the last."""
        live = [(self._begin(index, one), one["answer"][: self.max_tokens]) for index, one in enumerate(group)]
        live = [(sequence, answer) for sequence, answer in live if len(answer) > 1]
        clock, self.resting = 0.0, False
        while live:
            clock += self._step(live)
            live = [(sequence, answer) for sequence, answer in live if sequence.num_output < len(answer)]
        return clock

    def _begin(self, index: int, one: Record) -> Answer:
        sampling = {"temperature": 0.7, "seed": 7} if one["sampled"] else {"temperature": 0.0}
        params = SamplingParams(**sampling, max_tokens=self.max_tokens).resolve({})
        limit = len(one["prompt"]) + self.max_tokens
        sequence = Answer(str(index), one["prompt"], params, max_len=limit, wait_group="group")
        sequence.tokens.append(one["answer"][0])
        self.model.records[sequence.key] = one
        sequence.num_computed = len(one["prompt"])
        for drafter in self.drafters:
            drafter.admit(sequence, 0, 0)
            if isinstance(drafter, HostDrafter):
                drafter.index_prompt(sequence, sequence.num_computed)
        return sequence

    def _step(self, live: Sequence[tuple[Answer, list[int]]]) -> float:
        sequences, ahead = [sequence for sequence, _ in live], self.resting
        self.steps += 1
        offers = self.drafter_set.offers(sequences)
        plans = [DraftPlan()] * len(live) if ahead else self.policy.plan(sequences, offers, 0, False)
        drafted: dict[int, tuple[int, int, int]] = {}  # (nodes, depth, accepted)
        work: dict[str, DraftWork] = {}
        for drafter in self.drafters:
            at = [i for i, plan in enumerate(plans) if plan.max_nodes and plan.method == drafter.name]
            if at:
                unread = sum(drafter.unread_tokens(live[i][0]) for i in at)
                draft = drafter.propose([DraftRequest(live[i][0], plans[i].max_nodes) for i in at])
                taken = self.clock.draft(drafter.name, len(at), drafter.passes, unread)
                work[drafter.name] = DraftWork(drafter.passes, unread, taken)
                drafted |= {i: follow(draft, row, *live[i]) for row, i in enumerate(at)}
        self.resting = not self.clock.waits and self.policy.skip_plan(sequences, offers)
        self.policy.learn()
        result = StepResult()
        for i, (sequence, answer) in enumerate(live):
            nodes, depth, accepted = drafted.get(i, (0, 0, 0))
            committed = answer[sequence.num_output : sequence.num_output + accepted + 1]
            sequence.tokens += committed
            sequence.num_computed = len(sequence.tokens) - 1
            if sequence.num_output >= len(answer):
                result.ended.append(i)
            if nodes:
                result.drafts[i] = DraftOutcome(plans[i].method, nodes, accepted, depth)
            result.sequences.append(sequence)
            result.tokens.append(committed)
        nodes, draft_s = sum(count for count, *_ in drafted.values()), sum(each.seconds for each in work.values())
        seconds = self.clock.step(len(live), nodes, ahead=ahead) + draft_s
        self.draft_s += draft_s
        if self.model in self.drafters:
            self.model.judged(sequences)
        for i in result.ended:
            result.sequences[i].finish_reason = "stop"
            for drafter in self.drafters:
                drafter.release(result.sequences[i])
        factor = self.times.factor(seconds)
        work = {name: each._replace(seconds=each.seconds * factor) for name, each in work.items()}
        self.reported += work.values()
        if self.drafters:
            timing = StepTiming(len(live), len(live) + nodes, seconds * factor, work, ahead=ahead)
            self.policy.observe(result, timing)
        return seconds


def follow(draft: Draft, row: int, sequence: Answer, answer: list[int]) -> tuple[int, int, int]:
    """Return nodes of the row, depth of the deepest, and the number of those that the known answer goes through."""
    count, node, accepted = int(draft.num_nodes[row]), -1, 0
    tokens, parents = draft.tokens[row].tolist(), draft.parents[row].tolist()
    coming = answer[sequence.num_output :]
    for child in range(count):  # nodes come after their parents
        if accepted < len(coming) and parents[child] == node and tokens[child] == coming[accepted]:
            node, accepted = child, accepted + 1
    return count, int(draft.depth[row, :count].max()) if count else 0, accepted


def load(path: Path) -> list[Record]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def gain(
    records: Sequence[Record], batch: int, clock: Clock, method: str, k: int | None = None, **options: Any
) -> float:
    """Return the gain over plain decoding of a configuration, cold, over groups of `batch` records."""
    groups = [records[start : start + batch] for start in range(0, len(records), batch)]
    plain = Replay("none", None, clock, max_tokens=options.get("max_tokens", 128))
    replay = Replay(method, k, clock, **options)
    return sum(map(plain.seconds, groups)) / sum(map(replay.seconds, groups))
