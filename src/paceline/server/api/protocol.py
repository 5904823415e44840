"""Request bodies of the OpenAI routes, and how they become sampling parameters.

A field that is not listed is refused with a 400 that names it, unless its value asks for nothing (`fields`). Fields
that OpenAI's clients send and that change no token (user, metadata, store, service_tier) are taken and have no effect;
they are listed in `Ignored`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

from paceline.errors import InvalidParameter, short_repr
from paceline.sampling_params import MAX_LOGPROBS, SamplingParams
from paceline.server.api import fields as field_table
from paceline.server.api.tool_calls import Style, forced_calls

T = TypeVar("T")
Items = Annotated[
    list[T], Field(fail_fast=True)
]  # only the first wrong item is named: naming all of a long list takes minutes
_SURROGATE = re.compile("[\ud800-\udfff]")
# Bounds of one request, so that none holds others up: the engine reads some of these for every token.
MAX_FIELDS = 100  # fields of a body
MAX_BATCH = 256  # prompts of one completions request
MAX_ANSWERS = 128  # answers to one prompt; OpenAI's limit
MAX_STOPS, MAX_STOP = 64, 256  # stop strings, and characters of each
MAX_BAD_WORDS = 256
MAX_GRAMMAR, MAX_NESTING = 1 << 16, 64  # characters of a schema, regex or grammar; levels of a schema


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _leave_out_what_asks_for_nothing(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        known = cls.model_fields
        not_null = [n for n, f in known.items() if not (f.is_required() or field_table.takes_null(f.annotation))]
        return field_table.asking(value, known, not_null)


class Whole(Body):
    """The whole body of a request."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_surrogates(cls, value: Any) -> Any:
        """Refuse half of a surrogate pair, which JSON can spell, but no tokenizer takes and no answer can quote."""
        if isinstance(value, dict) and len(value) > MAX_FIELDS:
            raise ValueError(f"has more than {MAX_FIELDS} fields")
        left = [value]
        while left:
            each = left.pop()
            if isinstance(each, str):
                if not each.isascii() and _SURROGATE.search(each):
                    raise ValueError("holds half of a surrogate pair, which is no text")
            elif isinstance(each, dict):
                left += [*each, *each.values()]
            elif isinstance(each, list):
                left += [part for part in each if not isinstance(part, int)]
        return value


class Ignored(Whole):
    """Fields on which no token depends."""

    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class Speculation(Body):
    """Drafting of this request alone: a method and a number of tokens, or method none."""

    method: str | None = None
    k: int | Literal["auto"] | None = None


class StreamOptions(Body):
    include_usage: bool = False
    continuous_usage_stats: bool = False  # vLLM's: usage so far in every chunk
    include_obfuscation: bool = False  # sent by OpenAI's clients; the answer has none


