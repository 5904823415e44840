"""Bodies that take long to read: the server answers others meanwhile, and short and long bodies have equal answers."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.server.bodies import body_process
from paceline.server.bodies.body_process import BodyReader
from paceline.server.bodies.body_worker import BodyAnswer
from tests.attack.conftest import complete
from tests.helpers.hostile_bodies import CHAT, hostile_bodies
from tests.server.conftest import Server, start_server

MOST_S = 0.1  # of /health, in 99 % of the time
LONG = {"user": "x" * 30_000}  # has no effect on an answer


@pytest.fixture(scope="module")
def capture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("captured") / "c.jsonl"


@pytest.fixture(scope="module")
def server(tiny_model: Path, capture: Path) -> Iterator[Server]:
    running = start_server(tiny_model, "--capture", str(capture))
    yield running
    running.process.kill()
    running.process.wait()


def post(server: Server, route: str, body: bytes, seconds: float = 60) -> tuple[int, Any]:
    host = server.url.removeprefix("http://")
    with contextlib.closing(http.client.HTTPConnection(host, timeout=seconds)) as connection:
        connection.request("POST", route, body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())


def test_health_is_answered_while_long_bodies_are_read_and_the_engine_is_busy(server: Server) -> None:
    waits, ended = list[float](), threading.Event()

    def probe() -> None:
        while not ended.is_set():
            began = time.perf_counter()
            server.get("/health")
            waits.append(time.perf_counter() - began)

    bodies = hostile_bodies(0.15).values()  # read by the event loop, several would take 0.2 to 0.6 s
    busy = threading.Thread(target=complete, args=(server, {"prompt": "a", "n": 8, "max_tokens": 40, "temperature": 1}))

    def attack(route: str, body: bytes) -> None:
        with contextlib.suppress(TimeoutError):  # 256 prompts take long to compute, too
            post(server, route, body, seconds=10)

    attackers = [threading.Thread(target=attack, args=body) for body in bodies]
    probing = threading.Thread(target=probe)
    for thread in (busy, probing, *attackers):
        thread.start()
    for thread in (busy, *attackers):
        thread.join()
    ended.set()
    probing.join()
    late = sum(max(wait - MOST_S, 0) for wait in waits)  # seconds in which a question would have waited too long
    assert late < 0.01 * sum(waits), f"{late:.2f} of {sum(waits):.1f} s, the longest {max(waits):.2f} s"


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/v1/completions", {"prompt": "once upon", "max_tokens": 6, "temperature": 0, "echo": True}),
        ("/v1/completions", {"prompt": [[5, 6, 7], [8, 9]], "max_tokens": 4, "temperature": 0.9, "seed": 3}),
        ("/v1/completions", {"prompt": [10**9], "max_tokens": 4}),
        ("/v1/completions", {"prompt": "a", "best_off": 2}),
        (CHAT, {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 6, "temperature": 0}),
        (CHAT, {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": "six"}),
        (CHAT, {"messages": [{"role": "nobody", "content": "Hi"}]}),
        (CHAT, {"model": "another", "messages": [{"role": "user", "content": "Hi"}]}),
        ("/v1/responses", {"input": "Hi", "instructions": "Be brief.", "max_output_tokens": 6, "temperature": 0}),
    ],
)
def test_a_long_body_has_the_answer_of_a_short_one(server: Server, route: str, body: dict[str, Any]) -> None:
    answers = [post(server, route, json.dumps(each).encode()) for each in (body, body | LONG)]
    for _, answer in answers:
        for name in ("id", "created", "created_at", "output", "usage"):  # ids, times
            answer.pop(name, None)
    assert answers[0] == answers[1]


def test_a_long_text_is_tokenized_and_put_together_again(server: Server) -> None:
    text = "one two, three. " * 2000
    status, answer = post(server, "/tokenize", json.dumps({"prompt": text, "add_special_tokens": False}).encode())
    assert status == 200
    assert post(server, "/detokenize", json.dumps({"tokens": answer["tokens"]}).encode()) == (200, {"prompt": text})
    assert post(server, "/tokenize", json.dumps({"prompt": text, "model": "another"}).encode())[0] == 404


def test_a_long_conversation_is_captured(server: Server, capture: Path) -> None:
    body = {"messages": [{"role": "user", "content": "Say it again."}], "max_tokens": 8, "temperature": 0, **LONG}
    _, answer = post(server, CHAT, json.dumps(body).encode())
    said = {"role": "assistant", "content": answer["choices"][0]["message"]["content"]}
    assert json.loads(capture.read_text().splitlines()[-1])["messages"] == [*body["messages"], said]


def test_a_process_that_ends_fails_its_body_alone(server: Server) -> None:
    body = hostile_bodies(0.3)["a text of one letter"]
    found: list[tuple[int, Any]] = []
    asking = threading.Thread(target=lambda: found.append(post(server, *body)))
    asking.start()
    time.sleep(0.2)
    workers = subprocess.check_output(["pgrep", "-P", str(server.process.pid), "-f", body_process.WORKER]).split()
    for pid in workers:
        os.kill(int(pid), signal.SIGKILL)
    asking.join()
    assert found[0][0] == 400
    assert post(server, *body)[0] == 200


def test_clients_take_turns_and_a_short_body_passes_long_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []

    class Process:
        async def ask(self, route: str, raw: bytes) -> BodyAnswer:
            await asyncio.sleep(0)
            read.append(route)
            return BodyAnswer(0, raw)

        async def stop(self) -> None:
            pass

    async def start(settings: Any) -> Process:
        return Process()

    async def ask_all() -> None:
        reader = BodyReader(lambda: None)  # type: ignore[arg-type, return-value]
        long = [reader.read("a long", b"x" * 1000, "a") for _ in range(4)]
        await asyncio.gather(*long, reader.read("a short", b"x", "a"), reader.read("b", b"x" * 1000, "b"))
        await reader.close()

    monkeypatch.setattr(body_process.BodyProcess, "start", start)
    asyncio.run(ask_all())
    assert read.index("b") <= 1
    assert read.index("a short") <= 2
    assert len(read) == 6
