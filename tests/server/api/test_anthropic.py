"""/v1/messages: Anthropic's form, over chat. The SDK itself is tried by benchmarks/sdks."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

import pytest

from paceline.errors import InvalidParameter
from paceline.server.api.anthropic import NAMES, MessagesRequest
from paceline.server.api.as_chat import renamed
from tests.server.api.test_api import post
from tests.server.conftest import Server

Json = dict[str, Any]
SCHEMA = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}
TOOL = {"name": "weather", "description": "The weather.", "input_schema": SCHEMA}
ASKED: Json = {"model": "tiny", "max_tokens": 400, "temperature": 0, "messages": [{"role": "user", "content": "Rain?"}]}
NAMED = {"type": "tool", "name": "weather"}


def test_messages_and_fields_become_those_of_chat() -> None:
    body = {
        **ASKED,
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            *ASKED["messages"],
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm.", "signature": ""},
                    {"type": "text", "text": "I look."},
                    {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Oslo"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "It rains."}]},
                    {"type": "text", "text": "So?"},
                ],
            },
        ],
        "stop_sequences": ["END"],
        "tools": [TOOL],
        "tool_choice": NAMED | {"disable_parallel_tool_use": True},
        "thinking": {"type": "disabled"},
        "metadata": {"user_id": "u"},
    }
    chat = MessagesRequest.model_validate(body).chat().model_dump(exclude_none=True)
    function = {"name": "weather", "arguments": '{"city": "Oslo"}'}
    assert chat["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Rain?"},
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "Hm.",
            "tool_calls": [{"id": "t1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "t1", "content": "It rains."},
        {"role": "user", "content": "So?"},
    ]
    assert chat["tools"][0]["function"]["parameters"] == SCHEMA
    assert (chat["stop"], chat["reasoning_effort"], chat["parallel_tool_calls"]) == (["END"], "none", False)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages.0.content.0"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role"),
        ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, "tools.0"),
        ({"tools": [TOOL | {"input_schema": []}], "tool_choice": {"type": "any"}}, "tools.0.input_schema"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"thinking": {"type": "long"}}, "thinking.type"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format"),
    ],
)
def test_what_is_not_there_is_refused_by_name(body: Json, field: str) -> None:
    with pytest.raises(InvalidParameter) as caught, renamed(NAMES):
        MessagesRequest.model_validate({**ASKED, **body}).chat().to_params()
    assert caught.value.field == field


def events(server: Server, body: Json, path: str = "/v1/messages") -> list[Json]:
    headers = {"Content-Type": "application/json", "x-api-key": "unused"}
    request = urllib.request.Request(server.url + path, json.dumps({**body, "stream": True}).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    found = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
    assert [line[7:] for line in lines if line.startswith("event: ")] == [event["type"] for event in found]
    return found


def test_text_and_usage_whole_and_streamed(server: Server) -> None:
    asked = {**ASKED, "max_tokens": 12}
    status, whole = post(server, "/v1/messages", asked)
    assert (status, whole["type"], whole["stop_reason"]) == (200, "message", "max_tokens")
    (block,) = whole["content"]
    found = events(server, asked)
    kinds = [event["type"] for event in found]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert "".join(event["delta"]["text"] for event in found if event["type"] == "content_block_delta") == block["text"]
    assert found[-2]["usage"]["output_tokens"] == whole["usage"]["output_tokens"] == 12
    counted = post(server, "/v1/messages/count_tokens", {key: ASKED[key] for key in ("model", "messages")})[1]
    usage = found[-2]["usage"]
    assert counted["input_tokens"] == usage["input_tokens"] + usage["cache_read_input_tokens"]


def test_a_forced_call_whole_and_streamed(server: Server) -> None:
    asked = {**ASKED, "tools": [TOOL], "tool_choice": NAMED}
    status, whole = post(server, "/v1/messages", asked)
    assert (status, whole["stop_reason"]) == (200, "tool_use")
    (block,) = whole["content"]
    assert (block["type"], block["name"]) == ("tool_use", "weather")
    assert block["input"]["city"] in ("Oslo", "Rome")
    _, begun, delta, *_ = events(server, asked)
    assert begun["content_block"]["input"] == {}
    assert json.loads(delta["delta"]["partial_json"]) == block["input"]


def test_errors_have_anthropics_form(server: Server) -> None:
    for body in ({**ASKED, "temperature": -1}, {**ASKED, "messages": 5}, {**ASKED, "tools": [{"name": 1}]}):
        status, answer = post(server, "/v1/messages", body)
        assert (status, answer["type"], answer["error"]["type"]) == (400, "error", "invalid_request_error")
