"""The table of drafting methods: the one file that spells their names, options and needs.

A new method is one file beside this one and one entry here; no code outside tests which method is in use. The table is
read without torch, so that the command line can check its flags first: a drafter is imported when one is made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from paceline.config import AUTO
from paceline.errors import BrokenModel
from paceline.files.json_fields import read_json

if TYPE_CHECKING:
    from paceline.drafters.base import Drafter

NGRAM = "ngram"
SUFFIX = "suffix"
GRAMMAR = "grammar"
RECYCLING = "recycling"
DRAFT_MODEL = "draft-model"
SKIP = "skip"
MEDUSA = "medusa"
DSPARK = "dspark"
DFLASH = "dflash"
EAGLE = "eagle"
EAGLE3 = "eagle3"
MTP = "mtp"

DRAFTER = "drafter"  # the option that names a trained drafter
SPECULATORS = "speculators"  # the layout of folders that this library writes
SHIPPED = Path(__file__).parent / "shipped"

# Published architectures of drafters that draft a block in one pass.
BLOCK_DRAFTERS = {"Qwen3DSparkModel": DSPARK, "DSparkDraftModel": DSPARK, "DFlashDraftModel": DFLASH}
# Models whose checkpoints hold heads for multi-token prediction; drafters/mtp/layouts.py describes them.
MTP_MODELS = ("MiMoForCausalLM",)


def medusa_drafter(raw: Mapping[str, Any]) -> str | None:
    return MEDUSA if "medusa_num_heads" in raw else None


def block_drafter(raw: Mapping[str, Any]) -> str | None:
    """Return the method of a drafter with this config.json if it drafts a block in one pass."""
    kind, names = raw.get("speculators_model_type"), raw.get("architectures")
    if kind in (DSPARK, DFLASH):
        return str(kind)
    if kind is None and isinstance(names, list) and names and names[0] in BLOCK_DRAFTERS:
        return BLOCK_DRAFTERS[names[0]]
    return (DSPARK if raw.get("markov_rank") else DFLASH) if "dflash_config" in raw else None


def mtp_drafter(raw: Mapping[str, Any]) -> str | None:
    names = raw.get("architectures")
    promises = isinstance(names, list) and names[:1] and names[0] in MTP_MODELS and raw.get("num_nextn_predict_layers")
    return MTP if promises else None


def eagle_drafter(raw: Mapping[str, Any]) -> str | None:
    """Return the method of a drafter with this config.json if it is an EAGLE; some published ones look like any small
    Llama."""
    kind, names = raw.get("speculators_model_type"), str(raw.get("architectures"))
    if kind is not None or block_drafter(raw) is not None or mtp_drafter(raw) is not None:
        return str(kind) if kind in (EAGLE, EAGLE3) else None
    if "Eagle3" in names or "draft_vocab_size" in raw or "eagle_config" in raw:
        return EAGLE3
    return EAGLE if "Eagle" in names or raw.get("num_hidden_layers") == 1 else None


class Method(NamedTuple):
    """A drafting method as the rest of the package sees it before a drafter is made."""

    name: str  # name as users write it
    make: Callable[..., Drafter]  # from a DrafterContext
    options: tuple[str, ...]  # fields of SpeculationConfig it takes, beside method and k
    needs: tuple[str, ...] = ()  # options that must be given
    vllm: str | None = None  # its spelling in vLLM's speculative_config; None: vLLM has no such method
    recognise: Callable[[Mapping[str, Any]], bool] | None = None  # a drafter's config.json is of this method
    export: Callable[..., None] | None = None  # writes a folder for other engines; None: they read it as it is
    structured: bool = False  # it drafts for requests with structured outputs alone
    native: bool = False  # a model's own checkpoint may hold its drafter
    only_by_name: bool = False  # a drafter is made only where the engine's method names it


def _made_by(module: str, maker: str, *more: Any) -> Callable[..., Any]:
    """Return a call of `maker`, a function, class or class method; `more` follow a call's own arguments."""

    def make(*args: Any, **kwargs: Any) -> Any:
        member: Any = import_module(f"paceline.drafters.{module}")
        for name in maker.split("."):
            member = getattr(member, name)
        return member(*args, *more, **kwargs)

    return make


