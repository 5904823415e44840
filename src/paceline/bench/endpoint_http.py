"""HTTP to one server: where it is, one exchange at a time, and every way that fails as a typed error.

The connection is opened before the clock starts and used for one exchange, so times hold no handshake and no stale
connection. The API key goes into the header and nowhere else: messages are cleaned of it, whoever wrote them.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from paceline.bench.endpoint_errors import (
    EndpointDown,
    EndpointDropped,
    EndpointError,
    EndpointRefused,
    EndpointTimeout,
    NotOpenAI,
)
from paceline.errors import InvalidParameter

LONGEST_QUOTE = 300  # characters of what a server said
LONGEST_BODY = 16 << 20  # bytes of an answer read at once
CONNECT_S = 10.0  # a server that takes longer to pick up is not there
ADVICE = {
    400: "the request was not to its taste: see its message",
    401: "give its key with --api-key or in OPENAI_API_KEY",
    403: "the key is not allowed to do this",
    404: "check the path of the URL and the model's name",
    429: "it limits how much may be asked: lower --concurrency, or use a server of your own",
}


@dataclass(frozen=True)
class Address:
    """`base` is where the routes are (/v1), `root` where /metrics is."""

    scheme: str
    netloc: str
    host: str
    port: int | None
    base: str

    @classmethod
    def parse(cls, text: str, option: str = "endpoint") -> Address:
        try:
            parts = urlsplit(text.strip())
            port = parts.port
        except ValueError as error:
            raise InvalidParameter(option, f"not a URL: {error}") from error
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InvalidParameter(option, "give a URL such as http://localhost:8000/v1")
        if not text.isascii() or any(character.isspace() for character in text.strip()):
            raise InvalidParameter(option, "a URL has no spaces, and other letters than a to z are written as %XX")
        if parts.username or parts.password or parts.query or parts.fragment:
            raise InvalidParameter(option, "a URL without user, password, ? or #; a key goes into --api-key")
        base = re.sub(r"/(chat/)?completions$", "", parts.path.rstrip("/")) or "/v1"
        return cls(parts.scheme, parts.netloc, parts.hostname, port, base)

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.netloc}{self.base}"

    @property
    def root(self) -> str:
        return self.base.removesuffix("/v1")

    def connection(self, timeout_s: float) -> http.client.HTTPConnection:
        if self.scheme == "https":
            return http.client.HTTPSConnection(self.host, self.port, timeout=timeout_s)
        return http.client.HTTPConnection(self.host, self.port, timeout=timeout_s)


class Switch:
    """Ends all exchanges under way: their sockets are shut, and no new one is opened."""

    def __init__(self) -> None:
        self.off = False
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()

    def add(self, sock: socket.socket) -> None:
        with self._lock:
            self._open.add(sock)
            if self.off:
                _shut(sock)

    def remove(self, sock: socket.socket) -> None:
        with self._lock:
            self._open.discard(sock)

    def cut(self) -> None:
        with self._lock:
            self.off = True
            for sock in self._open:
                _shut(sock)


def _shut(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the other side was first
        sock.shutdown(socket.SHUT_RDWR)


@dataclass(frozen=True, kw_only=True)
class Wire:
    """How to reach one server. `timeout_s` holds for a whole exchange, not for each of its reads."""

    address: Address
    timeout_s: float
    api_key: str | None = field(default=None, repr=False)
    switch: Switch = field(default_factory=Switch)

    def exchange(self, method: str, path: str, body: dict[str, Any] | None = None) -> Exchange:
        return Exchange(self, method, path, body)

    def clean(self, said: str) -> str:
        """One printable line of bounded length without the key in it."""
        if self.api_key:
            said = said.replace(self.api_key, "***")
        line = " ".join("".join(c if c.isprintable() else " " for c in said).split())
        return line if len(line) <= LONGEST_QUOTE else line[:LONGEST_QUOTE] + "..."


class Exchange:
    """One request and its response. A context manager: entering sends, leaving closes."""

    def __init__(self, wire: Wire, method: str, path: str, body: dict[str, Any] | None) -> None:
        self._wire, self._method, self._path = wire, method, path
        self._body = None if body is None else json.dumps(body).encode()
        self.url = f"{wire.address.scheme}://{wire.address.netloc}{path}"
        self._answering = False  # once its first line has come

    def __enter__(self) -> Exchange:
        self._deadline = time.monotonic() + self._wire.timeout_s
        self._connection = self._wire.address.connection(min(self._wire.timeout_s, CONNECT_S))
        try:
            self._send()
        except (OSError, http.client.HTTPException, UnicodeError) as error:  # the last for names no host can have
            self.__exit__()
            raise self._failure(error) from error
        return self

    def _send(self) -> None:
        self._connection.connect()
        self._sock: socket.socket = self._connection.sock
        self._wire.switch.add(self._sock)
        headers = {"Content-Type": "application/json", "Accept": "*/*", "User-Agent": "paceline"}
        if self._wire.api_key:
            headers["Authorization"] = f"Bearer {self._wire.api_key}"
        self.sent = time.perf_counter()
        self._connection.request(self._method, self._path, self._body, headers)
        self._wait()
        self.response = self._connection.getresponse()
        self._answering = True

    def __exit__(self, *_: object) -> None:
        if (sock := getattr(self, "_sock", None)) is not None:
            self._wire.switch.remove(sock)
        if (response := getattr(self, "response", None)) is not None:
            response.close()
        self._connection.close()

    def _wait(self) -> None:
        """Let the next read take no longer than what is left."""
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._sock.settimeout(left)

    def elapsed(self) -> float:
        return time.perf_counter() - self.sent

    @property
    def status(self) -> int:
        return self.response.status

    @property
    def content_type(self) -> str:
        return self.response.headers.get("Content-Type", "").partition(";")[0].strip().lower()

    def arrivals(self) -> Iterator[bytes]:
        """What the server sends, as it comes."""
        while True:
            try:
                self._wait()
                received = self.response.read1(65536)
            except (OSError, http.client.HTTPException) as error:
                raise self._failure(error) from error
            if not received:
                return
            yield received

    def read(self) -> bytes:
        found = b""
        for received in self.arrivals():
            found += received
            if len(found) > LONGEST_BODY:
                raise NotOpenAI(self.url, "an answer without end; check the URL")
        return found

    def expect_success(self) -> None:
        if 300 <= self.status < 400:
            target = self._wire.clean(self.response.headers.get("Location", "elsewhere"))
            raise NotOpenAI(self.url, f"redirects to {target}; give that URL")
        if self.status >= 400:
            said = self._wire.clean(reason(self.read()))
            advice = ADVICE.get(self.status, "its own log says more" if self.status >= 500 else "see its message")
            raise EndpointRefused(self.url, self.status, said, advice)

    def json(self) -> Any:
        self.expect_success()
        found = self.read()
        try:
            return json.loads(found)
        except ValueError as error:
            raise self.not_openai("JSON", found) from error

    def not_openai(self, expected: str, found: bytes | str) -> NotOpenAI:
        text = found.decode("utf-8", "replace") if isinstance(found, bytes) else found
        shown = self._wire.clean(text[: 2 * LONGEST_QUOTE])[:80] or "nothing"
        kind = "an HTML page" if "<html" in text.lower() or self.content_type == "text/html" else f"{shown!r}"
        return NotOpenAI(
            self.url, f"expected {expected}, got {kind}; is this an OpenAI-compatible server, and its port?"
        )

    def _failure(self, error: Exception) -> EndpointError:
        if isinstance(error, TimeoutError):
            return EndpointTimeout(
                self.url, f"no whole answer within {self._wire.timeout_s:g} s; raise --timeout or lower --concurrency"
            )
        if self._answering:
            return EndpointDropped(self.url, f"the connection ended in the middle of an answer ({_words(error)})")
        if isinstance(error, ssl.SSLError):
            return EndpointDown(self.url, f"no secure connection: {_words(error)}; is it http instead?")
        if isinstance(error, (http.client.BadStatusLine, http.client.LineTooLong)) and not isinstance(error, OSError):
            return NotOpenAI(self.url, "what answers there does not speak HTTP; check the port")
        return EndpointDown(
            self.url, f"nobody answers ({_words(error)}); is the server running, and its address right?"
        )


def _words(error: Exception) -> str:
    if isinstance(error, http.client.IncompleteRead):
        return "it was closed early"
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def reason(body: bytes) -> str:
    """The server's own message out of an error body, in any of the shapes servers use."""
    try:
        found = json.loads(body)
    except ValueError:
        return re.sub(r"<(style|script).*?</\1>|<[^>]*>", " ", body.decode("utf-8", "replace"), flags=re.DOTALL)
    for key in ("error", "message", "detail"):
        if isinstance(found, dict) and found.get(key):
            return reason(json.dumps(found[key]).encode()) if isinstance(found[key], dict) else str(found[key])
    return found if isinstance(found, str) else json.dumps(found)
