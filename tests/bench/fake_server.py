"""A small OpenAI-compatible server in threads, well behaved unless told otherwise. Its tokens are words, and the same
prompt always gets the same answer.
"""

from __future__ import annotations

import hashlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

METRICS = {  # the names of each server's counters
    "vllm": ("generation_tokens_total", "spec_decode_num_{}_total"),
    "paceline": ("generation_tokens_total", "spec_decode_num_{}_total"),
    "sglang": ("generation_tokens_total", None),
    "llamacpp": ("tokens_predicted_total", None),
}


@dataclass
class Behaviour:
    tokens: int = 40
    per_chunk: int = 1
    chunk_s: float = 0.0003
    loops: bool = False  # says the same 6 words again and again
    usage: str = "running"  # running, final or none
    usage_factor: float = 1.0  # what it claims over what it sends
    token_ids: bool = False
    logprobs: bool = False
    metrics: str | None = None
    metrics_factor: float = 1.0
    metrics_lag_s: float = 0.0
    models: tuple[str, ...] = ("toy",)
    key: str | None = None
    chat: bool = True
    refuses: tuple[str, ...] = ()  # fields of a request it answers with 400
    wording: str = ""  # makes answers differ from another server's
    fault: str = ""
    fault_from: int = 0  # the number of the first request for an answer that meets the fault


@dataclass
class Counters:
    generated: float = 0
    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    positions: list[int] = field(default_factory=list)


class FakeServer:
    def __init__(self, **behaviour: Any) -> None:
        self.behaviour = Behaviour(**behaviour)
        self.asked: list[dict[str, Any]] = []  # bodies of requests for an answer
        self.keys: list[str | None] = []
        self.paths: list[str] = []
        self.counters = Counters()
        self.most_at_once = 0
        self._at_once = 0
        self._lock = threading.Lock()
        self._http = _Quiet(("127.0.0.1", 0), _handler(self))
        self._http.daemon_threads = True

    def __enter__(self) -> FakeServer:
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_address[1]}"

    def begin(self, body: dict[str, Any]) -> int:
        with self._lock:
            self.asked.append(body)
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
            return len(self.asked) - 1

    def end(self) -> None:
        with self._lock:
            self._at_once -= 1

    def count(self, chunks: list[list[str]]) -> None:
        lag = self.behaviour.metrics_lag_s
        threading.Timer(lag, self._count, [chunks]).start() if lag else self._count(chunks)

    def _count(self, chunks: list[list[str]]) -> None:
        drafted = self.behaviour.per_chunk - 1
        with self._lock:
            counters = self.counters
            counters.generated += sum(map(len, chunks)) * self.behaviour.metrics_factor
            counters.positions += [0] * (drafted - len(counters.positions))
            for chunk in chunks if drafted else []:
                counters.drafts += 1
                counters.drafted += drafted
                counters.accepted += len(chunk) - 1
                for place in range(len(chunk) - 1):
                    counters.positions[place] += 1

    def metrics(self) -> str:
        assert self.behaviour.metrics is not None
        prefix = self.behaviour.metrics
        tokens, speculation = METRICS[prefix]
        lines = ["# HELP something it counts", f'{prefix}:{tokens}{{model_name="toy"}} {self.counters.generated}']
        if speculation is not None:
            found = {"drafts": "drafts", "draft_tokens": "drafted", "accepted_tokens": "accepted"}
            for name, member in found.items():
                lines.append(f'{prefix}:{speculation.format(name)}{{engine="0"}} {getattr(self.counters, member)}')
            for place, count in enumerate(self.counters.positions):
                lines.append(f'{prefix}:{speculation.format("accepted_tokens_per_pos")}{{position="{place}"}} {count}')
        if prefix == "sglang":
            lines.append("sglang:spec_accept_length 2.5")
        return "\n".join(lines) + "\n"


