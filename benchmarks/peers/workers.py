"""The driver's side of a worker: a process in a peer's environment that answers one request at a time.

Whatever goes wrong with a worker (no environment, a crash, rubbish on its stdout, silence) is a WorkerFailed that tells
what to do, so that the others' measurements go on. The clock around an answer is the driver's own, the same for all.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from ctypes.util import find_library
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.platform.cpu import usable_cores

HERE = Path(__file__).parent
OURS = "paceline"  # runs in the driver's own environment
START_S, ANSWER_S = 600.0, 300.0  # vLLM compiles at its first start
GRACE_S = 5.0


class WorkerFailed(Exception):
    """This worker is lost; the message gives the reason and where to look."""


@dataclass(frozen=True, kw_only=True)
class Reply:
    tokens: list[int]
    seconds: float  # time of the whole request, prompt included
    first_s: float  # until the first token
    overran: int = 0  # tokens past EOS or max_tokens, cut off and not counted


def interpreter(peer: str, environments: Path | None) -> str:
    if peer == OURS:
        return sys.executable
    script = f"benchmarks/peers/environments.sh {environments or 'DIR'} {peer}"
    if environments is None:
        raise WorkerFailed(f"no environments given; make one with {script} and name DIR with --environments")
    python = environments / peer / "bin" / "python"
    if not python.is_file():
        raise WorkerFailed(f"no environment for {peer} under {environments}; make it with: {script}")
    return str(python)


def surroundings(peer: str, threads: int, home: Path, environments: Path | None = None) -> dict[str, str]:
    """Variables of a worker: as many threads for every library, and no way from our packages into a peer's."""
    kept = {key: value for key, value in os.environ.items() if peer == OURS or key not in ("PYTHONPATH", "PYTHONHOME")}
    limits = {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    quiet = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PACELINE_HOME": str(home)}
    return kept | limits | quiet | (_vllm_libraries(environments) if peer == "vllm" and environments else {})


def _vllm_libraries(environments: Path) -> dict[str, str]:
    """Return the libraries that vLLM's manual has users preload (one is a dependency of its wheel), as variables."""
    openmp = environments / "vllm" / "lib" / "libiomp5.so"
    allocator = find_library("tcmalloc_minimal")
    found = [*([allocator] if allocator else []), *([str(openmp.resolve())] if openmp.exists() else [])]
    return {"LD_PRELOAD": ":".join(found), "KMP_BLOCKTIME": "5", "KMP_TPAUSE": "0"} if found else {}


class Worker:
    def __init__(
        self, name: str, command: Sequence[str], environment: Mapping[str, str], log: Path, cores: Sequence[int] = ()
    ) -> None:
        self.name, self.log = name, log
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=dict(environment),
                start_new_session=True,  # it may start processes of its own, which go with it
            )
        if cores:
            os.sched_setaffinity(self._process.pid, cores)  # before it has started a thread
        self._lines: queue.Queue[bytes | None] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()

    def ready(self, timeout_s: float = START_S) -> dict[str, Any]:
        """The worker's description of itself, once it has loaded its model."""
        about = self._hear(timeout_s).get("ready")
        if not isinstance(about, dict):
            raise WorkerFailed(f"{self.name} did not say it is ready; see {self.log}")
        return about

    def ask(self, request: Mapping[str, Any], timeout_s: float = ANSWER_S) -> Reply:
        started = time.perf_counter()
        self._tell(request)
        answer = self._hear(timeout_s)
        seconds = time.perf_counter() - started
        tokens, first_s = answer.get("tokens"), answer.get("first_s")
        if not isinstance(tokens, list) or not tokens or not all(type(token) is int for token in tokens):
            raise WorkerFailed(f"{self.name} answered without tokens: {_shortened(answer)}; see {self.log}")
        if not isinstance(first_s, float) or not 0 < first_s <= seconds:
            raise WorkerFailed(f"{self.name} gave {first_s!r} s to the first token of {seconds:.3f} s; see {self.log}")
        kept = cut(tokens, request["max_tokens"], request["eos"])
        return Reply(tokens=kept, seconds=seconds, first_s=first_s, overran=len(tokens) - len(kept))

    def cpu_seconds(self) -> float:
        """Spent by the process so far; 0 where the system does not say."""
        try:
            fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return 0.0
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def stop(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            self._process.stdin.close()  # the end of stdin is the end of its work
            self._process.wait(GRACE_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # the session we started, and nothing else
        self._process.wait()

    def _tell(self, request: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise WorkerFailed(self._ending()) from error

    def _listen(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as stdout:
            for line in stdout:
                self._lines.put(line)
        self._lines.put(None)

    def _hear(self, timeout_s: float) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            raise WorkerFailed(f"{self.name} said nothing for {timeout_s:g} s; see {self.log}") from None
        if line is None:
            raise WorkerFailed(self._ending())
        try:
            message = json.loads(line)
        except ValueError:
            message = None
        if not isinstance(message, dict):
            raise WorkerFailed(f"{self.name} printed what is not an answer: {_shortened(line)}; see {self.log}")
        if "error" in message:
            raise WorkerFailed(f"{self.name}: {_shortened(message['error'])}; see {self.log}")
        return message

    def _ending(self) -> str:
        status = self._process.wait()
        how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"exited with status {status}"
        last = self.log.read_text(errors="replace").strip().splitlines()[-1:]
        return f"{self.name} {how}{': ' + _shortened(last[0]) if last else ''}; see {self.log}"


def cut(tokens: list[int], max_tokens: int, eos: Sequence[int]) -> list[int]:
    """Tokens as every worker's are counted: to the first EOS, which was computed and counts, or max_tokens."""
    end = next((at + 1 for at, token in enumerate(tokens) if token in eos), len(tokens))
    return tokens[: min(end, max_tokens)]


def first_cores(count: int) -> list[int]:
    """The cores every worker is kept on; none where the system has no such thing."""
    if not hasattr(os, "sched_getaffinity"):
        return []
    if count > usable_cores():
        raise SystemExit(f"{count} threads asked for, but only {usable_cores()} cores may be used; lower --threads")
    return sorted(os.sched_getaffinity(0))[:count]


def _shortened(value: Any, most: int = 200) -> str:
    text = value.decode(errors="replace").strip() if isinstance(value, bytes) else str(value)
    return text if len(text) <= most else text[:most] + "..."
