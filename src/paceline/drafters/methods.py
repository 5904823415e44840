"""The table of drafting methods: the one file that spells their names, options, needs and vLLM's names for them.

A new method is one file beside this one and one entry here; no code outside tests which method is in use. The table is
read without torch, so that the command line can check its flags first: a drafter is imported when one is made.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import fields
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from paceline.config import AUTO, NONE, SpeculationConfig
from paceline.errors import InvalidParameter, short_repr

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

DRAFTER = "drafter"  # the option that names a trained drafter
SHIPPED = Path(__file__).parent / "shipped"

# Published architectures of drafters that draft a block in one pass.
BLOCK_DRAFTERS = {"Qwen3DSparkModel": DSPARK, "DSparkDraftModel": DSPARK, "DFlashDraftModel": DFLASH}


def block_drafter(raw: Mapping[str, Any]) -> str | None:
    """The method of a drafter with this config.json, if it drafts a block in one pass."""
    kind, names = raw.get("speculators_model_type"), raw.get("architectures")
    if kind in (DSPARK, DFLASH):
        return str(kind)
    if kind is None and isinstance(names, list) and names and names[0] in BLOCK_DRAFTERS:
        return BLOCK_DRAFTERS[names[0]]
    return (DSPARK if raw.get("markov_rank") else DFLASH) if "dflash_config" in raw else None


def eagle_drafter(raw: Mapping[str, Any]) -> str | None:
    """The method of a drafter with this config.json, if it is an EAGLE; one as published may look like any small
    Llama."""
    kind, names = raw.get("speculators_model_type"), str(raw.get("architectures"))
    if kind is not None or block_drafter(raw) is not None:
        return str(kind) if kind in (EAGLE, EAGLE3) else None
    if "Eagle3" in names or "draft_vocab_size" in raw or "eagle_config" in raw:
        return EAGLE3
    return EAGLE if "Eagle" in names or raw.get("num_hidden_layers") == 1 else None


class Method(NamedTuple):
    """What the rest of the package knows of a method before a drafter of it is made."""

    name: str  # as users write it
    make: Callable[..., Drafter]  # from a DrafterContext
    options: tuple[str, ...]  # fields of SpeculationConfig it takes, beside method and k
    needs: tuple[str, ...] = ()  # those of them that must be given
    vllm: str | None = None  # its spelling in vLLM's speculative_config; None: vLLM has no such method
    covers: tuple[str, ...] = ()  # methods that search the same texts and find less
    recognise: Callable[[Mapping[str, Any]], bool] | None = None  # a drafter's config.json is of this method


def _made_by(module: str, maker: str, *given: Any) -> Callable[..., Drafter]:
    """`maker` is a class or one of its class methods; `given` follow a call's own arguments."""

    def make(*args: Any, **kwargs: Any) -> Drafter:
        found: Any = import_module(f"paceline.drafters.{module}")
        for name in maker.split("."):
            found = getattr(found, name)
        drafter: Drafter = found(*args, *given, **kwargs)
        return drafter

    return make


METHODS: Mapping[str, Method] = {
    method.name: method
    for method in (
        Method(NGRAM, _made_by("lookup.ngram", "NgramDrafter"), ("ngram_min", "ngram_max"), vllm="ngram"),
        Method(
            SUFFIX,
            _made_by("lookup.suffix", "SuffixDrafter"),
            ("suffix_corpus", "suffix_store", "suffix_bytes"),
            vllm="suffix",
            covers=(NGRAM,),
        ),
        Method(
            DRAFT_MODEL,
            _made_by("model.draft_model", "DraftModelDrafter.from_context"),
            ("draft_model",),
            needs=("draft_model",),
            vllm="draft_model",
        ),
        Method(
            MEDUSA,
            _made_by("heads.medusa", "MedusaDrafter.from_context"),
            (DRAFTER,),
            needs=(DRAFTER,),
            vllm="medusa",
            recognise=lambda raw: "medusa_num_heads" in raw,
        ),
        *(
            Method(
                name,
                _made_by("block.drafter", "DSparkDrafter.from_context", name),
                (DRAFTER,),
                needs=(DRAFTER,),
                vllm=name,
                recognise=lambda raw, name=name: block_drafter(raw) == name,  # type: ignore[misc]
            )
            for name in (DSPARK, DFLASH)
        ),
        *(
            Method(
                name,
                _made_by("eagle.drafter", "EagleDrafter.from_context", name),
                (DRAFTER,),
                needs=(DRAFTER,),
                vllm=name,
                recognise=lambda raw, name=name: eagle_drafter(raw) == name,  # type: ignore[misc]
            )
            for name in (EAGLE3, EAGLE)
        ),
    )
}
# Names that users of other engines may try: of our methods, and of methods that are not here.
OTHER_NAMES = {
    **dict.fromkeys(("prompt-lookup", "prompt-lookup-decoding", "pld", "lookup", "[ngram]", "n-gram"), NGRAM),
    **dict.fromkeys(("suffix-decoding", "suffix-tree", "arctic"), SUFFIX),
    **dict.fromkeys(("draft", "speculative", "assisted", "assistant", "standalone"), DRAFT_MODEL),
}
ELSEWHERE = ("mtp", "deepseek-mtp", "hydra", "mlp-speculator", "lookahead", "layerskip", "self-speculative")
OF = ":"  # between the name of a method and that of one of several drafters
OPTIONS = tuple(dict.fromkeys(option for method in METHODS.values() for option in method.options))
_NEEDED = {
    "draft_model": "a smaller model of the same vocabulary",
    DRAFTER: "the folder of a drafter trained for the model",
}
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


