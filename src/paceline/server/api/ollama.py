"""/api/chat and /api/generate: requests and answers in Ollama's form, over chat. Streams are lines of JSON."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Iterator
from datetime import datetime, timezone
from typing import Annotated, Any

from pydantic import Field

from paceline.errors import InvalidParameter, short_repr
from paceline.outputs import RequestOutput
from paceline.server.api.answer_parts import AnswerParser, AnswerParts, whole_parts
from paceline.server.api.as_chat import as_chat
from paceline.server.api.generation import Generation, usage
from paceline.server.api.protocol import ChatRequest, Items, Whole

Json = dict[str, Any]
# Options by their names in chat.
OPTIONS = {
    **{name: name for name in ("temperature", "top_p", "top_k", "min_p", "seed", "stop")},
    **{name: name for name in ("presence_penalty", "frequency_penalty")},
    "num_predict": "max_tokens",
    "repeat_penalty": "repetition_penalty",
}
# Options of loading a model, and those that change no token at these values. None: at any value.
IDLE_OPTIONS: dict[str, tuple[Any, ...] | None] = {
    **dict.fromkeys(("num_keep", "num_batch", "num_gpu", "main_gpu", "num_thread", "numa", "low_vram")),
    **dict.fromkeys(("use_mmap", "use_mlock", "vocab_only", "f16_kv")),
    "repeat_last_n": (-1, 64),
    "mirostat": (0,),
    "tfs_z": (1,),
    "typical_p": (1,),
    "penalize_newline": (True,),
}
NAMES = {"reasoning_effort": "think", "response_format": "format"} | {
    chat: f"options.{name}" for name, chat in OPTIONS.items()
}
FOREVER = (None, -1, "-1", "-1s", "-1m")  # values of keep_alive that a server with one model honours
WARNING = '299 paceline "keep_alive is not honoured: the model stays loaded"'
EFFORTS = {True: "medium", False: "none"}
NS = 1_000_000_000


class OllamaRequest(Whole):
    """Fields of both routes."""

    model: str
    stream: bool = True
    format: str | Json | None = None
    options: Json | None = None
    keep_alive: int | float | str | None = None
    think: bool | str | None = None

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.keep_alive in FOREVER else {"Warning": WARNING}

    def as_chat(self, **fields: Any) -> ChatRequest:
        """Return the chat request; a negative limit of tokens is none."""
        for name, value in self._asking():
            fields[OPTIONS[name]] = value
        if isinstance(limit := fields.get("max_tokens"), int) and limit < 0:
            del fields["max_tokens"]
        if self.think is not None:
            fields["reasoning_effort"] = EFFORTS[self.think] if isinstance(self.think, bool) else self.think
        schema = self.format if isinstance(self.format, dict) else None
        if schema is not None:
            fields["response_format"] = {"type": "json_schema", "json_schema": {"schema": schema}}
        elif self.format == "json":
            fields["response_format"] = {"type": "json_object"}
        elif self.format:
            raise InvalidParameter("format", f"{short_repr(self.format)} is not json or a schema")
        return as_chat({"stream": self.stream}, **fields)

    def _asking(self) -> Iterator[tuple[str, Any]]:
        for name, value in (self.options or {}).items():
            if value is None or value == []:
                continue
            if name in OPTIONS:
                yield name, value
            elif name != "num_ctx":
                idle = IDLE_OPTIONS.get(name, ())
                if idle is not None and value not in idle:
                    raise InvalidParameter(f"options.{name}", "is not supported here; leave it out")

    def check_context(self, max_len: int) -> None:
        wanted = (self.options or {}).get("num_ctx")
        if isinstance(wanted, int) and wanted > max_len:
            raise InvalidParameter(
                "options.num_ctx", f"{wanted} is more than the server's {max_len}; start it with --max-model-len"
            )


class ShowRequest(Whole):
    model: str | None = None
    name: str | None = None  # the older name
    verbose: bool | None = None


class OllamaChatRequest(OllamaRequest):
    messages: Annotated[Items[Json], Field(min_length=1)]
    tools: Items[Json] | None = None

    def chat(self) -> ChatRequest:
        messages = [_message(at, message) for at, message in enumerate(self.messages)]
        return self.as_chat(messages=messages, tools=self.tools or None)


class OllamaGenerateRequest(OllamaRequest):
    prompt: Annotated[str, Field(min_length=1)]
    system: str | None = None

    def chat(self) -> ChatRequest:
        system = [{"role": "system", "content": self.system}] if self.system else []
        return self.as_chat(messages=[*system, {"role": "user", "content": self.prompt}])


Request = OllamaChatRequest | OllamaGenerateRequest


def _message(at: int, message: Json) -> Json:
    """Return a message in chat's form: a call's arguments are text, and a result names its function."""
    if message.get("images"):
        raise InvalidParameter(f"messages.{at}.images", "are not supported; text is")
    plain: Json = {"role": message.get("role"), "content": message.get("content") or ""}
    if message.get("thinking"):
        plain["reasoning_content"] = message["thinking"]
    if name := message.get("tool_name"):
        plain |= {"name": name, "tool_call_id": name}
    if calls := message.get("tool_calls"):
        given = [each.get("function") for each in calls if isinstance(each, dict)]
        functions = [each for each in given if isinstance(each, dict)]
        if len(functions) < len(calls):
            raise InvalidParameter(
                f"messages.{at}.tool_calls", 'must hold {"function": {"name": ..., "arguments": {}}}'
            )
        plain["tool_calls"] = [
            {"type": "function", "function": {"name": each.get("name"), "arguments": _written(each.get("arguments"))}}
            for each in functions
        ]
    return plain


def _written(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments or {})


class OllamaAnswer:
    """The objects of one answer. `is_chat`: with messages, else with the text alone."""

    def __init__(self, generation: Generation, asked: OllamaRequest, chat: ChatRequest) -> None:
        self._generation, self._chat = generation, chat
        self._model, self._is_chat, self._began = asked.model, isinstance(asked, OllamaChatRequest), time.perf_counter()

    def whole(self, output: RequestOutput) -> Json:
        (answer,) = output.outputs
        return self._object(whole_parts(self._generation, answer, self._chat)) | self._ending(output)

    async def chunks(self) -> AsyncIterator[Json]:
        parser = AnswerParser(self._generation, self._chat)
        while (chunk := await self._generation.chunk()) is not None:
            parts = parser.push(chunk)
            if parts.thought or parts.text or parts.calls:
                yield self._object(parts) | {"done": False}
        assert self._generation.output is not None
        yield self._object(AnswerParts("", "", [])) | self._ending(self._generation.output)

    def _object(self, parts: AnswerParts) -> Json:
        thought = {"thinking": parts.thought} if parts.thought else {}
        made: Json = {"model": self._model, "created_at": datetime.now(timezone.utc).isoformat()}
        if not self._is_chat:
            return made | {"response": parts.text} | thought
        message: Json = {"role": "assistant", "content": parts.text} | thought
        if parts.calls:
            functions = [{"name": call.name, "arguments": call.values} for call in parts.calls]
            message["tool_calls"] = [{"function": function} for function in functions]
        return made | {"message": message}

    def _ending(self, output: RequestOutput) -> Json:
        (answer,) = output.outputs
        now, counts, metrics = time.perf_counter(), usage([self._generation]), output.metrics
        first = now if metrics is None or metrics.first_token_time is None else metrics.first_token_time
        return {
            "done": True,
            "done_reason": "length" if answer.finish_reason == "length" else "stop",
            "total_duration": round((now - self._began) * NS),
            "load_duration": 0,
            "prompt_eval_count": counts["prompt_tokens"],
            "prompt_eval_duration": round(max(first - self._began, 0) * NS),
            "eval_count": counts["completion_tokens"],
            "eval_duration": round((now - max(first, self._began)) * NS),
        }


def listed(name: str, started: float, info: Json, template: str) -> Json:
    """Return the model as /api/tags and /api/show have it."""
    at = datetime.fromtimestamp(started, timezone.utc).isoformat()
    quantisation = str(info.get("dtype"))
    details = {"format": "", "family": "", "families": None, "parameter_size": "", "quantization_level": quantisation}
    thinks = ["thinking"] if info.get("thinks") else []
    return {
        "name": name,
        "model": name,
        "modified_at": at,
        "size": 0,
        "digest": "",
        "details": details,
        "template": template,
        "modelfile": "",
        "parameters": "",
        "capabilities": ["completion", "tools", *thinks],
        "model_info": {"general.architecture": "paceline", "paceline.context_length": info.get("max_model_len")},
    }
