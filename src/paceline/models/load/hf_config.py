"""A Hugging Face config.json as a ModelConfig, by its family, or an error with the reason why it is none."""

from __future__ import annotations

from paceline.errors import BrokenModel, UnsupportedModel, short_repr
from paceline.files.json_fields import Json, JsonFields
from paceline.models.families import FAMILIES, by_class, by_model_type, hf, nearest
from paceline.models.families.family import Family
from paceline.models.load.quantized_config import KEYS, Quantization, parse_quantization
from paceline.models.spec import ModelConfig

SPECIAL = ("bos_token_id", "eos_token_id")  # keys of a wrapper that its text_config may leave out
TIED = "tie_word_embeddings"


def parse_checkpoint(raw: Json, source: str) -> tuple[ModelConfig, Quantization | None]:
    """Read the config of a model whose weights may be quantised; `source` names the file in errors."""
    plain = {key: value for key, value in raw.items() if key not in KEYS}
    return parse_config(plain, source), parse_quantization(raw, source)


def parse_config(raw: Json, source: str) -> ModelConfig:
    """Read the config of a model whose weights are plain numbers."""
    family, name = _family(raw, source)
    if name in family.wrappers:
        text = JsonFields(raw, source).section("text_config").values
        family = by_model_type(text.get("model_type")) or family
        tied = {TIED: raw[TIED]} if TIED in raw else {}  # the wrapper's own decides, as in transformers
        raw = {key: raw[key] for key in SPECIAL if key in raw} | text | tied
    values = dict(raw)
    for key, value in family.defaults.items():
        if values.get(key) is None:
            values[key] = value
    return hf.read(JsonFields(values, source), family)


def is_wrapper(raw: Json) -> bool:
    """Return whether a config is that of a multimodal model whose text is served."""
    names = raw.get("architectures") or []
    return isinstance(names, list) and any(name in family.wrappers for name in names for family in FAMILIES)


def _family(raw: Json, source: str) -> tuple[Family, str]:
    """Return the family of a config, and the class that names it."""
    names = raw.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise BrokenModel(f"{source}: architectures must be a list of names, found {short_repr(names)}")
    if len(names) == 1 and (family := by_class(names[0])) is not None:
        return family, names[0]
    if not names:
        model_type = raw.get("model_type")
        if (family := by_model_type(model_type)) is not None:
            return family, family.classes[0]
        if model_type is None:
            raise BrokenModel(f"{source}: the key architectures is missing, so the model cannot be recognised")
        names = [short_repr(model_type)]
    known = [name for family in FAMILIES for name in (*family.classes, *family.wrappers)]
    raise UnsupportedModel(
        f"{source}: architecture {', '.join(names)} is not supported; supported: {', '.join(known)}"
        f"{nearest(names[0], known)}"
    )
