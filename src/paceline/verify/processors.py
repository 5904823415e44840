"""Sampling parameters as tensors, and those that change single logits: penalties, biases and bans at every node.

In this order, as vLLM: repetition penalty (prompt and output), frequency and presence penalties (output), logit_bias,
bans (allowed_token_ids, a grammar, bad words, min_tokens); a greedy row takes its argmax after them, others go on to
distribution.py. A node's history is its sequence's committed tokens and its own drafted ancestors, so a tree of nodes
gives the result of a loop of one-token calls.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.core.draft import Draft, ancestors


@dataclass(frozen=True, kw_only=True)
class Penalties:
    """Penalties of S sequences; neutral values (1, 0, 0) where a sequence has none."""

    repetition: Tensor  # (S,)
    presence: Tensor  # (S,)
    frequency: Tensor  # (S,)
    in_prompt: Tensor  # (S, V) bool
    counts: Tensor  # (S, V) int32, of the committed output


@dataclass(frozen=True, kw_only=True)
class Bias:
    """Biases (logit_bias) of S sequences, as lists of different lengths."""

    tokens: Tensor  # (S, K) int64, -1 = padding
    values: Tensor  # (S, K)


@dataclass(frozen=True, kw_only=True)
class BadWords:
    """Token runs that must not appear: the last token is banned where the ones before it end the text."""

    words: Tensor  # (S, W, T + 1) int64, flush right, -1 to the left; all -1 = no word
    tail: Tensor  # (S, T) int64, the last committed tokens, flush right, -1 where there are fewer


@dataclass(frozen=True, kw_only=True)
class MinTokens:
    """End tokens are banned until the output is long enough."""

    minimum: Tensor  # (S,) int64
    output_len: Tensor  # (S,) int64, committed
    ends: Tensor  # (S, K) int64, EOS and stop ids, -1 = padding


@dataclass(frozen=True, kw_only=True)
class GrammarMasks:
    """Tokens that may follow at the nodes of sequences that have a grammar."""

    bits: Tensor  # (M, ceil(V / 32)) int32, token i is bit i % 32 of word i // 32; 1 = may be drawn
    row_of: Tensor  # (S, N + 1) int64, the row of the last committed token (0) and of each node (i + 1); -1: no mask


class FilterSet(IntEnum):
    """Columns of a step's parameters. A sequence that lacks a parameter has a neutral value there, which changes no bit
    of its result, so a row's token does not depend on the columns of its step."""

    GREEDY = 0  # none
    DRAWS = 1  # temperature
    FILTERS = 2  # temperature, top_p, min_p
    TOP_K = 3  # and top_k: separate, since on a device it needs a search of its own, as long as the one for top_p

    @staticmethod
    def of(*, greedy: bool, top_k: bool, filters: bool) -> FilterSet:
        """Return the smallest set that has a sequence's parameters."""
        return (
            FilterSet.GREEDY
            if greedy
            else FilterSet.TOP_K
            if top_k
            else FilterSet.FILTERS
            if filters
            else FilterSet.DRAWS
        )


