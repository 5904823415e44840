"""The HTTP application: its routes, and their errors. The engine is behind `EngineClient`, in another process."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ipaddress
import logging
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse
from fastapi.staticfiles import StaticFiles
from starlette.exceptions import HTTPException

from paceline import __version__
from paceline.errors import (
    InvalidParameter,
    ModelNotFound,
    PacelineError,
    RequestFailed,
)
from paceline.outputs import RequestOutput
from paceline.server.api import anthropic, chat, completions, ollama, response_items
from paceline.server.api.as_chat import renamed
from paceline.server.api.generation import Generation
from paceline.server.api.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    ReloadRequest,
    TokenizeRequest,
)
from paceline.server.api.responses import NAMES, ResponseRequest
from paceline.server.api.streams import ChunkStream, JsonLines, NamedEvents
from paceline.server.bodies.long_bodies import LongBodies, unless_gone
from paceline.server.capture import Capture
from paceline.server.errors import Forbidden, from_http, from_validation, in_form_of
from paceline.server.gate import ADMIN, CLIENT, FIELD, RELOAD, RequestGuard, error_response
from paceline.server.metrics import Metrics
from paceline.server.process.client import EngineClient, new_request_id
from paceline.server.state import AppState, ServerSettings
from paceline.text.tokenizer import Tokenizer

log = logging.getLogger("paceline.server")
LOOPBACK = ("localhost", "127.0.0.1", "::1")  # hosts of this machine, in a URL
# Headers of a program that asks for itself.
PLAIN_HEADERS = {"host", "user-agent", "accept", "accept-encoding", "connection", "content-type", "content-length"} | {
    "authorization",
    "x-request-id",
}
STATIC = Path(__file__).parent / "static"
# The playground loads nothing from elsewhere and runs no inline script.
PAGE_HEADERS = {"Content-Security-Policy": "default-src 'self'; base-uri 'none'; frame-ancestors 'none'"}


def create_app(settings: ServerSettings) -> FastAPI:
    metrics = Metrics(lambda method, rate: on_drift(client, method, rate))
    client = EngineClient(settings.engine, [metrics.observe], metrics.cancelled, settings.engine_timeout_s)
    state = AppState(settings, client, metrics, capture=None if settings.capture is None else Capture(settings.capture))

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        if not client.starts:
            await client.start()
        _ = state.tokenizer
        yield
        state.stopping = True
        deadline = time.monotonic() + settings.grace_s
        while client.num_open and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        await asyncio.gather(client.close(), state.bodies.close())
        if state.capture is not None:
            state.capture.close()

    app = FastAPI(title="paceline", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.paceline = state
    for kind in (PacelineError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, _on_error)
    _add_pages(app, state)
    _add_model_routes(app, state)
    _add_answers(app, state)
    app.add_middleware(LongBodies, reader=state.bodies, sharing=settings.sharing)
    app.add_middleware(
        RequestGuard,
        api_keys=settings.api_keys,
        admin_key=settings.admin_key,
        max_body_bytes=settings.max_body_bytes,
        on_error=lambda status: state.metrics.refused.labels(str(status)).inc(),
    )
    if settings.cors_origins:
        from fastapi.middleware.cors import CORSMiddleware

        app.add_middleware(
            CORSMiddleware, allow_origins=list(settings.cors_origins), allow_methods=["*"], allow_headers=["*"]
        )
    return app


def _add_pages(app: FastAPI, state: AppState) -> None:
    app.mount("/static", StaticFiles(directory=STATIC), name="static")

    @app.get("/", include_in_schema=False)
    async def playground() -> Response:
        return FileResponse(STATIC / "index.html", headers=PAGE_HEADERS)

    @app.get("/load")
    async def load() -> Response:
        return _json({"server_load": state.client.num_open})

    @app.get("/ping")
    @app.get("/health")
    async def health() -> Response:
        down = state.client.down
        return _json({"status": "ok" if down is None else "down", "reason": down}, 200 if down is None else 503)

    @app.get("/version")
    async def version() -> Response:
        return _json({"version": __version__})

    @app.get("/metrics")
    async def metrics() -> Response:
        body = state.metrics.render(up=state.client.down is None)
        return Response(body, media_type="text/plain; version=0.0.4; charset=utf-8")


def _add_model_routes(app: FastAPI, state: AppState) -> None:
    def model() -> dict[str, Any]:
        info = state.client.info
        return {
            "id": state.name,
            "object": "model",
            "created": int(state.started),
            "owned_by": "paceline",
            **{name: info.get(name) for name in ("max_model_len", "device", "dtype")},
            "methods": info.get("methods", []),
            "captured": state.capture is not None,
        }

    @app.get("/v1/models")
    async def models() -> Response:
        return _json({"object": "list", "data": [model()]})

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> Response:
        state.check_model(name)
        return _json(model())

    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> Response:
        state.check_model(body.model)
        work = state.reader.tokenized  # a template may take long
        return _json(work(body) if body.messages is None else await asyncio.to_thread(work, body))

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> Response:
        state.check_model(body.model)
        return _json(state.reader.detokenized(body))

    @app.post(RELOAD, include_in_schema=False)  # for the server's operator, not for clients
    async def reload(body: ReloadRequest, request: Request) -> Response:
        if getattr(request.state, CLIENT, None) != ADMIN and not _is_local(request):
            raise Forbidden("a drafter is reloaded from the server's own machine, or with the key of --admin-key")
        started = time.perf_counter()
        log.info("loading drafter %s beside the engine that serves", body.drafter)
        try:
            await state.client.reload(body.drafter, fetch=state.settings.allow_fetch)
        except PacelineError as error:  # its message may say what is on the disk
            log.warning("drafter %s cannot be loaded: %s", body.drafter, error)
            kind = ModelNotFound if isinstance(error, ModelNotFound) else PacelineError
            raise kind("the drafter cannot be loaded; the server's log says why") from error
        seconds = round(time.perf_counter() - started, 2)
        log.info("new requests are drafted for by %s, after %s s", body.drafter, seconds)
        return _json({"drafter": body.drafter, "methods": state.client.info["methods"], "seconds": seconds})


def _add_answers(app: FastAPI, state: AppState) -> None:
    @app.post("/v1/completions")
    async def completions_route(body: CompletionRequest, request: Request) -> Response:
        state.check_model(body.model)
        params, streamed = body.to_params(), bool(body.stream)
        prompts, group = await state.prompts(request, body), new_request_id("group")
        async with contextlib.AsyncExitStack() as running:
            generations = []
            for prompt in prompts:
                text = functools.partial(_keep_text, state.tokenizer, prompt.tokens)
                asked = state.start(
                    request, prompt, params, body, streamed=streamed, prefix="cmpl", group=group, keep=text
                )
                generations.append(await asked)
                running.callback(generations[-1].cancel)
            if streamed:
                running.pop_all()
                return ChunkStream(completions.chunks(generations, body, state.name), generations)
            gathered = asyncio.gather(*(each.whole() for each in generations))
            outputs = await unless_gone(request, gathered)
            return _json(completions.completion(generations, outputs, body, state.name))

    @app.post("/v1/chat/completions")
    async def chat_route(body: ChatRequest, request: Request) -> Response:
        state.check_model(body.model)
        generation, output = await _answered(state, request, body, "chatcmpl")
        if output is None:
            return ChunkStream(chat.chunks(generation, body, state.name), [generation])
        return _json(chat.completion(generation, output, body, state.name))

    _add_other_forms(app, state)

    @app.post("/v1/responses")
    async def responses_route(body: ResponseRequest, request: Request) -> Response:
        state.check_model(body.model)
        with renamed(NAMES):
            asked = body.chat()
            generation, output = await _answered(state, request, asked, "resp")
        if output is None:
            events = response_items.events(generation, body, asked, state.name)
            return NamedEvents(events, [generation])
        return _json(response_items.response(generation, output, body, asked, state.name))


def _add_other_forms(app: FastAPI, state: AppState) -> None:
    """Add the routes of Anthropic's clients and Ollama's."""

    @app.post("/v1/messages")
    async def messages_route(body: anthropic.MessagesRequest, request: Request) -> Response:
        state.check_model(body.model)
        with renamed(anthropic.NAMES):
            asked = body.chat()
            generation, output = await _answered(state, request, asked, "msg")
        if output is None:
            events = anthropic.events(generation, asked, state.name)
            return NamedEvents(events, [generation], request.url.path)
        return _json(anthropic.message(generation, output, asked, state.name))

    @app.post("/v1/messages/count_tokens")
    async def count_tokens(body: anthropic.MessagesRequest, request: Request) -> Response:
        state.check_model(body.model)
        (prompt,) = await state.prompts(request, body)
        return _json({"input_tokens": len(prompt.tokens)})

    async def ollama_answer(
        body: ollama.OllamaChatRequest | ollama.OllamaGenerateRequest, request: Request
    ) -> Response:
        state.check_model(body.model.removesuffix(":latest"))
        with renamed(ollama.NAMES):
            body.check_context(int(state.client.info["max_model_len"]))
            asked = body.chat()
            generation, output = await _answered(state, request, asked, "ollama", cuts=True)
        answer = ollama.OllamaAnswer(generation, body, asked)
        if output is None:
            return JsonLines(answer.chunks(), [generation], request.url.path, body.headers)
        return _json(answer.whole(output), headers=body.headers)

    @app.post("/api/chat")
    async def ollama_chat(body: ollama.OllamaChatRequest, request: Request) -> Response:
        return await ollama_answer(body, request)

    @app.post("/api/generate")
    async def ollama_generate(body: ollama.OllamaGenerateRequest, request: Request) -> Response:
        return await ollama_answer(body, request)

    def listed() -> dict[str, Any]:
        known = state.tokenizer.has_chat_template
        info = state.client.info | {"thinks": state.tokenizer.thought_tags is not None}
        template = state.tokenizer.chat_template().source if known else ""
        return ollama.listed(state.name, state.started, info, template)

    @app.get("/api/tags")
    async def tags() -> Response:
        return _json({"models": [listed()]})

    @app.post("/api/show")
    async def show(body: ollama.ShowRequest) -> Response:
        state.check_model((body.model or body.name or "").removesuffix(":latest"))
        return _json(listed())

    @app.get("/api/version")
    async def ollama_version() -> Response:
        return _json({"version": __version__})


async def _answered(
    state: AppState, request: Request, body: ChatRequest, prefix: str, *, cuts: bool = False
) -> tuple[Generation, RequestOutput | None]:
    """Start the answer to a conversation, and wait for it unless it is streamed."""
    with renamed(body.grammar_names):
        generation = await state.start_chat(request, body, prefix=prefix, cuts=cuts)
        return generation, None if body.stream else await _whole(request, generation)


def _is_local(request: Request) -> bool:
    """Return whether a request comes from this machine, straight: a proxy adds headers, and so does a browser."""
    try:
        near = request.client is not None and ipaddress.ip_address(request.client.host).is_loopback
    except ValueError:
        near = False
    return near and request.url.hostname in LOOPBACK and set(request.headers) <= PLAIN_HEADERS


async def _whole(request: Request, generation: Generation) -> RequestOutput:
    try:
        return await unless_gone(request, generation.whole())
    finally:
        generation.cancel()


def on_drift(client: EngineClient, method: str, rate: float) -> None:
    log.warning(
        "drafter %s: its first token was accepted in %.0f %% of drafts, and that fell; it is measured again",
        *(method, 100 * rate),
    )
    client.relearn(method)


def _keep_text(tokenizer: Tokenizer, prompt: list[int], capture: Capture, answer: str, domain: str) -> None:
    capture.text(tokenizer.decode(prompt), answer, domain)


def _json(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), status, headers, "application/json")


async def _on_error(request: Request, error: Exception) -> Response:
    match error:
        case HTTPException():  # an unknown path or method, or a body that is no JSON
            body = from_http(error, request.method, request.url.path)
            return _json(in_form_of(request.url.path, body), error.status_code, dict(error.headers or {}))
        case RequestValidationError():
            return await _on_error(request, from_validation(error))
        case PacelineError():
            if isinstance(error, InvalidParameter):
                request.scope["state"][FIELD] = error.field
            return error_response(error, request.url.path)
    failed = RequestFailed(f"the server failed at this request: {type(error).__name__}")
    return error_response(failed, request.url.path)
