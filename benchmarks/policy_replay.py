"""The policy on a clock that is known: recorded plain answers, the real drafters, the real policy, costs from a table.

Greedy and seeded answers have equal tokens under any draft, so the gain of a draft can be looked up. A step costs what
a pass of its rows cost on two cores or on an H200 (where a draft model right 19 times of 20 may draft too), and the
time of drafting. The policy learns from times with noise and slow phases (`--noise`) or without, and is judged by the
table alone, or by the table and its own time of deciding (`--deciding`). Its real time of planning and learning, in
processor time a step, stands beside the gains. A batch is one job: its time ends with its last answer. Groups come one
after the other, so the first shows a cold policy.

    python -m benchmarks.policy_replay --record answers.json --temperature 0 --prompts mt_bench.jsonl gsm8k.jsonl
    python -m benchmarks.policy_replay answers.json --batches 1 4 16 32
    python -m benchmarks.policy_replay answers.json --steep 4 --noise --deciding  # nine rows cost twice what one does
    python -m benchmarks.policy_replay answers.json --clock gpu --batches 1 2 4 8 16 32 64 128
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from benchmarks.harness import Spent, finish, prompts_of
from benchmarks.speculation import Configuration
from paceline import SamplingParams
from paceline.config import TRAINED_LEVEL, SpeculationConfig
from paceline.core.draft import Draft
from paceline.core.sequence import Sequence as Answer
from paceline.drafters import METHODS, Drafter, DrafterContext, DraftRequest
from paceline.drafters.base import HostDrafter
from paceline.engine.batch import DraftOutcome, StepResult, StepTiming
from paceline.engine.block_manager import BlockManager
from paceline.engine.drafter_set import CATCHING_UP, DrafterSet
from paceline.engine.policy import DraftPlan
from paceline.engine.policy import priors as pass_prior
from paceline.engine.policy.adaptive import AdaptivePolicy
from paceline.engine.policy.priors import PassPrior
from paceline.models.load.hub import resolve
from paceline.models.load.open_model import load_model

LOOKUP = [(method, k) for method in ("ngram", "suffix") for k in (2, 4, 8)]
MAX_TOKENS, TOGETHER = 128, 20
READ_S = 2e-6  # a token that a draft model has to catch up with
VOCABULARY = 49_152

Record = dict[str, Any]  # file, category, prompt and answer as token ids


@dataclass(frozen=True)
class Drafting:
    """Seconds of one draft: for any, for each of its sequences, and for each token ahead by the sequences drafting."""

    any_s: float
    row_s: float
    asked_s: float  # time of one question, and of the policy with the answer
    depth_s: tuple[tuple[int, float], ...] = ()  # (up to so many rows, each)

    def seconds(self, rows: int, depth: int) -> float:
        each = next((each for most, each in self.depth_s if rows <= most), 0.0)
        return self.any_s + self.row_s * rows + each * depth


@dataclass(frozen=True)
class Clock:
    pass_s: dict[int, float]  # rows -> seconds of a pass
    padded: bool  # to the next number of rows in the table; otherwise what lies between is interpolated
    step_s: float
    plan_s: float  # deciding in steps where a drafter has evidence, probes excluded
    row_s: float  # each sequence
    drafted_s: float  # a step with drafts in it
    node_s: float
    drafting: dict[str, Drafting]
    prior: PassPrior
    waits: bool  # the host does nothing else during a pass, and no step is launched ahead
    fixed: list[tuple[str, int]]  # settings to compare with

    def steeper(self, times: float) -> Clock:
        """A machine with slower cores: the policy's prior does not know."""
        one = self.pass_s[1]
        return replace(self, pass_s={rows: one + times * (seconds - one) for rows, seconds in self.pass_s.items()})

    def step(self, sequences: int, nodes: int, *, ahead: bool = False) -> float:
        """`ahead`: launched before the one before was read, so that the host's work hides behind the device's."""
        rows, at = sequences + nodes, list(self.pass_s)
        if rows > at[-1]:
            taken = self.pass_s[at[-1]] * rows / at[-1]
        elif self.padded:
            taken = next(seconds for most, seconds in self.pass_s.items() if rows <= most)
        else:
            taken = float(np.interp(rows, at, list(self.pass_s.values())))
        if ahead:
            return taken
        return taken + self.step_s + self.row_s * sequences + (self.drafted_s + self.node_s * nodes if nodes else 0.0)


