"""Clients that open connections and send nothing, little, or too much."""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import socket
import subprocess
import time
import urllib.error
from collections.abc import Iterator
from typing import Any

import pytest
import uvicorn

from paceline.server import connections
from paceline.server.connections import bounded
from tests.attack.conftest import Start

PART = b'POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 99\r\nContent-Type: application/json\r\n\r\n{"'
HALF = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nX-Slow: "


def opened(url: str, count: int, sent: bytes) -> Iterator[socket.socket]:
    host, port = url.removeprefix("http://").split(":")
    for _ in range(count):
        each = socket.create_connection((host, int(port)), timeout=30)
        with contextlib.suppress(OSError):
            each.sendall(sent)
        yield each


def test_half_open_connections_keep_nobody_out(start: Start) -> None:
    """250 of them, at a limit of 200 files: an honest client is answered, and the log stays short."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, limits[1]))
    try:
        server = start()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    lines = len(server.log)
    held = [*opened(server.url, 125, HALF), *opened(server.url, 125, PART)]
    try:
        began = time.monotonic()
        for _ in range(3):
            assert json.loads(server.get("/health"))["status"] == "ok"
        assert time.monotonic() - began < 2
        new = [line for line in server.log[lines:] if "GET /health" not in line]
        assert len(new) <= 2, new
    finally:
        for each in held:
            each.close()


def test_headers_have_an_end(start: Start) -> None:
    server = start()
    (slow,) = opened(server.url, 1, HALF)
    (large,) = opened(server.url, 1, HALF)
    with slow, large:
        answer = b""
        with contextlib.suppress(OSError):
            for _ in range(40):
                large.sendall(b"a" * 4096)
                time.sleep(0.005)
        with contextlib.suppress(OSError):
            answer = large.recv(1000)
        assert answer.startswith(b"HTTP/1.1 4") or not answer
        began = time.monotonic()
        slow.settimeout(20)
        while time.monotonic() - began < 20:  # a byte now and then does not help
            slow.settimeout(0.5)
            try:
                if not slow.recv(10):
                    break
            except TimeoutError:
                with contextlib.suppress(OSError):
                    slow.sendall(b"a")
            except OSError:
                break
        assert 5 < time.monotonic() - began < 14


def test_a_body_that_pauses_ends_its_connection_and_an_answer_that_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "BODY_S", 0.3)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        """Read the body, think for longer than a body may pause, and answer."""
        while (await receive()).get("more_body"):
            pass
        await asyncio.sleep(0.6)
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})

    async def ask(port: int, sent: bytes) -> tuple[bytes, float]:
        began = time.monotonic()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent)
        answer = await asyncio.wait_for(reader.read(100), 5)
        writer.close()
        return answer, time.monotonic() - began

    async def run() -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        config = uvicorn.Config(app, http=bounded(5), lifespan="off", log_config=None, timeout_graceful_shutdown=1)
        server = uvicorn.Server(config)
        serving = asyncio.ensure_future(server.serve(sockets=[listener]))
        port = listener.getsockname()[1]
        answer, seconds = await ask(port, PART)
        assert (answer, 0.2 < seconds < 3) == (b"", True)
        answer, _ = await ask(port, b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 204")
        server.should_exit = True
        await serving

    asyncio.run(run())


def test_a_stopped_engine_is_red_and_started_again(start: Start) -> None:
    server = start("--engine-timeout", "6")
    before = server.worker_pid
    subprocess.run(["kill", "-STOP", str(before)], check=True)
    seen = set()
    deadline = time.monotonic() + 40
    while time.monotonic() < deadline:
        try:
            seen.add(json.loads(server.get("/health"))["status"])
            if "down" in seen and server.worker_pids and server.worker_pids != [before]:
                break
        except urllib.error.HTTPError as error:
            seen.add(json.loads(error.read())["status"])
        time.sleep(0.2)
    assert "down" in seen
    assert json.loads(server.get("/health"))["status"] == "ok"
    assert server.worker_pid != before
