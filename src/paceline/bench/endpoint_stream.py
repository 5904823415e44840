"""A streamed answer, from the bytes of server-sent events to tokens and the moments they came.

Servers put several tokens into one chunk when speculation gives them several at once, so chunks are not tokens: token
ids, log-probabilities or usage give their number, and that number is checked against the text.
"""

from __future__ import annotations

import dataclasses
import json
import re
import time
from collections.abc import AsyncIterable, AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.bench.endpoint_http import EndpointDropped, Exchange, TokenCountMismatch
from paceline.bench.measurement import Answer

DONE = "[DONE]"
FIELDS = (b"data", b"event", b"id", b"retry", b"")  # of an event; a line that starts with a colon is a comment
WORD = re.compile(r"\s*\w{1,6}|\s*[^\w\s]|\s+\Z")  # stands in for a token where only text is known
UNSEEN = 16  # tokens an answer may hold without any text: EOS, special tokens a server strips
UNCOUNTED = 1  # EOS: counted by some servers and not by others
SPLIT = 2  # tokens whose text a server may divide over two chunks, such as the end of a thought


class Malformed(ValueError):
    """A line that is not of the protocol."""


class Disagreement(ValueError):
    """A contradiction in a server's own figures, as a sentence."""


async def events(chunks: AsyncIterable[bytes]) -> AsyncIterator[str]:
    """The data of each event, out of bytes that arrive in pieces of any size. Stricter than a browser: a line that is
    no field of the protocol is an error rather than skipped, since it means that the server has another protocol."""
    rest, data = b"", list[str]()
    async for received in _and(chunks, b"\n\n"):  # some servers leave out the last empty line
        *lines, rest = (rest + received).split(b"\n")
        for line in map(bytes.strip, lines):
            name, colon, value = line.partition(b":")
            if not line and data:
                yield "\n".join(data)
                data = []
            elif line and (not colon or name not in FIELDS):
                raise Malformed(line)
            elif name == b"data":
                try:
                    data.append(value.strip().decode("utf-8"))
                except UnicodeDecodeError as error:
                    raise Malformed(line) from error


async def _and(chunks: AsyncIterable[bytes], last: bytes) -> AsyncIterator[bytes]:
    async for chunk in chunks:
        yield chunk
    yield last


@dataclass(frozen=True)
class Piece:
    """A chunk that carried something."""

    at: float
    text: str
    tokens: int | None = None  # by the server's count for this chunk