RELATIVE = {1: 1.0, 2: 1.02, 4: 1.06, 8: 1.12, 12: 1.21, 13: 1.4, 16: 1.49, 24: 1.74, 32: 2.1, 64: 3.8, 128: 7.4}
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
CLOCKS = {
    "cpu": Clock(
        pass_s={rows: 25e-3 * share for rows, share in RELATIVE.items()},
        padded=False,
        step_s=0.8e-3,
        plan_s=0.3e-3,
        row_s=0.06e-3,
        drafted_s=0.4e-3,
        node_s=0.08e-3,
        drafting={"ngram": Drafting(0.05e-3, 10e-6, 12e-6), "suffix": Drafting(0.05e-3, 10e-6, 15e-6)},
        prior=pass_prior.CPU,
        waits=True,
        fixed=LOOKUP,
    ),
    "gpu": Clock(
        pass_s={rows: 1e-3 * ms for rows, ms in H200.items()},
        padded=True,
        step_s=0.55e-3,
        plan_s=0.0,
        row_s=7e-6,
        drafted_s=0.3e-3,
        node_s=5e-6,
        drafting={
            "ngram": Drafting(0.1e-3, 15e-6, 10e-6),
            "suffix": Drafting(0.1e-3, 30e-6, 30e-6),
            "draft-model": Drafting(
                0.2e-3, 10e-6, 5e-6, ((1, 0.38e-3), (16, 0.73e-3), (32, 0.9e-3), (64, 0.95e-3), (128, 1.1e-3))
            ),
        },
        prior=replace(pass_prior.GPU, padded_to=tuple(H200)),
        waits=False,
        fixed=[*(("draft-model", k) for k in (1, 2, 4, 8, 16)), *LOOKUP],
    ),
}


class Oracle(HostDrafter):
    """A draft model that is right so often, token by token, and must have read what it drafts from."""

    name, right = "draft-model", 0.95

    def __init__(self) -> None:
        self.answers: dict[str, list[int]] = {}
        self._read: dict[str, int] = {}

    def level(self, sequence: Answer) -> int:
        return TRAINED_LEVEL

    def unread_tokens(self, sequence: Answer) -> int:
        return len(sequence.tokens) - min(self._read.get(sequence.key, 0), len(sequence.tokens) - 1)

    def propose(self, rows: Sequence[DraftRequest]) -> Draft:
        chains = []
        for row in rows:
            self._read[row.sequence.key] = len(row.sequence.tokens) + row.max_nodes - 1
            done, coming = row.sequence.num_output, self.answers[row.sequence.key]
            chains.append([self._guess(row.sequence, coming, done + ahead) for ahead in range(row.max_nodes)])
        width = max(map(len, chains))
        tokens = torch.tensor([chain + [0] * (width - len(chain)) for chain in chains])
        return Draft.chains(tokens, torch.tensor(list(map(len, chains))))

    def judged(self, sequences: Sequence[Answer]) -> None:
        for sequence in sequences:
            self._read[sequence.key] = min(self._read.get(sequence.key, 0), len(sequence.tokens) - 1)

    def admit(self, sequence: Answer, start: int, end: int) -> None:
        self._read[sequence.key] = 0

    def _guess(self, sequence: Answer, coming: list[int], at: int) -> int:
        luck = random.Random(hash((sequence.num_prompt, at))).random()
        return coming[at] if at < len(coming) and luck < self.right else 0


class Times:
    """The step times that are reported to the policy."""

    def __init__(self, noisy: bool) -> None:
        self._noise, self._noisy, self._level, self._left = random.Random(1), noisy, 1.0, 0.0

    def observed(self, seconds: float) -> float:
        if not self._noisy:
            return seconds
        if self._left <= 0:  # a slow phase, or the end of one
            self._level, self._left = self._noise.choice([1, 1, 1.15, 1.3, 1.6]), self._noise.expovariate(1 / 1.5)
        self._left -= seconds
        return seconds * self._level * self._noise.lognormvariate(0, 0.06)


def record(paths: Sequence[str], temperature: float, seed: int) -> list[Record]:
    """Return plain answers, both turns of conversations; the copy-heavy prompts of our own as well."""
    loaded = load_model(resolve("smollm2"), dtype="float32", device="cpu")
    plain, tokenizer = Configuration(loaded, "none", None), loaded.tokenizer
    chosen = {"seed": seed} if temperature else {}
    params = SamplingParams(temperature=temperature, max_tokens=MAX_TOKENS, **chosen).resolve({})
    records: list[Record] = []
    for name in (*paths, "copy"):
        prompts = prompts_of([] if name == "copy" else [name], None)
        for start in range(0, len(prompts), TOGETHER):
            group = prompts[start : start + TOGETHER]
            talks: list[list[dict[str, str]]] = [[] for _ in group]
            for turn in range(min(len(prompt["turns"]) for prompt in group)):
                for talk, prompt in zip(talks, group, strict=True):
                    talk.append({"role": "user", "content": prompt["turns"][turn]})
                asked = [tokenizer.apply_chat_template(talk) for talk in talks]
                answers = plain.answer(asked, params)
                for talk, prompt, tokens, answer in zip(talks, group, asked, answers, strict=True):
                    talk.append({"role": "assistant", "content": tokenizer.decode(answer)})
                    entry = {"file": Path(name).stem, "category": prompt["category"], "sampled": temperature > 0}
                    records.append({**entry, "prompt": tokens, "answer": answer})
    return records


