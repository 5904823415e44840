"""The settings of drafting (`SpeculationConfig`) and of the engine (`EngineConfig`). Flat, frozen, no torch."""

from __future__ import annotations

import numbers
import operator
import os
from dataclasses import dataclass
from typing import Any

from paceline.errors import InvalidParameter, short_repr

NONE = "none"  # the method that drafts nothing: plain decoding
AUTO = "auto"  # the method chosen by the policy, per request and step
MAX_K = 64  # nodes a row may draft in one step
TRAINED_LEVEL = 6  # level of support of a trained drafter's drafts: it always drafts, and most are good
MAX_INT = 2**31 - 1  # counts and token ids are int32 on the device
MAX_COUNT = 2**63 - 1  # any other count
MAX_NGRAM = 64  # tokens of a lookup's longest match: each length has a table of its own
LONGEST_PATH, LONGEST_NAME = 4096, 255  # bytes and characters; limits of file systems


def whole_number(field: str, value: Any, low: int, high: int = MAX_COUNT) -> int:
    """Return the value as a plain int, or refuse it with what it must be."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is not None and low <= number <= high:
        return number
    allowed = f"between {low} and {high}" if high < MAX_INT else f"at least {low}"
    if number is None:
        raise InvalidParameter(field, f"must be a whole number {allowed}, got {short_repr(value)}")
    limits = f"at most {high}" if number > high >= MAX_INT else allowed
    raise InvalidParameter(field, f"must be {limits}, got {short_repr(number)}")


def path_or_name(field: str, value: Any) -> str:
    """Return a path of any kind, or a name, as text."""
    try:
        text = os.fspath(value)
        if not isinstance(text, str) or "\0" in text:
            raise TypeError
        too_long = len(os.fsencode(text)) > LONGEST_PATH or max(map(len, text.split("/"))) > LONGEST_NAME
    except (TypeError, UnicodeError):
        raise InvalidParameter(field, f"must be a name or a path, got {short_repr(value)}") from None
    if too_long:
        raise InvalidParameter(field, f"is too long for a name or a path: {short_repr(value)}")
    return text


def truth(field: str, value: Any) -> bool:
    if not isinstance(value, bool):  # also not "false", which counts as true
        raise InvalidParameter(field, f"must be True or False, got {short_repr(value)}")
    return value


@dataclass(frozen=True, kw_only=True)
class SpeculationConfig:
    """Methods that may draft, and their options. `k` None: the policy decides each step."""

    method: str = NONE  # an entry of the METHODS table, NONE or AUTO
    k: int | None = None
    ngram_min: int = 2  # shortest match that counts
    ngram_max: int = 5
    suffix_corpus: tuple[str, ...] = ()  # text files that seed the suffix store
    suffix_store: str | None = None  # file that keeps past answers between runs
    suffix_answers: bool = True  # past answers are kept, and drafted from
    suffix_bytes: int = 200 << 20
    skip_ratio: float = 0.5  # share of the target's layers that method skip may leave out
    recycling_bytes: int = 32 << 20  # of tables of successors, of all domains
    draft_model: tuple[str, ...] = ()  # smaller models, of any vocabulary
    drafter: tuple[str, ...] = ()  # drafters trained for this target; empty: a packaged one; NONE alone: none

    def __post_init__(self) -> None:
        if not isinstance(self.method, str) or len(self.method) > LONGEST_NAME:
            raise InvalidParameter("method", f"must be the name of a method, got {short_repr(self.method)}")
        if self.k is not None:
            if isinstance(self.k, str):
                raise InvalidParameter(
                    "k", f"must be a whole number between 1 and {MAX_K}, or {AUTO}; got {short_repr(self.k)}"
                )
            object.__setattr__(self, "k", whole_number("k", self.k, 1, MAX_K))
        if self.suffix_store is not None:
            object.__setattr__(self, "suffix_store", path_or_name("suffix_store", self.suffix_store))
            if not truth("suffix_answers", self.suffix_answers):
                raise InvalidParameter("suffix_store", "keeps past answers, and suffix_answers is False; leave one out")
        truth("suffix_answers", self.suffix_answers)
        for field in ("draft_model", "drafter", "suffix_corpus"):
            object.__setattr__(self, field, paths_or_names(field, getattr(self, field)))
        for field in ("draft_model", "drafter"):
            _refuse_contradictions(field, getattr(self, field))
        if self.k is not None and self.method == NONE:
            raise InvalidParameter("k", "method none drafts nothing; leave k out or choose a method")
        whole_number("ngram_max", self.ngram_max, 1, MAX_NGRAM)
        whole_number("ngram_min", self.ngram_min, 1)
        whole_number("suffix_bytes", self.suffix_bytes, 0)
        if type(self.skip_ratio) not in (int, float) or not 0 < self.skip_ratio < 1:
            raise InvalidParameter("skip_ratio", f"must lie between 0 and 1, got {short_repr(self.skip_ratio)}")
        whole_number("recycling_bytes", self.recycling_bytes, 0)
        if self.ngram_min > self.ngram_max:
            raise InvalidParameter("ngram_min", f"must be between 1 and ngram_max ({self.ngram_max})")


def paths_or_names(field: str, value: Any) -> tuple[str, ...]:
    """Return one value, several or None as a tuple."""
    if value is None:
        return ()
    several = value if isinstance(value, list | tuple) else (value,)
    return tuple(path_or_name(field, each) for each in several)


def _refuse_contradictions(field: str, names: tuple[str, ...]) -> None:
    if "" in names:
        raise InvalidParameter(field, f"is empty; name a model or a folder, or {NONE}")
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InvalidParameter(field, f"names {short_repr(twice)} twice; name it once")
    if NONE in names and len(names) > 1:
        raise InvalidParameter(field, f"names {NONE} and others; leave one of the two out")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Limits of one step and of the cache's memory."""

    block_size: int = 16  # tokens per cache block
    num_blocks: int | None = None  # None: from `kv_cache_bytes`
    kv_cache_bytes: int | None = None  # None: 2 GiB on a CPU, on a GPU what `gpu_memory_fraction` leaves for it
    gpu_memory_fraction: float = 0.9  # share of the GPU's memory, weights and scratch included
    max_num_seqs: int = 64  # sequences that share a step
    max_num_batched_tokens: int = 512  # tokens of one target pass, drafted nodes included
    max_model_len: int | None = None  # None: the model's context, or what the cache can hold
    max_waiting: int = 8192  # sequences that may wait for a place; more are refused (LLM.generate waits instead)
    prefix_caching: bool = True

    def __post_init__(self) -> None:
        share = self.gpu_memory_fraction
        if not isinstance(share, numbers.Real) or isinstance(share, bool) or not 0 < share <= 1:
            raise InvalidParameter(
                "gpu_memory_fraction", f"must be a number above 0 and at most 1, got {short_repr(share)}"
            )
        truth("prefix_caching", self.prefix_caching)
        for field in ("block_size", "max_num_seqs", "max_num_batched_tokens", "max_waiting"):
            object.__setattr__(self, field, whole_number(field, getattr(self, field), 1))
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise InvalidParameter(
                "max_num_batched_tokens",
                f"must be at least max_num_seqs ({self.max_num_seqs}), so that every sequence advances each step",
            )
        for field in ("num_blocks", "max_model_len", "kv_cache_bytes"):
            value = getattr(self, field)
            if value is not None:
                object.__setattr__(self, field, whole_number(field, value, 1))
