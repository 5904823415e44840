"""Any OpenAI-compatible server: what is measured of a good one, and the error of each kind of bad one."""

from __future__ import annotations

import json
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.bench import endpoint
from paceline.bench.endpoint import (
    Counters,
    EndpointError,
    ServerReply,
    ServerUnderTest,
    TokenCountMismatch,
    base_url,
    measure,
    read_answer,
)
from paceline.bench.measurement import TimedAnswer
from paceline.bench.prompts import Prompt
from paceline.bench.results import Cell, Results
from paceline.bench.runner import RunPlan
from paceline.cli.app import run
from tests.bench.fake_server import FakeServer
from tests.bench.fake_subject import prompts
from tests.helpers.errors import refused


def bench(
    server: FakeServer, asked: list[Prompt] | None = None, **options: Any
) -> tuple[Results, BaseException | None]:
    plan = RunPlan(
        concurrencies=options.pop("concurrency", [1]),
        max_tokens=options.pop("max_tokens", 128),
        temperature=options.pop("temperature", 0.0),
        seed=options.pop("seed", 0),
    )
    options = {"timeout_s": 5.0, "on_progress": lambda done, total, what: None, **options}
    return measure(server.url, prompts(6) if asked is None else asked, plan, {}, **options)


def finished(server: FakeServer, asked: list[Prompt] | None = None, **options: Any) -> Results:
    results, stopped = bench(server, asked, **options)
    if stopped is not None:
        raise stopped
    return results


def cell(results: Results, label: str = "endpoint", workload: str = "all", concurrency: int = 1) -> Cell:
    wanted = (label, workload, concurrency)
    return next(cell for cell in results.cells if (cell.label, cell.workload, cell.concurrency) == wanted)


# -- tokens out of chunks


def answer(
    chunks: list[tuple[float, str, int | None]], usage: int | None = None, cut: int = 1 << 16, max_tokens: int = 32
) -> TimedAnswer:
    """Read a stream of chunks (moment, text, usage so far), whose bytes come in pieces of `cut`."""
    arrivals: list[tuple[float, bytes]] = []
    for moment, text, total in [*chunks, (chunks[-1][0] if chunks else 0.5, "", usage)]:
        choice = {"delta": {"content": text}, "finish_reason": None if text else "stop"}
        event = {"choices": [choice]} | ({} if total is None else {"usage": {"completion_tokens": total}})
        data = b": ping\n\ndata: " + json.dumps(event, ensure_ascii=False).encode() + b"\r\n\r\n"
        arrivals += [(moment, data[start : start + cut]) for start in range(0, len(data), cut)]
    return read_answer("http://h", ServerReply(0.25, [*arrivals, (9.0, b"data: [DONE]")]), max_tokens)


@pytest.mark.parametrize("cut", [1, 7, 1 << 16])
def test_tokens_that_come_together_share_their_wait(cut: int) -> None:
    found = answer([(1.0, "é\u2028", 1), (1.4, " b c d e", 5), (1.5, " f", 6)], 6, cut)
    assert (found.num_tokens, found.sent, found.end) == (6, 0.25, 1.5)
    assert list(found.gaps()) == pytest.approx([0.1] * 5)
    assert "".join(found.tokens) == "é\u2028 b c d e f"


def test_where_usage_comes_once_tokens_go_by_the_text() -> None:
    found = answer([(1.0, "xx", None), (2.0, "xxxxxx", None), (3.0, "xxxx", None)], 9)
    assert [count for _, count in found.commits] == [2, 4, 3]


def test_an_empty_answer_is_an_answer() -> None:
    found = answer([], 1)
    assert (found.num_tokens, list(found.gaps()), found.end) == (1, [], 0.5)


