"""The HTTP API on several replicas, by Ray Serve: `paceline serve --replicas N`, or on a cluster

    serve run paceline.server.ray:app model=smollm2 replicas=2 max_replicas=8

A `Front` receives HTTP and sends each request to the `Replica` that its prompt's beginning belongs to (rendezvous
hashing), so that its cached blocks are used; when that one is full, to the next. A replica is the whole application
with an engine of its own; a replica that dies costs its own requests only, and Ray starts another. Between
`replicas` and `max_replicas` Ray starts and stops replicas by the number of requests that are under way.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import ray
from fastapi import Request, Response
from fastapi.responses import StreamingResponse
from ray import serve
from ray.serve.exceptions import BackPressureError
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from paceline.config import AUTO, EngineConfig, SpeculationConfig
from paceline.errors import EngineDied, InvalidParameter, PacelineError, QueueFull
from paceline.platform import cpu as machine
from paceline.server.app import create_app
from paceline.server.errors import BodyTooLarge, body_of
from paceline.server.gate import error_response
from paceline.server.prefix import in_order, prefix_of
from paceline.server.process.messages import EngineSettings
from paceline.server.state import AppState, ServerSettings
from paceline.server.trust import Sharing

NAME = "paceline"  # the application's name in Ray
HOP = {b"connection", b"transfer-encoding", b"content-length"}  # headers of one hop; the front writes its own
SINGLE_ENGINE = {  # routes that one replica would answer for itself alone
    "/v1/drafters/reload": "deploy the application again with another drafter: Ray replaces replicas one by one",
    "/metrics": "replicas count for themselves; scrape Ray's own metrics, or serve without --replicas",
}


@dataclass(frozen=True)
class Head:
    """The first item of an answer; all others are bytes of its body."""

    status: int
    headers: list[tuple[bytes, bytes]]


class PrefixRouter(RequestRouter):  # type: ignore[misc]
    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        key = pending_request.args[0] if pending_request is not None and pending_request.args else ""
        return [[each] for each in in_order(key, candidate_replicas, lambda each: each.replica_id.unique_id)]


class Replica:
    """The application with its engine, called without HTTP."""

    async def __init__(self, settings: ServerSettings) -> None:  # type: ignore[misc]  # Ray waits for it
        self._app = create_app(settings)
        self._state: AppState = self._app.state.paceline
        self._lifespan = self._app.router.lifespan_context(self._app)
        await self._lifespan.__aenter__()

    async def call(self, prefix: str, scope: dict[str, Any], body: bytes) -> AsyncIterator[Head | bytes]:
        """Answer one request: a Head, then the bytes of the body. The router reads `prefix`."""
        sent: asyncio.Queue[Head | bytes | None] = asyncio.Queue()
        received = False

        async def receive() -> dict[str, Any]:
            nonlocal received
            if received:
                await asyncio.Event().wait()  # until this call is cancelled: the client is there
            received = True
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Mapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                sent.put_nowait(Head(message["status"], list(message["headers"])))
            elif message.get("body"):
                sent.put_nowait(message["body"])

        async def run() -> None:
            try:
                await self._app({"type": "http", "asgi": {"version": "3.0"}, **scope}, receive, send)
            finally:
                sent.put_nowait(None)

        running = asyncio.create_task(run())
        try:
            while (item := await sent.get()) is not None:
                yield item
            await running
        finally:
            running.cancel()

    async def check_health(self) -> None:
        """Raise if the engine is lost; Ray replaces a replica that raises."""
        if self._state.client.lost:
            raise EngineDied(self._state.client.down)


class Front:
    def __init__(self, replicas: Any, max_body_bytes: int) -> None:
        self._replicas, self._limit = replicas, max_body_bytes

    async def __call__(self, request: Request) -> Response:
        scope = {
            name: request.scope[name]
            for name in ("method", "path", "raw_path", "query_string", "headers", "http_version")
        }
        scope |= {"scheme": "http", "root_path": "", "client": request.scope.get("client"), "server": None}
        try:
            if request.url.path in SINGLE_ENGINE:
                raise InvalidParameter(request.url.path, SINGLE_ENGINE[request.url.path])
            body = await self._body(request)
            answer = self._replicas.options(stream=True).call.remote(prefix_of(body), scope, body)
            try:
                head = await answer.__anext__()
            except BackPressureError as error:
                raise QueueFull("all replicas are busy and the queue is full; try again later") from error
            except ray.exceptions.RayError as error:
                raise _gone() from error
        except PacelineError as error:
            return error_response(error)
        streamed = StreamingResponse(_rest(answer), head.status)
        streamed.raw_headers = [(name, value) for name, value in head.headers if name.lower() not in HOP]
        return streamed

    async def _body(self, request: Request) -> bytes:
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > self._limit:
                raise BodyTooLarge(f"the body has more than {self._limit} bytes, the server's limit")
        return bytes(body)


async def _rest(answer: Any) -> AsyncIterator[bytes]:
    """Yield the body; the death of the replica becomes its last event."""
    try:
        async for part in answer:
            yield part
    except ray.exceptions.RayError:
        yield b"data: " + json.dumps(body_of(_gone())).encode() + b"\n\n"
    finally:
        answer.cancel()


def _gone() -> EngineDied:
    return EngineDied("the replica that served this request ended; send it again")


# -- from settings to an application


def application(settings: ServerSettings, replicas: int, max_replicas: int | None = None) -> Any:
    """Return the application for `serve.run`."""
    limit = max_replicas or replicas
    if limit < replicas:
        raise InvalidParameter("max_replicas", f"{limit} is less than replicas {replicas}")
    max_num_seqs, max_waiting = settings.engine.engine.max_num_seqs, settings.engine.engine.max_waiting
    scaling: dict[str, Any] = {"num_replicas": replicas}
    if limit > replicas:
        scaling = {
            "num_replicas": None,
            "autoscaling_config": {
                "min_replicas": replicas,
                "max_replicas": limit,
                "target_ongoing_requests": max(1, max_num_seqs * 3 // 4),
            },
        }
    on_gpu = settings.engine.load.get("device") != "cpu" and "GPU" in ray.cluster_resources()
    replica = serve.deployment(
        name="Replica",
        max_ongoing_requests=max_num_seqs,  # one more goes to the next replica
        max_queued_requests=max_waiting,
        graceful_shutdown_timeout_s=settings.grace_s + 10,
        health_check_period_s=2,
        ray_actor_options={"num_cpus": 0, "num_gpus": 1 if on_gpu else 0},
        request_router_config={"request_router_class": PrefixRouter},
        **scaling,
    )(Replica)
    front = serve.deployment(
        name="Front", max_ongoing_requests=100_000, ray_actor_options={"num_cpus": 0}, num_replicas=1
    )(Front)
    return front.bind(replica.bind(settings), settings.max_body_bytes)


def app(arguments: dict[str, Any]) -> Any:
    """Return the application for `serve run paceline.server.ray:app NAME=VALUE ...` and Ray's configuration files."""
    known = {"model", "method", "drafter", "dtype", "device", "threads", "max_num_seqs", "served_name"}
    known |= {"replicas", "max_replicas", "share_caches"}
    if unknown := sorted(set(arguments) - known):
        raise InvalidParameter(unknown[0], f"is not one of {', '.join(sorted(known))}")
    options = {name: value for name, value in arguments.items() if value is not None}
    load: dict[str, Any] = {name: options[name] for name in ("dtype", "device") if name in options}
    if "threads" in options:
        load["threads"] = int(options["threads"])
    engine = EngineConfig(max_num_seqs=int(options.get("max_num_seqs", EngineConfig().max_num_seqs)))
    speculation = SpeculationConfig(method=str(options.get("method", AUTO)), drafter=options.get("drafter", ()))
    settings = ServerSettings(
        EngineSettings(str(options.get("model", "smollm2")), load, engine, speculation),
        served_name=options.get("served_name"),
        # The address is Ray's, and may be open to a network.
        sharing=Sharing(on_network=True, share_caches=str(options.get("share_caches", "")).lower() in ("1", "true")),
    )
    limit = options.get("max_replicas")
    return application(settings, int(options.get("replicas", 1)), None if limit is None else int(limit))


def start(settings: ServerSettings, listener: socket.socket, replicas: int, max_replicas: int | None = None) -> str:
    """Serve on this machine, in a Ray of its own, whose cores the replicas share; return the address."""
    host, port = listener.getsockname()[:2]
    listener.close()  # it made sure that the port is free; Ray binds it anew
    if not ray.is_initialized():
        ray.init(include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    serve.start(http_options={"host": host, "port": port})
    load = dict(settings.engine.load)
    if load.get("threads") is None:
        load["threads"] = max(1, machine.usable_cores() // (max_replicas or replicas))
    shared = replace(settings, engine=replace(settings.engine, load=load))
    serve.run(application(shared, replicas, max_replicas), name=NAME, route_prefix="/")
    return f"http://{host}:{port}"


def stop() -> None:
    serve.shutdown()
    ray.shutdown()
