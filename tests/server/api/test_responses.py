"""/v1/responses: items in, items out, and events in OpenAI's order."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from paceline.errors import InvalidParameter
from paceline.server.api.as_chat import renamed
from paceline.server.api.responses import NAMES, ResponseRequest
from tests.server.api.test_api import post
from tests.server.api.test_forced_calls import Pick
from tests.server.conftest import Server

Json = dict[str, Any]
WEATHER: Json = {
    "type": "function",
    "name": "weather",
    "description": "The weather of a city.",
    "strict": True,
    "parameters": {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]},
}
CALLED: Json = {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": '{"city": "Oslo"}'}
NAMED: Json = {"type": "function", "name": "weather"}
PICK: Json = {"type": "json_schema", "name": "Pick", "strict": True, "schema": Pick.model_json_schema()}
# Kinds of the events of an item, in their order.
OF_TEXT = ("output_item.added", "content_part.added", "DELTAS", "output_text.done", "content_part.done")
OF_THOUGHT = (*OF_TEXT[:3], "reasoning_text.done", "content_part.done")
OF_CALL = ("output_item.added", "function_call_arguments.delta", "function_call_arguments.done")


def test_responses_route(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "input": "Hello", "max_output_tokens": 12, "instructions": "Be brief."}
    whole = client.responses.create(**asked)
    deltas, last = "", None
    for event in client.responses.create(**asked, stream=True):
        deltas += event.delta if event.type == "response.output_text.delta" else ""
        last = event
    assert whole.output_text == deltas
    assert whole.status == "incomplete"
    assert last.response.usage.output_tokens == whole.usage.output_tokens == 12


def chat_of(**fields: Any) -> Json:
    with renamed(NAMES):
        return ResponseRequest.model_validate(fields).chat().model_dump(exclude_none=True)


def test_items_become_messages() -> None:
    asked = chat_of(
        instructions="Be brief.",
        input=[
            {"role": "user", "content": [{"type": "input_text", "text": "Rain?"}]},
            {"type": "reasoning", "id": "rs-1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
            {
                "type": "message",
                "id": "msg-1",
                "status": "completed",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "I look.", "annotations": [], "logprobs": []}],
            },
            CALLED,
            CALLED | {"call_id": "call_2", "id": "fc-2", "status": "completed"},
            {"type": "function_call_output", "call_id": "call_1", "output": "It rains."},
            {"type": "function_call_output", "call_id": "x", "output": [{"type": "input_text", "text": "No."}]},
        ],
    )
    calls = [
        {"id": f"call_{n}", "type": "function", "function": {"name": "weather", "arguments": CALLED["arguments"]}}
        for n in (1, 2)
    ]
    assert asked["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Rain?"},
        {"role": "assistant", "content": "I look.", "reasoning_content": "Hm.", "tool_calls": calls},
        {"role": "tool", "content": "It rains.", "tool_call_id": "call_1", "name": "weather"},
        {"role": "tool", "content": "No.", "tool_call_id": "x"},
    ]


def test_fields_become_those_of_chat() -> None:
    asked = chat_of(
        input="Hi",
        tools=[WEATHER, WEATHER | {"name": "other"}],
        tool_choice={"type": "allowed_tools", "mode": "required", "tools": [NAMED]},
        text={"format": PICK, "verbosity": "medium"},
        reasoning={"effort": "low", "summary": "auto"},
        include=["message.output_text.logprobs", "reasoning.encrypted_content"],
        top_logprobs=2,
        max_output_tokens=7,
    )
    function = {name: WEATHER[name] for name in ("name", "description", "parameters", "strict")}
    assert (asked["tools"], asked["tool_choice"]) == ([{"type": "function", "function": function}], "required")
    assert (asked["reasoning_effort"], asked["max_tokens"], asked["top_logprobs"]) == ("low", 7, 2)
    assert "response_format" not in asked
    text = {"format": PICK, "verbosity": "medium"}
    assert chat_of(input="Hi", text=text)["response_format"]["json_schema"]["schema"] == PICK["schema"]
    assert chat_of(input="Hi", tool_choice=NAMED)["tool_choice"]["function"] == {"name": "weather"}


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"text": {"format": "x"}}, "text.format"),
        ({"text": {"format": {"type": "xml"}}}, "text.format"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"tools": [{"type": "web_search"}]}, "tools.0"),
        ({"tools": [{"type": "function"}], "tool_choice": "required"}, "tools.0"),
        ({"tools": [WEATHER | {"parameters": []}], "tool_choice": "required"}, "tools.0.parameters"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice"),
        ({"tool_choice": {"type": "mcp"}}, "tool_choice"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"previous_response_id": "resp-1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["code_interpreter_call.outputs"]}, "include.0"),
        ({"reasoning": {"effort": "endless"}}, "reasoning.effort"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"input": [{"type": "item_reference", "id": "msg-1"}]}, "input.0"),
        ({"input": [{"role": 1, "content": "x"}]}, "input.0.role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content"),
        ({"input": [{"role": "user"}]}, "input.0.content"),
        ({"input": [CALLED | {"name": None}]}, "input.0.tool_calls.0.function.name"),
    ],
)
def test_what_is_not_there_is_refused_by_name(body: Json, field: str) -> None:
    with pytest.raises(InvalidParameter) as caught, renamed(NAMES):
        ResponseRequest.model_validate({"input": "Hi", **body}).chat().to_params()
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field}: ")


def kinds(events: list[Any]) -> list[str]:
    """Names of events without their prefix; deltas of one text are one."""
    assert [event.sequence_number for event in events] == list(range(len(events)))
    names = [event.type.removeprefix("response.") for event in events]
    names = ["DELTAS" if name in ("output_text.delta", "reasoning_text.delta") else name for name in names]
    return [name for at, name in enumerate(names) if at == 0 or name != "DELTAS" or names[at - 1] != "DELTAS"]


def test_a_forced_call_whole_and_as_events(client: openai.OpenAI) -> None:
    asked: Json = {"model": "tiny", "input": "Rain?", "tools": [WEATHER], "temperature": 0, "tool_choice": NAMED}
    asked |= {"max_output_tokens": 400, "include": [], "parallel_tool_calls": False}
    whole = client.responses.create(**asked)
    (item,) = whole.output
    assert (item.type, item.name, item.status) == ("function_call", "weather", "completed")
    assert json.loads(item.arguments)["city"] in ("Oslo", "Rome")
    found = list(client.responses.create(**asked, stream=True))
    assert kinds(found) == ["created", "in_progress", *OF_CALL, "output_item.done", "completed"]
    with client.responses.stream(**asked) as stream:
        final = stream.get_final_response()
    (streamed,) = final.output
    assert (streamed.arguments, final.usage.output_tokens) == (item.arguments, whole.usage.output_tokens)
    output = {"type": "function_call_output", "call_id": item.call_id, "output": "Yes"}
    history: Any = [{"role": "user", "content": "Rain?"}, item, output]
    more = client.responses.create(model="tiny", input=history, tools=[WEATHER], max_output_tokens=4)
    assert more.usage.output_tokens == 4


def test_structured_answers_and_log_probabilities(client: openai.OpenAI) -> None:
    asked: Json = {"model": "tiny", "input": "Pick", "temperature": 0, "max_output_tokens": 400}
    parsed = client.responses.parse(**asked, text_format=Pick, include=["message.output_text.logprobs"], top_logprobs=1)
    assert isinstance(parsed.output_parsed, Pick)
    logprobs = parsed.output[0].content[0].logprobs
    assert "".join(each.token for each in logprobs) == parsed.output_text  # without the end token
    found = list(client.responses.create(**asked, text={"format": PICK}, stream=True))
    assert kinds(found) == ["created", "in_progress", *OF_TEXT, "output_item.done", "completed"]
    assert found[-1].response.output_text == parsed.output_text


def test_a_schema_that_cannot_be_compiled_is_named(server: Server) -> None:
    wrong = {"type": "json_schema", "name": "x", "schema": {"type": 7}}
    status, answer = post(server, "/v1/responses", {"input": "Hi", "text": {"format": wrong}})
    assert (status, answer["error"]["param"]) == (400, "text.format")
