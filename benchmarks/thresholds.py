"""The acceptance from which on a draft pays, by batch and k: whole steps timed here, put into formulas of the theory.

Every sequence of a batch is given a chain of k tokens that is always refused, so a step costs what verifying costs and
the batch stays as it is. The acceptance at which k drafted tokens pay is where the formula gives 1.0x with that cost.

    python -m benchmarks.thresholds [--batches 1 2 4 8 16 32] [--k 1 2 4 8] [--rounds 12]
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.harness import finish, interleaved
from paceline import SamplingParams
from paceline.config import EngineConfig
from paceline.core.draft import Draft
from paceline.core.sequence import Sequence as Answer
from paceline.drafters import DraftRequest
from paceline.drafters.base import HostDrafter
from paceline.engine.engine import Engine
from paceline.engine.policy import DraftPlan, FixedPolicy
from paceline.models.load.hub import resolve
from paceline.models.load.open_model import LoadedModel, load_model
from paceline.theory import break_even, speedup

ALPHAS = (0.4, 0.55, 0.8)  # thresholds that circulate
CONTEXT = "A long story about a fox, a dog and the river between them, told slowly and with many turns. " * 10


class Refused(HostDrafter):
    """Tokens that are unlikely here."""

    name = "refused"

    def propose(self, rows: Sequence[DraftRequest]) -> Draft:
        width = max(row.max_nodes for row in rows)
        tokens = torch.full((len(rows), width), 7, dtype=torch.int64)
        return Draft.chains(tokens, torch.tensor([row.max_nodes for row in rows]))


class EveryoneDrafts(FixedPolicy):
    """The policy: k tokens for each, whatever becomes of them."""

    k = 0

    def plan(self, sequences: Sequence[Answer], *_: object) -> list[DraftPlan]:
        return [DraftPlan("refused", self.k) if self.k else DraftPlan()] * len(sequences)


def step_times(loaded: LoadedModel, batch: int, lengths: Sequence[int], rounds: int) -> dict[int, float]:
    """Median seconds of a step by the k of its drafts, interleaved."""
    policy = EveryoneDrafts()
    config = EngineConfig(prefix_caching=False, kv_cache_bytes=1 << 30)
    engine = Engine(loaded.decoder, config, drafters=[Refused()], policy=policy)
    params = SamplingParams(temperature=0, max_tokens=10_000, ignore_eos=True).resolve({})
    for index in range(batch):
        engine.add_request(str(index), loaded.tokenizer.encode(f"{index}. {CONTEXT}"), params)
    while any(sequence.num_output == 0 for sequence in engine.scheduler.sequences()):
        engine.step()

    def step(k: int) -> None:
        policy.k = k
        engine.step()

    times = interleaved({str(k): (lambda k=k: step(k)) for k in (0, *lengths)}, rounds, warmup=2)
    return {int(k): statistics.median(seconds) for k, seconds in times.items()}


def row(times: dict[int, float], k: int) -> dict[str, Any]:
    cost = times[k] / times[0]
    gains = {alpha: speedup(alpha, k, 0.0, cost) for alpha in ALPHAS}
    return {"k": k, "cost": cost, "break_even": break_even(k, 0.0, cost), "speedup": gains}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--k", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--rounds", type=int, default=12)
    args = parser.parse_args()
    loaded = load_model(resolve("smollm2"), dtype="float32", device="cpu")
    table = []
    print("batch   k   step   pays from α  " + "  ".join(f"at {alpha}" for alpha in ALPHAS))
    for batch in args.batches:
        times = step_times(loaded, batch, args.k, args.rounds)
        for k in args.k:
            found = row(times, k)
            table.append({"batch": batch, "step_s": times[0], **found})
            pays = "never" if found["break_even"] is None else f"{found['break_even']:.2f}"
            gains = "  ".join(f"{gain:.2f}x " for gain in found["speedup"].values())
            print(f"{batch:5} {k:3}  {found['cost']:.2f}x  {pays:>10}  {gains}", flush=True)
    finish("thresholds", {"rows": table})


if __name__ == "__main__":
    main()
