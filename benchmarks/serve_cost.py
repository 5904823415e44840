"""What `auto` costs a server with many clients: its rate over plain decoding's, by processor time and by the clock.

    python benchmarks/serve_cost.py [--levels 16] [--blocks 4] [--minutes 3.5] [--threads 1]

Every client has two answers of fixed length, as many tokens as any other, so that all have work until nearly the end;
what is measured is the whole of it, from the first request to the last token. A block is `auto`, plain, plain, `auto`,
or the other way round, so that a drift of the machine falls on both alike; all four have prompts and answers of the
same lengths, and no prompt comes twice. With one thread, which never waits for another, the processor time of the
engine's process is its work whatever else the machine does, and a second core is left to the clients.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness import finish, ratio
from serve_client import Server
from serve_load import Job, Prompt, Send, make_jobs, over_http, show_ratio

from paceline.bench.prompts import shipped
from paceline.config import AUTO, NONE
from paceline.models.load.hub import resolve
from paceline.text.tokenizer import Tokenizer

TICKS = os.sysconf("SC_CLK_TCK")
DRAFTS = "drafts", "draft_tokens", "accepted_tokens"
ORDERS = (AUTO, NONE, NONE, AUTO), (NONE, AUTO, AUTO, NONE)


def processor_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def work_of(prompts: list[Prompt], clients: int, max_tokens: int, seed: int, group: int) -> list[list[Job]]:
    """By client. Groups of one seed are the same work with other prompts."""
    jobs = make_jobs(prompts, 2 * clients, max_tokens, seed, group=group)
    return [
        [first, replace(second, max_tokens=2 * max_tokens - first.max_tokens)]
        for first, second in zip(jobs[:clients], jobs[clients:], strict=True)
    ]


async def answered(work: list[list[Job]], send: Send) -> None:
    async def client(jobs: list[Job]) -> None:
        for job in jobs:
            answer = await send(job)
            assert answer.error is None, answer.error
            assert len(answer.tokens) == job.max_tokens

    await asyncio.gather(*map(client, work))


def measure(server: Server, prompts: list[Prompt], clients: int, args: argparse.Namespace) -> dict[str, Any]:
    pid, until, longest = server.worker_pid, time.perf_counter() + 60 * args.minutes / len(args.levels), 0.0
    spent: dict[str, dict[str, list[float]]] = {how: {AUTO: [], NONE: []} for how in ("processor", "clock")}

    def run(mode: str, seed: int, group: int, most: int = clients) -> tuple[float, float]:
        work = work_of(prompts, clients, args.max_tokens, seed, group)[:most]
        began, before = time.perf_counter(), processor_s(pid)
        asyncio.run(answered(work, over_http(server, mode)))
        return processor_s(pid) - before, time.perf_counter() - began

    for mode in (AUTO, NONE):  # warm-up
        run(mode, 99, mode == AUTO, 6)
    drafts = {name: server.metric(f"spec_decode_num_{name}_total") for name in DRAFTS}
    for block in range(args.blocks):
        began = time.perf_counter()
        if block and began + longest > until:
            break
        found = [(mode, *run(mode, block, group)) for group, mode in enumerate(ORDERS[block % 2])]
        for mode in (AUTO, NONE):
            for how, at in (("processor", 1), ("clock", 2)):
                spent[how][mode].append(sum(one[at] for one in found if one[0] == mode))
        longest = max(longest, time.perf_counter() - began)
    tokens = 2 * 2 * clients * args.max_tokens  # of a mode in a block
    print(f"\n{clients} clients, {len(spent['clock'][AUTO])} blocks of 4 x {tokens // 2} tokens")
    drafts = {name: server.metric(f"spec_decode_num_{name}_total") - before for name, before in drafts.items()}
    result: dict[str, Any] = {"blocks": len(spent["clock"][AUTO]), **drafts}
    print(", ".join(f"{name.replace('_', ' ')}: {count:.0f}" for name, count in drafts.items()))
    for how, times in spent.items():
        result[f"{how}: ms a token"] = {mode: 1e3 * statistics.median(each) / tokens for mode, each in times.items()}
        result[f"{how}: auto / none"] = ratio(times[NONE], times[AUTO])
        each = " ".join(f"{plain / auto:.3f}" for plain, auto in zip(times[NONE], times[AUTO], strict=True))
        show_ratio(f"rate of {AUTO} / {NONE} by {how} ({each})", result[f"{how}: auto / none"])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--levels", type=int, nargs="+", default=[16], help="clients")
    parser.add_argument("--blocks", type=int, default=4, help="at most; --minutes may allow fewer")
    parser.add_argument("--minutes", type=float, default=3.5, help="of all levels, after the warm-up")
    parser.add_argument("--max-tokens", type=int, default=32, help="of an answer, on average")
    parser.add_argument("--threads", type=int, default=1, help="of the engine")
    args = parser.parse_args()
    tokenizer = Tokenizer.from_path(resolve(args.model))
    encoded = [tuple(tokenizer.apply_chat_template(prompt.messages([]))) for prompt in shipped()]
    prompts = [prompt for prompt in encoded if len(prompt) < 1900]
    flags = (
        "--method",
        AUTO,
        "--max-model-len",
        "2048",
        "--kv-cache-bytes",
        str(2 << 30),
        "--threads",
        str(args.threads),
    )
    server = Server(args.model, *flags)
    try:
        levels = {str(clients): measure(server, prompts, clients, args) for clients in args.levels}
    finally:
        server.stop()
    settings = {name: getattr(args, name) for name in ("model", "max_tokens", "threads")}
    finish("serve_cost", {"levels": levels, **settings})


if __name__ == "__main__":
    main()
