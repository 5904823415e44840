"""Model families, one file each; this registry is all that other code knows of them."""

from __future__ import annotations

import difflib

from paceline.models.families import (
    cohere2,
    ernie4_5,
    exaone4,
    gemma2,
    gemma3,
    glm4,
    granite,
    llama,
    mistral,
    mistral3,
    olmo2,
    phi3,
    qwen2,
    qwen3,
    seed_oss,
    smollm3,
)
from paceline.models.families.family import Family

FAMILIES: list[Family] = [
    module.FAMILY
    for module in (
        *(llama, mistral, qwen2, qwen3, gemma2, gemma3, mistral3, phi3, granite, smollm3),
        *(olmo2, glm4, cohere2, exaone4, seed_oss, ernie4_5),
    )
]


def family_of(architecture: str) -> Family:
    """Return the family of a ModelConfig."""
    return next(family for family in FAMILIES if family.name == architecture)


def by_class(name: str) -> Family | None:
    return next((one for one in FAMILIES if name in one.classes or name in one.wrappers), None)


def by_model_type(name: object) -> Family | None:
    return next((one for one in FAMILIES if name == one.name or name in one.model_types), None)


def by_gguf(name: object) -> Family | None:
    return next((one for one in FAMILIES if name is not None and name == one.gguf), None)


def nearest(name: str, known: list[str]) -> str:
    """Return the end of a message: the known name that is most like this one, if one is."""
    like = difflib.get_close_matches(name, known, 1, 0.6)
    return f"; the nearest is {like[0]}" if like else ""
