"""Checksums of a pulled model's files: recorded when they are made, compared by `paceline doctor --verify`."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from paceline.models.load.store import MANIFEST

FIELD = "files"  # of the manifest: sha256 by name


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def checksums(folder: Path) -> dict[str, str]:
    """Return the checksum of each file but the manifest and hidden ones, by its name in the folder."""
    names = [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file()]
    return {name: sha256_of(folder / name) for name in names if name != MANIFEST and not name.startswith(".")}


def damage(folder: Path) -> str | None:
    """Return what has changed in a folder since it was made; None: nothing."""
    try:
        recorded = json.loads((folder / MANIFEST).read_text(encoding="utf-8")).get(FIELD)
        if not isinstance(recorded, dict):
            return "has no checksums: an earlier version made it"
        found = checksums(folder)
    except (OSError, ValueError, AttributeError) as error:
        return f"cannot be read: {error}"
    names = [name for name in {**recorded, **found} if recorded.get(name) != found.get(name)]
    states = {name: "added" if name not in recorded else "changed" if name in found else "missing" for name in names}
    return ", ".join(f"{name} is {state}" for name, state in states.items()) or None
