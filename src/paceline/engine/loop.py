"""One thread owns the engine and steps it; all others send it commands and receive events.

`EngineLoop` is the only caller of `Engine`: it carries out commands between steps, so engine, scheduler, drafters and
policy have no locks. It knows no threads: `EngineThread` runs it in one, over a queue; a process of its own runs it
over a socket. The loop never waits for a receiver, and an exception ends the requests it belongs to and no others.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar

from paceline.core.sequence import Sequence
from paceline.engine import events
from paceline.engine.batch import StepResult
from paceline.engine.engine import Engine
from paceline.errors import EngineClosed, EngineDied, InvalidParameter, PacelineError, QueueFull, RequestFailed
from paceline.text.grammar import FIELD as GRAMMAR

log = logging.getLogger("paceline")
T = TypeVar("T")
CLOSED = "the model was closed; load it again to go on"


class Receiver(Protocol):
    """Called by the loop: it must neither wait nor raise."""

    def put(self, event: events.Event, /) -> None: ...


class EventSink(Receiver, Protocol):
    """The receiver of all requests' events; `flush` follows the last event of a step, or of commands."""

    def flush(self) -> None: ...


@dataclass(slots=True)
class _OpenRequest:
    sequences: list[Sequence]
    unfinished: int  # sequences
    streamed: bool
    first_token_time: float | None = None


