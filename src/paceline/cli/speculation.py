"""Reads the drafting flags; a flag that would have no effect beside another is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.config import AUTO, SpeculationConfig
from paceline.drafters.methods import check, given_options
from paceline.errors import InvalidParameter

if TYPE_CHECKING:
    from paceline.cli.options import RunOptions

SEVERAL = ("draft_model", "drafter", "suffix_corpus")  # that may be given more than once


def speculation_arguments(options: RunOptions) -> dict[str, Any]:
    """The keywords of LLM that these flags stand for."""
    from paceline.drafters.speculative_config import read

    given: dict[str, Any] = {
        "method": options.method,
        "k": parse_k(options.k),
        "suffix_store": options.suffix_store,
        **{name: tuple(getattr(options, name) or ()) for name in SEVERAL},
    }
    flags = meant = SpeculationConfig(**given)
    if options.speculative_config is not None:
        meant = read(options.speculative_config, flags)
        _refuse_two_opinions(flags, meant)
    check(meant, only_chosen=True)
    return {**given, "speculative_config": options.speculative_config}


def parse_k(text: str) -> int | None:
    if text == AUTO:
        return None
    try:
        return int(text)
    except ValueError:
        raise InvalidParameter("k", f"must be a whole number or {AUTO}, got {text!r}") from None


def _refuse_two_opinions(flags: SpeculationConfig, meant: SpeculationConfig) -> None:
    named = [name for name, unset in (("method", AUTO), ("k", None)) if getattr(flags, name) != unset]
    for name in (*named, *given_options(flags)):
        flag, config = getattr(flags, name), getattr(meant, name)
        if flag != config:
            raise InvalidParameter(name, f"is {flag} here and {config} in speculative_config; give it once")
