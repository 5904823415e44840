"""Any OpenAI-compatible server: what is measured of a good one, and what is said of each kind of bad one."""

from __future__ import annotations

import asyncio
import re
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.bench import endpoint_metrics as metrics
from paceline.bench.endpoint import flat, measure
from paceline.bench.endpoint_http import (
    EndpointDown,
    EndpointDropped,
    EndpointError,
    EndpointRefused,
    EndpointTimeout,
    NotOpenAI,
    TokenCountMismatch,
    Wire,
    base_url,
    reason,
)
from paceline.bench.endpoint_metrics import ACCEPTED, DRAFTED, DRAFTS, Counters
from paceline.bench.endpoint_stream import Disagreement, Malformed, Piece, answer, events
from paceline.bench.prompts import Prompt
from paceline.bench.results import Cell, Results
from paceline.bench.runner import Plan
from paceline.cli.app import run
from paceline.errors import InvalidParameter
from tests.bench.fake_server import FakeServer
from tests.bench.fake_subject import prompts

ONE = Plan(concurrencies=[1], max_tokens=128)


def bench(
    server: FakeServer, asked: list[Prompt] | None = None, **options: Any
) -> tuple[Results, BaseException | None]:
    plan = Plan(
        concurrencies=options.pop("concurrency", [1]),
        max_tokens=options.pop("max_tokens", 128),
        temperature=options.pop("temperature", 0.0),
        seed=options.pop("seed", 0),
    )
    return measure(server.url, prompts(6) if asked is None else asked, plan, **{"timeout_s": 5.0, **options})


def finished(server: FakeServer, asked: list[Prompt] | None = None, **options: Any) -> Results:
    results, stopped = bench(server, asked, **options)
    if stopped is not None:
        raise stopped
    return results


def cell(results: Results, label: str = "endpoint", workload: str = "all", concurrency: int = 1) -> Cell:
    wanted = (label, workload, concurrency)
    return next(cell for cell in results.cells if (cell.label, cell.workload, cell.concurrency) == wanted)


# -- events out of bytes


def events_of(stream: bytes, size: int) -> list[str]:
    async def chunks() -> AsyncIterator[bytes]:
        for start in range(0, len(stream), size):
            yield stream[start : start + size]

    async def collected() -> list[str]:
        return [data async for data in events(chunks())]

    return asyncio.run(collected())


def test_events_come_out_whole_however_the_bytes_are_cut() -> None:
    stream = b': ping\n\ndata: {"a": "\xc3\xa9\xe2\x80\xa8"}\r\n\r\nevent: x\ndata: one\ndata: two\n\ndata:[DONE]'
    for size in range(1, len(stream) + 1):
        assert events_of(stream, size) == ['{"a": "é\u2028"}', "one\ntwo", "[DONE]"]


@pytest.mark.parametrize("line", [b"<html>", b'{"choices": []}', b"data", b"data: \xff\xfe"])
def test_a_line_of_another_protocol_is_an_error(line: bytes) -> None:
    with pytest.raises(Malformed):
        events_of(line + b"\n\n", 99)


# -- tokens out of chunks


def test_tokens_that_come_together_share_their_wait() -> None:
    found = answer([Piece(1.0, "a", 1), Piece(1.4, " b c d e", 4), Piece(1.5, " f", 1)], 6, 0, 10, 0.5, 1.5)
    assert found.num_tokens == 6
    assert list(found.gaps()) == pytest.approx([0.1] * 5)


def test_where_chunks_are_not_counted_their_tokens_go_by_the_text() -> None:
    found = answer([Piece(1.0, "xx"), Piece(2.0, "xxxxxx"), Piece(3.0, "xxxx")], 9, 0, 10, 0.0, 3.0)
    assert [count for _, count in found.commits] == [2, 4, 3]
    assert sum(count for _, count in found.commits) == 9


