"""Long bodies are read by another process, before any route sees them: the event loop has all other requests to serve.

A route gets the rest of such a body, without what has become tokens, and the prompts in the request's state.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable
from typing import TypeVar

from fastapi import Response
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.errors import PacelineError
from paceline.server.bodies.body_process import BodyReader
from paceline.server.bodies.body_worker import ROUTES
from paceline.server.errors import ClientGone
from paceline.server.gate import CLIENT, error_response
from paceline.server.trust import Sharing

T = TypeVar("T")
LONG_BODY = 20_000  # bytes; a shorter one takes the event loop some 10 ms at most
READ = "read"  # name in a request's state
_JSON = re.compile(r"\s*application/([^;/]+\+)?json\s*(;.*)?", re.IGNORECASE)  # the types that are read as JSON


class LongBodies:
    def __init__(self, app: ASGIApp, *, reader: BodyReader, sharing: Sharing) -> None:
        self._app, self._reader, self._sharing = app, reader, sharing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (
            scope["type"] != "http"
            or scope["path"] not in ROUTES
            or not _JSON.fullmatch(Headers(scope=scope).get("content-type", "application/json"))
        ):
            await self._app(scope, receive, send)
            return
        parts, size, more = list[bytes](), 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            parts.append(message.get("body", b""))
            size, more = size + len(parts[-1]), message.get("more_body", False)
        raw = b"".join(parts)
        if size > LONG_BODY:
            try:
                asked = self._reader.read(scope["path"], raw, self._client(scope))
                answer = await unless_gone(Request(scope, receive), asked)
            except PacelineError as error:
                await error_response(error, scope["path"])(scope, receive, send)
                return
            if answer.status:
                await Response(answer.body, answer.status, media_type="application/json")(scope, receive, send)
                return
            scope["state"][READ], raw = answer, answer.body
        await self._app(scope, _replayed(raw, receive), send)

    def _client(self, scope: Scope) -> str:
        address = scope["client"][0] if scope.get("client") else ""
        return self._sharing.owner(scope["state"].get(CLIENT), address, None, "").client


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Return a function that receives the body at first, as one message."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return messages.pop() if messages else await receive()

    return replay


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """Return the result of the work, or drop the work when the client disconnects."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, watching = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone("the client has disconnected")
        return working.result()
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)
