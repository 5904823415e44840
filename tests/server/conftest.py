"""A server on a tiny random model, started once; tests talk to it over HTTP."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import IO

import openai
import pytest

COMMAND = (sys.executable, "-m", "paceline")
NO_HEADERS: Mapping[str, str] = MappingProxyType({})


@dataclass
class Server:
    process: subprocess.Popen[bytes]
    url: str
    log: list[str]
    _reader: threading.Thread

    @property
    def worker_pids(self) -> list[int]:
        command = ["pgrep", "-P", str(self.process.pid), "-f", "paceline.server.process.worker"]
        return [int(pid) for pid in subprocess.check_output(command).split()]

    @property
    def worker_pid(self) -> int:
        (pid,) = self.worker_pids
        return pid

    def get(self, path: str, headers: Mapping[str, str] = NO_HEADERS) -> str:
        request = urllib.request.Request(self.url + path, headers=dict(headers))
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.read().decode()

    def metric(self, name: str, headers: Mapping[str, str] = NO_HEADERS) -> float:
        """The sum over its labels."""
        pattern = rf"paceline:{name}" + ("" if "{" in name else r"(\{|\s)")
        lines = [line for line in self.get("/metrics", headers).splitlines() if re.match(pattern, line)]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    def stop(self) -> int:
        self.process.terminate()
        code = self.process.wait(60)
        self._reader.join(60)
        return code


def start_server(model: Path, *flags: str, command: Sequence[str] = COMMAND, **environment: str) -> Server:
    command = [*command, "serve", "--model", str(model), "--port", "0", *flags]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, env={**os.environ, **environment})
    lines: list[str] = []
    assert process.stderr is not None
    for raw in process.stderr:
        lines.append(raw.decode())
        found = re.search(r" at (http://\S+?)\"?[,}\s]", lines[-1] + " ")
        if found:
            reader = threading.Thread(target=_read, args=(process.stderr, lines), daemon=True)
            reader.start()
            return Server(process, found.group(1), lines, reader)
    process.stderr.close()
    raise AssertionError(f"the server did not start: {''.join(lines)}")


def _read(stream: IO[bytes], lines: list[str]) -> None:
    with stream:
        lines.extend(line.decode() for line in stream)


@pytest.fixture(scope="session")
def server(tiny_model: Path) -> Iterator[Server]:
    running = start_server(tiny_model, "--served-model-name", "tiny")
    yield running
    assert running.stop() == 0


@pytest.fixture(scope="session")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="unused", max_retries=0)


def wait_until(condition, seconds: float = 60.0) -> None:  # type: ignore[no-untyped-def]
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.02)
