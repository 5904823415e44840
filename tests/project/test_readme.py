"""README and guides are run: Python against the real model, commands as far as they are cheap, links as files.

What a tiny model answers in seconds is run on one; what is costly (proofs, training, a GPU) is parsed only.
"""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import typer

from paceline.cli.app import app, run
from paceline.models.load.store import MANIFEST
from tests.helpers.tiny import save_tiny

ROOT = Path(__file__).parents[2]
GUIDES = sorted((ROOT / "docs/guides").glob("*.md"))
PAGES = {page.name: page.read_text() for page in (ROOT / "README.md", *GUIDES, ROOT / "docs/choosing.md")}
README = PAGES["README.md"]
ADDING = PAGES["adding-a-drafter.md"]


def fenced(page: str, language: str) -> list[str]:
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    return [body for tag, body in blocks if tag == language]


def command_lines(page: str) -> list[list[str]]:
    """Each command as words; of a pipeline the last part."""
    blocks = [block.replace("\\\n", " ") for block in fenced(page, "bash")]
    lines = [line for block in blocks for line in block.splitlines() if line.strip()]
    return [shlex.split(line.split(" | ")[-1], comments=True) for line in lines]


COMMANDS = [words for page in PAGES.values() for words in command_lines(page)]
PACELINE = [list(each) for each in dict.fromkeys(tuple(words[1:]) for words in COMMANDS if words[0] == "paceline")]
CHEAP = ("pull", "models", "doctor", "theory")
SHORT_ANSWERS = ["generate Hello. --model smollm2 --max-tokens 16"]


def test_there_are_commands_to_check() -> None:
    short_repr = {words[1] for words in command_lines(README) if words[0] == "paceline"}
    assert short_repr == set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    assert {words[0] for words in COMMANDS} <= {
        "paceline",
        "pip",
        "pytest",
        "python3",
        "make",
        "curl",
        "docker",
        "serve",
        "vllm",
    }
    for name, page in PAGES.items():
        assert not fenced(page, ""), f"{name}: name the language, or no test reads the block"
    assert len(GUIDES) >= 5


@pytest.mark.parametrize("arguments", PACELINE, ids=" ".join)
def test_a_command_is_one_the_parser_takes(arguments: list[str]) -> None:
    group = typer.main.get_command(app)
    command = group.commands[arguments[0]]  # type: ignore[attr-defined]
    with command.make_context(arguments[0], list(arguments[1:])) as context:
        assert not context.args