class EngineLoop:
    def __init__(self, engine: Engine, commands: SimpleQueue[events.Command], sink: EventSink) -> None:
        self.engine, self._commands, self._sink = engine, commands, sink
        self._open: dict[str, _OpenRequest] = {}
        self._watched: set[str] = set()  # requests that are streamed, or have no first token yet
        self._backlog: deque[events.Request] = deque()  # requests that may wait, in order of arrival
        self._died: EngineDied | None = None

    def run(self) -> None:
        """Take commands and step until a `Close`."""
        while self._take_commands():
            with self.engine.at_work():
                going = True
                while going:  # until a command comes, or there is nothing to do
                    while self._backlog and self._add(self._backlog[0]):
                        self._backlog.popleft()
                    if self.engine.has_work:
                        self._step()
                    self._sink.flush()
                    going = self.engine.has_work and self._commands.empty()

    def abandon(self, error: PacelineError) -> None:
        """Fail every request that is open and every command that is left."""
        for request_id in [*self._open, *(request.request_id for request in self._backlog)]:
            self._fail(request_id, error)
        self._backlog.clear()
        while not self._commands.empty():
            match self._commands.get():
                case events.Submit(requests):
                    for request in requests:
                        self._fail(request.request_id, error)
                case events.Cancel(_, done) if done is not None:
                    done.set_result(None)
                case events.Call(_, done):
                    done.set_exception(_fresh(error))

    # -- commands

    def _take_commands(self) -> bool:
        """Carry out every queued command; an idle engine waits for one. Return False after a `Close`."""
        idle = not self.engine.has_work and not self._backlog
        while idle or not self._commands.empty():
            idle = False
            match self._commands.get():
                case events.Submit(requests):
                    for request in requests:
                        self._submit(request)
                case events.Cancel(request_ids, done):
                    self._cancel(request_ids, done)
                case events.Call(function, done):
                    self._call(function, done)
                case events.Close():
                    return False
        return True

    def _submit(self, request: events.Request) -> None:
        if (request.may_wait and self._backlog) or not self._add(request):
            self._backlog.append(request)

    def _add(self, request: events.Request) -> bool:
        """Add a request to the engine, or fail it. Return False where the queue is full and the request may wait."""
        request_id = request.request_id
        try:
            if self._died is not None:
                raise _fresh(self._died)
            sequences = self.engine.add_request(
                request_id, request.prompt, request.params, request.wait_group, request.grammar, request.owner
            )
        except QueueFull as full:
            if request.may_wait:
                return False
            self._fail(request_id, full)
        except Exception as problem:
            self._fail(request_id, problem)
        else:
            self._open[request_id] = _OpenRequest(sequences, len(sequences), request.streamed)
            self._watched.add(request_id)
            if request.streamed:
                self._sink.put(events.Accepted(request_id, sequences))
        return True

    def _cancel(self, request_ids: SequenceOf[str], done: Future[None] | None) -> None:
        cancelled = set(request_ids)
        if self._backlog:
            self._backlog = deque(request for request in self._backlog if request.request_id not in cancelled)
        for request_id in request_ids:
            if self._forget(request_id) is not None:
                self.engine.cancel(request_id)
        if done is not None:
            done.set_result(None)

    def _call(self, function: Callable[[Engine], Any], done: Future[Any]) -> None:
        if not done.set_running_or_notify_cancel():
            return
        try:
            done.set_result(function(self.engine))
        except BaseException as problem:
            done.set_exception(problem)

    # -- steps

    def _step(self) -> None:
        try:
            result = self.engine.step()
        except EngineDied as died:
            self._died = died
            log.error("the engine died: %s", died)
            for request_id in list(self._open):
                self._cancel_failed(request_id, died)
            return
        except Exception as problem:
            self._fail_step(problem)
            return
        now, watched, ended = time.perf_counter(), self._watched, set(result.ended)
        for index, sequence in enumerate(result.sequences):
            if index in ended or sequence.request_id in watched:
                self._report(result, index, index in ended, now)

    def _fail_step(self, problem: Exception) -> None:
        """Fail the requests that took part in a step that raised; waiting requests are kept."""
        log.debug("a step failed", exc_info=problem)
        scheduler = self.engine.scheduler
        head = scheduler.waiting.head()
        part = scheduler.running or ([] if head is None else [head])  # the one to be admitted, where none ran
        for request_id in dict.fromkeys(sequence.request_id for sequence in part):
            self._cancel_failed(request_id, problem)

    def _cancel_failed(self, request_id: str, problem: Exception) -> None:
        for sequence in self.engine.cancel(request_id):
            sequence.finish_reason, sequence.error = "error", str(_failure(problem))
        self._fail(request_id, problem)

    def _report(self, result: StepResult, index: int, finished: bool, now: float) -> None:
        """Put the events of one sequence of a step."""
        sequence = result.sequences[index]
        request_id = sequence.request_id
        request = self._open.get(request_id)
        if request is None:  # added by a Call
            return
        if finished and sequence.finish_reason == "error":
            self.engine.cancel(request_id)  # its other answers
            reason, matcher = sequence.error or "no reason is known", sequence.matcher
            is_grammars = matcher is not None and matcher.problem is not None
            self._fail(request_id, InvalidParameter(GRAMMAR, reason) if is_grammars else RequestFailed(reason))
            return
        if request.first_token_time is None:
            request.first_token_time = now
            if not request.streamed:
                self._watched.discard(request_id)
        if request.streamed:
            self._sink.put(_delta(result, index, sequence.finish_reason if finished else None))
        if finished:
            request.unfinished -= 1
            if not request.unfinished:
                self._forget(request_id)
                self._sink.put(_ended(request.sequences, request.first_token_time, now))

    def _fail(self, request_id: str, problem: Exception) -> None:
        self._forget(request_id)
        self._sink.put(events.Failed(request_id, _failure(problem)))

    def _forget(self, request_id: str) -> _OpenRequest | None:
        self._watched.discard(request_id)
        return self._open.pop(request_id, None)


def _delta(result: StepResult, index: int, finish_reason: str | None) -> events.Delta:
    sequence, tokens, draft = result.sequences[index], list(result.tokens[index]), result.drafts.get(index)
    logprobs = None if sequence.logprobs is None else sequence.logprobs[len(sequence.logprobs) - len(tokens) :]
    kinds, text = result.kinds_of(index), result.texts.get(index, "")
    drafted = None if draft is None else (draft.method, draft.nodes, draft.depth)
    return events.Delta(sequence.request_id, sequence.index, tokens, kinds, text, finish_reason, logprobs, drafted)


def _ended(sequences: list[Sequence], first_token_time: float, finished_time: float) -> events.Ended:
    first, answers = sequences[0], [_answer(sequence) for sequence in sequences]
    cached = max(sequence.num_cached_prompt for sequence in sequences)
    return events.Ended(first.request_id, answers, first_token_time, finished_time, cached, first.prompt_logprobs)


