"""Choices beside those a benchmark knows: contenders that may use a certain draft model. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from paceline.bench.grid import AUTO, Contender


@dataclass(frozen=True)
class Drafted(Contender):
    """A contender that may use a certain draft model."""

    draft_model: str = ""

    @property
    def label(self) -> str:
        name = Path(self.draft_model).name
        return f"{AUTO} with {name}" if self.method == AUTO else f"{name} k={self.k}"


def draft_model_of(contender: Contender) -> str | None:
    return contender.draft_model if isinstance(contender, Drafted) else None
