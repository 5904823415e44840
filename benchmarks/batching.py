"""Many requests at once: `auto` beside plain decoding, and `LLM.generate` beside the engine's bare steps.

    python -m benchmarks.batching beside-plain --levels 16 64   # two plain engines and one with `auto`, step by step
    python -m benchmarks.batching throughput --device cuda      # thousands of short answers

`beside-plain`: a machine's speed drifts by several per cent within seconds, so each engine takes one step in turn, and
a second plain engine shows what chance does. No prompt comes twice. A rate counts an engine's own steps while all
places are taken. Beside it stands the processor time of drafters and policy a token, one thread with `--threads 1`.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections import Counter
from typing import Any

from benchmarks.harness import TOPICS, Spent, finish, ratio, shown
from paceline import LLM, SamplingParams

FORMS = (
    "In two sentences: what are {}?",
    "Name two facts about {}.",
    "Say in two or three sentences why {} matter.",
    "Write the first two sentences of a story about {}.",
)
# Calls of the engine's parts whose processor time `beside-plain` counts.
PARTS = {
    "drafters": ("propose", "begin_early", "offers", "gather", "on_verdict", "on_publish"),
    "policy": ("plan", "observe", "learn", "plain_seconds", "forget"),
}


# -- `auto` beside plain


class Arm:
    """An engine and the clients that keep it full."""

    def __init__(self, engine: Any, method: str) -> None:
        self.engine, self.method, self._serial = engine, method, itertools.count()
        self._spent = Spent()
        for owner, names in PARTS.items():
            for name in names:
                self._spent.watch(getattr(engine, owner), name, owner)

    def begin(self, prompts: list[list[int]], clients: int, max_tokens: int) -> None:
        self._left, self._max_tokens, self.full = iter(prompts), max_tokens, True
        self.spent_s, self.own_s, self.counts = 0.0, 0.0, Counter[str]()  # own: processor time of drafters and policy
        for _ in range(clients):
            self._add()

    def _add(self) -> None:
        prompt, serial = next(self._left, None), next(self._serial)
        self.full &= prompt is not None
        if prompt is not None:
            length = self._max_tokens * (2 + serial % 5) // 6  # answers of many lengths, so that ends spread
            params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, speculation=self.method)
            self.engine.add_request(f"beside-{serial}", prompt, params.resolve({}))

    def step(self) -> None:
        self._spent.clear()
        full, begun = self.full, time.perf_counter()
        result = self.engine.step()
        if full:
            self.spent_s += time.perf_counter() - begun
            self.own_s += self._spent.watched_s
            nodes = sum(nodes for _, nodes, *_ in result.drafts.values())
            self.counts.update(steps=1, tokens=result.num_tokens, nodes=nodes)
        for _ in result.ended:
            self._add()


def side_by_side(arms: dict[str, Arm], prompts: list[list[int]], clients: int, turn: int, max_tokens: int) -> None:
    count = clients * 3 // 2 + 6
    for group, arm in enumerate(arms.values()):
        chosen = itertools.islice(itertools.cycle(prompts), turn * count + group, turn * count + group + count)
        arm.begin([[*prompt, turn, group] for prompt in chosen], clients, max_tokens)  # no prompt twice
    while any(arm.full for arm in arms.values()):
        for arm in arms.values():
            if arm.full:
                arm.step()
    for arm in arms.values():  # the rest is not measured
        while arm.engine.has_work:
            arm.step()


def beside_plain(args: argparse.Namespace) -> None:
    from paceline.bench.prompts import shipped
    from paceline.build import build, load
    from paceline.config import EngineConfig, SpeculationConfig

    target = load(args.model, threads=args.threads)
    config = EngineConfig(max_model_len=2048, kv_cache_bytes=2 << 30)
    arms = {
        name: Arm(build(target, config, SpeculationConfig(method="auto"), remember=False).engine, method)
        for name, method in (("auto", "auto"), ("plain", "none"), ("again", "none"))
    }
    encoded = [target.loaded.tokenizer.apply_chat_template(prompt.messages([])) for prompt in shipped()]
    prompts = [prompt for prompt in encoded if len(prompt) < 1900]
    side_by_side(arms, prompts, 4, 0, args.max_tokens)  # warm-up
    result: dict[str, Any] = {}
    for clients in args.levels:
        rates: dict[str, list[float]] = {name: [] for name in arms}
        counts: dict[str, Counter[str]] = {name: Counter() for name in arms}
        own_s: Counter[str] = Counter()
        for turn in range(args.rounds):
            side_by_side(arms, prompts, clients, 1 + turn, args.max_tokens)
            for name, arm in arms.items():
                rates[name].append(arm.counts["tokens"] / arm.spent_s)
                counts[name].update(arm.counts)
                own_s[name] += arm.own_s
        level: dict[str, Any] = {
            name: {"tokens_per_s": rates[name], "own_ms_a_token": 1e3 * own_s[name] / counts[name]["tokens"]}
            | dict(counts[name])
            for name in arms
        }
        for above, below in (("auto", "plain"), ("auto", "again"), ("again", "plain")):
            level[f"{above} / {below}"] = ratio(rates[above], rates[below])
            print(f"{clients} sequences, {above} / {below}: {shown(level[f'{above} / {below}'], 3)}", flush=True)
        print("drafters and policy, ms a token:", {name: round(level[name]["own_ms_a_token"], 4) for name in arms})
        result[str(clients)] = level
    finish("auto_beside_plain", {"levels": result, "rounds": args.rounds})


# -- many short answers


def throughput(args: argparse.Namespace) -> None:
    """Requests that stop at EOS through `LLM.generate`, against `Engine.step` alone with every row decoding; and what
    was compiled or captured after start-up, which should be nothing."""
    llm = LLM(args.model, device=args.device, method="none", max_num_seqs=args.rows, max_num_batched_tokens=4096)
    texts = [
        FORMS[i % 4].format(TOPICS[i // 4 % 16]) + " " * (i // 64 % 3) for i in range(args.requests)
    ]  # spaces: prompts differ
    prompts = [llm.tokenizer.apply_chat_template([{"role": "user", "content": text}]) for text in texts]
    result: dict[str, Any] = {"startup_s": llm.load_s, "requests": args.requests, "rows": args.rows}
    for kind, options in {"greedy": {"temperature": 0}, "seeded": {"temperature": 0.7, "top_p": 0.9}}.items():
        params = [
            SamplingParams(max_tokens=128, **options, **({"seed": i} if kind == "seeded" else {}))
            for i in range(args.requests)
        ]

        def bare(engine: Any, params: list[SamplingParams] = params) -> float:
            endless = [
                SamplingParams(temperature=p.temperature, top_p=p.top_p, seed=p.seed, ignore_eos=True, max_tokens=900)
                for p in params[: args.rows]
            ]
            pairs = zip(prompts, endless, strict=False)
            sequences = [engine.add_request(f"bare-{i}", p, q.resolve({}))[0] for i, (p, q) in enumerate(pairs)]
            while any(sequence.num_output < 4 for sequence in sequences):
                engine.step()
            before, started = sum(sequence.num_output for sequence in sequences), time.perf_counter()
            for _ in range(60):
                engine.step()
            rate = (sum(sequence.num_output for sequence in sequences) - before) / (time.perf_counter() - started)
            for sequence in sequences:
                engine.cancel(sequence.request_id)
            return rate

        bare_rate, late = llm.call(bare), llm.call(lambda engine: engine.runner.late_captures)
        rates = []
        for _ in range(2):
            started = time.perf_counter()
            answers = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
            tokens = sum(len(answer.outputs[0].token_ids) for answer in answers)
            rates.append(tokens / (time.perf_counter() - started))
        result[kind] = {
            "bare": bare_rate,
            "generate": max(rates),
            "first": rates[0],
            "share": max(rates) / bare_rate,
            "late_captures": llm.call(lambda engine: engine.runner.late_captures) - late,
        }
        print(kind, result[kind], flush=True)
    finish("throughput", result)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("beside-plain", "throughput"))
    parser.add_argument("--model", default="smollm2")
    of_plain = parser.add_argument_group("beside-plain")
    of_plain.add_argument("--levels", type=int, nargs="+", default=[16, 64], help="sequences at once")
    of_plain.add_argument("--rounds", type=int, default=5)
    of_plain.add_argument("--max-tokens", type=int, default=48)
    of_plain.add_argument("--threads", type=int, help="unset: one for each core")
    of_throughput = parser.add_argument_group("throughput")
    of_throughput.add_argument("--device", default="cpu")
    of_throughput.add_argument("--requests", type=int, default=8192)
    of_throughput.add_argument("--rows", type=int, default=512, help="requests at once")
    args = parser.parse_args()
    {"beside-plain": beside_plain, "throughput": throughput}[args.what](args)


if __name__ == "__main__":
    main()
