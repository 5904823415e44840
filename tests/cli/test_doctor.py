"""`paceline doctor`, `models` and `pull` on machines that have something wrong with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.cli.app import run
from paceline.cli.doctor import choices
from paceline.models.backends.torch import TorchKernels
from paceline.models.load import hub
from paceline.platform import cpu as machine


def examined(capsys: pytest.CaptureFixture[str], code: int = 0) -> tuple[dict[str, Any], str]:
    """The JSON report, and what is printed without --json."""
    assert run(["doctor", "--json"]) == code
    report = json.loads(capsys.readouterr().out)
    assert run(["doctor"]) == code
    return report, capsys.readouterr().out


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_the_report_has_exactly_these_parts(empty_cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report, text = examined(capsys)
    assert set(report) == {"paceline", "machine", "torch", "use", "cache", "findings"}
    kernels = {"kernels", "kernels_status", "exact", "activations", "kv_dtype"}
    assert set(report["use"]) == kernels | {"device", "dtype", "threads"}
    assert isinstance(report["use"]["exact"], bool)
    assert report["machine"]["usable_cores"] == machine.usable_cores()
    assert report["torch"]["version"] in text
    assert not empty_cache.exists(), "looking must not create the folder"


def test_a_cache_in_fp8_is_offered_where_it_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = TorchKernels()
    kernels.captures = True
    monkeypatch.setattr("paceline.models.kernels.kernels_for", lambda device: kernels)
    monkeypatch.setattr("paceline.models.load.open_model.choose_device", lambda name: torch.device("cuda"))
    for capability, offered in (((8, 0), ["auto"]), ((9, 0), ["auto", "fp8"])):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert choices([])["kv_dtype"] == offered


@pytest.mark.parametrize(
    ("device", "keeps", "words"),
    [
        ("cpu", True, "as stored"),
        ("cpu", False, "float32"),
        ("cuda", True, "bfloat16, or quantised as stored"),
        ("cuda", False, "bfloat16, quantised ones expanded to it"),
    ],
)
def test_how_weights_lie_in_memory_is_what_the_kernels_at_hand_do(
    device: str, keeps: bool, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = TorchKernels()
    kernels.keeps_codes = keeps
    monkeypatch.setattr("paceline.models.kernels.kernels_for", lambda device: kernels)
    monkeypatch.setattr("paceline.models.load.open_model.choose_device", lambda name: torch.device(device))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert choices([])["dtype"] == words


def test_no_cached_model_is_a_hint_and_not_an_error(empty_cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report, text = examined(capsys)
    assert any("paceline pull smollm2" in finding["advice"] for finding in report["findings"])
    assert "paceline pull smollm2" in text


def test_an_avoided_amx_trap_is_reported(empty_cache, monkeypatch, capsys) -> None:
    empty_cache.mkdir()
    monkeypatch.setattr(machine, "guard_amx", lambda cache: f"AMX traps ({cache == empty_cache})")
    assert "! AMX traps (True)" in examined(capsys)[1]


def test_little_memory_is_reported(empty_cache, monkeypatch, capsys) -> None:
    little = machine.MachineMemory(total=2 << 30, available=300_000_000)
    monkeypatch.setattr(machine, "memory", lambda: little)
    assert "only 300 MB of memory is free" in examined(capsys)[1]


def test_missing_native_kernels_are_reported_once_and_are_exit_code_1(empty_cache, monkeypatch, capsys) -> None:
    from paceline.models.load import open_model as runtime
    from paceline.native import library as native_library

    monkeypatch.delenv("PACELINE_KERNELS", raising=False)
    monkeypatch.setattr(runtime, "choose_device", lambda name: runtime.torch.device("cpu"))
    monkeypatch.setattr(native_library, "best_library", lambda: (None, "no native kernels: they were not built"))
    report, text = examined(capsys, code=1)
    assert report["use"]["exact"] is False
    assert [finding["slow"] for finding in report["findings"] if "built" in finding["problem"]] == [True]
    assert "they were not built → install paceline's wheel" in text
    assert text.count("they were not built") == 1


def test_kernels_slowed_by_hand_are_reported(empty_cache, monkeypatch, capsys) -> None:
    monkeypatch.setenv("PACELINE_KERNELS", "torch")
    assert "PACELINE_KERNELS=torch asks for them → unset it" in examined(capsys, code=1)[1]


def test_a_broken_torch_is_fatal(empty_cache, monkeypatch, capsys) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "torch", None)
    report, text = examined(capsys, code=1)
    assert report["torch"] is None
    assert report["use"] is None
    assert "✗ torch cannot be imported" in text


def test_an_unwritable_cache_is_fatal_only_without_a_model(empty_cache, monkeypatch, capsys) -> None:
    empty_cache.parent.joinpath("cache").write_text("in the way")
    monkeypatch.setenv("PACELINE_HOME", str(empty_cache / "below"))
    report, _ = examined(capsys, code=1)
    assert report["cache"]["writable"] is False
    cached = hub.CachedModel(name="mine", path=Path("/x"), bytes=1, source="hub", format="safetensors")
    monkeypatch.setattr(hub, "cached_models", lambda: [cached])
    report, text = examined(capsys, code=0)
    assert report["cache"]["models"] == ["mine"]
    assert "! the cache folder" in text


def test_models_says_how_to_pull_when_there_are_none(empty_cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["models"]) == 0
    assert "paceline pull smollm2" in capsys.readouterr().err
    assert run(["models", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"cache": str(empty_cache), "models": [], "tables": []}


def test_models_lists_names_and_sizes(empty_cache, monkeypatch, capsys) -> None:
    cached = hub.CachedModel(name="a/b", path=Path("/x/a--b"), bytes=1_500_000_000, source="hub", format="safetensors")
    monkeypatch.setattr(hub, "cached_models", lambda: [cached])
    assert run(["models"]) == 0
    assert capsys.readouterr().out == "model      size  source\na/b      1.5 GB  hub\n"


def test_pull_reports_its_progress_in_lines_where_there_is_no_terminal(monkeypatch, capsys) -> None:
    def resolve(name: str, progress: hub.PullProgress | None = None) -> Path:
        assert progress is not None
        progress("asking the hub", 0, None)
        for done in range(0, 1_000_001, 50_000):
            progress("downloading", done, 1_000_000)
        return Path("/cache/some")

    monkeypatch.setattr(hub, "resolve", resolve)
    assert run(["pull", "some"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "some is ready: /cache/some\n"
    lines = captured.err.splitlines()
    assert lines[:2] == ["asking the hub …", "downloading: 0 % of 1 MB"]
    assert lines[-1] == "downloading: 100 % of 1 MB"
    assert len(lines) == 12
