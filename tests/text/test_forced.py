"""The text that a grammar forces: keys, brackets and tails, in the tokens that a model writes, whatever its layout."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from paceline import LLM
from paceline.bench.prompts import shipped
from paceline.text.grammar import Grammars, Matcher
from paceline.text.spacing import Spacing

VALUES = {"string": "Ada B.", "integer": 36, "number": 1.5, "boolean": True}


@pytest.fixture(scope="module")
def grammars(smollm2: LLM) -> Grammars:
    return Grammars(smollm2.tokenizer, smollm2.config.vocab_size, smollm2.config.eos_token_ids)


def matcher_of(grammars: Grammars, **wanted: Any) -> Matcher:
    (matcher,) = grammars.matchers(grammars.compile(wanted), 1)
    return matcher


def forced(llm: LLM, grammars: Grammars, begun: str, **wanted: Any) -> str:
    """Return the text forced behind an answer that has begun."""
    tokens = matcher_of(grammars, **wanted).forced(SimpleNamespace(output_tokens=llm.tokenizer.encode(begun)))
    return llm.tokenizer.decode(tokens)


def obj(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


KIND = {"enum": ["administrator", "adversary", "user"]}
PERSON = obj(name={"type": "string"}, kind=KIND, größe={"type": "integer"})


@pytest.mark.parametrize(
    ("begun", "expected"),
    [
        ('{"', 'name": "'),
        ("{\n", ""),  # a model that goes on with a key writes the line break and a space as one token
        ("{\n ", ' "name": "'),
        ('{"name": "Ada', ""),
        ('{"name": "Ada",', ' "kind": "'),
        ('{"name":"Ada",', ' "kind":"'),  # the colon's own white space is known by then, the comma's is not
        ('{\n  "name": "Ada",', '\n  "kind": "'),
        ('{"name": "Ada", "kind": "administ', 'rator", "größe": '),
        ('{"name": "Ada", "kind": "us', 'er", "größe": '),
        ('{"name": "Ada", "kind": "a', ""),  # "d" is certain, and no token that a model writes
    ],
)
def test_keys_and_tails_are_forced_in_the_layout_of_the_answer(
    smollm2: LLM, grammars: Grammars, begun: str, expected: str
) -> None:
    assert forced(smollm2, grammars, begun, json=PERSON) == expected


@pytest.mark.parametrize(
    ("wanted", "begun", "expected"),
    [
        ({"choice": ["left turn", "right turn"]}, "le", "ft turn"),
        ({"regex": "id-[0-9]{2}-end"}, "id", "-"),
        ({"regex": "id-[0-9]{2}-end"}, "id-42", "-end"),
        ({"regex": "[a-z]+"}, "id", ""),
        ({"json": obj(naïve={"type": "null"}, 日本={"const": "🚢"})}, '{"', 'naïve": null, "日本": "🚢"}'),
    ],
)
def test_other_grammars_force_text_too(
    smollm2: LLM, grammars: Grammars, wanted: dict[str, Any], begun: str, expected: str
) -> None:
    tokenizer, matcher = smollm2.tokenizer, matcher_of(grammars, **wanted)
    answer = tokenizer.encode(begun)
    tokens = matcher.forced(SimpleNamespace(output_tokens=answer))
    assert tokenizer.decode(tokens) == expected
    if expected and len(expected) > 3:  # nothing may follow but the end
        assert tokens[-1] in smollm2.config.eos_token_ids
        assert matcher.forced(SimpleNamespace(output_tokens=[*answer, *tokens])) == []


def test_tokens_are_those_of_the_whole_text(smollm2: LLM, grammars: Grammars) -> None:
    """They merge with the answer's last ones as in a text that is encoded at once."""
    encode = smollm2.tokenizer.encode
    whole = encode('{"name": "Ada", "kind": "')
    for count in range(1, len(whole)):
        if smollm2.tokenizer.decode(whole[:count]).endswith((" ", "Ada")):
            continue
        tokens = matcher_of(grammars, json=PERSON).forced(SimpleNamespace(output_tokens=whole[:count]))
        assert tokens == whole[count : count + len(tokens)]


