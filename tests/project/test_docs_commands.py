"""Every command and Python block of README and guides runs, bounded by small settings, or is excused with a reason.

`make docs-check` (DOCS_CHECK=1) runs all of them on smollm2, each block in a folder of its own that holds the files it
names. Without it the fast ones run, on smollm2 or a tiny model of that name. A block that no rule names is an error.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import typer

from paceline.cli.app import app, run
from paceline.drafters.block import checkpoint as block_checkpoint
from paceline.drafters.eagle import checkpoint as eagle_checkpoint
from paceline.models.load.loader import load_config
from paceline.models.load.store import MANIFEST
from tests.drafters.block import dspark_reference
from tests.drafters.eagle import eagles
from tests.helpers.tiny import save_tiny
from tests.models.quant.test_quantize import sized_model
from tests.project.documents import BLOCKS, COMMANDS, ROOT, Block

ALL = os.environ.get("DOCS_CHECK") == "1"
LIMIT_S = 900  # of one command
SMOLLM2, TINY = "smollm2", "tiny"  # models that fast commands run on


@dataclass(frozen=True)
class Rule:
    """The first rule whose pattern a command begins with holds."""

    pattern: str
    bounds: str = ""  # flags appended to the command
    excuse: str = ""  # reason why it cannot run here
    fast: str = ""  # the model it runs on in `make test`
    answers: str = ""  # what is typed into it


TRAINING = "--synthesise 8 --steps 1 --rows 1 --length 64"
RULES = (
    Rule("make ", excuse="sets up an environment of its own; a dry run checks the target"),
    Rule("pip ", excuse="changes the environment; what it asks for is checked"),
    Rule("docker ", excuse="needs a registry of images"),
    Rule("serve run ", excuse="needs a cluster of Ray"),
    Rule("vllm ", excuse="vLLM is another package; benchmarks.serve --peer measures it where it runs"),
    Rule("pytest ", excuse="needs the drafter of its page, which test_readme enters in a copy of the tree"),
    Rule(r"paceline \w+ .*\bagain\b", excuse="needs the drafter of its page, as pytest there"),
    Rule("paceline serve .*--replicas", excuse="" if find_spec("ray") else "needs Ray"),
    Rule("paceline generate .*gguf", excuse="no GGUF file is at hand; the tests of loading make some"),
    Rule("paceline (doctor|models|pull|theory)", fast=SMOLLM2),
    Rule("paceline generate .*(-drafter|--draft-model)", "--max-tokens 8"),
    Rule('paceline generate "?Hello', "--max-tokens 8", fast=SMOLLM2),
    Rule("paceline generate", "--max-tokens 8", fast=TINY),
    Rule("paceline chat", "--max-tokens 8", fast=TINY, answers="w1 w2\n"),
    Rule("paceline demo", "--max-tokens 24", fast=TINY),
    Rule("paceline prove"),
    Rule("paceline bench .*--(drafter|concurrency)", "--per-workload 4 --max-tokens 24 --concurrency 1"),
    Rule("paceline bench", "--per-workload 2 --max-tokens 24", fast=TINY),
    Rule("paceline advise .*--traffic", "--quick --traffic rate=2,prompt=24,answer=8,ttft=1,inter_token=0.2"),
    Rule("paceline advise", "--max-tokens 24 --concurrency 1", fast=TINY),
    Rule("paceline train .*--synthesise", TRAINING),
    Rule("paceline train", TRAINING.replace("--synthesise 8 ", "")),
    Rule("paceline warm", "--minutes 0.1"),
    Rule("paceline (export|quantize|serve)"),
    Rule("curl ", "--silent --show-error --fail"),
)
PYTHON = (
    Rule("from paceline import LLM", fast=SMOLLM2),
    Rule('(""")?', excuse="a file of adding a drafter, which test_readme enters in a copy of the tree"),
)
NO_CODE = {"text", "dockerfile", "ini"}  # languages that no shell and no Python runs


def rule_of(text: str, rules: tuple[Rule, ...] = RULES) -> Rule:
    return next(rule for rule in rules if re.match(rule.pattern, text))


BASH = [block for block in BLOCKS if block.language == "bash"]
FAST = [list(each) for each in dict.fromkeys(map(tuple, COMMANDS)) if rule_of(" ".join(each)).fast]
RUN_PYTHON = [block for block in BLOCKS if block.language == "python" and rule_of(block.text, PYTHON).fast]


