"""Two replicas by Ray Serve on this machine; runs where ray is installed (`pip install 'paceline[ray]'`)."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.clients import Answer, ask
from paceline import LLM, SamplingParams

pytest.importorskip("ray", reason="ray is not installed")

PROMPTS = [f"{number}: tell me about the number {number}." for number in range(16)]
GIVEN: dict[str, Any] = {"max_tokens": 24, "temperature": 0.8, "ignore_eos": True}


@pytest.fixture(scope="module")
def address(tiny_model: Path) -> Iterator[tuple[str, int]]:
    command = [sys.executable, "-m", "paceline", "serve", "--model", str(tiny_model), "--port", "0", "--replicas", "2"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    assert process.stderr is not None
    found = next((match for line in process.stderr if (match := re.search(r" at http://(\S+):(\d+)", line))), None)
    assert found is not None, "it did not start"
    yield found.group(1), int(found.group(2))
    process.terminate()
    process.stderr.close()
    assert process.wait(60) == 0


def replicas_of(address: tuple[str, int]) -> list[int]:
    """Processes of replicas: the parents of the engines' processes that Ray started."""
    listed = subprocess.check_output(["ps", "-eo", "pid,ppid,args"], text=True).splitlines()
    rows = [line.split(None, 2) for line in listed[1:]]
    named = {int(pid): args for pid, _, args in rows if "Replica" in args and "ray::" in args}
    engines = [int(parent) for _, parent, args in rows if "paceline.server.process.worker" in args]
    return [parent for parent in engines if parent in named]


def ask_all(address: tuple[str, int], more: dict[str, Any]) -> list[Answer]:
    async def run() -> list[Answer]:
        bodies = [{"prompt": prompt, "seed": at, **GIVEN, **more} for at, prompt in enumerate(PROMPTS)]
        return list(await asyncio.gather(*(asyncio.wait_for(ask(*address, body), 60) for body in bodies)))

    return asyncio.run(run())


def test_two_replicas_answer_exactly_and_a_killed_one_costs_its_own_requests_only(address, tiny_model) -> None:
    llm = LLM(str(tiny_model), method="none")
    outputs = llm.generate(PROMPTS, [SamplingParams(seed=at, **GIVEN) for at in range(len(PROMPTS))])
    wanted = [list(output.outputs[0].token_ids) for output in outputs]
    llm.close()
    streamed = {"stream": True, "return_token_ids": True}
    assert [answer.tokens for answer in ask_all(address, streamed)] == wanted

    before = replicas_of(address)
    assert len(before) == 2

    async def with_a_kill() -> list[Answer]:
        body = {"max_tokens": 1500, "temperature": 0, "ignore_eos": True, **streamed}
        under_way = [Answer(time.perf_counter()) for _ in PROMPTS]
        asked = [
            asyncio.create_task(asyncio.wait_for(ask(*address, {"prompt": prompt, **body}, answer=answer), 120))
            for prompt, answer in zip(PROMPTS, under_way, strict=True)
        ]
        while not all(answer.tokens or answer.error for answer in under_way):
            await asyncio.sleep(0.01)
        os.kill(before[0], signal.SIGKILL)
        return list(await asyncio.gather(*asked))

    answers = asyncio.run(with_a_kill())
    failed = [answer for answer in answers if answer.error]
    whole = [answer for answer in answers if not answer.error]
    assert failed, "prefixes belong to both replicas"
    assert whole, "the other replica's requests go on"
    assert all("replica" in (answer.error or "") for answer in failed)
    assert all(len(answer.tokens) == 1500 for answer in whole)

    deadline = time.monotonic() + 90
    while len(replicas_of(address)) < 2 or set(replicas_of(address)) == set(before):
        assert time.monotonic() < deadline, "no other replica was started"
        time.sleep(0.5)
    assert [answer.tokens for answer in ask_all(address, streamed)] == wanted


def test_the_same_api_and_errors(address: tuple[str, int]) -> None:
    host, port = address
    with urllib.request.urlopen(f"http://{host}:{port}/v1/models", timeout=30) as answer:
        assert answer.status == 200
    refused = asyncio.run(ask(host, port, {"prompt": "a", "frobnicate": 1}))
    assert refused.status == 400
    assert "frobnicate" in (refused.error or "")
    reload = asyncio.run(ask(host, port, {"drafter": "x"}, "/v1/drafters/reload"))
    assert reload.status == 400
    assert "one by one" in (reload.error or "")