@pytest.mark.parametrize(
    ("pieces", "usage", "words"),
    [
        ([Piece(0.1, "word")], None, "cannot be counted"),
        ([Piece(0.1, "word", 1), Piece(0.2, "word", 1)], 20, "usage is 20 tokens, its chunks hold 2"),
        ([Piece(0.1, "word", 5), Piece(0.2, "word", -3)], 2, "goes down"),
        ([Piece(0.1, "word")] * 9, 3, "came in 9 chunks"),
        ([Piece(0.1, "word")], 0, "usage is 0"),
        ([Piece(0.1, "word")], 34, "at most 32"),
        ([Piece(0.1, "word")], 30, "only 4 bytes"),
    ],
)
def test_usage_that_cannot_be_is_noticed(pieces: list[Piece], usage: int | None, words: str) -> None:
    with pytest.raises(Disagreement, match=words):
        answer(pieces, usage, 0, 32, 0.0, 1.0)


def test_hidden_thoughts_are_tokens_without_text() -> None:
    assert answer([Piece(1.0, "yes")], 30, 29, 32, 0.0, 1.0).num_tokens == 30


def test_an_empty_answer_is_an_answer() -> None:
    found = answer([], 1, 0, 32, 0.25, 0.5)
    assert (found.num_tokens, found.commits, list(found.gaps()), found.end) == (1, (), [], 0.5)


def test_text_is_cut_into_words_and_put_together_again() -> None:
    text = "\n A line,\u2028 日本語 and more…  \t"
    assert "".join(answer([Piece(1.0, text, 9)], 9, 0, 32, 0.0, 1.0).tokens) == text


# -- counters


def test_counters_of_several_engines_are_added_and_differences_taken() -> None:
    def text(scale: int) -> str:
        engines = [
            f'vllm:spec_decode_num_drafts_total{{engine="{engine}"}} {10.0 * scale}\n'
            f'vllm:spec_decode_num_draft_tokens_total{{engine="{engine}"}} {30.0 * scale}\n'
            f'vllm:spec_decode_num_accepted_tokens_total{{engine="{engine}"}} {12.0 * scale}\n'
            f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="{engine}",position="0"}} {7 * scale}\n'
            f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="{engine}",position="2"}} {5 * scale}\n'
            f'vllm:generation_tokens_total{{engine="{engine}"}} {2.2e1 * scale}\n'
            f'vllm:spec_decode_num_drafts_created{{engine="{engine}"}} 1.7947243321307905e+09\n'
            for engine in (0, 1)
        ]
        return "# TYPE vllm:spec_decode_num_drafts counter\n" + "".join(engines) + "vllm:spec_decode_num_x NaN\n"

    found = metrics.parse(text(3)).since(metrics.parse(text(1)))
    stats = found.of_answers(88).stats()
    assert (found.server, found.generated, stats.num_drafts, stats.num_draft_tokens) == ("vllm", 88, 40, 120)
    assert stats.acceptance_rate == pytest.approx(0.4)
    assert found.at_depth(ACCEPTED) == [28, 0, 20]
    assert (stats.drafted_per_position, stats.accepted_per_position) == ([40, 40, 40], [28, 0, 20])
    assert stats.mean_acceptance_length == pytest.approx(88 / 40)


def test_drafted_per_position_is_unknown_when_drafts_differ_in_length_and_no_counter_has_it() -> None:
    totals = {DRAFTS: 10, DRAFTED: 25, ACCEPTED: 12}
    accepted = {f"{ACCEPTED}_per_pos/{place}": count for place, count in enumerate((8, 4, 0))}
    drafted = {f"{DRAFTED}_per_pos/{place}": count for place, count in enumerate((10, 9, 6))}
    silent = Counters("vllm", {**totals, **accepted}).stats()
    assert (silent.drafted_per_position, silent.accepted_per_position) == ([], [])
    told = Counters("paceline", {**totals, **accepted, **drafted}).stats()
    assert (told.drafted_per_position, told.accepted_per_position) == ([10, 9, 6], [8, 4, 0])


def test_an_average_over_several_ranks_is_their_mean() -> None:
    found = metrics.parse('sglang:spec_accept_length{tp_rank="0"} 2.0\nsglang:spec_accept_length{tp_rank="1"} 3.0\n')
    assert found.accept_length == 2.5


@pytest.mark.parametrize(
    ("counted", "words"),
    [
        ({"generation_tokens": 300}, "other clients use it too"),
        ({"tokens_predicted": 50}, "usage is wrong"),
        ({DRAFTED: 20, ACCEPTED: 30}, "30 tokens accepted of 20 drafted"),
        ({DRAFTED: 200, ACCEPTED: 150}, "150 accepted ones alone"),
    ],
)
def test_counters_that_disagree_with_usage_are_noticed(counted: dict[str, float], words: str) -> None:
    assert words in str(metrics.disagreement(Counters("vllm", counted), tokens=100, answers=4))
    assert metrics.disagreement(Counters("vllm", {"generation_tokens": 103}), tokens=100, answers=4) is None


