"""A draft model beside its target: loaded in the target's precision or a cheaper one, and refused if its token ids mean
other texts."""

from __future__ import annotations

from pathlib import Path

import torch

from paceline.drafters.base import DrafterContext
from paceline.errors import InvalidParameter
from paceline.models.backends.cpu.kernels import NativeKernels
from paceline.models.kernels import FLOAT32, INT8
from paceline.models.load.loader import load_all_weights, load_config
from paceline.models.load.open_model import TYPICAL, LoadedModel, load_model


def load_beside(name: str, path: Path, context: DrafterContext) -> LoadedModel:
    """Load a draft model in the precision of the target, but with int8 activations where its weights are blocks and
    native kernels serve: no output depends on a drafter's rounding. One of another vocabulary is refused."""
    loaded = load_model(
        path,
        activations=INT8 if _may_round(path, context) else FLOAT32,
        # auto stores plain numbers in bf16 on a GPU, and leaves codes and blocks small.
        dtype="auto" if context.dtype == "bfloat16" else context.dtype,
        device=context.device.type,
        threads=torch.get_num_threads(),  # set by the target; loading a second model must not change it
        kv_dtype=context.kv_dtype,
    )
    check_vocabulary(name, loaded, context)
    return loaded


def _may_round(path: Path, context: DrafterContext) -> bool:
    if context.dtype != "auto" or not isinstance(context.kernels, NativeKernels):
        return False
    weights, _ = load_all_weights(path, load_config(path), lambda name: True)
    return weights.kinds[TYPICAL].is_blocks


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
