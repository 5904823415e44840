"""A model's chat template, rendered by jinja2 in a sandbox that is set up as in transformers, without importing it."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from paceline.errors import InvalidPrompt, PacelineError, short_repr

Messages = Sequence[Mapping[str, Any]]
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
MAX_TURNS = 1_000_000  # loops and calls of one rendering: a few seconds, far more than a conversation needs
MAX_PRODUCT = 1 << 24  # characters or items of one product; the largest power
_turns: ContextVar[Iterator[int]] = ContextVar("_turns")


class EndlessTemplate(jinja2.TemplateError):
    """A template that does not end."""


class ChatTemplate:
    """One compiled template. Templates come with the model, so they get plain data only and run in a sandbox."""

    def __init__(self, source: str) -> None:
        environment = _environment()
        try:
            tree = environment.parse(source)
            self.variables = meta.find_undeclared_variables(tree)  # names that it reads
            for loop in tree.find_all(nodes.For):
                loop.iter = nodes.Filter(loop.iter, "counted", [], [], None, None, lineno=loop.lineno)
            self._template = environment.from_string(tree)
        except (jinja2.TemplateError, RecursionError) as error:
            raise PacelineError(f"the model's chat template is invalid: {error}") from error
        self.source = source

    def knows_role(self, role: str) -> bool:
        """Return True for the usual roles and those that the template names."""
        return role in ROLES or f"'{role}'" in self.source or f'"{role}"' in self.source

    def render(self, messages: Messages, **variables: Any) -> str:
        """Return the text of a conversation, in the format that the model was trained on."""
        token = _turns.set(itertools.count(1))
        try:
            return self._template.render(messages=_plain(list(messages)), **_plain(variables))
        except EndlessTemplate as error:
            raise PacelineError(f"the model's chat template does not end: {error}") from error
        except (RecursionError, MemoryError) as error:
            raise PacelineError(
                "the model's chat template does not end: it calls itself, or grows, too much"
            ) from error
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            raise PacelineError(f"the model's chat template refused the messages: {error}") from error
        finally:
            _turns.reset(token)


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


class _Sandbox(ImmutableSandboxedEnvironment):
    """A sandbox without endless work: only calls, loops and products can take a template unbounded time."""

    intercepted_binops = frozenset({"*", "**"})

    def call(self, context: Context, called: Any, /, *args: Any, **kwargs: Any) -> Any:
        _count_turn()
        return super().call(context, called, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        sizes = [len(side) if isinstance(side, str | list | tuple) else abs(side) for side in (left, right)]
        too_large = (
            sizes[1] * max(sizes[0], 1) > MAX_PRODUCT if operator == "*" else sizes[1] > 64 or sizes[0] > MAX_PRODUCT
        )
        if too_large and not any(isinstance(side, float) for side in (left, right)):
            raise EndlessTemplate(f"{operator} of very large values")
        return super().call_binop(context, operator, left, right)


def _count_turn() -> None:
    if next(_turns.get()) > MAX_TURNS:
        raise EndlessTemplate(f"its loops and calls do not end within {MAX_TURNS:,} turns")


def _counted(items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        _count_turn()
        yield item


class _Generation(Extension):
    """`{% generation %} ... {% endgeneration %}` marks the assistant's text for training; here it has no effect."""

    tags = {"generation"}  # noqa: RUF012  (declared so by jinja2)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _environment() -> _Sandbox:
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    environment.filters |= {"tojson": _to_json, "counted": _counted}
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON as transformers does: jinja2's own filter escapes HTML, which no model was trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


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