def parts(schema: dict[str, Any], indent: int | None, depth: int = 0) -> Iterator[tuple[str, bool]]:
    """Pieces of an instance, and whether its schema forces them, white space aside."""
    inner, outer = ("\n" + " " * indent * (depth + at) if indent else "" for at in (1, 0))
    if "properties" in schema:
        yield "{" + inner, True
        for at, (key, value) in enumerate(schema["properties"].items()):
            yield ("," + (inner or " ") if at else "") + json.dumps(key) + ": ", True
            yield from parts(value, indent, depth + 1)
        yield outer + "}", True
    elif "items" in schema:
        yield "[" + inner, True
        for at in range(schema["minItems"]):
            yield "," + (inner or " ") if at else "", schema["minItems"] == schema["maxItems"]
            yield from parts(schema["items"], indent, depth + 1)
        yield outer + "]", schema["minItems"] == schema["maxItems"]
    else:
        yield json.dumps(schema["enum"][0] if "enum" in schema else VALUES[schema["type"]]), False


def count_forced(llm: LLM, grammars: Grammars, schema: dict[str, Any], indent: int | None) -> tuple[int, int, int, int]:
    """Return tokens, steps, forced tokens and those of them that were drafted, of an instance of the schema."""
    pieces = list(parts(schema, indent))
    tokens = llm.tokenizer.encode("".join(text for text, _ in pieces))
    is_forced = [flag for text, flag in pieces for _ in text]
    matcher, at, steps, drafted = matcher_of(grammars, json=schema), 1, 1, set[int]()
    while at < len(tokens):
        chain = matcher.forced(SimpleNamespace(output_tokens=tokens[:at]))
        right = next((n for n, (a, b) in enumerate(zip(chain, tokens[at:], strict=False)) if a != b), len(chain))
        right = min(right, len(tokens) - at)
        drafted |= set(range(at, at + right))
        at, steps = at + right + 1, steps + 1
    ends = [0]
    for token in tokens:
        ends.append(ends[-1] + len(llm.tokenizer.decode([token])))
    of_keys = {at for at in range(len(tokens)) if all(is_forced[ends[at] : ends[at + 1]])}
    return len(tokens), steps, len(of_keys), len(of_keys & drafted)


@pytest.mark.parametrize("indent", [None, 2, 4])
def test_forced_tokens_of_twenty_schemas_are_drafted(smollm2: LLM, grammars: Grammars, indent: int | None) -> None:
    prompts = shipped(["json"])
    assert len(prompts) == 20
    counts = [count_forced(smollm2, grammars, dict(prompt.schema or {}), indent) for prompt in prompts]
    tokens, steps, keys, drafted = map(sum, zip(*counts, strict=True))
    print(f"indent {indent}: {tokens / steps:.2f} tokens a step, {drafted / keys:.0%} of forced tokens drafted")
    assert tokens / steps > 2.5
    assert drafted / keys > 0.85  # of the others most are the one token that each step commits without a draft


def test_spacing_follows_the_layout_of_the_text() -> None:
    text = json.dumps({"a": [1, {"b": "x, \\" + '"{', "c": []}], "d": {}}, indent=3)
    spacing, at = Spacing(), text.index('"c"')
    spacing.read(text[: at - 7].encode())
    assert spacing.missing(ord('"')) == text[at - 7 : at].encode()
    spacing.read(text[at - 7 : at - 4].encode())
    assert spacing.missing(ord('"')) == text[at - 4 : at].encode()
    spacing.read(text[at - 4 : at + 7].encode())
    assert text[at + 7 :].startswith("\n      }")
    assert spacing.missing(ord("}")) == b"\n" + b" " * 6
