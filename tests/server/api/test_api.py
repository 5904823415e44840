"""The OpenAI routes, through the openai package and bare HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import logging
import socket
import threading
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import openai
import pytest
from pydantic import ValidationError

from benchmarks.clients import Answer, ask
from paceline import LLM, SamplingParams
from paceline.cli.serve import read_keys
from paceline.core.verdict import TokenKind
from paceline.engine.events import Request
from paceline.server.api.generation import KINDS, Generation, TimeLimit
from paceline.server.api.protocol import ChatRequest, CompletionRequest
from paceline.server.gate import RequestGuard
from paceline.server.logs import OWN, log_level, logs_json, set_up_logs
from paceline.server.process.client import RequestInbox
from paceline.server.trust import ApiKey
from paceline.text.request_text import EncodedPrompt
from tests.helpers.errors import refused
from tests.server.conftest import Server, start_server, wait_until

MESSAGES = [{"role": "user", "content": "Say something."}]
LONG = {"ignore_eos": True}


@pytest.fixture(scope="module")
def plain(tiny_model: Path) -> LLM:
    return LLM(str(tiny_model), method="none")


def post(server: Server, path: str, body: Any, headers: dict[str, str] | None = None) -> tuple[int, Any]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(server.url + path, data, {"Content-Type": "application/json", **(headers or {})})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def test_answers_are_those_of_plain_decoding(client: openai.OpenAI, plain: LLM) -> None:
    prompts = [f"Tell me about the number {number}." for number in range(12)]

    def ask(at: int) -> str:
        answer = client.completions.create(
            model="tiny", prompt=prompts[at], max_tokens=40, seed=at, temperature=0.8, extra_body=LONG
        )
        return answer.choices[0].text

    with ThreadPoolExecutor(12) as pool:
        served = list(pool.map(ask, range(len(prompts))))
    alone = [
        plain.generate(prompt, SamplingParams(max_tokens=40, seed=at, temperature=0.8, ignore_eos=True))[0]
        for at, prompt in enumerate(prompts)
    ]
    assert served == [output.outputs[0].text for output in alone]


def test_a_stream_adds_up_to_the_whole_answer(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "max_tokens": 30, "seed": 1, "temperature": 1.0}
    whole = client.chat.completions.create(**asked, logprobs=True, top_logprobs=3)
    stream = client.chat.completions.create(
        **asked, logprobs=True, top_logprobs=3, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    entries = [
        entry
        for chunk in chunks
        if chunk.choices and chunk.choices[0].logprobs
        for entry in chunk.choices[0].logprobs.content
    ]
    assert text == whole.choices[0].message.content
    assert entries == whole.choices[0].logprobs.content
    assert len(entries) == whole.usage.completion_tokens == 30
    assert chunks[-1].usage.completion_tokens == 30
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
    assert all(len(entry.top_logprobs) == 3 for entry in entries)


def test_several_answers_to_several_prompts(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": "tiny",
        "prompt": ["one", "two"],
        "max_tokens": 6,
        "n": 2,
        "seed": 3,
        "temperature": 1,
    }
    whole = client.completions.create(**asked)
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    texts = dict.fromkeys(range(4), "")
    for chunk in client.completions.create(**asked, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == {choice.index: choice.text for choice in whole.choices}


def test_stop_strings_echo_and_token_prompts(client: openai.OpenAI, plain: LLM) -> None:
    text = client.completions.create(model="tiny", prompt="Go on", max_tokens=20, extra_body=LONG).choices[0].text
    stop = text[8:11]
    cut = client.completions.create(model="tiny", prompt="Go on", max_tokens=20, stop=stop, extra_body=LONG).choices[0]
    assert (cut.text, cut.finish_reason) == (text[: text.index(stop)], "stop")
    tokens = plain.tokenizer.encode("Go on")
    echoed = client.completions.create(model="tiny", prompt=tokens, max_tokens=20, echo=True, extra_body=LONG)
    assert echoed.choices[0].text == "Go on" + text


def test_async_client_serves_many_tasks(server: Server, plain: LLM) -> None:
    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="x") as client:

            async def one(seed: int) -> str:
                stream = await client.chat.completions.create(
                    model="tiny", messages=MESSAGES, max_tokens=16, seed=seed, temperature=1, stream=True
                )
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            return await asyncio.gather(*map(one, range(16)))

    alone = [
        plain.chat(MESSAGES, SamplingParams(max_tokens=16, seed=seed, temperature=1))[0].outputs[0].text
        for seed in range(16)
    ]
    assert asyncio.run(ask()) == alone


def test_speculation_is_chosen_per_request(client: openai.OpenAI) -> None:
    prompt = "one two three four " * 12
    asked: dict[str, Any] = {"model": "tiny", "prompt": prompt, "max_tokens": 24}
    off = client.completions.create(**asked, extra_body={"speculation": "off", **LONG})
    fixed = client.completions.create(**asked, extra_body={"speculation": {"method": "ngram", "k": 4}, **LONG})
    assert off.choices[0].text == fixed.choices[0].text
    assert off.usage.speculation["drafted"] == 0
    assert set(fixed.usage.speculation["methods"]) <= {"ngram"}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"frobnicate": 1}, "frobnicate"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"top_k": 2**63}, "top_k"),
        ({"best_of": 3}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"stop": [""]}, "stop"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"99999": 1}}, "logit_bias"),
        ({"logprobs": 100}, "logprobs"),
        ({"prompt": []}, "prompt"),
        ({"speculation": {"method": "magic"}}, "speculation"),
        ({"speculation": {"method": "ngram", "k": 100000}}, "speculation"),
        ({"n": 2, "temperature": 0}, "n"),
        ({"seed": -1}, "seed"),
        ({"tag": "x" * 65}, "tag"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt.1"),
        ({"speculation": {"depth": 2}}, "speculation.depth"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"echo": True, "logprobs": 1, "stream": True}, "echo"),
        ({"allowed_token_ids": [99999]}, "allowed_token_ids"),
        ({"n": 129}, "n"),
        ({"stop": ["x"] * 65}, "stop"),
        ({"stop": "x" * 257}, "stop"),
        ({"bad_words": ["x"] * 257}, "bad_words"),
        ({"structured_outputs": {"regex": "a" * 70_000}}, "structured_outputs"),
        ({"structured_outputs": {"json": json.loads('{"items":' * 70 + "{}" + "}" * 70)}}, "structured_outputs"),
    ],
)
def test_a_bad_parameter_is_named(server: Server, body: dict[str, Any], param: str) -> None:
    status, answer = post(server, "/v1/completions", {"prompt": "a", **body})
    assert status == 400, answer
    assert answer["error"]["param"] == param
    assert answer["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b'{"prompt": "\xff"}', b'{"prompt": NaN}', b"[" * 5000, b'{"prompt": 1e999}']
)
def test_a_malformed_body_is_a_400(server: Server, body: bytes) -> None:
    assert post(server, "/v1/completions", body)[0] == 400


def test_a_body_of_another_content_type_is_refused_with_the_right_one(server: Server) -> None:
    status, answer = post(server, "/v1/completions", {"prompt": "a"}, {"Content-Type": "text/plain"})
    assert status == 400
    assert "Content-Type: application/json" in answer["error"]["message"]


@pytest.mark.parametrize("item", ["null", "0.5", "[null]", "{}"])
def test_a_long_list_of_wrong_items_has_few_problems(item: str) -> None:
    """To name each of a million takes the event loop a minute."""
    wrong = [json.loads(item)] * 10_000
    for kind, body in ((CompletionRequest, {"prompt": wrong}), (ChatRequest, {"messages": wrong})):
        with pytest.raises(ValidationError) as raised:
            kind.model_validate(body)
        assert raised.value.error_count() < 8
    with pytest.raises(ValidationError, match="100 fields"):
        CompletionRequest.model_validate({f"field {number}": 1 for number in range(10_000)})


def test_log_probabilities_of_the_prompt(server: Server, plain: LLM) -> None:
    prompt = "Tell me about the number 3."
    params = SamplingParams(temperature=0, max_tokens=3, logprobs=1, prompt_logprobs=2)
    (wanted,) = plain.generate([prompt], params)
    assert wanted.prompt_logprobs is not None
    asked = {"prompt": prompt, "temperature": 0, "max_tokens": 3, "logprobs": 1}
    _, echoed = post(server, "/v1/completions", {**asked, "echo": True})
    found = echoed["choices"][0]["logprobs"]
    own = [
        entry[token].logprob
        for token, entry in zip(wanted.prompt_token_ids[1:], wanted.prompt_logprobs[1:], strict=True)
    ]
    assert found["token_logprobs"][: len(own) + 1] == [None, *own]
    assert "".join(found["tokens"]) == echoed["choices"][0]["text"]
    assert len(found["tokens"]) == len(found["top_logprobs"]) == len(found["text_offset"]) == len(own) + 4
    _, listed = post(server, "/v1/completions", {**asked, "prompt_logprobs": 2})
    of_prompt = listed["choices"][0]["prompt_logprobs"]
    assert of_prompt[0] is None
    assert [{int(token) for token in entry} for entry in of_prompt[1:]] == [set(e) for e in wanted.prompt_logprobs[1:]]
    _, chat = post(server, "/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 2, "prompt_logprobs": 0})
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]


def test_only_allowed_tokens_are_written(server: Server) -> None:
    body = {"prompt": "Go on", "max_tokens": 8, "allowed_token_ids": [40, 50], "return_token_ids": True}
    _, answer = post(server, "/v1/completions", {**body, "temperature": 1.0, **LONG})
    assert set(answer["choices"][0]["token_ids"]) <= {40, 50}


def test_other_refusals(server: Server) -> None:
    assert post(server, "/v1/completions", {"model": "gpt-9", "prompt": "a"})[0] == 404
    assert post(server, "/v1/completions", {"prompt": ""})[0] == 400
    assert post(server, "/v1/completions", {"prompt": [1] * 4000})[0] == 400
    assert post(server, "/v1/chat/completions", {"messages": []})[0] == 400
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    assert post(server, "/v1/chat/completions", {"messages": image})[0] == 400
    status, answer = post(server, "/v1/completions", {"prompt": "a" * (5 << 20)})
    assert (status, answer["error"]["code"]) == (413, "BodyTooLarge")


def test_a_prompt_that_does_not_fit_with_its_answer_has_openais_code(server: Server) -> None:
    for body in ({"prompt": [40] * 2048}, {"prompt": [40] * 2000, "max_tokens": 49}):
        status, answer = post(server, "/v1/completions", body)
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
        assert "maximum context length" in answer["error"]["message"]
    assert post(server, "/v1/completions", {"prompt": [40] * 2046, "max_tokens": 2})[0] == 200


def test_usage_so_far_is_in_every_chunk(client: openai.OpenAI) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    asked: dict[str, Any] = {"model": "tiny", "max_tokens": 8, "stream": True, "stream_options": options}
    *chunks, last = client.completions.create(prompt="Go", **asked, extra_body=LONG)
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == last.usage.completion_tokens == 8


def test_one_model_is_found_by_its_name(client: openai.OpenAI) -> None:
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-9")


def test_tokenize_round_trip(server: Server) -> None:
    status, found = post(server, "/tokenize", {"prompt": "Hello there"})
    assert status == 200
    assert found["count"] == len(found["tokens"])
    assert post(server, "/detokenize", {"tokens": found["tokens"]})[1]["prompt"] == "Hello there"
    assert post(server, "/tokenize", {"messages": MESSAGES})[1]["count"] > found["count"]
    assert post(server, "/detokenize", {"tokens": [-1]})[0] == 400


def test_a_client_that_leaves_frees_its_request(server: Server) -> None:
    def leave(stream: bool) -> None:
        body = {"prompt": "Go on", "max_tokens": 1900, "stream": stream, **LONG}
        raw = json.dumps(body).encode()
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as connection:
            head = ("POST /v1/completions HTTP/1.1", "Host: x", "Content-Type: application/json")
            connection.sendall("\r\n".join((*head, f"Content-Length: {len(raw)}\r\n\r\n")).encode() + raw)
            wait_until(lambda: server.metric("num_requests_running") >= 1)

    for stream in (True, False):
        aborted = server.metric('request_success_total\\{finished_reason="abort')
        leave(stream)
        wait_until(lambda: server.metric("num_requests_running") == 0)
        assert server.metric("kv_cache_usage_perc") == 0
        assert server.metric('request_success_total\\{finished_reason="abort') == aborted + 1


def test_metrics_count_what_was_served(server: Server, client: openai.OpenAI) -> None:
    before = {name: server.metric(name) for name in ("generation_tokens_total", "spec_decode_num_draft_tokens_total")}
    client.completions.create(
        model="tiny",
        prompt="a b a b a b",
        max_tokens=20,
        extra_body={"speculation": {"method": "ngram", "k": 3}, **LONG},
    )
    assert server.metric("generation_tokens_total") == before["generation_tokens_total"] + 20
    assert server.metric("engine_up") == 1
    assert server.metric("time_to_first_token_seconds_count") > 0
    assert server.metric("inter_token_latency_seconds_count") > 0


def test_chunks_tell_where_each_token_came_from(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Repeat."}], "max_tokens": 150}
    asked |= {"temperature": 0, "stream": True}
    asked["extra_body"] = {"return_token_ids": True, "speculation": {"method": "ngram", "k": 4}}
    choices = [chunk.choices[0] for chunk in client.chat.completions.create(**asked)]
    steps = [choice for choice in choices if getattr(choice, "token_ids", None)]
    for step in steps:
        assert "".join(step.token_texts) == (step.delta.content or "")
        assert len(step.token_texts) == len(step.token_kinds) == len(step.token_ids)
        assert (step.draft is None) or step.draft == {"method": "ngram", "nodes": 4, "depth": 4}
        assert step.draft is not None or step.token_kinds == ["bonus"]
    assert any(step.draft and step.token_kinds[-1] == "recovered" for step in steps)
    assert sum(len(step.token_ids) for step in steps) == 150


def test_request_ids_come_back(server: Server) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    with contextlib.closing(http.client.HTTPConnection(host, int(port))) as connection:
        connection.request("GET", "/version", headers={"X-Request-Id": "mine"})
        assert connection.getresponse().getheader("X-Request-Id") == "mine"


@pytest.mark.parametrize("streamed", [False, True])
def test_a_request_is_stopped_at_the_time_limit(streamed: bool) -> None:
    cancelled: list[str] = []

    def submit(request: Request) -> RequestInbox:
        return RequestInbox(request.request_id, cast("Any", None))

    async def run() -> None:
        client: Any = SimpleNamespace(submit=submit, cancel=cancelled.append)
        tokenizer: Any = None
        asked = Request("r", [1], SamplingParams(), streamed=streamed)
        generation = await Generation.start(client, tokenizer, EncodedPrompt(None, [1]), asked, limit_s=0.05)
        try:
            await generation.whole()
        finally:
            generation.cancel()

    with pytest.raises(TimeLimit):
        asyncio.run(run())
    assert cancelled == ["r"]


def test_kinds_have_the_names_of_the_engine() -> None:
    assert [kind.name.lower() for kind in TokenKind][: len(KINDS)] == list(KINDS)


def test_keys_come_from_a_file_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_API_KEY", "of-the-environment")
    file = tmp_path / "keys"
    file.write_text("first\nsecond\n")
    assert [each.key for each in read_keys(None)] == ["of-the-environment"]
    assert [each.key for each in read_keys(file)] == ["first", "second"]
    assert len({each.client for each in read_keys(file)}) == 2
    file.write_text("one first\n\none second\nthird\n")
    assert [each.client for each in read_keys(file)][:2] == ["one", "one"]
    for bad in ("a b c", "one first\ntwo first"):
        file.write_text(bad)
        with refused("api-key-file"):
            read_keys(file)
    file.write_text("\n")
    for bad in (file, tmp_path / "none"):
        with refused("api-key-file"):
            read_keys(bad)


def test_the_engine_process_logs_as_its_server_does(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    logger = logging.getLogger(OWN)
    for name in ("handlers", "propagate", "level"):
        monkeypatch.setattr(logger, name, getattr(logger, name))
    for as_json in (True, False):
        set_up_logs(as_json=as_json, text="engine: %(message)s", levels={OWN: logging.INFO})
        assert (logs_json(), log_level()) == (as_json, logging.INFO)
        logging.getLogger("paceline.server").info("hello")
        written = capsys.readouterr().err
        assert (json.loads(written)["message"] if as_json else written) == ("hello" if as_json else "engine: hello\n")


@pytest.mark.parametrize(
    ("header", "passes"),
    [
        ("Bearer second", True),
        ("bearer second", True),  # RFC 9110: a scheme's name has no case
        ("second", False),
        ("Basic second", False),
        ("Bearersecond", False),
        ("Bearer second key", False),
        ("Bearer", False),
        (None, False),
    ],
)
def test_a_key_is_a_bearer_token(header: str | None, passes: bool) -> None:
    reached, statuses = [], []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        reached.append(scope["path"])

    async def receive() -> dict[str, Any]:
        return {"type": "http.request"}

    async def send(message: dict[str, Any]) -> None:
        statuses.append(message.get("status"))

    headers = [] if header is None else [(b"authorization", header.encode())]
    gate = RequestGuard(
        app,
        api_keys=[ApiKey.unnamed(key) for key in ("first", "second")],
        max_body_bytes=1024,
        on_error=lambda status: None,
    )
    scope = {"type": "http", "method": "GET", "path": "/v1/models", "headers": headers}
    asyncio.run(gate(scope, receive, send))
    assert (reached, 401 in statuses) == (["/v1/models"] if passes else [], not passes)


def test_keys_a_full_queue_and_a_graceful_stop(tiny_model: Path) -> None:
    flags = ("--max-num-seqs", "1", "--max-waiting", "1", "--grace", "20", "--log-json")
    server = start_server(tiny_model, *flags, PACELINE_API_KEY="secret")
    key = {"Authorization": "Bearer secret"}
    try:
        assert post(server, "/v1/completions", {"prompt": "a"})[0] == 401
        assert post(server, "/v1/completions", {"prompt": "a"}, {"Authorization": "Bearer wrong"})[0] == 401
        assert json.loads(server.get("/health"))["status"] == "ok"

        def ask(tokens: int = 1900) -> tuple[int, Any]:
            body = {"prompt": "Go on", "max_tokens": tokens, "temperature": 1.5, **LONG}  # no draft makes it short
            return post(server, "/v1/completions", body, key)

        with ThreadPoolExecutor(4) as pool:
            answers = [pool.submit(ask, 500) for _ in range(4)]
            statuses = sorted(answer.result()[0] for answer in answers)
        assert statuses[0] == 200
        assert statuses[-1] == 429

        last: list[tuple[int, Any]] = []
        thread = threading.Thread(target=lambda: last.append(ask()))
        thread.start()
        wait_until(lambda: server.metric("num_requests_running", key) == 1)
        assert server.stop() == 0
        thread.join(60)
        assert last[0][0] == 200
        assert all(json.loads(line)["level"] for line in server.log)
    finally:
        server.process.kill()


def test_requests_that_outlast_the_grace_period_are_told_that_the_server_stops(tiny_model: Path) -> None:
    server = start_server(tiny_model, "--grace", "0.2")
    host, port = server.url.removeprefix("http://").split(":")
    body = {"prompt": "Go on", "max_tokens": 1900, "temperature": 1.5, "n": 32, **LONG}

    async def stopped() -> list[Answer]:
        asked = [asyncio.create_task(ask(host, int(port), {**body, "stream": stream})) for stream in (True, False)]
        await asyncio.to_thread(wait_until, lambda: server.metric("num_requests_running") == 64)
        server.process.terminate()
        return list(await asyncio.gather(*asked))

    streamed, whole = asyncio.run(stopped())
    assert server.stop() == 0
    for answer, status in ((streamed, 200), (whole, 503)):
        assert answer.status == status
        assert answer.error is not None
        assert "shutting down" in answer.error
    assert "Traceback" not in "".join(server.log)


def test_structured_answers_validate(client: openai.OpenAI) -> None:
    number = {"type": "integer", "minimum": 0, "maximum": 9}
    schema = {"type": "object", "properties": {"n": number}, "required": ["n"], "additionalProperties": False}
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    asked: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "max_tokens": 200, "seed": 2, "temperature": 1.0}
    answer = client.chat.completions.create(**asked, response_format=wanted).choices[0]
    stream = client.chat.completions.create(**asked, response_format=wanted, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == answer.message.content
    assert answer.finish_reason == "stop"
    assert set(json.loads(answer.message.content)) == {"n"}
    picked = client.completions.create(
        model="tiny", prompt="Pick", extra_body={"structured_outputs": {"choice": ["red", "blue"]}}
    )
    assert picked.choices[0].text in ("red", "blue")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens"),
        ({"response_format": {"type": "json_schema", "json_schema": "x"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": 7}}}}, "response_format"),
        ({"tools": [{"name": "f"}]}, "tools.0"),
        ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ],
)
def test_a_bad_chat_parameter_is_named(server: Server, body: dict[str, Any], param: str) -> None:
    status, answer = post(server, "/v1/chat/completions", {"messages": MESSAGES, **body})
    assert (status, answer["error"]["param"]) == (400, param)
