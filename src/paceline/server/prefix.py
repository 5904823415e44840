"""Which replica a request belongs to: prompts that begin alike go to the same one, where their blocks are cached."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")
PREFIX = 512  # characters of a prompt that decide


def prefix_of(body: bytes) -> str:
    """The beginning of a request's prompt; "" where it has none."""
    try:
        fields = json.loads(body)
        prompt = next(fields[name] for name in ("prompt", "messages", "input") if fields.get(name))
    except (ValueError, AttributeError, RecursionError, StopIteration):
        return ""
    parts = prompt if isinstance(prompt, list) else [prompt]
    texts = [str(each.get("content")) if isinstance(each, dict) else str(each) for each in parts[:PREFIX]]
    return "\n".join([str(fields.get("instructions") or ""), *texts])[:PREFIX]


def in_order(key: str, replicas: Sequence[T], name_of: Callable[[T], str]) -> list[T]:
    """The replicas in this key's order (rendezvous hashing): one that comes or goes moves no key but its own."""

    def weight(replica: T) -> bytes:
        return hashlib.blake2b(f"{key}\0{name_of(replica)}".encode(errors="replace")).digest()

    return sorted(replicas, key=weight)