# -- a good server


def test_a_run_gives_every_figure_a_server_can_give() -> None:
    with FakeServer(per_chunk=4, metrics="vllm") as server:
        measured = finished(server, prompts(6) + prompts(3, "code"), concurrency=[1, 3])
    assert {(found.workload, found.concurrency) for found in measured.cells} == {
        (workload, level) for workload in ("all", "chat", "code") for level in (1, 3)
    }
    found = cell(measured)
    assert (found.method, found.answers, found.tokens) == ("endpoint", 9, 9 * 40)
    assert found.tokens_per_s == pytest.approx(found.tokens / found.seconds)
    assert found.speedup is None
    assert found.too_short is None
    assert found.tau == pytest.approx(4)
    assert found.acceptance_rate == pytest.approx(1)
    assert found.drafted_per_position == found.accepted_per_position == (90, 90, 90)
    assert found.ttft_s.p50 < found.request_s.p50
    assert found.inter_token_s.p50 < found.ttft_s.p50
    assert measured.model == "toy"
    assert measured.endpoint["server"] == "vllm"
    assert measured.endpoint["acceptance"]["accepted_tokens"] == 2 * 9 * 30


def test_each_prompt_is_asked_once_at_each_concurrency_and_as_many_at_once() -> None:
    with FakeServer(tokens=8, chunk_s=0.004) as server:
        finished(server, prompts(8), concurrency=[1, 4])
        asked = [body["messages"][0]["content"] for body in server.asked if "question" in str(body["messages"])]
        assert sorted(asked) == sorted(2 * [prompt.turns[0] for prompt in prompts(8)])
        assert server.most_at_once == 4


@pytest.mark.parametrize(
    "behaviour",
    [
        {"usage": "running"},
        {"usage": "final"},
        {"usage": "none", "token_ids": True},
        {"usage": "none", "logprobs": True},
        {"refuses": ("continuous_usage_stats",)},
        {"refuses": ("stream_options",), "token_ids": True},
        {"refuses": ("max_tokens",)},
        {"chat": False},
        {"chat": False, "refuses": ("stream_options",), "logprobs": True},
    ],
)
def test_tokens_are_counted_in_every_dialect(behaviour: dict[str, Any]) -> None:
    with FakeServer(per_chunk=3, **behaviour) as server:
        found = cell(finished(server))
        assert (found.answers, found.tokens) == (6, 240)
        assert "stream" in server.asked[-1]


def test_a_server_without_chat_gets_the_conversation_as_text() -> None:
    assert flat([{"role": "user", "content": "Hello?"}]) == "Hello?"
    talk = [{"role": "user", "content": "A"}, {"role": "assistant", "content": "B"}, {"role": "user", "content": "C"}]
    assert flat(talk) == "user: A\n\nassistant: B\n\nuser: C\n\nassistant:"


def test_a_conversation_goes_on_from_what_was_answered() -> None:
    with FakeServer(tokens=5) as server:
        finished(server, prompts(2, turns=3))
        last = next(body["messages"] for body in server.asked if len(body["messages"]) == 5)
        assert [entry["role"] for entry in last] == ["user", "assistant", "user", "assistant", "user"]
        assert len(last[1]["content"].split()) == 5


@pytest.mark.parametrize("server_name", ["paceline", "sglang", "llamacpp"])
def test_other_servers_counters_are_read_too(server_name: str) -> None:
    with FakeServer(per_chunk=2, metrics=server_name) as server:
        measured = finished(server)
    assert measured.endpoint["server"] == server_name
    assert cell(measured).tau == {"paceline": pytest.approx(2), "sglang": 2.5, "llamacpp": None}[server_name]


def test_counters_that_lag_are_waited_for() -> None:
    with FakeServer(tokens=10, per_chunk=2, metrics="vllm", metrics_lag_s=0.04) as server:
        assert cell(finished(server, prompts(2))).acceptance_rate == pytest.approx(1)


