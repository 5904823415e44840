"""The replica of a request: prompts with equal beginnings go to one replica, whose cache holds their blocks."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")
PREFIX = 512  # characters of a prompt that choose the replica


def prefix_of(body: bytes) -> str:
    """Return the beginning of a request's prompt; "" if it has none."""
    try:
        fields = json.loads(body)
        prompt = next(fields[name] for name in ("prompt", "messages", "input") if fields.get(name))
    except (ValueError, AttributeError, RecursionError, StopIteration):
        return ""
    parts = prompt if isinstance(prompt, list) else [prompt]
    texts = [str(each.get("content")) if isinstance(each, dict) else str(each) for each in parts[:PREFIX]]
    return "\n".join([str(fields.get("instructions") or ""), *texts])[:PREFIX]


def in_order(key: str, replicas: Sequence[T], name_of: Callable[[T], str]) -> list[T]:
    """Return the replicas in this key's order (rendezvous hashing): one that comes or goes moves only its own keys."""

    def weight(replica: T) -> bytes:
        return hashlib.blake2b(f"{key}\0{name_of(replica)}".encode(errors="replace")).digest()

    return sorted(replicas, key=weight)
