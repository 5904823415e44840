"""Captured traffic, and a drafter that is exchanged while answers are under way."""

from __future__ import annotations

import asyncio
import json
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch

from paceline.drafters.heads.checkpoint import MedusaHead, save_heads
from paceline.server.app import create_app
from paceline.server.capture import Capture
from paceline.server.process.messages import EngineSettings
from paceline.server.state import ServerSettings
from paceline.training.data.examples import read_examples
from tests.helpers.errors import refused
from tests.helpers.tiny_model import CONFIG
from tests.server.api.test_api import LONG, MESSAGES, post
from tests.server.conftest import start_server, wait_until

TOOL = {"type": "function", "function": {"name": "now", "parameters": {}}}


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, hidden = tmp_path_factory.mktemp("heads"), CONFIG["hidden_size"]
    save_heads(folder, [MedusaHead(((torch.zeros(hidden, hidden), None),), None) for _ in range(2)])
    return folder


def test_a_drafter_is_exchanged_under_load_and_traffic_is_captured(tiny_model, heads, tmp_path) -> None:
    kept = tmp_path / "traffic.jsonl"
    server = start_server(tiny_model, "--served-model-name", "tiny", "--capture", str(kept))
    try:
        assert any("appended to" in line and str(kept) in line for line in server.log)
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="x", max_retries=0)
        asked: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "seed": 1, "temperature": 1.0}
        long = {**asked, "max_tokens": 400, "extra_body": LONG}

        def stream() -> str:
            return "".join(
                chunk.choices[0].delta.content or "" for chunk in client.chat.completions.create(**long, stream=True)
            )

        before, pid = client.chat.completions.create(**long), server.worker_pid
        status, problem = post(server, "/v1/drafters/reload", {"drafter": str(tmp_path)})
        assert (status, server.worker_pid) == (400, pid), problem
        assert post(server, "/v1/drafters/reload", {"drafter": "/no/such/folder"})[0] == 404

        with ThreadPoolExecutor(4) as pool:
            reloading = pool.submit(post, server, "/v1/drafters/reload", {"drafter": str(heads)})
            texts, streams = [], [pool.submit(stream)]
            while streams:
                texts.append(streams.pop(0).result())
                if not reloading.done():
                    streams.append(pool.submit(stream))
            status, found = reloading.result()
        assert (status, "medusa" in found["methods"]) == (200, True)
        assert set(texts) == {before.choices[0].message.content}
        wait_until(lambda: pid not in server.worker_pids)
        after = client.chat.completions.create(**asked, max_tokens=20, extra_body={"speculation": {"method": "medusa"}})
        assert before.choices[0].message.content.startswith(after.choices[0].message.content)
        assert server.metric("engine_starts_total") == 2

        client.completions.create(model="tiny", prompt="Once", max_tokens=5)
        client.chat.completions.create(**asked, max_tokens=5, tools=[TOOL])
        examples = read_examples(kept)
        assert len(examples) == len(texts) + 3  # without the one that offered tools
        assert stat.S_IMODE(kept.stat().st_mode) == 0o600
        first = [*MESSAGES, {"role": "assistant", "content": before.choices[0].message.content}]
        assert list(examples[0].messages) == first
        assert examples[-1].text.startswith("Once")
        assert json.loads(server.get("/v1/models"))["data"][0]["captured"] is True
        client.close()
    finally:
        assert server.stop() == 0


def test_a_reload_from_another_machine_is_refused() -> None:
    app = create_app(ServerSettings(engine=EngineSettings("tiny")))

    async def ask(address: str) -> httpx.Response:
        transport = httpx.ASGITransport(app, client=(address, 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            return await client.post("/v1/drafters/reload", json={"drafter": "/x"})

    answer = asyncio.run(ask("10.0.0.7"))
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "Forbidden")


def test_a_file_that_cannot_be_written_is_said_at_once(tmp_path: Path) -> None:
    with refused("capture"):
        Capture(tmp_path / "missing" / "file")
