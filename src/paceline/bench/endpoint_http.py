"""Requests to a server over httpx; every way one fails is a typed error with the URL and what to do about it.

Every exchange has a connection of its own and its clock starts once all are open, so times hold no handshake. The API
key goes into the header and nowhere else: messages are cleaned of it, the server's own too.
"""

from __future__ import annotations

import asyncio
import functools
import json
import re
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar
from urllib.parse import urlsplit

from huggingface_hub.utils import httpx  # type: ignore[attr-defined]  # httpx or its successor httpx2, as installed

from paceline.errors import InvalidParameter, PacelineError

LONGEST_QUOTE = 300  # characters of a server's message
LONGEST_BODY = 16 << 20  # bytes of an answer read at once
CONNECT_S = 10.0  # a server that takes longer to accept counts as down
ADVICE = {
    400: "it does not take the request: see its message",
    401: "give its key with --api-key or in OPENAI_API_KEY",
    403: "the key is not allowed to do this",
    404: "check the path of the URL and the model's name",
    429: "it limits the rate of requests: lower --concurrency, or use a server of your own",
}
T = TypeVar("T")


class EndpointError(PacelineError):
    def __init__(self, url: str, problem: str) -> None:
        super().__init__(f"{url}: {problem}")


class EndpointDown(EndpointError):
    """No server answers there."""


class EndpointTimeout(EndpointError):
    """No whole answer within --timeout."""


class EndpointRefused(EndpointError):
    """An HTTP error, or (`status` None) an error in the stream; `reason` is the server's own."""

    def __init__(self, url: str, status: int | None, reason: str) -> None:
        heading = "an error in the stream" if status is None else f"HTTP {status}"
        advice = "see its own log" if status is None or status >= 500 else ADVICE.get(status, "see its message")
        super().__init__(url, f"{heading}: {reason or 'no reason given'} ({advice})")
        self.status, self.reason = status, reason


class NotOpenAI(EndpointError):
    """Something answers, but not in OpenAI's protocol."""


class EndpointDropped(EndpointError):
    """The connection ended in the middle of an answer."""


class TokenCountMismatch(EndpointError):
    """Usage, counters and text disagree on the number of tokens, or there is no count."""


def base_url(text: str, option: str = "endpoint") -> str:
    """Where the routes are, as http://localhost:8000/v1."""
    try:
        parts = urlsplit(text.strip())
        _ = parts.port
    except ValueError as error:
        raise InvalidParameter(option, f"not a URL: {error}") from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise InvalidParameter(option, "give a URL such as http://localhost:8000/v1")
    if not text.isascii() or any(character.isspace() for character in text.strip()):
        raise InvalidParameter(option, "a URL has no spaces, and other letters than a to z are written as %XX")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise InvalidParameter(option, "a URL without user, password, ? or #; a key goes into --api-key")
    path = re.sub(r"/(chat/)?completions$", "", parts.path.rstrip("/")) or "/v1"
    return f"{parts.scheme}://{parts.netloc}{path}"


@dataclass(frozen=True, kw_only=True)
class Wire:
    """How to reach one server. `timeout_s` holds for a whole exchange, not for each of its reads."""

    url: str
    timeout_s: float
    api_key: str | None = field(default=None, repr=False)

    @property
    def metrics_url(self) -> str:
        return self.url.removesuffix("/v1") + "/metrics"

    def get(self, url: str) -> bytes:
        return self.run([Exchange(self, url, Exchange.read)])[0]

    def run(self, exchanges: Sequence[Exchange[T]]) -> list[T]:
        """All at once: none is sent before every connection is open. The first error is raised for all."""
        return asyncio.run(self._run(exchanges))

    async def _run(self, exchanges: Sequence[Exchange[T]]) -> list[T]:
        headers = {"User-Agent": "paceline", "Accept-Encoding": "identity"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        gate = Gate(len(exchanges))
        async with httpx.AsyncClient(
            headers=headers,
            verify=_certificates(),
            timeout=httpx.Timeout(None, connect=CONNECT_S),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
            trust_env=False,  # a proxy of the environment would be measured with the server
        ) as client:
            tasks = [asyncio.create_task(exchange.run(client, gate)) for exchange in exchanges]
            try:
                return await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)

    def clean(self, message: str) -> str:
        """One printable line of bounded length without the key in it."""
        if self.api_key:
            message = message.replace(self.api_key, "***")
        line = " ".join("".join(c if c.isprintable() else " " for c in message).split())
        return line if len(line) <= LONGEST_QUOTE else line[:LONGEST_QUOTE] + "..."


