"""Benchmark of any server with OpenAI's protocol, alone or against a second one without speculation.

Servers are measured by the runner of our own engines, so one report serves both. A server returns text, not token ids,
and counts tokens by whole groups, not by answers.

Servers differ in the requests they accept. The first request finds out (`Dialect`): running usage in every chunk if
available, else usage at the end, else none; `max_completion_tokens` where `max_tokens` is refused; /completions where
there is no /chat/completions. All timed requests use that dialect, so that they are alike.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.bench import endpoint_metrics as metrics
from paceline.bench.endpoint_http import EndpointRefused, Exchange, Wire, base_url
from paceline.bench.endpoint_metrics import ACCEPTED, DRAFTED, DRAFTS, Counters
from paceline.bench.endpoint_stream import Stream
from paceline.bench.grid import Contender
from paceline.bench.groups import make_groups
from paceline.bench.measurement import Answer, Run, results_of
from paceline.bench.prompts import Prompt
from paceline.bench.results import PLAIN, Results, machine_facts
from paceline.bench.runner import WARM_UP, WARM_UP_TOKENS, OnProgress, Plan, collect
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
        """The dialect to try next after a refusal; None when no other would help."""
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


@dataclass(frozen=True)
class Server(Contender):
    @property
    def label(self) -> str:
        return "baseline" if self.method == PLAIN else self.method


ENDPOINT, BASELINE = Server("endpoint"), Server(PLAIN)


@dataclass
class Target:
    """A server that is measured. Its counters are followed from one group to the next."""

    wire: Wire
    model: str
    owner: str | None  # of the model, as the server names it
    counting: bool
    dialect: Dialect = Dialect()
    warm: bool = False  # once it has answered at the concurrency of now
    counters: Counters | None = None
    total: Counters = field(default_factory=Counters)

    def body(self, messages: Messages, params: SamplingParams) -> dict[str, Any]:
        body: dict[str, Any] = {"model": self.model, "stream": True, "temperature": params.temperature}
        body[self.dialect.length_field] = params.max_tokens
        body |= {"messages": list(messages)} if self.dialect.chat else {"prompt": flat(messages)}
        if (options := USAGE[self.dialect.usage]) is not None:
            body["stream_options"] = options
        if params.seed is not None and params.temperature:
            body["seed"] = params.seed % SEEDS
        return body

    def ask(self, talks: Sequence[Messages], params: Sequence[SamplingParams]) -> tuple[Answer, ...]:
        """All at once."""
        url = self.wire.url + ("/chat/completions" if self.dialect.chat else "/completions")
        exchanges = [
            Exchange(self.wire, url, Stream(each.max_tokens or 0).answer, self.body(talk, each))
            for talk, each in zip(talks, params, strict=True)
        ]
        return tuple(self.wire.run(exchanges))

    def settle(self, params: SamplingParams) -> None:
        """Find the dialect the server accepts: send requests until one is answered."""
        while True:
            try:
                self.ask([WARM_UP.messages([])], [params])
                return
            except EndpointRefused as refusal:
                if (following := self.dialect.after(refusal)) is None:
                    raise
                self.dialect = following

    def answer(self, prompts: Sequence[Messages], params: Sequence[SamplingParams]) -> Run:
        answers, before = self.ask(prompts, params), self.counters
        if not self.warm:
            self.warm, self.counters = True, metrics.settled(self.wire) if self.counting else None
            return Run(answers)
        if before is None:
            return Run(answers)
        tokens = sum(answer.num_tokens for answer in answers)
        self.counters = metrics.read_after(self.wire, before, tokens, len(answers))
        counted = self.counters.since(before).of_answers(tokens)
        self.total = self.total.plus(counted)
        return Run(answers, counted=counted)

    def described(self) -> dict[str, Any]:
        """The kind of server, by its counters or by the model's owner."""
        server = (self.counters or self.total).server or self.owner
        return {"url": self.wire.url, "model": self.model, "server": server}

    def acceptance(self) -> dict[str, Any] | None:
        """Acceptance by the server's own counters, over the whole run; None where it has none."""
        values = self.total.values
        if DRAFTED not in values:
            return None
        return {
            "drafts": values.get(DRAFTS),
            "draft_tokens": values[DRAFTED],
            "accepted_tokens": values.get(ACCEPTED),
            "accepted_per_position": self.total.at_depth(ACCEPTED),
            "acceptance_rate": self.total.stats().acceptance_rate,
        }


