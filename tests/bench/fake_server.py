"""A small OpenAI-compatible server in threads. Its tokens are words; equal prompts get equal answers."""

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
    "not json": b"data: {oops\n\n",
    "other protocol": b'data: {"type": "message_start"}\n\n',
    "error event": b'data: {"error": {"message": "the worker died", "code": 500}}\n\n',
}
WHOLE = {  # status and body of an answer that is no stream
    "500": (500, '{"object": "error", "message": "CUDA out of memory"}'),
    "not a stream": (200, '{"choices": [{"message": {"content": "hello"}}]}'),
}


@dataclass
class Behaviour:
    tokens: int = 40
    per_chunk: int = 1
    chunk_s: float = 0.0003
    usage: str = "running"  # or final
    strict: bool = False  # refuses usage in every chunk
    metrics: str | None = None  # vllm or llamacpp
    metrics_factor: float = 1.0
    metrics_lag_s: float = 0.0
    models: tuple[str, ...] = ("toy",)
    key: str | None = None
    wording: str = ""  # makes answers differ from another server's
    fault: str = ""
    fault_from: int = 0  # the number of the first answer with the fault


class FakeServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, **behaviour: Any) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.behaviour = Behaviour(**behaviour)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.asked: list[dict[str, Any]] = []  # bodies of requests for an answer
        self.paths: list[str] = []
        self.stats = SpeculationStats()
        self.closing = threading.Event()

    def __enter__(self) -> FakeServer:
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.closing.set()
        self.shutdown()
        self.server_close()

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that leave early are part of the tests."""

    def count(self, chunks: list[list[str]]) -> None:
        for chunk in chunks:
            self.stats.num_target_passes += 1
            self.stats.num_committed_tokens += len(chunk)
            if nodes := self.behaviour.per_chunk - 1:
                self.stats.add_draft(nodes, nodes, len(chunk) - 1, "none")

    def metrics(self) -> str:
        prefix, stats = self.behaviour.metrics, self.stats
        tokens = "tokens_predicted_total" if prefix == "llamacpp" else "generation_tokens_total"
        generated = stats.num_committed_tokens * self.behaviour.metrics_factor
        lines = ["# HELP something it counts", f'{prefix}:{tokens}{{model_name="toy"}} {generated}']
        if prefix == "vllm":
            for name in ("drafts", "draft_tokens", "accepted_tokens"):
                lines.append(f'vllm:spec_decode_num_{name}_total{{engine="0"}} {getattr(stats, f"num_{name}")}')
        return "\n".join(lines) + "\n"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FakeServer

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        behaviour = self.server.behaviour
        self.server.paths.append(self.path)
        if self.is_refused():
            return
        if self.path == "/v1/models":
            entries = [{"id": name} for name in behaviour.models]
            self.whole(200, '{"hello": "world"}' if behaviour.fault == "wrong list" else json.dumps({"data": entries}))
        elif self.path == "/metrics" and behaviour.metrics is not None:
            self.whole(200, self.server.metrics())
        else:
            self.whole(404, '{"detail": "Not Found"}')

    def do_POST(self) -> None:
        server, body = self.server, json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server.paths.append(self.path)
        if not self.is_refused():
            server.asked.append(body)
            if server.behaviour.strict and "continuous_usage_stats" in body["stream_options"]:
                self.whole(400, '{"error": "no such option"}')
                return
            faulty = len(server.asked) > server.behaviour.fault_from
            self.answer(body, server.behaviour.fault if faulty else "")

    def is_refused(self) -> bool:
        given, key = self.headers.get("Authorization"), self.server.behaviour.key
        if key is None or given == f"Bearer {key}":
            return False
        self.whole(401, json.dumps({"error": {"message": f"Incorrect API key provided: {given}"}}))
        return True

    def whole(self, status: int, body: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body.encode())))
        self.end_headers()
        self.wfile.write(body.encode())

    def answer(self, body: dict[str, Any], fault: str) -> None:
        if fault in WHOLE:
            self.whole(*WHOLE[fault])
            return
        if fault == "hangs":
            self.server.closing.wait(60)
        behaviour, seed = self.server.behaviour, json.dumps(body["messages"]) + self.server.behaviour.wording
        hashes = (hashlib.sha256(f"{seed}/{place}".encode()).hexdigest() for place in range(behaviour.tokens))
        words, size = [" " + each[:5] for each in hashes][: body["max_tokens"]], behaviour.per_chunk
        chunks = [words[start : start + size] for start in range(0, len(words), size)]
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for event in self.events(chunks, fault):
            if event is None:
                self.connection.shutdown(socket.SHUT_RDWR)
                return
            self.wfile.write(f"{len(event):x}\r\n".encode() + event + b"\r\n")
            self.wfile.flush()
        if behaviour.metrics_lag_s:
            threading.Timer(behaviour.metrics_lag_s, self.server.count, [chunks]).start()
        else:
            self.server.count(chunks)
        self.wfile.write(b"0\r\n\r\n")

    def events(self, chunks: list[list[str]], fault: str) -> Iterator[bytes | None]:
        """Yield the events of an answer; None drops the connection."""
        behaviour, sent = self.server.behaviour, 0
        running = behaviour.usage == "running"
        for place, chunk in enumerate(chunks):
            time.sleep(behaviour.chunk_s)
            if place == len(chunks) // 2:
                if fault == "ends early":
                    return
                if fault == "drops" or fault in EVENTS:
                    yield EVENTS.get(fault)
            sent += len(chunk)
            yield _event("".join(chunk), None, sent if running else None)
        yield _event("", "length", sent if running else None)
        yield b"data: " + json.dumps({"choices": [], "usage": {"completion_tokens": sent}}).encode() + b"\n\n"
        yield b"data: [DONE]\n\n"


def _event(text: str, finish_reason: str | None, usage: int | None) -> bytes:
    body: dict[str, Any] = {"choices": [{"delta": {"content": text}, "finish_reason": finish_reason}]}
    if usage is not None:
        body["usage"] = {"prompt_tokens": 7, "completion_tokens": usage}
    return b"data: " + json.dumps(body).encode() + b"\n\n"
