"""The policy on a clock that is known: recorded plain answers, the real drafters, the real policy, costs from a table.

Greedy and seeded answers are the same tokens under any draft, so what a draft would have brought can be looked up. A
step costs what a pass of so many rows cost on two cores (pass_cost.py) and what drafting takes on the host. The policy
learns from times with noise and slow phases (`--noise`) or without, and is judged by the table alone. A batch is
answered as one job: its time ends with its last answer.

    python benchmarks/policy_replay.py --record answers.json --temperature 0 --prompts mt_bench.jsonl gsm8k.jsonl
    python benchmarks/policy_replay.py answers.json --batches 1 4 16 32
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from common import finish
from speculation import Configuration, read_prompts

from paceline import SamplingParams
from paceline.config import SpeculationConfig
from paceline.draft import Draft
from paceline.drafters import DRAFTERS, Commit, Drafter, DrafterContext, DraftRow
from paceline.engine.adaptive import AdaptivePolicy
from paceline.engine.batch import StepOutput
from paceline.engine.policy import StepReport
from paceline.models.hub import resolve
from paceline.models.runtime import load_model
from paceline.sequence import Sequence as Answer

FIXED = [(method, k) for method in ("ngram", "suffix") for k in (2, 4, 8)]
PASS = {1: 1.0, 2: 1.04, 4: 1.09, 8: 1.25, 12: 1.38, 16: 1.6, 24: 1.95, 32: 2.35, 64: 4.2, 128: 8.0}  # against one row
PASS_S, STEP_S, ROW_S, DRAFT_S, NODE_S = 25e-3, 0.8e-3, 0.06e-3, 0.4e-3, 0.08e-3
MAX_TOKENS, TOGETHER = 128, 20
VOCABULARY = 49_152

Record = dict[str, Any]  # file, category, prompt and answer as token ids


def step_seconds(sequences: int, nodes: int) -> float:
    share = float(np.interp(sequences + nodes, list(PASS), list(PASS.values())))
    return PASS_S * share + STEP_S + ROW_S * sequences + (DRAFT_S + NODE_S * nodes if nodes else 0.0)


class Times:
    """What the policy is told that steps took."""

    def __init__(self, noisy: bool) -> None:
        self._noise, self._noisy, self._level, self._left = random.Random(1), noisy, 1.0, 0.0

    def told(self, seconds: float) -> float:
        if not self._noisy:
            return seconds
        if self._left <= 0:  # a slow phase, or the end of one
            self._level, self._left = self._noise.choice([1, 1, 1.15, 1.3, 1.6]), self._noise.expovariate(1 / 1.5)
        self._left -= seconds
        return seconds * self._level * self._noise.lognormvariate(0, 0.06)


def record(paths: Sequence[str], temperature: float) -> list[Record]:
    """Plain answers, both turns of conversations; the copy-heavy prompts of our own as well."""
    loaded = load_model(resolve("smollm2"), dtype="float32", device="cpu")
    plain, tokenizer = Configuration(loaded, "none", None), loaded.tokenizer
    params = SamplingParams(temperature=temperature, seed=7 if temperature else None, max_tokens=MAX_TOKENS).resolve({})
    records: list[Record] = []
    for name in (*paths, "copy"):
        prompts = read_prompts([] if name == "copy" else [name], None)
        for start in range(0, len(prompts), TOGETHER):
            group = prompts[start : start + TOGETHER]
            talks: list[list[dict[str, str]]] = [[] for _ in group]
            for turn in range(min(len(prompt["turns"]) for prompt in group)):
                for talk, prompt in zip(talks, group, strict=True):
                    talk.append({"role": "user", "content": prompt["turns"][turn]})
                asked = [tokenizer.apply_chat_template(talk) for talk in talks]
                _, answers, _ = plain.answer(asked, params)
                for talk, prompt, tokens, answer in zip(talks, group, asked, answers, strict=True):
                    talk.append({"role": "assistant", "content": tokenizer.decode(answer)})
                    entry = {"file": Path(name).stem, "category": prompt["category"], "sampled": temperature > 0}
                    records.append({**entry, "prompt": tokens, "answer": answer})
    return records


class Replay:
    """One configuration, from cold, through groups of records."""

    def __init__(self, method: str, k: int | None, times: Times) -> None:
        config = SimpleNamespace(vocab_size=VOCABULARY)  # all that lookup drafters ask of a model
        context = DrafterContext(config, torch.device("cpu"), SpeculationConfig(method=method, k=k))  # type: ignore[arg-type]
        names = {"none": [], "auto": ["ngram", "suffix"]}.get(method, [method])
        self.drafters: list[Drafter] = [DRAFTERS[name](context) for name in names]
        self.policy, self.times = AdaptivePolicy(self.drafters, method, k), times

    def seconds(self, group: Sequence[Record]) -> float:
        """From the first tokens of all to the last of the last."""
        live = [(self._begin(index, one), one["answer"]) for index, one in enumerate(group)]
        live = [(sequence, answer) for sequence, answer in live if len(answer) > 1]
        clock = 0.0
        while live:
            clock += self._step(live)
            live = [(sequence, answer) for sequence, answer in live if sequence.num_output < len(answer)]
        return clock

    def _begin(self, index: int, one: Record) -> Answer:
        sampling = {"temperature": 0.7, "seed": 7} if one["sampled"] else {"temperature": 0.0}
        params = SamplingParams(**sampling, max_tokens=MAX_TOKENS).resolve({})
        limit = len(one["prompt"]) + MAX_TOKENS
        sequence = Answer(str(index), one["prompt"], params, max_len=limit, job="group")
        sequence.tokens.append(one["answer"][0])
        sequence.num_computed = len(one["prompt"])
        for drafter in self.drafters:
            drafter.admit(sequence, 0, 0)
            drafter.commit([Commit(sequence, 0, sequence.num_computed, None)])
        return sequence

    def _step(self, live: Sequence[tuple[Answer, list[int]]]) -> float:
        choices = self.policy.plan([sequence for sequence, _ in live], 0, False)
        drafted: dict[int, tuple[int, int]] = {}  # (nodes, accepted)
        drafting: dict[str, tuple[int, float]] = {}
        for drafter in self.drafters:
            at = [i for i, choice in enumerate(choices) if choice.budget and choice.method == drafter.name]
            if at:
                draft = drafter.propose([DraftRow(live[i][0], choices[i].budget) for i in at])
                drafting[drafter.name] = max(choices[i].budget for i in at), 0.1e-3 + 15e-6 * len(at)
                drafted |= {i: follow(draft, row, *live[i]) for row, i in enumerate(at)}
        outputs, commits = [], []
        for i, (sequence, answer) in enumerate(live):
            nodes, accepted = drafted.get(i, (0, 0))
            said = answer[sequence.num_output : sequence.num_output + accepted + 1]
            first = sequence.num_computed
            sequence.tokens += said
            sequence.num_computed = len(sequence.tokens) - 1
            commits.append(Commit(sequence, first, sequence.num_computed - first, None))
            ended = sequence.num_output >= len(answer)
            outputs.append(StepOutput(sequence, said, "", [], ended, choices[i].method, nodes, accepted))
        nodes = sum(count for count, _ in drafted.values())
        seconds = step_seconds(len(live), nodes) + sum(taken for _, taken in drafting.values())
        for drafter in self.drafters:
            drafter.commit(commits)
            for output in outputs:
                if output.finished:
                    output.sequence.finish_reason = "stop"
                    drafter.release(output.sequence)
        self.policy.observe(StepReport(len(live), len(live) + nodes, self.times.told(seconds), drafting, outputs))
        return seconds


def follow(draft: Draft, row: int, sequence: Answer, answer: list[int]) -> tuple[int, int]:
    """(nodes of the row, how many the known answer goes through)."""
    count, node, accepted = int(draft.num_nodes[row]), -1, 0
    tokens, parents = draft.tokens[row].tolist(), draft.parents[row].tolist()
    coming = answer[sequence.num_output :]
    for child in range(count):  # nodes come after their parents
        if accepted < len(coming) and parents[child] == node and tokens[child] == coming[accepted]:
            node, accepted = child, accepted + 1
    return count, accepted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("records", nargs="?")
    parser.add_argument("--record")
    parser.add_argument("--prompts", nargs="*", default=[])
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16, 32])
    parser.add_argument("--noise", action="store_true")
    args = parser.parse_args()
    if args.record:
        Path(args.record).write_text(json.dumps(record(args.prompts, args.temperature)))
        return
    if args.records is None:
        parser.error("give a file of records, or --record FILE to make one")
    records: list[Record] = json.loads(Path(args.records).read_text())
    rows = []
    for file in dict.fromkeys(one["file"] for one in records):
        mine = sorted((one for one in records if one["file"] == file), key=lambda one: one["category"])
        for batch in args.batches:
            groups = [mine[start : start + batch] for start in range(0, len(mine), batch)]
            taken = {}
            for method, k in [("none", None), ("auto", None), *FIXED]:
                replay = Replay(method, k, Times(args.noise))
                taken[method if k is None else f"{method} k={k}"] = [replay.seconds(group) for group in groups]
            plain = taken.pop("none")
            gains = {name: sum(plain) / sum(seconds) for name, seconds in taken.items()}
            lowest = min(a / b for a, b in zip(plain, taken["auto"], strict=True))
            best = max((name for name in gains if name != "auto"), key=gains.__getitem__)
            rows.append({"file": file, "batch": batch, "groups": len(groups), "gains": gains, "auto_lowest": lowest})
            print(
                f"{file:10} batch {batch:3}, {len(groups):3} groups: auto {gains['auto']:.3f}x "
                f"(lowest group {lowest:.3f}x), best fixed {best} {gains[best]:.3f}x",
                flush=True,
            )
    finish("policy_replay", {"noise": args.noise, "rows": rows})


if __name__ == "__main__":
    main()
