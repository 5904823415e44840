"""The HTTP process's side of the engine: requests go to the engine's process, events to the waiting tasks.

Events of a slow reader wait in its own inbox and slow no other. When the engine's process ends, every open request
fails at once, and the process is started again a bounded number of times. A reload starts a second process; once that
is ready new requests go to it, and the first one ends after its last request.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from paceline.engine.events import Accepted, Cancel, Delta, Ended, Event, Failed, Request, Submit
from paceline.errors import EngineDied, PacelineError
from paceline.models.load.hub import resolve, resolve_here
from paceline.server.process.engine_process import EngineProcess
from paceline.server.process.messages import EngineSettings, Gauges, Ping, Relearn, WorkerCommand, WorkerEvent

log = logging.getLogger("paceline.server")
RESTARTS = 3  # within RESTART_WINDOW_S; after that the server stays down, and /health says why
RESTART_WINDOW_S = 600.0
PING_S = 1.0  # seconds between two questions whether an engine still takes commands
SILENT_S, SILENT_STEPS = 5.0, 4.0  # seconds, and longest steps, without an answer: then an engine counts as stuck
STOPPING = "the server is shutting down"


class RequestInbox(asyncio.Queue[Event]):
    """Events of one request, in the order the engine sent them."""

    def __init__(self, request_id: str, process: EngineProcess) -> None:
        super().__init__()
        self.request_id, self.process = request_id, process


class EngineClient:
    def __init__(
        self,
        settings: EngineSettings,
        observers: Sequence[Callable[[WorkerEvent], None]] = (),
        on_cancel: Callable[[str], None] = lambda request_id: None,
        timeout_s: float = 60.0,
    ) -> None:
        """`observers` get every event, for metrics; they must not wait. `timeout_s`: after so long without a finished
        step an engine is killed."""
        self.settings = settings
        self.info: dict[str, Any] = {}  # from the last `Ready`
        self.down: str | None = "the model is being loaded"  # None: requests are served
        self.lost = False  # the process ended too often, and is not started again
        self.starts = 0
        self._observers, self._on_cancel, self._timeout_s = observers, on_cancel, timeout_s
        self._inboxes: dict[str, RequestInbox] = {}
        self._process: EngineProcess | None = None  # takes new requests
        self._processes: set[EngineProcess] = set()  # including processes that finish their last requests
        self._failures: deque[float] = deque()  # times at which processes ended by themselves
        self._tasks: set[asyncio.Task[None]] = set()
        self._reloading = self._closing = False

    async def start(self) -> None:
        """Start the engine and wait until the model is loaded; raise PacelineError if it cannot be."""
        await self._launch(self.settings)

    def submit(self, request: Request) -> RequestInbox:
        if self.down is not None or self._process is None:
            raise EngineDied(self.down or "the engine is not running")
        self._process.send(Submit([request]))
        inbox = self._inboxes[request.request_id] = RequestInbox(request.request_id, self._process)
        return inbox

    def cancel(self, request_id: str) -> None:
        """End a request; harmless after its end."""
        inbox = self._inboxes.pop(request_id, None)
        if inbox is None:
            return
        self._on_cancel(request_id)
        self._send(inbox.process, Cancel([request_id]))

    def relearn(self, method: str) -> None:
        """Have the policy forget how often drafts of the method were accepted."""
        if self._process is not None:
            self._send(self._process, Relearn(method))

    @property
    def num_open(self) -> int:
        return len(self._inboxes)

    async def reload(self, drafter: str, *, fetch: bool = False) -> None:
        """Serve with the drafter in this folder; raise PacelineError, and serve as before, if that cannot be. `fetch`:
        it may be one that is not on this machine."""
        if self._reloading:
            raise PacelineError("a drafter is being loaded already; wait for it")
        self._reloading = True
        try:
            # A wrong name is found before anything is started.
            await asyncio.to_thread(resolve if fetch else resolve_here, drafter)
            settings = replace(self.settings, speculation=replace(self.settings.speculation, drafter=(drafter,)))
            await self._launch(settings)
            self.settings = settings
        finally:
            self._reloading = False

    async def close(self) -> None:
        """Stop the engine; open requests fail."""
        self._closing, self.down = True, STOPPING
        await asyncio.gather(*(process.stop() for process in self._processes))
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.fail_open()

    def fail_open(self) -> None:
        """Fail requests that are not answered yet: the server stops."""
        self._fail(list(self._inboxes.values()), STOPPING)

    # -- processes

    async def _launch(self, settings: EngineSettings) -> None:
        self.starts += 1
        process = EngineProcess(settings, self._take)
        self._processes.add(process)
        try:
            ready = await process.start()
        except BaseException:
            self._processes.discard(process)
            raise
        if self._process is not None:
            self._spawn(self._retire(self._process))
        self._process, self.info, self.down = process, ready.info, None
        self._observe(ready)
        self._spawn(self._watch(process))
        self._spawn(self._ask(process))

    def _take(self, process: EngineProcess, events: list[WorkerEvent]) -> None:
        for event in events:
            if isinstance(event, Gauges):
                process.longest_step_s = event.longest_step_s
                if process is not self._process:
                    continue
            self._observe(event)
            match event:
                case Accepted() | Delta():
                    inbox = self._inboxes.get(event.request_id)
                case Ended() | Failed():
                    inbox = self._inboxes.pop(event.request_id, None)
                case _:
                    continue
            if inbox is not None:
                inbox.put_nowait(event)

    async def _ask(self, process: EngineProcess) -> None:
        """Ask an engine again and again whether it takes commands, which it does between steps. One that is silent for
        long is reported as down, and in the end killed."""
        asked_at, stuck = 0.0, False
        while not process.gone.done() and not self._closing:
            woken = time.monotonic()
            if process.heard_at >= asked_at:
                self._send(process, Ping())
                asked_at, silent_s = woken, 0.0
            else:
                silent_s = woken - asked_at
            limit = max(SILENT_S, SILENT_STEPS * process.longest_step_s)
            if stuck != (silent_s > limit):
                stuck = not stuck
                log.error("the engine %s", f"has finished no step for {silent_s:.0f} s" if stuck else "steps again")
                if process is self._process:
                    self.down = "the engine has stopped stepping" if stuck else None
            if silent_s > max(limit, self._timeout_s):
                log.error("the engine is killed: it has finished no step for %.0f s", silent_s)
                process.kill()
                return
            await asyncio.sleep(PING_S)
            late = time.monotonic() - woken - PING_S
            if late > PING_S:  # this process was held up, and has not read what the engine sent
                asked_at += late

    async def _retire(self, process: EngineProcess) -> None:
        while any(inbox.process is process for inbox in self._inboxes.values()):
            await asyncio.sleep(0.05)
        log.info("the engine before the reload has answered its last request")
        await process.stop()

    async def _watch(self, process: EngineProcess) -> None:
        await asyncio.shield(process.gone)
        if self._closing:
            return
        self._processes.discard(process)
        left = [inbox for inbox in self._inboxes.values() if inbox.process is process]
        reason = f"the engine's process ended with {process.exit}"
        if left or process is self._process:
            log.error("%s; %d requests fail", reason, len(left))
        if process is self._process:
            self._process, self.down = None, f"{reason}; it is being started again"
            self._spawn(self._relaunch(reason))
        self._fail(left, reason)
        process.close()

    async def _relaunch(self, reason: str) -> None:
        self._count_failure()
        while len(self._failures) <= RESTARTS:
            try:
                await self._launch(self.settings)
                log.warning("the engine serves again")
                return
            except EngineDied as error:  # its process was killed while it loaded the model
                reason = str(error)
                log.error("%s", reason)
                self._count_failure()
            except PacelineError as error:
                self._give_up(f"{reason}, and could not be started again: {error}")
                return
        self._give_up(f"{reason}, for the {RESTARTS + 1}th time in {RESTART_WINDOW_S:.0f} s; start the server again")

    def _count_failure(self) -> None:
        now = time.monotonic()
        self._failures.append(now)
        while now - self._failures[0] > RESTART_WINDOW_S:
            self._failures.popleft()

    def _give_up(self, reason: str) -> None:
        self.lost, self.down = True, reason
        log.critical("%s", reason)

    def _fail(self, inboxes: Sequence[RequestInbox], reason: str) -> None:
        for inbox in inboxes:
            failed = Failed(inbox.request_id, EngineDied(reason))
            self._inboxes.pop(inbox.request_id, None)
            inbox.put_nowait(failed)
            self._observe(failed)

    def _observe(self, event: WorkerEvent) -> None:
        for observe in self._observers:
            observe(event)

    def _send(self, process: EngineProcess, command: WorkerCommand) -> None:
        if process in self._processes:
            process.send(command)

    def _spawn(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def new_request_id(prefix: str) -> str:
    return f"{prefix}-{uuid.uuid4().hex}"
