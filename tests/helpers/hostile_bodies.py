"""Bodies that take long to read: much text, many messages, many values."""

from __future__ import annotations

import json
from typing import Any

WORD = " one"  # about a token
CHAT = "/v1/chat/completions"
Body = tuple[str, bytes]  # route and JSON


def hostile_bodies(share: float = 1.0) -> dict[str, Body]:
    """Return bodies by name. `share` of 1: just under 4 MiB each, the server's limit."""

    def times(count: int) -> int:
        return int(share * count)

    def hi(**fields: Any) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1, **fields}

    prompts = [f"{at}{WORD * times(4000)}" for at in range(256)]
    words, part = WORD * times(1_000_000), {"type": "text", "text": "a"}
    tool = {"type": "function", "function": {"name": "a"}}
    answer = {"max_tokens": 1}
    bodies: dict[str, tuple[str, dict[str, Any]]] = {
        "a long text": ("/tokenize", {"prompt": words}),
        "a text of one letter": ("/tokenize", {"prompt": "a" * times(4_000_000)}),
        "two million ids": ("/detokenize", {"tokens": [9] * times(2_000_000)}),
        "999 messages": (CHAT, hi(messages=[{"role": "user", "content": WORD * times(1000)}] * 999)),
        "100,000 messages": (CHAT, hi(messages=[{"role": "user", "content": ""}] * times(100_000))),
        "many parts": (CHAT, hi(messages=[{"role": "user", "content": [part] * times(100_000)}])),
        "256 long prompts": (
            "/v1/completions",
            {"prompt": prompts, **answer},
        ),
        "a million ids": ("/v1/completions", {"prompt": [9] * times(1_000_000), **answer}),
        "many prompts of one id": ("/v1/completions", {"prompt": [[9]] * times(800_000), **answer}),
        "many lists without meaning": (CHAT, hi(metadata={"a": [[]] * times(1_000_000)})),
        "many tools": (CHAT, hi(tools=[tool] * times(80_000))),
        "many biases": (CHAT, hi(logit_bias={str(token): 1.0 for token in range(times(300_000))})),
        "a long instruction": ("/v1/responses", {"input": "Hi", "instructions": words, "max_output_tokens": 1}),
    }
    return {name: (route, json.dumps(body, separators=(",", ":")).encode()) for name, (route, body) in bodies.items()}
