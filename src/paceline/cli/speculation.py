"""The drafting flags: read, and refused where one would have no effect beside another."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.errors import InvalidParameter

if TYPE_CHECKING:
    from paceline.cli.options import RunOptions
    from paceline.config import SpeculationConfig

AUTO, NONE = "auto", "none"
# Flag -> the methods it speaks to; None: to every method that drafts.
MEANT_FOR: dict[str, tuple[str, ...] | None] = {
    "k": None,
    "draft_model": (AUTO, "draft-model"),
    "suffix_corpus": (AUTO, "suffix"),
    "suffix_store": (AUTO, "suffix"),
}


def speculation_arguments(options: RunOptions) -> dict[str, Any]:
    """What LLM takes, by its names."""
    from paceline.config import SpeculationConfig
    from paceline.speculative_config import read

    given: dict[str, Any] = {
        "method": options.method,
        "k": parse_k(options.k),
        "draft_model": options.draft_model,
        "suffix_corpus": tuple(options.suffix_corpus or ()),
        "suffix_store": options.suffix_store,
    }
    flags = meant = SpeculationConfig(**given)
    if options.speculative_config is not None:
        meant = read(options.speculative_config, flags)
        _refuse_two_opinions(flags, meant)
    _refuse_without_effect(meant)
    return {**given, "speculative_config": options.speculative_config}


def parse_k(text: str) -> int | None:
    if text == AUTO:
        return None
    try:
        return int(text)
    except ValueError:
        raise InvalidParameter("k", f"must be a whole number or {AUTO}, got {text!r}") from None


def _refuse_two_opinions(flags: SpeculationConfig, meant: SpeculationConfig) -> None:
    for name, unset in (("method", AUTO), ("k", None), ("draft_model", None)):
        flag, config = getattr(flags, name), getattr(meant, name)
        if flag not in (unset, config):
            raise InvalidParameter(name, f"is {flag} here and {config} in speculative_config; give it once")


def _refuse_without_effect(meant: SpeculationConfig) -> None:
    for name, methods in MEANT_FOR.items():
        heard = meant.method != NONE if methods is None else meant.method in methods
        if getattr(meant, name) and not heard:
            raise InvalidParameter(name, f"means nothing to method {meant.method}; leave one of the two out")
