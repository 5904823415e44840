"""The state that routes share: settings, engine, tokenizer; and the start of a generation from a prompt."""

from __future__ import annotations

import asyncio
import functools
import json
import re
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from starlette.requests import Request

from paceline.engine.events import Request as EngineRequest
from paceline.errors import EngineClosed, InvalidParameter, PromptTooLong, short_repr
from paceline.sampling_params import SamplingParams
from paceline.server.api.generation import Generation
from paceline.server.api.protocol import ChatRequest, CompletionRequest, Sampling, Whole
from paceline.server.api.tool_calls import Style, style_of
from paceline.server.bodies.body_process import BodyReader
from paceline.server.bodies.body_prompts import BodyPrompts, check_model
from paceline.server.bodies.body_worker import BodyAnswer, BodySettings
from paceline.server.bodies.long_bodies import READ
from paceline.server.capture import Capture
from paceline.server.gate import CLIENT
from paceline.server.metrics import Metrics
from paceline.server.process.client import EngineClient, new_request_id
from paceline.server.process.messages import EngineSettings
from paceline.server.trust import ApiKey, Sharing
from paceline.text.request_text import EncodedPrompt
from paceline.text.thoughts import Thought, thought_after
from paceline.text.tokenizer import Tokenizer

Keep = Callable[[Capture, str, str], None]  # writes one answer, with its domain
BODY_CPU_S = 30.0  # processor seconds of one long body; one of 4 MiB takes up to 4
MAX_BODY_MEMORY = 4 << 30  # bytes of address space of the process that reads them
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[a-z0-9.\[\]:_-]+|null")  # a browser's spelling


@dataclass(frozen=True)
class ServerSettings:
    engine: EngineSettings
    served_name: str | None = None  # None: the model's name
    api_keys: tuple[ApiKey, ...] = ()
    sharing: Sharing = Sharing()  # noqa: RUF009  (immutable)
    max_body_bytes: int = 4 << 20
    request_limit_s: float = 600.0
    engine_timeout_s: float = 60.0  # seconds without a finished step after which the engine is killed
    max_connections: int | None = None  # None: by the limit of files
    admin_key: str | None = None  # allows to reload drafters from elsewhere
    allow_fetch: bool = False  # a reload may name a drafter that is fetched
    grace_s: float = 10.0  # seconds in which running requests may finish when the server stops
    cors_origins: tuple[str, ...] = ()
    capture: Path | None = None  # file to which prompts and answers are written

    def __post_init__(self) -> None:
        if self.served_name is not None and not self.served_name.strip():
            raise InvalidParameter("served_model_name", "is empty; leave it out to serve the model under its own name")
        for origin in self.cors_origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise InvalidParameter(
                    "cors_origin",
                    f"{short_repr(origin)} is no origin; give scheme, host and port alone, such as "
                    "https://example.org or http://localhost:3000, or * for any",
                )


