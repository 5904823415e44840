"""README and guides as pages of fenced blocks, and the commands in them."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PATHS = [ROOT / "README.md", *sorted((ROOT / "docs/guides").glob("*.md")), ROOT / "docs/choosing.md"]
PAGES = {path.name: path.read_text() for path in PATHS}
README = PAGES["README.md"]


@dataclass(frozen=True)
class Block:
    page: str
    number: int
    language: str
    text: str

    @property
    def name(self) -> str:
        return f"{self.page.removesuffix('.md')}-{self.number}"

    @property
    def commands(self) -> list[list[str]]:
        """Each command of a bash block as words."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [words for line in lines if (words := shlex.split(line, comments=True))]


def blocks_of(page: str, text: str) -> list[Block]:
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [Block(page, number, *each) for number, each in enumerate(fenced, start=1)]


BLOCKS = [block for page, text in PAGES.items() for block in blocks_of(page, text)]
COMMANDS = [words for block in BLOCKS if block.language == "bash" for words in block.commands]


def fenced(page: str, language: str) -> list[str]:
    return [block.text for block in BLOCKS if block.page == page and block.language == language]
