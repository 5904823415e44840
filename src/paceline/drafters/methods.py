"""The table of drafting methods: the one file that spells their names, options, needs and vLLM's names for them.

A new method is one file beside this one and one entry here; no code outside tests which method is in use. The table is
read without torch, so that the command line can check its flags first: a drafter is imported when one is made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from paceline.config import AUTO, NONE, SpeculationConfig
from paceline.errors import InvalidParameter

if TYPE_CHECKING:
    from paceline.drafters.base import Drafter

NGRAM = "ngram"
SUFFIX = "suffix"
DRAFT_MODEL = "draft-model"
MEDUSA = "medusa"
DSPARK = "dspark"
DFLASH = "dflash"
EAGLE = "eagle"
EAGLE3 = "eagle3"


class Method(NamedTuple):
    name: str  # as users write it
    make: Callable[..., Drafter]  # from a DrafterContext
    options: tuple[str, ...]  # fields of SpeculationConfig it takes, beside method and k
    needs: tuple[str, ...] = ()  # those of them that must be given
    vllm: str | None = None  # its spelling in vLLM's speculative_config; None: vLLM has no such method
    covers: tuple[str, ...] = ()  # methods that search the same texts and find less


def _made_by(module: str, maker: str) -> Callable[..., Drafter]:
    """`maker` is a class or one of its class methods."""

    def make(*args: Any, **kwargs: Any) -> Drafter:
        found: Any = import_module(f"paceline.drafters.{module}")
        for name in maker.split("."):
            found = getattr(found, name)
        drafter: Drafter = found(*args, **kwargs)
        return drafter

    return make


METHODS: Mapping[str, Method] = {
    method.name: method
    for method in (
        Method(NGRAM, _made_by("ngram", "NgramDrafter"), ("ngram_min", "ngram_max"), vllm="ngram"),
        Method(
            SUFFIX,
            _made_by("suffix", "SuffixDrafter"),
            ("suffix_corpus", "suffix_store", "suffix_bytes"),
            vllm="suffix",
            covers=(NGRAM,),
        ),
        Method(
            DRAFT_MODEL,
            _made_by("draft_model", "DraftModelDrafter.from_context"),
            ("draft_model",),
            needs=("draft_model",),
            vllm="draft_model",
        ),
        Method(
            MEDUSA, _made_by("medusa", "MedusaDrafter.from_context"), ("drafter",), needs=("drafter",), vllm="medusa"
        ),
        *(
            Method(name, _made_by("eagle_drafter", "EagleDrafter.from_context"), ("drafter",), ("drafter",), vllm=name)
            for name in (EAGLE3, EAGLE)
        ),
    )
}
OPTIONS = tuple(dict.fromkeys(option for method in METHODS.values() for option in method.options))
_UNSET = {field.name: field.default for field in fields(SpeculationConfig)}


def method_names() -> tuple[str, ...]:
    return (NONE, *METHODS)


def by_vllm_name(name: object) -> Method | None:
    """The method of this name in vLLM; our own spelling is accepted too."""
    return next((method for method in METHODS.values() if name in (method.vllm, method.name)), None)


def given_options(speculation: SpeculationConfig) -> list[str]:
    return [
        name for name, unset in _UNSET.items() if name not in ("method", "k") and getattr(speculation, name) != unset
    ]


def available(speculation: SpeculationConfig) -> list[Method]:
    """Methods whose needs are all given. A request may choose its own, whichever is the engine's."""
    if speculation.method == NONE:
        return []
    return [each for each in METHODS.values() if all(getattr(speculation, need) is not None for need in each.needs)]


def check(speculation: SpeculationConfig, *, only_chosen: bool = False) -> None:
    """Refuse an unknown method, one that lacks what it needs, and options without effect.

    `only_chosen`: no request will choose another method, so options of other methods have no effect either.
    """
    method, known = speculation.method, (*method_names(), AUTO)
    if method not in known:
        raise InvalidParameter("method", f"{method!r} is not one of {', '.join(known)}")
    if method == NONE:
        taken: tuple[str, ...] = ()
    else:
        taken = METHODS[method].options if only_chosen and method != AUTO else OPTIONS
    for option in given_options(speculation):
        if option not in taken:
            raise InvalidParameter(option, f"means nothing to method {method}; leave one of the two out")
    for need in METHODS[method].needs if method in METHODS else ():
        if getattr(speculation, need) is None:
            raise InvalidParameter(need, f"method {method} needs one; give it, or choose another method")
