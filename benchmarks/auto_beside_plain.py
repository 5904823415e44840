"""`auto` against plain decoding with many clients, step by step: two engines on the same weights take turns.

A machine's speed drifts by several per cent within the seconds that one run of serve.py takes, which is as much as what
is looked for. Here an engine with `auto`, a plain one and a second plain one take one step each in turn, so that all of
them meet the same drift; the second plain one says what chance is left. Every engine has prompts and answers of the
same lengths, and no prompt comes twice. A rate counts an engine's own steps, while all of its places are taken.

    python benchmarks/auto_beside_plain.py [--levels 16 64] [--rounds 3] [--remember]

`--remember` starts from what the policy has stored, as a server does, in place of nothing.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections import Counter
from typing import Any

from common import finish, ratio
from serve_load import Job, Prompt, make_jobs, show_ratio

from paceline.bench.prompts import shipped
from paceline.build import build, load
from paceline.config import AUTO, NONE, EngineConfig, SpeculationConfig
from paceline.engine.engine import Engine

ARMS = {"auto": AUTO, "plain": NONE, "again": NONE}


class Arm:
    """An engine and the clients that keep it full."""

    def __init__(self, engine: Engine, mode: str) -> None:
        self.engine, self.mode, self._serial = engine, mode, itertools.count()

    def begin(self, jobs: list[Job], clients: int) -> None:
        self._left, self.full = iter(jobs), True
        self.spent, self.counts = 0.0, Counter[str]()
        for _ in range(clients):
            self._add()

    def _add(self) -> None:
        job = next(self._left, None)
        self.full &= job is not None
        if job is not None:
            self.engine.add_request(f"beside-{next(self._serial)}", list(job.prompt), job.params(self.mode))

    def step(self) -> None:
        full, begun = self.full, time.perf_counter()
        outputs = self.engine.step()
        if full:
            self.spent += time.perf_counter() - begun
            nodes = sum(nodes for _, nodes, *_ in outputs.drafts.values())
            self.counts.update(steps=1, tokens=outputs.num_tokens, nodes=nodes)
        for _ in outputs.ended:
            self._add()


def side_by_side(arms: dict[str, Arm], prompts: list[Prompt], clients: int, turn: int, max_tokens: int) -> None:
    for group, arm in enumerate(arms.values()):
        jobs = make_jobs(prompts, clients * 3 // 2 + 6, max_tokens, 100 * clients + turn, group=group)
        arm.begin(jobs, clients)
    while any(arm.full for arm in arms.values()):
        for arm in arms.values():
            if arm.full:
                arm.step()
    for arm in arms.values():  # what is left is not measured
        while arm.engine.has_work:
            arm.step()


def measure(arms: dict[str, Arm], prompts: list[Prompt], clients: int, args: argparse.Namespace) -> dict[str, Any]:
    rates: dict[str, list[float]] = {name: [] for name in arms}
    counts: dict[str, Counter[str]] = {name: Counter() for name in arms}
    for turn in range(args.rounds):
        side_by_side(arms, prompts, clients, turn, args.max_tokens)
        for name, arm in arms.items():
            rates[name].append(arm.counts["tokens"] / arm.spent)
            counts[name].update(arm.counts)
    found: dict[str, Any] = {name: {"tokens_per_s": rates[name], **counts[name]} for name in arms}
    print(f"\n{clients} clients")
    for name, one in found.items():
        listed = " ".join(f"{rate:.1f}" for rate in rates[name])
        print(f"{name:6} tokens/s {listed}; {one['steps']} steps, {one['nodes']} nodes drafted")
    for above, below in (("auto", "plain"), ("auto", "again"), ("again", "plain")):
        name = f"{above} / {below}"
        found[name] = ratio(rates[above], rates[below])
        show_ratio(name, found[name])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--levels", type=int, nargs="+", default=[16, 64], help="clients")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--threads", type=int, help="unset: one for each core")
    parser.add_argument("--remember", action="store_true", help="start from the policy's stored state")
    args = parser.parse_args()
    target = load(args.model, threads=args.threads)
    config = EngineConfig(max_model_len=2048, kv_cache_bytes=2 << 30)
    arms = {
        name: Arm(build(target, config, SpeculationConfig(method=AUTO), remember=args.remember).engine, mode)
        for name, mode in ARMS.items()
    }
    tokenizer = target.loaded.tokenizer
    encoded = [tuple(tokenizer.apply_chat_template(prompt.messages([]))) for prompt in shipped()]
    prompts = [prompt for prompt in encoded if len(prompt) < 1900]
    side_by_side(arms, prompts, 4, 99, args.max_tokens)  # warm-up
    result = {str(clients): measure(arms, prompts, clients, args) for clients in args.levels}
    settings = {name: getattr(args, name) for name in ("model", "rounds", "max_tokens", "remember")}
    finish("auto_beside_plain", {"levels": result, **settings})


if __name__ == "__main__":
    main()
