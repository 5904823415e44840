"""This machine: its CPU, the usable cores and memory, and the AMX guard. No torch.

Some virtual machines announce AMX and then trap on it: the first bf16 product through oneDNN ends in SIGILL. oneDNN
reads ONEDNN_MAX_CPU_ISA before its first product and never again, so `guard_amx` must run before any model is built.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.platform.python_process import NO_CURRENT_FOLDER

AMX_VARIABLES = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")  # the second is oneDNN's older spelling
AMX_CEILING = "AVX512_CORE_BF16"
AMX_FLAGS = frozenset({"amx_tile", "amx_bf16"})
AMX_TIMEOUT_S = 120.0

_AMX_PROBE = f"""{NO_CURRENT_FOLDER}
import torch
for rows in (1, 256):
    (torch.ones(rows, 256, dtype=torch.bfloat16) @ torch.ones(256, 256, dtype=torch.bfloat16)).sum().item()
"""
# Reported to the user, best first within a family.
_NOTABLE_ISA = (
    *("amx_tile", "amx_bf16", "amx_int8", "avx512_fp16", "avx512_bf16", "avx512_vnni", "avx512f", "avx_vnni", "avx2"),
    *("fma", "sve", "bf16", "asimd"),
)


# -- the CPU


def read_cpuinfo() -> str:
    """Read /proc/cpuinfo; '' where there is none."""
    try:
        return Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:
        return ""


def _cpuinfo_field(cpuinfo: str, *names: str) -> str:
    for line in cpuinfo.splitlines():
        key, _, value = line.partition(":")
        if key.strip() in names:
            return value.strip()
    return ""


def cpu_flags(cpuinfo: str | None = None) -> frozenset[str]:
    cpuinfo = read_cpuinfo() if cpuinfo is None else cpuinfo
    return frozenset(_cpuinfo_field(cpuinfo, "flags", "Features").split())


def cpu_name(cpuinfo: str | None = None) -> str:
    cpuinfo = read_cpuinfo() if cpuinfo is None else cpuinfo
    return _cpuinfo_field(cpuinfo, "model name", "Model") or platform.processor() or platform.machine() or "unknown"


def isa(cpuinfo: str | None = None) -> list[str]:
    """Return the instruction sets that decide how fast a product is."""
    flags = cpu_flags(cpuinfo)
    return [name for name in _NOTABLE_ISA if name in flags]


# -- limits of the container and the scheduler


def _cgroup_folders(root: Path, controller: str) -> list[Path]:
    """Return the cgroup folders whose limits hold for this process: its own and their parents, version 2 and 1."""
    try:
        entries = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    folders: list[Path] = []
    for entry in entries:
        _, _, rest = entry.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        base = root / "sys/fs/cgroup" / (controllers and controller)
        own = base / path.strip("/")
        folders += [folder for folder in (own, *own.parents) if folder == base or base in folder.parents]
    return folders


def _read_words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []


def _cgroup_cores(root: Path) -> float | None:
    limits: list[float] = []
    for folder in _cgroup_folders(root, "cpu"):
        words = _read_words(folder / "cpu.max") or (
            _read_words(folder / "cpu.cfs_quota_us") + _read_words(folder / "cpu.cfs_period_us")
        )
        if len(words) == 2 and words[0] not in ("max", "-1") and int(words[1]) > 0:
            limits.append(int(words[0]) / int(words[1]))
    return min(limits, default=None)


def usable_cores(root: Path = Path("/")) -> int:
    """Count the cores that this process may use: in its affinity mask, and whole ones in the container's quota."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        cores = os.cpu_count() or 1
    quota = _cgroup_cores(root)
    return max(1, cores if quota is None else min(cores, int(quota)))


@dataclass(frozen=True, kw_only=True)
class MachineMemory:
    """Bytes of memory, bounded by the container's limit; 0 when unknown."""

    total: int
    available: int


