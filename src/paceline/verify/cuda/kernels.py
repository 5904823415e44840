"""Verification in Triton kernels: every row and node at once, and no value read by the host, so a graph can capture it.

Rules, coins and noise are those of verify/; enumeration runs over both. Rounding differs: sums are float64 over float32
terms, so p differs from a CPU's in its last bits, and the filters from a CPU's only where the weight reached is within
rounding of top_p.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.core.draft import Draft
from paceline.core.rng import Lane, coin
from paceline.core.verdict import Verdict
from paceline.verify.block import drawn_chains, node_coins
from paceline.verify.cuda.block import stop_chains
from paceline.verify.cuda.recover import recover
from paceline.verify.cuda.sampled import Sampled
from paceline.verify.cuda.target_distribution import TargetDistribution
from paceline.verify.cuda.walk import draw_tokens
from paceline.verify.cuda.walk import walk as _walk
from paceline.verify.processors import Nodes, SamplingMetadata, edit
from paceline.verify.walk import CoinSource, DrawKeys


def process(logits: Tensor, metadata: SamplingMetadata, nodes: Nodes) -> Tensor:
    """Process logits as distribution.process does."""
    edited = edit(logits, metadata, nodes)
    if metadata.temperature is None:
        return edited
    return TargetDistribution.of(edited, metadata, nodes).filtered(metadata, nodes).write(probabilities=False)


def probabilities(logits: Tensor) -> Tensor:
    """Return the p that the rules compare with q, so equal logits give q equal to p."""
    return _plain(logits).weighed().write(probabilities=True)


def draw(logits: Tensor, draws: DrawKeys, nodes: Nodes, source: CoinSource = coin) -> Tensor:
    """Draw tokens as walk.draw does."""
    target = TargetDistribution.of(logits, SamplingMetadata(), nodes)
    return draw_tokens(_for_coins(target, draws), draws, nodes, source)


def propose(
    logits: Tensor, metadata: SamplingMetadata, draws: DrawKeys, nodes: Nodes, source: CoinSource = coin
) -> tuple[Tensor, Tensor | None]:
    """Draw as walk.propose does: a token from the weights of q, as the walk draws from those of p."""
    target = TargetDistribution.of(edit(logits, metadata, nodes), metadata, nodes).filtered(metadata, nodes)
    if draws.kind is None or not draws.coins:
        return draw_tokens(_for_coins(target, draws), draws, nodes, source), None
    target = target.weighed()
    q = target.write(probabilities=True)
    return draw_tokens(target, draws, nodes, lambda lane, *words: source(Lane.DRAFT, *words)), q


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
    """Verify as verify.verify_rows does. The device sorts the rows, and each rule skips rows of the other."""
    target = TargetDistribution.of(edit(logits, metadata, nodes), metadata, nodes)
    if draws.kind is not None:
        target = target.filtered(metadata, nodes)
    only_walks = draft.q is None or draft.width == 0 or draws.kind is None or not draws.coins
    target = _for_coins(target, draws) if only_walks else target.weighed()
    verdict = Verdict.blank(draft.batch, max_depth, logits.device)
    tokens = draw_tokens(target, draws, nodes, source)
    if only_walks:
        _walk(draft, tokens, row_of, None, verdict)  # every row
        return verdict
    row, drawn = torch.arange(draft.batch, device=logits.device), drawn_chains(draft, draws)
    _walk(draft, tokens, row_of, torch.where(drawn, -1, row), verdict)
    inputs, rows = Sampled.of(draft, target, row_of), torch.where(drawn, row, -1)
    stop_chains(inputs, rows, node_coins(source, draws.key, draws.committed, draft.width))
    recover(inputs, rows, draws, source, verdict)
    return verdict


def _for_coins(target: TargetDistribution, draws: DrawKeys) -> TargetDistribution:
    """Weigh the target where a row may sample, by a coin or not: so kernels are compiled once."""
    return target if draws.kind is None else target.weighed(draws.kind)


def _plain(logits: Tensor) -> TargetDistribution:
    return TargetDistribution.of(logits, SamplingMetadata(), Nodes.roots(logits.shape[0], logits.device))
