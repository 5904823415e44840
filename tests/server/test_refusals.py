"""Wrong command lines and requests of a naive or hostile user: each answer says what is wrong."""

from __future__ import annotations

import http.client
import json
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.app import run
from tests.server.api.test_api import MESSAGES, post
from tests.server.conftest import Server, start_server


def ask(server: Server, method: str, path: str, headers: dict[str, str] | None = None) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=30)
    try:
        connection.request(method, path, headers=headers or {})
        answer = connection.getresponse()
        assert method != "HEAD" or int(answer.headers["Content-Length"]) > 0
        return answer.status, answer.read()
    finally:
        connection.close()


@pytest.mark.parametrize(
    "origin", ["", " ", "example.org", "https://example.org/", "http://a b", "https://x/path", "HTTP://X"]
)
def test_what_is_no_origin_is_refused_before_the_model_is_loaded(
    origin: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["serve", "--port", "0", "--cors-origin", origin]) == 1
    assert f"cors_origin: {origin!r} is no origin" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--served-model-name", " "], "served_model_name: is empty"),
        (["--max-replicas", "2"], "needs --replicas"),
    ],
)
def test_a_flag_that_means_nothing_is_refused(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["serve", "--port", "0", *flags]) == 1
    assert message in capsys.readouterr().err


def test_limits_may_be_infinite_and_pages_of_other_origins_are_let_in_as_asked_for(
    server: Server, tiny_model: Path
) -> None:
    flags = ("--grace", "inf", "--request-limit", "inf", "--cors-origin", "http://localhost:3000")
    endless = start_server(tiny_model, *flags)
    assert post(endless, "/v1/completions", {"prompt": "Hi", "max_tokens": 3})[0] == 200
    asked = {"Origin": "http://localhost:3000", "Access-Control-Request-Method": "POST"}  # as a browser asks
    assert ask(endless, "OPTIONS", "/v1/completions", asked)[0] == 200
    assert ask(endless, "OPTIONS", "/v1/completions", asked | {"Origin": "http://localhost:3001"})[0] == 400
    assert ask(server, "OPTIONS", "/v1/completions", asked)[0] == 405  # where no origin is let in
    assert endless.stop() == 0


@pytest.mark.parametrize("path", ["/", "/health", "/version", "/metrics", "/v1/models", "/v1/models/tiny"])
def test_head_is_get_without_the_body(server: Server, path: str) -> None:
    assert ask(server, "HEAD", path) == (200, b"")


@pytest.mark.parametrize(
    ("method", "path", "status", "message"),
    [
        ("GET", "/v1/embeddings", 404, "there is no '/v1/embeddings' here; /openapi.json lists what there is"),
        ("GET", "/" + "x" * 5000, 404, "x…"),
        ("GET", "/v1/models/" + "x" * 5000, 404, "…"),
        ("GET", "/v1/chat/completions", 405, "'/v1/chat/completions' does not take GET; it takes POST"),
        ("DELETE", "/v1/models", 405, "does not take DELETE; it takes GET"),
    ],
)
def test_a_route_that_is_not_there(server: Server, method: str, path: str, status: int, message: str) -> None:
    found, body = ask(server, method, path)
    assert found == status
    error = json.loads(body)["error"]["message"]
    assert message in error
    assert len(error) < 200


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"logprobs": True, "top_logprobs": 100}, "top_logprobs", "less than or equal to 20"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs", "greater than or equal to 0"),
        ({"x" * 5000: 1}, "x" * 79 + "…", "is not supported here"),
        ({"user": "\ud800"}, "body", "body: holds half of a surrogate pair"),
    ],
)
def test_a_field_is_named_as_the_client_knows_it(
    server: Server, body: dict[str, Any], param: str, message: str
) -> None:
    status, answer = post(server, "/v1/chat/completions", {"messages": MESSAGES, **body})
    assert (status, answer["error"]["param"]) == (400, param)
    assert message in answer["error"]["message"]


def test_parts_of_a_message_are_tokenized_as_they_are_answered(server: Server) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "One."}, {"type": "text", "text": "Two."}]}]
    whole = [{"role": "user", "content": "One.\nTwo."}]
    counts = [post(server, "/tokenize", {"messages": messages})[1]["tokens"] for messages in (parts, whole)]
    assert counts[0] == counts[1]
    asked = {"messages": parts, "max_tokens": 1}
    assert post(server, "/v1/chat/completions", asked)[1]["usage"]["prompt_tokens"] == len(counts[0])
