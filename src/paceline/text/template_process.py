"""The process that renders chat templates: jinja2 in a sandbox that is set up as in transformers, within bounds of
work, memory and time. A template comes with a model, so it is a stranger's program: it holds up this process alone.

Started as a file by text/chat_template, so it imports nothing of the package. Frames on stdin and stdout are a letter,
the length of the body, and the body.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import signal
import struct
import sys
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from datetime import datetime
from typing import IO, Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

FRAME = struct.Struct("<cQ")
SETTINGS, VARIABLES, RENDER = b"s", b"v", b"r"  # frames to the process
TEXT, ENDLESS, REFUSED, INVALID = b"t", b"e", b"r", b"i"  # and from it
MOST_TEXT = 1 << 25  # characters of a conversation: more than any context holds
MAX_PRODUCT = 1 << 24  # characters or items of one product; the largest power
UNICODE = "surrogatepass"  # half a surrogate pair is refused where the text is encoded
_turns: ContextVar[Iterator[int]] = ContextVar("_turns")
_limits = {"turns": 1_000_000, "cpu_s": 2.0, "bytes": 1 << 30}


class EndlessTemplate(jinja2.TemplateError):
    """A template that does not end."""


class _Compiled:
    """One compiled template; it gets plain data only."""

    def __init__(self, source: str) -> None:
        environment = _environment()
        tree = environment.parse(source)
        self.variables = meta.find_undeclared_variables(tree)  # names that it reads
        for loop in tree.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, "counted", [], [], None, None, lineno=loop.lineno)
        self._template = environment.from_string(tree)

    def render(self, variables: dict[str, Any]) -> str:
        token, pieces, length = _turns.set(itertools.count(1)), [], 0
        try:
            for piece in self._template.generate(variables):
                pieces.append(piece)
                length += len(piece)
                if length > MOST_TEXT:
                    raise EndlessTemplate(f"its text has more than {MOST_TEXT:,} characters")
            return "".join(pieces)
        finally:
            _turns.reset(token)


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
    if next(_turns.get()) > _limits["turns"]:
        raise EndlessTemplate(f"its loops and calls do not end within {_limits['turns']:,} turns")


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


_compiled = functools.lru_cache(8)(_Compiled)


def _answer(kind: bytes, body: bytes) -> tuple[bytes, str]:
    """Return the kind of answer, and the text or the reason."""
    request = json.loads(body)
    with cpu_limit(_limits["cpu_s"]):
        try:
            template = _compiled(request["source"])
        except (jinja2.TemplateError, RecursionError, MemoryError, ValueError, OverflowError, SyntaxError) as error:
            return INVALID, str(error) or type(error).__name__
        if kind == VARIABLES:
            return TEXT, json.dumps(sorted(template.variables))
        try:
            return TEXT, template.render(request["variables"])
        except EndlessTemplate as error:
            return ENDLESS, str(error)
        except (RecursionError, MemoryError):
            return ENDLESS, "it calls itself, or grows, too much"
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            return REFUSED, str(error)


@contextlib.contextmanager
def cpu_limit(seconds: float) -> Iterator[None]:
    """End the process where the block takes too much processor time, also within one call of C."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def bound_memory(size: int) -> None:
    """Bound the address space of this process."""
    with contextlib.suppress(ImportError, ValueError, OSError):  # not on every system
        import resource

        most = resource.getrlimit(resource.RLIMIT_AS)[1]
        resource.setrlimit(resource.RLIMIT_AS, (size if most == resource.RLIM_INFINITY else min(size, most), most))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def read_frame(stream: IO[bytes]) -> tuple[bytes, bytes] | None:
    head = stream.read(FRAME.size)
    if len(head) < FRAME.size:
        return None
    kind, length = FRAME.unpack(head)
    body = stream.read(length)
    return (kind, body) if len(body) == length else None


def write_frame(stream: IO[bytes], kind: bytes, body: bytes) -> None:
    stream.write(FRAME.pack(kind, len(body)) + body)
    stream.flush()


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that waits
    while (frame := read_frame(sys.stdin.buffer)) is not None:
        kind, body = frame
        if kind == SETTINGS:
            _limits.update(json.loads(body))
            bound_memory(int(_limits["bytes"]))
            continue
        answer, text = _answer(kind, body)
        write_frame(sys.stdout.buffer, answer, text.encode(errors=UNICODE))


if __name__ == "__main__":
    main()