@pytest.mark.parametrize(
    ("chunks", "usage"),
    [
        ([(0.1, "word", None)], None),
        ([(0.1, "word", None)] * 9, 3),
        ([(0.1, "word", None)], 0),
        ([(0.1, "word " * 9, None)], 35),
        ([(0.1, "word", None)], 30),
    ],
    ids=["no usage", "more chunks", "no tokens", "more than requested", "more than bytes"],
)
def test_usage_that_the_text_contradicts_is_noticed(
    chunks: list[tuple[float, str, int | None]], usage: int | None
) -> None:
    with pytest.raises(TokenCountMismatch) as caught:
        answer(chunks, usage)
    assert caught.value.url == "http://h"


# -- counters


def test_counters_of_several_engines_are_added_and_differences_taken() -> None:
    def text(scale: int) -> str:
        engines = [
            f'vllm:spec_decode_num_drafts_total{{engine="{engine}"}} {10.0 * scale}\n'
            f'vllm:spec_decode_num_draft_tokens_total{{engine="{engine}"}} {30.0 * scale}\n'
            f'vllm:spec_decode_num_accepted_tokens_total{{engine="{engine}"}} {12.0 * scale}\n'
            f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="{engine}",position="0"}} {7 * scale}\n'
            f'vllm:generation_tokens_total{{engine="{engine}"}} {2.2e1 * scale}\n'
            f'vllm:spec_decode_num_drafts_created{{engine="{engine}"}} 1.7947243321307905e+09\n'
            for engine in (0, 1)
        ]
        return "# TYPE vllm:spec_decode_num_drafts counter\n" + "".join(engines) + "vllm:generation_tokens_total NaN\n"

    growth = Counters.parse(text(3)).since(Counters.parse(text(1)))
    stats = growth.stats(88)
    assert (growth["generation_tokens"], stats.num_drafts, stats.num_draft_tokens) == (88, 40, 120)
    assert stats.acceptance_rate == pytest.approx(0.4)
    assert stats.mean_acceptance_length == pytest.approx(88 / 40)


@pytest.mark.parametrize(
    ("growth", "words"),
    [
        ({"generation_tokens": 300}, "other clients use it too"),
        ({"tokens_predicted": 50}, "usage is wrong"),
        ({"spec_decode_num_draft_tokens": 20, "spec_decode_num_accepted_tokens": 30}, "30 tokens accepted of 20"),
        ({"spec_decode_num_draft_tokens": 200, "spec_decode_num_accepted_tokens": 150}, "usage is 100"),
    ],
)
def test_counters_that_disagree_with_usage_are_noticed(growth: dict[str, float], words: str) -> None:
    assert words in str(Counters(growth).contradiction(tokens=100, answers=4))
    assert Counters(generation_tokens=103).contradiction(tokens=100, answers=4) is None


def test_counters_that_count_something_else_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "PATIENCE_S", 0.1)
    with FakeServer(metrics="vllm", metrics_factor=2) as server, pytest.raises(TokenCountMismatch):
        bench(server)
    with FakeServer(metrics="vllm", metrics_factor=2) as server:
        assert cell(finished(server, counters=False)).tokens == 240
        assert "/metrics" not in server.paths


def test_counters_that_lag_are_waited_for() -> None:
    with FakeServer(tokens=10, per_chunk=2, metrics="vllm", metrics_lag_s=0.04) as server:
        assert cell(finished(server, prompts(2))).acceptance_rate == pytest.approx(1)


# -- a good server


def test_a_run_gives_every_figure_a_server_can_give() -> None:
    with FakeServer(per_chunk=4, metrics="vllm") as server:
        measured = finished(server, prompts(6) + prompts(3, "code"), concurrency=[1, 3])
        asked = [body["messages"][0]["content"] for body in server.asked if "question" in str(body["messages"])]
    assert sorted(asked) == sorted(2 * [prompt.turns[0] for prompt in prompts(6) + prompts(3, "code")])
    assert {(found.workload, found.concurrency) for found in measured.cells} == {
        (workload, level) for workload in ("all", "chat", "code") for level in (1, 3)
    }
    found = cell(measured)
    assert (found.method, found.answers, found.tokens) == ("endpoint", 9, 9 * 40)
    assert found.tokens_per_s == pytest.approx(found.tokens / found.seconds)
    assert (found.speedup, found.too_short, found.looping) == (None, None, 0)
    assert (found.tau, found.acceptance_rate) == (pytest.approx(4), pytest.approx(1))
    assert found.ttft_s.p50 < found.request_s.p50
    assert found.inter_token_s.p50 < found.ttft_s.p50
    assert measured.endpoint == {"url": server.url + "/v1", "model": "toy"}


