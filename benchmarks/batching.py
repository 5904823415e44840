"""Continuous batching: many requests at once against one, the engine's own time, and `auto` beside plain decoding.

EOS is ignored in the first two so that the batch stays full. The engine's own time (everything but the model) is the
median over steps that only decode; speeds include the prompts.

    python -m benchmarks.batching [--rounds 5] [--method ngram --k 4] [--dtype auto --activations int8]
    python -m benchmarks.batching --against TREE --rounds 7     # another source tree, by turns
    python -m benchmarks.batching --beside-plain --levels 16 64 # two plain engines and one with `auto`, step by step
    python -m benchmarks.batching --throughput --device cuda    # `LLM.generate` against the engine's bare steps

`--beside-plain`: a machine's speed drifts by several per cent within seconds, so each engine takes one step in turn,
and a second plain engine shows what chance does. No prompt comes twice. A rate counts an engine's own steps while all
places are taken. Beside it stands the processor time of drafters and policy a token, one thread with `--threads 1`.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections import Counter
from collections.abc import Callable
from hashlib import sha1
from pathlib import Path
from typing import Any

from benchmarks.harness import compare_trees, finish, interleaved, ratio, serve_cells, shown
from paceline import LLM, SamplingParams

TOKENS = 64
TOPICS = ("rivers", "clocks", "bread", "chess", "violins", "comets", "moss", "trains")
TOPICS += ("lenses", "salt", "kites", "maps", "bees", "glass", "tides", "ink")
FORMS = (
    "In two sentences: what are {}?",
    "Name two facts about {}.",
    "Say in two or three sentences why {} matter.",
    "Write the first two sentences of a story about {}.",
)
KINDS: dict[str, dict[str, Any]] = {"greedy": {"temperature": 0}, "sampled": {"temperature": 0.8, "top_p": 0.9}}
# Calls of the engine's parts whose processor time `--beside-plain` counts; a part that an engine lacks is left out.
PARTS = {
    "drafters": ("propose", "offers", "gather", "on_verdict", "on_publish", "mark", "index_prompts"),
    "policy": ("plan", "observe", "learn", "plain_seconds", "forget"),
}


def conversations(count: int) -> list[list[dict[str, str]]]:
    return [[{"role": "user", "content": f"Tell me something about {topic}."}] for topic in TOPICS[:count]]


def batches(args: argparse.Namespace) -> None:
    llm = LLM(
        args.model,
        device=args.device,
        method=args.method,
        k=args.k,
        prefix_caching=False,
        dtype=args.dtype,
        activations=args.activations,
    )
    own_ms: dict[str, list[float]] = {}

    def work(rows: int, kind: str) -> None:
        engine = llm.engine
        params = SamplingParams(max_tokens=TOKENS, ignore_eos=True, **KINDS[kind]).resolve({})
        for index, messages in enumerate(conversations(rows)):
            engine.add_request(str(index), llm.tokenizer.apply_chat_template(messages), params)
        while engine.has_work:
            decoding = all(sequence.decoding for sequence in engine.scheduler.sequences())
            before = engine.stats.overhead_s
            engine.step()
            if decoding:
                own_ms.setdefault(f"{rows} {kind}", []).append(1e3 * (engine.stats.overhead_s - before))

    cells = {f"{n} {kind}": lambda n=n, kind=kind: work(n, kind) for kind in KINDS for n in (1, 16)}
    times = interleaved(cells, args.rounds)
    speed = {name: [int(name.split()[0]) * TOKENS / each for each in seconds] for name, seconds in times.items()}
    gain = ratio(speed["16 greedy"], speed["1 greedy"])
    result = {
        "tokens_per_second": {name: statistics.median(values) for name, values in speed.items()},
        "engine_ms_per_step": {name: statistics.median(values) for name, values in own_ms.items()},
    }
    for name in times:
        print(f"{name:12} {result['tokens_per_second'][name]:7.1f} tok/s", end="")
        print(f"   engine {result['engine_ms_per_step'][name]:.2f} ms a step")
    print(f"16 at once against one: {shown(gain)}")
    options = {name: getattr(args, name) for name in ("method", "k", "dtype", "activations", "rounds")}
    finish("batching", {"kernels": llm.kernels_name, **options, **result, "gain_16_over_1": gain})


def worker(args: argparse.Namespace) -> None:
    """Answer 1 and 16 requests at once, plainly and with `auto`, through the public API."""
    options = {"threads": 1 if args.one_core else None, "prefix_caching": False, "kv_cache_bytes": 1 << 28}
    llms: dict[str, LLM] = {}

    def fresh() -> None:
        """Load again: where a model's memory lies makes a difference that no round of one process averages out."""
        for llm in llms.values():
            llm.close()
        for name in ("float32", "int8"):
            llms[name] = LLM(args.model, device="cpu", activations=name, **options)
            llms[name].generate(["Hello there."], SamplingParams(max_tokens=8))

    def run(cell: str) -> dict[str, Any]:
        activations, method, rows, kind = cell.split()
        params = SamplingParams(max_tokens=TOKENS, ignore_eos=True, seed=7, speculation=method, **KINDS[kind])
        outputs = llms[activations].chat(conversations(int(rows)), params)
        return {"digest": sha1(repr([output.outputs[0].token_ids for output in outputs]).encode()).hexdigest()}

    cells = itertools.product(("float32", "int8"), ("none", "auto"), ("1", "16"), KINDS)
    serve_cells([" ".join(cell) for cell in cells], run, fresh)