class Stream:
    """One answer as it comes."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._pieces: list[Piece] = []
        self._finished = False
        self._ended = 0.0  # when the last event came that belongs to the answer and not to the accounts after it
        self._hidden = 0
        self._thought = False  # text of the model's thinking came
        self._running: bool | None = None  # whether usage comes with every chunk; None until there was text
        self._usage: int | None = None
        self._prompt: int | None = None  # tokens of the prompt

    async def answer(self, exchange: Exchange[Answer]) -> Answer:
        if exchange.content_type not in ("text/event-stream", ""):
            raise exchange.not_openai("a stream of events", await exchange.read())
        try:
            async for data in events(exchange.arrivals()):
                if data == DONE:
                    self._finished = True
                    break
                self._take(exchange, time.perf_counter(), data)
        except Malformed as error:
            raise exchange.not_openai("server-sent events", error.args[0]) from error
        if not self._finished:
            raise EndpointDropped(exchange.url, "the stream ended before the answer did; see its own log")
        hidden = 0 if self._thought else self._hidden
        try:
            found = answer(self._pieces, self._usage, hidden, self._max_tokens, exchange.sent, self._ended)
            return dataclasses.replace(found, prompt_tokens=self._prompt)
        except Disagreement as error:
            untrusted = "; its figures cannot be trusted" if self._usage is not None else ""
            raise TokenCountMismatch(exchange.url, f"{error}{untrusted}") from error

    def _take(self, exchange: Exchange[Answer], at: float, data: str) -> None:
        event: Any = None
        try:
            event = json.loads(data)
            usage = self._new_tokens(event)
            choice = event["choices"][0] if event["choices"] else None
            text, tokens = ("", None) if choice is None else (self._text(choice), _counted(choice))
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            if isinstance(event, dict) and ("error" in event or event.get("object") == "error"):
                raise exchange.refused(None, data.encode()) from error
            raise exchange.not_openai("chunks of an answer" if event else "JSON in its events", data) from error
        if choice is None:
            return
        if text and self._running is None:
            self._running = usage is not None
        if tokens is None and self._running:
            tokens = usage
        if text or tokens:
            self._pieces.append(Piece(at, text, tokens))
        self._finished = self._finished or choice.get("finish_reason") is not None
        self._ended = at

    def _new_tokens(self, event: dict[str, Any]) -> int | None:
        """Tokens since the usage before, where every chunk carries one. The last chunk's is the answer's."""
        if not (usage := event.get("usage")):
            return None
        before, self._usage = self._usage or 0, int(usage["completion_tokens"])
        self._prompt = usage.get("prompt_tokens")
        self._hidden = int((usage.get("completion_tokens_details") or {}).get("reasoning_tokens") or 0)
        return self._usage - before

    def _text(self, choice: dict[str, Any]) -> str:
        if "delta" not in choice:
            return choice["text"] or ""
        delta = choice["delta"]
        thought = delta.get("reasoning_content") or delta.get("reasoning") or ""
        self._thought = self._thought or bool(thought)
        content = delta.get("content") or ""
        if not isinstance(thought, str) or not isinstance(content, str):
            raise TypeError("content is not text")
        return thought + content


def _counted(choice: dict[str, Any]) -> int | None:
    """Tokens in this chunk by its token ids or log-probabilities, where the server sends them."""
    if isinstance(ids := choice.get("token_ids"), list):
        return len(ids)
    logprobs = choice.get("logprobs")
    entries = (logprobs.get("content") or logprobs.get("tokens")) if isinstance(logprobs, dict) else None
    return len(entries) if isinstance(entries, list) else None


def answer(
    pieces: Sequence[Piece], usage: int | None, hidden: int, max_tokens: int, sent: float, ended: float
) -> Answer:
    """`usage` is the server's final count of the whole answer, `hidden` of it tokens whose text it does not send."""
    total = _total(pieces, usage)
    _compare_with_text(total, hidden, pieces, max_tokens)
    counts = _per_piece(pieces, max(total - hidden, 0))
    commits = tuple((piece.at, count) for piece, count in zip(pieces, counts, strict=True) if count)
    words = tuple(WORD.findall("".join(piece.text for piece in pieces)))
    return Answer(words, commits, sent=sent, ended=ended, usage=total)


def _total(pieces: Sequence[Piece], usage: int | None) -> int:
    counts = [piece.tokens for piece in pieces if piece.tokens is not None]
    complete = bool(pieces) and len(counts) == len(pieces)
    if any(count < 0 for count in counts):
        raise Disagreement("its usage goes down from one chunk to the next")
    if usage is None and not complete:
        raise Disagreement(
            "it sends neither usage nor token ids nor log-probabilities, so its tokens cannot be counted; "
            "start it with usage switched on"
        )
    if usage is not None and complete and abs(usage - sum(counts)) > UNCOUNTED:
        raise Disagreement(f"usage is {usage} tokens, its chunks hold {sum(counts)}")
    return sum(counts) if usage is None else usage


def _compare_with_text(total: int, hidden: int, pieces: Sequence[Piece], max_tokens: int) -> None:
    chunks = sum(bool(piece.text) for piece in pieces)
    size = sum(len(piece.text.encode()) for piece in pieces)
    if total > max_tokens + UNCOUNTED:
        raise Disagreement(f"usage is {total} tokens where at most {max_tokens} were requested")
    if chunks and (total == 0 or total + SPLIT < chunks):
        raise Disagreement(f"usage is {total} tokens, but text came in {chunks} chunks of at least one token each")
    if total - hidden > size + UNSEEN:
        raise Disagreement(f"usage is {total} tokens, but the text has only {size} bytes")


def _per_piece(pieces: Sequence[Piece], total: int) -> list[int]:
    """By the server's count; without one, one token each and the rest in proportion to the text, an estimate."""
    if all(piece.tokens is not None for piece in pieces):
        return [piece.tokens or 0 for piece in pieces]
    spare, size = max(total - len(pieces), 0), sum(len(piece.text) for piece in pieces) or 1
    counts, seen, given = [], 0, 0
    for piece in pieces:
        seen += len(piece.text)
        share = round(spare * seen / size) - given
        given += share
        counts.append(1 + share)
    return counts
