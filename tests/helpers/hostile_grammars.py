"""Grammars that take much work: nested counts, ambiguous alternatives, recursion, wide and deep schemas."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from paceline.errors import InvalidParameter
from paceline.text.grammar import Grammars

NAMED: list[dict[str, Any]] = [
    {"regex": "(((.{1,50}){1,50}){1,50}){1,50}"},
    {"json": {"type": "string", "pattern": "(((.{1,50}){1,50}){1,50}){1,50}"}},
    {"regex": "(((a|b){1,300}c?){1,300}c?){1,300}"},
    {"regex": "((a{0,1000}){0,1000}){0,1000}"},
    {"regex": "(.*a.*){1,100}"},
    {"regex": ".*a.{200}"},
    {"regex": "(a|aa|aaa)*b.{1,2000}"},
    {"regex": "(x+x+)+y"},
    {"regex": "(.{1,100}){1,100}.{3,500}|.*(a.{30}|b.{30}).*"},
    {"regex": r"\p{L}{1,10000}\w+\d+"},
    {"regex": "|".join(f"word{number}" for number in range(5000))},
    {"regex": "(" * 30_000 + "a" + ")" * 30_000},
    {"choice": [f"choice {number} " * 5 for number in range(3000)]},
    {"json": {"type": "integer", "multipleOf": 9_999_991}},
    {"json": {"type": "array", "minItems": 1000, "maxItems": 1_000_000_000, "items": {"type": "integer"}}},
    {"json": {"type": "string", "minLength": 1000, "maxLength": 1_000_000_000}},
    {"json": {"enum": [f"value {number}" * 3 for number in range(3000)]}},
    {"json": {"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(2000)}}},
    {"json": {"$ref": "#"}},
    {"json": {"allOf": [{"$ref": "#"}]}},
    {"json": {"anyOf": [{"$ref": "#"}, {"$ref": "#"}, {"type": "array", "items": {"$ref": "#"}}]}},
    {"grammar": 'root ::= "a" | root root'},
    {"grammar": 'root ::= root root root | "a" | ""'},
    {"grammar": "root ::= ([a-z]* [a-z]* [a-z]*)* root?"},
    {
        "grammar": "root ::= x x\n"
        + "\n".join(f"x{'x' * n} ::= x{'x' * (n + 1)} x{'x' * (n + 1)}" for n in range(40))
        + f"\nx{'x' * 40} ::= [a-z]"
    },
    {"grammar": "root ::= " + "(" * 60 + "[a-z]" + "{0,50})" * 60},
    {"grammar": "root ::= " + " ".join(["[a-z]{0,500}"] * 200)},
]


def _chain(keyword: str, length: int) -> dict[str, Any]:
    """A schema whose definitions each use the next one twice."""
    definitions: dict[str, Any] = {
        f"d{at}": {
            keyword: [{"$ref": f"#/$defs/d{at + 1}"}, {"type": "array", "items": {"$ref": f"#/$defs/d{at + 1}"}}]
        }
        for at in range(length)
    }
    definitions[f"d{length}"] = {"type": "object", "properties": {"a": {"type": "string"}}}
    return {"$defs": definitions, "$ref": "#/$defs/d0"}


def _regex(rng: random.Random, depth: int) -> str:
    if depth == 0:
        return rng.choice(["a", ".", "[a-z]", "[^b]", r"\w", "ab?", r"\s", "é", r"\p{L}", ".*"])
    inner = [_regex(rng, depth - 1) for _ in range(rng.randint(1, 3))]
    body = rng.choice(["", "|"]).join(inner)
    most = rng.choice([2, 10, 50, 300, 1000])
    return f"({body}){rng.choice(['*', '+', '?', f'{{0,{most}}}', f'{{1,{most}}}', f'{{{most}}}', ''])}"


def _schema(rng: random.Random, depth: int) -> Any:
    if depth == 0:
        return rng.choice(
            [
                {"type": "string", "maxLength": rng.choice([5, 5000])},
                {"type": "string", "pattern": _regex(rng, 2)},
                {"type": "number", "minimum": -1e5, "maximum": 1e15},
                {"type": "integer", "multipleOf": rng.choice([3, 97, 997, 0.01])},
                {"type": "string", "format": rng.choice(["date-time", "email", "uuid", "ipv6", "uri"])},
                {"enum": [rng.random() for _ in range(100)]},
                {},
                True,
            ]
        )
    kind = rng.randrange(5)
    if kind == 0:
        names = [f"{'p' * rng.randint(1, 4)}{at}" for at in range(rng.choice([2, 10, 100]))]
        made = {"type": "object", "properties": {name: _schema(rng, depth - 1) for name in names}}
        return made | {"required": rng.sample(names, rng.randint(0, len(names)))}
    if kind == 1:
        return {"type": "array", "items": _schema(rng, depth - 1), "maxItems": rng.choice([3, 1000, 10**7])}
    if kind == 2:
        return {rng.choice(["anyOf", "oneOf", "allOf"]): [_schema(rng, depth - 1) for _ in range(rng.choice([2, 20]))]}
    if kind == 3:
        return {"type": "object", "patternProperties": {_regex(rng, 2): _schema(rng, depth - 1)}}
    return {"type": "object", "additionalProperties": _schema(rng, depth - 1)}


def _ebnf(rng: random.Random) -> str:
    names = ["root", *(f"r{at}" for at in range(rng.randint(1, 12)))]

    def terms(depth: int) -> str:
        parts = []
        for _ in range(rng.randint(1, 4)):
            part = rng.choice([rng.choice(names), rng.choice(names), '"a"', "[a-z]", '"ab"', "[^x]", ". "])
            if depth and rng.random() < 0.5:
                part = f"({terms(depth - 1)})"
            parts.append(part + rng.choice(["", "", "*", "+", "?", "{0,100}", "{2,1000}"]))
        return rng.choice([" ", " | "]).join(parts)

    return "\n".join(f"{name} ::= {terms(2)} | [a-z]" for name in names)


def hostile_grammars(count: int, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Yield structured outputs, the named ones first."""
    yield from NAMED[:count]
    for keyword in ("anyOf", "allOf", "oneOf")[: max(count - len(NAMED), 0)]:
        yield {"json": _chain(keyword, 40)}
    rng = random.Random(seed)
    for at in range(max(count - len(NAMED) - 3, 0)):
        if at % 3 == 0:
            yield {"regex": _regex(rng, rng.randint(2, 5))}
        elif at % 3 == 1:
            yield {"json": _schema(rng, rng.randint(1, 3))}
        else:
            yield {"grammar": _ebnf(rng)}


class Followed(NamedTuple):
    outcome: str  # refused; ended, at its bound; followed
    compile_s: float  # processor seconds
    mask_s: float  # of the longest mask


def follow(grammars: Grammars, wanted: dict[str, Any], rng: random.Random, steps: int) -> Followed:
    """Follow a random text of a grammar; each mask is that of one token."""
    began = time.thread_time()
    try:
        compiled = grammars.compile(wanted)
    except InvalidParameter:
        return Followed("refused", time.thread_time() - began, 0.0)
    compile_s, longest = time.thread_time() - began, 0.0
    (matcher,) = grammars.matchers(compiled, 1)
    sequence: Any = SimpleNamespace(output_tokens=[], matcher=matcher)
    for _ in range(steps):
        began = time.thread_time()
        bits = matcher.masks(sequence, [], [])
        longest = max(longest, time.thread_time() - began)
        allowed = np.flatnonzero(np.unpackbits(bits[0].view(np.uint8), bitorder="little"))
        if matcher.problem is not None or len(allowed) < 2:
            break
        sequence.output_tokens.append(int(rng.choice(allowed)))
    return Followed("followed" if matcher.problem is None else "ended", compile_s, longest)
