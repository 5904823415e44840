"""A model's chat template, rendered in a process of its own (text/template_process): a template comes with the model,
and may take for ever, or all memory.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import select
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.errors import InvalidPrompt, PacelineError, short_repr
from paceline.text import template_process
from paceline.text.template_process import (
    ENDLESS,
    INVALID,
    RENDER,
    SETTINGS,
    TEXT,
    UNICODE,
    VARIABLES,
    read_frame,
    write_frame,
)

Messages = Sequence[Mapping[str, Any]]
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
MAX_TURNS = 1_000_000  # loops and calls of one rendering: a few seconds, far more than a conversation needs
CPU_S = 5.0  # processor seconds of one rendering
WAIT_S = 60.0  # seconds until an answer, where the machine is busy
MAX_BYTES = 1 << 30  # of the process's address space
PROGRAM = (
    template_process.__file__
)  # run as a file: `-m` would import from the current folder, which may be the model's


class ChatTemplate:
    """One template of a model, or of a caller."""

    def __init__(self, source: str) -> None:
        self.source = source

    @functools.cached_property
    def variables(self) -> frozenset[str]:
        """Return the names of the variables that it reads."""
        return frozenset(json.loads(_renderer.ask(VARIABLES, {"source": self.source})))

    def knows_role(self, role: str) -> bool:
        """Return True for the usual roles and those that the template names."""
        return role in ROLES or f"'{role}'" in self.source or f'"{role}"' in self.source

    def render(self, messages: Messages, **variables: Any) -> str:
        """Return the text of a conversation, in the format that the model was trained on."""
        try:
            known = {**_plain(variables), "messages": _plain(list(messages))}
        except (TypeError, RecursionError) as error:
            raise PacelineError(f"the model's chat template refused the messages: {error}") from error
        return _renderer.ask(RENDER, {"source": self.source, "variables": known})


class TemplateRenderer:
    """The process that renders: started at the first template, and again after one that had to be ended. Any thread may
    ask; one conversation is rendered at a time."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0  # the process that started it: a forked copy of that one starts its own
        self._lock = threading.Lock()

    def ask(self, kind: bytes, request: Mapping[str, Any]) -> str:
        try:
            body = json.dumps(request).encode()
        except (ValueError, RecursionError) as error:
            raise PacelineError(f"the model's chat template refused the messages: {error}") from error
        with self._lock:
            answer = self._round_trip(kind, body)
        if answer is None:
            raise PacelineError(
                f"the model's chat template does not end: it takes more than {CPU_S:g} s or {MAX_BYTES >> 20} MiB"
            )
        result, text = answer[0], answer[1].decode(errors=UNICODE)
        if result == TEXT:
            return text
        reason = " ".join(text.split())[:300]
        if result == ENDLESS:
            raise PacelineError(f"the model's chat template does not end: {reason}")
        if result == INVALID:
            raise PacelineError(f"the model's chat template is invalid: {reason}")
        raise PacelineError(f"the model's chat template refused the messages: {reason}")

    def _round_trip(self, kind: bytes, body: bytes) -> tuple[bytes, bytes] | None:
        """Return the answer; None: the process ended, or was ended since it took too long."""
        process = self._running()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            limits = {"turns": MAX_TURNS, "cpu_s": CPU_S, "bytes": MAX_BYTES}
            write_frame(process.stdin, SETTINGS, json.dumps(limits).encode())
            write_frame(process.stdin, kind, body)
            ready, _, _ = select.select([process.stdout], [], [], WAIT_S)
            answer = read_frame(process.stdout) if ready else None
        except BrokenPipeError:
            answer = None
        except BaseException:  # Ctrl-C: the answer that comes belongs to no request
            self.close()
            raise
        if answer is None:
            self.close()
        return answer

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._owner != os.getpid() or self._process.poll() is not None:
            self.close()
            try:
                self._process = subprocess.Popen(
                    [sys.executable, PROGRAM],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                )
            except OSError as error:
                raise PacelineError(f"the process that renders chat templates cannot be started: {error}") from error
            self._owner = os.getpid()
        return self._process

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None and self._owner == os.getpid():
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):
                    pipe.close()  # type: ignore[union-attr]


_renderer = TemplateRenderer()
atexit.register(_renderer.close)


def read_messages(messages: Any) -> list[dict[str, Any]]:
    """Return a conversation as templates take it: content is text, its parts are joined."""
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise InvalidPrompt(
            "a conversation is a list of messages such as {'role': 'user', 'content': 'Hi'}, got "
            + short_repr(messages)
        )
    if not messages:
        raise InvalidPrompt("the conversation is empty; give at least one message")
    return [_read_message(message) for message in messages]


def _read_message(message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InvalidPrompt(f"a chat message is an object with role and content, found {short_repr(message)}")
    content = message.get("content")
    if isinstance(content, list | tuple):
        content = "\n".join(_text_part(part) for part in content)
    if content is not None and not isinstance(content, str):
        raise InvalidPrompt(
            f"the content of a message is text, or a list of parts of type text, got {short_repr(content)}"
        )
    return {**message, "content": content} if "content" in message else dict(message)


def _text_part(part: Any) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise InvalidPrompt(f"a part of a message's content is {{'type': 'text', 'text': ...}}, got {short_repr(part)}")
    if part.get("type") != "text" or not isinstance(part.get("text"), str):
        raise InvalidPrompt(
            f"models read text here: a content part of type {short_repr(part.get('type'))} is not there"
        )
    return str(part["text"])


def open_ended(text: str, last: Mapping[str, Any]) -> str:
    """Cut a rendered conversation off behind the content of its last message, for the model to continue it.

    Many templates trim content, so white space at its end is kept only where the template kept it.
    """
    content = str(last.get("content") or "")
    at = text.rfind(content.strip())
    if at < 0:
        raise PacelineError("the model's chat template does not show the last message as it is, so it has no open end")
    end = at + len(content.strip())
    tail = content[len(content.rstrip()) :]
    return text[: end + len(tail)] if tail and text.startswith(tail, end) else text[:end]


def _plain(value: Any) -> Any:
    """Return the data in plain JSON types: a template must not reach the methods of a caller's objects."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    raise TypeError(f"a value of type {type(value).__name__} cannot be shown to a template")
