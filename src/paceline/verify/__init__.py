"""Verification: logits of a draft's nodes in, the tokens a step commits out. Pure functions of tensors and keys.

Every row goes through the walk (laws 1 and 3), which is lossless for any draft; rules that accept more of a sampled
draft stand beside it, and `verify` picks by row.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from paceline.draft import Draft, Logprobs, Verdict
from paceline.verify.processors import (
    BadWords,
    Bias,
    Controls,
    MinTokens,
    Nodes,
    Penalties,
    logprobs,
    probabilities,
    process,
)
from paceline.verify.walk import Draws, draw, walk

__all__ = [
    "BadWords",
    "Bias",
    "Controls",
    "Draws",
    "MinTokens",
    "Nodes",
    "Penalties",
    "draw",
    "logprobs",
    "probabilities",
    "process",
    "verify",
    "walk",
]


def verify(
    draft: Draft,
    logits: Tensor,
    row_of: Tensor,
    nodes: Nodes,
    controls: Controls,
    draws: Draws,
    *,
    max_depth: int,
    num_logprobs: int | None = None,
) -> Verdict:
    """Judge a batch of drafts by the raw logits (R, V) of their nodes.

    `row_of` (B, N + 1) gives each slot (0 the root, i + 1 node i) its row of logits, -1 for padding; `nodes` is that
    the other way round. `max_depth` bounds every depth; the verdict is that wide plus one.
    """
    tokens = draw(process(logits, controls, nodes), draws, nodes)
    verdict = walk(draft, tokens, row_of, max_depth)
    if num_logprobs is None:
        return verdict
    return dataclasses.replace(verdict, logprobs=_committed_logprobs(verdict, logits, row_of, num_logprobs))


def _committed_logprobs(verdict: Verdict, logits: Tensor, row_of: Tensor, top: int) -> Logprobs:
    """Of every committed token; what stands beyond num_accepted is not meant to be read."""
    slots = torch.cat((torch.zeros_like(verdict.tokens[:, :1]), verdict.path + 1), 1).clamp_min(0)  # (B, D + 1)
    rows = row_of.gather(1, slots).clamp_min(0)
    return logprobs(logits[rows], verdict.tokens.clamp_min(0), top)
