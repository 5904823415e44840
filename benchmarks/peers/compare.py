"""paceline beside its peers: the same model, the same tokens, the same cores, one answer at a time.

Every configuration is a process of its own, in its peer's environment (environments.sh makes them), that stays loaded.
A prompt is answered by all of them one after the other, in an order drawn anew, while the others sleep. What a peer
cannot do costs its own figures only. The last line is JSON.

    python -m benchmarks.peers.compare --environments DIR [--gguf FILE] [--minutes 4]
    python -m benchmarks.peers.compare --environments DIR --model FILE.gguf --only paceline llama_cpp
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.harness import Watch, expanded_folder, finish, settle
from benchmarks.peers.configurations import REFERENCE, Configuration, configurations, quantisation, select
from benchmarks.peers.float_gguf import write_float_gguf
from benchmarks.peers.prompts import Prompt, make_prompts
from benchmarks.peers.report import beside_the_best, cells, figure, table
from benchmarks.peers.workers import (
    HERE,
    OURS,
    Worker,
    WorkerFailed,
    first_cores,
    interpreter,
    surroundings,
)
from paceline.errors import PacelineError
from paceline.models.load.hub import cache_home, resolve
from paceline.models.load.loader import is_gguf, load_config
from paceline.platform.cpu import guard_amx
from paceline.text.tokenizer import Tokenizer

MAX_CONTEXT = 1024
WARM_UP = Prompt(name="warm up", workload="chat", text="Tell me about the sea and the ships that cross it.")
WARM_UP_TOKENS = 64  # every library compiles, and paceline's policy tries its ways to draft, before the clock runs

Request = dict[str, Any]


@dataclass
class Measured:
    rows: list[dict[str, Any]] = field(default_factory=list)  # one for each prompt
    failures: dict[str, str] = field(default_factory=dict)  # key: configuration
    about: dict[str, dict[str, Any]] = field(default_factory=dict)  # reports of workers about themselves


def main() -> None:
    args = parse()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # same as Ctrl-C: stop the workers, report what there is
    try:
        compare(args)
    except (PacelineError, OSError) as error:
        raise SystemExit(str(error)) from error


def compare(args: argparse.Namespace) -> None:
    guard_amx(cache_home())  # its verdict is a variable that every worker inherits
    folder = resolve(args.model)
    if is_gguf(folder):
        args.gguf = folder
        if not set(args.only or ["transformers"]) <= {OURS, "llama_cpp", "openvino"}:
            raise SystemExit("transformers and vllm load safetensors: name the others, as in --only paceline llama_cpp")
    elif not folder.is_dir():
        raise SystemExit(f"{folder} is no model: name an alias, a folder or a .gguf file")
    prompts = make_prompts(args.per_workload, args.temperature, args.prompts)
    with scratch(args.work) as work:
        float_gguf = work / "weights-fp32.gguf"
        own = (str(args.gguf), quantisation(args.gguf)) if args.gguf else None
        chosen = select(configurations(args.k, str(float_gguf), own), args.only)
        if not float_gguf.exists() and any(configuration.gguf == str(float_gguf) for configuration in chosen):
            write_float_gguf(folder, float_gguf)
        settings = {
            "model": args.model,
            "max_tokens": args.max_tokens,
            "temperature": args.temperature,
            "seed": args.seed,
            "k": args.k,
            "threads": args.threads,
            "prompts": f"copy and {args.prompts.name if args.prompts else 'chat'}",
            "prompts_asked": len(prompts),
        }
        make = request_maker(folder, args.seed)
        requests = [(prompt, make(prompt, args.max_tokens)) for prompt in prompts]
        launch = partial(start, folder=folder, work=work, args=args)
        warm_up = make(WARM_UP, min(WARM_UP_TOKENS, args.max_tokens))
        measured = Measured()
        measure(chosen, launch, warm_up, requests, measured, args.threads, args.minutes)
    report(chosen, measured, settings)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--environments", type=Path, help="what environments.sh made; without it only paceline runs")
    parser.add_argument("--model", default="smollm2", help="an alias, a folder with safetensors, or a .gguf file")
    parser.add_argument("--gguf", type=Path, help="a quantised file of the same weights, for llama.cpp and OpenVINO")
    parser.add_argument("--prompts", type=Path, help='jsonl of {"turns"} to ask instead of our own chat')
    parser.add_argument("--per-workload", type=int, default=12)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0])
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--k", type=int, default=8, help="tokens drafted ahead, by every peer")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", nargs="+", metavar="PEER", help="paceline, transformers, vllm, llama_cpp, openvino")
    parser.add_argument("--minutes", type=float, help="begin no prompt after this time")
    parser.add_argument("--work", type=Path, help="folder for logs, the float32 GGUF and paceline's policy memory")
    return parser.parse_args()


@contextmanager
def scratch(given: Path | None) -> Iterator[Path]:
    if given is not None:
        given.mkdir(parents=True, exist_ok=True)
        yield given
        return
    with tempfile.TemporaryDirectory(prefix="paceline-peers-") as folder:
        yield Path(folder)


def start(configuration: Configuration, folder: Path, work: Path, args: argparse.Namespace) -> Worker:
    model = folder if configuration.peer == OURS or is_gguf(folder) else expanded_folder(folder, work)
    job = asdict(configuration) | {"model": str(model), "threads": args.threads, "max_context": MAX_CONTEXT}
    script = HERE / f"worker_{configuration.peer}.py"
    command = [interpreter(configuration.peer, args.environments), str(script), json.dumps(job)]
    log = work / f"{configuration.name.replace(' ', '-')}.log"
    environment = surroundings(configuration.peer, args.threads, work / "home", args.environments)
    return Worker(configuration.name, command, environment, log, first_cores(args.threads))


def request_maker(folder: Path, seed: int) -> Callable[[Prompt, int], Request]:
    """Return what turns a text into what every worker gets: token ids, through the model's own chat template."""
    tokenizer, settings = Tokenizer.from_path(folder), {"seed": seed, "eos": list(load_config(folder).eos_token_ids)}

    def make(prompt: Prompt, max_tokens: int) -> Request:
        tokens = tokenizer.apply_chat_template([{"role": "user", "content": prompt.text}])
        if len(tokens) + max_tokens > MAX_CONTEXT:
            raise SystemExit(f"a prompt of {len(tokens)} tokens and {max_tokens} more exceed {MAX_CONTEXT}")
        return {"prompt": tokens, "max_tokens": max_tokens, "temperature": prompt.temperature} | settings

    return make


