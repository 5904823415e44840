"""Verification in Triton kernels: every row and node at once, no value read by the host, fit to be captured in a graph.

The rules, the coins and the noise are those of the modules above; enumeration runs over both. What differs is rounding:
sums here are float64 over float32 terms, so p differs from a CPU's in its last bits, and the filters from a CPU's only
where the weight reached is within rounding of top_p.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.core.draft import Draft
from paceline.core.rng import Lane, coin
from paceline.core.verdict import Verdict
from paceline.verify.block import node_coins
from paceline.verify.cuda import block as rules
from paceline.verify.cuda.recover import recover
from paceline.verify.cuda.sampled import Sampled
from paceline.verify.cuda.target_distribution import TargetDistribution
from paceline.verify.cuda.walk import draw_tokens
from paceline.verify.cuda.walk import walk as _walk
from paceline.verify.processors import Nodes, SamplingMetadata, edit
from paceline.verify.routes import RowRules, mask_rules
from paceline.verify.walk import CoinSource, DrawKeys


def process(logits: Tensor, metadata: SamplingMetadata, nodes: Nodes) -> Tensor:
    """As processors.process."""
    edited = edit(logits, metadata, nodes)
    if metadata.temperature is None:
        return edited
    return TargetDistribution.of(edited, metadata, nodes).filtered(metadata, nodes).write(probabilities=False)


def probabilities(logits: Tensor) -> Tensor:
    """As processors.probabilities: the same p that the rules compare with q, so that equal logits give q equal to p."""
    return _plain(logits).weighed().write(probabilities=True)


def draw(logits: Tensor, draws: DrawKeys, nodes: Nodes, source: CoinSource = coin) -> Tensor:
    """As walk.draw."""
    target = TargetDistribution.of(logits, SamplingMetadata(), nodes)
    return draw_tokens(_for_coins(target, draws), draws, nodes, source)


def propose(
    logits: Tensor, metadata: SamplingMetadata, draws: DrawKeys, nodes: Nodes, source: CoinSource = coin
) -> tuple[Tensor, Tensor | None]:
    """As walk.propose. A token is drawn from the same weights as q, as the walk draws from those of p."""
    target = TargetDistribution.of(edit(logits, metadata, nodes), metadata, nodes).filtered(metadata, nodes)
    if draws.kind is None or not draws.coins:
        return draw_tokens(_for_coins(target, draws), draws, nodes, source), None
    target = target.weighed()
    q = target.write(probabilities=True)
    return draw_tokens(target, draws, nodes, lambda lane, *words: source(Lane.DRAFT, *words)), q


def verify_rows(
    draft: Draft, logits: Tensor, row_of: Tensor, nodes: Nodes, metadata: SamplingMetadata, draws: DrawKeys,
    *, max_depth: int, routes: RowRules | None, only_chains: bool, source: CoinSource,
) -> Verdict:  # fmt: skip
    """As verify.judge. Without routes the device sorts the rows, and each rule skips rows of other rules."""
    target = TargetDistribution.of(edit(logits, metadata, nodes), metadata, nodes)
    if draws.kind is not None:
        target = target.filtered(metadata, nodes)
    only_walks = routes is None and (draft.q is None or draft.width == 0 or draws.kind is None or not draws.coins)
    target = _for_coins(target, draws) if only_walks else target.weighed()
    verdict = Verdict.blank(draft.batch, max_depth, logits.device)
    if only_walks:
        _walk(draft, draw_tokens(target, draws, nodes, source), row_of, None, verdict)  # every row
        return verdict
    if routes is None:
        routes = mask_rules(draft, draws, only_chains=only_chains)
    if routes.walk is not None:
        _walk(draft, draw_tokens(target, draws, nodes, source), row_of, routes.walk, verdict)
    if routes.chain is not None or routes.tree is not None:
        _judge(draft, target, row_of, draws, routes, source, verdict)
    return verdict


def _judge(
    draft: Draft,
    target: TargetDistribution,
    row_of: Tensor,
    draws: DrawKeys,
    routes: RowRules,
    source: CoinSource,
    verdict: Verdict,
) -> None:
    """Rows drawn from q."""
    found = Sampled.of(draft, target, row_of)
    coins = node_coins(source, draws.key, draws.committed, draft.width)
    if routes.chain is not None:
        rules.chain(found, routes.chain, coins)
    if routes.tree is not None:
        rules.tree(found, routes.tree, coins)
    parts = [rows for rows in (routes.chain, routes.tree) if rows is not None]
    recover(found, parts[0] if len(parts) == 1 else torch.cat(parts), draws, source, verdict)


def _for_coins(target: TargetDistribution, draws: DrawKeys) -> TargetDistribution:
    """Weighed where a row may sample, whether by a coin or not: so kernels are compiled once."""
    return target if draws.kind is None else target.weighed(draws.kind)


def _plain(logits: Tensor) -> TargetDistribution:
    return TargetDistribution.of(logits, SamplingMetadata(), Nodes.roots(logits.shape[0], logits.device))
