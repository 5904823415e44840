"""Answers that are sent as they come: server-sent events, or lines of JSON. An error after the first piece is a piece
too, since the status is already sent."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from types import MappingProxyType
from typing import Any

import msgspec
from fastapi.responses import StreamingResponse
from starlette.types import Send

from paceline.errors import PacelineError
from paceline.server.api.generation import Generation
from paceline.server.errors import body_of, in_form_of

Json = dict[str, Any]
NO_HEADERS: Mapping[str, str] = MappingProxyType({})


class ChunkStream(StreamingResponse):
    """Pieces of an answer, whose generations are cancelled when the client leaves. `path`: the route's, whose clients
    expect its form of errors."""

    kind = "text/event-stream"

    def __init__(
        self,
        chunks: AsyncIterator[Json],
        generations: list[Generation],
        path: str = "",
        headers: Mapping[str, str] = NO_HEADERS,
    ) -> None:
        unbuffered = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__((), media_type=self.kind, headers={**unbuffered, **headers})
        self._chunks, self._generations, self._path = chunks, generations, path

    def written(self, chunk: Json) -> bytes:
        """Return a chunk as it is sent; an error has the key `error`."""
        return b"data: " + msgspec.json.encode(chunk) + b"\n\n"

    def end(self) -> bytes:
        return b"data: [DONE]\n\n"

    async def stream_response(self, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            try:
                async for chunk in self._chunks:
                    await send({"type": "http.response.body", "body": self.written(chunk), "more_body": True})
                last = self.end()
            except PacelineError as error:
                last = self.written(in_form_of(self._path, body_of(error)))
            await send({"type": "http.response.body", "body": last, "more_body": False})
        finally:
            for generation in self._generations:
                generation.cancel()


class NamedEvents(ChunkStream):
    """Events that have their type as name; nothing follows the last one."""

    def written(self, chunk: Json) -> bytes:
        return b"event: " + str(chunk.get("type", "error")).encode() + b"\n" + super().written(chunk)

    def end(self) -> bytes:
        return b""


class JsonLines(ChunkStream):
    kind = "application/x-ndjson"

    def written(self, chunk: Json) -> bytes:
        return msgspec.json.encode(chunk) + b"\n"

    def end(self) -> bytes:
        return b""
