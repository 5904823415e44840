"""The state that routes share: settings, engine, tokenizer; and the start of a generation from a prompt."""

from __future__ import annotations

import asyncio
import functools
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from starlette.requests import Request

from paceline.engine.events import Request as EngineRequest
from paceline.errors import EngineClosed, InvalidParameter, ModelNotFound, short_repr
from paceline.sampling_params import SamplingParams
from paceline.server.api.generation import Generation
from paceline.server.api.protocol import ChatRequest, Sampling
from paceline.server.api.tool_calls import Style, style_of
from paceline.server.capture import Capture
from paceline.server.gate import CLIENT
from paceline.server.metrics import Metrics
from paceline.server.process.client import EngineClient, new_request_id
from paceline.server.process.messages import EngineSettings
from paceline.server.trust import ApiKey, Sharing
from paceline.text.request_text import EncodedPrompt, check_token_ids, encode_prompts
from paceline.text.thoughts import Thought, effort_variables, thought_after
from paceline.text.tokenizer import Tokenizer

Keep = Callable[[Capture, str, str], None]  # writes one answer, with its domain
LONG_TEXT = 20_000  # characters of a prompt that is encoded in a thread, so that others do not wait
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
    _long: asyncio.Lock = field(default_factory=asyncio.Lock)  # one long text at a time: they take much memory

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
        if name is not None and name not in (self.name, self.settings.engine.model):
            raise ModelNotFound(f"model {short_repr(name)} is not served here; {self.name!r} is")

    def check_tokens(self, field: str, tokens: list[int]) -> None:
        """Check token ids before they are sent: a message holds no number of more than 64 bits."""
        check_token_ids(field, tokens, self.client.info["vocab_size"])

    async def encode(self, prompt: str | list[int], *, special: bool = True) -> EncodedPrompt:
        if isinstance(prompt, list):
            self.check_tokens("prompt", prompt)
        encode = functools.partial(encode_prompts, self.tokenizer, [prompt], special)
        if isinstance(prompt, list) or len(prompt) < LONG_TEXT:
            (encoded,) = encode()
        else:
            async with self._long:
                (encoded,) = await asyncio.to_thread(encode)
        return encoded

    async def encode_chat(
        self, conversation: list[dict[str, Any]], variables: Mapping[str, Any] = MappingProxyType({})
    ) -> EncodedPrompt:
        """Render and encode a conversation. `variables` of the template may be as long as a conversation."""
        text = await asyncio.to_thread(self.tokenizer.render_chat, conversation, **variables)
        return await self.encode(text, special=False)

    async def start_chat(self, asked: Request, body: ChatRequest, *, prefix: str) -> Generation:
        """Start the answer to a conversation."""
        params, conversation = body.to_params(self.call_style), body.conversation()
        variables, tags = body.template_variables(), self.tokenizer.thought_tags
        if body.reasoning_effort is not None:
            template = self.tokenizer.chat_template(with_tools="tools" in variables)
            known = await asyncio.to_thread(lambda: template.variables)
            variables = effort_variables(body.reasoning_effort, known) | variables
        prompt = await self.encode_chat(conversation, variables)
        thought = None if tags is None else thought_after(tags, prompt.text or "")
        # Variables of the template are part of the prompt, but not of the messages that would be captured.
        keep = None if variables else functools.partial(Capture.chat, messages=conversation)
        if thought is not None:
            params = thought.frees(params)
        streamed = bool(body.stream)
        return await self.start(
            asked, prompt, params, body, streamed=streamed, prefix=prefix, keep=keep, thought=thought
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
    ) -> Generation:
        """Start a generation. `group`: id of all prompts of one HTTP request; `keep` is called for each captured
        answer."""
        if self.stopping:
            raise EngineClosed("the server is shutting down; try another one")
        request_id = new_request_id(prefix)
        known, address = getattr(asked.state, CLIENT, None), "" if asked.client is None else asked.client.host
        owner = self.settings.sharing.owner(known, address, body.cache_salt, group or request_id)
        resolved = params.resolve(self.client.info.get("generation_defaults", {}))
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

    def _keep(self, generation: Generation, keep: Keep | None, domain: str) -> None:
        if self.capture is not None and keep is not None and generation.output is not None:
            for answer in generation.output.outputs:
                keep(self.capture, answer.text, domain)
