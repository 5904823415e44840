"""A GGUF file of a real model: plain decoding, prompts, long contexts, loading and memory, beside llama.cpp and another
source tree of this package.

Every engine is a process of its own that stays loaded; they answer one after the other, in an order drawn anew for each
round, while the others sleep. The read bandwidth is the most that a sum over a large array reaches between the rounds.
A token reads each weight once, but for an embedding beside the head: their bytes by the rate are the bandwidth used.

    python -m benchmarks.real_model --target FILE.gguf --environments DIR --against TREE [--rounds 5] [--long 6000]
    python -m benchmarks.real_model --target FILE.gguf --against TREE --loading     # seconds and memory of LLM(...)

`--environments`: made by peers/environments.sh DIR llama_cpp; without it only paceline answers.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import ROOT, finish, settle
from benchmarks.peers.workers import HERE, OURS, Worker, first_cores, interpreter, surroundings
from paceline.files.gguf import GGUFFile

ARRAY_BYTES = 1 << 30  # array that measures the bandwidth; no cache holds it
DECODED, SHORT, PROMPT = (
    64,
    16,
    500,
)  # tokens: decoded, of the prompt before them, of a timed prompt
LOAD = """
import json, os, resource, sys, time
import torch
from pathlib import Path
from paceline import LLM
try:
    from paceline.text.tokenizer import Tokenizer
except ModuleNotFoundError:  # trees before the modules moved
    from paceline.tokenizer import Tokenizer
def resident():
    return 1024 * int(next(line for line in open("/proc/self/status") if line.startswith("VmRSS")).split()[1])