def test_a_shared_server_can_be_measured_without_its_counters() -> None:
    with FakeServer(metrics="vllm", metrics_factor=3) as server:
        assert cell(finished(server, counters=False)).tokens == 240
        assert "/metrics" not in server.paths


def test_too_few_tokens_give_no_speed() -> None:
    with FakeServer(tokens=5) as server:
        found = cell(finished(server))
    assert found.tokens_per_s is None
    assert "30 tokens measured" in found.too_short


def test_looping_answers_are_counted() -> None:
    with FakeServer() as server:
        assert cell(finished(server)).looping == 0
    with FakeServer(loops=True) as server:
        found = cell(finished(server))
    assert found.looping == 6
    assert found.without_loops.answers == 0


# -- against a second server


def test_a_baseline_gives_a_paired_speed_up() -> None:
    with FakeServer(per_chunk=4, chunk_s=0.003) as fast, FakeServer(per_chunk=1, chunk_s=0.003) as plain:
        measured = finished(fast, prompts(6), baseline_url=plain.url)
    found, base = cell(measured), cell(measured, "baseline")
    assert (base.method, base.speedup) == ("none", None)
    assert found.speedup.pairs == 6
    assert found.decode_speedup.pairs == 6
    assert found.speedup.ratio > 1.5  # 4 by its clock, less on a busy machine
    assert found.identical is True
    assert measured.endpoint["baseline"]["url"] == plain.url + "/v1"


def test_answers_that_differ_from_the_baselines_are_reported() -> None:
    with FakeServer() as one, FakeServer(wording="another model") as other:
        measured = finished(one, prompts(5), baseline_url=other.url)
    assert cell(measured).identical is False


def test_both_servers_are_asked_the_same_and_seeded_the_same() -> None:
    with FakeServer(tokens=4) as one, FakeServer(tokens=4, wording="another model") as other:
        measured = finished(one, prompts(3, turns=2), baseline_url=other.url, temperature=0.7, seed=3)

        def key(body: dict[str, Any]) -> str:
            return str(body["messages"]) + str(body.get("seed"))

        assert sorted(map(key, one.asked)) == sorted(map(key, other.asked))
        seeds = [body["seed"] for body in one.asked if "question" in str(body["messages"])]
        assert len(set(seeds)) == 6
    assert cell(measured).identical is None


# -- what the user may get wrong


@pytest.mark.parametrize(
    ("given", "url", "metrics_url"),
    [
        ("http://localhost:8000", "http://localhost:8000/v1", "http://localhost:8000/metrics"),
        ("http://localhost:8000/", "http://localhost:8000/v1", "http://localhost:8000/metrics"),
        ("https://host/v1/", "https://host/v1", "https://host/metrics"),
        ("https://host/v1/chat/completions", "https://host/v1", "https://host/metrics"),
        ("https://host/toy/v1/completions", "https://host/toy/v1", "https://host/toy/metrics"),
        ("https://host/openai", "https://host/openai", "https://host/openai/metrics"),
        ("http://[::1]:8000", "http://[::1]:8000/v1", "http://[::1]:8000/metrics"),
    ],
)
def test_a_url_may_be_written_in_several_ways(given: str, url: str, metrics_url: str) -> None:
    wire = Wire(url=base_url(given), timeout_s=1)
    assert (wire.url, wire.metrics_url) == (url, metrics_url)


NO_URLS = ("", "localhost:8000", "ftp://host", "http://", "http://h:99999", "http://me:secret@host")


@pytest.mark.parametrize("given", [*NO_URLS, "http://h/?a=b", "http://a b/", "http://h/é"])
def test_what_is_no_url_is_refused_by_the_options_name(given: str) -> None:
    with pytest.raises(InvalidParameter, match="baseline_endpoint") as caught:
        base_url(given, "baseline_endpoint")
    assert "secret" not in str(caught.value)


def test_more_requests_at_once_than_prompts_are_refused_before_anything_is_asked() -> None:
    with FakeServer() as server:
        with pytest.raises(InvalidParameter, match="6 prompts never make 7 requests at once"):
            bench(server, concurrency=[1, 7])
        assert not server.paths


def test_of_several_models_one_must_be_named() -> None:
    with FakeServer(models=("a", "b")) as server:
        with pytest.raises(InvalidParameter, match="serves a, b; choose one"):
            bench(server)
        assert finished(server, model="b").model == "b"
        assert server.asked[-1]["model"] == "b"