@pytest.mark.parametrize("target", sorted(set(re.findall(r"`?make (demo|test|quick|wheel|clean)\b", str(PAGES)))))
def test_a_make_target_is_in_the_makefile(target: str) -> None:
    done = subprocess.run(["make", "--dry-run", target], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "arguments",
    [*(each for each in PACELINE if each[0] in CHEAP), *(each.split() for each in SHORT_ANSWERS)],
    ids=" ".join,
)
def test_the_cheap_commands_run(arguments: list[str], smollm2_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert arguments in PACELINE
    assert run(arguments) == 0, capsys.readouterr().err
    assert capsys.readouterr().out


@pytest.fixture
def workshop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files that the pages name, where a tiny model is called smollm2."""
    home = tmp_path / "home" / "models" / "smollm2"
    home.mkdir(parents=True)
    save_tiny("llama-tied", home)
    (home / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }} {% endfor %}w9")
    (home / MANIFEST).write_text('{"name": "smollm2", "source": "a test"}')
    shutil.copytree(home, tmp_path / "my-model")
    (tmp_path / "prompts.txt").write_text("w1 w2 w3\nw4 w5 w6\n")
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"w1 w2\n")))
    return tmp_path


def runs_on_a_tiny_model(arguments: list[str]) -> bool:
    """Not those that serve, train, quantise, need a GPU or another drafter, or take minutes."""
    asks_for = {"--drafter", "--draft-model", "cuda", "again", "again,suffix", "./my-model.gguf"}
    return arguments[0] in ("generate", "chat", "demo", "bench") and not asks_for & {*arguments}


TINY = [each for each in PACELINE if runs_on_a_tiny_model(each)]


@pytest.mark.parametrize("arguments", TINY, ids=" ".join)
def test_other_commands_run_on_a_tiny_model(
    arguments: list[str], workshop: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert {each[0] for each in TINY} == {"generate", "chat", "demo", "bench"}
    assert run(arguments) == 0, capsys.readouterr().err
    captured = capsys.readouterr()
    assert captured.out or captured.err


@pytest.mark.parametrize("words", [each for each in COMMANDS if each[0] == "pip"], ids=" ".join)
def test_what_pip_is_asked_for_exists(words: list[str]) -> None:
    assert words[1] == "install"
    for given in words[2:]:
        if given.endswith(".txt"):
            assert (ROOT / given).is_file()
        elif given.startswith("paceline["):
            assert re.search(rf"^{given[9:-1]} = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
        elif not given.startswith(("-", "http", "dist/", ".")):
            assert given in ("torch", "triton")


@pytest.mark.parametrize("words", [each for each in COMMANDS if each[0] == "curl"], ids=" ".join)
def test_what_curl_asks_for_is_a_route_and_json(words: list[str]) -> None:
    routes = "".join(path.read_text() for path in (ROOT / "src/paceline/server").glob("*.py"))
    assert f'"{words[1].removeprefix("localhost:8000")}"' in routes
    assert json.loads(words[words.index("-d") + 1])


@pytest.mark.parametrize(
    ("page", "expected"), [("README.md", "Paris"), ("your-own-model.md", "\n"), ("choosing-a-method.md", ".")]
)
def test_the_python_runs(page: str, expected: str, smollm2_path: Path) -> None:
    [example] = fenced(PAGES[page], "python")
    assert len([line for line in example.splitlines() if line.strip()]) <= 6
    printed = io.StringIO()
    with redirect_stdout(printed):
        exec(compile(example, page, "exec"), {})
    assert expected in printed.getvalue()


def test_the_python_for_a_gpu_names_arguments_that_exist() -> None:
    import ast
    import inspect

    from paceline import LLM

    [example] = fenced(PAGES["on-a-gpu.md"], "python")
    [call] = [node for node in ast.walk(ast.parse(example)) if isinstance(node, ast.Call)]
    assert {keyword.arg for keyword in call.keywords} <= set(inspect.signature(LLM).parameters)


def test_five_steps_followed_literally_add_a_drafter(tmp_path: Path) -> None:
    """In a copy of the tree; of the contract what is quick."""
    leave = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for part in ("src", "tests"):
        shutil.copytree(ROOT / part, tmp_path / part, ignore=leave)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (drafter, name), (entry, maker) = fenced(ADDING, "python"), fenced(ADDING, "text")
    drafters = tmp_path / "src/paceline/drafters"
    (drafters / "again.py").write_text(drafter)
    table = (drafters / "methods.py").read_text()
    table = table.replace("\n\nclass Method(", f"{name}\n\nclass Method(", 1)
    end = "    )\n}\n"  # of METHODS, the first table of the file that ends so
    assert end in table
    (drafters / "methods.py").write_text(table.replace(end, f"{entry}{end}", 1))
    toys = tmp_path / "tests/helpers/contract_toys.py"
    toys.write_text(toys.read_text().replace("MAKERS = {\n", f"MAKERS = {{\n{maker}", 1))
    [command] = [words for words in command_lines(ADDING) if words[0] == "pytest"]
    assert command[1:4] == ["tests/drafters/test_contract.py", "tests/drafters/test_methods.py", "-k"]
    quick = "again and (greedy_output or seed_gives or raises_now or prefix_hit) or every_method or spells"
    words = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *command[1:4], quick]
    environment = {"PYTHONPATH": str(tmp_path / "src"), "TRITON_INTERPRET": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, env=os.environ | environment)
    assert done.returncode == 0, done.stdout[-3000:]
    assert int(re.findall(r"(\d+) passed", done.stdout)[-1]) >= 8


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    [folder] = [path.parent for path in (ROOT / "README.md", *GUIDES, ROOT / "docs/choosing.md") if path.name == page]
    prose = re.sub(r"^```.*?^```$", "", PAGES[page], flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", prose):
        assert (folder / target).exists(), target


@pytest.mark.parametrize("page", [name for name in PAGES if name != "choosing.md"])
def test_a_page_stays_under_two_screens(page: str) -> None:
    assert len(PAGES[page].splitlines()) <= 100
    assert max(map(len, PAGES[page].splitlines())) <= 120


def test_the_readme_passes_the_sixty_second_test() -> None:
    assert len(README.splitlines()) < 100
    assert "make demo" in README
    assert "make test" in README
    first = README.split("##")[0]
    assert "speculative decoding" in first
    assert "For people" in first
    assert "Chat gains little without a trained drafter" in README


FIGURE = re.compile(r"\d+\.\d+x|\[\d+\.\d+, \d+\.\d+\]")


def test_figures_of_the_readme_are_those_of_its_benchmark_pages() -> None:
    """To the places given: 4.9x may stand for 4.85x."""
    pages = [ROOT / link for link in re.findall(r"\((docs/benchmarks/[^)]+\.md)\)", README)]
    measured = {float(number) for page in pages for number in re.findall(r"\d+\.\d+", page.read_text())}
    for figure in FIGURE.findall(README):
        for number in re.findall(r"\d+\.\d+", figure):
            places = len(number.split(".")[1])
            assert any(abs(float(number) - each) <= 0.5 * 10**-places + 1e-9 for each in measured), figure


def test_the_tree_of_the_architecture_page_names_what_exists() -> None:
    layout = next(
        block
        for block in fenced((ROOT / "docs/architecture.md").read_text(), "text")
        if block.startswith("src/paceline/")
    )
    names = re.findall(r"^  (\w+/)", layout, re.MULTILINE)
    assert {"models/", "verify/", "drafters/", "engine/", "cli/"} <= set(names)
    for name in names:
        assert (ROOT / "src/paceline" / name).is_dir(), name
