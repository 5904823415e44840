"""Benchmark of a server with OpenAI's protocol, alone or beside a second one without speculation.

An answer is a streamed chat completion with usage: a chunk may carry several tokens, so the number of chunks says
nothing. The server's own counters (/metrics) are read around every group; if they disagree with the usage of its
answers, other clients or wrong counts spoil the figures, and the run ends.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from huggingface_hub.utils import httpx  # type: ignore[attr-defined]  # httpx or its successor httpx2, as installed

from paceline.bench.grid import ENDPOINT, Contender
from paceline.bench.measurement import Run, TimedAnswer, results_of
from paceline.bench.prompts import Prompt
from paceline.bench.results import PLAIN, Results, machine_facts
from paceline.bench.runner import WARM_UP, WARM_UP_TOKENS, OnProgress, RunPlan, collect
from paceline.errors import InvalidParameter, PacelineError
from paceline.outputs import SpeculationStats
from paceline.sampling_params import SamplingParams

WORD = re.compile(r"\s*\w{1,6}|\s*[^\w\s]|\s+\Z")  # stands in for a token, since only text is known
UNSEEN = 16  # tokens of an answer that may have no text: EOS, special tokens
SLACK = 2  # tokens; EOS may be counted or not, and the text of two tokens may come in other chunks than theirs
SAMPLE = re.compile(r"^\w+:(\w+?)(?:_total)?(?:\{.*\})?\s+(\S+)")  # name and value of a metric
GENERATED = ("generation_tokens", "tokens_predicted")  # the second is llama.cpp's
SPECULATION = tuple(f"spec_decode_num_{name}" for name in ("drafts", "draft_tokens", "accepted_tokens"))
DRAFTED, ACCEPTED = SPECULATION[1:]
PAUSE_S, PATIENCE_S = 0.05, 1.0  # seconds; counters may lag behind the answers that they count
TOLERANCE = 0.01  # share of the tokens, besides one token an answer


class EndpointError(PacelineError):
    """A server that is not there, refuses, or answers in another protocol; `status` is that of an HTTP error."""

    def __init__(self, url: str, problem: str, status: int | None = None) -> None:
        super().__init__(f"{url}: {problem}")
        self.url, self.status = url, status


class TokenCountMismatch(EndpointError):
    """Usage, counters and text that disagree on the number of tokens, or no count at all."""


class Counters(dict[str, float]):
    """Counters of a server by name: since its start, or their growth over an interval."""

    @staticmethod
    def parse(text: str) -> Counters:
        """Read Prometheus' text format. Samples of several engines are summed; unknown ones are skipped."""
        counters = Counters()
        for name, value in (sample.groups() for sample in map(SAMPLE.match, text.splitlines()) if sample):
            if name in (*GENERATED, *SPECULATION) and math.isfinite(float(value)):
                counters[name] = counters.get(name, 0.0) + float(value)
        return counters

    def since(self, before: Counters) -> Counters:
        return Counters({name: value - before.get(name, 0.0) for name, value in self.items()})

    def stats(self, tokens: int) -> SpeculationStats:
        """Return the statistics of answers of `tokens`: a pass commits the tokens it accepted and one more."""
        drafts, drafted, accepted = (round(self.get(name, 0.0)) for name in SPECULATION)
        passes = tokens - accepted if ACCEPTED in self and tokens > accepted else 0
        return SpeculationStats(drafts, drafted, accepted, passes, tokens if passes else 0)

    def contradiction(self, tokens: int, answers: int) -> str | None:
        """Return the disagreement between the growth of the counters and the usage of the answers, if there is one."""
        slack = answers + TOLERANCE * tokens
        generated = next((self[name] for name in GENERATED if name in self), tokens)
        drafted, accepted = self.get(DRAFTED, math.inf), self.get(ACCEPTED, 0.0)
        if abs(generated - tokens) > slack:
            why = "other clients use it too" if generated > tokens else "it was restarted or usage is wrong"
            return f"usage is {tokens} tokens, its /metrics counted {generated:.0f}: {why}; measure it alone"
        if accepted > min(drafted, tokens + slack):
            return f"its /metrics count {accepted:.0f} tokens accepted of {drafted:.0f} drafted, usage is {tokens}"
        return None


@dataclass
class ServerReply:
    """The bytes of a response and when they came, by time.perf_counter(); an event is complete with its last byte."""

    sent: float = 0.0  # when its connection was open
    arrivals: list[tuple[float, bytes]] = field(default_factory=list)

    @property
    def text(self) -> str:
        return b"".join(received for _, received in self.arrivals).decode("utf-8", "replace")

    def events(self) -> Iterator[tuple[float, str]]:
        rest = b""
        for moment, received in self.arrivals:
            *lines, rest = (rest + received).split(b"\n")
            for line in lines:
                if line.startswith(b"data:") and line[5:].strip() != b"[DONE]":
                    yield moment, line[5:].decode("utf-8", "replace")


