"""OpenAI's protocol: ask one question, stream the answer, note when each chunk came.

Servers differ in what they take. The first question finds out (`Dialect`): running usage in every chunk if it can be
had, else usage at the end, else none; `max_completion_tokens` where `max_tokens` is refused; /completions where there
is no /chat/completions. Everything after speaks that dialect only, so that all that is timed is asked in one way.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.bench.endpoint_errors import EndpointDropped, EndpointRefused, NotOpenAI, TokenCountMismatch
from paceline.bench.endpoint_http import Exchange, Wire, reason
from paceline.bench.endpoint_sse import EventReader, MalformedStream
from paceline.bench.endpoint_tokens import Answer, Disagreement, Piece, answer
from paceline.errors import InvalidParameter

Messages = Sequence[Mapping[str, str]]
DONE = "[DONE]"
USAGE: tuple[dict[str, bool] | None, ...] = (
    {"include_usage": True, "continuous_usage_stats": True},
    {"include_usage": True},
    None,
)


@dataclass(frozen=True, kw_only=True)
class Dialect:
    chat: bool = True
    usage: int = 0  # which of USAGE it takes
    length_field: str = "max_tokens"

    def after(self, refusal: EndpointRefused) -> Dialect | None:
        """What to try next once a server refused this; None when that would not help."""
        if refusal.status in (404, 405, 501) and self.chat and "model" not in refusal.said.lower():
            return dataclasses.replace(self, chat=False)
        if refusal.status not in (400, 422):
            return None
        if "max_completion_tokens" in refusal.said and self.length_field == "max_tokens":
            return dataclasses.replace(self, length_field="max_completion_tokens")
        about_usage = "stream_options" in refusal.said or "usage" in refusal.said
        if about_usage and self.usage + 1 < len(USAGE):
            return dataclasses.replace(self, usage=self.usage + 1)
        return None


@dataclass(frozen=True, kw_only=True)
class Sampling:
    max_tokens: int
    temperature: float
    seed: int | None = None


@dataclass(frozen=True, kw_only=True)
class Client:
    wire: Wire
    model: str
    dialect: Dialect = Dialect()

    @property
    def path(self) -> str:
        return self.wire.address.base + ("/chat/completions" if self.dialect.chat else "/completions")

    def body(self, messages: Messages, sampling: Sampling) -> dict[str, Any]:
        asked: dict[str, Any] = {"model": self.model, "stream": True, "temperature": sampling.temperature}
        asked[self.dialect.length_field] = sampling.max_tokens
        asked |= {"messages": list(messages)} if self.dialect.chat else {"prompt": flat(messages)}
        if (options := USAGE[self.dialect.usage]) is not None:
            asked["stream_options"] = options
        if sampling.seed is not None:
            asked["seed"] = sampling.seed
        return asked

    def ask(self, messages: Messages, sampling: Sampling) -> Answer:
        with self.wire.exchange("POST", self.path, self.body(messages, sampling)) as exchange:
            exchange.expect_success()
            if exchange.content_type not in ("text/event-stream", ""):
                raise exchange.not_openai("a stream of events", exchange.read())
            stream = _Stream(exchange, self.wire)
            try:
                return dataclasses.replace(stream.answer(sampling.max_tokens), sent=exchange.sent)
            except Disagreement as error:
                advice = (
                    "its figures cannot be trusted" if stream.usage is not None else "start it with usage switched on"
                )
                raise TokenCountMismatch(exchange.url, f"{error}; {advice}") from error

    def settled(self, messages: Messages, sampling: Sampling) -> Client:
        """The same client, speaking the dialect its server takes; asks until it has an answer."""
        client: Client = self
        while True:
            try:
                client.ask(messages, sampling)
            except EndpointRefused as refusal:
                following = client.dialect.after(refusal)
                if following is None:
                    raise
                client = dataclasses.replace(client, dialect=following)
            else:
                return client


def served_model(wire: Wire, wanted: str | None) -> tuple[str, str | None]:
    """The model to ask for and who the server says owns it. A server without a list of models is believed `wanted`."""
    try:
        with wire.exchange("GET", wire.address.base + "/models") as exchange:
            found = exchange.json()
    except EndpointRefused as refusal:
        if wanted is None or refusal.status in (401, 403):
            raise
        return wanted, None
    if not isinstance(found, dict) or not isinstance(found.get("data"), list):
        raise exchange.not_openai("a list of models", json.dumps(found))
    owners = {str(entry.get("id")): entry.get("owned_by") for entry in found["data"] if isinstance(entry, dict)}
    names = ", ".join(wire.clean(name) for name in owners)
    if wanted is None and len(owners) != 1:
        raise InvalidParameter("model", f"{wire.address.url} serves {names or 'no model'}; say which")
    chosen = wanted if wanted is not None else next(iter(owners))
    owner = owners.get(chosen)
    return chosen, wire.clean(owner) if isinstance(owner, str) else None


def flat(messages: Messages) -> str:
    """For servers without chat: one user's message as it is, a conversation as labelled paragraphs."""
    if len(messages) == 1:
        return messages[0]["content"]
    return "\n\n".join(f"{entry['role']}: {entry['content']}" for entry in messages) + "\n\nassistant:"


