"""The table of drafting methods. Nothing outside this file asks which method it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from paceline.drafters.base import Commit, Drafter, DrafterContext, DraftRow
from paceline.drafters.draft_model import DraftModelDrafter
from paceline.drafters.ngram import NgramDrafter
from paceline.drafters.suffix import SuffixDrafter

NONE = "none"  # plain decoding: the empty draft

# method -> its constructor. A new method is one file and one line here.
DRAFTERS: Mapping[str, Callable[[DrafterContext], Drafter]] = {
    "ngram": NgramDrafter,
    "suffix": SuffixDrafter,
    "draft-model": DraftModelDrafter.from_context,
}


def method_names() -> tuple[str, ...]:
    return (NONE, *DRAFTERS)


__all__ = ["DRAFTERS", "NONE", "Commit", "DraftRow", "Drafter", "DrafterContext", "method_names"]