@pytest.mark.parametrize(
    "behaviour", [{"usage": "running"}, {"usage": "final"}, {"strict": True}, {"metrics": "llamacpp"}]
)
def test_tokens_are_counted_by_usage(behaviour: dict[str, Any]) -> None:
    with FakeServer(per_chunk=3, **behaviour) as server:
        found = cell(finished(server))
    assert (found.answers, found.tokens, found.tau) == (6, 240, None)


def test_a_conversation_goes_on_from_what_was_answered() -> None:
    with FakeServer(tokens=5) as server:
        finished(server, prompts(2, turns=3))
        last = next(body["messages"] for body in server.asked if len(body["messages"]) == 5)
    assert [entry["role"] for entry in last] == ["user", "assistant", "user", "assistant", "user"]
    assert len(last[1]["content"].split()) == 5


# -- against a second server


def test_a_baseline_gives_a_paired_speed_up() -> None:
    with FakeServer(per_chunk=4, chunk_s=0.003) as fast, FakeServer(per_chunk=1, chunk_s=0.003) as plain:
        measured = finished(fast, baseline_url=plain.url)
    found, base = cell(measured), cell(measured, "plain")
    assert (base.method, base.speedup) == ("none", None)
    assert found.speedup.pairs == found.decode_speedup.pairs == 6
    assert found.speedup.ratio > 1.5  # 4 by its clock, less on a busy machine
    assert found.identical is True


def test_answers_that_differ_from_the_baselines_are_reported() -> None:
    with FakeServer() as one, FakeServer(wording="another model") as other:
        assert cell(finished(one, prompts(5), baseline_url=other.url)).identical is False


def test_both_servers_are_asked_the_same_and_seeded_the_same() -> None:
    with FakeServer(tokens=4) as one, FakeServer(tokens=4, wording="another model") as other:
        measured = finished(one, prompts(3, turns=1), baseline_url=other.url, temperature=0.7, seed=3)

        def keys(server: FakeServer) -> list[str]:
            return sorted(str(body["messages"]) + str(body.get("seed")) for body in server.asked)

        assert keys(one) == keys(other)
        assert len({body["seed"] for body in one.asked if "question" in str(body["messages"])}) == 3
    assert cell(measured).identical is None


# -- what the user may get wrong


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("http://localhost:8000", "http://localhost:8000/v1"),
        ("http://localhost:8000/", "http://localhost:8000/v1"),
        ("https://host/v1/chat/completions", "https://host/v1"),
        ("https://host/toy/v1/completions", "https://host/toy/v1"),
        ("https://host/openai", "https://host/openai"),
        ("http://[::1]:8000", "http://[::1]:8000/v1"),
    ],
)
def test_a_url_may_be_written_in_several_ways(given: str, url: str) -> None:
    assert base_url(given, "endpoint") == url


@pytest.mark.parametrize(
    "given", ["", "localhost:8000", "ftp://host", "http://", "http://me:secret@host", "http://h/?a=b", "http://a b/"]
)
def test_what_is_no_url_is_refused_by_the_options_name(given: str) -> None:
    with refused("baseline_endpoint") as caught:
        base_url(given, "baseline_endpoint")
    assert "secret" not in str(caught.value)


def test_of_several_models_one_must_be_named() -> None:
    with FakeServer(models=("a", "b")) as server:
        with refused("model"):
            bench(server)
        assert finished(server, model="b").model == server.asked[-1]["model"] == "b"