@dataclass(frozen=True, kw_only=True)
class SamplingMetadata:
    """Parameters of S sequences. A part that no sequence uses is None and costs nothing."""

    temperature: Tensor | None = None  # (S,), 0 = greedy; None: all are
    top_k: Tensor | None = None  # (S,) int64, 0 = off
    top_p: Tensor | None = None  # (S,), 1 = off
    min_p: Tensor | None = None  # (S,), 0 = off
    penalties: Penalties | None = None
    bias: Bias | None = None
    allowed: Tensor | None = None  # (S, V) bool, True = may be drawn; all True where a sequence names none
    grammar: GrammarMasks | None = None
    bad_words: BadWords | None = None
    min_tokens: MinTokens | None = None
    fallback: Tensor | None = None  # (S,) int64, the token (EOS) allowed again where every one is banned; None: token 0

    @staticmethod
    def of(
        filter_set: FilterSet,
        temperature: Tensor | None = None,
        top_k: Tensor | None = None,
        top_p: Tensor | None = None,
        min_p: Tensor | None = None,
        **edits: Any,
    ) -> SamplingMetadata:
        """Return the parameters with the columns that `filter_set` needs."""
        return SamplingMetadata(
            temperature=temperature if filter_set >= FilterSet.DRAWS else None,
            top_k=top_k if filter_set >= FilterSet.TOP_K else None,
            top_p=top_p if filter_set >= FilterSet.FILTERS else None,
            min_p=min_p if filter_set >= FilterSet.FILTERS else None,
            **edits,
        )

    @property
    def filters(self) -> bool:
        """Return whether a sequence has a filter, which drops tokens."""
        return not (self.top_k is None and self.top_p is None and self.min_p is None)

    @functools.cached_property
    def on_host(self) -> list[tuple[float, int, float, float]]:
        """Return temperature, top_k, top_p and min_p of each sequence as plain numbers."""
        assert self.temperature is not None
        off: list[tuple[Tensor | None, float]] = [(self.top_k, 0), (self.top_p, 1.0), (self.min_p, 0.0)]
        size = self.temperature.shape[0]
        rest = [[neutral] * size if part is None else part.tolist() for part, neutral in off]
        return list(zip(self.temperature.tolist(), *rest, strict=True))

    @property
    def edits(self) -> bool:
        """Return whether a sequence changes single logits."""
        parts = (self.penalties, self.bias, self.allowed, self.grammar, self.bad_words, self.min_tokens)
        return any(part is not None for part in parts)

    @property
    def unedited(self) -> SamplingMetadata:
        """Return temperature and filters alone."""
        return SamplingMetadata(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p, min_p=self.min_p)


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """Origins of R rows of logits: each the root or a node of one sequence's draft."""

    seq: Tensor  # (R,) int64, index into the sampling metadata
    node: Tensor  # (R,) int64, -1 = the root
    depth: Tensor  # (R,) int64, 0 = the root
    path: Tensor  # (R, D) int64, tokens of the drafted ancestors, the node itself last, -1 beyond

    @staticmethod
    def roots(batch: int, device: torch.device | str = "cpu") -> Nodes:
        """Return rows that are sequences with nothing drafted."""
        seq = torch.arange(batch, device=device)
        return Nodes(seq=seq, node=torch.full_like(seq, -1), depth=torch.zeros_like(seq), path=seq.new_empty(batch, 0))

    @staticmethod
    def of(draft: Draft, seq: Tensor, node: Tensor, max_depth: int, *, with_path: bool = True) -> Nodes:
        """Return the rows of node `node` (-1 = the root) of row `seq` of the draft.

        Only penalties and bad words read the path; without them it need not be computed.
        """
        if draft.width == 0 or max_depth == 0:
            empty = torch.zeros_like(seq)
            return Nodes(seq=seq, node=node, depth=empty, path=seq.new_empty(seq.shape[0], 0))
        at, is_node = node.clamp_min(0), node >= 0
        if not with_path:
            depth = draft.depth[seq, at] * is_node
            return Nodes(seq=seq, node=node, depth=depth, path=seq.new_empty(seq.shape[0], 0))
        path = ancestors(draft.parents, draft.depth, max_depth)[seq, at]
        tokens = draft.tokens[seq].gather(1, path.clamp_min(0))
        return Nodes(
            seq=seq,
            node=node,
            depth=draft.depth[seq, at] * is_node,
            path=torch.where((path >= 0) & is_node[:, None], tokens, -1),
        )

    def take(self, rows: Tensor) -> Nodes:
        """Return some of the rows."""
        return Nodes(seq=self.seq[rows], node=self.node[rows], depth=self.depth[rows], path=self.path[rows])


def edit(logits: Tensor, metadata: SamplingMetadata, nodes: Nodes) -> Tensor:
    """Return logits after penalties, biases and bans; the input if there are none. A greedy row takes their argmax."""
    if metadata.edits and logits.dtype.itemsize < 4:
        logits = logits.float()  # half precision cannot hold the sum of a logit and a bias
    if metadata.penalties is not None:
        penalise = _penalise_rows if logits.is_cpu else _penalise
        logits = penalise(logits, metadata.penalties, nodes)
    if metadata.bias is not None:
        tokens, values = metadata.bias.tokens[nodes.seq], metadata.bias.values[nodes.seq]
        logits = _add(logits, tokens, values.to(logits.dtype))
    banned = logits
    if metadata.allowed is not None:  # subtraction keeps a logit that is no number, and it is noticed
        banned = torch.where(metadata.allowed[nodes.seq], banned, banned - torch.inf)
    if metadata.grammar is not None:
        banned = _mask(banned, metadata.grammar, nodes)
    if metadata.bad_words is not None:
        banned = _ban(banned, *_bad_words(metadata.bad_words, nodes))
    if metadata.min_tokens is not None:
        banned = _ban(banned, *_ends(metadata.min_tokens, nodes))
    return logits if banned is logits else _allow_fallback_(banned, logits, metadata.fallback, nodes)


def _by_row(values: Tensor, logits: Tensor, nodes: Nodes) -> Tensor:
    return values[nodes.seq][:, None].to(logits.dtype)  # (R, 1)


def _penalise(logits: Tensor, penalties: Penalties, nodes: Nodes) -> Tensor:
    """Penalise all tokens of all rows at once, without reading a value."""
    counts = penalties.counts[nodes.seq]  # (R, V), a copy
    if nodes.path.shape[1]:
        counts.scatter_add_(1, nodes.path.clamp_min(0), (nodes.path >= 0).to(counts.dtype))
    seen = (counts > 0) | penalties.in_prompt[nodes.seq]
    rates = [_by_row(rate, logits, nodes) for rate in (penalties.repetition, penalties.frequency, penalties.presence)]
    return torch.where(seen, _penalised(logits, counts, *rates), logits)


