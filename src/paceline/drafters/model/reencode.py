"""SLEM (string-level exact match, 2502.05202): what a drafter wrote in any tokens of its own, as tokens of the target.

The drafted text is encoded behind the end of the committed one. Where the committed tokens do not come out unchanged
nothing is drafted, and the last token is left out, since it might still merge with what follows.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

TAIL = 16  # committed tokens that are encoded again, at most: more than a regular expression's match mostly has


def reencoded(
    committed: SequenceOf[int],
    drafted: bytes,
    target_bytes: SequenceOf[bytes | None],
    encode: Callable[[str], list[int]],
) -> list[int]:
    """Return the target's tokens of drafted text behind committed tokens, never a special one."""
    tail = _tail(committed, target_bytes)
    spelt = b"".join(target_bytes[token] or b"" for token in tail)
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(spelt + drafted)  # a character begun last is left out
    except UnicodeDecodeError:
        return []
    known = len(tail)
    for begun in (text, text.removeprefix(" ")):  # a tokenizer may put a space before a text
        ids = encode(begun)
        if ids[:known] == tail:
            found = ids[known:-1]
            special = (at for at, token in enumerate(found) if target_bytes[token] is None)
            return found[: next(special, len(found))]
    return []


def _tail(committed: SequenceOf[int], target_bytes: SequenceOf[bytes | None]) -> list[int]:
    """Return the last committed tokens, from the beginning of a word on where there is one, behind special tokens."""
    tail: list[int] = []
    word = 0  # tokens from the first word's beginning on
    for token in reversed(committed[-TAIL:]):
        spelt = target_bytes[token] if token < len(target_bytes) else None
        if spelt is None:
            word = len(tail)
            break
        tail.append(token)
        if spelt.startswith(b" "):
            word = len(tail)
    return tail[: word or len(tail)][::-1]