class DrafterSpec(NamedTuple):
    """A drafter that can be made. Several of one method have names of their own behind the method's."""

    name: str
    method: Method
    source: str | Path | None  # the draft model, or the trained drafter's folder


def drafter_specs(speculation: SpeculationConfig, checkpoints: SequenceOf[Path] = ()) -> list[DrafterSpec]:
    """Drafters whose needs are all given. A request may choose its own, whichever is the engine's.

    `checkpoints`: folders of trained drafters, each of one method; the one that is asked for by name says itself what
    is wrong with it.
    """
    if speculation.method == NONE:
        return []
    found: list[tuple[Method, str | Path | None]] = []
    for method in METHODS.values():
        if not method.needs:
            found.append((method, None))
        elif "draft_model" in method.needs:
            found += [(method, model) for model in speculation.draft_model if model != NONE]
    trained = [each for each in METHODS.values() if each.recognise is not None]
    for folder in checkpoints:
        raw = _config_of(folder)
        mine = [each for each in trained if each.recognise is not None and each.recognise(raw)]
        if len(checkpoints) == 1 or not mine:
            mine = [each for each in trained if each.name == speculation.method] or mine
        if not mine:
            names = ", ".join(each.name for each in trained)
            raise InvalidParameter("drafter", f"{folder} holds no drafter of a known method; known are {names}")
        found += [(method, folder) for method in mine]
    return [DrafterSpec(name, *each) for name, each in zip(_own_names(found), found, strict=True)]


def _own_names(found: SequenceOf[tuple[Method, str | Path | None]]) -> list[str]:
    """The method's name where it is the only one; else with that of its model or folder behind it."""
    methods, names = [method.name for method, _ in found], list[str]()
    for method, source in found:
        name = method.name
        if methods.count(name) > 1:
            plain = name = f"{name}{OF}{Path(str(source)).name}"
            number = 1
            while name in names:
                number += 1
                name = f"{plain}-{number}"
        names.append(name)
    return names


def matches_method(name: str, asked: str) -> bool:
    """Whether a drafter of this name is meant: by its own name, or by its method's."""
    return asked in (name, name.partition(OF)[0])


def _config_of(checkpoint: Path) -> Mapping[str, Any]:
    try:
        raw = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return raw if isinstance(raw, dict) else {}


def check(speculation: SpeculationConfig, *, only_chosen: bool = False) -> None:
    """Refuse an unknown method, one that lacks what it needs, and options without effect.

    `only_chosen`: no request will choose another method, so options of other methods have no effect either.
    """
    method, known = speculation.method, (*method_names(), AUTO)
    if method not in known:
        raise InvalidParameter("method", unknown_method(method))
    if method == NONE:
        taken: tuple[str, ...] = ()
    else:
        taken = METHODS[method].options if only_chosen and method != AUTO else OPTIONS
    for option in given_options(speculation):
        if option not in taken:
            raise InvalidParameter(option, f"means nothing to method {method}; leave one of the two out")
    for need in METHODS[method].needs if method in METHODS else ():
        given = getattr(speculation, need)
        if given == (NONE,) or not (given or is_packaged(method)):
            raise InvalidParameter(need, needs_one(method, need))


def packaged_folders(root: Path = SHIPPED) -> list[Path]:
    """Trained drafters that come with the package, each for one model."""
    return [path.parent for path in sorted(root.glob("*/config.json"))]


def is_packaged(method: str) -> bool:
    """Whether a drafter of this method comes with the package; for which model is known once that is loaded."""
    return any(accepts_folder(method, folder) for folder in packaged_folders())


def needs_one(method: str, need: str = DRAFTER) -> str:
    return f"method {method} needs {_NEEDED[need]}; name it, or choose {AUTO}"


def accepts_folder(method: str, folder: Path) -> bool:
    """Whether the trained drafter in a folder may be used where this method is asked for."""
    if method == AUTO:
        return True
    recognise = METHODS[method].recognise
    return recognise is not None and recognise(_config_of(folder))


def unknown_method(name: str, known: SequenceOf[str] | None = None) -> str:
    """What to do about a name that is no method here: other engines and papers have other names, and other methods.
    `known`: the names to choose from, where they are not all of them."""
    spelt = name.lower().replace("_", "-")
    ours = OTHER_NAMES.get(spelt, spelt)
    if ours in METHODS and ours != name:
        return f"{short_repr(name)} is called {ours} here"
    if spelt.rstrip("0123456789.") in ELSEWHERE:
        trained = ", ".join(each.name for each in METHODS.values() if "drafter" in each.needs)
        free = f"{AUTO} drafts without training, a trained one may be of {trained}"
        return f"{short_repr(name)} is not available here; {free}"
    known = known or (*method_names(), AUTO)
    near = get_close_matches(spelt, known, n=1)
    return f"{short_repr(name)} is not one of {', '.join(known)}" + (f"; did you mean {near[0]}?" if near else "")
