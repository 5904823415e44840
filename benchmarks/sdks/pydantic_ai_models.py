"""pydantic-ai by /v1/responses and by chat completions."""

import asyncio
from typing import Any, Literal

from checks import MODEL, QUESTION, URL, report
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

PROVIDER = OpenAIProvider(base_url=URL + "/v1", api_key="x")
SHORT: Any = {"max_tokens": 200, "temperature": 0}


class Pick(BaseModel):
    colour: Literal["red", "blue"]


def agent(kind: Any = OpenAIResponsesModel, **more: Any) -> Agent[None, Any]:
    return Agent(kind(MODEL, provider=PROVIDER), model_settings=SHORT, **more)


def streams() -> bool:
    async def run() -> bool:
        async with agent().run_stream(QUESTION) as result:
            return bool([text async for text in result.stream_text(delta=True)])

    return asyncio.run(run())


report(
    chats=lambda: agent().run_sync(QUESTION).output,
    streams=streams,
    tools=lambda: agent(output_type=Pick).run_sync("Red or blue?").output.colour,
    structured=lambda: agent(output_type=NativeOutput(Pick)).run_sync("Red or blue?").output.colour,
    chat_completions=lambda: agent(OpenAIChatModel, output_type=Pick).run_sync("Red or blue?").output.colour,
)
