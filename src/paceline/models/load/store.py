"""The cache of pulled models: one folder each under `cache_home()/models`, complete or absent.

A lock per model makes a second pull wait for the first. Every complete folder holds MANIFEST, written last, which
describes it.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from paceline.errors import CacheFolderError
from paceline.files.folders import Lock, build_folder, disk_errors, lock_file

MANIFEST = "paceline.json"


class PullProgress(Protocol):
    """Callback of a pull that advances, in bytes; `total` is None while it is unknown."""

    def __call__(self, stage: str, done: int, total: int | None) -> None: ...


@dataclass(frozen=True, kw_only=True)
class CachedModel:
    name: str
    path: Path
    bytes: int
    source: str
    format: str


def cache_home() -> Path:
    """Return PACELINE_HOME, else the platform's cache folder; it need not exist yet."""
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
    """Return the cache folder, or None where it cannot be used."""
    try:
        return cache_home()
    except CacheFolderError:
        return None


def _chosen_home() -> Path:
    if home := os.environ.get("PACELINE_HOME"):
        return Path(home).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "paceline"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "paceline"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "paceline"


def folder_name(model: str) -> str:
    return model.replace("/", "--")


def cached_path(model: str) -> Path | None:
    """Return the folder of a pulled model, or None if it was never pulled to the end."""
    folder = cache_home() / "models" / folder_name(model)
    with _disk_errors(folder.parent):
        return folder if (folder / MANIFEST).is_file() else None


def cached_models() -> list[CachedModel]:
    models = cache_home() / "models"
    with _disk_errors(models):
        folders = sorted(models.iterdir()) if models.is_dir() else []
        return [_describe(folder) for folder in folders if (folder / MANIFEST).is_file()]


def add_model(model: str, build: Callable[[Path], dict[str, Any]], progress: PullProgress) -> Path:
    """Return the model's folder. If it is not in the cache, `build` fills it and returns the manifest's fields."""
    models = _writable(cache_home()) / "models"
    target = models / folder_name(model)
    with _disk_errors(models):
        models.mkdir(exist_ok=True)
        with _alone(models / f".{target.name}.lock", model, progress):
            if cached_path(model):
                return target
            if target.exists():  # without its manifest: parts of it were deleted by other means
                shutil.rmtree(target)
            with build_folder(target, lambda folder: (folder / MANIFEST).is_file()) as staging:
                manifest = {"name": model} | build(staging)
                (staging / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    return target


@contextlib.contextmanager
def _alone(path: Path, model: str, progress: PullProgress) -> Iterator[None]:
    """Wait until no other process pulls the model. Where files cannot be locked, two pulls run side by side."""
    with path.open("w") as file:
        if lock_file(file) is Lock.HELD:
            progress(f"waiting for another pull of {model}", 0, None)
            lock_file(file, wait=True)
        yield


def _writable(home: Path) -> Path:
    try:
        home.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=home):
            return home
    except OSError as error:
        raise _folder_error(error, home) from error


def _disk_errors(folder: Path) -> contextlib.AbstractContextManager[None]:
    return disk_errors(lambda error: _folder_error(error, folder))


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


def folder_bytes(folder: Path) -> int:
    """Sum the files' sizes; files that vanish meanwhile count as 0."""
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