def memory(root: Path = Path("/")) -> MachineMemory:
    total, available = _host_memory(root)
    for folder in _cgroup_folders(root, "memory"):
        limit = _read_words(folder / "memory.max") or _read_words(folder / "memory.limit_in_bytes")
        used = _read_words(folder / "memory.current") or _read_words(folder / "memory.usage_in_bytes")
        if not limit or limit[0] == "max" or (total and int(limit[0]) >= total):
            continue
        # Pages the kernel would reclaim under pressure (file pages) count as free.
        stat = _read_words(folder / "memory.stat")
        cached = next((int(v) for k, v in zip(stat[::2], stat[1::2], strict=False) if k == "inactive_file"), 0)
        total = int(limit[0])
        free = total - (int(used[0]) if used else 0) + cached
        available = max(0, min(available or free, free))
    return MachineMemory(total=total, available=available)


def _host_memory(root: Path) -> tuple[int, int]:
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:
        try:
            total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        except (AttributeError, OSError, ValueError):
            total = 0
        return total, total
    kib = {line.split(":")[0]: int(line.split()[1]) for line in lines if len(line.split()) > 1}
    return kib.get("MemTotal", 0) * 1024, kib.get("MemAvailable", kib.get("MemTotal", 0)) * 1024


# -- AMX


def announces_amx(cpuinfo: str | None = None) -> bool:
    return cpu_flags(cpuinfo) >= AMX_FLAGS


def guard_amx(
    cache: Path | None = None,
    *,
    cpuinfo: str | None = None,
    probe: Sequence[str] | None = None,
    timeout_s: float = AMX_TIMEOUT_S,
) -> str | None:
    """Keep oneDNN off AMX where it traps; return a note for the user if so.

    Costs nothing without AMX flags or when the user has set the variable. Otherwise one bf16 product runs in a child
    process, and its outcome is remembered under `cache` until the CPU, the kernel or torch changes.
    """
    cpuinfo = read_cpuinfo() if cpuinfo is None else cpuinfo
    if not announces_amx(cpuinfo) or any(name in os.environ for name in AMX_VARIABLES):
        return None
    key = f"{cpu_name(cpuinfo)} | {platform.release()} | torch {_torch_version()}"
    traps = _recall(cache, key)
    if traps is None:
        try:
            traps = _dies(probe or (sys.executable, "-c", _AMX_PROBE), timeout_s)
        except (OSError, subprocess.TimeoutExpired):
            os.environ[AMX_VARIABLES[0]] = AMX_CEILING
            return f"could not test whether AMX works on this CPU: not using it ({AMX_VARIABLES[0]}={AMX_CEILING})"
        if traps is not None:
            _remember(cache, key, traps)
    if not traps:
        return None
    os.environ[AMX_VARIABLES[0]] = AMX_CEILING
    return f"this CPU announces AMX but traps on it: not using it ({AMX_VARIABLES[0]}={AMX_CEILING})"


def _dies(command: Sequence[str], timeout_s: float) -> bool | None:
    """Return whether a signal ended the command; None for an ordinary failure, which is no evidence about AMX."""
    finished = subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=timeout_s
    )
    return finished.returncode < 0 if finished.returncode <= 0 else None


def _torch_version() -> str:
    if torch := sys.modules.get("torch"):
        return str(torch.__version__)
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("torch")
    except PackageNotFoundError:
        return "unknown"


def _recall(cache: Path | None, key: str) -> bool | None:
    if cache is None:
        return None
    try:
        stored = json.loads((cache / "amx.json").read_text())
    except (OSError, ValueError):
        return None
    return stored.get("traps") if isinstance(stored, dict) and stored.get("key") == key else None


def _remember(cache: Path | None, key: str, traps: bool) -> None:
    if cache is None:
        return
    draft = cache / f"amx.json.{os.getpid()}"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        draft.write_text(json.dumps({"key": key, "traps": traps}))
        draft.replace(cache / "amx.json")
    except OSError:
        pass  # tested again next time