class Gate:
    """Opens when the expected number of exchanges wait at it."""

    def __init__(self, expected: int) -> None:
        self._expected, self._open = expected, asyncio.Event()

    async def wait(self) -> None:
        self._expected -= 1
        if self._expected <= 0:
            self._open.set()
        await self._open.wait()


@dataclass
class Exchange(Generic[T]):
    """One request and the result of `read_with` on its response."""

    wire: Wire
    url: str
    read_with: Callable[[Exchange[T]], Awaitable[T]]
    body: Mapping[str, Any] | None = None
    sent: float = 0.0  # by time.perf_counter()
    response: httpx.Response | None = None

    async def run(self, client: httpx.AsyncClient, gate: Gate) -> T:
        try:
            return await asyncio.wait_for(self._run(client, gate), self.wire.timeout_s)
        except asyncio.TimeoutError as error:
            problem = f"no whole answer within {self.wire.timeout_s:g} s; raise --timeout or lower --concurrency"
            raise EndpointTimeout(self.url, problem) from error
        except (httpx.TransportError, httpx.InvalidURL) as error:
            raise self._failure(error) from error

    async def _run(self, client: httpx.AsyncClient, gate: Gate) -> T:
        async def trace(event: str, info: Mapping[str, Any]) -> None:
            if event == "http11.send_request_headers.started":
                await gate.wait()
                self.sent = time.perf_counter()

        method = "GET" if self.body is None else "POST"
        async with client.stream(method, self.url, json=self.body, extensions={"trace": trace}) as self.response:
            await self._expect_success(self.response)
            return await self.read_with(self)

    async def arrivals(self) -> AsyncIterator[bytes]:
        """The body, as it comes."""
        assert self.response is not None
        async for received in self.response.aiter_bytes():
            yield received

    async def read(self) -> bytes:
        found = b""
        async for received in self.arrivals():
            found += received
            if len(found) > LONGEST_BODY:
                raise NotOpenAI(self.url, "an answer without end; check the URL")
        return found

    @property
    def content_type(self) -> str:
        assert self.response is not None
        return str(self.response.headers.get("Content-Type", "")).partition(";")[0].strip().lower()

    async def _expect_success(self, response: httpx.Response) -> None:
        if response.is_redirect:
            target = self.wire.clean(response.headers.get("Location", "elsewhere"))
            raise NotOpenAI(self.url, f"redirects to {target}; give that URL")
        if response.status_code >= 300:
            raise self.refused(response.status_code, await self.read())

    def refused(self, status: int | None, body: bytes) -> EndpointRefused:
        return EndpointRefused(self.url, status, self.wire.clean(reason(body)))

    def not_openai(self, expected: str, found: bytes | str) -> NotOpenAI:
        text = found.decode("utf-8", "replace") if isinstance(found, bytes) else found
        short_repr = "an HTML page" if "<html" in text.lower() else repr(self.wire.clean(text)[:80] or "nothing")
        problem = f"expected {expected}, got {short_repr}; is this an OpenAI-compatible server, and its port?"
        return NotOpenAI(self.url, problem)

    def _failure(self, error: Exception) -> EndpointError:
        cause = _root(error)
        words = getattr(cause, "strerror", None) or str(cause) or type(cause).__name__
        if self.response is not None:
            return EndpointDropped(self.url, f"the connection ended in the middle of an answer ({words})")
        if isinstance(cause, ssl.SSLError):
            return EndpointDown(self.url, f"no secure connection: {words}; is it http instead?")
        if isinstance(error, httpx.RemoteProtocolError):
            return NotOpenAI(self.url, f"the server there does not answer in HTTP; check the port ({words})")
        return EndpointDown(self.url, f"no server answers ({words}); is the server running, and its address right?")


@functools.cache
def _certificates() -> ssl.SSLContext:
    return ssl.create_default_context()


def _root(error: BaseException) -> BaseException:
    """The operating system's or the parser's own error, under the layers of the client."""
    while (below := error.__cause__ or error.__context__) is not None:
        error = below.exceptions[0] if hasattr(below, "exceptions") else below
    return error


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