def read_answer(url: str, reply: ServerReply, max_tokens: int) -> TimedAnswer:
    chunks: list[tuple[float, str, int | None]] = []  # moment, text, and the usage so far if the chunk carries it
    usage = prompt_tokens = ended = None
    data = "no event"
    try:
        for moment, data in reply.events():
            event = json.loads(data)
            if event.get("usage"):
                usage, prompt_tokens = int(event["usage"]["completion_tokens"]), event["usage"].get("prompt_tokens")
            for choice in event["choices"][:1]:
                delta = choice["delta"]
                text = (delta.get("reasoning_content") or delta.get("reasoning") or "") + (delta.get("content") or "")
                if text or event.get("usage"):
                    chunks.append((moment, text, usage if event.get("usage") else None))
                ended = moment if choice.get("finish_reason") else ended
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise EndpointError(url, f"expected a chunk of an answer, got {quoted(data)}") from error
    if ended is None:
        raise EndpointError(url, f"its stream ended before the answer did, after {quoted(data)}; see its own log")
    text, texts = "".join(text for _, text, _ in chunks), sum(bool(text) for _, text, _ in chunks)
    if usage is None:
        raise TokenCountMismatch(url, "it sends no usage, so its tokens cannot be counted; switch usage on there")
    if not max(texts - SLACK, bool(texts)) <= usage <= min(max_tokens + SLACK, len(text.encode()) + UNSEEN):
        size = f"{len(text.encode())} bytes of text in {texts} chunks"
        raise TokenCountMismatch(url, f"usage is {usage} tokens of {max_tokens} requested, for {size}")
    totals = [total for _, _, total in chunks if total is not None]
    if len(totals) < len(chunks):  # usage came once: divide it in proportion to the text, an estimate
        lengths = itertools.accumulate(len(part) for _, part, _ in chunks)
        totals = [round(usage * length / len(text)) for length in lengths]
    counts = [after - before for before, after in itertools.pairwise([0, *totals])]
    commits = tuple((chunk[0], count) for chunk, count in zip(chunks, counts, strict=True) if count)
    words = tuple(WORD.findall(text))
    return TimedAnswer(words, commits, sent=reply.sent, ended=ended, usage=usage, prompt_tokens=prompt_tokens)


def quoted(message: str, secret: str | None = None) -> str:
    """Return one printable line of bounded length without the secret in it."""
    return repr(message.replace(secret or "\0", "***")[:300])


@dataclass(kw_only=True)
class ServerUnderTest:
    """A server, and its counters, which are followed from one group to the next."""

    url: str
    timeout_s: float  # for the answers of a group
    api_key: str | None = field(default=None, repr=False)
    model: str = ""
    usage: Mapping[str, bool] = field(default_factory=lambda: {"include_usage": True, "continuous_usage_stats": True})
    counters: Counters | None = None  # None: not read

    def request(self, url: str, bodies: Sequence[Mapping[str, Any] | None] = (None,)) -> list[ServerReply]:
        """Send all requests at once; the first error ends them all."""

        async def send(client: httpx.AsyncClient, body: Mapping[str, Any] | None) -> ServerReply:
            reply = ServerReply()

            async def trace(event: str, info: Mapping[str, Any]) -> None:
                if event == "http11.send_request_headers.started":
                    reply.sent = time.perf_counter()

            method = "GET" if body is None else "POST"
            async with client.stream(method, url, json=body, extensions={"trace": trace}) as response:
                async for received in response.aiter_bytes():
                    reply.arrivals.append((time.perf_counter(), received))
            if (status := response.status_code) >= 300:
                raise EndpointError(url, f"HTTP {status}: {quoted(reply.text, self.api_key)}", status)
            return reply

        async def send_all() -> list[ServerReply]:
            headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
            timeout, limits = httpx.Timeout(None, connect=10.0), httpx.Limits(max_connections=None)
            # trust_env: a proxy of the environment would be measured with the server
            async with httpx.AsyncClient(headers=headers, timeout=timeout, limits=limits, trust_env=False) as client:
                replies = asyncio.gather(*(send(client, body) for body in bodies))
                return await asyncio.wait_for(replies, self.timeout_s)

        try:
            return asyncio.run(send_all())
        except (asyncio.TimeoutError, httpx.TransportError, httpx.InvalidURL) as error:
            reason = str(error) or f"{type(error).__name__} within --timeout {self.timeout_s:g}"
            raise EndpointError(url, f"no answer ({reason}); is the server running, and its address right?") from error

    def open(self, model: str | None, counting: bool) -> None:
        """Find out the model, the counters, and whether usage may come with every chunk."""
        self.model = model or self._served_model()
        self.counters = self._read_counters() if counting else None
        warm_up = [WARM_UP.messages([])], [SamplingParams(temperature=0, max_tokens=WARM_UP_TOKENS)]
        try:
            self.answer(*warm_up)
        except EndpointError as error:
            if error.status not in (400, 422):
                raise
            self.usage = {"include_usage": True}
            self.answer(*warm_up)

    def _served_model(self) -> str:
        text = self.request(f"{self.url}/models")[0].text
        try:
            names = [str(entry["id"]) for entry in json.loads(text)["data"]]
        except (ValueError, KeyError, TypeError) as error:
            raise EndpointError(self.url, f"expected a list of models, got {quoted(text)}") from error
        if len(names) != 1:
            raise InvalidParameter("model", f"{self.url} serves {', '.join(names)!r}; choose one")
        return names[0]

    def answer(self, prompts: Sequence[Sequence[Any]], params: Sequence[SamplingParams]) -> Run:
        """Have all prompts answered at once."""
        url, bodies = f"{self.url}/chat/completions", []
        for messages, each in zip(prompts, params, strict=True):
            body = {"model": self.model, "messages": list(messages), "stream": True, "stream_options": self.usage}
            body |= {"max_tokens": each.max_tokens, "temperature": each.temperature}
            if each.seed is not None and each.temperature:
                body["seed"] = each.seed % (1 << 31)  # some servers keep a seed in 32 bits
            if each.structured_outputs is not None:
                schema = {"name": "answer", "schema": each.structured_outputs["json"]}
                body["response_format"] = {"type": "json_schema", "json_schema": schema}
            bodies.append(body)
        replies = zip(self.request(url, bodies), params, strict=True)
        answers = tuple(read_answer(url, reply, each.max_tokens or 0) for reply, each in replies)
        return Run(answers, counted=None if self.counters is None else self._counted(self.counters, answers))

    def _read_counters(self) -> Counters | None:
        """Return None for a server without /metrics."""
        try:
            return Counters.parse(self.request(self.url.removesuffix("/v1") + "/metrics")[0].text)
        except EndpointError:
            return None

    def _counted(self, before: Counters, answers: Sequence[TimedAnswer]) -> SpeculationStats:
        """Return the growth of the counters once they hold the answers; raise if they never agree with usage."""
        tokens, deadline = sum(answer.num_tokens for answer in answers), time.monotonic() + PATIENCE_S
        while (now := self._read_counters()) is not None:
            growth = now.since(before)
            problem = growth.contradiction(tokens, len(answers))
            if problem is None:
                self.counters = now
                return growth.stats(tokens)
            if time.monotonic() > deadline:
                raise TokenCountMismatch(self.url, problem)
            time.sleep(PAUSE_S)
        raise TokenCountMismatch(self.url, "its /metrics are gone since the run began; was it restarted?")


