"""A hostile client of a server on a tiny random model."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.server.conftest import Server, start_server

Start = Callable[..., Server]


@pytest.fixture
def start(tiny_model: Path) -> Iterator[Start]:
    """A function that starts a server with flags; all are killed at the end."""
    running: list[Server] = []

    def start_one(*flags: str, **environment: str) -> Server:
        running.append(start_server(tiny_model, *flags, **environment))
        return running[-1]

    yield start_one
    for server in running:
        server.process.kill()
        server.process.wait()


def complete(server: Server, body: Mapping[str, Any], key: str | None = None) -> dict[str, Any]:
    """Return the answer; of a stream its tokens, as pairs of text and kind."""
    headers = {"Content-Type": "application/json"} | ({} if key is None else {"Authorization": f"Bearer {key}"})
    data = json.dumps({"temperature": 0, **body}).encode()
    request = urllib.request.Request(server.url + "/v1/completions", data, headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        whole = answer.read().decode()
    if not body.get("stream"):
        return dict(json.loads(whole))
    events = [json.loads(line[6:]) for line in whole.splitlines() if line.startswith("data: {")]
    choices = [choice for event in events for choice in event["choices"]]
    return {"tokens": [pair for each in choices for pair in zip(each["token_texts"], each["token_kinds"], strict=True)]}
