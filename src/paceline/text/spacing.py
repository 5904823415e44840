"""White space between the parts of a JSON text, as the text has had it so far: on one line, or indented."""

from __future__ import annotations

import copy

SPACE, QUOTE, BACKSLASH, NEWLINE = b" \t\n\r", ord('"'), ord("\\"), b"\n"
OPEN, CLOSE = b"{[", b"}]"


class Spacing:
    def __init__(self) -> None:
        self._levels: list[bytes] = []  # by open bracket, outermost first: white space before its last part
        self._unit: bytes | None = None  # indentation of a level; None: the text is on one line
        self._behind = {ord(":"): b" ", ord(","): b" "}  # white space last seen behind a character
        self._before, self._run = 0, b""  # the last character that is no white space, and the white space since
        self._in_string = self._escaped = False

    def copy(self) -> Spacing:
        other = copy.copy(self)
        other._levels, other._behind = self._levels[:], self._behind.copy()
        return other

    def read(self, text: bytes) -> None:
        """Follow the text by the bytes that it has grown by."""
        for byte in text:
            if self._in_string and byte not in NEWLINE:  # a string holds no line break
                self._in_string = byte != QUOTE or self._escaped
                self._escaped = byte == BACKSLASH and not self._escaped
                self._before = byte
            elif byte in SPACE:
                self._run += bytes((byte,))
                self._in_string = False
            else:
                self._read_part(byte)

    def _read_part(self, byte: int) -> None:
        """Follow the first character of a part, or one between parts."""
        run, before = self._run, self._before
        if before in OPEN or before in self._behind:
            self._behind[before] = run
            if NEWLINE in run and self._levels:
                self._levels[-1] = run
                if len(self._levels) == 1:
                    self._unit = run.rpartition(NEWLINE)[2]
        if byte in OPEN:
            self._levels.append(b"")
        elif byte in CLOSE and self._levels:
            self._levels.pop()
        self._in_string = byte == QUOTE
        self._before, self._run = byte, b""

    def missing(self, part: int) -> bytes:
        """Return the white space that is still to come before a part that begins with this character."""
        expected = self._expected(part)
        return expected[len(self._run) :] if expected.startswith(self._run) else b""

    def _expected(self, part: int) -> bytes:
        before, depth = self._before, len(self._levels)
        own = self._levels[-1] if self._levels else b""
        if part in CLOSE:
            return self._line(depth - 1) if NEWLINE in own else b""
        if before in OPEN:
            seen = self._behind.get(before, b"" if self._unit is None else NEWLINE)
            return self._line(depth) if NEWLINE in seen + self._run else seen
        if before == ord(",") and NEWLINE in own:
            return own
        seen = self._behind.get(before, b"")
        return b" " if NEWLINE in seen else seen

    def _line(self, depth: int) -> bytes:
        return NEWLINE + (b"  " if self._unit is None else self._unit) * depth
