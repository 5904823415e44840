"""The engines that are compared: plain decoding always, and each method with each k."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.bench.results import PLAIN
from paceline.config import AUTO, MAX_K
from paceline.drafters.method_names import unknown_method
from paceline.errors import InvalidParameter

MAX_CONCURRENCY = 256
ENDPOINT = "endpoint"  # the method of a server, which drafts as it likes


@dataclass(frozen=True)
class Contender:
    method: str
    k: int | None = None  # None: nothing is drafted, or the policy chooses each step
    draft_model: str | None = None  # the one that drafts, if there are several

    @property
    def takes_k(self) -> bool:
        return self.method not in (PLAIN, AUTO, ENDPOINT)

    @property
    def label(self) -> str:
        if self.draft_model is not None:
            name = Path(self.draft_model).name
            return f"{AUTO} with {name}" if self.method == AUTO else f"{name} k={self.k}"
        if self.takes_k:
            return f"{self.method} k={AUTO if self.k is None else self.k}"
        return "plain" if self.method == PLAIN else self.method


def contenders(
    methods: str,
    k: str,
    *,
    known: Sequence[str],
    drafts_with: Mapping[str, Sequence[str]],
    needs: Mapping[str, Sequence[str]],
    packaged: Sequence[str] = (),
) -> list[Contender]:
    """Return plain decoding, then each method with each k.

    `auto` chooses its own k, so it is measured once. `drafts_with`: models or folders to draft with, by option;
    `needs`: options that a method needs; `packaged`: methods whose drafter comes with the package.
    """
    names, lengths = _names(methods, known), _lengths(k)
    for name in names:
        for need in needs.get(name, ()):
            if PLAIN in drafts_with[need] or not (drafts_with[need] or name in packaged):
                flag = need.replace("_", "-")
                raise InvalidParameter("methods", f"{name} needs a model to draft with; name one with --{flag}")
    for option in (option for option, value in drafts_with.items() if value):
        users = [*(name for name, needed in needs.items() if option in needed), AUTO]
        if not any(user in names for user in users):
            raise InvalidParameter(option, f"none of the methods uses it; add {' or '.join(users)} to --methods")
    chosen = [Contender(PLAIN)]
    for name in names:
        takes_k = Contender(name).takes_k
        chosen += [Contender(name, length) for length in lengths] if takes_k else [Contender(name)]
    chosen = list(dict.fromkeys(chosen))
    if any(length is not None for length in lengths) and not any(each.takes_k for each in chosen):
        raise InvalidParameter("k", "none of the methods takes a k: auto chooses its own, and none drafts nothing")
    if len(chosen) == 1:
        raise InvalidParameter("methods", "nothing to compare plain decoding with; name a method besides none")
    return chosen


def _names(text: str, known: Sequence[str]) -> list[str]:
    names = split(text)
    if not names:
        raise InvalidParameter("methods", f"is empty; choose from {', '.join(known)}")
    for name in names:
        if name not in known:
            raise InvalidParameter("methods", unknown_method(name, known))
    return names


def _lengths(text: str) -> list[int | None]:
    lengths: list[int | None] = []
    for word in split(text) or [AUTO]:
        k = None if word == AUTO else _whole("k", word, f"a whole number between 1 and {MAX_K}, or {AUTO}")
        if k is not None and not 1 <= k <= MAX_K:
            raise InvalidParameter("k", f"must be between 1 and {MAX_K}, or {AUTO}; got {k}")
        lengths.append(k)
    return lengths


def concurrencies(text: str) -> list[int]:
    levels = [_whole("concurrency", word, "whole numbers, as in 1,4,16") for word in split(text)]
    if not levels or not all(1 <= level <= MAX_CONCURRENCY for level in levels):
        raise InvalidParameter("concurrency", f"must be between 1 and {MAX_CONCURRENCY}, as in 1,4,16; got {text!r}")
    return levels


def _whole(field: str, word: str, wanted: str) -> int:
    try:
        return int(word)
    except ValueError:
        raise InvalidParameter(field, f"must be {wanted}; got {word!r}") from None


def split(text: str) -> list[str]:
    """Return the words between commas, each once."""
    return list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
