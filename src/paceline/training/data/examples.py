"""The user's training data: a jsonl of chats or prompts, or plain text.

A line is one of
    {"messages": [{"role", "content"}, ...]}      a chat; every assistant message in it is learnt
    {"conversations": [{"from", "value"}, ...]}   a chat in ShareGPT's words
    {"prompt": text, "response": text}            one exchange; without a response it has to be answered (--regenerate)
    {"turns": [text, ...]}                        the user's turns alone, as in a prompt file of `bench`
    {"text": text}                                a text without roles, learnt whole
A file that is not jsonl is plain text: paragraphs, learnt whole. Thoughts are learnt too: they are text between tags at
the beginning of an assistant's content, or its `reasoning_content`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import InvalidParameter, PacelineError
from paceline.files.prompt_files import numbered_lines, read_file, read_object, some_text, without_torn_line
from paceline.text.thoughts import Beginning, ThoughtTags, thought_after
from paceline.text.tokenizer import Tokenizer

Message = Mapping[str, str]
ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
THOUGHT = "reasoning_content"
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
    chat = tuple(_message(one.get(role), one.get(content), origin, one.get(THOUGHT)) for one in value)
    if next((one["role"] for one in chat if one["role"] != "system"), "") == "assistant":
        raise InvalidParameter("data", f"{origin}: the chat begins with the assistant; leave that message out")
    return Example(chat, "", origin)


def _message(role: Any, content: Any, origin: str, thought: Any = None) -> Message:
    if not isinstance(role, str) or role not in ROLES:
        raise InvalidParameter("data", f"{origin}: the role {role!r} is not one of {', '.join(ROLES)}")
    message = {"role": ROLES[role], "content": some_text(content, "content", "data", origin)}
    return message if thought is None else message | {THOUGHT: some_text(thought, THOUGHT, "data", origin)}


def encoded(example: Example, tokenizer: Tokenizer, eos: tuple[int, ...]) -> list[tuple[list[int], list[bool]]]:
    """Return the sequences of an answered example: tokens, and which of them the model is to write.

    Prompts end where generation begins, and each piece is encoded by itself, so an engine would see these tokens. Where
    the chat template leaves out the thoughts of earlier answers, each answer is a sequence of its own.
    """
    if example.text:
        tokens = tokenizer.encode(example.text)
        return [(tokens, [True] * len(tokens))]
    messages = [_with_tags(message, tokenizer.thought_tags) for message in example.messages]
    sequences: list[tuple[list[int], list[bool]]] = []
    done = None
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        try:
            before = tokenizer.render_chat(messages[:i])
            whole = tokenizer.render_chat(messages[: i + 1], add_generation_prompt=False)
        except PacelineError as error:
            raise InvalidParameter("data", f"{example.origin}: {error}") from error
        answer = _answer(before, whole, message["content"], tokenizer.thought_tags)
        goes_on = done is not None and before.startswith(done)
        if answer is None or not (goes_on or done is None or tokenizer.thought_tags):
            raise PacelineError(
                f"{example.origin}: the model's chat template rewrites earlier messages, so its answers cannot be "
                "marked; use --regenerate, which trains on one answer at a time"
            )
        if not goes_on:
            done = ""
            sequences.append(([], []))
        prompt = tokenizer.encode(before[len(done or "") :], add_special_tokens=False)
        written = tokenizer.encode(answer, add_special_tokens=False)
        end = next((at + 1 for at, token in enumerate(written) if token in eos), len(written))
        tokens, marks = sequences[-1]
        tokens += [*prompt, *written]
        marks += [*[False] * len(prompt), *[True] * end, *[False] * (len(written) - end)]
        done = before + answer
    return sequences


def _with_tags(message: Message, tags: ThoughtTags | None) -> Message:
    """Return a message whose thought, if it has one, is part of its content."""
    plain = {name: text for name, text in message.items() if name != THOUGHT}
    if tags is not None and (thought := message.get(THOUGHT)):
        plain["content"] = f"{tags.opening.rstrip()}\n{thought}\n{tags.closing}\n\n{plain['content']}"
    return plain


def _answer(before: str, whole: str, content: str, tags: ThoughtTags | None) -> str | None:
    """Return the text that the model writes behind a prompt, with its thought; None: it cannot be told. `whole`: the
    rendered conversation with the answer, in which many templates leave out the thought."""
    written = whole[len(before) :] if whole.startswith(before) else None
    if tags is None or tags.closing not in content or (written is not None and tags.closing in written):
        return written
    visible = content.rpartition(tags.closing)[2].strip()
    at = whole.rfind(visible)
    if not visible or at < 0:
        return None
    if thought_after(tags, before).start is Beginning.OPEN:
        content = content.removeprefix(tags.opening.rstrip()).lstrip()
    return content + whole[at + len(visible) :]
