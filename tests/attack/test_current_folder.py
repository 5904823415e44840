"""A model's folder that is also the current folder: its Python files are never imported."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.platform.python_process import module_command
from tests.attack.test_loop import LONG, post
from tests.helpers.hostile_bodies import CHAT
from tests.server.conftest import start_server

NAMES = ("torch", "json", "paceline", "numpy", "jinja2", "tokenizers", "runpy", "pip", "sitecustomize", "socket")


@pytest.fixture
def folder(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A model with hostile files, as the current folder."""
    made = tmp_path / "model"
    shutil.copytree(tiny_model, made)
    for name in NAMES:
        (made / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write({name!r} + '\\n')\n")
    monkeypatch.chdir(made)
    yield made
    assert not (tmp_path / "ran").exists(), (tmp_path / "ran").read_text()


def test_a_server_started_in_a_models_folder_runs_none_of_its_files(folder: Path) -> None:
    script = [sys.executable, "-c", "import sys; sys.path.remove(''); from paceline.cli import main; main()"]
    running = start_server(folder, command=script)  # as the command `paceline` is: without the current folder
    try:
        chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
        for body in (chat, chat | LONG):  # the second one is read by another process
            assert post(running, CHAT, json.dumps(body).encode())[0] == 200
    finally:
        running.process.kill()
        running.process.wait()


@pytest.mark.usefixtures("folder")
def test_a_module_runs_with_its_arguments_and_the_packages_that_are_installed() -> None:
    ran = subprocess.run(module_command("paceline", "--version"), capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("paceline")
    assert subprocess.run(module_command("pip", "--version"), env=os.environ, capture_output=True).returncode in (0, 1)
