"""A draft model beside its target: loaded in the target's precision or a cheaper one, and compared by vocabulary."""

from __future__ import annotations

from pathlib import Path

import torch

from paceline.drafters.base import DrafterContext
from paceline.models.backends.cpu.kernels import NativeKernels
from paceline.models.kernels import FLOAT32, INT8
from paceline.models.load.loader import load_all_weights, load_config
from paceline.models.load.open_model import TYPICAL, LoadedModel, load_model


def load_beside(path: Path, context: DrafterContext) -> LoadedModel:
    """Load a draft model in the precision of the target, but with int8 activations where its weights are blocks and
    native kernels serve: no output depends on a drafter's rounding."""
    return load_model(
        path,
        activations=INT8 if _may_round(path, context) else FLOAT32,
        # auto stores plain numbers in bf16 on a GPU, and leaves codes and blocks small.
        dtype="auto" if context.dtype == "bfloat16" else context.dtype,
        device=context.device.type,
        threads=torch.get_num_threads(),  # set by the target; loading a second model must not change it
        kv_dtype=context.kv_dtype,
    )


def _may_round(path: Path, context: DrafterContext) -> bool:
    if context.dtype != "auto" or not isinstance(context.kernels, NativeKernels):
        return False
    weights, _ = load_all_weights(path, load_config(path), lambda name: True)
    return weights.kinds[TYPICAL].is_blocks


def shares_vocabulary(loaded: LoadedModel, context: DrafterContext) -> bool:
    """Return whether a draft model's token ids stand for the same texts as the target's."""
    targets = context.config.vocab_size
    if loaded.config.vocab_size != targets:
        return False
    text, own_text = context.token_texts, loaded.tokenizer.token_text
    return text is None or all(text(token) == own_text(token) for token in range(targets))
