"""The parts of which a request's grammar is written in the language of llguidance, and its JSON schemas.

A part without recursion and JSON is one regex, so that it is matched exactly. Other parts are rules, and the terminals
of rules are matched greedily, as in Lark.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from paceline.text.structured_outputs import ONE_LINE, WHITESPACE

Json = dict[str, Any]
ANY_TEXT = r"(?s:.*)"
MOST_MULTIPLES = 10_000  # sum of a schema's `multipleOf`, in units of its last digit; compiled in 30 ms, quadratic
MOST_DEPTH = 64  # levels of tags within tags, and of parentheses
# Keywords of a schema whose value is a schema, a list of schemas, or an object of schemas by name.
ONE, LISTS = (
    ("items", "additionalProperties", "not", "if", "then", "else", "contains"),
    ("anyOf", "oneOf", "prefixItems"),
)
NAMED = ("properties", "patternProperties", "$defs", "definitions")


class WrongGrammar(ValueError):
    """A grammar that cannot be written for the library; the message says why."""


@dataclass(frozen=True)
class GrammarPart:
    """A part of a grammar: its regex, or the text of a rule."""

    text: str
    is_regex: bool = True

    @property
    def as_rule(self) -> str:
        return f"/{self.text}/" if self.is_regex else self.text


EMPTY = GrammarPart("")


def literal(text: str) -> GrammarPart:
    return GrammarPart("".join(char if char.isascii() and char.isalnum() else f"\\x{{{ord(char):X}}}" for char in text))


def in_order(parts: Iterable[GrammarPart]) -> GrammarPart:
    """Return the sequence of parts; neighbours that are regexes become one."""
    merged: list[GrammarPart] = []
    for part in parts:
        if merged and part.is_regex and merged[-1].is_regex:
            merged[-1] = GrammarPart(merged[-1].text + part.text)
        elif part != EMPTY:
            merged.append(part)
    if len(merged) == 1:
        return merged[0]
    return GrammarPart(" ".join(part.as_rule for part in merged), False) if merged else EMPTY


def one_of(parts: SequenceOf[GrammarPart]) -> GrammarPart:
    if all(part.is_regex for part in parts):
        return parts[0] if len(parts) == 1 else GrammarPart(f"(?:{'|'.join(part.text for part in parts)})")
    some = [part for part in parts if part != EMPTY]
    text = f"({' | '.join(part.as_rule for part in some)})"
    return GrammarPart(text if len(some) == len(parts) else f"{text}?", False)


def repeated(part: GrammarPart, least: int, most: int | None) -> GrammarPart:
    if part == EMPTY:
        return part
    count = {(0, None): "*", (1, None): "+", (0, 1): "?"}.get((least, most))
    count = count or f"{{{least},{'' if most is None else most}}}"
    return GrammarPart(f"(?:{part.text}){count}" if part.is_regex else f"({part.text}){count}", part.is_regex)


class Rules:
    """The rules of one grammar."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def add(self, text: str, attribute: str = "") -> GrammarPart:
        name = f"rule_{len(self._lines)}"
        self._lines.append(f"{name}{attribute}: {text}")
        return GrammarPart(name, False)

    def reserve(self) -> tuple[GrammarPart, Callable[[GrammarPart], None]]:
        """Return a rule that may be used before it is known, and the function that sets it."""
        at = len(self._lines)
        rule = self.add("")

        def set_rule(part: GrammarPart) -> None:
            self._lines[at] = f"{rule.text}: {part.as_rule if part != EMPTY else chr(34) * 2}"

        return rule, set_rule

    def json(self, schema: Json | bool, whitespace: int | None) -> GrammarPart:
        if schema is False:
            raise WrongGrammar("the schema false allows nothing")
        options = json_options(whitespace)
        return self.add(f"%json {json.dumps(plain_schema({} if schema is True else schema) | {'x-guidance': options})}")

    def source(self, start: GrammarPart) -> str:
        return "\n".join(["%llguidance {}", f"start: {start.as_rule if start != EMPTY else chr(34) * 2}", *self._lines])


def json_options(whitespace: int | None) -> Json:
    """Return the library's options of JSON with at most `whitespace` characters between two parts; None: on one line,
    ", " and ": " between its parts."""
    common = {"coerce_one_of": True, "lenient": False}
    if whitespace is None:
        return common | {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    return common | {"whitespace_pattern": rf"[\x20\x0A\x0D\x09]{{1,{whitespace}}}"}


def whitespace_of(wanted: Mapping[str, Any]) -> int | None:
    return None if wanted.get(ONE_LINE) else WHITESPACE


def plain_schema(schema: Json) -> Json:
    """Return a schema as the library takes it: an object that lists its properties has no others, unless it says so."""
    multiples = Fraction()

    def plain(value: Any, in_all_of: bool = False) -> Any:
        nonlocal multiples
        if not isinstance(value, dict):
            return value
        made = {key: item for key, item in value.items() if key not in ("x-guidance", "discriminator")}
        if isinstance(step := made.get("multipleOf"), int | float) and 0 < abs(step) < 1e15:
            multiples += Fraction(str(step)).numerator
            if multiples > MOST_MULTIPLES:
                raise WrongGrammar(f"multipleOf {step} is too large; all of a schema's are at most {MOST_MULTIPLES}")
        closed = in_all_of or "allOf" in made or "$ref" in made or "unevaluatedProperties" in made
        if isinstance(made.get("properties"), dict) and "additionalProperties" not in made and not closed:
            made["additionalProperties"] = False
        for key in ONE:
            if key in made:
                made[key] = plain(made[key])
        for key in (*LISTS, "allOf"):
            if isinstance(made.get(key), list):
                made[key] = [plain(item, key == "allOf") for item in made[key]]
        for key in NAMED:
            if isinstance(made.get(key), dict):
                made[key] = {name: plain(item) for name, item in made[key].items()}
        return made

    made: Json = plain(schema)
    return made
