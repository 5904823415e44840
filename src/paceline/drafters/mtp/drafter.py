"""Heads for multi-token prediction draft as EAGLE does: dynamic trees, K/V of (hidden state of t, token t + 1)."""

from __future__ import annotations

from paceline.drafters.base import DrafterContext
from paceline.drafters.eagle.drafter import EagleDrafter
from paceline.drafters.folder import refuse_other_drafter
from paceline.drafters.mtp.checkpoint import read, read_native


def from_context(context: DrafterContext) -> EagleDrafter:
    """Make the drafter of a folder, or of the head in the model's own checkpoint where no folder is named."""
    if context.checkpoint is None:
        config, tensors = read_native(context.config, context.extra)
    else:
        config, tensors = read(context.checkpoint, context.config)
        refuse_other_drafter(config.method, config.target, config.method, context.embedding, context.checkpoint)
    return EagleDrafter.of(config, tensors, context)