class _Quiet(ThreadingHTTPServer):
    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that leave early are part of the tests."""


def _words(prompt: str, behaviour: Behaviour, at_most: int) -> list[str]:
    key = prompt + behaviour.wording
    places = (place % 6 if behaviour.loops else place for place in range(behaviour.tokens))
    numbers = (hashlib.sha256(f"{key}/{place}".encode()).hexdigest()[:5] for place in places)
    return [f" {number}" for number in numbers][:at_most]


def _handler(server: FakeServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            server.paths.append(self.path)
            behaviour = server.behaviour
            if behaviour.fault == "html":
                self.whole(200, "<!doctype html><html><body>Welcome to nginx</body></html>", "text/html")
            elif behaviour.fault == "wrong json":
                self.whole(200, '{"hello": "world"}')
            elif behaviour.fault == "redirect":
                self.whole(308, "", Location="https://elsewhere.example/v1")
            elif self.refused():
                pass
            elif self.path == "/v1/models":
                entries = [{"id": name, "object": "model", "owned_by": "the toy factory"} for name in behaviour.models]
                self.whole(200, json.dumps({"object": "list", "data": entries}))
            elif self.path == "/metrics" and behaviour.metrics is not None:
                self.whole(200, server.metrics(), "text/plain")
            else:
                self.whole(404, '{"detail": "Not Found"}')

        def do_POST(self) -> None:
            server.paths.append(self.path)
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            routes = ("/v1/chat/completions", "/v1/completions") if server.behaviour.chat else ("/v1/completions",)
            if self.path not in routes:
                self.whole(404, '{"detail": "Not Found"}')
            elif not self.refused() and not self.refused_field(body):
                number = server.begin(body)
                try:
                    fault = server.behaviour.fault if number >= server.behaviour.fault_from else ""
                    self.answer(body, fault)
                finally:
                    server.end()

        def refused(self) -> bool:
            given = self.headers.get("Authorization")
            server.keys.append(given)
            if server.behaviour.key is None or given == f"Bearer {server.behaviour.key}":
                return False
            self.whole(401, json.dumps({"error": {"message": f"Incorrect API key provided: {given}"}}))
            return True

        def refused_field(self, body: dict[str, Any]) -> bool:
            for name in server.behaviour.refuses:
                if name in body or name in (body.get("stream_options") or {}):
                    hint = " Use 'max_completion_tokens'." if name == "max_tokens" else ""
                    where = "stream_options." if name not in body else ""
                    said = f"Unsupported parameter: '{where}{name}'.{hint}"
                    self.whole(400, json.dumps({"error": {"message": said, "code": 400}}))
                    return True
            return False

        def whole(self, status: int, body: str, kind: str = "application/json", **headers: str) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body.encode())))
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body.encode())

        def answer(self, body: dict[str, Any], fault: str) -> None:
            if fault == "500":
                self.whole(500, '{"object": "error", "message": "CUDA out of memory"}')
                return
            if fault == "not a stream":
                self.whole(200, '{"choices": [{"message": {"content": "hello"}}]}')
                return
            if fault == "hangs":
                time.sleep(0.3)
            chat = "messages" in body
            prompt = json.dumps(body["messages"]) if chat else body["prompt"]
            limit = body.get("max_tokens", body.get("max_completion_tokens"))
            words, size = _words(prompt, server.behaviour, limit), server.behaviour.per_chunk
            chunks = [words[start : start + size] for start in range(0, len(words), size)]
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream; charset=utf-8")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for event in self.events(chunks, chat, body.get("stream_options") or {}, limit, fault):
                if event is None:
                    self.connection.shutdown(socket.SHUT_RDWR)
                    return
                self.frame(event)
            server.count(chunks)
            self.wfile.write(b"0\r\n\r\n")

        def frame(self, event: bytes) -> None:
            self.wfile.write(f"{len(event):x}\r\n".encode() + event + b"\r\n")
            self.wfile.flush()

        def events(
            self, chunks: list[list[str]], chat: bool, options: dict[str, bool], limit: int, fault: str
        ) -> Iterator[bytes | None]:
            """None: the connection is dropped here."""
            behaviour = server.behaviour
            running = behaviour.usage == "running" and options.get("continuous_usage_stats", False)
            sent = 0
            if fault == "drops at once":
                yield None
            if chat:
                yield _event(_chunk(chat, "", {"role": "assistant"}), 0 if running else None)
            for place, chunk in enumerate(chunks):
                time.sleep(behaviour.chunk_s)
                if place == len(chunks) // 2 and fault:
                    if fault == "drops":
                        yield None
                    elif fault == "ends early":
                        return
                    elif fault == "malformed":
                        yield b"this is not an event\n\n"
                    elif fault == "not json":
                        yield b"data: {oops\n\n"
                    elif fault == "other protocol":
                        yield b'data: {"type": "message_start"}\n\n'
                    elif fault == "error event":
                        yield b'data: {"error": {"message": "the worker died", "code": 500}}\n\n'
                sent += len(chunk)
                extra: dict[str, Any] = {}
                if behaviour.token_ids:
                    extra["token_ids"] = list(range(len(chunk)))
                if behaviour.logprobs:
                    extra["logprobs"] = {"content": [{"token": word, "logprob": -0.1} for word in chunk]}
                event = _chunk(chat, "".join(chunk), {}, **extra)
                yield _event(event, round(sent * behaviour.usage_factor) if running else None)
            ending = _chunk(chat, "", {}, finish_reason="length" if sent == limit else "stop")
            claimed = round(sent * behaviour.usage_factor)
            yield _event(ending, claimed if running else None)
            if behaviour.usage != "none" and options.get("include_usage"):
                yield _event({"choices": []}, claimed)
            yield b"data: [DONE]\n\n"

    return Handler


def _chunk(chat: bool, text: str, delta: dict[str, str], **extra: Any) -> dict[str, Any]:
    choice = {"index": 0, "delta": {"content": text, **delta}} if chat else {"index": 0, "text": text}
    return {"object": "chunk", "choices": [{"finish_reason": None, **choice, **extra}]}


def _event(body: dict[str, Any], usage: int | None) -> bytes:
    if usage is not None:
        body = {**body, "usage": {"prompt_tokens": 7, "completion_tokens": usage}}
    return b"data: " + json.dumps(body).encode() + b"\n\n"
