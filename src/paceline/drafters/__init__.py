"""Drafting methods: the table is `methods`, the contract `base`. Names that need torch are looked up on first use."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from paceline.config import NONE
from paceline.drafters.methods import METHODS, method_names

if TYPE_CHECKING:
    from paceline.drafters.base import Drafter, DrafterContext, DraftRequest

DRAFTERS = {name: method.make for name, method in METHODS.items()}
__all__ = ["DRAFTERS", "METHODS", "NONE", "DraftRequest", "Drafter", "DrafterContext", "method_names"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("paceline.drafters.base"), name)
