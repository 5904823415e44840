"""OpenAI's protocol: ask one question, stream the answer.

Servers differ in what they take. The first question finds out (`Dialect`): running usage in every chunk if it can be
had, else usage at the end, else none; `max_completion_tokens` where `max_tokens` is refused; /completions where there
is no /chat/completions. Everything after speaks that dialect only, so that all that is timed is asked in one way.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.bench.endpoint_http import EndpointRefused, Exchange, Wire
from paceline.bench.endpoint_stream import Stream
from paceline.bench.measurement import Answer
from paceline.errors import InvalidParameter
from paceline.sampling_params import SamplingParams

Messages = Sequence[Mapping[str, Any]]
USAGE: tuple[dict[str, bool] | None, ...] = (
    {"include_usage": True, "continuous_usage_stats": True},
    {"include_usage": True},
    None,
)
SEEDS = 2**31  # some servers keep a seed in 32 bits


@dataclass(frozen=True, kw_only=True)
class Dialect:
    chat: bool = True
    usage: int = 0  # which of USAGE it takes
    length_field: str = "max_tokens"

    def after(self, refusal: EndpointRefused) -> Dialect | None:
        """What to try next once a server refused this; None when that would not help."""
        if refusal.status in (404, 405, 501) and self.chat and "model" not in refusal.reason.lower():
            return dataclasses.replace(self, chat=False)
        if refusal.status not in (400, 422):
            return None
        if "max_completion_tokens" in refusal.reason and self.length_field == "max_tokens":
            return dataclasses.replace(self, length_field="max_completion_tokens")
        about_usage = "stream_options" in refusal.reason or "usage" in refusal.reason
        if about_usage and self.usage + 1 < len(USAGE):
            return dataclasses.replace(self, usage=self.usage + 1)
        return None


@dataclass(frozen=True, kw_only=True)
class Client:
    wire: Wire
    model: str
    dialect: Dialect = Dialect()

    def body(self, messages: Messages, params: SamplingParams) -> dict[str, Any]:
        asked: dict[str, Any] = {"model": self.model, "stream": True, "temperature": params.temperature}
        asked[self.dialect.length_field] = params.max_tokens
        asked |= {"messages": list(messages)} if self.dialect.chat else {"prompt": flat(messages)}
        if (options := USAGE[self.dialect.usage]) is not None:
            asked["stream_options"] = options
        if params.seed is not None and params.temperature:
            asked["seed"] = params.seed % SEEDS
        return asked

    def ask(self, talks: Sequence[Messages], params: Sequence[SamplingParams]) -> list[Answer]:
        """All at once."""
        url = self.wire.url + ("/chat/completions" if self.dialect.chat else "/completions")
        exchanges = [
            Exchange(self.wire, url, Stream(each.max_tokens or 0).answer, self.body(talk, each))
            for talk, each in zip(talks, params, strict=True)
        ]
        return self.wire.run(exchanges)

    def settled(self, messages: Messages, params: SamplingParams) -> Client:
        """The same client, speaking the dialect its server takes; asks until it has an answer."""
        client = self
        while True:
            try:
                client.ask([messages], [params])
            except EndpointRefused as refusal:
                if (following := client.dialect.after(refusal)) is None:
                    raise
                client = dataclasses.replace(client, dialect=following)
            else:
                return client


def served_model(wire: Wire, wanted: str | None) -> tuple[str, str | None]:
    """The model to ask for and the owner the server names. A server without a list of models is believed `wanted`."""
    exchange = Exchange(wire, wire.url + "/models", Exchange.read)
    try:
        body = wire.run([exchange])[0]
        found = json.loads(body)
    except EndpointRefused as refusal:
        if wanted is None or refusal.status in (401, 403):
            raise
        return wanted, None
    except ValueError as error:
        raise exchange.not_openai("JSON", body) from error
    if not isinstance(found, dict) or not isinstance(found.get("data"), list):
        raise exchange.not_openai("a list of models", body)
    owners = {str(entry.get("id")): entry.get("owned_by") for entry in found["data"] if isinstance(entry, dict)}
    if wanted is None and len(owners) != 1:
        names = ", ".join(wire.clean(name) for name in owners)
        raise InvalidParameter("model", f"{wire.url} serves {names or 'no model'}; say which")
    chosen = wanted if wanted is not None else next(iter(owners))
    owner = owners.get(chosen)
    return chosen, wire.clean(owner) if isinstance(owner, str) else None


def flat(messages: Messages) -> str:
    """For servers without chat: one user's message as it is, a conversation as labelled paragraphs."""
    if len(messages) == 1:
        return str(messages[0]["content"])
    return "\n\n".join(f"{entry['role']}: {entry['content']}" for entry in messages) + "\n\nassistant:"
