"""What `auto` costs a batch that is too large to draft for: the drafters' and the policy's share of a step.

One engine and one thread, so that the thread's processor time is the whole of it whatever else the machine runs. So
many requests at once, each replaced when it ends, as in serve.py; rounds of `auto` and of none take turns with the same
prompts and lengths. Time is counted while all places are taken, per committed token.

    python benchmarks/idle_drafters.py [--levels 16 64] [--rounds 2] [--lines 30]

`--lines` also profiles the first run of `auto` at each level.
"""

from __future__ import annotations

import argparse
import cProfile
import itertools
import json
import pstats
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from common import finish
from serve_load import Job, Prompt, make_jobs

from paceline.bench.prompts import shipped
from paceline.build import build, load
from paceline.config import AUTO, NONE, EngineConfig, SpeculationConfig
from paceline.engine.engine import Engine

PARTS = {
    "drafters": ("propose", "gather", "on_verdict", "mark", "index_prompts", "admit", "release"),
    "policy": ("plan", "observe", "meanwhile", "plain_seconds", "forget"),
}


class Parts:
    """Processor seconds of calls of an engine's drafters and policy; what one calls of another counts once."""

    def __init__(self, engine: Engine) -> None:
        self.spent: Counter[str] = Counter()
        self._inside = False
        for owner, names in PARTS.items():
            for name in names:
                self._watch(getattr(engine, owner), name, f"{owner}.{name}")

    def _watch(self, owner: Any, name: str, part: str) -> None:
        function: Callable[..., Any] = getattr(owner, name)

        def watched(*args: Any, **options: Any) -> Any:
            if self._inside:
                return function(*args, **options)
            self._inside, begun = True, time.thread_time()
            try:
                return function(*args, **options)
            finally:
                self._inside = False
                self.spent[part] += time.thread_time() - begun

        setattr(owner, name, watched)


def run(engine: Engine, parts: Parts, jobs: Sequence[Job], mode: str, clients: int) -> dict[str, float]:
    """Processor milliseconds of steps, in all and part by part, while every place was taken."""
    left, serial = iter(jobs), itertools.count()
    for job in itertools.islice(left, clients):
        engine.add_request(f"idle-{next(serial)}", list(job.prompt), job.params(mode))
    spent, full, found = 0.0, True, Counter[str]()
    parts.spent = Counter()
    while engine.has_work:
        begun = time.thread_time()
        outputs = engine.step()
        if full:
            spent += time.thread_time() - begun
            found.update(tokens=outputs.num_tokens, nodes=sum(nodes for _, nodes, *_ in outputs.drafts.values()))
            seen = parts.spent.copy()
        for _ in outputs.ended:
            job = next(left, None)
            full &= job is not None
            if job is not None:
                engine.add_request(f"idle-{next(serial)}", list(job.prompt), job.params(mode))
    return {**found, "all": 1e3 * spent, **{name: 1e3 * seconds for name, seconds in seen.items()}}


def measure(engine: Engine, prompts: list[Prompt], clients: int, args: argparse.Namespace) -> dict[str, Any]:
    parts, noise = Parts(engine), random.Random(0)
    totals: dict[str, Counter[str]] = {AUTO: Counter(), NONE: Counter()}
    for turn in range(args.warmup + args.rounds):
        for mode in noise.sample((AUTO, NONE), 2):
            group, count = int(mode == AUTO), clients * 3 // 2 + 6
            jobs = make_jobs(prompts, count, args.max_tokens, 100 * clients + turn, group=group)
            profiler = cProfile.Profile(time.thread_time) if args.lines and mode == AUTO and turn == 0 else None
            if profiler is not None:
                profiler.enable()
            found = run(engine, parts, jobs, mode, clients)
            if profiler is not None:
                profiler.disable()
                pstats.Stats(profiler).sort_stats("tottime").print_stats(args.lines)
            if turn >= args.warmup:
                totals[mode].update(found)
    return shown(clients, totals)


def shown(clients: int, totals: dict[str, Counter[str]]) -> dict[str, Any]:
    """What a token takes, and which share of that is the drafters' and the policy's."""
    per_token = {mode: {name: ms / total["tokens"] for name, ms in total.items()} for mode, total in totals.items()}
    own = {mode: sum(ms for name, ms in each.items() if "." in name) for mode, each in per_token.items()}
    plain = per_token[NONE]["all"] - own[NONE]
    found = {
        "ms_a_token": {mode: each["all"] for mode, each in per_token.items()},
        "own_ms_a_token": own,
        "nodes_a_token": per_token[AUTO]["nodes"],
        # The rest of a step is the same code on the same work: what differs in it is chance.
        "auto over none": (plain + own[NONE]) / (plain + own[AUTO]),
    }
    print(f"{clients} sequences: {json.dumps(found)}")
    for name in sorted(per_token[AUTO], key=lambda name: -per_token[AUTO][name]):
        print(f"  {name:24} {per_token[AUTO][name]:9.4f} auto {per_token[NONE].get(name, 0):9.4f} none", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--levels", type=int, nargs="+", default=[16, 64], help="sequences at once")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--warmup", type=int, default=1, help="rounds before, in which the policy learns")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--threads", type=int, default=1, help="more only on an idle machine: threads that wait spin")
    parser.add_argument("--lines", type=int, default=0, help="also profile: this many functions")
    args = parser.parse_args()
    target = load("smollm2", threads=args.threads)
    tokenizer = target.loaded.tokenizer
    encoded = [tuple(tokenizer.apply_chat_template(prompt.messages([]))) for prompt in shipped()]
    prompts = [prompt for prompt in encoded if len(prompt) < 1900]
    result = {}
    for clients in args.levels:
        config = EngineConfig(max_model_len=2048, kv_cache_bytes=2 << 30)
        built = build(target, config, SpeculationConfig(method=AUTO), remember=False)
        result[str(clients)] = measure(built.engine, prompts, clients, args)
    finish("idle_drafters", {"levels": result, "rounds": args.rounds, "max_tokens": args.max_tokens})


if __name__ == "__main__":
    main()
