"""Tool calls in a model's text: found as it streams, in the two styles that open models are trained on.

hermes: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of them, text around them (Hermes, Qwen,
SmolLM2, many others). llama: the whole answer is `{"name": ..., "parameters": {...}}`, after `<|python_tag|>` or alone.
What turns out not to be a call is text, unchanged. The arguments' JSON is exactly the model's, not written anew.
"""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass, field
from typing import Any

OPEN, CLOSE = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"


@dataclass(frozen=True)
class Call:
    name: str
    arguments: str  # JSON, as the model wrote it
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}")

    def as_dict(self, index: int | None = None) -> dict[str, Any]:
        call = {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}
        return call if index is None else {"index": index, **call}


class ToolParser:
    """One answer's text, piece by piece. Text that may be the beginning of a call is held back."""

    def __init__(self) -> None:
        self._held = ""
        self._shown = False  # some text was handed out: a bare JSON object is no call any more
        self.calls: list[Call] = []

    def push(self, piece: str) -> tuple[str, list[Call]]:
        """Text that is certainly no call, and calls that are complete."""
        self._held += piece
        text, calls = "", []
        while True:
            start = self._held.find(OPEN)
            if start >= 0:
                end = self._held.find(CLOSE, start)
                if end < 0:
                    text += self._take(start)
                    break
                call = read_call(self._held[start + len(OPEN) : end])
                text += self._take(start if call else end + len(CLOSE))
                if call:
                    calls.append(call)
                    self._held = self._held[end - start + len(CLOSE) :]
            else:
                text += self._take(self._certain())
                break
        self.calls += calls
        return text, calls

    def finish(self) -> tuple[str, list[Call]]:
        """The answer is over: what is held back is a bare call, or text."""
        body, self._held = self._held, ""
        call = None if self._shown or self.calls else read_call(body.strip().removeprefix(PYTHON_TAG))
        if call is None and body.startswith(OPEN):
            call = read_call(body.removeprefix(OPEN))  # a call whose closing tag is the end of the answer
        if call is None:
            return body, []
        self.calls.append(call)
        return "", [call]

    def _take(self, length: int) -> str:
        text, self._held = self._held[:length], self._held[length:]
        self._shown = self._shown or bool(text.strip())
        return text

    def _certain(self) -> int:
        """Characters of what is held back that can be shown."""
        if not self._shown and not self.calls:
            body = self._held.lstrip()
            if not body or body.startswith(("{", PYTHON_TAG)) or PYTHON_TAG.startswith(body):
                return 0
        for length in range(min(len(OPEN) - 1, len(self._held)), 0, -1):
            if OPEN.startswith(self._held[-length:]):
                return len(self._held) - length
        return len(self._held)


def read_call(text: str) -> Call | None:
    """A call, if the text is one JSON object with a name and arguments."""
    text = text.strip()
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    key = next((key for key in ("arguments", "parameters") if key in value), None)
    if key is None:
        return Call(value["name"], "{}")
    arguments = value[key]
    return Call(value["name"], arguments if isinstance(arguments, str) else _source(text, key, arguments))


def _source(text: str, key: str, value: Any) -> str:
    """The JSON of a member of an object, as it is written there."""
    decoder, at = json.JSONDecoder(), text.index("{") + 1
    while True:
        at += len(text[at:]) - len(text[at:].lstrip(", \t\r\n"))
        name, at = decoder.raw_decode(text, at)
        at = text.index(":", at) + 1
        at += len(text[at:]) - len(text[at:].lstrip())
        found, end = decoder.raw_decode(text, at)
        if name == key and found == value:
            return text[at:end]
        at = end
