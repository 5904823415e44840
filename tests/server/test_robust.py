"""Malformed requests, clients that leave, an engine that is killed: honest clients notice nothing but a 503."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import signal
import threading
import urllib.error
from collections.abc import Awaitable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.clients import Answer, ask
from paceline import LLM, SamplingParams
from paceline.engine.events import Cancel, Request, Submit
from paceline.errors import InvalidParameter, QueueFull
from paceline.server.process.worker import GrammarCompiler, Worker
from tests.helpers.dishonest_clients import is_openai, leave, send_raw
from tests.helpers.malformed_requests import BY_HAND, malformed
from tests.server.conftest import Server, start_server, wait_until

PROMPTS = [f"Tell me about the number {number}." for number in range(24)]
STUCK_S = 60.0
NO_CHANNEL: Any = None  # commands are handed over by the test


def address(server: Server) -> tuple[str, int]:
    host, port = server.url.removeprefix("http://").split(":")
    return host, int(port)


def idle(server: Server) -> bool:
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    return not any(server.metric(name) for name in names)


class Honest:
    """Seeded requests and the tokens of plain decoding for each."""

    def __init__(self, model: Path) -> None:
        self.given: list[dict[str, Any]] = [
            {"max_tokens": 24, "seed": at, "temperature": 0.8, "ignore_eos": True} for at in range(len(PROMPTS))
        ]
        llm = LLM(str(model), method="none")
        answers = llm.generate(PROMPTS, [SamplingParams(**each) for each in self.given])
        self.wanted = [list(answer.outputs[0].token_ids) for answer in answers]
        llm.close()
        self._turns = itertools.cycle(range(len(PROMPTS)))

    async def one(self, server: Server) -> tuple[Answer, bool]:
        at = next(self._turns)
        body = {"prompt": PROMPTS[at], **self.given[at], "stream": True, "return_token_ids": True}
        answer = await within(ask(*address(server), body))
        return answer, answer.error is None and answer.tokens == self.wanted[at]


async def within(work: Awaitable[Any]) -> Any:
    return await asyncio.wait_for(work, STUCK_S)


@pytest.fixture(scope="module")
def honest(tiny_model: Path) -> Honest:
    return Honest(tiny_model)


def test_malformed_requests_are_refused_and_disturb_no_other(server: Server, honest: Honest) -> None:
    ready = list(itertools.islice(malformed(random.Random(3)), len(BY_HAND) + 300))
    left, bad, exact = iter(enumerate(ready)), [], []

    async def client() -> None:
        for at, raw in left:
            status, body = await within(send_raw(*address(server), raw))
            if not 200 <= status < 500 or not is_openai(status, body, raw.method) or b'"server_error"' in body:
                bad.append((status, raw, body[:200]))
            if at % 10 == 0:
                exact.append((await honest.one(server))[1])

    async def all_of_them() -> None:
        await asyncio.gather(*(client() for _ in range(8)))

    asyncio.run(all_of_them())
    assert not bad, bad[:3]
    assert len(exact) > 40
    assert all(exact)
    wait_until(lambda: idle(server))


def test_clients_that_leave_at_any_point_disturb_no_other(server: Server, honest: Honest) -> None:
    noise, left, exact = random.Random(0), iter(range(60)), []

    async def leaver() -> None:
        for at in left:
            await leave(*address(server), PROMPTS[at % len(PROMPTS)], noise, at)

    async def run() -> None:
        leavers = [asyncio.create_task(leaver()) for _ in range(8)]

        async def steady() -> None:
            while not all(task.done() for task in leavers):
                exact.append((await honest.one(server))[1])

        await asyncio.gather(*leavers, *(steady() for _ in range(4)))

    asyncio.run(run())
    assert exact
    assert all(exact)
    wait_until(lambda: idle(server))


def test_an_engine_killed_twice_comes_back_and_ends_when_its_server_is_killed(tiny_model: Path, honest: Honest) -> None:
    server = start_server(tiny_model)

    def up() -> bool:
        try:
            return bool(json.loads(server.get("/health"))["status"] == "ok")
        except urllib.error.HTTPError:
            return False

    async def under_load() -> list[Answer]:
        body = {"prompt": "Go on", "max_tokens": 1900, "ignore_eos": True}
        asked = [asyncio.create_task(within(ask(*address(server), {**body, "stream": True}))) for _ in range(4)]
        whole = [asyncio.create_task(within(ask(*address(server), body))) for _ in range(4)]
        await asyncio.to_thread(wait_until, lambda: server.metric("num_requests_running") == 8)
        os.kill(server.worker_pid, signal.SIGKILL)
        return list(await asyncio.gather(*asked, *whole))

    try:
        streamed, whole = (answers := asyncio.run(under_load()))[:4], answers[4:]
        assert {answer.status for answer in whole} == {503}
        for answer in (*streamed, *whole):
            assert answer.error is not None
            assert "signal 9" in answer.error
        assert not up()
        wait_until(lambda: _worker(server) is not None)
        os.kill(server.worker_pid, signal.SIGKILL)  # it is loading the model
        wait_until(up, 120)
        assert asyncio.run(honest.one(server))[1]
        worker = Path(f"/proc/{server.worker_pid}")
        server.process.kill()
        wait_until(lambda: not worker.exists() or "Z" in (worker / "stat").read_text())
    finally:
        assert server.stop() == -signal.SIGKILL


def _worker(server: Server) -> int | None:
    try:
        return server.worker_pid
    except Exception:  # pgrep found none
        return None


def test_bounded_schemas_validate_beside_other_requests_under_speculation(server: Server, honest: Honest) -> None:
    schema = {
        "type": "object",
        "properties": {
            "kind": {"enum": ["a small domestic cat", "a large wild dog"]},
            "marks": {"type": "array", "items": {"enum": [1, 2]}, "minItems": 16, "maxItems": 16},
        },
        "required": ["kind", "marks"],
        "additionalProperties": False,
    }
    wanted = {"json": schema, "disable_any_whitespace": True}  # little to choose from: drafts are accepted
    left, ends, accepted, exact = iter(range(50)), [], 0, []

    async def client() -> None:
        nonlocal accepted
        for at in left:
            if at % 10 >= 3:
                exact.append((await honest.one(server))[1])
                continue
            body = {"prompt": f"Pet {at}:", "max_tokens": 6 if at % 10 == 0 else 400, "temperature": 1.0}
            more = {"structured_outputs": wanted, "seed": at, "speculation": {"method": "ngram", "k": 4}}
            streamed = {"stream": True, "stream_options": {"include_usage": True}}
            answer = await within(ask(*address(server), {**body, **more, **streamed}))
            assert answer.usage is not None, answer.error
            accepted += answer.usage["speculation"]["accepted"]
            ends.append((at % 10 == 0, answer.finish_reason))
            if answer.finish_reason == "stop":
                found = json.loads(answer.text)
                assert set(found) == {"kind", "marks"}
                assert found["kind"] in ("a small domestic cat", "a large wild dog")
                assert len(found["marks"]) == 16
                assert set(found["marks"]) <= {1, 2}

    async def all_of_them() -> None:
        await asyncio.gather(*(client() for _ in range(16)))

    asyncio.run(all_of_them())
    assert set(ends) == {(True, "length"), (False, "stop")}  # a bounded schema ends within 400 tokens
    assert accepted > 0
    assert all(exact)


def test_a_grammar_that_takes_too_long_to_compile_is_refused_and_holds_up_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    go_on = threading.Event()

    def compile(wanted: dict[str, Any]) -> str:
        if wanted["regex"] == "wrong":
            raise InvalidParameter("structured_outputs", "cannot be compiled")
        assert wanted["regex"] == "quick" or go_on.wait(60)
        return "compiled"

    monkeypatch.setattr("paceline.server.process.worker.COMPILE_S", 0.5)
    compiler = GrammarCompiler(compile)
    given_up = compiler.compile({"regex": "slow"})
    assert isinstance(given_up, InvalidParameter)
    assert compiler.num_endless == 1
    assert compiler.compile({"regex": "quick"}) == "compiled"
    assert isinstance(compiler.compile({"regex": "wrong"}), InvalidParameter)
    assert isinstance(compiler.compile({"regex": "slower"}), InvalidParameter)
    assert isinstance(compiler.compile({"regex": "quick"}), QueueFull)  # two are compiled still
    go_on.set()
    wait_until(lambda: compiler.num_endless == 0)
    assert compiler.compile({"regex": "quick"}) == "compiled"


def test_a_grammar_that_takes_long_to_compile_holds_up_no_plain_request() -> None:
    compiling, go_on, compiled = threading.Event(), threading.Event(), []

    def compile(wanted: dict[str, Any]) -> None:
        compiling.set()
        assert go_on.wait(60)
        compiled.append(wanted["regex"])

    admission = SimpleNamespace(grammars=SimpleNamespace(compile=compile))
    built: Any = SimpleNamespace(engine=SimpleNamespace(admission=admission))
    worker = Worker(NO_CHANNEL, built)
    threading.Thread(target=worker.compile_grammars, daemon=True).start()

    def submit(name: str, wanted: dict[str, Any] | None) -> None:
        worker.take(Submit([Request(name, [1], SamplingParams(structured_outputs=wanted), streamed=True)]))

    def taken() -> list[Any]:
        commands = [worker.commands.get(timeout=60)]
        while not worker.commands.empty():
            commands.append(worker.commands.get())
        return [each.request_ids if isinstance(each, Cancel) else each.requests[0].request_id for each in commands]

    for name, wanted in {"slow": {"regex": "a"}, "gone": {"regex": "b"}, "plain": None}.items():
        submit(name, wanted)
    assert compiling.wait(60)
    assert taken() == ["plain"]
    worker.take(Cancel(["slow", "gone"]))
    assert taken() == [["slow", "gone"]]  # before they were submitted, so they never are
    submit("next", {"regex": "c"})
    go_on.set()
    assert taken() == ["next"]
    assert compiled == ["a", "c"]
