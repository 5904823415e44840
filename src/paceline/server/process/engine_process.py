"""The process of an engine, seen from outside: its start, its socket and its end. It runs `worker`."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace

from paceline.errors import EngineDied, PacelineError
from paceline.platform.python_process import module_command
from paceline.server.logs import log_level, logs_json
from paceline.server.process import messages as m
from paceline.server.process.channel import Inbox, framed
from paceline.server.process.messages import EngineSettings, LoadFailed, Ready, WorkerCommand, WorkerEvent

STOP_S = 10.0  # seconds in which the engine stores its state
WORKER = "paceline.server.process.worker"


class EngineProcess:
    def __init__(self, settings: EngineSettings, take: Callable[[EngineProcess, list[WorkerEvent]], None]) -> None:
        """`take` gets the events of each message after the first."""
        self.settings, self._on_events = settings, take
        self._unsent: list[bytes] = []
        self._transport: asyncio.Transport | None = None
        self.longest_step_s = 0.0  # the longest step to expect, as the engine says
        self.heard_at = 0.0  # time of the last message (time.monotonic)

    async def start(self) -> Ready:
        """Start the process and wait until the model is loaded; raise PacelineError if it cannot be."""
        loop = asyncio.get_running_loop()
        self._first: asyncio.Future[list[WorkerEvent]] = loop.create_future()
        own, worker_end = socket.socketpair()
        with worker_end:
            number = worker_end.fileno()
            self._process = subprocess.Popen(
                module_command(WORKER, str(number)), stdin=subprocess.DEVNULL, pass_fds=[number], start_new_session=True
            )
        self.gone = asyncio.ensure_future(asyncio.to_thread(self._process.wait))
        try:
            self._transport, _ = await loop.create_unix_connection(lambda: Inbox(self._take), sock=own)
            settings = replace(self.settings, log_level=log_level(), log_json=logs_json())
            self._transport.write(framed(m.encode_settings(settings)))
            await asyncio.wait((self.gone, self._first), return_when=asyncio.FIRST_COMPLETED)
            if not self._first.done():
                raise EngineDied(f"the engine's process ended while loading the model, with {self.exit}")
            (first,) = self._first.result()
            if isinstance(first, LoadFailed):
                raise PacelineError(first.error)
            assert isinstance(first, Ready)
            return first
        except BaseException:
            await self.stop()
            raise

    def _take(self, message: bytes) -> None:
        events, self.heard_at = m.decode_events(message), time.monotonic()
        if self._first.done():
            self._on_events(self, events)
        else:
            self._first.set_result(events)

    def send(self, command: WorkerCommand) -> None:
        """Send a command, in one message with all of this turn of the event loop; raise if it cannot be encoded."""
        self._unsent.append(m.encode_command(command))
        if len(self._unsent) == 1:
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        unsent, self._unsent = self._unsent, []
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(framed(m.join_commands(unsent)))  # in order, once the socket takes it

    async def stop(self) -> None:
        """End the commands, and with them the process; harmless after its end."""
        if self._transport is not None:
            self._transport.write_eof()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.shield(self.gone), STOP_S)
        if not self.gone.done():
            self._process.kill()
            await self.gone
        self.close()

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    @property
    def exit(self) -> str:
        code = self._process.poll()
        return f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
