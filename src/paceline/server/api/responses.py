"""/v1/responses: a request in OpenAI's newer form is a chat request. The server stores no response."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from paceline.errors import InvalidParameter, short_repr
from paceline.sampling_params import MAX_LOGPROBS
from paceline.server.api.as_chat import as_chat
from paceline.server.api.protocol import ChatRequest, Items, Sampling

Json = dict[str, Any]
# Names of chat's fields in this route, for errors.
NAMES = {
    r"tools\.(\d+)\.function": r"tools.\1",
    "tool_choice.function": "tool_choice",
    "response_format": "text.format",
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "reasoning_effort": "reasoning.effort",
}
TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")
LOGPROBS = "message.output_text.logprobs"
# Additions to the answer. Thoughts are always in it, and items of tools that are not here never.
INCLUDED = (LOGPROBS, "reasoning.encrypted_content", "file_search_call.results", "web_search_call.action.sources")


class ResponseRequest(Sampling):
    input: str | Annotated[Items[Json], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: int | None = None
    text: Json | None = None
    previous_response_id: str | None = None
    truncation: Literal["disabled", "auto"] | None = None
    parallel_tool_calls: bool | None = None
    background: bool | None = None
    tools: Items[Json] | None = None
    tool_choice: str | Json | None = None
    reasoning: Json | None = None
    include: Items[str] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    stream_options: Json | None = None  # of obfuscation, which the answer does not have
    chat_template_kwargs: Json | None = None

    def chat(self) -> ChatRequest:
        if self.previous_response_id is not None:
            raise InvalidParameter("previous_response_id", "responses are not stored here; send the conversation")
        if self.background:
            raise InvalidParameter("background", "is not supported; leave it out")
        if self.truncation == "auto":
            raise InvalidParameter("truncation", "the conversation is never cut here; leave it out")
        for at, addition in enumerate(self.include or ()):
            if addition not in INCLUDED:
                raise InvalidParameter(f"include.{at}", f"{short_repr(addition)} is not one of {', '.join(INCLUDED)}")
        tools, choice = self._tools()
        return as_chat(
            self,
            messages=self._messages(),
            max_tokens=self.max_output_tokens,
            tools=tools,
            tool_choice=choice,
            # As at OpenAI, the format is that of text, and a forced call is none.
            response_format=self._format() if choice in (None, "none", "auto") else None,
            reasoning_effort=self._effort(),
            logprobs=self.wants_logprobs or None,
            top_logprobs=self.top_logprobs if self.wants_logprobs else None,
            stream_options=None,
        )

    @property
    def wants_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ()) or bool(self.top_logprobs)

    def _tools(self) -> tuple[list[Json], Any]:
        tools, choice = [_tool(at, tool) for at, tool in enumerate(self.tools or ())], self.tool_choice
        if not isinstance(choice, dict):
            return tools, choice
        if choice.get("type") == "function":
            return tools, {"type": "function", "function": {"name": choice.get("name")}}
        if choice.get("type") == "allowed_tools" and isinstance(choice.get("tools"), list):
            names = [each.get("name") for each in choice["tools"] if isinstance(each, dict)]
            return [tool for tool in tools if tool["function"].get("name") in names], choice.get("mode")
        raise InvalidParameter(
            "tool_choice", f"type {short_repr(choice.get('type'))} is not supported; function and allowed_tools are"
        )

    def _format(self) -> Json | None:
        for name, value in (self.text or {}).items():
            if name != "format" and (name, value) not in (("verbosity", None), ("verbosity", "medium")):
                raise InvalidParameter(f"text.{name}", f"{short_repr(value)} is not supported here; leave it out")
        wanted = (self.text or {}).get("format")
        if wanted is None:
            return None
        if not isinstance(wanted, dict):
            raise InvalidParameter("text.format", "is an object with a type")
        return {"type": wanted.get("type"), "json_schema": {"schema": wanted.get("schema")}}

    def _effort(self) -> str | None:
        for name, value in (self.reasoning or {}).items():
            if name != "effort" and value not in (None, "auto"):  # there is no summary: thoughts are given whole
                raise InvalidParameter(f"reasoning.{name}", "is not supported; the thought is given whole")
        return (self.reasoning or {}).get("effort")

    def _messages(self) -> list[Json]:
        messages: list[Json] = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}]
        names: dict[str, str] = {}  # functions by the id of their call
        for at, item in enumerate(self.input):
            match item.get("type", "message"):
                case "message":
                    role = item.get("role")
                    message = {"role": role, "content": _text(f"input.{at}.content", item.get("content"))}
                    own = role == "assistant" and messages and messages[-1].keys() == {"role", "reasoning_content"}
                    messages[len(messages) - bool(own) :] = [(messages[-1] if own else {}) | message]
                case "reasoning":
                    thought = _text(f"input.{at}", item.get("content") or item.get("summary") or "")
                    if thought:
                        messages.append({"role": "assistant", "reasoning_content": thought})
                case "function_call":
                    names[str(item.get("call_id"))] = str(item.get("name"))
                    if not messages or messages[-1]["role"] != "assistant":
                        messages.append({"role": "assistant", "content": ""})
                    messages[-1].setdefault("tool_calls", []).append(_call(item))
                case "function_call_output":
                    content = _text(f"input.{at}.output", item.get("output"))
                    call_id = str(item.get("call_id"))
                    known = {"name": names[call_id]} if call_id in names else {}
                    messages.append({"role": "tool", "tool_call_id": call_id, "content": content, **known})
                case kind:
                    raise InvalidParameter(f"input.{at}", f"an item of type {short_repr(kind)} is not supported")
        return messages


def _tool(at: int, tool: Json) -> Json:
    if tool.get("type") != "function":
        raise InvalidParameter(f"tools.{at}", f"type {short_repr(tool.get('type'))} is not supported; function is")
    function = {
        name: tool[name] for name in ("name", "description", "parameters", "strict") if tool.get(name) is not None
    }
    return {"type": "function", "function": function}


def _call(item: Json) -> Json:
    function = {"name": item.get("name"), "arguments": item.get("arguments")}
    return {"id": item.get("call_id"), "type": "function", "function": function}


def _text(field: str, content: Any) -> str:
    """Return the text of an item: a text, or parts that are text."""
    if isinstance(content, str):
        return content
    texts = []
    for part in content if isinstance(content, list) else [content]:
        known = isinstance(part, dict) and (part.get("type") in TEXT_PARTS or part.get("type") == "refusal")
        text = (part.get("text") or part.get("refusal") or "") if known else None
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, dict) else part
            raise InvalidParameter(field, f"content of type {short_repr(kind)} is not supported; text is")
        texts.append(text)
    return "\n".join(texts)
