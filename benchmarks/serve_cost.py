"""What `auto` costs a server with many clients, by processor time: its engine's process a token, drafting or not.

    python benchmarks/serve_cost.py [--levels 16 64] [--rounds 6]

One thread, which never waits for another, so that the process's time is its work whatever else the machine runs: rates
of serve.py differ by several per cent between equal runs. Clients as there. The two modes take turns with prompts and
answers of the same lengths, and with each other's prompts in every second round. Tokens and time count until the first
client has no work left.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import finish, ratio
from serve_client import Server
from serve_load import Job, Prompt, Run, make_jobs, over_http, served, show_ratio

from paceline.bench.prompts import shipped
from paceline.config import AUTO, NONE
from paceline.models.hub import resolve
from paceline.tokenizer import Tokenizer

TICKS = os.sysconf("SC_CLK_TCK")


def processor_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


class CostRun(Run):
    """Notes the engine's processor time when a client first finds no job left."""

    def __init__(self, pid: int) -> None:
        super().__init__()
        self._pid, self._begun, self.spent = pid, processor_s(pid), 0.0

    def take(self, jobs: Iterator[Job]) -> Job | None:
        job = super().take(jobs)
        if job is None and not self.spent:
            self.spent = processor_s(self._pid) - self._begun
        return job

    @property
    def ms_a_token(self) -> float:
        return 1e3 * self.spent / self.tokens


def measure(server: Server, prompts: list[Prompt], clients: int, args: argparse.Namespace) -> dict[str, Any]:
    noise, cost = random.Random(0), {AUTO: list[float](), NONE: list[float]()}
    pid = server.worker_pid
    for turn in range(args.rounds):
        for mode in noise.sample((AUTO, NONE), 2):
            group = ((mode == AUTO) + turn) % 2
            jobs = make_jobs(prompts, clients * 3 // 2 + 6, args.max_tokens, 100 * clients + turn, group=group)
            run = CostRun(pid)
            asyncio.run(served(jobs, clients, over_http(server, mode), run))
            assert not any(answer.error for _, answer in run.answers)
            cost[mode].append(run.ms_a_token)
    found: dict[str, Any] = {f"ms a token, {mode}": statistics.median(each) for mode, each in cost.items()}
    print(f"\n{clients} clients, ms a token: {cost}")
    found["auto / none"] = ratio(cost[NONE], cost[AUTO])
    show_ratio(f"{clients} clients, rate of {AUTO} / {NONE}", found["auto / none"])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--levels", type=int, nargs="+", default=[16, 64], help="clients")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--max-tokens", type=int, default=48)
    args = parser.parse_args()
    tokenizer = Tokenizer.from_path(resolve(args.model))
    encoded = [tuple(tokenizer.apply_chat_template(prompt.messages([]))) for prompt in shipped()]
    prompts = [prompt for prompt in encoded if len(prompt) < 1900]
    flags = ("--method", AUTO, "--max-model-len", "2048", "--kv-cache-bytes", str(2 << 30), "--threads", "1")
    server = Server(args.model, *flags)
    try:
        for mode in (AUTO, NONE):  # warm-up
            asyncio.run(served(make_jobs(prompts, 12, args.max_tokens, 99), 4, over_http(server, mode)))
        levels = {str(clients): measure(server, prompts, clients, args) for clients in args.levels}
    finally:
        server.stop()
    settings = {name: getattr(args, name) for name in ("model", "rounds", "max_tokens")}
    finish("serve_cost", {"levels": levels, **settings})


if __name__ == "__main__":
    main()
