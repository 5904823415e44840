"""The numbers and files that must agree with one another."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

import paceline

ROOT = Path(__file__).parents[2]


def test_the_version_is_the_same_everywhere() -> None:
    declared = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert declared is not None
    assert declared[1] == paceline.__version__


def test_torch_is_pinned_and_the_makefile_heeds_it() -> None:
    assert re.search(r"^torch==\d+\.\d+\.\d+$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert "--constraint constraints.txt" in (ROOT / "Makefile").read_text()


def test_every_path_of_the_makefile_exists() -> None:
    """Patterns too; a test is named by its file and its function."""
    named = re.findall(r"(?:src|tests|benchmarks)/[\w./*:$()-]*[\w*]", (ROOT / "Makefile").read_text())
    assert len(named) > 10
    for path, _, function in (name.partition("::") for name in named):
        found = sorted(ROOT.glob(path))
        assert found or path == "src/*.egg-info", path
        assert not function or f"def {function}(" in found[0].read_text(), f"{path}::{function}"


def test_the_licence_is_apache_2() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text
    assert "Copyright 2026 The paceline authors" in text


def test_the_package_is_marked_as_typed() -> None:
    assert (Path(paceline.__file__).parent / "py.typed").exists()


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib")
def test_the_entry_point_exists_and_the_oracle_is_no_dependency() -> None:
    import tomllib

    from paceline.cli import main

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"paceline": f"{main.__module__.removesuffix('.app')}:main"}
    assert project["license"] == "Apache-2.0"
    names = {re.split(r"[>=<; \[]", line)[0] for line in project["dependencies"]}
    assert "gguf" in names
    assert "transformers" not in names
    assert any(line.startswith("transformers") for line in project["optional-dependencies"]["dev"])


# ---- the wheel -------------------------------------------------------------------------------------------------------

INSTALLED = """
import json, sys
for absent in ("transformers", "gguf", "matplotlib", "fastapi", "prompt_toolkit", "triton"):
    sys.modules[absent] = None
import paceline
from paceline import LLM, SamplingParams
llm = LLM(sys.argv[1], device="cpu")
[output] = llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=8))
kernels = llm.loaded.decoder.kernels
print(json.dumps({"file": paceline.__file__, "kernels": kernels.name, "exact": kernels.exact,
                  "text": output.outputs[0].text}))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel as `make wheel` does, from the libraries that are built already by the same setup.py."""
    tree = tmp_path_factory.mktemp("tree")
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    leave = shutil.ignore_patterns("*.so", "__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", tree / "src", ignore=leave)
    built = tree / "build" / f"lib.{sysconfig.get_platform()}-{sys.implementation.cache_tag}"
    native = built / "paceline" / "native"
    native.mkdir(parents=True)
    for library in (ROOT / "src/paceline/native").glob("*.so"):
        shutil.copy(library, native)  # newer than the sources, so not compiled again
    run([sys.executable, "setup.py", "-q", "bdist_wheel", "--dist-dir", "raw"], cwd=tree)
    [raw] = (tree / "raw").glob("*.whl")
    repair = ["auditwheel", "repair", "--plat", f"manylinux_2_28_{platform.machine()}", "--wheel-dir", "dist", str(raw)]
    run([sys.executable, "-m", *repair], cwd=tree, PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    [made] = (tree / "dist").glob("*.whl")
    return made


def run(command: list[str], cwd: Path, **variables: str) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, env=os.environ | variables)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.skipif(sys.platform != "linux", reason="manylinux")
def test_the_wheel_is_for_any_python_and_any_linux_of_the_last_years(wheel: Path) -> None:
    python, abi, platforms = wheel.stem.split("-")[2:]
    assert (python, abi) == ("py3", "none")
    oldest = min(int(tag.split("_")[2]) for tag in platforms.split(".") if tag.startswith("manylinux_2_"))
    assert oldest <= 28


@pytest.mark.skipif(sys.platform != "linux", reason="manylinux")
def test_the_wheel_runs_native_kernels_without_compiler_checkout_or_extras(wheel, smollm2_path, tmp_path) -> None:
    home = tmp_path / "environment"
    venv.create(home, with_pip=False, symlinks=True)
    install = ["pip", "--python", str(home), "install", "-q", "--no-deps", "--no-index", str(wheel)]
    run([sys.executable, "-m", *install], cwd=tmp_path, PYTHONPATH="")
    [site] = home.glob("lib/python*/site-packages")
    (site / "packages.pth").write_text(sysconfig.get_paths()["purelib"])  # torch and the others; not the checkout
    environment = {"PATH": str(home / "bin"), "PYTHONPATH": "", "PACELINE_KERNELS": ""}
    assert shutil.which("gcc", path=environment["PATH"]) is None
    python = str(home / "bin" / "python")
    found = json.loads(run([python, "-c", INSTALLED, str(smollm2_path)], tmp_path, **environment))
    assert found["file"].startswith(str(site))
    assert found["kernels"].startswith("native-")
    assert found["exact"]
    assert "Paris" in found["text"]
    command = [str(home / "bin" / "paceline")]
    assert "kernels     native-" in run([*command, "doctor"], tmp_path, **environment)
    asked = ["generate", "The capital of France is", "--raw", "--model", str(smollm2_path), "--temperature", "0"]
    assert "Paris" in run([*command, *asked, "--max-tokens", "8"], tmp_path, **environment)