class Replay:
    """One configuration, from cold, through groups of records."""

    def __init__(
        self,
        method: str,
        k: int | None,
        clock: Clock,
        times: Times,
        *,
        deciding: bool = False,
        max_tokens: int = MAX_TOKENS,
    ) -> None:
        config = SimpleNamespace(vocab_size=VOCABULARY)  # all that lookup drafters ask of a model
        context = DrafterContext(config, torch.device("cpu"), SpeculationConfig(method=method, k=k))  # type: ignore[arg-type]
        names = {"none": [], "auto": list(clock.drafting)}.get(method, [method])
        self.oracle = Oracle()
        self.drafters: list[Drafter] = [
            self.oracle if name == self.oracle.name else METHODS[name].make(context) for name in names
        ]
        self.clock, self.times, self.deciding, self.max_tokens = clock, times, deciding, max_tokens
        self.drafter_set = DrafterSet(self.drafters, VOCABULARY, BlockManager(1, 1))
        self.policy = AdaptivePolicy(method, k, clock.prior)
        self.asked_s, self.resting = 0.0, False
        self.spent, self.steps = Spent(), 0
        for name in ("plan", "observe", "learn"):
            self.spent.watch(self.policy, name, "policy")
        for drafter in self.drafters:
            self._count_questions(drafter)

    def _count_questions(self, drafter: Drafter) -> None:
        """Deciding takes what its questions take, and something besides where any is asked."""

        def counted(answer: Callable[..., Any], *, many: bool) -> Callable[..., Any]:
            def ask(of: Any) -> Any:
                self.asked_s += self.clock.drafting[drafter.name].asked_s * (len(of) if many else 1)
                return answer(of)

            return ask

        for name in ("level", "levels") if self.clock.waits else ("level",):
            setattr(drafter, name, counted(getattr(drafter, name), many=name == "levels"))

    def seconds(self, group: Sequence[Record]) -> float:
        """Return seconds from the first tokens of all to the last of the last."""
        live = [(self._begin(index, one), one["answer"]) for index, one in enumerate(group)]
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
        self.oracle.answers[sequence.key] = one["answer"]
        sequence.num_computed = len(one["prompt"])
        for drafter in self.drafters:
            drafter.admit(sequence, 0, 0)
            if isinstance(drafter, HostDrafter):
                drafter.index_prompt(sequence, sequence.num_computed)
        return sequence

    def _step(self, live: Sequence[tuple[Answer, list[int]]]) -> float:
        sequences, before = [sequence for sequence, _ in live], self.asked_s
        ahead = self.resting
        self.steps += 1
        offers = self.drafter_set.offers(sequences)
        choices = [DraftPlan()] * len(live) if ahead else self.policy.plan(sequences, offers, 0, False)
        deciding = self.asked_s - before
        deciding += self.clock.plan_s if deciding else 0.0
        drafted: dict[int, tuple[int, int, int]] = {}  # (nodes, depth, accepted)
        drafting, known = 0.0, dict[str, tuple[int, float]]()
        for drafter in self.drafters:
            at = [i for i, choice in enumerate(choices) if choice.max_nodes and choice.method == drafter.name]
            if at:
                behind = max(drafter.unread_tokens(live[i][0]) for i in at)
                draft = drafter.propose([DraftRequest(live[i][0], choices[i].max_nodes) for i in at])
                depth = max(choices[i].max_nodes for i in at)
                taken = self.clock.drafting[drafter.name].seconds(len(at), depth)
                if behind <= CATCHING_UP:
                    known[drafter.name] = depth, taken
                drafting += taken + READ_S * sum(drafter.unread_tokens(live[i][0]) for i in at)
                drafted |= {i: follow(draft, row, *live[i]) for row, i in enumerate(at)}
        self.resting = not self.clock.waits and self.policy.next_is_plain(sequences, offers)
        if self.resting:
            self.policy.skip_plan(sequences, offers)
        self.policy.learn()
        result = StepResult()
        for i, (sequence, answer) in enumerate(live):
            nodes, depth, accepted = drafted.get(i, (0, 0, 0))
            summary = answer[sequence.num_output : sequence.num_output + accepted + 1]
            sequence.tokens += summary
            sequence.num_computed = len(sequence.tokens) - 1
            if sequence.num_output >= len(answer):
                result.ended.append(i)
            if nodes:
                result.drafts[i] = DraftOutcome(choices[i].method, nodes, accepted, depth)
            result.sequences.append(sequence)
            result.tokens.append(summary)
        nodes = sum(count for count, *_ in drafted.values())
        seconds = self.clock.step(len(live), nodes, ahead=ahead) + drafting
        for drafter in self.drafters:
            if isinstance(drafter, Oracle):
                drafter.judged(sequences)
            for i in result.ended:
                result.sequences[i].finish_reason = "stop"
                drafter.release(result.sequences[i])
        rows, took = len(live) + nodes, self.times.observed(seconds) + deciding
        if self.drafters:
            self.policy.observe(result, StepTiming(len(live), rows, took, known, ahead=ahead))
        return seconds + (deciding if self.deciding else 0.0)


