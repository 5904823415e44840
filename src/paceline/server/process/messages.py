"""Encoding of commands and events for the socket between the HTTP process and the engine's process, in msgpack.

A message is a list of either, each `[code, *fields]`. Both processes run one version of this file, since the HTTP
process starts the engine's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from paceline import errors
from paceline.config import EngineConfig, SpeculationConfig
from paceline.core.sequence import Owner
from paceline.engine.events import Accepted, Cancel, Delta, Ended, Event, Failed, FinishedAnswer, Request, Submit
from paceline.errors import InvalidParameter, PacelineError, RequestFailed
from paceline.outputs import SpeculationStats
from paceline.sampling_params import SamplingParams


@dataclass(frozen=True)
class EngineSettings:
    """Everything a worker is started with; a restarted one gets equal settings. The first message, in JSON."""

    model: str
    load: dict[str, Any] = field(default_factory=dict)  # keywords of build.load
    engine: EngineConfig = EngineConfig()  # noqa: RUF009  (frozen)
    speculation: SpeculationConfig = SpeculationConfig()  # noqa: RUF009  (frozen)
    log_level: int = logging.WARNING
    log_json: bool = False


class Relearn(NamedTuple):
    """A command: the policy forgets how often drafts of the method were accepted."""

    method: str


class Ping(NamedTuple):
    """A command: the engine answers with its gauges once its step is finished."""


class Ready(NamedTuple):
    """The first event: the model is loaded and warmed up."""

    info: dict[str, Any]


class LoadFailed(NamedTuple):
    """An event in place of `Ready`: the model cannot be loaded; the process ends."""

    error: str


class Gauges(NamedTuple):
    """State of the engine, sent at most a few times a second."""

    running: int
    waiting: int
    cache_usage: float  # share of the cache's blocks that running sequences hold
    num_steps: int
    num_pass_tokens: int
    step_s: float
    expected_gain: float | None
    failed_drafters: dict[str, str]  # a drafter that failed and is off, and why
    longest_step_s: float = 0.0  # seconds; the longest step to expect


WorkerCommand = Submit | Cancel | Relearn | Ping
WorkerEvent = Event | Gauges | Ready | LoadFailed
_CODES = {kind: code for code, kind in enumerate((Accepted, Delta, Ended, Failed, Gauges, Ready, LoadFailed))}
_encode, _decode = msgspec.msgpack.Encoder().encode, msgspec.msgpack.Decoder(list[Any]).decode


def encode_settings(settings: EngineSettings) -> bytes:
    return msgspec.json.encode(settings)


def decode_settings(message: bytes) -> EngineSettings:
    return msgspec.json.decode(message, type=EngineSettings)


def encode_command(command: WorkerCommand) -> bytes:
    """Encode one command, which `join_commands` makes part of a message."""
    match command:
        case Submit([request]):
            fields = request.request_id, request.prompt, request.params, request.wait_group, request.streamed
            return _encode((0, *fields, request.owner))
        case Cancel(request_ids):
            return _encode((1, request_ids))
        case Relearn(method):
            return _encode((2, method))
        case Ping():
            return _encode((3,))
    raise ValueError(f"{type(command).__name__} is not sent, or of several requests")


def join_commands(encoded: Sequence[bytes]) -> bytes:
    return _encode([msgspec.Raw(command) for command in encoded])


def decode_commands(message: bytes) -> list[WorkerCommand]:
    return [_COMMANDS[code](*fields) for code, *fields in _decode(message)]


def _submit(
    request_id: str, prompt: list[int], params: dict[str, Any], group: str | None, streamed: bool, owner: list[Any]
) -> Submit:
    whose = Owner(*owner)
    return Submit([Request(request_id, prompt, SamplingParams(**params), group, streamed=streamed, owner=whose)])


_COMMANDS: tuple[Callable[..., WorkerCommand], ...] = (_submit, Cancel, Relearn, Ping)


def encode_events(events: Iterable[WorkerEvent]) -> bytes:
    return _encode([(_CODES[type(event)], *_fields(event)) for event in events])


def _fields(event: WorkerEvent) -> tuple[Any, ...]:
    match event:
        case Delta():  # the most common
            return event
        case Accepted(request_id):
            return (request_id,)
        case Failed(request_id, error):
            field = error.field if isinstance(error, InvalidParameter) else None
            return request_id, type(error).__name__, str(error), field
    return event


def decode_events(message: bytes) -> list[WorkerEvent]:
    return [_EVENTS[code](*fields) for code, *fields in _decode(message)]


def _ended(request_id: str, answers: list[list[Any]], *fields: Any) -> Ended:
    return Ended(request_id, [_answer(*each) for each in answers], *fields)


def _answer(*fields: Any) -> FinishedAnswer:
    *others, stats = fields
    return FinishedAnswer._make([*others, SpeculationStats(**stats)])


def _failed(request_id: str, kind: str, message: str, field: str | None) -> Failed:
    if field is not None:
        return Failed(request_id, InvalidParameter(field, message.removeprefix(f"{field}: ")))
    known = getattr(errors, kind, None)
    if isinstance(known, type) and issubclass(known, PacelineError):
        return Failed(request_id, known(message))
    return Failed(request_id, RequestFailed(message))


_EVENTS: tuple[Callable[..., WorkerEvent], ...] = (Accepted, Delta, _ended, _failed, Gauges, Ready, LoadFailed)
