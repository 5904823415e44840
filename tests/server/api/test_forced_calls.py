"""tool_choice required, or a function's name: the answer is a call, by the openai package, langchain and bare HTTP."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from tests.helpers.tiny_model import CONFIG
from tests.server.api.test_api import MESSAGES, post
from tests.server.conftest import Server, start_server

Json = dict[str, Any]
LLAMA = """{{ 'Respond with {"name": function name, "parameters": dictionary of arguments}. ' }}{{ tools }}
{% for message in messages %}{{ message.role }}: {{ message.content }}
{% endfor %}"""


class Pick(BaseModel):
    """A choice of a colour."""

    colour: Literal["red", "blue"]
    sure: bool


def tool(name: str, **properties: Json) -> Json:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def named(name: str) -> Json:
    return {"type": "function", "function": {"name": name}}


WEATHER = tool("weather", city={"enum": ["Oslo", "Rome"]}, days={"type": "integer", "minimum": 1, "maximum": 9})
CLOCK = {"type": "function", "function": {"name": "clock"}}
ASKED: Json = {"messages": MESSAGES, "tools": [WEATHER, CLOCK], "temperature": 0, "max_tokens": 400}
ENDS = {"logit_bias": {str(CONFIG["eos_token_id"]): 100}}  # as soon as the grammar lets it


@pytest.fixture(scope="module")
def llama(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("llama") / "model"
    shutil.copytree(tiny_model, folder)
    (folder / "chat_template.jinja").write_text(LLAMA)
    running = start_server(folder)
    yield running
    assert running.stop() == 0


def check(name: str, arguments: str) -> None:
    given = json.loads(arguments)
    if name == "weather":
        assert given["city"] in ("Oslo", "Rome")
        assert 1 <= given["days"] <= 9
        assert set(given) == {"city", "days"}
    else:
        assert (name, given) == ("clock", {})


def complete(server: Server, **more: Any) -> Json:
    status, body = post(server, "/v1/chat/completions", {**ASKED, **more})
    assert status == 200, body
    return body["choices"][0]


@pytest.mark.parametrize(
    ("choice", "names", "reason"),
    [
        ("required", {"weather", "clock"}, "tool_calls"),
        (named("weather"), {"weather"}, "stop"),
        (named("clock"), {"clock"}, "stop"),
    ],
)
@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 3}])
def test_the_answer_is_a_call(client: openai.OpenAI, choice: Any, names: set[str], reason: str, sampling: Json) -> None:
    """The reasons are OpenAI's: an answer whose function was named has just stopped."""
    asked: Json = {**ASKED, **ENDS, **sampling, "model": "tiny", "tool_choice": choice}
    whole = client.chat.completions.create(**asked).choices[0]
    (call,) = whole.message.tool_calls or []
    assert (whole.finish_reason, whole.message.content) == (reason, None)
    assert call.function.name in names
    check(call.function.name, call.function.arguments)
    chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**asked, stream=True) if chunk.choices]
    (delta,) = [call for chunk in chunks for call in chunk.delta.tool_calls or []]
    assert (delta.index, delta.function.name, delta.function.arguments) == (
        0,
        call.function.name,
        call.function.arguments,
    )
    assert "".join(chunk.delta.content or "" for chunk in chunks) == ""
    assert [chunk.finish_reason for chunk in chunks][-1] == reason
    with client.chat.completions.stream(**asked) as stream:
        final = stream.get_final_completion().choices[0]
    assert (final.message.tool_calls[0].function.arguments, final.finish_reason) == (call.function.arguments, reason)


def test_openai_parses_the_arguments_into_a_class(client: openai.OpenAI) -> None:
    tools = [openai.pydantic_function_tool(Pick)]
    asked: Json = {"model": "tiny", "messages": MESSAGES, "max_tokens": 400, "extra_body": ENDS}
    for choice in ("required", named("Pick")):
        (call,) = (
            client.chat.completions.parse(**asked, tools=tools, tool_choice=choice).choices[0].message.tool_calls or []
        )
        assert isinstance(call.function.parsed_arguments, Pick)


