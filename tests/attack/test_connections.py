"""Clients that open connections and send nothing, little, or too much."""

from __future__ import annotations

import contextlib
import json
import resource
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.server import connections
from paceline.server.connections import BoundedProtocol, bounded, default_connections
from tests.attack.conftest import Start

HALF = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nX-Slow: "


def opened(url: str, count: int, sent: bytes) -> Iterator[socket.socket]:
    host, port = url.removeprefix("http://").split(":")
    for _ in range(count):
        each = socket.create_connection((host, int(port)), timeout=30)
        with contextlib.suppress(OSError):
            each.sendall(sent)
        yield each


def test_half_open_connections_keep_nobody_out(start: Start, tiny_model: Path) -> None:
    """250 of them, at a limit of 200 files: an honest client is answered, and the log stays short."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, limits[1]))
    try:
        server = start()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    lines = len(server.log)
    held = list(opened(server.url, 250, HALF))
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


def test_a_body_that_does_not_come_ends_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    assert issubclass(bounded(3), BoundedProtocol)
    assert bounded(3).limit is not bounded(3).limit
    assert 1 <= default_connections() <= connections.MOST


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


if sys.platform == "win32":
    pytest.skip("the server's limits are POSIX ones", allow_module_level=True)