def test_the_key_is_passed_on_and_never_shown() -> None:
    with FakeServer(key="sk-very-secret") as server:
        assert cell(finished(server, api_key="sk-very-secret")).answers == 6
        with pytest.raises(EndpointError) as caught:
            bench(server, api_key="sk-wrong-secret")
    assert caught.value.status == 401
    assert "Bearer ***" in str(caught.value)
    assert "sk-wrong-secret" not in str(caught.value)
    assert "secret" not in repr(ServerUnderTest(url="http://h", timeout_s=1, api_key="sk-very-secret"))


def test_a_key_that_cannot_be_one_is_refused_and_not_shown() -> None:
    with FakeServer() as server, refused("api_key") as caught:
        bench(server, api_key="two\nlines secret")
    assert "secret" not in str(caught.value)


# -- what the server may get wrong


@pytest.mark.parametrize("greeting", [None, b"220 mail ready\r\n"])
def test_an_address_without_a_server_is_reported_with_its_url(greeting: bytes | None) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"

        def greet() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(greeting)
                connection.recv(1000)

        if greeting is None:
            listener.close()
        else:
            threading.Thread(target=greet, daemon=True).start()
        with pytest.raises(EndpointError) as caught:
            ServerUnderTest(url=url, timeout_s=5).request(url)
    assert (caught.value.url, caught.value.status) == (url, None)


FAULTS = {
    "wrong list": None,
    "500": 500,
    "not a stream": None,
    "drops": None,
    "ends early": None,
    "not json": None,
    "other protocol": None,
    "error event": None,
    "hangs": None,
}


@pytest.mark.parametrize(("fault", "status"), FAULTS.items())
def test_a_server_that_is_wrong_from_the_start_is_refused_at_once(fault: str, status: int | None) -> None:
    with FakeServer(fault=fault) as server, pytest.raises(EndpointError) as caught:
        bench(server, timeout_s=0.1 if fault == "hangs" else 5)
    assert caught.value.url.startswith(server.url)
    assert caught.value.status == status
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("fault", list(FAULTS)[1:])
def test_what_was_measured_before_a_fault_is_kept(fault: str) -> None:
    with FakeServer(fault=fault, fault_from=2 + 4) as server:  # after two that warm up and four answers
        results, stopped = bench(server, timeout_s=1.5 if fault == "hangs" else 5)
    assert isinstance(stopped, EndpointError)
    assert not results.complete
    assert cell(results).answers == 4


@pytest.mark.filterwarnings("error")
def test_a_fault_of_one_request_ends_those_beside_it() -> None:
    with FakeServer(tokens=30, chunk_s=0.01, fault="500", fault_from=1 + 3 + 2) as server:
        with pytest.raises(EndpointError):
            bench(server, concurrency=[3])
        assert len(server.asked) == 1 + 3 + 3


# -- Ctrl-C


@pytest.mark.parametrize("reason", [KeyboardInterrupt, MemoryError])
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
    assert "seconds per token of the baseline" in captured.err
    results = Results.load(tmp_path / "results.json")
    assert results.endpoint["url"].startswith(server.url)
    assert {cell.label: cell.speedup is not None for cell in results.cells} == {"plain": False, "endpoint": True}
    assert "<html" in (tmp_path / "report.html").read_text()


def test_a_server_alone_has_no_speedup_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer() as server:
        assert run(["bench", "--endpoint", server.url, *CHAT, "--out", str(tmp_path)]) == 0
    assert "give --baseline-endpoint" in capsys.readouterr().err
    assert all(cell.speedup is None for cell in Results.load(tmp_path / "results.json").cells)


def test_a_server_that_is_not_there_leaves_no_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "--endpoint", "http://127.0.0.1:9", *CHAT, "--out", str(tmp_path / "out")]) == 1
    assert "is the server running" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_more_requests_at_once_than_prompts_are_refused_before_anything_is_asked(tmp_path: Path) -> None:
    with FakeServer() as server:
        few = ("--per-workload", "2", "--concurrency", "3")
        assert run(["bench", "--endpoint", server.url, *CHAT, *few, "--out", str(tmp_path / "out")]) == 1
        assert not server.paths