class Servers:
    """The runner's subject: the endpoint, and the baseline where there is one."""

    defaults: Mapping[str, Any] = {}

    def __init__(self, targets: Mapping[Contender, Target]) -> None:
        self.targets = targets

    def encode(self, prompt: Prompt, answers: Sequence[str]) -> list[Any]:
        return prompt.messages(answers)

    def decode(self, tokens: Sequence[str]) -> str:
        return "".join(tokens)

    def open(self, concurrency: int) -> Mapping[Contender, Target]:
        for target in self.targets.values():
            target.warm, target.counters = False, None
        return self.targets


def measure(
    url: str,
    prompts: Sequence[Prompt],
    plan: Plan,
    settings: Mapping[str, Any] | None = None,
    *,
    model: str | None = None,
    api_key: str | None = None,
    timeout_s: float = 300.0,
    baseline_url: str | None = None,
    counters: bool = True,
    on_progress: OnProgress = lambda done, total, what: None,
) -> tuple[Results, BaseException | None]:
    """Raises an error that prevents the run; a later one is returned beside the results."""
    if not timeout_s > 0:
        raise InvalidParameter("timeout", f"must be more than 0 seconds; got {timeout_s:g}")
    if api_key is not None and not re.fullmatch(r"[!-~]+", api_key):
        raise InvalidParameter("api_key", "holds characters no key has, or nothing at all; was it copied whole?")
    for level in plan.concurrencies:
        if not make_groups(prompts, level)[0]:
            problem = f"{len(prompts)} prompts never make {level} requests at once; give more prompts or lower it"
            raise InvalidParameter("concurrency", problem)

    def reach(text: str, option: str) -> Target:
        """Find out whether the server is there, which model it serves and its dialect."""
        wire = Wire(url=base_url(text, option), timeout_s=timeout_s, api_key=api_key)
        target = Target(wire, *served_model(wire, model), counters)
        target.settle(SamplingParams(temperature=plan.temperature, seed=plan.seed, max_tokens=WARM_UP_TOKENS))
        return target

    endpoint = reach(url, "endpoint")
    targets: dict[Contender, Target] = {ENDPOINT: endpoint}
    if baseline_url is not None:
        targets = {BASELINE: reach(baseline_url, "baseline_endpoint"), ENDPOINT: endpoint}
    measurement, stopped = collect(Servers(targets), prompts, plan, list(targets), on_progress)
    measurement.comparable = plan.temperature == 0  # the same seed gives other tokens on every server
    described = {**endpoint.described(), "acceptance": endpoint.acceptance()}
    if BASELINE in targets:
        described["baseline"] = targets[BASELINE].described()
    where = machine_facts()
    results = results_of(measurement, model=endpoint.model, where=where, settings=settings or {}, endpoint=described)
    return results, stopped


def served_model(wire: Wire, wanted: str | None) -> tuple[str, str | None]:
    """The model to request and its owner by the server's list. Without such a list `wanted` is used unchecked."""
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
        raise InvalidParameter("model", f"{wire.url} serves {names or 'no model'}; choose one")
    chosen = wanted if wanted is not None else next(iter(owners))
    owner = owners.get(chosen)
    return chosen, wire.clean(owner) if isinstance(owner, str) else None


def flat(messages: Messages) -> str:
    """For servers without chat: one user's message as it is, a conversation as labelled paragraphs."""
    if len(messages) == 1:
        return str(messages[0]["content"])
    return "\n\n".join(f"{entry['role']}: {entry['content']}" for entry in messages) + "\n\nassistant:"
