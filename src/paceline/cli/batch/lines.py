"""The lines of a file of prompts, and the form of their answers.

A line is as `paceline bench` takes it (`prompt`, `messages` or `turns`; or plain text), or one of OpenAI's batch
requests (`custom_id`, `method`, `url`, `body`), which is answered in OpenAI's form. All lines are read and checked
before the first is asked.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.bench.prompts import UNNAMED, Prompt, read_json, read_text
from paceline.cli.output import choice_object, error_object
from paceline.errors import InvalidParameter, PacelineError
from paceline.files.prompt_files import numbered_lines, read_file
from paceline.outputs import CompletionOutput, RequestOutput

if TYPE_CHECKING:
    from paceline.llm import LLM
    from paceline.sampling_params import SamplingParams

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
# Fields of a request's body and the sampling parameters that they are.
RENAMED = {"max_completion_tokens": "max_tokens"}
SAMPLING = {
    *("max_tokens", "temperature", "top_p", "n", "stop", "seed", "presence_penalty", "frequency_penalty", "logit_bias"),
    *("top_k", "min_p", "repetition_penalty", "min_tokens", "stop_token_ids", "ignore_eos", "bad_words"),
}
WITHOUT_EFFECT = {"stream": (False, None), "logprobs": (False, None), "top_logprobs": (0, None)}  # at these values


def read_lines(
    path: Path, *, target: tuple[str, ...], system: str | None, raw: bool, params: SamplingParams
) -> list[RequestLine]:
    """`target`: the model's name and the options on which its output depends."""
    where, path = ("stdin", Path("/dev/stdin")) if str(path) == "-" else (str(path), path)
    text, jsonl = read_file(path, "prompts")
    lines: list[RequestLine] = []
    for number, line in numbered_lines(text):
        origin = f"line {number} of {where}"
        fields = _object(line) if jsonl else {}
        if "custom_id" in fields and "body" in fields:
            _refuse(system is not None, "system", f"{origin} has its own messages")
            _refuse(raw, "raw", f"{origin} says by its url whether the chat template is used")
            _refuse(params.logprobs is not None, "logprobs", f"{origin} is answered without them")
            lines.append(_read_batch_line(fields, origin, target, params))
        else:
            prompt = (read_json if jsonl else read_text)(line, origin, UNNAMED)
            lines.append(_read_prompt_line(prompt, number, fields.get("id"), target, system, raw, params))
    if not lines:
        raise InvalidParameter("prompts", f"{where} is empty; give it at least one prompt")
    names: set[str] = set()
    for each in lines:
        if each.id in names:
            raise InvalidParameter("prompts", f"a custom_id occurs twice in {where}; give every line its own")
        names.add(each.id)
    return lines


