"""The engine's process: it builds the engine, steps it, and is connected to the HTTP process by one socket.

The socket's number is the only argument, and the first message on it the settings. The process ends when the socket is
closed at the other end. One thread receives commands; the main thread owns the engine and sends the events of a step
as one message.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as Overdue
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

from paceline.build import EngineBundle, LoadedTarget, build, load
from paceline.engine.events import Call, Cancel, Close, Command, Event, Request, Submit
from paceline.engine.loop import EngineLoop
from paceline.errors import EngineClosed, InvalidParameter, PacelineError, QueueFull
from paceline.platform.garbage import trim_heap
from paceline.server.logs import OWN, set_up_logs
from paceline.server.process.channel import Channel
from paceline.server.process.messages import (
    Gauges,
    LoadFailed,
    Ping,
    Ready,
    Relearn,
    WorkerCommand,
    WorkerEvent,
    decode_commands,
    decode_settings,
    encode_events,
)
from paceline.text.grammar import FIELD

log = logging.getLogger("paceline")
GAUGES_EVERY_S = 0.25
TRIM_EVERY_S = 10.0
COMPILE_S = 30.0  # seconds in which a grammar is compiled
MAX_ENDLESS = 2  # compilations beyond COMPILE_S that may go on; each takes a core
SWITCH_S = 0.0005  # seconds between thread switches; bounds how long a command waits for a step


class EventSender:
    """The loop's events, which `flush` sends as one message."""

    def __init__(self, channel: Channel, bundle: EngineBundle) -> None:
        self._channel, self._bundle = channel, bundle
        self._pending: list[WorkerEvent] = []
        self._gauges_at, self._trimmed_at = 0.0, time.perf_counter()
        self._longest_s = 0.0  # seconds of the longest step so far

    def put(self, event: Event, /) -> None:
        self._pending.append(event)

    def flush(self) -> None:
        now, idle = time.perf_counter(), not self._bundle.engine.has_work
        self._longest_s = max(self._longest_s, self._bundle.engine.clock.step_s)
        if idle or now - self._gauges_at >= GAUGES_EVERY_S:
            self._gauges_at = now
            self._pending.append(_gauges(self._bundle, self._longest_s))
        if now - self._trimmed_at >= TRIM_EVERY_S:
            self._trimmed_at = now
            trim_heap()
        if self._pending:
            self._channel.send(encode_events(self._pending), wait=idle)
            self._pending.clear()


def _gauges(bundle: EngineBundle, longest_s: float) -> Gauges:
    engine = bundle.engine
    expected = [bundle.policy.plain_seconds(engine.config.max_num_batched_tokens, each) for each in (False, True)]
    scheduler, stats = engine.scheduler, engine.stats
    return Gauges(
        len(scheduler.running),
        len(scheduler.waiting),
        1 - engine.blocks.num_free / engine.blocks.num_blocks,
        stats.num_steps,
        stats.num_pass_tokens,
        stats.step_s,
        bundle.policy.expected_gain,
        dict.fromkeys(engine.drafters.retired, "failed"),
        max([longest_s, *filter(None, expected)]),
    )


class GrammarCompiler:
    """A compiler of grammars, one by one, each in a bounded time. A compilation cannot be stopped: one that takes too
    long goes on in its thread, and a new thread compiles the next ones."""

    def __init__(self, compile: Callable[[Mapping[str, Any]], Any]) -> None:
        self._compile = compile
        self._work: SimpleQueue[tuple[Mapping[str, Any], Future[Any]]] | None = None  # the compiling thread's
        self._endless: list[Future[Any]] = []  # compilations that were given up

    @property
    def num_endless(self) -> int:
        return sum(not grammar.done() for grammar in self._endless)

    def compile(self, wanted: Mapping[str, Any]) -> Any:
        """Return the grammar, or the error."""
        if self.num_endless >= MAX_ENDLESS:
            return QueueFull("grammars that take long are being compiled; try again later")
        if self._work is None:
            self._work = SimpleQueue()
            run = functools.partial(self._run, self._work)
            threading.Thread(target=run, name="paceline-compiler", daemon=True).start()
        grammar: Future[Any] = Future()
        self._work.put((wanted, grammar))
        try:
            return grammar.result(COMPILE_S)
        except Overdue:
            self._endless = [*(each for each in self._endless if not each.done()), grammar]
            self._work = None
            return InvalidParameter(FIELD, f"takes more than {COMPILE_S:.0f} s to compile; make it simpler")
        except PacelineError as error:
            return error
        except Exception as error:
            return InvalidParameter(FIELD, f"cannot be compiled: {type(error).__name__}: {error}")

    def _run(self, work: SimpleQueue[tuple[Mapping[str, Any], Future[Any]]]) -> None:
        """Compile grammars until another thread does. One thread compiles all, since each thread has its own heap."""
        while work is self._work:
            wanted, grammar = work.get()
            try:
                grammar.set_result(self._compile(wanted))
            except Exception as problem:
                grammar.set_exception(problem)


