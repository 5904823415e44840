"""The user's training data: a jsonl of chats or prompts, or plain text.

A line is one of
    {"messages": [{"role", "content"}, ...]}      a chat; every assistant message in it is learnt
    {"conversations": [{"from", "value"}, ...]}   a chat in ShareGPT's words
    {"prompt": text, "response": text}            one exchange; without a response it has to be answered (--regenerate)
    {"turns": [text, ...]}                        the user's turns alone, as in a prompt file of `bench`
    {"text": text}                                a text without roles, learnt whole
A file that is not jsonl is plain text: paragraphs, learnt whole.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import InvalidParameter, PacelineError
from paceline.files.prompt_files import numbered_lines, read_file, read_object, some_text, without_torn_line
from paceline.text.tokenizer import Tokenizer

Message = Mapping[str, str]
ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
FORMS = ("messages", "conversations", "prompt", "turns", "text")


@dataclass(frozen=True)
class Example:
    """A chat (`messages`) or a `text`."""

    messages: tuple[Message, ...]
    text: str
    origin: str  # for error messages

    @property
    def answered(self) -> bool:
        return bool(self.text) or any(message["role"] == "assistant" for message in self.messages)

    @property
    def prompts(self) -> list[Message]:
        """Return the system message and the user's turns."""
        return [message for message in self.messages if message["role"] != "assistant"]


def read_examples(path: Path) -> list[Example]:
    content, jsonl = read_file(path, "data")
    if jsonl:
        lines = numbered_lines(without_torn_line(path, content))
        examples = [_example(line, f"line {number} of {path}") for number, line in lines]
    else:
        parts = [part.strip() for part in re.split(r"\n\s*\n", content)]
        examples = [Example((), part, f"{path}") for part in parts if part]
    if not examples:
        raise InvalidParameter("data", f"{path} is empty")
    return examples


def _example(line: str, origin: str) -> Example:
    form, fields = read_object(line, FORMS, "data", origin)
    value = fields[form]
    if form == "text":
        return Example((), some_text(value, "text", "data", origin), origin)
    if form == "prompt":
        messages = [_message("user", value, origin)]
        if "response" in fields:
            messages.append(_message("assistant", fields["response"], origin))
        return Example(tuple(messages), "", origin)
    if not isinstance(value, list) or not value:
        raise InvalidParameter("data", f"{origin}: {form} must be a list with at least one entry")
    if form == "turns":
        return Example(tuple(_message("user", turn, origin) for turn in value), "", origin)
    role, content = ("role", "content") if form == "messages" else ("from", "value")
    if not all(isinstance(one, dict) for one in value):
        raise InvalidParameter("data", f"{origin}: a message is an object with {role} and {content}")
    chat = tuple(_message(one.get(role), one.get(content), origin) for one in value)
    if next((one["role"] for one in chat if one["role"] != "system"), "") == "assistant":
        raise InvalidParameter("data", f"{origin}: the chat begins with the assistant; leave that message out")
    return Example(chat, "", origin)


def _message(role: Any, content: Any, origin: str) -> Message:
    if not isinstance(role, str) or role not in ROLES:
        raise InvalidParameter("data", f"{origin}: the role {role!r} is not one of {', '.join(ROLES)}")
    return {"role": ROLES[role], "content": some_text(content, "content", "data", origin)}


def encoded(example: Example, tokenizer: Tokenizer, eos: tuple[int, ...]) -> list[tuple[list[int], list[bool]]]:
    """Return the sequences of an answered example: tokens, and which of them the model is to write.

    Prompts end where generation begins, and each piece is encoded by itself, so an engine would see these tokens.
    """
    if example.text:
        tokens = tokenizer.encode(example.text)
        return [(tokens, [True] * len(tokens))]
    tokens, answer, done = [], [], ""
    for i, message in enumerate(example.messages):
        if message["role"] != "assistant":
            continue
        try:
            before = tokenizer.render_chat(example.messages[:i])
            whole = tokenizer.render_chat(example.messages[: i + 1], add_generation_prompt=False)
        except PacelineError as error:
            raise InvalidParameter("data", f"{example.origin}: {error}") from error
        if not (before.startswith(done) and whole.startswith(before)):
            raise PacelineError(
                f"{example.origin}: the model's chat template rewrites earlier messages, so its answers cannot be "
                "marked; use --regenerate, which trains on one answer at a time"
            )
        prompt = tokenizer.encode(before[len(done) :], add_special_tokens=False)
        written = tokenizer.encode(whole[len(before) :], add_special_tokens=False)
        end = next((at + 1 for at, token in enumerate(written) if token in eos), len(written))
        tokens += [*prompt, *written]
        answer += [*[False] * len(prompt), *[True] * end, *[False] * (len(written) - end)]
        done = whole
    return [(tokens, answer)]