def _object(line: str) -> dict[str, Any]:
    """Return the line's fields; none for anything but an object, which the reader of prompts refuses."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _refuse(wrong: bool, flag: str, why: str) -> None:
    if wrong:
        raise InvalidParameter(flag, f"{why}; leave --{flag} out")


def _name(*parts: object) -> str:
    """Return a digest of all that the answer depends on, and of what distinguishes the line."""
    return hashlib.blake2b(json.dumps([*map(repr, parts)]).encode(), digest_size=8).hexdigest()


def _usage(output: RequestOutput) -> dict[str, int]:
    completion = sum(len(answer.token_ids) for answer in output.outputs)
    return {"prompt_tokens": len(output.prompt_token_ids), "completion_tokens": completion}


# -- prompts in the forms of bench


@dataclass(frozen=True)
class PromptLine:
    id: str  # a digest of the line, the request and its settings: equal in every run, different for every line
    number: int
    prompt_id: Any  # the line's own "id", handed on
    prompt: Prompt
    system: str | None
    raw: bool
    params: SamplingParams

    def ask(self, llm: LLM) -> list[RequestOutput]:
        """Answer turn by turn; a turn sees the first answer to each turn before it."""
        if self.raw:
            return llm.generate(self.prompt.turns[0], self.params)
        first = [] if self.system is None else [{"role": "system", "content": self.system}]
        outputs: list[RequestOutput] = []
        for _ in self.prompt.turns:
            answers = [output.outputs[0].text for output in outputs]
            outputs += llm.chat([*first, *self.prompt.messages(answers)], self.params)
        return outputs

    def result(self, model: str, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        turns = [
            {
                "choices": [choice_object(answer, self.params.logprobs) for answer in output.outputs],
                "usage": _usage(output),
            }
            for output in outputs
        ]
        return self._line | (turns[0] if len(turns) == 1 else {"turns": turns})

    def failure(self, error: PacelineError) -> dict[str, Any]:
        return self._line | {"error": error_object(error)}

    @property
    def _line(self) -> dict[str, Any]:
        own = {} if self.prompt_id is None else {"prompt_id": self.prompt_id}
        return {"id": self.id, "line": self.number, **own}


def _read_prompt_line(
    prompt: Prompt,
    number: int,
    prompt_id: Any,
    target: tuple[str, ...],
    system: str | None,
    raw: bool,
    params: SamplingParams,
) -> PromptLine:
    _refuse(raw and bool(prompt.before or len(prompt.turns) > 1), "raw", f"{prompt.origin} needs the chat template")
    own_system = any(message["role"] == "system" for message in prompt.before)
    _refuse(system is not None and own_system, "system", f"{prompt.origin} has a system message")
    name = _name(number, target, prompt.before, prompt.turns, system, raw, params)
    return PromptLine(name, number, prompt_id, prompt, system, raw, params)


# -- OpenAI's batch requests


@dataclass(frozen=True)
class BatchLine:
    id: str  # same form as a PromptLine's
    custom_id: str
    url: str
    content: Any  # messages, or the prompt
    params: SamplingParams

    def ask(self, llm: LLM) -> list[RequestOutput]:
        return (llm.chat if self.url == CHAT else llm.generate)(self.content, self.params)

    def result(self, model: str, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        [output] = outputs
        usage, is_chat = _usage(output), self.url == CHAT
        body = {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{self.id}",
            "object": "chat.completion" if is_chat else "text_completion",
            "created": int(time.time()),
            "model": model,
            "choices": [self._choice(answer) for answer in output.outputs],
            "usage": usage | {"total_tokens": sum(usage.values())},
        }
        return self._line(200, body, None)

    def _choice(self, answer: CompletionOutput) -> dict[str, Any]:
        says = {"message": {"role": "assistant", "content": answer.text}} if self.url == CHAT else {"text": answer.text}
        return {"index": answer.index, **says, "logprobs": None, "finish_reason": answer.finish_reason}

    def failure(self, error: PacelineError) -> dict[str, Any]:
        problem = error_object(error)
        return self._line(400, {"error": problem}, {"code": problem["type"], "message": problem["message"]})

    def _line(self, status: int, body: dict[str, Any], error: dict[str, Any] | None) -> dict[str, Any]:
        response = {"status_code": status, "request_id": self.id, "body": body}
        return {"id": self.id, "custom_id": self.custom_id, "response": response, "error": error}


def _read_batch_line(
    request: Mapping[str, Any], origin: str, target: tuple[str, ...], params: SamplingParams
) -> BatchLine:
    model = target[0]
    custom_id, url, body = request["custom_id"], request.get("url"), request["body"]
    if not isinstance(custom_id, str) or not custom_id.isprintable():
        raise InvalidParameter("prompts", f"{origin}: custom_id must be some text, got {custom_id!r}")
    if request.get("method", "POST") != "POST" or url not in (CHAT, COMPLETION):
        raise InvalidParameter("prompts", f"{origin}: only POST to {CHAT} or {COMPLETION} is answered here")
    if not isinstance(body, dict):
        raise InvalidParameter("prompts", f"{origin}: body must be an object")
    if body.get("model", model) != model:
        problem = f"{origin} asks for model {body['model']!r} and this run is of {model!r}"
        raise InvalidParameter("prompts", f"{problem}; give that one with --model, or leave it out of the line")
    field = "messages" if url == CHAT else "prompt"
    content = body.get(field)
    items = content if isinstance(content, list) else ()
    text = url == COMPLETION and isinstance(content, str)
    if not content or not (text or (items and all(isinstance(each, dict if url == CHAT else int) for each in items))):
        form = "a list of messages" if url == CHAT else "one text, or its token ids"
        raise InvalidParameter("prompts", f"{origin}: body needs {field}: {form}")
    own = _sampling(body, field, origin, params)
    return BatchLine(_name(custom_id, target, url, content, own), custom_id, url, content, own)


def _sampling(body: Mapping[str, Any], field: str, origin: str, params: SamplingParams) -> SamplingParams:
    """Return the line's own parameters over those of the command line."""
    values: dict[str, Any] = {}
    for key, value in body.items():
        name = RENAMED.get(key, key)
        if name in SAMPLING and value is not None:
            values[name] = value
        elif name not in SAMPLING and key not in ("model", "user", field) and value not in WITHOUT_EFFECT.get(key, ()):
            raise InvalidParameter("prompts", f"{origin}: {key} is not honoured here; leave it out")
    try:
        if isinstance(bias := values.get("logit_bias"), dict):  # JSON's keys are text
            values["logit_bias"] = {int(token): value for token, value in bias.items()}
        return replace(params, **values)
    except (InvalidParameter, ValueError) as error:
        raise InvalidParameter("prompts", f"{origin}: {error}") from None


RequestLine = PromptLine | BatchLine
