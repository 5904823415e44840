"""The HTTP process's side of the engine: starts its process, sends requests, hands events to the waiting tasks.

A reader that is slow keeps its own events waiting in its own inbox and slows no other. When the engine's process ends,
every open request fails at once, and the process is started again a bounded number of times.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import subprocess
import sys
import tempfile
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from paceline.config import EngineConfig, SpeculationConfig
from paceline.errors import EngineDied, PacelineError
from paceline.sampling_params import SamplingParams
from paceline.server import messages as m
from paceline.server.messages import Settings

log = logging.getLogger("paceline.server")
RESTARTS = 3  # within RESTART_WINDOW_S; after that the server stays down, and /health says why
RESTART_WINDOW_S = 600.0
STOP_S = 10.0  # for the engine to store its state
_PARAM_FIELDS = [each.name for each in fields(SamplingParams)]


@dataclass(frozen=True)
class EngineSettings:
    model: str
    load: dict[str, Any] = field(default_factory=dict)  # keywords of build.load
    engine: EngineConfig = EngineConfig()  # noqa: RUF009  (frozen)
    speculation: SpeculationConfig = SpeculationConfig()  # noqa: RUF009  (frozen)


class Stream:
    """Events of one request, in the order the engine sent them."""

    def __init__(self, request_id: str) -> None:
        self.request_id, self.submitted_at = request_id, time.perf_counter()
        self._events: deque[m.Event] = deque()
        self._arrived = asyncio.Event()

    def put(self, event: m.Event) -> None:
        self._events.append(event)
        self._arrived.set()

    async def get(self) -> m.Event:
        while not self._events:
            self._arrived.clear()
            await self._arrived.wait()
        return self._events.popleft()


class EngineClient:
    def __init__(
        self,
        settings: EngineSettings,
        observers: Sequence[Callable[[m.Event], None]] = (),
        on_cancel: Callable[[str], None] = lambda request_id: None,
    ) -> None:
        """`observers` see every event, for metrics; they must not wait."""
        self.settings = settings
        self.info: dict[str, Any] = {}  # of the last `Ready`
        self.down: str | None = "the model is being loaded"  # None: requests are served
        self.lost = False  # it ended too often, and is not started again
        self.starts = 0
        self._observers, self._on_cancel = observers, on_cancel
        self._streams: dict[str, Stream] = {}
        self._reloads: dict[str, asyncio.Future[None]] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._started_at: deque[float] = deque()
        self._folder = tempfile.TemporaryDirectory(prefix="paceline-")
        self._context = zmq.asyncio.Context()
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = False

    async def start(self) -> None:
        """Returns once the model is loaded; raises PacelineError with the reason where it cannot be."""
        await self._launch()

    async def submit(self, prompt: list[int], params: SamplingParams, *, streamed: bool, request_id: str) -> Stream:
        if self.down is not None:
            raise EngineDied(self.down)
        given = {name: getattr(params, name) for name in _PARAM_FIELDS}
        command = m.encode_command(m.Submit(request_id, prompt, given, streamed))
        stream = self._streams[request_id] = Stream(request_id)
        await self._commands.send(command)
        return stream

    def cancel(self, request_id: str) -> None:
        """Free a request that is no longer wanted; harmless after its end."""
        if self._streams.pop(request_id, None) is None:
            return
        self._on_cancel(request_id)
        if self.down is None:
            self._spawn(self._commands.send(m.encode_command(m.Cancel([request_id]))))

    @property
    def num_open(self) -> int:
        return len(self._streams)

    async def close(self) -> None:
        """Stop the engine; open requests fail."""
        self._closing, self.down = True, "the server is shutting down"
        process = self._process
        if process is not None and process.stdin is not None:
            process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(process.wait, STOP_S)
            if process.poll() is None:
                process.kill()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._fail_open(self.down)
        self._context.destroy(linger=0)
        self._folder.cleanup()

    # -- the process

    async def _launch(self) -> None:
        self.starts += 1
        self._started_at.append(time.monotonic())
        folder = Path(self._folder.name) / str(self.starts)  # sockets of its own: no message of a dead engine arrives
        folder.mkdir()
        addresses = f"ipc://{folder}/commands", f"ipc://{folder}/events"
        self._commands = self._context.socket(zmq.PUSH)
        self._events = self._context.socket(zmq.PULL)
        for socket, address in zip((self._commands, self._events), addresses, strict=True):
            socket.set(zmq.LINGER, 0)
            socket.set_hwm(0)
            socket.bind(address)
        each = self.settings
        settings = Settings(*addresses, each.model, each.load, each.engine, each.speculation, log_level_name())
        command = [sys.executable, "-m", "paceline.server.worker"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(settings) + b"\n")
        self._process.stdin.flush()
        gone = asyncio.get_running_loop().create_task(asyncio.to_thread(self._process.wait))
        receive = asyncio.ensure_future(self._events.recv())
        await asyncio.wait((gone, receive), return_when=asyncio.FIRST_COMPLETED)
        if not receive.done():
            receive.cancel()
            raise EngineDied(f"the engine's process ended while loading the model, with {_exit(self._process)}")
        (first,) = m.decode_events(receive.result())
        if isinstance(first, m.LoadFailed):
            await gone
            raise PacelineError(first.error)
        assert isinstance(first, m.Ready)
        self.info, self.down = first.info, None
        self._spawn(self._receive(self._events))
        self._spawn(self._watch(gone))

    async def _receive(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            for event in m.decode_events(await socket.recv()):
                for observe in self._observers:
                    observe(event)
                match event:
                    case m.Accepted() | m.Delta():
                        stream = self._streams.get(event.request_id)
                    case m.Ended() | m.Failed():
                        stream = self._streams.pop(event.request_id, None)
                    case _:
                        continue
                if stream is not None:
                    stream.put(event)

    async def _watch(self, gone: asyncio.Task[int]) -> None:
        await gone
        if self._closing:
            return
        assert self._process is not None
        reason = f"the engine's process ended with {_exit(self._process)}"
        log.error("%s; %d requests fail", reason, len(self._streams))
        self.down = f"{reason}; it is being started again"
        self._fail_open(reason)
        self._spawn(self._relaunch(reason))

    async def _relaunch(self, reason: str) -> None:
        while self._may_start():
            for socket in (self._commands, self._events):
                socket.close(0)
            try:
                await self._launch()
                log.warning("the engine serves again")
                return
            except EngineDied as error:  # its process was killed while it loaded the model
                reason = str(error)
                log.error("%s", reason)
            except PacelineError as error:
                self.lost = True
                self.down = f"{reason}, and could not be started again: {error}"
                log.critical("%s", self.down)
                return
        self.lost = True
        self.down = f"{reason}, for the {RESTARTS + 1}th time in {RESTART_WINDOW_S:.0f} s; start the server again"
        log.critical("%s", self.down)

    def _may_start(self) -> bool:
        while self._started_at and time.monotonic() - self._started_at[0] > RESTART_WINDOW_S:
            self._started_at.popleft()
        return len(self._started_at) <= RESTARTS

    def _fail_open(self, reason: str) -> None:
        for request_id, stream in list(self._streams.items()):
            failed = m.Failed(request_id, EngineDied.__name__, reason, None)
            stream.put(failed)
            for observe in self._observers:
                observe(failed)
        self._streams.clear()

    def _spawn(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def new_request_id(prefix: str) -> str:
    return f"{prefix}-{uuid.uuid4().hex}"


def log_level_name() -> str:
    return logging.getLevelName(logging.getLogger("paceline").getEffectiveLevel())


def _exit(process: subprocess.Popen[bytes]) -> str:
    code = process.poll()
    return f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
