"""The numbers and files that must agree with one another."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

import paceline

ROOT = Path(__file__).parents[1]


def test_the_version_is_the_same_everywhere() -> None:
    declared = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert declared is not None
    assert declared[1] == paceline.__version__


def test_torch_is_pinned_and_the_makefile_heeds_it() -> None:
    assert re.search(r"^torch==\d+\.\d+\.\d+$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert "--constraint constraints.txt" in (ROOT / "Makefile").read_text()


def test_the_licence_is_apache_2() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text
    assert "Copyright 2026 The paceline authors" in text


def test_the_package_is_marked_as_typed() -> None:
    assert (Path(paceline.__file__).parent / "py.typed").exists()


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib")
def test_the_entry_point_exists() -> None:
    import tomllib

    from paceline.cli import main

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"paceline": f"{main.__module__.removesuffix('.app')}:main"}
    assert project["license"] == "Apache-2.0"
