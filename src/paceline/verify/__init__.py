"""Verification: logits of a draft's nodes in, the tokens a step commits out. Pure functions of tensors and keys.

The walk (laws 1 and 3) is lossless for any draft. Chains drawn from q for requests that draw by coins are verified by
block verification (law 2), which accepts more of them. `verify` chooses the rule by row.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from paceline.core.draft import Draft
from paceline.core.rng import coin
from paceline.core.verdict import Verdict
from paceline.verify.block import drawn_chains, verify_block
from paceline.verify.dispatch import on_device
from paceline.verify.distribution import logprobs, logprobs_at, probabilities, process
from paceline.verify.processors import (
    BadWords,
    Bias,
    FilterSet,
    GrammarMasks,
    MinTokens,
    Nodes,
    Penalties,
    SamplingMetadata,
    edit,
)
from paceline.verify.sample import sample_weighted
from paceline.verify.walk import CoinSource, DrawKeys, SamplingMode, draw, propose, walk

__all__ = [
    "BadWords",
    "Bias",
    "CoinSource",
    "DrawKeys",
    "FilterSet",
    "GrammarMasks",
    "MinTokens",
    "Nodes",
    "Penalties",
    "SamplingMetadata",
    "SamplingMode",
    "draw",
    "edit",
    "logprobs",
    "logprobs_at",
    "probabilities",
    "process",
    "propose",
    "sample_weighted",
    "verify",
    "with_logprobs",
]


def verify(
    draft: Draft,
    logits: Tensor,
    row_of: Tensor,
    nodes: Nodes,
    metadata: SamplingMetadata,
    draws: DrawKeys,
    *,
    max_depth: int,
    num_logprobs: int | None = None,
    source: CoinSource = coin,
) -> Verdict:
    """Return the verdict on a batch of drafts, from the raw logits (R, V) of their nodes.

    `row_of` (B, N + 1) is each slot's (0 the root, i + 1 node i) row of logits, -1 for padding; `nodes` is its inverse.
    `max_depth` bounds every depth; the verdict is that wide plus one. `source` returns coins.
    """
    verdict = verify_rows(draft, logits, row_of, nodes, metadata, draws, max_depth=max_depth, source=source)
    return verdict if num_logprobs is None else with_logprobs(verdict, logits, row_of, num_logprobs, max_depth)


@on_device
def verify_rows(
    draft: Draft,
    logits: Tensor,
    row_of: Tensor,
    nodes: Nodes,
    metadata: SamplingMetadata,
    draws: DrawKeys,
    *,
    max_depth: int,
    source: CoinSource,
) -> Verdict:
    """Verify every row by the rule that accepts most of it."""
    step = (draft, logits, row_of, nodes, metadata, draws)
    if draft.q is None or draft.width == 0 or max_depth == 0:
        return walk(*step, torch.arange(draft.batch), max_depth=max_depth, source=source)
    drawn = drawn_chains(draft, draws)
    rules = [(walk, ~drawn), (verify_block, drawn)]
    parts = [(rule, chosen.nonzero()[:, 0]) for rule, chosen in rules if bool(chosen.any())]
    verdicts = [(rows, rule(*step, rows, max_depth=max_depth, source=source)) for rule, rows in parts]
    return verdicts[0][1] if len(verdicts) == 1 else _merge(verdicts, draft.batch)


def _merge(parts: list[tuple[Tensor, Verdict]], batch: int) -> Verdict:
    """Merge the verdicts on different rows into one."""

    def put(name: str) -> Tensor:
        values: list[Tensor] = [getattr(verdict, name) for _, verdict in parts]
        merged = values[0].new_empty(batch, *values[0].shape[1:])
        for (rows, _), value in zip(parts, values, strict=True):
            merged[rows] = value
        return merged

    return Verdict(tokens=put("tokens"), num_accepted=put("num_accepted"), path=put("path"), kinds=put("kinds"))


def with_logprobs(verdict: Verdict, logits: Tensor, row_of: Tensor, top: int, max_depth: int) -> Verdict:
    """Return the verdict with logprobs of every committed token; values beyond num_accepted are undefined.

    `max_depth` is the draft's: a captured verification's verdict is as wide as its graph.
    """
    tokens, path = verdict.tokens[:, : max_depth + 1], verdict.path[:, :max_depth]
    slots = torch.cat((torch.zeros_like(tokens[:, :1]), path + 1), 1).clamp_min(0)  # (B, D + 1)
    rows = row_of.gather(1, slots).clamp_min(0)
    chosen = tokens.clamp(0, logits.shape[1] - 1)  # padding may hold anything
    return replace(verdict, logprobs=logprobs_at(logits, rows, chosen, top))