def measure(
    chosen: Sequence[Configuration],
    launch: Callable[[Configuration], Worker],
    warm_up: Request,
    requests: Sequence[tuple[Prompt, Request]],
    measured: Measured,
    cores: int,
    minutes: float | None = None,
) -> None:
    """Load every worker, then ask them all; Ctrl-C and `minutes` leave what was measured."""
    started = time.perf_counter()
    workers: dict[str, Worker] = {}
    try:
        for configuration in chosen:  # one after the other: loading takes all cores
            with surviving(configuration.name, workers, measured):
                workers[configuration.name] = launch(configuration)
                measured.about[configuration.name] = workers[configuration.name].ready()
                workers[configuration.name].ask(warm_up)
        for prompt, request in requests:
            if not workers or (minutes is not None and time.perf_counter() - started > 60 * minutes):
                break
            answered = ask_all(workers, request, prompt.name, measured, cores)
            about = {"name": prompt.name, "workload": prompt.workload, "greedy": prompt.temperature == 0}
            measured.rows.append(about | answered)
            print(f"{len(measured.rows)} prompts, {len(workers)} workers", file=sys.stderr)
    except KeyboardInterrupt:
        print("interrupted: reporting what was measured", file=sys.stderr)
    finally:
        for worker in workers.values():
            worker.stop()


def ask_all(workers: dict[str, Worker], request: Request, name: str, measured: Measured, cores: int) -> dict[str, Any]:
    """One prompt, answered by every worker still running, in this prompt's own order.

    `idle` is the share of the cores that workers took which should have slept, `foreign` what all else took: the most
    of any answer.
    """
    order = list(workers)
    random.Random(name).shuffle(order)
    row: dict[str, Any] = {"prompt_tokens": len(request["prompt"]), "idle": 0.0, "foreign": 0.0, "answers": {}}
    for each in order:
        present = dict(workers)
        settle(list(present.values()), cores)
        watch = Watch(list(present.values()), cores)
        with surviving(each, workers, measured):
            row["answers"][each] = asdict(workers[each].ask(request))
            spent, foreign = watch.shares()
            idle = sum(share for other, share in zip(present, spent, strict=True) if other != each)
            row |= {"idle": max(row["idle"], idle), "foreign": max(row["foreign"], foreign)}
    return row


@contextmanager
def surviving(name: str, workers: dict[str, Worker], measured: Measured) -> Iterator[None]:
    """A worker that fails is written down and stopped; the run goes on without it."""
    try:
        yield
    except WorkerFailed as error:
        measured.failures[name] = str(error)
        print(f"{name} is out: {error}", file=sys.stderr)
        if name in workers:
            workers.pop(name).stop()


def report(chosen: Sequence[Configuration], measured: Measured, settings: dict[str, Any]) -> None:
    ours = [configuration.name for configuration in chosen if configuration.peer == OURS]
    peers = [configuration.name for configuration in chosen if configuration.peer != OURS]
    plain_of = {configuration.name: configuration.plain for configuration in chosen}
    found = cells(measured.rows, plain_of, reference=REFERENCE)
    best = beside_the_best(measured.rows, ours=ours, peers=peers)
    print(table(found))
    for entry in best:
        print(f"{entry['workload']}: {entry['configuration']} {figure(entry['faster'])} of {entry['best_peer']}")
    for name, why in measured.failures.items():
        print(f"\n{name} is incomplete: {why}")
    result = settings | {
        "prompts_measured": len(measured.rows),
        "most_idle": max((row["idle"] for row in measured.rows), default=0.0),
        "most_foreign": max((row["foreign"] for row in measured.rows), default=0.0),
    }
    finish("peers", result | {"about": measured.about, "failures": measured.failures, "cells": found, "best": best})


if __name__ == "__main__":
    main()
