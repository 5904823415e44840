"""The anthropic package, by /v1/messages."""

from typing import Any

from anthropic import Anthropic
from checks import MODEL, QUESTION, URL, report

client = Anthropic(base_url=URL, api_key="x", max_retries=0)
ASKED: dict[str, Any] = {"model": MODEL, "max_tokens": 200}
CITY = {"type": "object", "properties": {"city": {"type": "string", "enum": ["Oslo", "Rome"]}}, "required": ["city"]}
WEATHER = {"name": "weather", "description": "The weather of a city.", "input_schema": CITY}


def asked(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def streams() -> bool:
    with client.messages.stream(**ASKED, messages=asked(QUESTION)) as stream:
        return bool("".join(stream.text_stream)) and bool(stream.get_final_message().usage.output_tokens)


def tools() -> bool:
    """Call a tool, and go on with its result."""
    talk = asked("Does it rain in Oslo?")
    first = client.messages.create(**ASKED, messages=talk, tools=[WEATHER], tool_choice={"type": "any"})
    use = next(block for block in first.content if block.type == "tool_use")
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "It rains."}
    talk += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    return bool(client.messages.create(**ASKED, messages=talk, tools=[WEATHER]).content)


report(
    chats=lambda: client.messages.create(**ASKED, messages=asked(QUESTION)).content[0].text,
    streams=streams,
    tools=tools,
    counts=lambda: client.messages.count_tokens(model=MODEL, messages=asked(QUESTION)).input_tokens,
)
