"""Tool calls found in text, whole and in pieces."""

from __future__ import annotations

import json
import random
from types import SimpleNamespace
from typing import Any

import pytest

from paceline import LLM
from paceline.outputs import StreamChunk
from paceline.server.api.answer_parts import AnswerParser
from paceline.server.api.chat import parse_chunk
from paceline.server.api.protocol import ChatRequest
from paceline.server.api.tool_calls import Style, ToolParser, forced_calls, read_call, style_of
from paceline.text.grammar import Grammars

HERMES = 'Let me look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo",  "days": 1.50}}\n</tool_call>'
TWO = HERMES + '\n<tool_call>{"name": "time", "arguments": {}}</tool_call> Done.'
IN_STRING = (
    '<tool_call>{"name": "say", "arguments": {"text": "a \\\\\\"</tool_call>"}}</tool_call>\n'
    '<tool_call>{"name": "now"}</tool_call>\n'
)
LLAMA = '{"name": "weather", "parameters": {"city": "a \\"b\\" }", "unit": null}}'


def parse(text: str, rng: random.Random | None = None) -> tuple[str, list[tuple[str, str]]]:
    """All at once, or cut at random places."""
    parser, shown, at = ToolParser(), "", 0
    while at < len(text):
        size = len(text) if rng is None else rng.randint(1, 7)
        shown += parser.push(text[at : at + size])[0]
        at += size
    return shown + parser.finish()[0], [(call.name, call.arguments) for call in parser.calls]


@pytest.mark.parametrize(
    ("text", "shown", "calls"),
    [
        (HERMES, "Let me look.\n", [("weather", '{"city": "Oslo",  "days": 1.50}')]),
        (TWO, "Let me look.\n Done.", [("weather", '{"city": "Oslo",  "days": 1.50}'), ("time", "{}")]),
        (LLAMA, "", [("weather", '{"city": "a \\"b\\" }", "unit": null}')]),
        ("<|python_tag|>" + LLAMA, "", [("weather", '{"city": "a \\"b\\" }", "unit": null}')]),
        ('<tool_call>{"name": "now"}', "", [("now", "{}")]),
        (IN_STRING, "", [("say", '{"text": "a \\\\\\"</tool_call>"}'), ("now", "{}")]),
        (IN_STRING + " \n<tool", "\n \n<tool", [("say", '{"text": "a \\\\\\"</tool_call>"}'), ("now", "{}")]),
        ('<tool_call>say "hi</tool_call> after', '<tool_call>say "hi</tool_call> after', []),
        ("plain text with < and { in it", "plain text with < and { in it", []),
        ('{"answer": 42}', '{"answer": 42}', []),
        ("<tool_call>nonsense</tool_call> after", "<tool_call>nonsense</tool_call> after", []),
        ("", "", []),
        ("<tool_", "<tool_", []),
    ],
)
def test_calls_and_text_are_told_apart_wherever_the_text_is_cut(text: str, shown: str, calls: list) -> None:
    assert parse(text) == (shown, calls)
    rng = random.Random(0)
    for _ in range(50):
        assert parse(text, rng) == (shown, calls)


@pytest.mark.parametrize("parallel", [None, False])
def test_a_request_may_ask_for_one_call_at_a_time(parallel: bool | None) -> None:
    tools = [{"type": "function", "function": {"name": "time"}}]
    messages = [{"role": "user", "content": "x"}]
    request = ChatRequest.model_validate({"messages": messages, "tools": tools, "parallel_tool_calls": parallel})
    generation: Any = SimpleNamespace(thought=None)
    parser, cuts = AnswerParser(generation, request), (TWO[:60], TWO[60:130], TWO[130:])
    chunks = [StreamChunk(0, text, [], "stop" if text is cuts[-1] else None) for text in cuts]
    deltas = [parse_chunk(chunk, parser) for chunk in chunks]
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert [(call["index"], call["function"]["name"]) for call in calls] == [(0, "weather"), (1, "time")][: len(calls)]
    assert len(calls) == (2 if parallel is None else 1)


def test_arguments_are_the_source_text() -> None:
    call = read_call('{"name": "f", "id": {"name": 1}, "arguments": {"x":1e3,"y":[1, 2]}}')
    assert call is not None
    assert call.arguments == '{"x":1e3,"y":[1, 2]}'
    assert json.loads(call.arguments) == {"x": 1000.0, "y": [1, 2]}


SCHEMAS: dict[str, dict[str, Any]] = {
    "weather": {
        "type": "object",
        "properties": {"city": {"$ref": "#/$defs/City"}},
        "$defs": {"City": {"enum": ["Oslo"]}},
    },
    'a "b"': {"type": "object", "properties": {}},
}
CALLS = [("weather", '{"city": "Oslo"}'), ('a "b"', "{}")]


@pytest.mark.parametrize("style", ["hermes", "llama"])
@pytest.mark.parametrize("single", [False, True])
def test_what_is_forced_is_what_is_read(smollm2: LLM, style: Style, single: bool) -> None:
    grammars = Grammars(smollm2.tokenizer, smollm2.config.vocab_size, smollm2.config.eos_token_ids)
    compiled = grammars.compile({"structural_tag": forced_calls(SCHEMAS, style, single=single)})
    (end,) = smollm2.config.eos_token_ids

    def allowed(text: str) -> bool:
        tokens = [*smollm2.tokenizer.encode(text), end]
        return int(compiled.deep_copy().validate_tokens(tokens)) == len(tokens)

    def written(name: str, arguments: str) -> str:
        if style == "llama":
            return f'{{"name": {json.dumps(name)}, "parameters": {arguments}}}'
        return f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": {arguments}}}\n</tool_call>'

    for call in CALLS:
        assert allowed(written(*call))
        assert parse(written(*call)) == ("", [call])
    both = "\n".join(written(*call) for call in CALLS)
    assert allowed(both) == (style == "hermes" and not single)
    assert parse(both)[1] == (CALLS if style == "hermes" else [])
    for wrong in ("", "Well, ", written("time", "{}"), written("weather", '{"city": "Rome"}'), written(*CALLS[0])[:-1]):
        assert not allowed(wrong)


@pytest.mark.parametrize(
    ("template", "style"),
    [
        ('<tool_call>\\n{"name": ..., "parameters"', "hermes"),
        ('{"name": function name, "parameters": dictionary of argument name and its value}', "llama"),
        ("{{ messages }}", "hermes"),
    ],
)
def test_the_style_is_that_of_the_chat_template(template: str, style: str) -> None:
    assert style_of(template) == style
