"""The process that reads long bodies: JSON, checks, chat template and tokenizer, without torch. What a client sends
holds up this process alone.

Started by `body_process`; the number of its socket is the only argument. The first message has the settings, each later
one a job: the route and the body. The answer is either the response, or the prompts and the rest of the body.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from array import array
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from pydantic import ValidationError

from paceline.errors import InvalidParameter, PacelineError, RequestFailed
from paceline.platform.garbage import trim_heap
from paceline.server.api.anthropic import MessagesRequest
from paceline.server.api.ollama import OllamaChatRequest, OllamaGenerateRequest
from paceline.server.api.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest, Whole
from paceline.server.api.responses import ResponseRequest
from paceline.server.bodies.body_prompts import BodyPrompts, ChatForm, check_model
from paceline.server.errors import body_of, from_validation, in_form_of, status_of
from paceline.server.process.channel import Channel
from paceline.text.template_process import bound_memory, cpu_limit
from paceline.text.tokenizer import Tokenizer

ROUTES: dict[str, type[Whole]] = {
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/v1/responses": ResponseRequest,
    "/v1/messages": MessagesRequest,
    "/api/chat": OllamaChatRequest,
    "/api/generate": OllamaGenerateRequest,
}
MOST_REST = 1 << 19  # bytes of JSON beside prompt, messages, tools and texts: far more than any list of tokens needs
NICENESS = 5  # steps of the engine come first: a quarter of a core is left where they need all
ENDING = 100  # characters of a prompt that tell whether the answer begins with a thought
TEXT = "text"  # in place of what has become tokens


class BodySettings(NamedTuple):
    path: str  # of the model
    names: list[str]  # of the model
    vocab_size: int
    max_model_len: int
    keeps_text: bool  # conversations are captured
    cpu_s: float  # processor seconds of one body
    max_bytes: int  # of the process's address space


class BodyAnswer(NamedTuple):
    status: int  # 0: `body` is the rest of the request's body, and `prompts` has its prompts
    body: bytes
    prompts: list[tuple[str, bytes]] = []  # noqa: RUF012  (the end of the text, and token ids of 4 bytes each)
    conversation: bytes = b""  # JSON, where it is to be captured


def answered(reader: BodyPrompts, settings: BodySettings, route: str, raw: bytes) -> BodyAnswer:
    try:
        given = _parsed(raw)
        body = ROUTES[route].model_validate(given)
        if isinstance(body, TokenizeRequest | DetokenizeRequest):
            check_model(body.model, settings.names)
            asked = reader.tokenized(body) if isinstance(body, TokenizeRequest) else reader.detokenized(body)
            return BodyAnswer(200, msgspec.json.encode(asked))
        read = reader.prompts(body)
        prompts = [((prompt.text or "")[-ENDING:], array("i", prompt.tokens).tobytes()) for prompt in read]
        conversation = b""
        chat = body.chat() if isinstance(body, ChatForm) else body
        if settings.keeps_text and isinstance(chat, ChatRequest):
            conversation = msgspec.json.encode(chat.conversation())
        return BodyAnswer(0, _rest(given, body), prompts, conversation)
    except ValidationError as problem:
        error: PacelineError = from_validation(problem)
    except (RecursionError, MemoryError):
        error = InvalidParameter("body", "is nested too deep, or needs too much memory")
    except PacelineError as problem:
        error = problem
    except Exception as problem:  # a fault of ours, which must not end the process
        error = RequestFailed(f"the server failed at this request: {type(problem).__name__}")
    return BodyAnswer(status_of(error), msgspec.json.encode(in_form_of(route, body_of(error))))


def _parsed(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except ValueError as error:
        raise InvalidParameter("body", f"is not valid JSON: {getattr(error, 'msg', error)}") from None


def _rest(given: dict[str, Any], body: Whole) -> bytes:
    """Return the body without what has become tokens; a shorter one of the same form."""
    rest = dict(given)
    match body:
        case CompletionRequest():
            rest["prompt"] = TEXT
        case ChatRequest():
            rest |= {"messages": [{"role": "user", "content": TEXT}], "metadata": None}
            if body.tools and not body.forces_call:
                rest["tools"] = body.tools[:1]  # that there are any is all that the answer depends on
        case ResponseRequest():
            rest["input"] = TEXT
        case MessagesRequest():
            rest |= {"messages": [{"role": "user", "content": TEXT}], "system": None, "metadata": None}
        case OllamaChatRequest():
            rest["messages"] = [{"role": "user", "content": TEXT}]
        case OllamaGenerateRequest():
            rest["prompt"] = TEXT
    size = len(json.dumps({name: value for name, value in rest.items() if not isinstance(value, str)}))
    if size > MOST_REST:
        raise InvalidParameter("body", f"has {size} bytes beside its texts; at most {MOST_REST} are read")
    return json.dumps(rest).encode()


def main() -> None:
    os.nice(NICENESS)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    message = channel.receive()
    if message is None:
        return
    settings = msgspec.json.decode(message, type=BodySettings)
    bound_memory(settings.max_bytes)
    tokenizer = Tokenizer.from_path(Path(settings.path))
    reader = BodyPrompts(tokenizer, settings.vocab_size, settings.max_model_len)
    while (message := channel.receive()) is not None:
        route, raw = msgspec.msgpack.decode(message)
        with cpu_limit(settings.cpu_s):
            answer = answered(reader, settings, route, raw)
        channel.send(msgspec.msgpack.encode(answer), wait=True)
        del message, raw, answer
        trim_heap()  # a long text takes some 100 times its size


if __name__ == "__main__":
    main()
