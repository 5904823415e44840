"""Commands to an engine's loop and the events that it answers with, in a thread or over a socket. No torch.

A request travels: Submit > (streamed: Accepted, a Delta for each step) > Ended; or Failed at any point.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from paceline.core.sequence import Owner, Sequence, TokenLogprobs
from paceline.errors import PacelineError
from paceline.outputs import SpeculationStats
from paceline.sampling_params import SamplingParams

if TYPE_CHECKING:
    from paceline.engine.engine import Engine


@dataclass(frozen=True, slots=True)
class Request:
    request_id: str
    prompt: list[int]
    params: SamplingParams  # resolved
    wait_group: str | None = None
    streamed: bool = False  # its tokens are reported as they are committed
    may_wait: bool = False  # a full queue makes it wait; else it is refused
    owner: Owner = Owner()  # noqa: RUF009  (immutable)
    grammar: Any = None  # compiled `structured_outputs`, or the error of compiling them; None: the engine compiles


# -- commands


class Submit(NamedTuple):
    requests: list[Request]


class Cancel(NamedTuple):
    request_ids: SequenceOf[str]
    done: Future[None] | None = None  # resolved once their blocks are free


class Call(NamedTuple):
    function: Callable[[Engine], Any]
    done: Future[Any]


class Close(NamedTuple):
    pass


Command = Submit | Cancel | Call | Close


# -- events


class Accepted(NamedTuple):
    request_id: str
    sequences: SequenceOf[Sequence] = ()  # under way, for receivers of the engine's process, which only read them


class Delta(NamedTuple):
    """Tokens that a step committed for one answer of a streamed request."""

    request_id: str
    answer: int  # which of the request's n
    tokens: list[int]
    kinds: list[int]  # TokenKind of each
    text: str  # text for requests with stop strings, which the engine decodes; else empty
    finish_reason: str | None
    logprobs: list[TokenLogprobs] | None  # one entry for each token; None: not requested
    draft: tuple[str, int, int] | None  # the step's method, nodes, depth


class FinishedAnswer(NamedTuple):
    number: int  # which of the request's n
    tokens: list[int]
    text: str  # text for requests with stop strings; else empty
    finish_reason: str
    stop_reason: int | str | None
    logprobs: list[TokenLogprobs] | None
    stats: SpeculationStats


class Ended(NamedTuple):
    request_id: str
    answers: list[FinishedAnswer]
    first_token_time: float  # time.perf_counter, which all processes of a machine share
    finished_time: float
    num_cached: int  # prompt tokens found in the prefix cache
    prompt_logprobs: list[TokenLogprobs] | None = None  # logprobs of all prompt tokens but the first


class Failed(NamedTuple):
    request_id: str
    error: PacelineError


Event = Accepted | Delta | Ended | Failed
