"""Names of methods and drafters: those of other engines, those of several drafters, and hints about unknown ones."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from difflib import get_close_matches
from pathlib import Path
from typing import NamedTuple

from paceline.config import AUTO, NONE, SpeculationConfig
from paceline.drafters.methods import DRAFT_MODEL, METHODS, MTP, NGRAM, SKIP, SUFFIX, Method, config_of, methods_of
from paceline.errors import InvalidParameter, short_repr

# Names that users of other engines may try for methods of this package, and methods that it does not have.
OTHER_NAMES = {
    **dict.fromkeys(("prompt-lookup", "prompt-lookup-decoding", "pld", "lookup", "[ngram]", "n-gram"), NGRAM),
    **dict.fromkeys(("suffix-decoding", "suffix-tree", "arctic"), SUFFIX),
    **dict.fromkeys(("deepseek-mtp", "mimo-mtp", "nextn", "multi-token-prediction"), MTP),
    **dict.fromkeys(("layerskip", "layer-skip", "self-speculative", "swift", "knapspec"), SKIP),
    **dict.fromkeys(("draft", "speculative", "assisted", "assistant", "standalone"), DRAFT_MODEL),
}
ELSEWHERE = ("hydra", "mlp-speculator", "lookahead")
SEPARATOR = ":"  # between the name of a method and that of one of its drafters


def method_names() -> tuple[str, ...]:
    return (NONE, *METHODS)


def by_vllm_name(name: object) -> Method | None:
    """Return the method of this name in vLLM; this package's spelling is accepted too."""
    return next((method for method in METHODS.values() if name in (method.vllm, method.name)), None)


def matches_method(name: str, asked: str) -> bool:
    """Return whether a drafter of this name is meant, by its own name or by its method's."""
    return asked in (name, name.partition(SEPARATOR)[0])


def unknown_method(name: str, known: SequenceOf[str] | None = None) -> str:
    """Return what to do about a name that is no method: other engines and papers have other names, and other methods.

    `known`: the names to choose from, where they are not all of them.
    """
    spelt = name.lower().replace("_", "-")
    ours = OTHER_NAMES.get(spelt, spelt)
    if ours in METHODS and ours != name:
        return f"{short_repr(name)} is called {ours} here"
    if spelt.rstrip("0123456789.") in ELSEWHERE:
        trained = ", ".join(method.name for method in METHODS.values() if method.recognise is not None)
        free = f"{AUTO} drafts without training, a trained one may be of {trained}"
        return f"{short_repr(name)} is not available here; {free}"
    known = known or (*method_names(), AUTO)
    near = get_close_matches(spelt, known, n=1)
    return f"{short_repr(name)} is not one of {', '.join(known)}" + (f"; did you mean {near[0]}?" if near else "")


class DrafterSpec(NamedTuple):
    """A drafter that can be made."""

    name: str  # the method's; of several drafters of one method each has its model's or folder's name behind it
    method: Method
    source: str | Path | None  # the draft model, or the trained drafter's folder


def drafter_specs(
    speculation: SpeculationConfig, checkpoints: SequenceOf[Path] = (), *, native_heads: bool = False
) -> list[DrafterSpec]:
    """Return the drafters whose needs are all given; a request may choose any of them.

    `checkpoints`: folders of trained drafters, each of one method. A folder that is not recognised counts as one of the
    method that is asked for by name: loading it then says what is wrong. `native_heads`: the model's own checkpoint
    holds heads for multi-token prediction.
    """
    if speculation.method == NONE:
        return []
    sources: list[tuple[Method, str | Path | None]] = []
    for method in METHODS.values():
        if method.only_by_name and speculation.method != method.name:
            continue
        if not method.needs:
            sources.append((method, None))
        elif "draft_model" in method.needs:
            sources += [(method, model) for model in speculation.draft_model if model != NONE]
    trained = [method for method in METHODS.values() if method.recognise is not None]
    for folder in checkpoints:
        methods = methods_of(config_of(folder))
        if len(checkpoints) == 1 or not methods:
            methods = [method for method in trained if method.name == speculation.method] or methods
        if not methods:
            names = ", ".join(method.name for method in trained)
            raise InvalidParameter("drafter", f"{folder} holds no drafter of a known method; known are {names}")
        sources += [(method, folder) for method in methods]
    if native_heads and speculation.drafter != (NONE,):
        sources.append((METHODS[MTP], None))
    return [DrafterSpec(name, *source) for name, source in zip(_own_names(sources), sources, strict=True)]


def _own_names(sources: SequenceOf[tuple[Method, str | Path | None]]) -> list[str]:
    methods, names = [method.name for method, _ in sources], list[str]()
    for method, source in sources:
        name = method.name
        if methods.count(name) > 1:
            plain = name = f"{name}{SEPARATOR}{Path(str(source)).name}"
            number = 1
            while name in names:
                number += 1
                name = f"{plain}-{number}"
        names.append(name)
    return names
