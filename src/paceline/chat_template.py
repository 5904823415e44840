"""Renders a model's chat template: jinja2 in a sandbox, set up as transformers does, without importing transformers."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from paceline.errors import PacelineError

TURNS = "_turns"  # the variable that counts
MOST_TURNS = 1_000_000  # of all loops of one rendering: a second or two, and far more than any conversation needs
Messages = Sequence[Mapping[str, Any]]


class ChatTemplate:
    """One compiled template. Templates come with the model, so they get plain data only and run in a sandbox."""

    def __init__(self, source: str) -> None:
        try:
            environment = _environment()
            tree = environment.parse(source)
            for loop in tree.find_all(nodes.For):
                loop.iter = nodes.Filter(loop.iter, "counted", [], [], None, None, lineno=loop.lineno)
            self._template = environment.from_string(tree)
        except (jinja2.TemplateError, RecursionError) as error:
            raise PacelineError(f"the model's chat template is invalid: {error}") from error

    def render(self, messages: Messages, **variables: Any) -> str:
        try:
            return self._template.render(
                {**_plain(variables), "messages": _plain(list(messages)), TURNS: itertools.count(1)}
            )
        except RecursionError as error:
            raise PacelineError("the model's chat template does not end: it calls itself") from error
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            raise PacelineError(f"the model's chat template refused the messages: {error}") from error


class _Generation(Extension):
    """`{% generation %} ... {% endgeneration %}` marks the assistant's text for training; here it has no effect."""

    tags = {"generation"}  # noqa: RUF012  (declared so by jinja2)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


@jinja2.pass_context
def _counted(context: Context, items: Iterable[Any]) -> Iterator[Any]:
    """What a loop goes through; all loops of a rendering share one count."""
    turns = context[TURNS]
    for item in items:
        if next(turns) > MOST_TURNS:
            raise jinja2.TemplateError(f"its loops do not end within {MOST_TURNS:,} turns")
        yield item


class _Sandbox(ImmutableSandboxedEnvironment):
    """Powers are refused: 9**9**9 takes for ever, and no chat needs them."""

    intercepted_binops = frozenset({"**"})

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        raise jinja2.TemplateError(f"the operator {operator} is not available")


def _environment() -> ImmutableSandboxedEnvironment:
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.filters["counted"] = _counted
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
    """jinja2's own filter escapes HTML, which no model was trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _plain(value: Any) -> Any:
    """The same data in plain JSON types: a template must not reach the methods of a caller's objects."""
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
