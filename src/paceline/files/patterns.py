"""Regular expressions of a stranger's config, matched without backtracking: the work is bounded by the product of the
pattern's length and a power of the name's, where Python's `re` may take years.

Read are characters, `.`, classes, groups, alternatives, counts, anchors and lookaheads; other constructs are refused.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any

from paceline.errors import short_repr

MOST_PATTERN = 1_000  # characters of a pattern
MOST_NAME = 300  # characters of a name that is matched; a longer one matches nothing
MOST_DEPTH = 20  # groups within groups
MOST_REPEATS = 2  # repetitions within repetitions: each multiplies the work by the name's length
CLASSES = {"d": r"\d", "D": r"\D", "w": r"\w", "W": r"\W", "s": r"\s", "S": r"\S"}
CONTROLS = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v"}
COUNT = re.compile(r"\{(\d{0,4})(?:(,)(\d{0,4}))?\}")
Positions = frozenset[int]


class WrongPattern(ValueError):
    """A pattern that is not read; the message says why."""


@dataclass(frozen=True)
class _Part:
    """A part: `steps(text, positions)` are the positions behind it; `repeats`: repetitions nested in it."""

    steps: Callable[[str, Positions], Positions]
    repeats: int = 0


@functools.lru_cache(1024)
def compiled(pattern: str) -> Callable[[str], bool]:
    """Return the function that tells whether a pattern matches at the beginning of a name, as `re.match` does."""
    if len(pattern) > MOST_PATTERN:
        raise WrongPattern(f"it has more than {MOST_PATTERN} characters")
    part = _Reader(pattern).whole()
    return lambda name: len(name) <= MOST_NAME and bool(part.steps(name, frozenset([0])))


def _one(fits: Callable[[str], Any]) -> _Part:
    return _Part(lambda text, at: frozenset(p + 1 for p in at if p < len(text) and fits(text[p])))


def _where(holds: Callable[[str, int], Any]) -> _Part:
    return _Part(lambda text, at: frozenset(p for p in at if holds(text, p)))


def _in_order(parts: list[_Part]) -> _Part:
    def steps(text: str, at: Positions) -> Positions:
        for part in parts:
            if not at:
                break
            at = part.steps(text, at)
        return at

    return _Part(steps, max((part.repeats for part in parts), default=0))


def _any_of(parts: list[_Part]) -> _Part:
    def steps(text: str, at: Positions) -> Positions:
        return frozenset().union(*(part.steps(text, at) for part in parts))

    return parts[0] if len(parts) == 1 else _Part(steps, max(part.repeats for part in parts))


def _repeated(part: _Part, least: int, most: int | None) -> _Part:
    if (most is None or most > 1) and part.repeats >= MOST_REPEATS:
        raise WrongPattern(f"repetitions are nested more than {MOST_REPEATS} deep")

    def steps(text: str, at: Positions) -> Positions:
        found: Positions = at if least == 0 else frozenset()
        seen: set[Positions] = set()
        for times in count(1) if most is None else range(1, most + 1):
            at = part.steps(text, at)
            if times >= least:
                at -= found
                found |= at
            elif at in seen:  # an empty match, or a circle: more of the same reaches nothing else
                return steps_from(text, at)
            seen.add(at)
            if not at:
                break
        return found

    def steps_from(text: str, at: Positions) -> Positions:
        return _repeated(part, 0, None if most is None else most - least).steps(text, at)

    return _Part(steps, part.repeats + (most is None or most > 1))


class _Reader:
    def __init__(self, pattern: str) -> None:
        self._pattern, self._at = pattern, 0

    def whole(self) -> _Part:
        part = self._choice(0)
        if self._at < len(self._pattern):
            raise WrongPattern("a parenthesis is not opened")
        return part

    def _peek(self, size: int = 1) -> str:
        return self._pattern[self._at : self._at + size]

    def _choice(self, depth: int) -> _Part:
        if depth > MOST_DEPTH:
            raise WrongPattern(f"groups are nested more than {MOST_DEPTH} deep")
        parts = [self._sequence(depth)]
        while self._peek() == "|":
            self._at += 1
            parts.append(self._sequence(depth))
        return _any_of(parts)

    def _sequence(self, depth: int) -> _Part:
        parts: list[_Part] = []
        while self._peek() not in ("", "|", ")"):
            part = self._atom(depth)
            counts = self._counts()
            parts.append(part if counts is None else _repeated(part, *counts))
        return _in_order(parts)

    def _counts(self) -> tuple[int, int | None] | None:
        sign, found = self._peek(), COUNT.match(self._pattern, self._at)
        if sign in ("*", "+", "?") and sign:
            self._at += 1
            counts: tuple[int, int | None] = {"*": (0, None), "+": (1, None), "?": (0, 1)}[sign]
        elif found is not None and (found[1] or found[3]):
            self._at = found.end()
            least = int(found[1] or 0)
            counts = least, least if found[2] is None else int(found[3]) if found[3] else None
        else:
            return None
        if self._peek() == "?":  # lazy: whether there is a match does not depend on it
            self._at += 1
        if self._peek() in ("*", "+", "?") and self._peek():
            raise WrongPattern("a count follows a count")
        if counts[1] is not None and counts[0] > counts[1]:
            raise WrongPattern("a count ends before it begins")
        return counts

    def _atom(self, depth: int) -> _Part:
        sign = self._peek()
        self._at += 1
        if sign == "(":
            return self._group(depth)
        if sign == "[":
            return self._class()
        if sign == "\\":
            return self._escape()
        if sign in "*+?":
            raise WrongPattern(f"{sign} has nothing to repeat")
        if sign == ".":
            return _one(lambda char: char != "\n")
        if sign == "^":
            return _where(lambda text, p: p == 0)
        if sign == "$":
            return _where(lambda text, p: p == len(text) or text[p:] == "\n")
        return _one(lambda char: char == sign)

    def _group(self, depth: int) -> _Part:
        looks = self._peek(2) in ("?=", "?!")
        negative = self._peek(2) == "?!"
        if looks or self._peek(2) == "?:":
            self._at += 2
        elif self._peek() == "?":
            named = re.match(r"\?P<\w+>", self._pattern[self._at :])
            if named is None:
                raise WrongPattern(f"the group ({self._peek(3)} is not read")
            self._at += named.end()
        inner = self._choice(depth + 1)
        if self._peek() != ")":
            raise WrongPattern("a parenthesis is not closed")
        self._at += 1
        if not looks:
            return inner
        return _where(lambda text, p: bool(inner.steps(text, frozenset([p]))) != negative)

    def _class(self) -> _Part:
        end = self._at + (self._peek() == "^")
        end += self._pattern[end : end + 1] == "]"
        while end < len(self._pattern) and self._pattern[end] != "]":
            end += 1 + (self._pattern[end] == "\\")
        source, self._at = f"[{self._pattern[self._at : end]}]", end + 1
        if end >= len(self._pattern):
            raise WrongPattern("a class is not closed")
        return self._by_re(source)

    def _escape(self) -> _Part:
        sign = self._peek()
        self._at += 1
        if sign in CLASSES and sign:
            return self._by_re(CLASSES[sign])
        if sign in ("Z", "A"):
            return _where((lambda text, p: p == len(text)) if sign == "Z" else (lambda text, p: p == 0))
        if sign in ("b", "B"):
            edge = re.compile(rf"\{sign}")
            return _where(lambda text, p: edge.match(text, p))
        if sign in CONTROLS and sign:
            char = CONTROLS[sign]
        elif sign and not sign.isalnum():
            char = sign
        else:
            raise WrongPattern(f"\\{sign} is not read")
        return _one(lambda each: each == char)

    @staticmethod
    def _by_re(source: str) -> _Part:
        """Return a class of characters, of which `re` takes one at a time."""
        try:
            found = re.compile(source)
        except re.error as error:
            raise WrongPattern(f"{short_repr(source)}: {error}") from None
        return _one(found.fullmatch)