def test_the_key_is_passed_on_and_never_shown() -> None:
    with FakeServer(key="sk-very-secret") as server:
        assert cell(finished(server, api_key="sk-very-secret")).answers == 6
        with pytest.raises(EndpointRefused, match=r"HTTP 401.*--api-key"):
            bench(server)
        with pytest.raises(EndpointRefused, match=r"Bearer \*\*\*") as caught:
            bench(server, api_key="sk-wrong-secret")
    assert "sk-wrong-secret" not in str(caught.value)
    assert "secret" not in repr(Wire(url="http://h", timeout_s=1, api_key="sk-very-secret"))


@pytest.mark.parametrize(
    ("options", "field"), [({"timeout_s": 0.0}, "timeout"), ({"api_key": "two\nlines secret"}, "api_key")]
)
def test_options_that_cannot_be_are_refused_by_name(options: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidParameter, match=field) as caught:
        measure("http://localhost", prompts(1), ONE, **options)
    assert "secret" not in str(caught.value)


# -- what the server may get wrong


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def test_a_server_that_is_not_there_is_reported_with_its_url() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(EndpointDown, match=f"{url}/v1/models: no server answers.*is the server running"):
        measure(url, prompts(1), ONE)


@pytest.mark.parametrize("host", ["no-such-host.invalid", "x" * 70])
def test_a_host_that_does_not_exist_is_down(host: str) -> None:
    with pytest.raises(EndpointDown, match="no server answers"):
        measure(f"http://{host}", prompts(1), ONE)


def test_a_port_without_http_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def greet() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(b"220 mail ready\r\n")
                connection.recv(1000)

        threading.Thread(target=greet, daemon=True).start()
        with pytest.raises(NotOpenAI, match="does not answer in HTTP"):
            measure(f"http://127.0.0.1:{listener.getsockname()[1]}", prompts(1), ONE)


FAULTS: list[tuple[str, type[EndpointError], str]] = [
    ("html", NotOpenAI, "got an HTML page"),
    ("wrong json", NotOpenAI, "expected a list of models"),
    ("redirect", NotOpenAI, "redirects to https://elsewhere.example/v1; give that URL"),
    ("500", EndpointRefused, "HTTP 500: CUDA out of memory"),
    ("not a stream", NotOpenAI, "expected a stream of events"),
    ("drops at once", EndpointDropped, "in the middle of an answer"),
    ("drops", EndpointDropped, "in the middle of an answer"),
    ("ends early", EndpointDropped, "ended before the answer did"),
    ("malformed", NotOpenAI, "this is not an event"),
    ("not json", NotOpenAI, "expected JSON in its events"),
    ("other protocol", NotOpenAI, "message_start"),
    ("error event", EndpointRefused, "an error in the stream: the worker died"),
    ("hangs", EndpointTimeout, r"within \S+ s; raise --timeout"),
]


@pytest.mark.parametrize(("fault", "error", "words"), FAULTS)
def test_a_server_that_is_wrong_from_the_start_is_refused_at_once(fault, error, words) -> None:
    with FakeServer(fault=fault) as server, pytest.raises(error, match=words) as caught:
        bench(server, timeout_s=0.1 if fault == "hangs" else 5)
    assert str(caught.value).startswith(server.url)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("fault", "error", "words"), FAULTS[3:])
def test_what_was_measured_before_a_fault_is_kept(fault: str, error: type[EndpointError], words: str) -> None:
    with FakeServer(fault=fault, fault_from=2 + 4) as server:  # after two that warm up and four answers
        results, stopped = bench(server, timeout_s=1.5 if fault == "hangs" else 5)
    assert isinstance(stopped, error)
    assert re.search(words, str(stopped))
    assert not results.complete
    assert cell(results).answers == 4


def test_a_fault_of_one_request_ends_those_beside_it() -> None:
    with FakeServer(tokens=30, chunk_s=0.01, fault="500", fault_from=1 + 3 + 2) as server:
        with pytest.raises(EndpointRefused):
            bench(server, concurrency=[3])
        assert len(server.asked) == 1 + 3 + 3


