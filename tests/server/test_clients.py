"""Clients that people use, unchanged, against the server; the openai package has more in test_api."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from tests.helpers.tiny_model import CONFIG
from tests.server.api.test_api import MESSAGES, post
from tests.server.conftest import Server

CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
FORCED = {"structured_outputs": {"choice": [CALL]}}  # a random model does not call tools by itself
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


class Pick(BaseModel):
    colour: Literal["red", "blue"]
    sure: bool


EXAMPLE = '{"colour": "blue", "sure": true}'


@pytest.fixture(scope="module")
def leaning(server: Server) -> dict[str, int]:
    """A logit bias to the tokens of an answer: a random model would write white space between them for ever."""
    tokens = post(server, "/tokenize", {"prompt": EXAMPLE, "add_special_tokens": False})[1]["tokens"]
    return dict.fromkeys(map(str, [*tokens, CONFIG["eos_token_id"]]), 100)


def text_of(server: Server, prompt: str, tokens: int) -> str:
    body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": tokens, "temperature": 0}
    return post(server, "/v1/chat/completions", body)[1]["choices"][0]["message"]["content"]


def test_openai_parses_structured_answers(server: Server, client: openai.OpenAI, leaning: dict[str, int]) -> None:
    asked: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "temperature": 0, "logit_bias": leaning}
    parsed = client.chat.completions.parse(**asked, response_format=Pick).choices[0].message.parsed
    assert parsed == Pick.model_validate_json(EXAMPLE)

    async def ask() -> Pick | None:
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="x") as other:
            return (await other.chat.completions.parse(**asked, response_format=Pick)).choices[0].message.parsed

    assert asyncio.run(ask()) == parsed
    with client.chat.completions.stream(**asked, response_format=Pick) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == parsed


def test_openai_calls_tools_and_goes_on(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "tools": [WEATHER], "extra_body": FORCED}
    choice = client.chat.completions.create(**asked).choices[0]
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls or []
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Oslo"})
    with client.chat.completions.stream(**asked) as stream:
        (streamed,) = stream.get_final_completion().choices[0].message.tool_calls or []
    assert streamed.function.arguments == call.function.arguments
    told = {"role": "tool", "tool_call_id": call.id, "content": "It rains."}
    history: Any = [*MESSAGES, choice.message.model_dump(exclude_none=True), told]
    answer = client.chat.completions.create(model="tiny", messages=history, tools=[WEATHER], max_tokens=5)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 5


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::ResourceWarning")
def test_the_llm_command(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
    from click.testing import CliRunner
    from llm.cli import cli

    model = {"model_id": "tiny", "model_name": "tiny", "api_base": server.url + "/v1", "api_key_name": "none"}
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps([model]))  # JSON is YAML
    asked = ["prompt", "-m", "tiny", "Say it", "-o", "max_tokens", "8", "-o", "temperature", "0", "--key", "x"]
    for more in ([], ["--no-stream"]):
        done = CliRunner().invoke(cli, [*asked, *more])
        assert done.exit_code == 0, done.output
        assert done.output.strip() == text_of(server, "Say it", 8).strip()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::ResourceWarning")
def test_langchain(server: Server, leaning: dict[str, int]) -> None:
    from langchain_openai import ChatOpenAI

    llm = ChatOpenAI(model="tiny", base_url=server.url + "/v1", api_key="x", temperature=0, max_tokens=40)
    expected = text_of(server, "Say it", 40)
    answer = llm.invoke("Say it")
    assert answer.content == expected
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["output_tokens"] == 40
    assert "".join(str(chunk.content) for chunk in llm.stream("Say it")) == expected
    assert [each.content for each in llm.batch(["Say it", "Say it"])] == [expected] * 2

    biased = ChatOpenAI(model="tiny", base_url=server.url + "/v1", api_key="x", temperature=0, logit_bias=leaning)
    found = biased.with_structured_output(Pick, method="json_schema").invoke("Pick")
    assert found == Pick.model_validate_json(EXAMPLE)
    (call,) = llm.bind_tools([WEATHER]).invoke("Rain?", max_tokens=200, extra_body=FORCED).tool_calls
    assert (call["name"], call["args"]) == ("weather", {"city": "Oslo"})


def test_paceline_bench_measures_the_server(server: Server, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"Tell me about {n}."}) + "\n" for n in range(6)))
    flags = ("--endpoint", server.url, "--prompts", str(prompts), "--max-tokens", "40", "--out", str(tmp_path / "out"))
    command = [sys.executable, "-m", "paceline", "bench", "tiny", *flags, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    cell = json.loads(done.stdout)["cells"][0]
    assert (cell["tokens"], cell["answers"]) == (240, 6)
    assert cell["tokens_per_s"] > 0
    assert cell["tau"] >= 1  # read from /metrics
    assert (tmp_path / "out" / "report.html").exists()
