"""instructor: chat completions by tools and by JSON schema, and /v1/responses by tools."""

from typing import Literal

import instructor
from checks import MODEL, URL, report
from openai import OpenAI
from pydantic import BaseModel


class Pick(BaseModel):
    colour: Literal["red", "blue"]


def by(mode: instructor.Mode) -> bool:
    client = instructor.from_openai(OpenAI(base_url=URL + "/v1", api_key="x", max_retries=0), mode=mode)
    asked = [{"role": "user", "content": "Red or blue?"}]
    return bool(client.create(model=MODEL, messages=asked, response_model=Pick, max_retries=0).colour)


report(
    tools=lambda: by(instructor.Mode.TOOLS),
    structured=lambda: by(instructor.Mode.JSON_SCHEMA),
    responses_tools=lambda: by(instructor.Mode.RESPONSES_TOOLS),
)
