"""Verification: logits of a draft's nodes in, the tokens a step commits out. Pure functions of tensors and keys.

The walk (laws 1 and 3) is lossless for any draft. Rows that were sampled from q and carry no seed are verified by the
rules that accept more of such a draft (law 2): block verification on chains, traversal on trees. `verify` chooses the
rule by row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from paceline.core.draft import Draft
from paceline.core.rng import Lane, coin
from paceline.core.verdict import Verdict
from paceline.verify.block import chain
from paceline.verify.dispatch import on_device
from paceline.verify.outcome import Stop, climb, has_children, outcome, take
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
    logprobs,
    logprobs_at,
    probabilities,
    process,
)
from paceline.verify.routes import RowRules, assign_rules
from paceline.verify.sample import pick_weighted, sample
from paceline.verify.tree import tree
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
    "Routes",
    "SamplingMetadata",
    "SamplingMode",
    "draw",
    "edit",
    "logprobs",
    "logprobs_at",
    "pick_weighted",
    "probabilities",
    "process",
    "propose",
    "route",
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
    routes: RowRules | None = None,
    only_chains: bool = False,
    source: CoinSource = coin,
) -> Verdict:
    """The verdict on a batch of drafts, from the raw logits (R, V) of their nodes.

    `row_of` (B, N + 1) is each slot's (0 the root, i + 1 node i) row of logits, -1 for padding; `nodes` is its inverse.
    `max_depth` bounds every depth; the verdict is that wide plus one. `routes`, where the host knows them, and
    `only_chains`, where it knows that no row branches, save a device some work; `source` returns coins.
    """
    given = (draft, logits, row_of, nodes, metadata, draws)
    verdict = verify_rows(*given, max_depth=max_depth, routes=routes, only_chains=only_chains, source=source)
    return verdict if num_logprobs is None else with_logprobs(verdict, logits, row_of, num_logprobs, max_depth)


@on_device
def verify_rows(
    draft: Draft, logits: Tensor, row_of: Tensor, nodes: Nodes, metadata: SamplingMetadata, draws: DrawKeys,
    *, max_depth: int, routes: RowRules | None, only_chains: bool, source: CoinSource,
) -> Verdict:  # fmt: skip
    return _Judge(draft, logits, row_of, nodes, metadata, draws, max_depth, source).verdict(routes)


@dataclass(frozen=True)
class _Judge:
    """The arguments of `verify_rows`. Only nodes that a rule reads are processed."""

    draft: Draft
    logits: Tensor
    row_of: Tensor
    nodes: Nodes
    metadata: SamplingMetadata
    draws: DrawKeys
    max_depth: int
    source: CoinSource

    def verdict(self, routes: RowRules | None) -> Verdict:
        if self.draft.q is None or self.draft.width == 0 or self.max_depth == 0:
            return self.walk(torch.arange(self.draft.batch))
        return self.by_route(assign_rules(self.draft, self.draws) if routes is None else routes)

    def by_route(self, routes: RowRules) -> Verdict:
        parts = [(routes.walk, self.walk), (routes.chain, self.chain), (routes.tree, self.tree)]
        verdicts = [(rows, verify_rows(rows)) for rows, verify_rows in parts if rows is not None]
        return verdicts[0][1] if len(verdicts) == 1 else _merge(verdicts, self.draft.batch)

    def walk(self, rows: Tensor) -> Verdict:
        given = (self.draft, self.logits, self.row_of, self.nodes, self.metadata, self.draws, rows)
        return walk(*given, max_depth=self.max_depth, source=self.source)

    def chain(self, rows: Tensor) -> Verdict:
        judged = self._judged(rows)
        stop = chain(*judged, max_depth=self.max_depth, source=self.source)
        node = torch.arange(self.max_depth, device=rows.device)
        path = torch.where(node < stop.slot[:, None], node, -1)
        return outcome(judged[0], path, stop.slot, self._last(stop, rows), stop.leaf)

    def tree(self, rows: Tensor) -> Verdict:
        judged = self._judged(rows)
        stop = tree(*judged, max_depth=self.max_depth, source=self.source)
        path, num_accepted = climb(judged[0], stop.slot, self.max_depth)
        return outcome(judged[0], path, num_accepted, self._last(stop, rows), stop.leaf)

    def _judged(self, rows: Tensor) -> tuple[Draft, Tensor, Tensor, Tensor, Tensor]:
        """Of these rows the draft, p of slots with children, each slot's row of p, keys and committed lengths."""
        draft, row_of = take(self.draft, rows), self.row_of[rows]
        parents = has_children(draft)
        p = probabilities(self._processed(row_of[parents]))
        index = torch.where(parents, parents.flatten().cumsum(0).view_as(row_of) - 1, -1)
        return draft, p, index, self.draws.key[rows], self.draws.committed[rows]

    def _last(self, stop: Stop, rows: Tensor) -> Tensor:
        """The token after the accepted ones: by the residual, at a leaf by p."""
        coins = self.source(Lane.RESIDUAL, self.draws.key[rows], self.draws.committed[rows], stop.slot - 1)
        at, leaf = self.row_of[rows].gather(1, stop.slot[:, None])[:, 0], stop.leaf
        tokens, inner = torch.empty_like(at), ~leaf
        if bool(leaf.any()):
            tokens[leaf] = sample(self._processed(at[leaf]), coins[leaf])
        if bool(inner.any()):
            tokens[inner] = pick_weighted(stop.residual[inner], coins[inner])
        return tokens

    def _processed(self, at: Tensor) -> Tensor:
        if at.shape[0] == 1:  # a view is as good: nothing writes into the logits
            return process(self.logits[int(at) : int(at) + 1], self.metadata, self.nodes.take(at))
        return process(self.logits[at], self.metadata, self.nodes.take(at))


def _merge(parts: list[tuple[Tensor, Verdict]], batch: int) -> Verdict:
    """One verdict of several, each for its own rows."""

    def put(name: str) -> Tensor:
        values: list[Tensor] = [getattr(verdict, name) for _, verdict in parts]
        merged = values[0].new_empty(batch, *values[0].shape[1:])
        for (rows, _), value in zip(parts, values, strict=True):
            merged[rows] = value
        return merged

    return Verdict(tokens=put("tokens"), num_accepted=put("num_accepted"), path=put("path"), kinds=put("kinds"))


def with_logprobs(verdict: Verdict, logits: Tensor, row_of: Tensor, top: int, max_depth: int) -> Verdict:
    """The verdict with logprobs of every committed token; values beyond num_accepted are undefined. `max_depth` of the
    draft: a captured verification's verdict is as wide as its graph."""
    tokens, path = verdict.tokens[:, : max_depth + 1], verdict.path[:, :max_depth]
    slots = torch.cat((torch.zeros_like(tokens[:, :1]), path + 1), 1).clamp_min(0)  # (B, D + 1)
    rows = row_of.gather(1, slots).clamp_min(0)
    chosen = tokens.clamp(0, logits.shape[1] - 1)  # padding may hold anything
    return replace(verdict, logprobs=logprobs_at(logits, rows, chosen, top))