class _Stream:
    """One answer as it comes."""

    def __init__(self, exchange: Exchange, wire: Wire) -> None:
        self._exchange, self._wire = exchange, wire
        self._pieces: list[Piece] = []
        self._finished = False
        self._hidden = 0
        self._thought = False  # text of the model's thinking came
        self._running: bool | None = None  # whether usage comes with every chunk; None until there was text
        self._counted = 0  # tokens the running usage has told of
        self.usage: int | None = None

    def answer(self, max_tokens: int) -> Answer:
        last = 0.0
        for at, data in self._events():
            if data == DONE:
                self._finished = True
                break
            last = self._take(at, data) or last
        if not self._finished:
            raise EndpointDropped(self._exchange.url, "the stream ended before the answer did; its own log says more")
        hidden = 0 if self._thought else self._hidden
        return answer(self._pieces, self.usage, hidden, max_tokens, last)

    def _events(self) -> Iterator[tuple[float, str]]:
        reader = EventReader()
        try:
            for received in self._exchange.arrivals():
                at = self._exchange.elapsed()
                yield from ((at, data) for data in reader.feed(received))
            yield from ((self._exchange.elapsed(), data) for data in reader.end())
        except MalformedStream as error:
            raise self._exchange.not_openai("server-sent events", error.line) from error

    def _take(self, at: float, data: str) -> float | None:
        """Note one event; its time if it belongs to the answer itself and not to the accounts after it."""
        try:
            event = json.loads(data)
            usage = self._usage(event)
            choices = event["choices"]
            choice = choices[0] if choices else None
            text, tokens = ("", None) if choice is None else (self._text(choice), _told(choice))
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise self._wrong(data) from error
        if choice is None:
            return None
        if text and self._running is None:
            self._running = usage is not None
        if tokens is None and self._running:
            tokens = usage
        if text or tokens:
            self._pieces.append(Piece(at, text, tokens))
        self._finished = self._finished or choice.get("finish_reason") is not None
        return at

    def _usage(self, event: dict[str, Any]) -> int | None:
        """Tokens since the usage before, where every chunk carries one. The last chunk's is the answer's."""
        if not (usage := event.get("usage")):
            return None
        self.usage = int(usage["completion_tokens"])
        self._hidden = int((usage.get("completion_tokens_details") or {}).get("reasoning_tokens") or 0)
        new, self._counted = self.usage - self._counted, self.usage
        return new

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

    def _wrong(self, data: str) -> NotOpenAI | EndpointRefused:
        """An error the server reports in the stream, or an event of another protocol."""
        try:
            event = json.loads(data)
        except ValueError:
            return self._exchange.not_openai("JSON in its events", data)
        if isinstance(event, dict) and ("error" in event or event.get("object") == "error"):
            said = self._wire.clean(reason(data.encode()))
            return EndpointRefused(self._exchange.url, None, said, "its own log says more")
        return self._exchange.not_openai("chunks of an answer", data)


def _told(choice: dict[str, Any]) -> int | None:
    """Tokens in this chunk by its token ids or log-probabilities, where the server sends them."""
    if isinstance(ids := choice.get("token_ids"), list):
        return len(ids)
    logprobs = choice.get("logprobs")
    entries = (logprobs.get("content") or logprobs.get("tokens")) if isinstance(logprobs, dict) else None
    return len(entries) if isinstance(entries, list) else None
