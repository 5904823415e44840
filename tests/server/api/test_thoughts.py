"""A model that thinks: its thought is apart from its text, streamed and whole, in usage and under a grammar."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.helpers.scripted_model import END_THINK, R1, THINK, write_scripted_model
from tests.server.api.test_api import MESSAGES, post
from tests.server.api.test_responses import OF_TEXT, OF_THOUGHT, kinds
from tests.server.conftest import Server, start_server

Json = dict[str, Any]
THOUGHT, TEXT = "It rains in Rome", "Take an umbrella!"
SCRIPT = ("assistant", THINK, "\n", THOUGHT, END_THINK, "\n\n", TEXT)
THOUGHT_TOKENS = 7  # tags and line end included
OFF = {"chat_template_kwargs": {"enable_thinking": False}}
TOOL = {
    "type": "function",
    "function": {
        "name": "pack",
        "parameters": {"type": "object", "properties": {"what": {"enum": ["hat"]}}, "required": ["what"]},
    },
}
FORCED = {"tools": [TOOL], "tool_choice": "required", "logit_bias": {"2": 20}}


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("thinker")
    write_scripted_model(folder, smollm2_path, SCRIPT)
    running = start_server(folder, "--served-model-name", "thinker", "--capture", str(folder / "captured.jsonl"))
    running.folder = folder  # type: ignore[attr-defined]
    yield running
    assert running.stop() == 0


@pytest.fixture(scope="module")
def of_thinker(thinker: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=thinker.url + "/v1", api_key="unused", max_retries=0)


def ask(server: Server, **more: Any) -> Json:
    status, body = post(server, "/v1/chat/completions", {"messages": MESSAGES, "temperature": 0, **more})
    assert status == 200, body
    return body


@pytest.mark.parametrize("more", [{}, {"stop": ["never written"]}, {"speculation": {"method": "ngram", "k": 3}}])
def test_the_thought_is_apart_from_the_text(thinker: Server, of_thinker: openai.OpenAI, more: Json) -> None:
    whole = ask(thinker, **more)
    message = whole["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == (THOUGHT, TEXT)
    assert whole["usage"]["completion_tokens_details"] == {"reasoning_tokens": THOUGHT_TOKENS}
    asked: Json = {"model": "thinker", "messages": MESSAGES, "temperature": 0, "extra_body": more}
    asked |= {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = of_thinker.chat.completions.create(**asked)
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(getattr(delta, "reasoning_content", "") for delta in deltas) == THOUGHT
    assert "".join(delta.content or "" for delta in deltas) == TEXT
    assert last.usage.completion_tokens_details.reasoning_tokens == THOUGHT_TOKENS


def test_responses_have_an_item_for_the_thought(of_thinker: openai.OpenAI) -> None:
    asked: Json = {"model": "thinker", "input": "Hi", "temperature": 0}
    whole = of_thinker.responses.create(**asked)
    reasoning, message = whole.output
    assert (reasoning.type, reasoning.content[0].text, whole.output_text) == ("reasoning", THOUGHT, TEXT)
    assert whole.usage.output_tokens_details.reasoning_tokens == THOUGHT_TOKENS
    found = list(of_thinker.responses.create(**asked, stream=True))
    of_items = [*OF_THOUGHT, "output_item.done", *OF_TEXT, "output_item.done"]
    assert kinds(found) == ["created", "in_progress", *of_items, "completed"]
    assert [item.content[0].text for item in found[-1].response.output] == [THOUGHT, TEXT]
    off = of_thinker.responses.create(**asked, reasoning={"effort": "none"})
    assert [item.type for item in off.output] == ["message"]
    history: Any = [{"role": "user", "content": "Hi"}, reasoning, message, {"role": "user", "content": "So?"}]
    assert of_thinker.responses.create(model="thinker", input=history).output


def test_an_answer_may_end_within_its_thought(thinker: Server) -> None:
    body = ask(thinker, max_tokens=4)
    message = body["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("", "It rains")
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": 4}


def test_a_request_switches_thinking_off(thinker: Server) -> None:
    for more in (OFF, {"reasoning_effort": "none"}):
        body = ask(thinker, **more)
        assert body["choices"][0]["message"]["content"] == TEXT
        assert "reasoning_content" not in body["choices"][0]["message"]
        assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}
    assert ask(thinker, reasoning_effort="high")["choices"][0]["message"]["reasoning_content"] == THOUGHT


def test_grammars_and_forced_calls_begin_behind_the_thought(thinker: Server) -> None:
    picked = ask(thinker, structured_outputs={"choice": ["Rome", "Oslo"]})["choices"][0]["message"]
    assert picked["reasoning_content"] == THOUGHT
    assert picked["content"] in ("Rome", "Oslo")
    called = ask(thinker, **FORCED)["choices"][0]["message"]
    assert called["reasoning_content"] == THOUGHT
    assert called["content"] is None
    (call,) = called["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"what": "hat"}
    assert ask(thinker, structured_outputs={"choice": ["Oslo"]}, **OFF)["choices"][0]["message"]["content"] == "Oslo"


def test_an_earlier_thought_is_handed_to_the_template(thinker: Server) -> None:
    def tokens(**more: str) -> int:
        history = [*MESSAGES, {"role": "assistant", "content": "Yes.", **more}]
        return post(thinker, "/tokenize", {"messages": history})[1]["count"]

    assert tokens(reasoning=THOUGHT) == tokens(reasoning_content=THOUGHT) > tokens()


def test_captured_answers_keep_their_thoughts(thinker: Server) -> None:
    lines = (thinker.folder / "captured.jsonl").read_text().splitlines()  # type: ignore[attr-defined]
    answers = [json.loads(line)["messages"][-1]["content"] for line in lines]
    assert f"{THINK}\n{THOUGHT}{END_THINK}\n\n{TEXT}" in answers


def test_a_template_may_open_the_thought(tmp_path: Path, smollm2_path: Path) -> None:
    write_scripted_model(tmp_path, smollm2_path, SCRIPT[1:], R1)
    server = start_server(tmp_path)
    try:
        message = ask(server)["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == (THOUGHT, TEXT)
        assert ask(server, structured_outputs={"choice": ["Oslo"]})["choices"][0]["message"]["content"] == "Oslo"
    finally:
        assert server.stop() == 0
