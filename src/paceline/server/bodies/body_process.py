"""The server's side of the process that reads long bodies: started at the first one, and again after one that had to be
ended. Bodies wait in turns (`core/fair_queue`), so a client with many, or a long one, keeps no other waiting.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import subprocess
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from paceline.core.fair_queue import FairQueue
from paceline.core.sequence import Owner
from paceline.errors import InvalidParameter, PacelineError, QueueFull
from paceline.platform.python_process import module_command
from paceline.server.bodies.body_worker import BodyAnswer, BodySettings
from paceline.server.process.channel import Inbox, framed

WORKER = "paceline.server.bodies.body_worker"
MOST_WAITING = 64 << 20  # bytes of one client's bodies that wait
WAIT_S = 120.0  # seconds of one body, where the machine is busy
ONE_THREAD = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}  # the engine needs the cores


@dataclass(eq=False)
class BodyJob:
    """A body that waits for its turn; its length is its number of bytes."""

    route: str
    raw: bytes
    owner: Owner
    request_id: str
    answer: asyncio.Future[BodyAnswer]
    tag: float = 0.0

    @property
    def wait_group(self) -> str:
        return self.request_id

    @property
    def max_len(self) -> int:
        return len(self.raw)


class BodyReader:
    def __init__(self, settings: Callable[[], BodySettings]) -> None:
        """`settings` are known once the model is loaded."""
        self._settings = settings
        self._queue, self._ids = FairQueue[BodyJob](), itertools.count()
        self._serving: asyncio.Task[None] | None = None  # answers the jobs, while there are any
        self._process: BodyProcess | None = None

    async def read(self, route: str, raw: bytes, client: str) -> BodyAnswer:
        """Return the worker's answer; raise PacelineError where the body takes too much."""
        waiting = sum(job.max_len for job in self._queue if job.owner.client == client)
        if waiting and waiting + len(raw) > MOST_WAITING:
            raise QueueFull(f"{waiting >> 20} MiB of long bodies wait to be read already; try again later")
        answer: asyncio.Future[BodyAnswer] = asyncio.get_running_loop().create_future()
        self._queue.add(BodyJob(route, raw, Owner(client=client), str(next(self._ids)), answer))
        if self._serving is None or self._serving.done():
            self._serving = asyncio.ensure_future(self._serve())
        return await answer

    async def close(self) -> None:
        if self._serving is not None:
            self._serving.cancel()
            await asyncio.gather(self._serving, return_exceptions=True)
        await self._stop()

    async def _serve(self) -> None:
        while (job := self._queue.head()) is not None:
            self._queue.take(job)
            self._queue.charge(job.owner.client, job.max_len)
            try:
                if not job.answer.done():  # its client may be gone
                    await self._serve_one(job)
            finally:
                self._queue.finished(job)

    async def _serve_one(self, job: BodyJob) -> None:
        try:
            if self._process is None:
                self._process = await BodyProcess.start(self._settings())
            answer = await asyncio.wait_for(self._process.ask(job.route, job.raw), WAIT_S)
        except (PacelineError, OSError, asyncio.TimeoutError) as problem:
            await self._stop()
            error = InvalidParameter("body", "takes too much time or memory to read; make it shorter")
            if not job.answer.done():
                job.answer.set_exception(problem if isinstance(problem, PacelineError) else error)
        except BaseException:
            job.answer.cancel()
            raise
        else:
            if not job.answer.done():
                job.answer.set_result(answer)

    async def _stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            await process.stop()


class BodyProcess:
    """One process; its `ask` is called for one body at a time."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process, self._transport = process, asyncio.Transport()
        self._arrived: asyncio.Queue[bytes | None] = asyncio.Queue()  # None: the process has ended

    @classmethod
    async def start(cls, settings: BodySettings) -> BodyProcess:
        own, worker_end = socket.socketpair()
        with worker_end:
            number = worker_end.fileno()
            command, environment = module_command(WORKER, str(number)), os.environ | ONE_THREAD
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, pass_fds=[number], env=environment, start_new_session=True
            )
        self = cls(process)
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.create_unix_connection(lambda: _Answers(self._arrived), sock=own)
        self._transport.write(framed(msgspec.json.encode(settings)))
        return self

    async def ask(self, route: str, raw: bytes) -> BodyAnswer:
        """Return the answer; raise OSError where the process ends instead."""
        self._transport.write(framed(msgspec.msgpack.encode((route, raw))))
        message = await self._arrived.get()
        if message is None:
            raise BrokenPipeError
        return msgspec.msgpack.decode(message, type=BodyAnswer)

    async def stop(self) -> None:
        self._process.kill()
        await asyncio.to_thread(self._process.wait)
        self._transport.abort()


class _Answers(Inbox):
    def __init__(self, arrived: asyncio.Queue[bytes | None]) -> None:
        super().__init__(arrived.put_nowait)
        self._arrived = arrived

    def connection_lost(self, error: Exception | None) -> None:
        self._arrived.put_nowait(None)
