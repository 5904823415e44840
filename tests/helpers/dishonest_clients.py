"""Clients that send wrong requests, or leave at random points."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Protocol

from benchmarks.clients import request


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