def follow(draft: Draft, row: int, sequence: Answer, answer: list[int]) -> tuple[int, int, int]:
    """Return nodes of the row, depth of the deepest, and the number of those that the known answer goes through."""
    count, node, accepted = int(draft.num_nodes[row]), -1, 0
    tokens, parents = draft.tokens[row].tolist(), draft.parents[row].tolist()
    coming = answer[sequence.num_output :]
    for child in range(count):  # nodes come after their parents
        if accepted < len(coming) and parents[child] == node and tokens[child] == coming[accepted]:
            node, accepted = child, accepted + 1
    return count, int(draft.depth[row, :count].max()) if count else 0, accepted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("records", nargs="?")
    parser.add_argument("--record")
    parser.add_argument("--prompts", nargs="*", default=[])
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--max-tokens", type=int, default=MAX_TOKENS, help="of each recorded answer")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16, 32])
    parser.add_argument("--noise", action="store_true")
    parser.add_argument("--clock", choices=list(CLOCKS), default="cpu")
    parser.add_argument("--deciding", action="store_true")
    parser.add_argument("--steep", type=float, default=1.0, help="times what rows beyond the first add to a pass")
    parser.add_argument("--files", nargs="*")
    parser.add_argument("--category", help="only this one, from a cold policy")
    args = parser.parse_args()
    if args.record:
        made = record(args.prompts, args.temperature, args.seed)
        Path(args.record).write_text(json.dumps(made))
        finish("policy_replay_record", {"records": len(made)})
        return
    if args.records is None:
        parser.error("give a file of records, or --record FILE to make one")
    records: list[Record] = json.loads(Path(args.records).read_text())
    records = [{**one, "answer": one["answer"][: args.max_tokens]} for one in records]
    rows, clock = [], CLOCKS[args.clock].steeper(args.steep)
    for file in args.files or dict.fromkeys(one["file"] for one in records):
        mine = sorted((one for one in records if one["file"] == file), key=lambda one: one["category"])
        mine = [one for one in mine if args.category in (None, one["category"])]
        for batch in args.batches:
            groups = [mine[start : start + batch] for start in range(0, len(mine), batch)]
            taken, policy_us = {}, 0.0
            for method, k in [("none", None), ("auto", None), *clock.fixed]:
                times = Times(args.noise)
                replay = Replay(method, k, clock, times, deciding=args.deciding, max_tokens=args.max_tokens)
                taken[method if k is None else f"{method} k={k}"] = [replay.seconds(group) for group in groups]
                if method == "auto":
                    policy_us = 1e6 * replay.spent.watched_s / replay.steps
            rows.append(
                {"file": file, "batch": batch, "groups": len(groups), **judged(taken), "policy_us_a_step": policy_us}
            )
            print(f"{file:10} batch {batch:3}, {len(groups):3} groups: {rows[-1].pop('summary')}", flush=True)
    setting = {"clock": args.clock, "steep": args.steep, "noise": args.noise, "deciding": args.deciding}
    finish("policy_replay", {**setting, "rows": rows})


def judged(taken: dict[str, list[float]]) -> dict[str, Any]:
    plain = taken.pop("none")
    gains = {name: sum(plain) / sum(seconds) for name, seconds in taken.items()}
    each = [a / b for a, b in zip(plain, taken["auto"], strict=True)]
    best = max((name for name in gains if name != "auto"), key=gains.__getitem__)
    share = gains["auto"] / max(gains[best], 1.0)
    summary = (
        f"auto {gains['auto']:.3f}x (first group {each[0]:.3f}x, lowest {min(each):.3f}x), {share:.3f} of the best: "
    )
    summary += f"{best} {gains[best]:.3f}x"
    return {"gains": gains, "auto_first": each[0], "auto_lowest": min(each), "summary": summary}


if __name__ == "__main__":
    main()
