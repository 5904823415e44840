"""The results of a benchmark, as in results.json: one Cell per workload, concurrency and engine. No torch.

A figure that could not be measured is None, never zero; where too little was measured for a speed-up it is None and
`too_short` holds the reason. Everything else (the table, the report, the advisor) reads these and nothing more.
"""

from __future__ import annotations

import dataclasses
import json
import math
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.config import NONE
from paceline.errors import InvalidParameter
from paceline.files.folders import replace_text
from paceline.platform import cpu as machine

ALL = "all"  # the workload that is every workload together
PLAIN = NONE  # the method that drafts nothing


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Percentiles in seconds."""

    p50: float
    p90: float | None = None
    p95: float | None = None
    p99: float


@dataclass(frozen=True, kw_only=True)
class Speedup:
    """Plain decoding's time per token over this engine's, with a 95 % interval over `pairs`."""

    ratio: float
    low: float
    high: float
    pairs: int


@dataclass(frozen=True, kw_only=True)
class WithoutLoops:
    """The figures of a cell without groups in which an answer loops: loops flatter every method that copies."""

    answers: int
    speedup: Speedup | None = None


@dataclass(frozen=True, kw_only=True)
class Cell:
    workload: str
    concurrency: int
    method: str
    k: int | None = None  # None: nothing is drafted, or the policy chooses each step
    label: str
    answers: int
    tokens: int  # committed; EOS included
    seconds: float  # wall time in which they were committed, prompts included
    tokens_per_s: float | None = None
    prompt_tokens_per_s: float | None = None  # tokens of prompts over the time until every request has its first token
    speedup: Speedup | None = None
    decode_speedup: Speedup | None = None  # speed-up after every request's first token
    too_short: str | None = None  # the reason why there is no speed-up
    tau: float | None = None  # committed tokens per target pass
    acceptance_rate: float | None = None
    drafted_per_position: tuple[int, ...] = ()  # number of drafts that reached each depth, from 1
    accepted_per_position: tuple[int, ...] = ()
    ttft_s: Spread | None = None
    inter_token_s: Spread | None = None  # per token after the first; those that come together share the wait equally
    request_s: Spread | None = None
    engine_share: float | None = None  # share of the time outside the models
    looping: int = 0  # answers that repeat a run of 16 tokens
    without_loops: WithoutLoops | None = None
    identical: bool | None = None  # every token equals plain decoding's; None where that is not comparable

    @property
    def plain(self) -> bool:
        return self.method == PLAIN


@dataclass(frozen=True, kw_only=True)
class Results:
    paceline: str
    date: str  # YYYY-MM-DD
    model: str
    where: Mapping[str, Any] = field(default_factory=dict)  # cpu, cores, threads, torch, device, dtype, kernels ...
    settings: Mapping[str, Any] = field(default_factory=dict)
    complete: bool = True  # False: interrupted
    endpoint: Mapping[str, Any] | None = None
    sample: Mapping[str, Any] | None = None  # one answer: engine, prompt, and pieces of text with whether drafted
    cells: tuple[Cell, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return numbers, strings, lists and None only; numbers that are not finite become None."""
        values: dict[str, Any] = _plain_values(dataclasses.asdict(self))
        return values

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Results:
        """Read what `to_json` returned; fields of a later version are left out, missing ones are an error."""
        try:
            return cls(**_fields(cls, {**values, "cells": [Cell(**_fields(Cell, cell)) for cell in values["cells"]]}))
        except (AttributeError, KeyError, TypeError) as error:
            raise InvalidParameter("results", f"not what paceline bench writes ({error})") from error

    def save(self, path: Path) -> None:
        replace_text(path, json.dumps(self.to_json(), indent=1, ensure_ascii=False, allow_nan=False) + "\n")

    @classmethod
    def load(cls, path: Path) -> Results:
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise InvalidParameter("results", f"cannot read {path}: {error.strerror}") from error
        except ValueError as error:
            raise InvalidParameter("results", f"{path} is not JSON: {error}") from error
        return cls.from_json(values)


def machine_facts() -> dict[str, Any]:
    return {"cpu": machine.cpu_name(), "cores": machine.usable_cores(), "python": platform.python_version()}


NESTED: Mapping[str, type] = {
    **dict.fromkeys(("speedup", "decode_speedup"), Speedup),
    **dict.fromkeys(("ttft_s", "inter_token_s", "request_s"), Spread),
    "without_loops": WithoutLoops,
}


def _fields(kind: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments of `kind` out of JSON: objects become dataclasses, and lists tuples."""
    arguments = {member.name: values[member.name] for member in dataclasses.fields(kind) if member.name in values}
    for name, value in arguments.items():
        if value is not None and name in NESTED:
            arguments[name] = NESTED[name](**_fields(NESTED[name], value))
        elif isinstance(value, list):
            arguments[name] = tuple(value)
    return arguments


def _plain_values(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain_values(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain_values(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
