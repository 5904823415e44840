"""openai-agents with its default model class, which speaks /v1/responses."""

import asyncio
from typing import Any, Literal

from agents import Agent, ModelSettings, Runner, function_tool, set_default_openai_client, set_tracing_disabled
from checks import MODEL, QUESTION, URL, report
from openai import AsyncOpenAI
from pydantic import BaseModel

set_tracing_disabled(True)
SHORT = ModelSettings(max_tokens=200, temperature=0)


class Pick(BaseModel):
    colour: Literal["red", "blue"]


@function_tool
def weather(city: Literal["Oslo", "Rome"]) -> str:
    """The weather of a city."""
    called.append(city)
    return "It rains."


called: list[str] = []


def agent(**more: Any) -> Agent:
    set_default_openai_client(AsyncOpenAI(base_url=URL + "/v1", api_key="x", max_retries=0))  # one for each event loop
    return Agent(name="a", instructions="Be brief.", model=MODEL, **{"model_settings": SHORT, **more})


def streams() -> bool:
    async def run() -> bool:
        result = Runner.run_streamed(agent(), QUESTION)
        return bool([event async for event in result.stream_events()]) and bool(result.final_output)

    return asyncio.run(run())


def tools() -> bool:
    forced = ModelSettings(max_tokens=200, temperature=0, tool_choice="required", parallel_tool_calls=False)
    Runner.run_sync(agent(tools=[weather], model_settings=forced), "Does it rain in Oslo?", max_turns=3)
    return bool(called)


report(
    chats=lambda: Runner.run_sync(agent(), QUESTION).final_output,
    streams=streams,
    tools=tools,
    structured=lambda: Runner.run_sync(agent(output_type=Pick), "Red or blue?").final_output.colour,
)
