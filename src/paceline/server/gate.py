"""Checks around every route: the key, the size of the body, the request's id, and one log line."""

from __future__ import annotations

import hmac
import logging
import time
import uuid
from collections.abc import Callable, Sequence

import msgspec
from fastapi import Response
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.errors import PacelineError
from paceline.server.errors import BodyTooLarge, Unauthorised, body_of, headers_of, in_form_of, status_of
from paceline.server.trust import ApiKey

log = logging.getLogger("paceline.server")
OPEN_PATHS = ("/", "/health", "/ping", "/version")  # paths without a key; the playground asks for it
OPEN_FOLDER = "/static/"
DRAIN = 8  # limits of a body; the part of a larger body that is read and dropped
RELOAD = "/v1/drafters/reload"
CLIENT, FIELD = "client", "field"  # names in a request's state: its client, and the field that was refused
ADMIN = " admin"  # client of the admin key; a name that no client has
MAX_ID = 128  # characters of a request id that a client may choose


class RequestGuard:
    def __init__(
        self,
        app: ASGIApp,
        *,
        api_keys: Sequence[ApiKey],
        max_body_bytes: int,
        on_error: Callable[[int], None],
        admin_key: str | None = None,
    ) -> None:
        self._app, self._limit, self._on_error = app, max_body_bytes, on_error
        self._admin_key = None if admin_key is None else admin_key.encode()
        self._keys = [(each.key.encode(), each.client) for each in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, status, received, headers = time.perf_counter(), 0, 0, Headers(scope=scope)
        request_id = headers.get("x-request-id", "")[:MAX_ID] or uuid.uuid4().hex
        too_large = BodyTooLarge(f"the body has more than {self._limit} bytes, the server's limit")

        async def limited() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._limit:
                raise too_large
            return message

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        try:
            scope.setdefault("state", {})[CLIENT] = self._client(scope["path"], headers)
            if (length := headers.get("content-length", "")).isdigit() and int(length) > self._limit:
                raise too_large
            # HEAD is answered as GET; uvicorn sends the headers alone.
            inner = {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope
            await self._app(inner, limited, noted)
        except (BodyTooLarge, Unauthorised) as error:
            await self._drain(receive)
            await error_response(error, scope["path"])(scope, receive, noted)
        finally:
            if status >= 400:
                self._on_error(status)
            fields = {
                "request_id": request_id,
                "method": scope["method"],
                "path": scope["path"],
                "status": status,
                "seconds": round(time.perf_counter() - started, 4),
            }
            line = "%(method)s %(path)s %(status)s in %(seconds)s s (%(request_id)s)"
            if field := scope.get("state", {}).get(FIELD):
                fields[FIELD], line = field, line + ", refused: %(field)s"
            log.info(line, fields, extra={"fields": fields})

    async def _drain(self, receive: Receive) -> None:
        """Read the rest of a body, up to DRAIN limits: a client sees the answer only after it has sent its body."""
        received, more = 0, True
        while more and received < DRAIN * self._limit:
            message = await receive()
            received += len(message.get("body", b""))
            more = message.get("more_body", False)

    def _client(self, path: str, headers: Headers) -> str | None:
        """Return the client that the request's key names, or refuse the request; None where no key is needed."""
        sent = headers.get("authorization") or f"Bearer {headers.get('x-api-key', '')}"  # as clients of Anthropic do
        scheme, _, key = sent.partition(" ")
        given = key.strip().encode()
        if path == RELOAD and self._admin_key is not None and hmac.compare_digest(given, self._admin_key):
            return ADMIN
        if not self._keys or path in OPEN_PATHS or path.startswith(OPEN_FOLDER):
            return None
        clients = [client for known, client in self._keys if hmac.compare_digest(given, known)]  # every key is compared
        if scheme.lower() != "bearer" or not clients:
            raise Unauthorised("the API key is missing or wrong; send it as Authorization: Bearer KEY")
        return clients[0]


def error_response(error: PacelineError, path: str = "") -> Response:
    body = in_form_of(path, body_of(error))
    return Response(msgspec.json.encode(body), status_of(error), headers_of(error), "application/json")
