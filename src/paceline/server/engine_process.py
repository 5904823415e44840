"""One process of the engine: its start, its two sockets and its end. `worker` is the other side."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from paceline.config import EngineConfig, SpeculationConfig
from paceline.errors import EngineDied, PacelineError
from paceline.server import messages as m

STOP_S = 10.0  # for the engine to store its state
WORKER = [sys.executable, "-m", "paceline.server.worker"]


@dataclass(frozen=True)
class EngineSettings:
    model: str
    load: dict[str, Any] = field(default_factory=dict)  # keywords of build.load
    engine: EngineConfig = EngineConfig()  # noqa: RUF009  (frozen)
    speculation: SpeculationConfig = SpeculationConfig()  # noqa: RUF009  (frozen)


class EngineProcess:
    def __init__(self, settings: EngineSettings, context: zmq.asyncio.Context, folder: Path) -> None:
        """`folder` holds its sockets and is its own: no message of another process arrives."""
        self.settings = settings
        folder.mkdir()
        self._addresses = f"ipc://{folder}/commands", f"ipc://{folder}/events"
        self._unsent: list[msgspec.Raw] = []
        self._commands, self._events = context.socket(zmq.PUSH), context.socket(zmq.PULL)
        for socket, address in zip((self._commands, self._events), self._addresses, strict=True):
            socket.set(zmq.LINGER, 0)
            socket.set_hwm(0)
            socket.bind(address)

    async def start(self) -> m.Ready:
        """Returns once the model is loaded; raises PacelineError with the reason where it cannot be."""
        each = self.settings
        settings = m.Settings(*self._addresses, each.model, each.load, each.engine, each.speculation, _log_level())
        self._process = subprocess.Popen(WORKER, stdin=subprocess.PIPE, start_new_session=True)
        self.gone = asyncio.ensure_future(asyncio.to_thread(self._process.wait))
        receive = asyncio.ensure_future(self._events.recv())
        try:
            assert self._process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it is gone already
                self._process.stdin.write(msgspec.json.encode(settings) + b"\n")
                self._process.stdin.flush()
            await asyncio.wait((self.gone, receive), return_when=asyncio.FIRST_COMPLETED)
            if not receive.done():
                raise EngineDied(f"the engine's process ended while loading the model, with {self.exit}")
            (first,) = m.decode_events(receive.result())
            if isinstance(first, m.LoadFailed):
                raise PacelineError(first.error)
            assert isinstance(first, m.Ready)
            return first
        except BaseException:
            receive.cancel()
            await self.stop()
            raise

    def send(self, command: m.Command) -> None:
        """Commands of one turn of the event loop are one message. Raises where the command cannot be encoded."""
        self._unsent.append(msgspec.Raw(m.encode(command)))
        if len(self._unsent) == 1:
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        unsent, self._unsent = self._unsent, []
        if not self._commands.closed:
            self._commands.send(m.encode(unsent))  # in order, once the socket takes it

    async def receive(self) -> list[m.Event]:
        return m.decode_events(await self._events.recv())

    async def stop(self) -> None:
        """It ends when its stdin does; harmless where it has ended."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.shield(self.gone), STOP_S)
        if not self.gone.done():
            self._process.kill()
            await self.gone
        self.close()

    def close(self) -> None:
        for socket in (self._commands, self._events):
            socket.close(0)

    @property
    def exit(self) -> str:
        code = self._process.poll()
        return f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"


def _log_level() -> str:
    return logging.getLevelName(logging.getLogger("paceline").getEffectiveLevel())
