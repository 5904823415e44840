"""/api/chat and /api/generate: Ollama's form, over chat. Its own packages are tried by benchmarks/sdks."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

import pytest

from paceline.errors import InvalidParameter
from paceline.server.api.as_chat import renamed
from paceline.server.api.ollama import NAMES, OllamaChatRequest, OllamaGenerateRequest
from tests.server.api.test_api import MESSAGES, post
from tests.server.conftest import Server

Json = dict[str, Any]
ASKED: Json = {"model": "tiny:latest", "messages": MESSAGES, "options": {"num_predict": 8, "temperature": 0}}
SCHEMA = {"type": "object", "properties": {"sure": {"type": "boolean"}}, "required": ["sure"]}


def chat_of(**fields: Any) -> Json:
    with renamed(NAMES):
        asked = OllamaChatRequest.model_validate({"model": "m", "messages": MESSAGES, **fields})
        return asked.chat().model_dump(exclude_none=True)


def test_options_format_and_think_become_fields_of_chat() -> None:
    options = {"num_predict": 5, "repeat_penalty": 1.1, "num_gpu": 99, "mirostat": 0, "seed": 7.0, "num_ctx": 2048}
    found = chat_of(options=options, format=SCHEMA, think=False, keep_alive=-1)
    assert (found["max_tokens"], found["repetition_penalty"], found["seed"]) == (5, 1.1, 7)
    assert found["response_format"]["json_schema"]["schema"] == SCHEMA
    assert found["reasoning_effort"] == "none"
    assert chat_of(format="json")["response_format"] == {"type": "json_object"}
    for unlimited in (-1, -2):  # as many as the context holds
        assert "max_tokens" not in chat_of(options={"num_predict": unlimited})
    history = [
        {"role": "assistant", "thinking": "Hm.", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]},
        {"role": "tool", "tool_name": "f", "content": "2"},
    ]
    called, result = chat_of(messages=history)["messages"]
    assert called["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": 1}'}
    assert (called["reasoning_content"], result["name"]) == ("Hm.", "f")
    one = OllamaGenerateRequest.model_validate({"model": "m", "prompt": "Hi", "system": "Be brief.", "images": []})
    assert [message.role for message in one.chat().messages] == ["system", "user"]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"options": {"mirostat": 2}}, "options.mirostat"),
        ({"options": {"wings": 2}}, "options.wings"),
        ({"options": {"temperature": -1}}, "options.temperature"),
        ({"format": "xml"}, "format"),
        ({"think": "endless"}, "think"),
        ({"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]}, "messages.0.images"),
    ],
)
def test_what_is_not_there_is_refused_by_name(body: Json, field: str) -> None:
    with pytest.raises(InvalidParameter) as caught, renamed(NAMES):
        OllamaChatRequest.model_validate({"model": "m", "messages": MESSAGES, **body}).chat().to_params()
    assert caught.value.field == field


def lines(server: Server, path: str, body: Json) -> tuple[list[Json], Any]:
    request = urllib.request.Request(server.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return [json.loads(line) for line in answer.read().splitlines()], answer.headers


def test_chat_and_generate_whole_and_streamed(server: Server) -> None:
    whole = post(server, "/api/chat", {**ASKED, "stream": False})[1]
    assert (whole["done"], whole["done_reason"], whole["eval_count"]) == (True, "length", 8)
    found, headers = lines(server, "/api/chat", {**ASKED, "keep_alive": "5m"})
    assert "keep_alive" in headers["Warning"]
    assert headers["Content-Type"] == "application/x-ndjson"
    assert "".join(each["message"]["content"] for each in found) == whole["message"]["content"]
    assert [each["done"] for each in found] == [*[False] * (len(found) - 1), True]
    cut = {**ASKED, "options": {"num_predict": 99999, "stop": ["a"]}, "stream": False}
    assert post(server, "/api/chat", cut)[0] == 200  # the context ends it, where chat completions refuse
    prompt = {"model": "tiny", "prompt": MESSAGES[0]["content"], "options": ASKED["options"], "keep_alive": -1}
    generated, headers = lines(server, "/api/generate", prompt)
    assert "".join(each["response"] for each in generated) == whole["message"]["content"]
    assert headers["Warning"] is None
    formed = post(server, "/api/chat", {**ASKED, "options": {"temperature": 0}, "format": SCHEMA, "stream": False})[1]
    assert set(json.loads(formed["message"]["content"])) == {"sure"}


def test_calls_models_and_errors(server: Server) -> None:
    tool = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
    assert post(server, "/api/chat", {**ASKED, "tools": [tool], "stream": False})[0] == 200
    assert json.loads(server.get("/api/tags"))["models"][0]["name"] == "tiny"
    assert "completion" in post(server, "/api/show", {"model": "tiny"})[1]["capabilities"]
    assert json.loads(server.get("/api/version"))["version"]
    assert post(server, "/api/chat", {**ASKED, "model": "gpt-9"}) == (
        404,
        {"error": "model 'gpt-9' is not served here; 'tiny' is"},
    )
    status, answer = post(server, "/api/chat", {**ASKED, "options": {"num_ctx": 1 << 20}})
    assert status == 400
    assert answer["error"].startswith("options.num_ctx: ")
