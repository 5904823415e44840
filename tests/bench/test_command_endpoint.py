"""`paceline bench --endpoint` from its arguments to its files, against a server that behaves and one that lies."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.bench.results import Results
from paceline.cli.app import run
from tests.bench.fake_server import FakeServer

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


def test_a_server_that_lies_about_its_tokens_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer(usage_factor=2.0, logprobs=True) as server:
        assert run(["bench", "--endpoint", server.url, *CHAT, "--out", str(tmp_path)]) == 1
    assert "error: " in capsys.readouterr().err


def test_a_server_that_is_not_there_leaves_no_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "--endpoint", "http://127.0.0.1:9", *CHAT, "--out", str(tmp_path / "out")]) == 1
    assert "no server answers" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
