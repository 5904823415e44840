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
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from paceline.outputs import SpeculationStats

EVENTS = {  # sent in the middle of an answer
    "malformed": b"this is not an event\n\n",
    "not json": b"data: {oops\n\n",
    "other protocol": b'data: {"type": "message_start"}\n\n',
    "error event": b'data: {"error": {"message": "the worker died", "code": 500}}\n\n',
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
    metrics: str | None = None  # vllm, paceline, sglang or llamacpp
    metrics_factor: float = 1.0
    metrics_lag_s: float = 0.0
    models: tuple[str, ...] = ("toy",)
    key: str | None = None
    chat: bool = True
    refuses: tuple[str, ...] = ()  # fields of a request it answers with 400
    wording: str = ""  # makes answers differ from another server's
    fault: str = ""
    fault_from: int = 0  # the number of the first request for an answer that meets the fault


class FakeServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, **behaviour: Any) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.behaviour = Behaviour(**behaviour)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.asked: list[dict[str, Any]] = []  # bodies of requests for an answer
        self.paths: list[str] = []
        self.stats = SpeculationStats()
        self.most_at_once = self._at_once = 0
        self._lock, self.closing = threading.Lock(), threading.Event()

    def __enter__(self) -> FakeServer:
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.closing.set()
        self.shutdown()
        self.server_close()

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that leave early are part of the tests."""

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
        with self._lock:
            for chunk in chunks:
                self.stats.add(*[self.behaviour.per_chunk - 1] * 2, len(chunk) - 1, len(chunk))

    def metrics(self) -> str:
        prefix, stats = self.behaviour.metrics, self.stats
        tokens = "tokens_predicted_total" if prefix == "llamacpp" else "generation_tokens_total"
        generated = stats.num_committed_tokens * self.behaviour.metrics_factor
        lines = ["# HELP something it counts", f'{prefix}:{tokens}{{model_name="toy"}} {generated}']
        if prefix in ("vllm", "paceline"):
            for name in ("drafts", "draft_tokens", "accepted_tokens"):
                lines.append(f'{prefix}:spec_decode_num_{name}_total{{engine="0"}} {getattr(stats, f"num_{name}")}')
            name = "spec_decode_num_accepted_tokens_per_pos_total"
            for place, count in enumerate(stats.accepted_per_position):
                lines.append(f'{prefix}:{name}{{position="{place}"}} {count}')
        if prefix == "sglang":
            lines.append("sglang:spec_accept_length 2.5")
        return "\n".join(lines) + "\n"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FakeServer

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self.server.paths.append(self.path)
        behaviour = self.server.behaviour
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
            self.whole(200, self.server.metrics(), "text/plain")
        else:
            self.whole(404, '{"detail": "Not Found"}')

    def do_POST(self) -> None:
        server = self.server
        server.paths.append(self.path)
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        routes = ("/v1/chat/completions", "/v1/completions") if server.behaviour.chat else ("/v1/completions",)
        if self.path not in routes:
            self.whole(404, '{"detail": "Not Found"}')
        elif not self.refused() and not self.refused_field(body):
            number = server.begin(body)
            try:
                self.answer(body, server.behaviour.fault if number >= server.behaviour.fault_from else "")
            finally:
                server.end()

    def refused(self) -> bool:
        given, key = self.headers.get("Authorization"), self.server.behaviour.key
        if key is None or given == f"Bearer {key}":
            return False
        self.whole(401, json.dumps({"error": {"message": f"Incorrect API key provided: {given}"}}))
        return True

    def refused_field(self, body: dict[str, Any]) -> bool:
        for name in self.server.behaviour.refuses:
            if name in body or name in (body.get("stream_options") or {}):
                hint = " Use 'max_completion_tokens'." if name == "max_tokens" else ""
                where = "stream_options." if name not in body else ""
                message = f"Unsupported parameter: '{where}{name}'.{hint}"
                self.whole(400, json.dumps({"error": {"message": message, "code": 400}}))
                return True
        return False

    def whole(self, status: int, body: str, kind: str = "application/json", **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(body.encode())), **headers}.items():
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
            self.server.closing.wait(60)
        limit, size = body.get("max_tokens", body.get("max_completion_tokens")), self.server.behaviour.per_chunk
        words = self.words(json.dumps(body["messages"]) if "messages" in body else body["prompt"])[:limit]
        chunks = [words[start : start + size] for start in range(0, len(words), size)]
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for event in self.events(chunks, "messages" in body, body.get("stream_options") or {}, limit, fault):
            if event is None:
                self.connection.shutdown(socket.SHUT_RDWR)
                return
            self.wfile.write(f"{len(event):x}\r\n".encode() + event + b"\r\n")
            self.wfile.flush()
        self.server.count(chunks)
        self.wfile.write(b"0\r\n\r\n")

    def words(self, prompt: str) -> list[str]:
        behaviour = self.server.behaviour
        places = (place % 6 if behaviour.loops else place for place in range(behaviour.tokens))
        return [
            " " + hashlib.sha256(f"{prompt}{behaviour.wording}/{place}".encode()).hexdigest()[:5] for place in places
        ]

    def events(
        self, chunks: list[list[str]], chat: bool, options: dict[str, bool], limit: int, fault: str
    ) -> Iterator[bytes | None]:
        """None: the connection is dropped here."""
        behaviour, sent = self.server.behaviour, 0
        running = behaviour.usage == "running" and options.get("continuous_usage_stats", False)
        if fault == "drops at once":
            yield None
        if chat:
            yield _event(_chunk(chat, "", {"role": "assistant"}), 0 if running else None)
        for place, chunk in enumerate(chunks):
            time.sleep(behaviour.chunk_s)
            if place == len(chunks) // 2:
                if fault == "ends early":
                    return
                if fault == "drops" or fault in EVENTS:
                    yield EVENTS.get(fault)
            sent += len(chunk)
            extra: dict[str, Any] = {}
            if behaviour.token_ids:
                extra["token_ids"] = list(range(len(chunk)))
            if behaviour.logprobs:
                extra["logprobs"] = {"content": [{"token": word, "logprob": -0.1} for word in chunk]}
            event = _chunk(chat, "".join(chunk), {}, **extra)
            yield _event(event, round(sent * behaviour.usage_factor) if running else None)
        claimed = round(sent * behaviour.usage_factor)
        ending = _chunk(chat, "", {}, finish_reason="length" if sent == limit else "stop")
        yield _event(ending, claimed if running else None)
        if behaviour.usage != "none" and options.get("include_usage"):
            yield _event({"choices": []}, claimed)
        yield b"data: [DONE]\n\n"


def _chunk(chat: bool, text: str, delta: dict[str, str], **extra: Any) -> dict[str, Any]:
    choice = {"index": 0, "delta": {"content": text, **delta}} if chat else {"index": 0, "text": text}
    return {"object": "chunk", "choices": [{"finish_reason": None, **choice, **extra}]}


def _event(body: dict[str, Any], usage: int | None) -> bytes:
    if usage is not None:
        body = {**body, "usage": {"prompt_tokens": 7, "completion_tokens": usage}}
    return b"data: " + json.dumps(body).encode() + b"\n\n"