class Worker:
    """The engine's loop and the commands that reach it, those with a grammar after it is compiled."""

    def __init__(self, channel: Channel, bundle: EngineBundle) -> None:
        self._channel, self._bundle = channel, bundle
        self.commands: SimpleQueue[Command] = SimpleQueue()
        self._structured: SimpleQueue[Request] = SimpleQueue()  # requests whose grammars are compiled first
        self._uncompiled: set[str] = set()  # ids of these requests, unless cancelled
        self._order = threading.Lock()  # a Cancel is put after its Submit, or there is no Submit

    def run(self, sender: EventSender) -> None:
        threading.Thread(target=self._receive, name="paceline-commands", daemon=True).start()
        threading.Thread(target=self.compile_grammars, name="paceline-grammars", daemon=True).start()
        engine_loop = EngineLoop(self._bundle.engine, self.commands, sender)
        engine_loop.run()
        engine_loop.abandon(EngineClosed("the server is shutting down"))
        sender.flush()
        self._bundle.close()

    def _receive(self) -> None:
        """Take commands until the HTTP process closes its end, or is gone."""
        while (message := self._channel.receive()) is not None:
            for command in decode_commands(message):
                self.take(command)
        self.commands.put(Close())

    def take(self, command: WorkerCommand) -> None:
        match command:
            case Submit(requests):
                for request in requests:
                    self._submit(request)
            case Cancel(request_ids):
                with self._order:
                    self._uncompiled.difference_update(request_ids)
                    self.commands.put(command)
            case Relearn(method):
                self.commands.put(Call(lambda _: self._bundle.policy.relearn(method), Future()))
            case Ping():
                self.commands.put(Call(lambda _: None, Future()))

    def _submit(self, request: Request) -> None:
        if request.params.structured_outputs is None:
            self.commands.put(Submit([request]))
        else:
            self._uncompiled.add(request.request_id)
            self._structured.put(request)

    def compile_grammars(self) -> None:
        """Compile grammars and submit their requests, in a thread: steps and other requests do not wait for the seconds
        that a large schema takes."""
        compiler = GrammarCompiler(lambda wanted: self._bundle.engine.admission.grammars.compile(wanted))
        while True:
            request = self._structured.get()
            if request.request_id in self._uncompiled and request.params.structured_outputs is not None:
                request = replace(request, grammar=compiler.compile(request.params.structured_outputs))
            with self._order:
                if request.request_id in self._uncompiled:
                    self._uncompiled.discard(request.request_id)
                    self.commands.put(Submit([request]))


def main() -> None:
    sys.setswitchinterval(SWITCH_S)
    own = socket.socket(fileno=int(sys.argv[1]))
    own.set_inheritable(False)
    channel = Channel(own)
    message = channel.receive()
    if message is None:
        sys.exit(1)
    settings = decode_settings(message)
    text = "%(asctime)s %(levelname)s engine: %(message)s"
    set_up_logs(as_json=settings.log_json, text=text, levels={OWN: settings.log_level})
    try:
        target = load(settings.model, **settings.load)
        bundle = build(target, settings.engine, settings.speculation)
    except PacelineError as error:
        channel.send(encode_events([LoadFailed(str(error))]), wait=True)
        sys.exit(1)
    channel.send(encode_events([Ready(_info(target, bundle))]), wait=True)
    Worker(channel, bundle).run(EventSender(channel, bundle))


def _info(target: LoadedTarget, bundle: EngineBundle) -> dict[str, Any]:
    loaded = target.loaded
    return {
        "pid": os.getpid(),
        "path": str(target.path),
        "note": target.note,
        "dtype": loaded.kind.label,
        "kv_dtype": loaded.kv_dtype,
        "device": loaded.decoder.device.type,
        "kernels": loaded.decoder.kernels.name,
        "vocab_size": loaded.config.vocab_size,
        "max_model_len": bundle.engine.max_model_len,
        "max_num_seqs": bundle.engine.config.max_num_seqs,
        "generation_defaults": json.loads(json.dumps(dict(loaded.generation_defaults))),
        "methods": [drafter.name for drafter in bundle.engine.drafters.drafters],
    }


if __name__ == "__main__":
    main()
