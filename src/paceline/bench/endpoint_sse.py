"""Server-sent events out of bytes that arrive in pieces of any size: the data of each event, in order.

Stricter than a browser: a line that is no field of the protocol means that something else is talking, and is an error
rather than skipped.
"""

from __future__ import annotations

from collections.abc import Iterator

FIELDS = ("data", "event", "id", "retry", "")  # a line that starts with a colon is a comment


class MalformedStream(ValueError):
    """`line` is what could not be understood."""

    def __init__(self, line: bytes) -> None:
        super().__init__(line.decode("utf-8", "replace"))
        self.line = str(self)


class EventReader:
    def __init__(self) -> None:
        self._rest = b""  # of a line not yet ended
        self._data: list[bytes] = []  # of an event not yet ended

    def feed(self, received: bytes) -> Iterator[str]:
        *lines, self._rest = (self._rest + received).split(b"\n")
        for line in lines:
            yield from self._line(line.removesuffix(b"\r"))

    def end(self) -> Iterator[str]:
        """What the stream's end completes: some servers leave out the last empty line."""
        yield from self._line(self._rest)
        yield from self._line(b"")

    def _line(self, line: bytes) -> Iterator[str]:
        if not line:
            if self._data:
                yield self._text(b"\n".join(self._data))
            self._data = []
            return
        name, colon, value = line.partition(b":")
        if not colon or self._text(name) not in FIELDS:
            raise MalformedStream(line)
        if name == b"data":
            self._data.append(value.removeprefix(b" "))

    def _text(self, line: bytes) -> str:
        try:
            return line.decode("utf-8")
        except UnicodeDecodeError as error:
            raise MalformedStream(line) from error
