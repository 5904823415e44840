"""Connections of the HTTP server: how many there are, and how long a client may take to send a request.

A connection that waits for a request, or has sent a part of one, is *idle*: it may be closed at any time. Where the
server is full a new connection takes the place of the one that has been idle longest, and is refused only if all are at
work, so half-open connections keep nobody out.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import time

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

log = logging.getLogger("paceline.server")
HEADER_S = 10.0  # seconds from the first byte of a request, or from the connection, to the end of its headers
BODY_S = 30.0  # seconds without a byte of a body that is not complete
MAX_HEADER_BYTES = 1 << 16
NOTE_EVERY_S = 60.0  # seconds between two log lines about connections that were closed or refused
OWN_FILES = 64  # descriptors of the server itself: sockets, files, pipes, and connections that are being accepted
MOST = 10_000  # connections by default, whatever the limit of files
FULL = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


def default_connections() -> int:
    """Return the most connections that the limit of files allows."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST if limit == resource.RLIM_INFINITY else max(1, min(MOST, limit - OWN_FILES))


class ConnectionLimit:
    """The connections of a server, and how many were refused."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.idle: dict[BoundedProtocol, None] = {}  # the longest idle first
        self.busy: set[BoundedProtocol] = set()
        self._refused, self._noted_at = 0, float("-inf")

    def make_room(self) -> bool:
        """Close the connection that has been idle longest if the server is full; return False if none is idle."""
        if len(self.idle) + len(self.busy) < self.most:
            return True
        self.note_refused()
        oldest = next(iter(self.idle), None)
        if oldest is None:
            return False
        oldest.transport.abort()
        del self.idle[oldest]
        return True

    def note_refused(self) -> None:
        self._refused += 1
        now = time.monotonic()
        if now - self._noted_at >= NOTE_EVERY_S:
            log.warning("connections refused, or closed while idle: %d (at most %d are open)", self._refused, self.most)
            self._noted_at, self._refused = now, 0


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's protocol with a deadline for headers and for each part of a body."""

    limit: ConnectionLimit  # of the server; set by `bounded`

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._deadline: asyncio.TimerHandle | None = None
        self._header_bytes = 0
        super().connection_made(transport)
        if self.limit.make_room():
            self.limit.idle[self] = None
            self._expect(HEADER_S)
        else:
            transport.write(FULL)
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._expect(None)
        self.limit.idle.pop(self, None)
        self.limit.busy.discard(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        was_under_way = self._is_under_way()
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._is_under_way():
            self._header_bytes = 0
            self._expect(BODY_S if self.cycle.more_body else None)
            if not self.cycle.more_body and self in self.limit.idle:
                del self.limit.idle[self]
                self.limit.busy.add(self)
        elif not was_under_way:
            if not self._header_bytes:
                self._expect(HEADER_S)
            self._header_bytes += len(data)
            if self._header_bytes > MAX_HEADER_BYTES:
                self.transport.write(TOO_LARGE)
                self.transport.close()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self._is_under_way():
            self._expect(None)  # uvicorn's own deadline between requests
            if self in self.limit.busy:
                self.limit.busy.discard(self)
                self.limit.idle[self] = None

    def _is_under_way(self) -> bool:
        """Return whether the headers of a request are there, and its answer is not complete."""
        return self.cycle is not None and not self.cycle.response_complete

    def _expect(self, seconds: float | None) -> None:
        """Close the connection unless this is called again in time; None: the client need not send anything."""
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = None if seconds is None else self.loop.call_later(seconds, self._late, seconds)

    def _late(self, seconds: float) -> None:
        if self.flow.read_paused:  # the server does not read, so the client cannot send
            self._expect(seconds)
        else:
            self.limit.note_refused()
            self.transport.close()


def bounded(most: int) -> type[BoundedProtocol]:
    """Return the protocol of a server with at most this many connections."""
    return type("ServerProtocol", (BoundedProtocol,), {"limit": ConnectionLimit(most)})