@pytest.mark.parametrize(
    ("lie", "words"),
    [
        ({"usage_factor": 4}, "at most 24 were requested"),
        ({"usage": "none"}, "cannot be counted"),
    ],
)
def test_a_server_that_lies_about_usage_is_found_out(lie: dict[str, Any], words: str) -> None:
    with FakeServer(**lie) as server, pytest.raises(TokenCountMismatch, match=words):
        bench(server)


def test_counters_that_count_something_else_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "PATIENCE_S", 0.1)
    said = "usage is 40 tokens, its /metrics counted 80"
    with FakeServer(metrics="vllm", metrics_factor=2) as server, pytest.raises(TokenCountMismatch, match=said):
        bench(server)


def test_a_hostile_message_is_one_printable_line() -> None:
    wire = Wire(url="http://h", timeout_s=1)
    said = wire.clean(reason(b'{"error": {"message": "\\u001b[31mred\\nand ' + b"long " * 200 + b'"}}'))
    assert said.startswith("[31mred and long")
    assert "\x1b" not in said
    assert len(said) < 310


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b'{"error": {"message": "too long"}}', "too long"),
        (b'{"error": "too long"}', "too long"),
        (b'{"detail": [{"loc": ["body"], "msg": "field required"}]}', "field required"),
        (b'{"object": "error", "message": "too long"}', "too long"),
        (b"<html><style>p{}</style><h1>502 Bad Gateway</h1></html>", "502 Bad Gateway"),
        (b"plain words", "plain words"),
        (b"", ""),
    ],
)
def test_the_servers_own_words_are_found_in_any_shape(body: bytes, said: str) -> None:
    assert said in reason(body)
    assert "{}" not in reason(body)


# -- Ctrl-C


@pytest.mark.parametrize("reason", [KeyboardInterrupt, MemoryError, RuntimeError])
def test_whatever_ends_it_between_answers_keeps_what_was_measured(reason: type[BaseException]) -> None:
    def stop_after_two(done: float, total: float, what: str) -> None:
        if done == 2:
            raise reason

    with FakeServer() as server:
        results, stopped = bench(server, on_progress=stop_after_two)
    assert isinstance(stopped, reason)
    assert cell(results).answers == 2


@pytest.fixture
def interruptible() -> Iterator[None]:
    """A shell that runs the tests in the background has them ignore Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_during_an_answer_ends_it_at_once() -> None:
    main = threading.main_thread().ident
    with FakeServer(tokens=1, chunk_s=0.02) as server:
        timer = threading.Timer(0.25, signal.pthread_kill, [main, signal.SIGINT])

        def slow_down(done: float, total: float, what: str) -> None:
            if done == 1 and what != "warming up":  # the second answer is long, and interrupted well within it
                server.behaviour.tokens = 5000
                timer.start()

        started = time.monotonic()
        results, stopped = bench(server, prompts(2), max_tokens=5000, on_progress=slow_down)
        assert time.monotonic() - started < 60  # the answer would take a hundred seconds
        timer.join()
    assert isinstance(stopped, KeyboardInterrupt)
    assert cell(results).answers == 1


# -- the command


CHAT = ("--workloads", "chat", "--max-tokens", "40", "--seed", "3")


def test_a_server_is_benched_against_its_baseline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer() as server, FakeServer() as other:
        both = ["--endpoint", server.url, "--baseline-endpoint", other.url]
        code = run(["bench", "toy", *both, *CHAT, "--out", str(tmp_path)])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    assert "baseline" in captured.out
    assert "with one request at a time" in captured.err
    assert "seconds per token of the baseline" in captured.err
    results = Results.load(tmp_path / "results.json")
    assert results.endpoint["url"].startswith(server.url)
    assert {cell.label: cell.speedup is not None for cell in results.cells} == {"baseline": False, "endpoint": True}
    assert "<html" in (tmp_path / "report.html").read_text()


def test_a_server_alone_has_no_speedup_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer() as server:
        assert run(["bench", "--endpoint", server.url, *CHAT, "--out", str(tmp_path)]) == 0
    captured = capsys.readouterr()
    assert "give --baseline-endpoint" in captured.err
    assert all(cell.speedup is None for cell in Results.load(tmp_path / "results.json").cells)


def test_a_server_that_is_not_there_leaves_no_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "--endpoint", "http://127.0.0.1:9", *CHAT, "--out", str(tmp_path / "out")]) == 1
    assert "no server answers" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
