"""The routes of the server's operator, and its logs."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path

import httpx
import pytest

from paceline.server.app import create_app
from paceline.server.logs import set_up_logs
from paceline.server.process.messages import EngineSettings
from paceline.server.state import ServerSettings
from paceline.server.trust import ApiKey

RELOAD = "/v1/drafters/reload"
ADMIN = {"Authorization": "Bearer admin"}


def ask(address: str, host: str, headers: dict[str, str], drafter: str = "/no/such/folder") -> httpx.Response:
    """Ask a server that has keys, of which the engine is not started, to reload a drafter."""
    settings = ServerSettings(engine=EngineSettings("tiny"), api_keys=(ApiKey("client", "c"),), admin_key="admin")
    app = create_app(settings)

    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(app, client=(address, 1))
        async with httpx.AsyncClient(transport=transport, base_url=f"http://{host}") as client:
            return await client.post(RELOAD, json={"drafter": drafter}, headers=headers)

    return asyncio.run(send())


@pytest.mark.parametrize(
    ("address", "host", "headers", "status"),
    [
        ("127.0.0.1", "localhost:8000", {}, 404),  # trusted: the folder is looked for
        ("::1", "[::1]:8000", {}, 404),
        ("10.0.0.7", "localhost", {}, 403),
        ("127.0.0.1", "evil.example", {}, 403),  # a name that was made to point here
        ("127.0.0.1", "localhost", {"X-Forwarded-For": "1.2.3.4"}, 403),
        ("127.0.0.1", "localhost", {"Forwarded": "for=1.2.3.4"}, 403),
        ("127.0.0.1", "localhost", {"X-Any-Proxy-Name": "1.2.3.4"}, 403),
        ("127.0.0.1", "localhost", {"Origin": "http://localhost:3000"}, 403),
        ("10.0.0.7", "any.example", ADMIN, 404),
        ("10.0.0.7", "any.example", {"Authorization": "Bearer admin2"}, 401),
    ],
)
def test_only_the_operator_reloads(address: str, host: str, headers: dict[str, str], status: int) -> None:
    answer = ask(address, host, {"Authorization": "Bearer client", **headers})
    assert answer.status_code == status
    assert "/no/such" not in answer.text


def test_an_admin_key_is_no_key_of_a_client() -> None:
    settings = ServerSettings(engine=EngineSettings("tiny"), api_keys=(ApiKey("client", "c"),), admin_key="admin")

    async def send() -> int:
        transport = httpx.ASGITransport(create_app(settings), client=("10.0.0.7", 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://any") as client:
            return (await client.get("/v1/models", headers=ADMIN)).status_code

    assert asyncio.run(send()) == 401


def test_a_reload_says_nothing_of_the_disk_and_fetches_nothing(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    texts = {ask("10.0.0.7", "any", ADMIN, str(tmp_path / name)).json()["error"]["message"] for name in ("a", "b/c")}
    texts.add(ask("10.0.0.7", "any", ADMIN, "organisation/name").json()["error"]["message"])
    assert len(texts) == 1


@pytest.mark.parametrize("as_json", [False, True])
def test_a_log_line_stays_one_line_and_moves_no_cursor(
    as_json: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    logger = logging.getLogger("paceline.attack")
    for name in ("handlers", "propagate", "level"):
        monkeypatch.setattr(logger, name, getattr(logger, name))
    set_up_logs(as_json=as_json, text="%(message)s", levels={"paceline.attack": logging.INFO})
    path = "/a\r\nINFO all is well\x1b[2J\x9b\u202e\x7f"
    logger.info("GET %s", path, extra={"fields": {"path": path, "status": 404}})
    written = capsys.readouterr().err
    shown = "".join(map(str, json.loads(written).values())) if as_json else written.rstrip("\n")
    assert written.count("\n") == 1
    assert not [letter for letter in shown if not letter.isprintable()]
    assert "\\r\\nINFO" in shown
