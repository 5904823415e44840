"""The application in uvicorn: it loads the model, logs its address, and stops within the grace period."""

from __future__ import annotations

import asyncio
import logging
import math
import signal
import socket

import uvicorn

from paceline.server.app import create_app
from paceline.server.connections import bounded, default_connections
from paceline.server.logs import OWN, set_up_logs
from paceline.server.state import AppState, ServerSettings

log = logging.getLogger("paceline.server")
QUEUE = 2048  # connections that the kernel keeps until they are accepted
LAST_S = 5  # seconds after the grace period in which the last answers are sent


class GracefulServer(uvicorn.Server):
    """A server that answers the requests still open after the grace period: uvicorn would cut their connections."""

    def __init__(self, config: uvicorn.Config, state: AppState) -> None:
        super().__init__(config)
        self._state = state

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(QUEUE)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._state.stopping, client = True, self._state.client
        log.info("stopping: %d requests have %g s to finish", client.num_open, self._state.settings.grace_s)
        end = asyncio.get_running_loop().call_later(self._state.settings.grace_s, client.fail_open)
        try:
            await super().shutdown(sockets)
        finally:
            end.cancel()


def run(settings: ServerSettings, listener: socket.socket, *, log_json: bool = False) -> int:
    levels = {OWN: logging.INFO, "uvicorn.error": logging.WARNING}
    set_up_logs(as_json=log_json, text="%(asctime)s %(levelname)s %(message)s", levels=levels)
    return asyncio.run(_serve(settings, listener))


async def _serve(settings: ServerSettings, listener: socket.socket) -> int:
    app = create_app(settings)
    state: AppState = app.state.paceline
    host, port = listener.getsockname()[:2]
    log.info("loading %s", settings.engine.model)
    if settings.capture is not None:
        log.warning("every prompt and every answer is appended to %s (--capture)", settings.capture)
    endless = math.isinf(settings.grace_s)
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=None if endless else math.ceil(settings.grace_s) + LAST_S,
        timeout_keep_alive=30,
        http=bounded(settings.max_connections or default_connections()),
        # Connections are accepted one by one, each once the one before is counted; the kernel's queue is longer.
        backlog=1,
    )
    try:
        await state.client.start()
    except BaseException:
        await state.client.close()
        raise
    info = state.client.info
    if info["note"]:
        log.warning("%s", info["note"])
    where = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    log.info("%s (%s, %s, %s) at %s", state.name, info["device"], info["dtype"], info["kernels"], where)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)  # uvicorn sends the signal again once it has stopped
    await GracefulServer(config, state).serve(sockets=[listener])
    return 0
