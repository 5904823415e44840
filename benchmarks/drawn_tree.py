"""Trees drawn without replacement from a block drafter's distributions, for rows that sample without a seed (law 2).

A tree has the shape of the likeliest nodes, which follows from committed tokens alone: how many children a node has is
fixed before any token is drawn. Children are the first draws of a row of q without replacement: the highest of log q
plus Gumbel noise. q is over the candidates of a position, under the request's temperature and filters.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Any, NamedTuple

import numpy as np
import torch

from paceline.draft import Draft, Proposal
from paceline.drafters.block_tree import Lattice, grow
from paceline.rng import Lane, uniform
from paceline.sampling_params import SamplingParams
from paceline.verify.processors import threshold

Floats = np.ndarray[Any, np.dtype[np.float32]]


class Drawing(NamedTuple):
    """A row that draws its tree."""

    row: int
    params: SamplingParams
    key: int  # of its coins
    committed: int  # tokens, when the draft begins


class Drawn(NamedTuple):
    tokens: list[int]  # of the draft vocabulary
    parents: list[int]
    depth: list[int]
    q: dict[int, tuple[Any, Floats]]  # by slot of a parent: tokens (C,) of the draft vocabulary, and q (C,)


def draw(of: Lattice, wanted: Drawing, count: int, beam: int) -> Drawn:
    """A tree of up to `count` nodes for one row of the lattice."""
    only, warmth = slice(wanted.row, wanted.row + 1), wanted.params.temperature
    shares = Lattice(of.tokens[only], of.first[only] / warmth, of.later[only] / warmth)
    shares = shares._replace(first=shares.first.log_softmax(-1), later=shares.later.log_softmax(-1))
    shape = grow(shares, count, beam)
    parents, depth = shape.parents[0].tolist(), shape.depth[0].tolist()
    candidates, first, later = of.tokens[wanted.row].numpy(), shares.first[0].numpy(), shares.later[0].numpy()
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        children.setdefault(parent, []).append(node)
    noise = _noise(wanted, list(children), candidates.shape[1])
    tokens, place, q = [0] * len(parents), [0] * len(parents), {}
    for at, (parent, below) in enumerate(children.items()):
        position = 0 if parent < 0 else depth[parent]
        row = first if parent < 0 else later[position - 1, min(place[parent], later.shape[1] - 1)]
        q[parent + 1] = candidates[position], _filtered(row, wanted.params)
        with np.errstate(divide="ignore"):
            order = np.argsort(-(np.log(q[parent + 1][1]) + noise[at]), kind="stable")
        for node, chosen in zip(below, order.tolist(), strict=False):
            tokens[node], place[node] = int(candidates[position, chosen]), chosen
    return Drawn(tokens, parents, depth, q)


def _noise(wanted: Drawing, parents: list[int], candidates: int) -> Any:
    """(parents, C) Gumbel noise that no other step uses."""
    slots, columns = np.repeat(np.array(parents) + 1, candidates), np.tile(np.arange(candidates), len(parents))
    words = (np.full_like(slots, wanted.key), np.full_like(slots, wanted.committed), slots, columns)
    units = uniform(Lane.DRAFT, *(torch.from_numpy(word) for word in words))
    return -np.log(-np.log(units.numpy())).reshape(len(parents), candidates)


def _filtered(log_q: Floats, params: SamplingParams) -> Floats:
    """(C,) probabilities under the request's filters."""
    top_k, top_p, min_p = params.top_k or 0, params.top_p, params.min_p
    shifted = log_q - log_q.max()
    if top_k > 0 or top_p < 1 or min_p > 0:
        shifted[shifted < threshold(shifted, top_k, top_p, min_p)] = -np.inf
    weights = np.exp(shifted)
    shares: Floats = weights / weights.sum()
    return shares


def joined(drawn: dict[int, Drawn], others: Draft, ids: torch.Tensor) -> Draft:
    """The draft with some rows drawn; `ids` are the target's ids of draft tokens."""
    columns = np.unique(np.concatenate([tokens for tree in drawn.values() for tokens, _ in tree.q.values()]))
    rows, row_of = [], np.full((others.batch, others.width + 1), -1)
    tokens, parents, depth = (part.clone() for part in (others.tokens, others.parents, others.depth))
    for at, tree in drawn.items():
        for into, part in ((tokens, ids[tree.tokens]), (parents, tree.parents), (depth, tree.depth)):
            into[at, : len(tree.tokens)] = torch.as_tensor(part)
        for slot, (where, shares) in tree.q.items():
            row_of[at, slot] = len(rows)
            rows.append(np.zeros(len(columns), np.float32))
            rows[-1][np.searchsorted(columns, where)] = shares
    q = Proposal(probs=torch.from_numpy(np.stack(rows)), row_of=torch.from_numpy(row_of), ids=ids[columns])
    return Draft(tokens=tokens, parents=parents, depth=depth, num_nodes=others.num_nodes, q=q)


def drawing(sequences: SequenceOf[Any], lengths: SequenceOf[int], plain: Any) -> list[Drawing]:
    """The rows that draw by coins and whose sampling does not depend on earlier tokens."""
    return [
        Drawing(row, sequence.params, sequence.noise_key, length)
        for row, (sequence, length) in enumerate(zip(sequences, lengths, strict=True))
        if sequence.sampled and sequence.seed is None and plain(sequence)
    ]
