"""What was measured, kept as JSON lines: the settings first, then one row per prompt as soon as it is complete.

A run that is interrupted, or given a limit, goes on where the file ends; a file taken with other settings is refused.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class Rows:
    def __init__(self, path: Path | None, settings: dict[str, Any]) -> None:
        self._path, self.rows, self.failures = path, [], {}  # type: ignore[var-annotated]
        self.about: dict[str, dict[str, Any]] = {}
        if path is not None and path.exists():
            self._read(path, settings)
        else:
            self._write({"settings": settings})

    @property
    def done(self) -> set[str]:
        return {row["name"] for row in self.rows}

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        self._write({"row": row})

    def fail(self, name: str, why: str) -> None:
        self.failures[name] = why
        self._write({"failure": {name: why}})

    def note(self, name: str, about: dict[str, Any]) -> None:
        """Facts a worker reported of itself; later notes add to earlier ones."""
        self.about[name] = self.about.get(name, {}) | about
        self._write({"about": {name: about}})

    def _write(self, entry: dict[str, Any]) -> None:
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")

    def _read(self, path: Path, settings: dict[str, Any]) -> None:
        try:
            entries = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
            taken = entries[0]["settings"]
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise SystemExit(f"{path} is not a file of rows ({error}); name another with --rows") from error
        if taken != settings:
            differing = sorted(key for key in taken.keys() | settings.keys() if taken.get(key) != settings.get(key))
            raise SystemExit(f"{path} was taken with other settings ({', '.join(differing)}); name another with --rows")
        for entry in entries[1:]:
            if "row" in entry:
                self.rows.append(entry["row"])
            self.failures |= entry.get("failure", {})
            for name, about in entry.get("about", {}).items():
                self.about[name] = self.about.get(name, {}) | about