def test_several_calls_unless_the_request_wants_one(server: Server) -> None:
    """`min_tokens` keeps the answer from ending after its first call."""
    longer = {**ENDS, "min_tokens": 150, "max_tokens": 1500, "tool_choice": "required"}
    several = complete(server, **longer)
    assert several["finish_reason"] == "tool_calls"
    assert several["message"]["content"] is None
    calls = [call["function"] for call in several["message"]["tool_calls"]]
    assert len(calls) > 1
    for call in calls:
        check(call["name"], call["arguments"])
    one = complete(server, **{**longer, "min_tokens": 0, "logit_bias": {"198": 50}}, parallel_tool_calls=False)
    assert len(one["message"]["tool_calls"]) == 1  # a model that would rather begin a new line than end
    assert one["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1.0, "seed": 7}])
def test_calls_do_not_depend_on_the_drafter(llama: Server, sampling: Json) -> None:
    answers, accepted = [], 0
    for speculation in ("off", {"method": "ngram", "k": 4}, {"method": "suffix", "k": 6}):
        asked = {**ASKED, **sampling, **ENDS, "tool_choice": "required", "return_token_ids": True}
        for _ in range(2):  # the second time the suffix store knows the answer
            status, body = post(llama, "/v1/chat/completions", {**asked, "speculation": speculation})
            assert status == 200, body
            answers.append(body["choices"][0]["token_ids"])
            accepted += body["usage"]["speculation"]["accepted"]
    assert all(answer == answers[0] for answer in answers)
    assert accepted > 0


def test_the_style_is_the_models(llama: Server, server: Server) -> None:
    asked = {**ENDS, "tool_choice": named("weather"), "return_token_ids": True}
    for each, begin in ((llama, '{"name": "weather", "parameters": {'), (server, '<tool_call>\n{"name": "weather", ')):
        choice = complete(each, **asked)
        (call,) = choice["message"]["tool_calls"]
        check(call["function"]["name"], call["function"]["arguments"])
        text = post(each, "/detokenize", {"tokens": choice["token_ids"]})[1]["prompt"]
        assert text.startswith(begin)


@pytest.mark.parametrize(
    ("more", "field", "message"),
    [
        ({"tool_choice": "required", "tools": []}, "tool_choice", "no tools"),
        ({"tool_choice": named("rain")}, "tool_choice", "'rain' is not among the tools; there are: 'weather', 'clock'"),
        ({"tool_choice": "any"}, "tool_choice", "'none', 'auto' or 'required'"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.type", "'function'"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.function", "required"),
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "response_format", "contradicts"),
        ({"tool_choice": "required", "structured_outputs": {"regex": "a"}}, "structured_outputs", "contradicts"),
        ({"tool_choice": "required", "tools": [WEATHER, WEATHER]}, "tools.1", "name of another tool"),
        (
            {"tool_choice": "required", "tools": [CLOCK, {"type": "function", "function": {"name": 1}}]},
            "tools.1",
            "name",
        ),
        (
            {"tool_choice": "required", "tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
            "tools.0.function.parameters",
            "the JSON schema of an object",
        ),
        (
            {"tool_choice": "required", "tools": [WEATHER, tool("rain", when={"type": "nonsense"})]},
            "tools",
            "cannot be compiled: at 4(9): failed to compile JSON schema: Invalid type",
        ),
        (
            {"tool_choice": named("f"), "tools": [tool("f", x={"$ref": "#/$defs/X"})]},
            "tools",
            "Pointer '/$defs/X' does not exist",
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_forced_is_refused_by_name(
    server: Server, more: Json, field: str, message: str, stream: bool
) -> None:
    status, body = post(server, "/v1/chat/completions", {**ASKED, **more, "stream": stream})
    assert (status, body["error"]["param"]) == (400, field)
    assert message in body["error"]["message"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::ResourceWarning")
def test_langchain_forces_calls(server: Server) -> None:
    from langchain_openai import ChatOpenAI

    llm = ChatOpenAI(model="tiny", base_url=server.url + "/v1", api_key="x", temperature=0, max_tokens=400, **ENDS)
    for choice in ("any", "required", "weather", True, named("weather")):
        tools = [WEATHER] if choice is True else [WEATHER, CLOCK]
        bound = llm.bind_tools(tools, tool_choice=choice)
        (call,) = bound.invoke("Rain?").tool_calls
        check(call["name"], json.dumps(call["args"]))
        total = None
        for chunk in bound.stream("Rain?"):
            total = chunk if total is None else total + chunk
        assert total is not None
        assert [(each["name"], each["args"]) for each in total.tool_calls] == [(call["name"], call["args"])]
    structured = llm.with_structured_output(Pick, method="function_calling")
    assert isinstance(structured.invoke("Pick"), Pick)
    assert isinstance(list(structured.stream("Pick"))[-1], Pick)
