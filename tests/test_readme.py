"""The README is run: its Python against the real model, its commands as far as they are cheap, its links as files."""

from __future__ import annotations

import io
import re
import shlex
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import typer

from paceline.cli.app import app

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def fenced(language: str) -> list[str]:
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    return [body for tag, body in blocks if tag == language]


def command_lines() -> list[list[str]]:
    """Each command as words; of a pipeline the part that is ours."""
    lines = [line for block in fenced("bash") for line in block.splitlines() if line.strip()]
    words = [shlex.split(line.split(" | ")[-1], comments=True) for line in lines]
    return [line for line in words if line[0] in ("paceline", "make")]


PACELINE = [line[1:] for line in command_lines() if line[0] == "paceline"]
MAKE = [line[1] for line in command_lines() if line[0] == "make"]


def test_there_are_commands_to_check() -> None:
    assert {"demo", "test"} <= set(MAKE)
    commands = {"generate", "chat", "demo", "prove", "bench", "advise", "theory", "pull", "models", "doctor"}
    assert commands <= {arguments[0] for arguments in PACELINE}


@pytest.mark.parametrize("arguments", PACELINE, ids=" ".join)
def test_a_readme_command_is_one_the_parser_takes(arguments: list[str]) -> None:
    group = typer.main.get_command(app)
    command = group.commands[arguments[0]]  # type: ignore[attr-defined]
    with command.make_context(arguments[0], list(arguments[1:])) as context:
        assert not context.args


@pytest.mark.parametrize("target", MAKE)
def test_a_readme_target_is_in_the_makefile(target: str) -> None:
    done = subprocess.run(["make", "--dry-run", target], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", ["pull smollm2", "models", "doctor"])
def test_the_cheap_commands_run(command: str, smollm2_path: Path) -> None:
    assert command.split() in PACELINE
    done = subprocess.run([sys.executable, "-m", "paceline", *command.split()], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_the_python_example_runs_and_prints_both_answers(smollm2_path: Path) -> None:
    [example] = fenced("python")
    assert len([line for line in example.splitlines() if line.strip()]) <= 6
    printed = io.StringIO()
    with redirect_stdout(printed):
        exec(compile(example, "README.md", "exec"), {})
    assert "Paris" in printed.getvalue()


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (ROOT / target).exists(), target


def test_the_readme_stays_under_two_screens() -> None:
    assert len(README.splitlines()) <= 80


def test_the_tree_names_what_exists() -> None:
    [tree] = [block for block in fenced("") if block.startswith("src/paceline/")]
    for name in re.findall(r"^  (\S+)", tree, re.MULTILINE):
        assert (ROOT / "src/paceline" / name).exists(), name