def test_every_block_is_run_or_excused() -> None:
    named = {
        words[1] for block in BASH if block.page == "README.md" for words in block.commands if words[0] == "paceline"
    }
    assert named == set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    for block in BLOCKS:
        assert block.language in {"bash", "python", *NO_CODE}, f"{block.name}: name the language of the block"
        for words in block.commands if block.language == "bash" else []:
            assert any(re.match(rule.pattern, " ".join(words)) for rule in RULES), f"{block.name}: no rule for {words}"
            assert not {"|", ">", "&&", ";"} & {*words}, f"{block.name}: a command is to stand alone"
    used = {rule_of(" ".join(words)) for words in COMMANDS}
    assert [rule for rule in RULES if rule not in used] == []


PACELINE = [list(each) for each in dict.fromkeys(tuple(words[1:]) for words in COMMANDS if words[0] == "paceline")]


@pytest.mark.parametrize("arguments", PACELINE, ids=" ".join)
def test_a_command_is_one_the_parser_takes(arguments: list[str]) -> None:
    command = typer.main.get_command(app).commands[arguments[0]]  # type: ignore[attr-defined]
    with command.make_context(arguments[0], list(arguments[1:])) as context:
        assert not context.args


# -- the folder in which a block runs


@pytest.fixture
def workshop(tmp_path: Path, smollm2_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An own cache folder with smollm2."""
    models = tmp_path / "home/models"
    models.mkdir(parents=True)
    (models / "smollm2").symlink_to(smollm2_path)
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def tiny_workshop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same with a tiny model under smollm2's name."""
    home = tmp_path / "home/models/smollm2"
    home.mkdir(parents=True)
    save_tiny("llama-tied", home)
    (home / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }} {% endfor %}w9")
    (home / MANIFEST).write_text('{"name": "smollm2", "source": "a test"}')
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def make_files(folder: Path, text: str) -> None:
    """Make the files that a block reads, with smollm2 as the user's own model."""
    smollm2 = Path(os.environ["PACELINE_HOME"]) / "models/smollm2"
    talk = [{"role": role, "content": "Count to twenty, and then back to one."} for role in ("user", "assistant")]
    lines = {
        "prompts.txt": "w1 w2 w3\nw4 w5 w6\n",
        "prompts.jsonl": json.dumps({"prompt": "Count to five."}) + "\n",
        "chats.jsonl": (json.dumps({"messages": talk}) + "\n") * 60,
        "traffic.jsonl": (json.dumps({"messages": talk}) + "\n") * 60,
        "asked.jsonl": "".join(json.dumps({"prompt": f"Count to {n}."}) + "\n" for n in range(8)),
    }
    for name, content in lines.items():
        if name in text:
            (folder / name).write_text(content)
    for name in ("my-model", "small", "tiny"):
        if f"./{name}" in text:
            (folder / name).symlink_to(smollm2)
    if "quantize" in text:  # smollm2 is quantised already
        sized_model(folder / "float-model")
    for name in ("drafter", "drafter-1"):
        if re.search(rf"--(drafter|init-from) (\./)?{name}\b", text):
            shape = {"num_heads": 9, "num_kv_heads": 3, "head_dim": 64}  # the target's, as a trained one's is
            config = dspark_reference.drafter_config(load_config(smollm2), taps=(0, 15), draft_vocab_size=64, **shape)
            block_checkpoint.write(folder / name, config, dspark_reference.random_tensors(config))
    for name in ("head", "eagle"):
        if f"./{name}" in text:
            target = load_config(smollm2)
            config = eagles.config_for(target, vocab=64, layer_ids=(2, 15, 27))
            eagle_checkpoint.write(folder / name, config, eagles.random_tensors(config))


# -- fast ones, in this process


@pytest.mark.parametrize("words", FAST, ids=" ".join)
def test_a_fast_command_runs(
    words: list[str],
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    rule = rule_of(" ".join(words))
    folder = request.getfixturevalue("workshop" if rule.fast == SMOLLM2 else "tiny_workshop")
    make_files(folder, " ".join(words))
    words = [local(word, 8000, folder) for word in words]
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(rule.answers.encode())))
    assert run([*words[1:], *rule.bounds.split()]) == 0, capsys.readouterr().err
    captured = capsys.readouterr()
    assert captured.out or captured.err


