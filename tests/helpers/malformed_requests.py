"""Requests that are wrong in as many ways as a client can be wrong, without end, and the same for the same seed.

By hand: bodies that are no JSON, no UTF-8, too deep, too large, of wrong types. By mutation: a field of a valid body is
replaced by a value from a list of unpleasant ones, or the bytes are cut, flipped or doubled. A mutant may happen to be
valid; what is asked of every answer is that it is no 5xx, and that an error has OpenAI's shape.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any, NamedTuple


class Raw(NamedTuple):
    path: str
    body: bytes
    method: str = "POST"
    content_type: str = "application/json"


COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
MESSAGES = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}

_SAMPLING: dict[str, Any] = {
    "temperature": 0.5,
    "top_p": 0.9,
    "seed": 1,
    "presence_penalty": 0.1,
    "frequency_penalty": 0.1,
    "top_k": 5,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "bad_words": ["no"],
    "min_tokens": 1,
    "stop_token_ids": [5],
    "ignore_eos": True,
    "include_stop_str_in_output": True,
    "skip_special_tokens": False,
    "speculation": {"method": "ngram", "k": 2},
    "tag": "t",
    "return_token_ids": True,
    "stream": True,
    "user": "u",
    "metadata": {"a": "b"},
    "n": 1,
    "stop": ["x"],
    "logit_bias": {"5": 1.0},
    "stream_options": {"include_usage": True},
    "structured_outputs": {"choice": ["a", "b"]},
    "model": None,
}
# A valid body of each route, and fields that it takes besides.
ROUTES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    COMPLETIONS: (
        {"prompt": "Hi", "max_tokens": 3},
        {**_SAMPLING, "logprobs": 2, "echo": True, "best_of": 1, "suffix": "s"},
    ),
    CHAT: (
        {"messages": MESSAGES, "max_tokens": 3},
        {
            **_SAMPLING,
            "logprobs": True,
            "top_logprobs": 2,
            "tools": [TOOL],
            "tool_choice": "auto",
            "response_format": FORMAT,
            "chat_template_kwargs": {"a": 1},
            "max_completion_tokens": 3,
        },
    ),
    RESPONSES: (
        {"input": "Hi", "max_output_tokens": 16},
        {"instructions": "Be brief.", "temperature": 0.5, "stream": True, "tools": [], "text": {}, "metadata": {}},
    ),
    "/tokenize": ({"prompt": "Hi"}, {"messages": MESSAGES, "add_special_tokens": False}),
    "/detokenize": ({"tokens": [5, 6]}, {"model": None}),
}


def nested(depth: int, kind: str = "[") -> bytes:
    return b'{"a":' * depth + b"1" + b"}" * depth if kind == "{" else b"[" * depth + b"]" * depth


# Bytes of JSON, since an encoder cannot write all of them.
VALUES: tuple[bytes, ...] = (
    *(b"null", b"true", b"false", b"0", b"-1", b"1", b"0.5", b"-0.0", b'""', b"[]", b"{}", b'"x"', b"[null]", b"[[]]"),
    *(b"NaN", b"Infinity", b"-Infinity", b"1e308", b"1e999", b"-1e999", b"1e-320"),
    *(b"2147483648", b"9223372036854775807", b"9223372036854775808", b"18446744073709551616", b"-9223372036854775809"),
    *(b"1" * 400, b"1" * 5000, b"0." + b"3" * 3000),
    *(b'"\\ud800"', b'"\\udfff x"', b'"\\u0000"', b'"\\uffff"', b'["\\ud83d"]', b'{"\\ud800": "\\ud800"}'),
    *(b'"\xff\xfe"', b'"\xed\xa0\x80"', b'"\xf0\x9f\x98"'),
    *(b'"' + b"a" * 30_000 + b'"', b'"' + "é́".encode() * 2000 + b'"', b"[" + b"1," * 5000 + b"1]"),
    *(nested(60), nested(60, "{"), nested(20_000), nested(5_000, "{")),
    *(b'{"type": "json_schema"}', b'{"json": {"type": 7}}', b'{"regex": "(a*)*b("}', b'{"grammar": "root ::= root"}'),
    *(b'{"regex": "[a-z]{1,100000}"}', b'{"choice": []}', b'{"choice": [""]}', b'{"choice": ["\\ud800"]}'),
    *(b'{"json": {"$ref": "#"}}', b'{"json": {"$ref": "#/definitions/none"}}', b'{"json": "not a schema"}'),
    *(b'{"type": "json_schema", "json_schema": {"schema": {"enum": []}}}', b'{"grammar": ""}', b'{"json": true}'),
    *(
        b'[{"role": "user"}]',
        b'[{"role": 5, "content": "x"}]',
        b'[{"content": "x"}]',
        b'[{"role": "user", "content": 5}]',
    ),
    *(
        b'[{"role": "\\ud800", "content": "x"}]',
        b'[{"role": "tool", "content": "x"}]',
        b'[{"role": "user", "content": []}]',
    ),
    b'[{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]',
    b'[{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[]"}}]}]',
    b'[{"type": "function"}]',
    b'[{"type": "function", "function": {"name": "f", "parameters": {"a": [[[]]]}}}]',
    *(b'{"method": "draft_model"}', b'{"method": "none", "k": 3}', b'{"k": "auto"}', b'{"method": ""}', b'"auto"'),
    *(b'{"99999999999999999999": 1}', b'{"-1": 1}', b'{"5": NaN}', b'{"5": 1e999}', b'{"5": null}', b"[-1]", b"[1e3]"),
    *(b"[4294967296]", b"[18446744073709551616]", b"[0.5]", b"[true]", b'[1, "a"]', b'["a", [1]]', b"[[1], []]"),
)

BY_HAND: tuple[Raw, ...] = (
    *(
        Raw(path, body)
        for path in ROUTES
        for body in (b"", b"{", b"}", b"[]", b"null", b"5", b'"x"', b"{}", b"\x00", b"\xff\xfe", b"{'a': 1}", b"{,}")
    ),
    *(Raw(path, nested(100_000)) for path in ROUTES),
    *(Raw(path, nested(100_000, "{")) for path in ROUTES),
    *(Raw(path, b'{"a":1', "POST", kind) for path in ROUTES for kind in ("text/plain", "multipart/form-data", "x", "")),
    *(Raw(path, b"{}", method) for path in ROUTES for method in ("GET", "PUT", "DELETE", "PATCH", "HEAD")),
    *(
        Raw(path, b"{}")
        for path in ("/", "/v1", "/v1/models", "/v1/none", "/health", "/metrics", "/%00", "/v1/%ff", "/../x")
    ),
    Raw(COMPLETIONS, b'{"prompt": "' + b"a" * (5 << 20) + b'"}'),
    Raw(COMPLETIONS, json.dumps({"prompt": [[1]] * 300, "max_tokens": 1}).encode()),
    Raw(COMPLETIONS, json.dumps({"prompt": ["a"] * 8, "n": 8, "temperature": 1, "max_tokens": 1}).encode()),
    Raw(COMPLETIONS, json.dumps({"prompt": [1] * 100_000}).encode()),
    Raw(COMPLETIONS, b'{"prompt": "a", "prompt": 5}'),
    Raw(CHAT, json.dumps({"messages": MESSAGES * 2000, "max_tokens": 1}).encode()),
    Raw(COMPLETIONS, b'{"prompt": "a", "max_tokens": 2, "tag": "\\ud800"}'),
    Raw(COMPLETIONS, b'{"prompt": "\\ud800", "max_tokens": 2}'),
    Raw(COMPLETIONS, b'{"model": "\\ud800", "prompt": "a"}'),
)


def malformed(noise: random.Random) -> Iterator[Raw]:
    """Without end; those by hand come first."""
    yield from BY_HAND
    while True:
        yield _mutant(noise)


def _mutant(noise: random.Random) -> Raw:
    path = noise.choice(list(ROUTES))
    valid, fields = ROUTES[path]
    given: dict[str, bytes] = {name: json.dumps(value).encode() for name, value in valid.items()}
    for name in noise.sample(list(fields), min(len(fields), noise.randrange(3))):
        given[name] = json.dumps(fields[name]).encode()
    kind = noise.random()
    if kind < 0.75:
        given[noise.choice([*given, *fields, "unknown"])] = noise.choice(VALUES)
    elif kind < 0.8 and len(given) > 1:
        given.pop(noise.choice(list(given)))
    body = b"{" + b", ".join(b'"' + name.encode() + b'": ' + value for name, value in given.items()) + b"}"
    if kind < 0.8:
        return Raw(path, body)
    return Raw(path, _damaged(body, noise))


def _damaged(body: bytes, noise: random.Random) -> bytes:
    at, other = noise.randrange(len(body)), noise.randrange(len(body))
    return noise.choice(
        (
            body[:at],
            body[at:],
            body[:at] + bytes([noise.randrange(256)]) + body[at + 1 :],
            body[:at] + body[other:],
            body + body,
            bytes(noise.randrange(256) for _ in range(at)),
            body.replace(b'"', b"'"),
            body.decode().encode("utf-16"),
        )
    )
