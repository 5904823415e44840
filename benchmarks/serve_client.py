"""What the server's benchmarks share: a server in a process of its own, and a client that costs little of two cores."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol


class Server:
    """`paceline serve` on a free port."""

    def __init__(self, model: str, *flags: str) -> None:
        command = [sys.executable, "-m", "paceline", "serve", "--model", model, "--port", "0", *flags]
        started = time.perf_counter()
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE)
        self.log: list[str] = []
        assert self.process.stderr is not None
        for raw in self.process.stderr:
            self.log.append(raw.decode())
            if found := re.search(r" at http://(\S+):(\d+)", self.log[-1]):
                self.host, self.port = found.group(1), int(found.group(2))
                break
        else:
            raise SystemExit(f"the server did not start: {''.join(self.log)}")
        self.start_s = time.perf_counter() - started
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for raw in self.process.stderr:
            if b" INFO " not in raw:
                self.log.append(raw.decode())

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://{self.host}:{self.port}{path}", timeout=30) as answer:
            return str(answer.read().decode())

    def metric(self, name: str) -> float:
        """The sum over its labels."""
        lines = [line for line in self.get("/metrics").splitlines() if re.match(rf"paceline:{name}[{{ ]", line)]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    @property
    def worker_pid(self) -> int:
        return int(
            subprocess.check_output(["pgrep", "-P", str(self.process.pid), "-f", "paceline.server.process.worker"])
        )

    def resident_mib(self) -> tuple[int, int]:
        """Memory of the HTTP process and of the engine's."""
        http, engine = (
            Path(f"/proc/{pid}/statm").read_text().split()[1] for pid in (self.process.pid, self.worker_pid)
        )
        page = os.sysconf("SC_PAGE_SIZE")
        return int(http) * page >> 20, int(engine) * page >> 20

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(60)


@dataclass
class Answer:
    """One request as its client saw it; times are of time.perf_counter."""

    sent: float
    status: int = 0
    tokens: list[int] = field(default_factory=list)
    arrivals: list[tuple[float, int]] = field(default_factory=list)  # time and tokens of each chunk that had any
    finish_reason: str | None = None
    usage: dict[str, Any] | None = None
    text: str = ""
    error: str | None = None
    ended: float = 0.0


async def request(
    host: str, port: int, path: str, body: bytes, method: str = "POST", kind: str = "application/json"
) -> tuple[int, AsyncIterator[bytes], asyncio.StreamWriter]:
    """Status and lines of the answer's body; the caller closes the writer."""
    reader, writer = await asyncio.open_connection(host, port, limit=1 << 24)
    head = f"{method} {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: {kind}\r\nConnection: close\r\n"
    writer.write(head.encode() + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
    head_of_answer = (await reader.readuntil(b"\r\n\r\n")).lower()
    return int(head_of_answer.split(b" ", 2)[1]), _body(reader, b"transfer-encoding: chunked" in head_of_answer), writer


async def _body(reader: asyncio.StreamReader, chunked: bool) -> AsyncIterator[bytes]:
    if not chunked:
        yield await reader.read()
        return
    while size := int(await reader.readline(), 16):
        data = await reader.readexactly(size + 2)
        yield data[:-2]


async def ask(
    host: str, port: int, body: dict[str, Any], path: str = "/v1/completions", answer: Answer | None = None
) -> Answer:
    """A streamed completion, its tokens counted as they arrive, in `answer` where one is given."""
    answer = answer or Answer(time.perf_counter())
    writer = None
    try:
        answer.status, chunks, writer = await request(host, port, path, json.dumps(body).encode())
        if answer.status != 200:
            answer.error = b"".join([chunk async for chunk in chunks]).decode(errors="replace")
            return answer
        async for data in chunks:
            now = time.perf_counter()
            for line in data.split(b"\n"):
                if line.startswith(b"data: {"):
                    _take(answer, json.loads(line[6:]), now)
        if answer.finish_reason is None and answer.error is None:
            answer.error = "the stream ended without a finish_reason"
    except (OSError, EOFError, ValueError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    finally:
        answer.ended = time.perf_counter()
        if writer is not None:
            writer.close()
    return answer


def _take(answer: Answer, chunk: dict[str, Any], now: float) -> None:
    if "error" in chunk:
        answer.error = json.dumps(chunk["error"])
        return
    answer.usage = chunk.get("usage") or answer.usage
    for choice in chunk.get("choices", ()):
        answer.text += choice.get("text") or ""
        tokens = choice.get("token_ids") or ()
        if tokens:
            answer.tokens += tokens
            answer.arrivals.append((now, len(tokens)))
        answer.finish_reason = choice.get("finish_reason") or answer.finish_reason


def percentiles(values: list[float]) -> dict[str, float | None]:
    ordered = sorted(values)
    if not ordered:
        return {"p50": None, "p99": None}
    return {
        name: ordered[min(int(share * len(ordered)), len(ordered) - 1)] for name, share in (("p50", 0.5), ("p99", 0.99))
    }


# -- clients that are not honest


class Sendable(Protocol):
    @property
    def path(self) -> str: ...
    @property
    def body(self) -> bytes: ...
    @property
    def method(self) -> str: ...
    @property
    def content_type(self) -> str: ...


async def send_raw(host: str, port: int, raw: Sendable) -> tuple[int, bytes]:
    status, chunks, writer = await request(host, port, raw.path, raw.body, raw.method, raw.content_type)
    try:
        return status, b"".join([chunk async for chunk in chunks])
    finally:
        writer.close()


def is_openai(status: int, body: bytes, method: str = "POST") -> bool:
    """Whether an error is in OpenAI's shape; True of all that is no error."""
    if status < 400 or method == "HEAD":
        return True
    try:
        error = json.loads(body)["error"]
        return bool(error["message"]) and "type" in error
    except (ValueError, LookupError, TypeError):
        return False


async def leave(host: str, port: int, prompt: str, noise: random.Random, at: int) -> None:
    """A client that asks for a long answer and leaves at a random point: of the request, at once, or of the answer."""
    body = {"prompt": prompt, "max_tokens": 400, "stream": bool(at % 3), "ignore_eos": True}
    raw = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}"
    whole = head.encode() + b"\r\n\r\n" + raw
    reader, writer = await asyncio.open_connection(host, port)
    try:
        if at % 10 == 0:
            writer.write(whole[: noise.randrange(len(whole))])
            await asyncio.sleep(noise.random() * 0.2)
            return
        writer.write(whole)
        if at % 7 == 0:
            return
        wanted = noise.randrange(4000)
        while wanted > 0:
            data = await asyncio.wait_for(reader.read(1000), noise.uniform(0.01, 3))
            if not data:
                return
            wanted -= len(data)
    except (asyncio.TimeoutError, OSError):
        pass
    finally:
        writer.transport.abort()
