"""A request's grammar in EBNF (`root ::= "a" [b-z]* | other`), in GBNF's and xgrammar's spelling, as parts."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from paceline.errors import short_repr
from paceline.text.grammar_source.grammar_parts import (
    EMPTY,
    MOST_DEPTH,
    GrammarPart,
    Rules,
    WrongGrammar,
    in_order,
    literal,
    one_of,
    repeated,
)

MOST_INLINED = 20_000  # characters of a regex that is written out where its rule is used
MOST_TOKENS = 100_000  # words and signs of a grammar; read in 0.2 s
_TOKEN = re.compile(
    r"""(?P<space>[ \t\r\n]+|\#[^\n]*)
    | (?P<name>[A-Za-z_][\w.-]*)(?P<defines>\s*::=)?
    | (?P<text>"(?:[^"\\\n]|\\.)*" | '(?:[^'\\\n]|\\.)*')
    | (?P<chars>\[(?:[^\]\\\n]|\\.)*\])
    | (?P<count>\{\s*[0-9]{1,9}\s*(?:,\s*(?:[0-9]{1,9}\s*)?)?\})
    | (?P<sign>[|()*+?.])""",
    re.VERBOSE,
)
_CHAR = re.compile(
    r"\\x([0-9A-Fa-f]{2})|\\u([0-9A-Fa-f]{4})|\\U([0-9A-Fa-f]{8})|\\u\{([0-9A-Fa-f]{1,6})\}|\\(.)|(.)", re.S
)
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "0": "\0", "b": "\b", "f": "\f", "v": "\v"}
_COUNTS: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}


class _Token(NamedTuple):
    kind: str
    text: str


@dataclass
class _Node:
    """A node of a rule: a part, a reference to a rule, or an operation on nodes."""

    kind: str  # part, rule, sequence, choice or repeat
    part: GrammarPart = EMPTY
    name: str = ""
    nodes: list[_Node] = field(default_factory=list)
    count: tuple[int, int | None] = (1, 1)

    def names(self) -> set[str]:
        found, left = set(), [self]
        while left:
            node = left.pop()
            left += node.nodes
            if node.kind == "rule":
                found.add(node.name)
        return found


def ebnf(text: str, rules: Rules) -> GrammarPart:
    """Return the part of a grammar that begins at its rule `root`."""
    read = _EbnfReader(text).rules()
    if "root" not in read:
        raise WrongGrammar("it has no rule named root")
    names = {name: node.names() for name, node in read.items()}
    for name, uses in names.items():
        if missing := uses - set(read):
            raise WrongGrammar(f"{name} uses {short_repr(min(missing))}, which is no rule of it")
    parts: dict[str, GrammarPart] = {}
    setters: dict[str, Callable[[GrammarPart], None]] = {}
    order = _in_order_of_use(names)
    for name in order:  # a rule that is used before it is written belongs to a recursion
        if any(used not in parts for used in names[name]):
            for used in names[name] - set(parts):
                parts[used], setters[used] = rules.reserve()
        part = _part(read[name], parts)
        if name in setters:
            setters[name](part)
        else:
            is_short = part.is_regex and len(part.text) <= MOST_INLINED
            parts[name] = part if is_short or part == EMPTY else rules.add(part.as_rule)
    return parts["root"]


def _in_order_of_use(names: dict[str, set[str]]) -> list[str]:
    """Return the rules that root uses, each behind those that it uses itself, except for recursion."""
    order: list[str] = []
    seen, left = {"root"}, [("root", iter(sorted(names["root"])))]
    while left:
        _, rest = left[-1]
        used = next((each for each in rest if each not in seen), None)
        if used is None:
            order.append(left.pop()[0])
        else:
            seen.add(used)
            left.append((used, iter(sorted(names[used]))))
    return order


def _part(node: _Node, parts: dict[str, GrammarPart]) -> GrammarPart:
    if node.kind == "part":
        return node.part
    if node.kind == "rule":
        return parts[node.name]
    inner = [_part(each, parts) for each in node.nodes]
    if node.kind == "repeat":
        return repeated(inner[0], *node.count)
    part = in_order(inner) if node.kind == "sequence" else one_of(inner)
    if len(part.text) > 50 * MOST_INLINED:
        raise WrongGrammar("its rules, written out, are too long")
    return part


class _EbnfReader:
    """A reader of rules; a rule ends where the next begins."""

    def __init__(self, text: str) -> None:
        self._tokens: list[_Token] = []
        at = 0
        while at < len(text):
            found = _TOKEN.match(text, at)
            if found is None or len(self._tokens) > MOST_TOKENS:
                line = text.count("\n", 0, at) + 1
                raise WrongGrammar(
                    f"line {line}: {short_repr(text[at : at + 20])} is no part of EBNF"
                    if found is None
                    else f"it has more than {MOST_TOKENS} words and signs"
                )
            at = found.end()
            kind = found.lastgroup or ""
            if kind == "defines":
                self._tokens.append(_Token("rule", found["name"]))
            elif kind != "space":
                self._tokens.append(_Token(kind, found.group()))
        self._at = 0

    def rules(self) -> dict[str, _Node]:
        rules: dict[str, _Node] = {}
        while self._at < len(self._tokens):
            kind, name = self._tokens[self._at]
            if kind != "rule" or name in rules:
                what = "is there twice" if kind == "rule" else "stands outside of a rule"
                raise WrongGrammar(f"{short_repr(name)} {what}")
            self._at += 1
            rules[name] = self._choice(0)
        return rules

    def _peek(self) -> _Token:
        return self._tokens[self._at] if self._at < len(self._tokens) else _Token("end", "")

    def _choice(self, depth: int) -> _Node:
        if depth > MOST_DEPTH:
            raise WrongGrammar(f"parentheses are nested more than {MOST_DEPTH} deep")
        nodes = [self._sequence(depth)]
        while self._peek() == ("sign", "|"):
            self._at += 1
            nodes.append(self._sequence(depth))
        return nodes[0] if len(nodes) == 1 else _Node("choice", nodes=nodes)

    def _sequence(self, depth: int) -> _Node:
        nodes: list[_Node] = []
        while True:
            kind, text = self._peek()
            if kind in ("end", "rule") or (kind, text) in (("sign", "|"), ("sign", ")")):
                return nodes[0] if len(nodes) == 1 else _Node("sequence", nodes=nodes)
            self._at += 1
            if kind == "count" or text in _COUNTS:
                if not nodes:
                    raise WrongGrammar(f"{text} has nothing to repeat")
                nodes[-1] = _Node("repeat", nodes=[nodes[-1]], count=_COUNTS.get(text) or _count(text))
            elif text == "(":
                nodes.append(self._choice(depth + 1))
                if self._peek() != ("sign", ")"):
                    raise WrongGrammar("a parenthesis is not closed")
                self._at += 1
            elif kind == "name":
                nodes.append(_Node("rule", name=text))
            else:
                nodes.append(_Node("part", part=_terminal(kind, text)))


def _count(text: str) -> tuple[int, int | None]:
    least, comma, most = text[1:-1].partition(",")
    if not comma:
        return int(least), int(least)
    return int(least), int(most) if most.strip() else None


def _terminal(kind: str, text: str) -> GrammarPart:
    if text == ".":
        return GrammarPart("(?s:.)")
    if kind == "text":
        return literal("".join(map(_char, _CHAR.finditer(text[1:-1]))))
    negated = text.startswith("[^")
    chars = [(_char(found), found.group()) for found in _CHAR.finditer(text[2 if negated else 1 : -1])]
    inside, at = "", 0
    while at < len(chars):
        first = last = chars[at][0]
        if at + 2 < len(chars) and chars[at + 1][1] == "-":
            last, at = chars[at + 2][0], at + 2
        if first > last:
            raise WrongGrammar(f"{text} has a range that ends before it begins")
        inside += f"\\x{{{ord(first):X}}}-\\x{{{ord(last):X}}}"
        at += 1
    if not inside:
        raise WrongGrammar(f"{text} allows no character" if not negated else f"{text} excludes no character")
    return GrammarPart(f"[{'^' * negated}{inside}]")


def _char(found: re.Match[str]) -> str:
    number = next((each for each in found.groups()[:4] if each), None)
    if number is not None:
        value = int(number, 16)
        if value > 0x10FFFF or 0xD800 <= value < 0xE000:
            raise WrongGrammar(f"{found.group()} is no character")
        return chr(value)
    return _ESCAPES.get(found[5], found[5]) if found[5] else found[6]
