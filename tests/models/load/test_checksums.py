"""Checksums of pulled models: any change of a file is found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.cli.app import run
from paceline.models.load.checksums import FIELD, checksums, damage
from paceline.models.load.store import MANIFEST


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model in a cache of its own."""
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    made = tmp_path / "models" / "one"
    (made / "sub").mkdir(parents=True)
    (made / "weights").write_bytes(bytes(100))
    (made / "sub" / "a.jinja").write_text("a")
    (made / MANIFEST).write_text(json.dumps({"name": "one", FIELD: checksums(made)}))
    return made


def test_each_kind_of_damage_is_named_and_verifying_fails(folder: Path) -> None:
    assert damage(folder) is None
    assert run(["doctor", "--verify"]) == run(["doctor"])
    (folder / "weights").write_bytes(bytes(99) + b"a")
    (folder / "sub" / "a.jinja").unlink()
    (folder / "b").touch()
    assert damage(folder) == "sub/a.jinja is missing, weights is changed, b is added"
    assert run(["doctor", "--verify"]) == 1


@pytest.mark.parametrize("manifest", ["{}", "[]", "{", '{"files": 3}', '{"files": {"weights": 1}}'])
def test_a_manifest_without_checksums_is_reported(folder: Path, manifest: str) -> None:
    (folder / MANIFEST).write_text(manifest)
    assert damage(folder)
