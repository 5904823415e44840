"""Tool calls in a model's text: found as it streams, or forced, in the two styles that open models are trained on.

hermes: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of them, text around them (Hermes, Qwen,
SmolLM2, many others). llama: the whole answer is `{"name": ..., "parameters": {...}}`, after `<|python_tag|>` or alone.
Text that only began like a call stays text, unchanged. The arguments' JSON is exactly the model's.
A forced call is a grammar: the tags of the style around each function's name and the schema of its parameters.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from paceline.text.structured_outputs import WHITESPACE

Style = Literal["hermes", "llama"]
OPEN, CLOSE = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
_QUOTE = re.compile(r'(?<!\\)(?:\\\\)*"')  # the beginning or the end of a string of JSON


@dataclass(frozen=True)
class ParsedCall:
    name: str
    arguments: str  # JSON, as the model wrote it
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}")

    @property
    def values(self) -> dict[str, Any]:
        """Return the arguments as an object; what is none of its own is the one value of an object."""
        try:
            values = json.loads(self.arguments or "{}")
        except (ValueError, RecursionError):
            values = self.arguments
        return values if isinstance(values, dict) else {"arguments": values}

    def as_dict(self, index: int | None = None) -> dict[str, Any]:
        call = {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}
        return call if index is None else {"index": index, **call}


class ToolParser:
    """Tool calls in the text of one answer, which comes in pieces. A possible beginning of a call is held back."""

    def __init__(self) -> None:
        self._held = ""
        self._searched = 0  # no closing tag begins before this place of `_held`
        self._shown = False  # text was returned: a bare JSON object is no call any more
        self._after_call = False  # white space before another call, or at the end, belongs to no text
        self.calls: list[ParsedCall] = []

    def push(self, piece: str) -> tuple[str, list[ParsedCall]]:
        """Add text; return the text that is certainly no call, and the calls that are complete."""
        self._held += piece
        text, calls = "", []
        while True:
            start = self._held.find(OPEN)
            if start >= 0:
                end = self._close(start)
                if end < 0:
                    text += self._take(start)
                    break
                call = read_call(self._held[start + len(OPEN) : end])
                text += self._take(start if call else end + len(CLOSE))
                if call:
                    calls.append(call)
                    self._held, self._searched = self._held[end - start + len(CLOSE) :], 0
                    self._after_call = True
            else:
                text += self._take(self._certain())
                break
        self.calls += calls
        return text, calls

    def finish(self) -> tuple[str, list[ParsedCall]]:
        """End the answer: text that was held back is a bare call, or text."""
        body, self._held = self._held, ""
        call = None if self._shown or self.calls else read_call(body.strip().removeprefix(PYTHON_TAG))
        if call is None and body.startswith(OPEN):
            call = read_call(body.removeprefix(OPEN))  # a call whose closing tag is the end of the answer
        if call is None:
            return "" if self._after_call and not body.strip() else body, []
        self.calls.append(call)
        return "", [call]

    def _close(self, start: int) -> int:
        """Return the place of the closing tag, or -1. A tag within a string of the call's JSON does not close it."""
        end = self._held.find(CLOSE, max(start, self._searched))
        while end >= 0 and len(_QUOTE.findall(self._held, start, end)) % 2:
            self._searched = end + 1
            end = self._held.find(CLOSE, self._searched)
        return end

    def _take(self, length: int) -> str:
        text, self._held = self._held[:length], self._held[length:]
        if length:
            self._searched = 0
        if self._after_call and not text.strip():
            return ""
        self._after_call = False
        self._shown = self._shown or bool(text.strip())
        return text

    def _certain(self) -> int:
        """Return the number of held characters that can be shown."""
        if not self._shown and not self.calls:
            body = self._held.lstrip()
            if not body or body.startswith(("{", PYTHON_TAG)) or PYTHON_TAG.startswith(body):
                return 0
        if self._after_call and OPEN.startswith(self._held.lstrip()):
            return 0
        for length in range(min(len(OPEN) - 1, len(self._held)), 0, -1):
            if OPEN.startswith(self._held[-length:]):
                return len(self._held) - length
        return len(self._held)


def style_of(template: str) -> Style:
    """Return the style that a chat template shows to the model, or hermes if it shows none."""
    return "llama" if OPEN not in template and '"parameters"' in template else "hermes"


def forced_calls(functions: Mapping[str, Mapping[str, Any]], style: Style, *, single: bool) -> dict[str, Any]:
    """Return the structural tag of an answer that calls functions and has no text. `functions`: schemas of parameters
    by name; `single`: exactly one call, which llama's style always has."""
    opening, key, closing = ("", "parameters", "}") if style == "llama" else (f"{OPEN}\n", "arguments", f"}}\n{CLOSE}")
    tags = [
        {
            "type": "tag",
            "begin": f'{opening}{{"name": {json.dumps(name, ensure_ascii=False)}, "{key}": ',
            "content": {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": WHITESPACE},
            "end": closing,
        }
        for name, schema in functions.items()
    ]
    calls = {"type": "tags_with_separator", "tags": tags, "separator": "\n", "at_least_one": True}
    return {"type": "structural_tag", "format": {**calls, "stop_after_first": single or style == "llama"}}


def read_call(text: str) -> ParsedCall | None:
    """Return the call, if the text is one JSON object with a name and arguments."""
    text = text.strip()
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    key = next((key for key in ("arguments", "parameters") if key in value), None)
    if key is None:
        return ParsedCall(value["name"], "{}")
    arguments = value[key]
    return ParsedCall(value["name"], arguments if isinstance(arguments, str) else _source(text, key, arguments))


def _source(text: str, key: str, value: Any) -> str:
    """Return the JSON of a member of an object as the text spells it."""
    decoder, at = json.JSONDecoder(), text.index("{") + 1
    while True:
        at += len(text[at:]) - len(text[at:].lstrip(", \t\r\n"))
        name, at = decoder.raw_decode(text, at)
        at = text.index(":", at) + 1
        at += len(text[at:]) - len(text[at:].lstrip())
        member, end = decoder.raw_decode(text, at)
        if name == key and member == value:
            return text[at:end]
        at = end