path, threads = sys.argv[1], int(sys.argv[2])
tokenizer = Tokenizer.from_path(Path(path))
before, peak_before = resident(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
started = time.perf_counter()
llm = LLM(path, device="cpu", threads=threads, method="none", activations="int8")
seconds = time.perf_counter() - started
peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps({"seconds": seconds, "resident": resident() - before, "peak": peak - before}))
"""


def bandwidth() -> float:
    """Return the bytes a second that all cores read."""
    array = torch.ones(ARRAY_BYTES // 8, dtype=torch.int64)
    times = []
    for _ in range(5):
        started = time.perf_counter()
        array.sum()
        times.append(time.perf_counter() - started)
    return ARRAY_BYTES / min(times)


@contextlib.contextmanager
def engines(args: argparse.Namespace, work: Path) -> Iterator[dict[str, Worker]]:
    """Start the workers: this tree and the other in both activations, and llama.cpp."""
    trees = {"": ROOT} | ({"old ": args.against} if args.against else {})
    jobs: dict[str, tuple[str, Path, dict[str, Any]]] = {
        f"{label}{activations}": (OURS, tree, {"model": str(args.target), "method": "none", "activations": activations})
        for label, tree in trees.items()
        for activations in args.activations
    }
    if args.environments:
        jobs["llama.cpp"] = "llama_cpp", ROOT, {"gguf": str(args.target), "method": "plain", "precision": "file"}
    workers: dict[str, Worker] = {}
    try:
        for name, (peer, tree, job) in jobs.items():
            job |= {"k": None, "threads": args.threads, "max_context": max(args.long, PROMPT) + 2 * DECODED}
            environment = surroundings(peer, args.threads, work / name.replace(" ", "-"), args.environments)
            if peer == OURS:
                environment["PYTHONPATH"] = str(tree.resolve() / "src")
            command = [interpreter(peer, args.environments), str(HERE / f"worker_{peer}.py"), json.dumps(job)]
            workers[name] = Worker(name, command, environment, work / f"{name}.log", first_cores(args.threads))
            print(f"{name}: {workers[name].ready()}", file=sys.stderr)
        yield workers
    finally:
        for worker in workers.values():
            worker.stop()


def request(length: int, tokens: int, noise: random.Random) -> dict[str, Any]:
    prompt = [noise.randrange(1_000, 20_000) for _ in range(length)]
    return {"prompt": prompt, "max_tokens": tokens, "temperature": 0.0, "seed": 0, "eos": []}


def measure(args: argparse.Namespace, work: Path) -> dict[str, Any]:
    noise = random.Random(0)
    rates: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))  # by cell and engine
    reads = [bandwidth()]
    with engines(args, work) as workers:
        for turn in range(args.rounds + 1):
            lengths = [SHORT, PROMPT] + ([args.long] if 0 < turn <= args.long_rounds else [])
            for length in lengths:
                asked = request(length, DECODED if length != PROMPT else 1, noise)
                answers = set()
                for name in noise.sample(sorted(workers), len(workers)):
                    settle(list(workers.values()), args.threads)
                    reply = workers[name].ask(asked, timeout_s=600)
                    answers.add((name.removeprefix("old "), tuple(reply.tokens)))
                    if not turn:
                        continue
                    rates[f"first token of {length}, seconds"][name].append(reply.first_s)
                    if len(reply.tokens) > 1:
                        rate = (len(reply.tokens) - 1) / (reply.seconds - reply.first_s)
                        rates[f"tokens/s after {length}"][name].append(rate)
                if len(answers) > len({name for name, _ in answers}):
                    print(f"answers to {length} tokens DIFFER between the trees", file=sys.stderr)
            reads.append(bandwidth())
    return {"rates": rates, "read_bytes_per_s": max(reads)}


def bytes_per_token(path: Path) -> int:
    tensors = GGUFFile(path).tensors
    rows = tensors["token_embd.weight"].nbytes if "output.weight" in tensors else 0
    return sum(tensor.nbytes for tensor in tensors.values()) - rows


def report(args: argparse.Namespace, measured: dict[str, Any]) -> dict[str, Any]:
    size, most = bytes_per_token(args.target), measured["read_bytes_per_s"]
    print(f"weights of a token {size / 1e9:.2f} GB, reads {most / 1e9:.1f} GB/s, which is {most / size:.1f} tokens/s")
    cells: dict[str, dict[str, Any]] = {}
    for cell, by_engine in measured["rates"].items():
        middle = {name: statistics.median(values) for name, values in by_engine.items()}
        cells[cell] = middle | {"rounds": len(next(iter(by_engine.values())))}
        print(f"{cell:28} " + "  ".join(f"{name} {value:.3g}" for name, value in sorted(middle.items())))
        if cell == f"tokens/s after {SHORT}":
            cells["share of the bandwidth"] = {name: value * size / most for name, value in middle.items()}
    shares = cells.get("share of the bandwidth", {})
    print(
        f"{'share of the bandwidth':28} " + "  ".join(f"{name} {share:.2f}" for name, share in sorted(shares.items()))
    )
    return {"bytes_per_token": size, "read_bytes_per_s": most, "cells": cells}


def loading(args: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Load in fresh processes by turns, with the file in the page cache; memory beyond torch and the tokenizer."""
    args.target.read_bytes()
    trees = {"now": ROOT} | ({"old": args.against} if args.against else {})
    found: dict[str, list[dict[str, float]]] = defaultdict(list)
    for _ in range(args.rounds):
        for name, tree in trees.items():
            env = {**os.environ, "PYTHONPATH": str(tree.resolve() / "src"), "PACELINE_HOME": str(work / name)}
            command = [sys.executable, "-c", LOAD, str(args.target), str(args.threads)]
            found[name].append(json.loads(subprocess.run(command, env=env, check=True, capture_output=True).stdout))
    size, result = args.target.stat().st_size, {}
    for name, runs in found.items():
        middle = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        result[name] = middle
        print(
            f"{name}: LLM() {middle['seconds']:.2f} s, resident {middle['resident'] / size:.2f} of the file, "
            f"peak {middle['peak'] / size:.2f}"
        )
    return {"file_bytes": size, "loading": result, "rounds": args.rounds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True, metavar="FILE", help="a GGUF file")
    parser.add_argument("--environments", type=Path, metavar="DIR", help="the peers' virtual environments")
    parser.add_argument("--against", type=Path, metavar="TREE", help="another source tree of this package")
    parser.add_argument("--activations", nargs="+", default=["float32", "int8"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--long", type=int, default=6000, help="tokens of the long prompt")
    parser.add_argument("--long-rounds", type=int, default=1, help="rounds that also ask the long prompt")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--loading", action="store_true")
    args = parser.parse_args()
    if not args.target.is_file():
        raise SystemExit(f"{args.target} does not exist")
    with tempfile.TemporaryDirectory() as work:
        if args.loading:
            finish("real_model_loading", loading(args, Path(work)))
        else:
            finish("real_model", report(args, measure(args, Path(work))))


if __name__ == "__main__":
    main()
