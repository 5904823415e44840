"""The cache of pulled models: one folder each under `cache_home()/models`, complete or absent.

A pull builds its folder beside the target and renames it into place, so an interrupted pull leaves the target
untouched; the next pull deletes the leftovers. A lock per model makes a second pull wait for the first. Every complete
folder holds MANIFEST, written last, which describes it.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from paceline.errors import CacheFolderError

MANIFEST = "paceline.json"
STALE_SECONDS = 24 * 3600  # where locks do not work, leftovers of this age are abandoned


class Progress(Protocol):
    """Called as a pull advances; `total` is None while it is unknown. Units are bytes."""

    def __call__(self, stage: str, done: int, total: int | None) -> None: ...


@dataclass(frozen=True, kw_only=True)
class CachedModel:
    name: str
    path: Path
    bytes: int
    source: str
    format: str


def cache_home() -> Path:
    """PACELINE_HOME, else the platform's cache folder; it need not exist yet."""
    try:
        home = _chosen_home()
        usable = home.is_dir() or not home.exists()
    except RuntimeError as error:  # neither HOME nor a user of this number
        raise CacheFolderError("no home folder for the cache; set PACELINE_HOME to one that can be written") from error
    except OSError as error:
        raise _folder_error(error, home) from error
    if not usable:
        raise CacheFolderError(f"the cache folder {home} is not a folder; set PACELINE_HOME to one that can be written")
    return home


def cache_home_if_any() -> Path | None:
    """For what is remembered there and can be done without."""
    try:
        return cache_home()
    except CacheFolderError:
        return None


def _chosen_home() -> Path:
    if given := os.environ.get("PACELINE_HOME"):
        return Path(given).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "paceline"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "paceline"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "paceline"


def folder_name(model: str) -> str:
    return model.replace("/", "--")


def cached_path(model: str) -> Path | None:
    """Where a pulled model lies, or None if it was never pulled to the end."""
    folder = cache_home() / "models" / folder_name(model)
    with _disk_errors(folder.parent):
        return folder if (folder / MANIFEST).is_file() else None


def cached_models() -> list[CachedModel]:
    models = cache_home() / "models"
    with _disk_errors(models):
        folders = sorted(models.iterdir()) if models.is_dir() else []
        return [_describe(folder) for folder in folders if (folder / MANIFEST).is_file()]


def add_model(model: str, build: Callable[[Path], dict[str, Any]], progress: Progress) -> Path:
    """`build` fills a folder and returns the manifest's fields. Returns at once if the model is in the cache."""
    models = _writable(cache_home()) / "models"
    target = models / folder_name(model)
    with _disk_errors(models):
        models.mkdir(exist_ok=True)
        with _lock(models / f".{target.name}.lock", model, progress) as alone:
            if cached_path(model):
                return target
            _remove_leftovers(models, target, alone)
            staging = Path(tempfile.mkdtemp(prefix=_prefix(target), dir=models))
            try:
                manifest = {"name": model} | build(staging)
                (staging / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
                _flush_to_disk(staging)
                _publish(staging, target)
            finally:
                shutil.rmtree(staging, ignore_errors=True)  # absent if it became the target
    return target


def _publish(staging: Path, target: Path) -> None:
    staging.chmod(0o755)  # mkdtemp makes it private
    try:
        staging.rename(target)
    except OSError as error:
        if not (target / MANIFEST).is_file():  # else another pull was faster, and its folder is equal
            raise error


def _remove_leftovers(models: Path, target: Path, alone: bool) -> None:
    """Remove folders of dead pulls: with the lock held, every staging folder of this model; without locks, old ones."""
    for folder in models.glob(_prefix(target) + "*"):
        if alone or time.time() - folder.stat().st_mtime > STALE_SECONDS:
            shutil.rmtree(folder, ignore_errors=True)
    if target.exists() and not (target / MANIFEST).is_file():  # no manifest: parts of it were deleted by other means
        shutil.rmtree(target)


def _prefix(target: Path) -> str:
    return f".partial-{target.name}-"


@contextlib.contextmanager
def _lock(path: Path, model: str, progress: Progress) -> Iterator[bool]:
    """Yields whether this is the only pull of the model. The system frees the lock when the process ends."""
    try:
        import fcntl
    except ImportError:  # Windows
        yield False
        return
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress(f"waiting for another pull of {model}", 0, None)
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:  # a file system without locks
            yield False
            return
        yield True


def _writable(home: Path) -> Path:
    try:
        home.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=home):
            return home
    except OSError as error:
        raise _folder_error(error, home) from error


@contextlib.contextmanager
def _disk_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _folder_error(error, folder) from error


def _folder_error(error: OSError, folder: Path) -> CacheFolderError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return CacheFolderError(
            f"no space left in the cache folder {folder}; free some, or set PACELINE_HOME elsewhere"
        )
    reason = error.strerror or str(error)
    return CacheFolderError(f"the cache folder {folder} cannot be used ({reason}); set PACELINE_HOME to one that can")


def require_space(folder: Path, needed: int) -> None:
    if shutil.disk_usage(folder).free < needed:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _flush_to_disk(folder: Path) -> None:
    """Before the rename: after a power cut the target is either absent or whole."""
    for file in folder.rglob("*"):
        if file.is_file():
            with file.open("rb") as handle:
                os.fsync(handle.fileno())


def folder_bytes(folder: Path) -> int:
    """The sum of the files' sizes; files that vanish meanwhile count as 0."""
    total = 0
    for root, _, files in os.walk(folder):
        for file in files:
            with contextlib.suppress(OSError):
                total += os.stat(os.path.join(root, file)).st_size
    return total


def _describe(folder: Path) -> CachedModel:
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        manifest = {}
    return CachedModel(
        name=manifest.get("name", folder.name),
        path=folder,
        bytes=folder_bytes(folder),
        source=manifest.get("source", "unknown"),
        format=manifest.get("format", "safetensors"),
    )