@pytest.mark.parametrize("block", RUN_PYTHON, ids=lambda block: block.name)
def test_the_python_runs(block: Block, workshop: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert len([line for line in block.text.splitlines() if line.strip()]) <= 6
    exec(compile(on_this_machine(block.text), block.name, "exec"), {})
    printed = capsys.readouterr().out
    assert printed or "print(" not in block.text
    assert "Paris" in printed or block.page != "README.md"


def on_this_machine(text: str) -> str:
    return text if torch.cuda.is_available() else text.replace('"cuda"', '"cpu"')


# -- all of them, as a reader would


@pytest.mark.skipif(not ALL, reason="make docs-check")
@pytest.mark.parametrize("block", BASH, ids=lambda block: block.name)
def test_a_block_runs(block: Block, workshop: Path) -> None:
    make_files(workshop, block.text)
    bin = workshop.parent / "bin"
    bin.mkdir()
    (bin / "paceline").write_text(f'#!/bin/sh\nexec {sys.executable} -m paceline "$@"\n')
    (bin / "paceline").chmod(0o755)
    environment = {**os.environ, "PATH": f"{bin}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT / "src")}
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with contextlib.ExitStack() as servers:
        for words in block.commands:
            rule = rule_of(" ".join(words))
            if rule.excuse:
                continue
            words = [local(word, port, workshop) for word in [*words, *rule.bounds.split()]]
            if "--steps" in words and "--minutes" in words:  # the bound takes the place of the page's minutes
                at = words.index("--minutes")
                del words[at : at + 2]
            if "quantize" in words:
                words = [word.replace("my-model", "float-model") for word in words]
            out = words[words.index("--out") + 1] if words[1] in ("train", "export", "quantize") else None
            if out is not None and "--resume" not in words:
                shutil.rmtree(workshop / out, ignore_errors=True)
            if words[:2] == ["paceline", "serve"]:
                servers.enter_context(server([*words, "--port", str(port)], port, environment))
                continue
            done = subprocess.run(
                words, env=environment, input=rule.answers, capture_output=True, text=True, timeout=LIMIT_S
            )
            assert done.returncode == 0, f"{words}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
            assert done.stdout or done.stderr, words


def local(word: str, port: int, folder: Path) -> str:
    """A word of a command with what this machine has: its port, its folder, its device."""
    word = word.replace("localhost:8000", f"localhost:{port}").replace("/srv/", f"{folder}/")
    return "cpu" if word == "cuda" and not torch.cuda.is_available() else word


@contextlib.contextmanager
def server(words: list[str], port: int, environment: dict[str, str]) -> Iterator[None]:
    log = Path(f"server-{port}.log")
    with log.open("w") as file:
        process = subprocess.Popen(words, env=environment, stdout=file, stderr=file)
    try:
        for _ in range(10 * 120):
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health").close()
                break
            assert process.poll() is None, log.read_text()
            time.sleep(0.1)
        yield
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) in (0, 130), log.read_text()
    finally:
        process.kill()
        process.wait()


# -- what is excused is checked as far as it can be


@pytest.mark.parametrize("target", sorted({words[1] for words in COMMANDS if words[0] == "make"}))
def test_a_make_target_is_in_the_makefile(target: str) -> None:
    done = subprocess.run(["make", "--dry-run", target], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("words", [each for each in COMMANDS if each[0] == "pip"], ids=" ".join)
def test_what_pip_is_asked_for_exists(words: list[str]) -> None:
    assert words[1] == "install"
    for name in words[2:]:
        if name.endswith(".txt"):
            assert (ROOT / name).is_file()
        elif name.startswith("paceline["):
            assert re.search(rf"^{name[9:-1]} = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
        elif not name.startswith(("-", "http", "dist/", ".")):
            assert name in ("torch", "triton")


@pytest.mark.parametrize("words", [each for each in COMMANDS if each[0] == "curl"], ids=" ".join)
def test_what_curl_asks_for_is_a_route_and_json(words: list[str]) -> None:
    routes = "".join(path.read_text() for path in (ROOT / "src/paceline/server").rglob("*.py"))
    assert f'"{words[1].removeprefix("localhost:8000")}"' in routes
    assert json.loads(words[words.index("-d") + 1])