@dataclass(frozen=True)
class ServersUnderTest:
    """The endpoint, and the baseline if there is one, for the runner."""

    servers: Mapping[Contender, ServerUnderTest]
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def encode(self, prompt: Prompt, answers: Sequence[str]) -> list[Any]:
        return prompt.messages(answers)

    def decode(self, tokens: Sequence[str]) -> str:
        return "".join(tokens)

    def open(self, concurrency: int) -> Mapping[Contender, ServerUnderTest]:
        return self.servers


def measure(
    url: str,
    prompts: Sequence[Prompt],
    plan: RunPlan,
    settings: Mapping[str, Any],
    *,
    model: str | None = None,
    api_key: str | None = None,
    timeout_s: float = 300.0,
    baseline_url: str | None = None,
    counters: bool = True,
    on_progress: OnProgress,
) -> tuple[Results, BaseException | None]:
    """Raise an error that prevents the run; return a later one beside the results."""
    if api_key is not None and not re.fullmatch(r"[!-~]+", api_key):
        raise InvalidParameter("api_key", "holds characters no key has, or nothing at all; was it copied whole?")
    servers: dict[Contender, ServerUnderTest] = {}
    for method, option, text in ((PLAIN, "baseline_endpoint", baseline_url), (ENDPOINT, "endpoint", url)):
        if text is not None:
            server = ServerUnderTest(url=base_url(text, option), timeout_s=timeout_s, api_key=api_key)
            server.open(model, counters)
            servers[Contender(method)] = server
    measurement, stopped = collect(ServersUnderTest(servers), prompts, plan, list(servers), on_progress)
    measurement.comparable = plan.temperature == 0  # the same seed gives other tokens on every server
    facts, endpoint = machine_facts(), {"url": server.url, "model": server.model}
    return results_of(measurement, model=server.model, where=facts, settings=settings, endpoint=endpoint), stopped


def base_url(text: str, option: str) -> str:
    """Return the URL of the routes, such as http://localhost:8000/v1."""
    url = re.sub(r"(/chat)?/completions$", "", text.strip().rstrip("/"))
    if not (parts := re.fullmatch(r"https?://[\w.:\[\]-]+(/[\w./%~-]+)?", url, re.ASCII)):
        advice = "without user, password, ? or #; a key goes into --api-key"
        raise InvalidParameter(option, f"give a URL such as http://localhost:8000/v1, {advice}")
    return url if parts[1] else f"{url}/v1"
