"""A draft model beside its target: loaded in the target's precision, and refused if its token ids mean other texts."""

from __future__ import annotations

from pathlib import Path

import torch

from paceline.drafters.base import DrafterContext
from paceline.errors import InvalidParameter
from paceline.models.load.open_model import LoadedModel, load_model


def load_beside(name: str, path: Path, context: DrafterContext) -> LoadedModel:
    """Load a draft model in the precision of the target; one of another vocabulary is refused."""
    loaded = load_model(
        path,
        # auto stores plain numbers in bf16 on a GPU, and leaves codes and blocks small.
        dtype="auto" if context.dtype == "bfloat16" else context.dtype,
        device=context.device.type,
        threads=torch.get_num_threads(),  # set by the target; loading a second model must not change it
        kv_dtype=context.kv_dtype,
    )
    check_vocabulary(name, loaded, context)
    return loaded


def check_vocabulary(name: str, loaded: LoadedModel, context: DrafterContext) -> None:
    """Refuse a draft model whose token ids stand for other texts than the target's."""
    own, targets = loaded.config.vocab_size, context.config.vocab_size
    advice = "a draft model must share the target's vocabulary, as smaller models of its family do"
    if own != targets:
        raise InvalidParameter("draft_model", f"{name} has {own} tokens and the target {targets}; {advice}")
    if context.token_texts is None:
        return
    text, own_text = context.token_texts, loaded.tokenizer.token_text
    differs = next((token for token in range(targets) if text(token) != own_text(token)), None)
    if differs is not None:
        raise InvalidParameter(
            "draft_model",
            f"{name} has another vocabulary: token {differs} is {own_text(differs)!r} there "
            f"and {text(differs)!r} in the target; {advice}",
        )