# -- `auto` beside plain


class Arm:
    """An engine and the clients that keep it full."""

    def __init__(self, engine: Any, method: str) -> None:
        self.engine, self.method, self._serial = engine, method, itertools.count()
        self.own_s = 0.0  # processor seconds of drafters and policy
        self._inside = False
        for owner, names in PARTS.items():
            for name in names:
                if hasattr(getattr(engine, owner), name):
                    self._watch(getattr(engine, owner), name)

    def _watch(self, owner: Any, name: str) -> None:
        function: Callable[..., Any] = getattr(owner, name)

        def watched(*args: Any, **options: Any) -> Any:
            if self._inside:
                return function(*args, **options)
            self._inside, begun = True, time.thread_time()
            try:
                return function(*args, **options)
            finally:
                self._inside = False
                self.own_s += time.thread_time() - begun

        setattr(owner, name, watched)

    def begin(self, prompts: list[list[int]], clients: int, max_tokens: int) -> None:
        self._left, self._max_tokens, self.full = iter(prompts), max_tokens, True
        self.spent_s, self.own_s, self.counts = 0.0, 0.0, Counter[str]()
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
        full, begun, own_s = self.full, time.perf_counter(), self.own_s
        result = self.engine.step()
        if full:
            self.spent_s += time.perf_counter() - begun
            nodes = sum(nodes for _, nodes, *_ in result.drafts.values())
            self.counts.update(steps=1, tokens=result.num_tokens, nodes=nodes)
        else:
            self.own_s = own_s
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

    target = load(args.model, threads=args.threads, activations=args.activations)
    config = EngineConfig(max_model_len=2048, kv_cache_bytes=2 << 30)
    arms = {
        name: Arm(build(target, config, SpeculationConfig(method="auto"), remember=args.remember).engine, method)
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
    finish("auto_beside_plain", {"levels": result, "rounds": args.rounds, "remember": args.remember})


# -- many short answers


def throughput(args: argparse.Namespace) -> None:
    """Requests that stop at EOS through `LLM.generate`, against `Engine.step` alone with every row decoding; and what
    was compiled or captured after start-up, which should be nothing."""
    llm = LLM(args.model, device=args.device, method=args.method, max_num_seqs=args.rows, max_num_batched_tokens=4096)
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

        bare_rate, late = llm.call(bare), llm.call(lambda engine: engine.stats.late_captures)
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
            "late_captures": llm.call(lambda engine: engine.stats.late_captures) - late,
        }
        print(kind, result[kind], flush=True)
    finish("throughput", result)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--method", default="none")
    parser.add_argument("--k", type=int)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", help="auto keeps the blocks of the file")
    parser.add_argument("--activations", default="float32")
    parser.add_argument("--against", type=Path, metavar="TREE", help="another source tree of this package")
    parser.add_argument("--one-core", action="store_true", help="of --against: one thread, processor time")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--beside-plain", action="store_true")
    parser.add_argument("--levels", type=int, nargs="+", default=[16, 64], help="sequences at once")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--threads", type=int, help="unset: one for each core")
    parser.add_argument("--remember", action="store_true", help="start from the policy's stored state")
    parser.add_argument("--throughput", action="store_true")
    parser.add_argument("--requests", type=int, default=8192)
    parser.add_argument("--rows", type=int, default=512)
    args = parser.parse_args()
    if args.worker:
        worker(args)
    elif args.against:
        arguments, unit = ["--model", args.model], "wall"
        if args.one_core:
            arguments, unit = [*arguments, "--one-core"], "cpu"
        finish("batching_against", compare_trees("benchmarks.batching", args.against, args.rounds, arguments, unit))
    elif args.throughput:
        throughput(args)
    else:
        (beside_plain if args.beside_plain else batches)(args)


if __name__ == "__main__":
    main()
