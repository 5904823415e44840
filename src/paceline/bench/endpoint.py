"""Benchmark of any server that speaks OpenAI's protocol, alone or against a second one without speculation.

Servers are measured by the runner of our own engines, so the same report reads both. Of a server there is text, not
token ids, and counters of whole groups, not of answers. Whatever ends the run, the rows so far stand, and the reason
comes with them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.bench import endpoint_metrics as metrics
from paceline.bench.endpoint_client import Client, Messages, served_model
from paceline.bench.endpoint_http import Wire, base_url
from paceline.bench.endpoint_metrics import ACCEPTED, DRAFTED, DRAFTS, Counters
from paceline.bench.grid import Contender
from paceline.bench.groups import make_groups
from paceline.bench.measurement import Run, results_of
from paceline.bench.prompts import Prompt
from paceline.bench.results import PLAIN, Results, machine_facts
from paceline.bench.runner import WARM_UP, WARM_UP_TOKENS, OnProgress, Plan, collect
from paceline.errors import InvalidParameter
from paceline.sampling_params import SamplingParams


@dataclass(frozen=True)
class Server(Contender):
    @property
    def label(self) -> str:
        return "baseline" if self.method == PLAIN else self.method


ENDPOINT, BASELINE = Server("endpoint"), Server(PLAIN)


@dataclass
class Target:
    """A server that is measured. Its counters are followed from one group to the next."""

    client: Client
    owner: str | None
    counting: bool
    warm: bool = False  # once it has answered at the concurrency of now
    counters: Counters | None = None
    total: Counters = field(default_factory=Counters)

    def answer(self, prompts: Sequence[Messages], params: Sequence[SamplingParams]) -> Run:
        answers = tuple(self.client.ask(prompts, params))
        wire, before = self.client.wire, self.counters
        if not self.warm:
            self.warm, self.counters = True, metrics.settled(wire) if self.counting else None
            return Run(answers)
        if before is None:
            return Run(answers)
        tokens = sum(answer.num_tokens for answer in answers)
        self.counters = metrics.read_after(wire, before, tokens, len(answers))
        counted = self.counters.since(before).of_answers(tokens)
        self.total = self.total.plus(counted)
        return Run(answers, counted=counted)

    def described(self) -> dict[str, Any]:
        """What it seems to be, by its counters or by the model's owner."""
        server = (self.counters or self.total).server or self.owner
        return {"url": self.client.wire.url, "model": self.client.model, "server": server}

    def acceptance(self) -> dict[str, Any] | None:
        """By its own counters, over the whole run; None where it has none."""
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
    """Raises what keeps it from beginning; a later reason to stop is returned beside the results."""
    if not timeout_s > 0:
        raise InvalidParameter("timeout", f"must be more than 0 seconds; got {timeout_s:g}")
    if api_key is not None and not re.fullmatch(r"[!-~]+", api_key):
        raise InvalidParameter("api_key", "holds characters no key has, or nothing at all; was it copied whole?")
    for level in plan.concurrencies:
        if not make_groups(prompts, level)[0]:
            problem = f"{len(prompts)} prompts never make {level} requests at once; give more prompts or lower it"
            raise InvalidParameter("concurrency", problem)

    def reach(text: str, option: str) -> Target:
        """Find out whether it is there, which model it serves and how it wants to be asked."""
        wire = Wire(url=base_url(text, option), timeout_s=timeout_s, api_key=api_key)
        name, owner = served_model(wire, model)
        first = SamplingParams(temperature=plan.temperature, seed=plan.seed, max_tokens=WARM_UP_TOKENS)
        return Target(Client(wire=wire, model=name).settled(WARM_UP.messages([]), first), owner, counters)

    endpoint = reach(url, "endpoint")
    targets: dict[Contender, Target] = {ENDPOINT: endpoint}
    if baseline_url is not None:
        targets = {BASELINE: reach(baseline_url, "baseline_endpoint"), ENDPOINT: endpoint}
    measurement, stopped = collect(Servers(targets), prompts, plan, list(targets), on_progress)
    measurement.comparable = plan.temperature == 0  # a seed means something else to every server
    described = {**endpoint.described(), "acceptance": endpoint.acceptance()}
    if BASELINE in targets:
        described["baseline"] = targets[BASELINE].described()
    model, where = endpoint.client.model, machine_facts()
    return results_of(measurement, model=model, where=where, settings=settings or {}, endpoint=described), stopped