def _trained(name: str, folder: str, make: Callable[..., Drafter], kind: Callable[[Any], str | None]) -> Method:
    """Return the method of a trained drafter; `kind` returns the method that a config.json is of."""
    export = _made_by(f"{folder}.checkpoint", "export")
    return Method(name, make, (DRAFTER,), (DRAFTER,), name, lambda raw: kind(raw) == name, export)


METHODS: Mapping[str, Method] = {
    method.name: method
    for method in (
        Method(NGRAM, _made_by("lookup.suffix", "NgramDrafter"), ("ngram_min", "ngram_max"), vllm="ngram"),
        Method(
            SUFFIX,
            _made_by("lookup.suffix", "SuffixDrafter"),
            ("suffix_corpus", "suffix_store", "suffix_answers", "suffix_bytes"),
            vllm="suffix",
        ),
        Method(GRAMMAR, _made_by("lookup.forced_tokens", "GrammarDrafter"), (), structured=True),
        Method(
            RECYCLING,
            _made_by("lookup.recycling", "RecyclingDrafter"),
            ("suffix_corpus", "suffix_store", "suffix_answers", "suffix_bytes", "recycling_bytes"),
        ),
        Method(
            DRAFT_MODEL,
            _made_by("model.make", "from_context"),
            ("draft_model",),
            needs=("draft_model",),
            vllm="draft_model",
        ),
        Method(SKIP, _made_by("model.layer_skip", "SkipDrafter.from_context"), ("skip_ratio",), only_by_name=True),
        _trained(MEDUSA, "heads", _made_by("heads.medusa", "MedusaDrafter.from_context"), medusa_drafter),
        _trained(DSPARK, "block", _made_by("block.drafter", "DSparkDrafter.from_context", DSPARK), block_drafter),
        _trained(DFLASH, "block", _made_by("block.drafter", "DSparkDrafter.from_context", DFLASH), block_drafter),
        _trained(EAGLE3, "eagle", _made_by("eagle.drafter", "EagleDrafter.from_context", EAGLE3), eagle_drafter),
        _trained(EAGLE, "eagle", _made_by("eagle.drafter", "EagleDrafter.from_context", EAGLE), eagle_drafter)._replace(
            export=None
        ),
        _trained(MTP, "mtp", _made_by("mtp.drafter", "from_context"), mtp_drafter)._replace(export=None, native=True),
    )
}
OPTIONS = tuple(dict.fromkeys(option for method in METHODS.values() for option in method.options))
_NEEDED = {
    "draft_model": "a smaller model",
    DRAFTER: "the folder of a drafter trained for the model",
}


def methods_of(raw: Mapping[str, Any]) -> list[Method]:
    """Return the methods of a trained drafter with this config.json."""
    return [method for method in METHODS.values() if method.recognise is not None and method.recognise(raw)]


def config_of(folder: Path) -> Mapping[str, Any]:
    """Return a folder's config.json; empty where it has none, or a broken one."""
    try:
        return read_json(folder / "config.json")
    except BrokenModel:
        return {}


def accepts_folder(method: str, folder: Path) -> bool:
    """Return whether the trained drafter in a folder may be used where this method is asked for."""
    return method == AUTO or METHODS[method] in methods_of(config_of(folder))


def packaged_folders(root: Path = SHIPPED) -> list[Path]:
    """Return the folders of trained drafters that come with the package, each for one model."""
    return [path.parent for path in sorted(root.glob("*/config.json"))]


def is_packaged(method: str) -> bool:
    """Return whether a drafter of this method comes with the package; for which model is known once that is loaded."""
    return any(accepts_folder(method, folder) for folder in packaged_folders())


def needs_one(method: str, need: str = DRAFTER) -> str:
    return f"method {method} needs {_NEEDED[need]}; name it, or choose {AUTO}"
