"""Cores and memory, read from injected files, and the AMX guard with children that live, die or hang."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from paceline.platform import cpu as machine

WITH_AMX = "processor\t: 0\nmodel name\t: A Xeon (with tiles)\nflags\t\t: fpu avx2 avx512f amx_bf16 amx_tile amx_int8\n"
WITHOUT_AMX = "processor\t: 0\nmodel name\t: A Xeon\nflags\t\t: fpu fma avx2 avx512f\n"
HEALTHY = (sys.executable, "-c", "pass")
TRAPS = (sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGILL)")
FAILS = (sys.executable, "-c", "raise SystemExit(3)")
HANGS = (sys.executable, "-c", "import time; time.sleep(60)")
MUST_NOT_RUN = ("/no/such/program",)


@pytest.fixture(autouse=True)
def _no_isa_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """setenv first, so that whatever the guard writes is undone after the test."""
    for name in machine.AMX_VARIABLES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def test_a_cpu_without_amx_costs_no_child(tmp_path: Path) -> None:
    assert machine.guard_amx(tmp_path, cpuinfo=WITHOUT_AMX, probe=MUST_NOT_RUN) is None
    assert "ONEDNN_MAX_CPU_ISA" not in os.environ
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", machine.AMX_VARIABLES)
def test_what_the_user_set_is_left_alone(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "AVX2")
    assert machine.guard_amx(tmp_path, cpuinfo=WITH_AMX, probe=MUST_NOT_RUN) is None
    assert os.environ[name] == "AVX2"


def test_a_trap_is_mended_noted_and_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    note = machine.guard_amx(tmp_path / "new", cpuinfo=WITH_AMX, probe=TRAPS)
    assert note is not None
    assert "traps" in note
    assert os.environ["ONEDNN_MAX_CPU_ISA"] == "AVX512_CORE_BF16"
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA")
    assert machine.guard_amx(tmp_path / "new", cpuinfo=WITH_AMX, probe=MUST_NOT_RUN) == note
    assert os.environ["ONEDNN_MAX_CPU_ISA"] == "AVX512_CORE_BF16"


def test_a_healthy_amx_is_used_and_remembered(tmp_path: Path) -> None:
    assert machine.guard_amx(tmp_path, cpuinfo=WITH_AMX, probe=HEALTHY) is None
    assert machine.guard_amx(tmp_path, cpuinfo=WITH_AMX, probe=TRAPS) is None
    assert "ONEDNN_MAX_CPU_ISA" not in os.environ


def test_another_cpu_is_tested_anew(tmp_path: Path) -> None:
    machine.guard_amx(tmp_path, cpuinfo=WITH_AMX, probe=HEALTHY)
    assert machine.guard_amx(tmp_path, cpuinfo=WITH_AMX.replace("A Xeon", "B Xeon"), probe=TRAPS) is not None


@pytest.mark.parametrize("probe", [HANGS, MUST_NOT_RUN], ids=["hangs", "cannot start"])
def test_amx_that_cannot_be_tested_is_not_used_and_not_remembered(probe: tuple[str, ...], tmp_path: Path) -> None:
    note = machine.guard_amx(tmp_path, cpuinfo=WITH_AMX, probe=probe, timeout_s=0.2)
    assert note is not None
    assert "could not test" in note
    assert os.environ["ONEDNN_MAX_CPU_ISA"] == "AVX512_CORE_BF16"
    assert not list(tmp_path.iterdir())


def test_an_ordinary_failure_of_the_child_says_nothing_about_amx(tmp_path: Path) -> None:
    assert machine.guard_amx(tmp_path, cpuinfo=WITH_AMX, probe=FAILS) is None
    assert "ONEDNN_MAX_CPU_ISA" not in os.environ
    assert not list(tmp_path.iterdir())


def test_an_unwritable_or_spoilt_cache_only_means_testing_again(tmp_path, monkeypatch) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    spoilt = tmp_path / "spoilt"
    spoilt.mkdir()
    (spoilt / "amx.json").write_text("[1, ")
    for cache in (blocked, spoilt, None):
        assert machine.guard_amx(cache, cpuinfo=WITH_AMX, probe=TRAPS) is not None
        monkeypatch.delenv("ONEDNN_MAX_CPU_ISA")
    assert json.loads((spoilt / "amx.json").read_text())["traps"] is True


def test_the_real_probe_runs_where_there_is_no_amx_to_trap_on(tmp_path: Path) -> None:
    if machine.announces_amx():
        pytest.skip("this machine has AMX: its own guard decides")
    assert machine.guard_amx(tmp_path, cpuinfo=WITH_AMX) is None
    assert json.loads((tmp_path / "amx.json").read_text())["traps"] is False


def test_the_cpu_is_read_from_cpuinfo() -> None:
    assert machine.cpu_name(WITH_AMX) == "A Xeon (with tiles)"
    assert machine.isa(WITH_AMX) == ["amx_tile", "amx_bf16", "amx_int8", "avx512f", "avx2"]
    assert machine.isa("Features\t: fp asimd sve bf16\n") == ["sve", "bf16", "asimd"]
    assert machine.cpu_name("") != ""


def _write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def _cores_allowed(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(count)), raising=False)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 8),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cpu.max": "max 100000\n"}, 8),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/cpu.max": "350000 100000\n"}, 3),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "50000 100000\n"}, 1),
        (
            {
                "proc/self/cgroup": "3:cpu,cpuacct:/pod\n0::/\n",
                "sys/fs/cgroup/cpu/pod/cpu.cfs_quota_us": "200000\n",
                "sys/fs/cgroup/cpu/pod/cpu.cfs_period_us": "100000\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            2,
        ),
    ],
    ids=["no cgroup", "v2 unlimited", "v2 limit above", "less than one core", "v1"],
)
def test_usable_cores_heed_affinity_and_the_container(files, expected, tmp_path, monkeypatch) -> None:
    _cores_allowed(8, monkeypatch)
    assert machine.usable_cores(_write(tmp_path, files)) == expected
    _cores_allowed(1, monkeypatch)
    assert machine.usable_cores(tmp_path) == 1


MEMINFO = "MemTotal:       8000000 kB\nMemFree:        1000000 kB\nMemAvailable:   5000000 kB\n"


HOST = 8_000_000 * 1024
V2 = {
    "proc/self/cgroup": "0::/pod\n",
    "sys/fs/cgroup/pod/memory.max": "2000000000\n",
    "sys/fs/cgroup/pod/memory.current": "1500000000\n",
    "sys/fs/cgroup/pod/memory.stat": "anon 1000000000\ninactive_file 300000000\n",
    "sys/fs/cgroup/memory.max": "max\n",
}
V1 = {
    "proc/self/cgroup": "4:memory:/\n",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
}


@pytest.mark.parametrize(
    ("files", "total", "available"),
    [({}, HOST, 5_000_000 * 1024), (V2, 2_000_000_000, 800_000_000), (V1, HOST, None)],
    ids=["no limit", "pages that can be reclaimed are free", "a limit above the host's"],
)
def test_memory_heeds_the_containers_limit(files, total, available, tmp_path: Path) -> None:
    found = machine.memory(_write(tmp_path, {"proc/meminfo": MEMINFO, **files}))
    assert found.total == total
    assert available is None or found.available == available