def _answer(one: Sequence) -> events.FinishedAnswer:
    ending = one.finish_reason or "", one.stop_reason
    return events.FinishedAnswer(one.index, one.output_tokens, one.text, *ending, one.logprobs, one.stats)


def _failure(problem: Exception) -> PacelineError:
    """Return an error of its own for each request: an exception collects the traceback of the thread that raises it."""
    if isinstance(problem, PacelineError):
        return _fresh(problem)
    failure = RequestFailed(f"{type(problem).__name__}: {problem}")
    failure.__cause__ = problem
    return failure


def _fresh(error: PacelineError) -> PacelineError:
    copy = error.__class__.__new__(error.__class__, *error.args)
    copy.args, copy.__cause__ = error.args, error.__cause__
    copy.__dict__.update(error.__dict__)
    return copy


class EngineThread:
    """An EngineLoop in a daemon thread. Every method may be called from any thread, waits are interrupted by Ctrl-C."""

    def __init__(self, engine: Engine, at_end: Callable[[], None] = lambda: None) -> None:
        """`at_end` is called by the thread after its last step."""
        self._commands: SimpleQueue[events.Command] = SimpleQueue()
        self._receivers: dict[str, Receiver] = {}
        self._refusal: PacelineError | None = None  # set: nothing is put into the queue any more
        self._lock = threading.RLock()  # lock of the refusal; a stream that is garbage may be dropped while it is held
        self._thread = threading.Thread(target=self._run, args=(engine, at_end), name="paceline-engine", daemon=True)
        self._thread.start()

    def submit(self, requests: list[events.Request], receiver: Receiver) -> None:
        if threading.current_thread() is self._thread:
            raise RuntimeError("a function called on the engine's thread cannot wait for answers")
        for request in requests:
            self._receivers[request.request_id] = receiver
        self._post(events.Submit(requests))

    def cancel(self, request_ids: SequenceOf[str]) -> Future[None]:
        """End the requests and their events. The future is done once their blocks are free."""
        done: Future[None] = Future()
        for request_id in request_ids:
            self._receivers.pop(request_id, None)
        try:
            self._post(events.Cancel(list(request_ids), done))
        except PacelineError:  # closed: nothing runs any more
            done.set_result(None)
        return done

    def call(self, function: Callable[[Engine], T]) -> Future[T]:
        """Run `function(engine)` between two steps."""
        done: Future[T] = Future()
        self._post(events.Call(function, done))
        return done

    def close(self) -> None:
        """Refuse later commands, fail open requests, and return once `at_end` has been called."""
        with self._lock:
            if self._refusal is None:
                self._commands.put(events.Close())
                self._refusal = EngineClosed(CLOSED)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def put(self, event: events.Event, /) -> None:
        """Hand an event of the loop to its request's receiver, if there is one."""
        receivers = self._receivers
        is_last = isinstance(event, events.Ended | events.Failed)
        receiver = receivers.pop(event.request_id, None) if is_last else receivers.get(event.request_id)
        if receiver is not None:
            try:
                receiver.put(event)
            except Exception:  # an event loop that was closed meanwhile
                log.debug("an event of request %s was lost", event.request_id, exc_info=True)

    def flush(self) -> None:
        """Do nothing: events are handed over one by one."""

    def _post(self, command: events.Command) -> None:
        with self._lock:
            if self._refusal is not None:
                raise _fresh(self._refusal)
            if not self._thread.is_alive():  # a forked process has no threads of its parent's
                raise EngineClosed("the model was loaded in another process; load it in this one")
            self._commands.put(command)

    def _run(self, engine: Engine, at_end: Callable[[], None]) -> None:
        loop = EngineLoop(engine, self._commands, self)
        crash: PacelineError | None = None
        try:
            loop.run()
        except BaseException as problem:  # a fault of ours: no caller may wait for ever
            log.critical("the engine's thread ended", exc_info=problem)
            crash = EngineDied(f"the engine's thread ended: {type(problem).__name__}: {problem}; load the model again")
        with self._lock:
            self._refusal = refusal = crash or self._refusal or EngineClosed(CLOSED)
        loop.abandon(refusal)
        try:
            at_end()
        except Exception:
            log.warning("what was learnt could not be kept", exc_info=True)