@dataclass
class AppState:
    """The state that routes share; set up when the application starts."""

    settings: ServerSettings
    client: EngineClient
    metrics: Metrics
    started: float = field(default_factory=time.time)
    stopping: bool = False
    capture: Capture | None = None
    _tokenizer: Tokenizer | None = None

    def __post_init__(self) -> None:
        self.bodies = BodyReader(self.body_settings)

    @property
    def name(self) -> str:
        return self.settings.served_name or self.settings.engine.model

    @property
    def tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            self._tokenizer = Tokenizer.from_path(Path(self.client.info["path"]))
        return self._tokenizer

    @property
    def call_style(self) -> Style:
        """Return the form in which the model writes tool calls."""
        known = self.tokenizer.has_chat_template
        return style_of(self.tokenizer.chat_template(with_tools=True).source if known else "")

    def check_model(self, name: str | None) -> None:
        check_model(name, self._names)

    @property
    def _names(self) -> list[str]:
        return [self.name, self.settings.engine.model]

    async def prompts(self, asked: Request, body: Whole) -> list[EncodedPrompt]:
        """Return the prompts of a body that asks for answers. A template may take long, and runs elsewhere."""
        read: BodyAnswer | None = getattr(asked.state, READ, None)
        if read is None:
            work = self.reader.prompts
            return work(body) if isinstance(body, CompletionRequest) else await asyncio.to_thread(work, body)
        prompts = []
        for ending, tokens in read.prompts:
            prompts.append(EncodedPrompt(ending, array("i", tokens).tolist()))
            await asyncio.sleep(0)  # other requests are answered between two of many prompts
        return prompts

    def keep_chat(self, asked: Request, body: ChatRequest) -> Keep | None:
        """Return the function that captures an answer to a conversation."""
        if self.capture is None:
            return None
        read: BodyAnswer | None = getattr(asked.state, READ, None)
        messages = body.conversation() if read is None else json.loads(read.conversation)
        return functools.partial(Capture.chat, messages=messages)

    @cached_property
    def reader(self) -> BodyPrompts:
        return BodyPrompts(self.tokenizer, self.client.info["vocab_size"], self.client.info["max_model_len"])

    def body_settings(self) -> BodySettings:
        info, names = self.client.info, self._names
        path, lengths = str(info["path"]), (info["vocab_size"], info["max_model_len"])
        return BodySettings(path, names, *lengths, self.capture is not None, BODY_CPU_S, MAX_BODY_MEMORY)

    async def start_chat(self, asked: Request, body: ChatRequest, *, prefix: str, cuts: bool = False) -> Generation:
        """Start the answer to a conversation. `cuts`: as in `start`."""
        params, tags = body.to_params(self.call_style), self.tokenizer.thought_tags
        (prompt,) = await self.prompts(asked, body)
        thought = None if tags is None else thought_after(tags, prompt.text or "")
        # Variables of the template are part of the prompt, but not of the messages that would be captured.
        has_variables = body.reasoning_effort is not None or body.template_variables()
        keep = None if has_variables else self.keep_chat(asked, body)
        if thought is not None:
            params = thought.frees(params)
        streamed = bool(body.stream)
        return await self.start(
            asked, prompt, params, body, streamed=streamed, prefix=prefix, keep=keep, thought=thought, cuts=cuts
        )

    async def start(
        self,
        asked: Request,
        prompt: EncodedPrompt,
        params: SamplingParams,
        body: Sampling,
        *,
        streamed: bool,
        prefix: str,
        group: str | None = None,
        keep: Keep | None = None,
        thought: Thought | None = None,
        cuts: bool = False,
    ) -> Generation:
        """Start a generation. `group`: id of all prompts of one HTTP request; `keep` is called for each captured
        answer; `cuts`: an answer beyond the context is cut, not refused."""
        if self.stopping:
            raise EngineClosed("the server is shutting down; try another one")
        request_id = new_request_id(prefix)
        known, address = getattr(asked.state, CLIENT, None), "" if asked.client is None else asked.client.host
        owner = self.settings.sharing.owner(known, address, body.cache_salt, group or request_id)
        resolved = params.resolve(self.client.info.get("generation_defaults", {}))
        self._check_room(prompt, resolved, cuts=cuts)
        self.metrics.submitted(request_id, len(prompt.tokens), body.tag)
        try:
            return await Generation.start(
                self.client,
                self.tokenizer,
                prompt,
                EngineRequest(request_id, prompt.tokens, resolved, group, streamed=streamed, owner=owner),
                limit_s=self.settings.request_limit_s,
                on_end=lambda generation: self._keep(generation, keep, owner.domain),
                thought=thought,
            )
        except BaseException:
            self.metrics.cancelled(request_id)  # it may not have reached the engine
            raise

    def _check_room(self, prompt: EncodedPrompt, params: SamplingParams, *, cuts: bool) -> None:
        """Refuse an answer that the context has no room for, as OpenAI and vLLM do."""
        count, limit, room = len(prompt.tokens), params.max_tokens, int(self.client.info["max_model_len"])
        if limit is not None and count < room < count + limit and not cuts:
            raise PromptTooLong(
                f"the prompt has {count} tokens and the answer may have {limit}, but the maximum context length is "
                f"{room}; lower max_tokens, shorten the prompt, or raise --max-model-len"
            )

    def _keep(self, generation: Generation, keep: Keep | None, domain: str) -> None:
        if self.capture is not None and keep is not None and generation.output is not None:
            for answer in generation.output.outputs:
                keep(self.capture, answer.text, domain)
