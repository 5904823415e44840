"""Messages between the HTTP process and the engine's process: msgspec structs, encoded as msgpack.

Commands go one way, events the other; a message is a list of either. Both processes run the same version of this file:
the engine's process is started by the HTTP process.
"""

from __future__ import annotations

import logging
from typing import Any

import msgspec

from paceline.config import EngineConfig, SpeculationConfig
from paceline.outputs import SpeculationStats


class Settings(msgspec.Struct, frozen=True):
    """Everything a worker is started with; a restarted one gets the same."""

    model: str
    load: dict[str, Any]  # keywords of build.load
    engine: EngineConfig
    speculation: SpeculationConfig
    log_level: int = logging.WARNING
    log_json: bool = False


# -- to the engine


class Submit(msgspec.Struct, tag=True, array_like=True, frozen=True):
    request_id: str
    prompt: list[int]
    params: dict[str, Any]  # fields of resolved SamplingParams
    streamed: bool


class Cancel(msgspec.Struct, tag=True, array_like=True, frozen=True):
    request_ids: list[str]


class Relearn(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The policy is to forget how often drafts of this method were accepted."""

    method: str


Command = Submit | Cancel | Relearn


# -- from the engine


class Ready(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The first message: the model is loaded and warmed up."""

    info: dict[str, Any]


class LoadFailed(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Instead of `Ready`: the model cannot be loaded; the process ends."""

    error: str


class Accepted(msgspec.Struct, tag=True, array_like=True, frozen=True):
    request_id: str


class LoggedToken(msgspec.Struct, tag=True, array_like=True, frozen=True):
    token: int
    logprob: float
    rank: int


class Delta(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """What a step committed for one answer of a streamed request."""

    request_id: str
    index: int
    tokens: list[int]
    kinds: list[int]
    text: str  # of requests with stop strings; else empty, and the receiver decodes the tokens
    finish_reason: str | None
    logprobs: list[list[LoggedToken]] | None  # per token: the chosen one first, then the most likely
    draft: tuple[str, int, int] | None  # of the step: method, nodes, depth


class Answer(msgspec.Struct, tag=True, array_like=True, frozen=True):
    index: int
    tokens: list[int]
    text: str  # of requests with stop strings; else empty, and the receiver decodes the tokens
    finish_reason: str
    stop_reason: int | str | None
    logprobs: list[list[LoggedToken]] | None
    stats: SpeculationStats


class Ended(msgspec.Struct, tag=True, array_like=True, frozen=True):
    request_id: str
    answers: list[Answer]
    first_token_time: float  # time.perf_counter, which all processes of a machine share
    finished_time: float
    num_cached: int  # prompt tokens found in the prefix cache
    prompt_logprobs: list[list[LoggedToken]] | None = None  # of all but the first: the prompt's own, then the likeliest


class Failed(msgspec.Struct, tag=True, array_like=True, frozen=True):
    request_id: str
    kind: str  # class of the PacelineError
    error: str
    field: str | None  # the parameter that was refused


class Gauges(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """State of the engine, sent at most a few times a second."""

    running: int
    waiting: int
    cache_usage: float  # share of the cache's blocks that running sequences hold
    num_steps: int
    num_pass_tokens: int
    step_s: float
    expected_gain: float | None
    failed_drafters: dict[str, str]  # a drafter that failed and is off, and why


Event = Accepted | Delta | Ended | Failed | Gauges | Ready | LoadFailed

encode = msgspec.msgpack.Encoder().encode
decode_commands = msgspec.msgpack.Decoder(list[Command]).decode
decode_events = msgspec.msgpack.Decoder(list[Event]).decode