class Sampling(Ignored):
    """Sampling parameters of all routes, under OpenAI's names or else vLLM's."""

    model_config = ConfigDict(json_schema_extra=field_table.document)
    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    bad_words: Annotated[Items[str], Field(max_length=MAX_BAD_WORDS)] | None = None
    min_tokens: int | None = None
    stop_token_ids: Items[int] | None = None
    allowed_token_ids: Items[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    speculation: str | Speculation | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None  # narrows whom caches are shared with
    tag: Annotated[str, Field(max_length=64)] | None = None  # label of a workload in the metrics
    return_token_ids: bool = False
    stream: bool | None = None

    def sampling_params(self, **others: Any) -> SamplingParams:
        fields = {name: getattr(self, name) for name in _SAMPLING if getattr(self, name) is not None}
        if isinstance(self.speculation, Speculation):
            fields["speculation"] = self.speculation.model_dump(exclude_none=True)
        elif self.speculation is not None:
            fields["speculation"] = "none" if self.speculation == "off" else self.speculation
        fields |= {name: value for name, value in others.items() if value is not None}
        _check_size(fields.get("structured_outputs"))
        return SamplingParams(**fields)


_SAMPLING = {each.name for each in fields(SamplingParams)} & {*Sampling.model_fields} - {"speculation"}


Stop = Annotated[str, Field(max_length=MAX_STOP)]


class Choices(Sampling):
    """Fields of both chat and completions."""

    n: Annotated[int, Field(ge=1, le=MAX_ANSWERS)] | None = None
    stop: Stop | Annotated[Items[Stop], Field(max_length=MAX_STOPS)] | None = None
    logit_bias: dict[str, float] | None = None
    stream_options: StreamOptions | None = None
    prompt_logprobs: int | None = None

    def sampling_params(self, **others: Any) -> SamplingParams:
        if self.includes_usage and not self.stream:
            raise InvalidParameter("stream_options", "are of streams only; set stream, or leave it out")
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidParameter("prompt_logprobs", "are not streamed; leave out stream or this")
        fields = {"n": self.n, "stop": self.stop, "logit_bias": _logit_bias(self.logit_bias)}
        return super().sampling_params(**{**fields, "prompt_logprobs": self.prompt_logprobs, **others})

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def counts_each_chunk(self) -> bool:
        return self.includes_usage and self.stream_options is not None and self.stream_options.continuous_usage_stats


class CompletionRequest(Choices):
    structured_outputs: dict[str, Any] | None = None
    prompt: str | Items[str] | Items[int] | Items[Items[int]]
    max_tokens: int | None = 16  # OpenAI's default
    logprobs: int | None = None
    echo: bool = False
    best_of: int | None = None
    add_special_tokens: bool = True
    suffix: Annotated[str, Field(max_length=0)] | None = None  # text behind the answer: models here only go on

    def prompts(self) -> list[str] | list[list[int]]:
        prompt: Any = self.prompt
        each = [prompt] if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)) else prompt
        if not 1 <= len(each) <= MAX_BATCH:
            raise InvalidParameter("prompt", f"must be 1 to {MAX_BATCH} prompts, got {len(each)}")
        return list(each)

    def to_params(self) -> SamplingParams:
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise InvalidParameter("best_of", "ranking answers is not supported; leave it out, or set it to n")
        more: dict[str, Any] = {}
        if self.echo and self.logprobs is not None:  # the prompt's tokens have them too
            if self.stream:
                raise InvalidParameter(
                    "echo", "log-probabilities of the prompt are not streamed; leave one of them out"
                )
            more = {"prompt_logprobs": max(self.logprobs, self.prompt_logprobs or 0)}
        formed = {"structured_outputs": self.structured_outputs}
        return self.sampling_params(max_tokens=self.max_tokens, logprobs=self.logprobs, **formed, **more)


STRUCTURED = "structured_outputs"
# A client's own template would run on the server; the other variables have fields of their own.
_NO_VARIABLES = ("chat_template", "messages", "tools", "self")


class ContentPart(Body):
    type: str
    text: str | None = None


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


class FunctionCall(Body):
    name: str
    arguments: str


class ToolCall(Body):
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None


