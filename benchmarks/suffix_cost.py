"""The time of `suffix` for each row at each step: looking up, growing the tree, indexing committed tokens.

Texts recorded by policy_replay.py are decoded with drafts, `--rows` of them together, on one core. Each step in which
all still decode is timed whole (look, evidence, propose) and divided by its rows; the goal is a median
of 20 us. Before a step a large array is gone through, as a pass goes through weights, so that nothing is left in the
caches; `--warm` leaves that out.

    python -m benchmarks.policy_replay --record answers.json --temperature 0.7 --prompts mt_bench.jsonl
    python -m benchmarks.suffix_cost answers.json --rows 1 4 16
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from benchmarks.harness import finish
from benchmarks.policy_replay import VOCABULARY, Record, follow
from paceline import SamplingParams
from paceline.config import SpeculationConfig
from paceline.core.sequence import Sequence
from paceline.drafters import METHODS, DrafterContext, DraftRequest
from paceline.drafters.lookup.suffix import SuffixDrafter

BUDGET = 8
WEIGHTS = 16 << 20  # floats


def sequence_of(index: int, one: Record) -> Sequence:
    params = SamplingParams(temperature=0.0, max_tokens=len(one["answer"])).resolve({})
    sequence = Sequence(str(index), one["prompt"], params, max_len=len(one["prompt"]) + len(one["answer"]))
    sequence.tokens.append(one["answer"][0])
    return sequence


def decode(drafter: SuffixDrafter, group: list[Record], weights: Any | None, times: list[float]) -> None:
    live = [(sequence_of(index, one), one["answer"]) for index, one in enumerate(group)]
    for sequence, _ in live:
        drafter.admit(sequence, 0, 0)
        drafter.index_prompt(sequence, sequence.num_prompt)
    while live := [(sequence, answer) for sequence, answer in live if sequence.num_output < len(answer)]:
        if weights is not None:
            weights.sum()
        started = time.perf_counter()
        drafter.levels([sequence for sequence, _ in live])
        for sequence, _ in live:
            drafter.level(sequence)
        draft = drafter.propose([DraftRequest(sequence, BUDGET) for sequence, _ in live])
        taken = time.perf_counter() - started
        for row, (sequence, answer) in enumerate(live):
            _, accepted = follow(draft, row, sequence, answer)
            sequence.tokens += answer[sequence.num_output : sequence.num_output + accepted + 1]
        if len(live) == len(group):
            times.append(taken / len(live))
        for sequence, answer in live:
            if sequence.num_output >= len(answer):
                sequence.finish_reason = "stop"
                drafter.release(sequence)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("records")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--answers", type=int, default=48)
    parser.add_argument("--warm", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    records: list[Record] = json.loads(Path(args.records).read_text())[: args.answers]
    weights, result = None if args.time_is_typical else np.ones(WEIGHTS, np.float32), {}
    for rows in args.rows:
        config = SimpleNamespace(vocab_size=VOCABULARY)
        context = DrafterContext(config, torch.device("cpu"), SpeculationConfig(method="suffix"))  # type: ignore[arg-type]
        drafter = METHODS["suffix"].make(context)
        assert isinstance(drafter, SuffixDrafter)
        times: list[float] = []
        for start in range(0, len(records), rows):
            decode(drafter, records[start : start + rows], weights, times)
        cuts = [1e6 * cut for cut in statistics.quantiles(times, n=10)]
        result[rows] = {"median_us": cuts[4], "p10_us": cuts[0], "p90_us": cuts[8], "steps": len(times)}
        print(f"{rows:3} rows: {cuts[4]:6.1f} us a row a step (10 % under {cuts[0]:.1f}, 10 % over {cuts[8]:.1f})")
    finish("suffix_cost", {"budget": BUDGET, "warm": args.time_is_typical, "rows": result})


if __name__ == "__main__":
    main()