def _penalise_rows(logits: Tensor, penalties: Penalties, nodes: Nodes) -> Tensor:
    """Penalise only rows with penalties, and only the tokens they have seen; on the host."""
    logits = logits.clone()
    rates = torch.stack((penalties.repetition, penalties.frequency, penalties.presence), 1).to(logits.dtype)
    asked = (rates != rates.new_tensor([1, 0, 0])).any(1).tolist()
    seen: dict[int, Tensor] = {}
    for row, seq in enumerate(nodes.seq.tolist()):
        if not asked[seq]:
            continue
        counts = penalties.counts[seq]
        if seq not in seen:
            seen[seq] = torch.from_numpy(np.flatnonzero(penalties.in_prompt[seq].numpy() | (counts.numpy() > 0)))
        tokens, drafted = seen[seq], nodes.path[row][nodes.path[row] >= 0]
        if drafted.numel():
            tokens = torch.from_numpy(np.union1d(tokens.numpy(), drafted.numpy()))
        total = counts[tokens] + (tokens[:, None] == drafted).sum(1)
        logits[row, tokens] = _penalised(logits[row, tokens], total, *rates[seq])
    return logits


def _penalised(logits: Tensor, counts: Tensor, repetition: Tensor, frequency: Tensor, presence: Tensor) -> Tensor:
    """Return the logits of tokens seen before, `counts` times in the output. Banned tokens stay banned."""
    info = torch.finfo(logits.dtype)
    rate = repetition.clamp(info.tiny, info.max)
    repeated = torch.where(logits > 0, logits / rate, logits * rate).clamp(info.min, info.max)
    repeated = torch.where(logits > -torch.inf, repeated, logits)
    return repeated - frequency * counts.to(logits.dtype) - presence * (counts > 0).to(logits.dtype)


def _add(logits: Tensor, tokens: Tensor, values: Tensor) -> Tensor:
    """Add (R, K) values at (R, K) tokens. Padding adds 0 at token 0, which changes nothing."""
    return logits.scatter_add(1, tokens.clamp_min(0), torch.where(tokens >= 0, values, 0))


def _ban(logits: Tensor, tokens: Tensor, hit: Tensor) -> Tensor:
    """Ban (R, K) tokens where hit. Adding -inf keeps a ban when another entry for the token does not apply."""
    values = torch.where(hit, -torch.inf, 0.0).to(logits.dtype)
    return logits.scatter_add(1, tokens.clamp_min(0), values)


def _mask(logits: Tensor, masks: GrammarMasks, nodes: Nodes) -> Tensor:
    at = masks.row_of[nodes.seq, nodes.node + 1]
    bits = masks.bits[at.clamp_min(0)][..., None] >> torch.arange(32, device=logits.device, dtype=torch.int32)
    allowed = (bits & 1).flatten(1)[:, : logits.shape[1]].bool() | (at < 0)[:, None]
    return torch.where(allowed, logits, logits - torch.inf)


def _bad_words(bad: BadWords, nodes: Nodes) -> tuple[Tensor, Tensor]:
    words, span = bad.words[nodes.seq], bad.tail.shape[1]  # (R, W, T + 1), T
    text = torch.cat((bad.tail[nodes.seq], nodes.path), 1)  # (R, T + D)
    recent = text.gather(1, nodes.depth[:, None] + torch.arange(span, device=text.device))  # (R, T), flush right
    before, last = words[..., :-1], words[..., -1]
    matches = ((before < 0) | (before == recent[:, None])).all(-1)
    return last, matches & (last >= 0)


def _ends(limits: MinTokens, nodes: Nodes) -> tuple[Tensor, Tensor]:
    ends = limits.ends[nodes.seq]
    early = limits.output_len[nodes.seq] + nodes.depth < limits.minimum[nodes.seq]
    return ends, early[:, None] & (ends >= 0)


def _allow_fallback_(logits: Tensor, before: Tensor, fallback: Tensor | None, nodes: Nodes) -> Tensor:
    """Give the fallback probability 1 where every token is banned: one must still be drawn. A row that was -inf before
    the bans is the model's fault, and stays as it is."""
    token = torch.zeros_like(nodes.seq) if fallback is None else fallback[nodes.seq]
    impossible = (logits.amax(-1, keepdim=True) == -torch.inf) & (before.amax(-1, keepdim=True) > -torch.inf)
    value = torch.where(impossible, 0.0, logits.gather(1, token[:, None]))
    return logits.scatter_(1, token[:, None], value)