class FunctionName(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"]
    function: FunctionName


class Message(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)  # templates may read fields of their own

    role: str
    content: str | Items[ContentPart] | None = None
    name: str | None = None
    tool_calls: Items[ToolCall] | None = None
    tool_call_id: str | None = None


class ChatRequest(Choices):
    messages: Annotated[Items[Message], Field(min_length=1)]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: Items[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None  # vLLM's name, and its fields
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Effort | None = None

    def to_params(self, style: Style = "hermes") -> SamplingParams:
        """Return the sampling parameters. `style`: the form in which the model writes a forced call."""
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise InvalidParameter("max_completion_tokens", "contradicts max_tokens; give one of them")
        if self.top_logprobs and not self.logprobs:
            raise InvalidParameter("top_logprobs", "needs logprobs true")
        return self.sampling_params(
            max_tokens=self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            structured_outputs=self._format(style),
        )

    def _format(self, style: Style) -> dict[str, Any] | None:
        if self.forces_call:
            for name in ("structured_outputs", "response_format"):
                if getattr(self, name) not in (None, {"type": "text"}):
                    raise InvalidParameter(name, "contradicts tool_choice: the answer is a call; give one of them")
            return {"structural_tag": forced_calls(self._functions(), style, single=self.max_calls == 1)}
        if self.response_format is None or self.response_format.get("type") == "text":
            return self.structured_outputs
        if self.structured_outputs is not None:
            raise InvalidParameter("structured_outputs", "contradicts response_format; give one of them")
        kind = self.response_format.get("type")
        if kind == "json_object":
            return {"json_object": True}
        if kind != "json_schema":
            raise InvalidParameter("response_format", f"type {kind!r} is not text, json_object or json_schema")
        wrapped = self.response_format.get("json_schema")
        schema = wrapped.get("schema") if isinstance(wrapped, dict) else None
        if not isinstance(schema, dict):
            raise InvalidParameter("response_format", "json_schema needs a schema, which is an object")
        return {"json": schema}

    @property
    def grammar_names(self) -> dict[str, str]:
        """Return the name of the field that asked for a grammar, for the errors of that grammar."""
        asker = "tools" if self.forces_call else "response_format"
        return {} if self.structured_outputs is not None else {STRUCTURED: asker}

    @property
    def offered_tools(self) -> list[dict[str, Any]]:
        """Return the tools that the model may call; the chat template shows them."""
        for at, tool in enumerate(self.tools or ()):
            function = tool.get("function")
            name = function.get("name") if isinstance(function, dict) else None
            if tool.get("type") != "function" or not isinstance(name, str) or not name:
                raise InvalidParameter(f"tools.{at}", 'must be {"type": "function", "function": {"name": ...}}')
        return [] if self.tool_choice == "none" else self.tools or []

    @property
    def forces_call(self) -> bool:
        return self.tool_choice == "required" or self.names_function

    @property
    def names_function(self) -> bool:
        return isinstance(self.tool_choice, NamedTool)

    @property
    def max_calls(self) -> int | None:
        """Return the maximum of tool calls in one answer; None: any number."""
        return 1 if self.parallel_tool_calls is False or self.names_function else None

    def _functions(self) -> dict[str, dict[str, Any]]:
        """Return the functions that a forced call may name, each with the schema of its parameters."""
        functions: dict[str, dict[str, Any]] = {}
        for at, tool in enumerate(self.offered_tools):
            name, schema = tool["function"]["name"], tool["function"].get("parameters")
            if name in functions:
                raise InvalidParameter(f"tools.{at}", f"has the name of another tool, {short_repr(name)}")
            if schema is None:
                schema = {"type": "object", "properties": {}}
            if not isinstance(schema, dict) or schema.get("type", "object") != "object":
                raise InvalidParameter(f"tools.{at}.function.parameters", "must be the JSON schema of an object")
            functions[name] = {"type": "object"} | schema
        if isinstance(self.tool_choice, NamedTool):
            name = self.tool_choice.function.name
            if name not in functions:
                known = ", ".join(map(short_repr, functions)) or "none"
                raise InvalidParameter("tool_choice", f"{short_repr(name)} is not among the tools; there are: {known}")
            return {name: functions[name]}
        if not functions:
            raise InvalidParameter("tool_choice", "a call is required, but no tools are given")
        return functions

    def template_variables(self) -> dict[str, Any]:
        variables = dict(self.chat_template_kwargs or {})
        for name in _NO_VARIABLES:
            if name in variables:
                raise InvalidParameter("chat_template_kwargs", f"{name} is no variable that a request may set")
        if self.offered_tools:
            variables["tools"] = self.offered_tools
        return variables

    def conversation(self) -> list[dict[str, Any]]:
        """Return the messages as templates take them: content is text, a call's arguments are an object."""
        return [plain_message(message) for message in self.messages]


class TokenizeRequest(Whole):
    model: str | None = None
    prompt: str | None = None
    messages: Items[Message] | None = None
    add_special_tokens: bool = True


class DetokenizeRequest(Whole):
    model: str | None = None
    tokens: Items[int]


class ReloadRequest(Body):
    drafter: Annotated[str, Field(min_length=1)]  # a folder, or another value of --drafter


def plain_message(message: Message) -> dict[str, Any]:
    plain = message.model_dump(exclude_none=True)
    if isinstance(message.content, list):
        for part in message.content:
            if part.type not in ("text", "input_text", "output_text") or part.text is None:
                raise InvalidParameter("messages", f"content of type {part.type!r} is not supported; text is")
        plain["content"] = "\n".join(part.text or "" for part in message.content)  # LLM.chat and vLLM do the same
    plain.setdefault("content", "")
    if isinstance(thought := plain.pop("reasoning", None), str):  # the newer name
        plain.setdefault("reasoning_content", thought)
    for call in plain.get("tool_calls", ()):
        try:
            call["function"]["arguments"] = json.loads(call["function"]["arguments"] or "{}")
        except ValueError:
            raise InvalidParameter("messages", "the arguments of a tool call are not valid JSON") from None
    return plain


def _check_size(wanted: Any) -> None:
    """Refuse schemas too long or too nested: compile time grows faster than size."""
    text, level, deep = str(wanted) if wanted else "", [wanted], 0
    if len(text) > MAX_GRAMMAR:
        raise InvalidParameter("structured_outputs", f"has more than {MAX_GRAMMAR} characters")
    while level:
        deep += 1
        if deep > MAX_NESTING:
            raise InvalidParameter("structured_outputs", f"is nested more than {MAX_NESTING} deep")
        parts = [each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list)]
        level = [part for each in parts for part in each]


def _logit_bias(bias: Mapping[str, float] | None) -> dict[int, float] | None:
    if bias is None:
        return None
    try:
        return {int(token): value for token, value in bias.items()}
    except ValueError:
        raise InvalidParameter("logit_bias", "must map token ids to numbers between -100 and 100") from None
