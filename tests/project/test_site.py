"""docs/ builds as a site, without a network, and its pages load nothing from outside."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Elements by which a browser fetches something; links that a reader may follow are `<a href>`.
FETCHED = re.compile(
    r"<(?:script|img|iframe|source)[^>]*\ssrc=[\"']?(?:https?:)?//"
    r"|<link(?![^>]*canonical)[^>]*\shref=[\"']?(?:https?:)?//"
)
IMPORTED = re.compile(r"(?:@import|url\()\s*[\"']?(?:https?:)?//")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    offline = {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9", "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={"PATH": "", **offline}, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def test_every_page_of_docs_is_in_the_site(site: Path) -> None:
    for page in (ROOT / "docs").rglob("*.md"):
        name = page.relative_to(ROOT / "docs").with_suffix("")
        assert (site / (name if name.name != "index" else name.parent) / "index.html").is_file(), page


def test_a_page_fetches_nothing_from_outside(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert pages
    for page in pages:
        assert not FETCHED.search(page.read_text()), page
    for style in site.rglob("*.css"):
        assert not IMPORTED.search(style.read_text()), style


def test_the_patterns_find_what_they_forbid() -> None:
    assert FETCHED.search('<script src="https://example.org/a.js">')
    assert FETCHED.search('<link rel="stylesheet" href="//example.org/a.css">')
    assert not FETCHED.search('<a href="https://example.org">')
    assert not FETCHED.search('<script src="../a.js">')
    assert IMPORTED.search("@import 'https://example.org/a.css'")


@pytest.mark.parametrize(("folder", "words"), [("docs/benchmarks", 7300), ("docs/architecture.md", 2500)])
def test_documents_stay_short(folder: str, words: int) -> None:
    path = ROOT / folder
    pages = [path] if path.is_file() else list(path.glob("*.md"))
    assert sum(len(page.read_text().split()) for page in pages) <= words
