"""How long sequences wait for their first token: the scheduler alone, without a model, under random load.

    python -m benchmarks.fairness [--steps 1000000] [--seeds 100]

Clients send short and long prompts, many answers to one prompt, and bursts; blocks are short. Each step gives every row
that samples one token. The last line has the longest waits in tokens of the client and as a share of the bound that
`core/fair_queue` derives, and the longest wait of a short request in steps.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from paceline.config import EngineConfig
from paceline.core.sequence import Owner, Sequence
from paceline.engine.batch import Batch
from paceline.engine.block_manager import BlockManager
from paceline.engine.policy import NO_DRAFT
from paceline.engine.scheduler import Scheduler
from paceline.sampling_params import SamplingParams

PLACES, STEP_TOKENS, BLOCK, NUM_BLOCKS, CONTEXT = 8, 32, 4, 256, 256
CLIENTS = ("heavy", "heavy", "light", "steady")
MOST_WAITING = 60  # sequences of a client


@dataclass
class Wait:
    """The wait of one sequence so far."""

    arrival: int  # step
    served: int  # tokens of its client before
    place: int  # in its request, from 1
    unfinished: int  # most unfinished requests of its client
    first: int | None = None  # step of its first token


class Simulation:
    def __init__(self, seed: int) -> None:
        config = EngineConfig(max_num_seqs=PLACES, max_num_batched_tokens=STEP_TOKENS, block_size=BLOCK)
        self.noise = random.Random(seed)
        drafters: Any = SimpleNamespace(scratch_slots={}, depths={}, shifted_kv=False)
        policy: Any = SimpleNamespace(plan=lambda sequences, *_: [NO_DRAFT] * len(sequences))
        drafters.offers = lambda sequences: None
        self.blocks = BlockManager(NUM_BLOCKS, BLOCK)
        self.scheduler = Scheduler(config, self.blocks, policy, drafters, context=CONTEXT, listeners=())
        self.waits: dict[str, Wait] = {}
        self.open: dict[str, dict[str, int]] = {client: {} for client in CLIENTS}  # unfinished sequences by request
        self.served = dict.fromkeys(CLIENTS, 0)
        self.ended: list[tuple[Sequence, Wait, int]] = []
        self.now, self._ids = 0, itertools.count()

    def send(self, client: str, prompt: int, answer: int, n: int = 1) -> None:
        """Send a request, unless the client has many waiting."""
        if self.scheduler.waiting.num_of(client) + n > MOST_WAITING:
            return
        request, params = str(next(self._ids)), SamplingParams(n=n, temperature=1.0, max_tokens=answer).resolve({})
        tokens = [self.noise.randrange(1000) for _ in range(prompt)]
        self.open[client][request] = n
        for other in self.scheduler.sequences():
            if other.owner.client == client:
                self.waits[other.key].unfinished = max(self.waits[other.key].unfinished, len(self.open[client]))
        for index in range(n):
            sequence = Sequence(
                request, tokens, params, index=index, max_len=prompt + answer, owner=Owner(client, client)
            )
            self.waits[sequence.key] = Wait(self.now, self.served[client], index + 1, len(self.open[client]))
            self.scheduler.add(sequence)

    def random_load(self) -> None:
        chance = self.noise.random
        if chance() < 0.04:
            self.send("heavy", self.noise.randint(100, 200), self.noise.randint(1, 50))
        if chance() < 0.01:
            self.send("heavy", 8, 40, n=24)
        if chance() < 0.02:
            self.send("light", self.noise.randint(1, 8), 4)
        if chance() < 0.05:
            self.send("steady", self.noise.randint(8, 64), self.noise.randint(4, 60))

    def step(self) -> Batch:
        """Schedule a step, and give each row that samples a token."""
        self.now += 1
        batch = self.scheduler.schedule()
        for sequence, count, samples in zip(batch.sequences, batch.count.tolist(), batch.samples.tolist(), strict=True):
            self.served[sequence.owner.client] += count
            sequence.num_computed += count
            if samples:
                wait = self.waits[sequence.key]
                wait.first = wait.first or self.now
                if sequence.num_output == 0:
                    self.ended.append((sequence, wait, self.served[sequence.owner.client] - wait.served))
                sequence.tokens.append(self.noise.randrange(1000))
        self.blocks.settle(batch.sequences)
        for sequence in batch.sequences:
            if sequence.remaining == 0:
                self.scheduler.finish(sequence, "length")
                unfinished = self.open[sequence.owner.client]
                unfinished[sequence.request_id] -= 1
                if not unfinished[sequence.request_id]:
                    del unfinished[sequence.request_id]
                del self.waits[sequence.key]
        return batch

    def check(self) -> None:
        """Assert that blocks are not lost, and that a sequence waits only where another is served."""
        self.blocks.check(self.scheduler.sequences())


def bound(sequence: Sequence, wait: Wait) -> int:
    """Return the most tokens of its client before its first one, by `core/fair_queue`, its own prompt included."""
    return wait.unfinished * wait.place * sequence.max_len + 2 * PLACES * CONTEXT + sequence.num_prompt


def measure(steps: int, seed: int) -> dict[str, float]:
    simulation = Simulation(seed)
    for at in range(steps):
        simulation.random_load()
        simulation.step()
        if at % 500 == 0:
            simulation.check()
    waits = simulation.ended
    late = [simulation.now - wait.arrival for wait in simulation.waits.values() if wait.first is None]
    short = [(wait.first or 0) - wait.arrival for one, wait, _ in waits if one.owner.client == "light"]
    return {
        "sequences": len(waits),
        "longest_wait_tokens": max(tokens for _, _, tokens in waits),
        "longest_wait_of_bound": round(max(tokens / bound(one, wait) for one, wait, tokens in waits), 3),
        "longest_wait_steps": max([(wait.first or 0) - wait.arrival for _, wait, _ in waits] + late),
        "longest_wait_of_a_short_request_steps": max(short, default=0),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1_000_000, help="in all")
    parser.add_argument("--seeds", type=int, default=100)
    arguments = parser.parse_args()
    each = [measure(arguments.steps // arguments.seeds, seed) for seed in range(arguments.seeds)]
    longest = {name: max(one[name] for one in each) for name in each[0] if name != "sequences"}
    sequences = sum(one["sequences"] for one in each)
    print(json.dumps({"steps": arguments.steps, "seeds": arguments.seeds, "sequences": sequences, **longest}))


if __name__ == "__main__":
    main()
