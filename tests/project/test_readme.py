"""README and guides lead where they say: links, figures, the folders of the architecture, a drafter added literally."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.project.documents import BLOCKS, PAGES, PATHS, README, ROOT, blocks_of, fenced

ADDING = "adding-a-drafter.md"


def test_five_steps_followed_literally_add_a_drafter(tmp_path: Path) -> None:
    """Follow them in a copy of the tree, with the quick part of the contract; `make docs-check` also measures."""
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
    commands = [
        words for block in BLOCKS if (block.page, block.language) == (ADDING, "bash") for words in block.commands
    ]
    [command] = [words for words in commands if words[0] == "pytest"]
    assert command[1:4] == ["tests/drafters/test_contract.py", "tests/drafters/test_methods.py", "-k"]
    quick = "again and (seeded_output or raises_now or prefix_hit) or every_method or spells"
    words = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *command[1:4], quick]
    environment = {"PYTHONPATH": str(tmp_path / "src"), "TRITON_INTERPRET": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, env=os.environ | environment)
    assert done.returncode == 0, done.stdout[-3000:]
    assert int(re.findall(r"(\d+) passed", done.stdout)[-1]) >= 8
    for words in commands if os.environ.get("DOCS_CHECK") == "1" else []:
        if words[0] == "paceline":
            bounds = ["--max-tokens", "24", *(["--per-workload", "2"] if words[1] == "bench" else [])]
            words = [sys.executable, "-m", *words, *bounds]
            done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, env=os.environ | environment)
            assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    [folder] = [path.parent for path in PATHS if path.name == page]
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
    blocks = blocks_of("architecture.md", (ROOT / "docs/architecture.md").read_text())
    layout = next(block.text for block in blocks if block.text.startswith("src/paceline/"))
    names = re.findall(r"^  (\w+/)", layout, re.MULTILINE)
    assert {"models/", "verify/", "drafters/", "engine/", "cli/"} <= set(names)
    for name in names:
        assert (ROOT / "src/paceline" / name).is_dir(), name
