"""How many nodes each row of a step drafts: those that make the step's tokens per second the most.

The formula is (rows + sum of survival over chosen nodes) / (step seconds(rows + nodes) + draft seconds): nodes of all
rows in order of what they are worth, taken while that ratio rises. Rows that promise the same are of one kind. Their
n-th nodes are a level: they are taken together, and one by one only where the best number may lie between.
"""

from __future__ import annotations

from collections.abc import Hashable
from collections.abc import Sequence as SequenceOf
from functools import lru_cache
from itertools import compress
from typing import NamedTuple

import numpy as np

from paceline.config import MAX_K
from paceline.engine.policy.costs import MAX_NODES, Floats, Ints

LEAST = 0.005  # survival below which a node is not worth a row anywhere
RISK = 0.05  # of a step's rate that the plan after a plain step may stake on learning what more nodes cost
COUNTS, ONES = np.arange(1.0, MAX_NODES + 1), np.ones(MAX_K)


class Kind(NamedTuple):
    """Rows of an offer whose drafts promise the same."""

    worth: Floats  # of their nodes in tokens, none more than the one before; as many as such a row may have
    shares: Floats | None  # of drafts in which a node is a row of the pass; None: 1 each
    promised: float  # tokens, with all nodes
    rows: int


class Offer(NamedTuple):
    """Drafts that one method could make for some rows."""

    method: str
    rows: list[int]  # in the batch
    level: list[int]  # by row
    kind_of: list[int]  # by row
    kinds: list[Kind]
    line: tuple[float, float]  # seconds of such a draft: a + b depth; of trees, made at once, b is 0
    values: dict[str, float]  # of a token, by sequence of the batch; empty: 1 each
    key: Hashable = None  # until something is learnt, offers of one key promise the same; None: compare nothing


class Budgets(NamedTuple):
    rate: float = 0.0  # tokens per second
    nodes: SequenceOf[int] = ()  # of a row, by kind of all offers
    further: tuple[int, int] = 0, 0  # a kind, and how many of its rows have one node more
    drafted: float = 0.0  # how many of all these nodes are drafted on average


class _Levels(NamedTuple):
    """In the order in which they are taken."""

    worth: Floats
    share: Floats
    rows: Floats
    kind: Ints
    draft_s: Floats  # of all drafts that go as deep as this level, or one before it


NOTHING = Budgets()


def best(
    num_sequences: int, with_nodes: Floats, offers: SequenceOf[Offer], *, beat: float = 0.0, explore: bool = False
) -> Budgets:
    """The number of nodes of each kind that promises the most; NOTHING if no number can promise more than `beat`.
    `with_nodes`: seconds of a step with 1, 2, ... nodes.

    `explore`: the largest number of nodes that promises nearly as much, if none is left out.

    A node's survival is never more than that of the one before it, so the best so many are drafts without gaps.
    """
    kinds = [kind for offer in offers for kind in offer.kinds]
    most = num_sequences + sum([kind.promised * kind.rows for kind in kinds])
    if not kinds or most <= beat * (with_nodes.item(0) + min([sum(offer.line) for offer in offers])):
        return NOTHING
    worth, share, rows, kind_of, draft_s = _levels(offers, kinds, len(with_nodes), explore)
    if not len(worth):
        return NOTHING
    at, tokens, drafted = COUNTS[: len(with_nodes)], (worth * rows).cumsum(), (share * rows).cumsum()
    tokens += num_sequences
    pass_s = np.interp(drafted, at, with_nodes)
    rates = tokens / (pass_s + draft_s)
    place, out = int(rates.argmax()), 0  # the last level, and its rows that are left out
    rate, number = rates.item(place), drafted.item(place)
    if explore or len(kinds) < sum([kind.rows for kind in kinds]):
        # Some rows of a level bring no more than all of them do, and take no less than the levels before.
        pass_s[1:] = pass_s[:-1].copy()
        pass_s[0] = with_nodes[0]
        places = np.flatnonzero(tokens / (pass_s + draft_s) >= rate * (1 - RISK if explore else 1))
        each = rows[places].astype(np.int64)
        places = places.repeat(each)
        outs = each.cumsum().repeat(each) - np.arange(1, len(places) + 1)
        drafted = drafted[places] - outs * share[places]
        rates = (tokens[places] - outs * worth[places]) / (np.interp(drafted, at, with_nodes) + draft_s[places])
        last = int(rates.argmax())
        if explore:
            last = int(np.flatnonzero(rates >= (1 - RISK) * rates[last])[-1])
        place, out, rate, number = places.item(last), outs.item(last), rates.item(last), drafted.item(last)
    nodes: list[int] = np.bincount(kind_of[:place], minlength=len(kinds)).tolist()
    return Budgets(rate, nodes, (kind_of.item(place), int(rows.item(place)) - out), number)


def _levels(offers: SequenceOf[Offer], kinds: SequenceOf[Kind], limit: int, explore: bool) -> _Levels:
    """Those of worth, of `limit` nodes at the most."""
    worth = kinds[0].worth
    kind_of, depth = _columns(tuple([len(kind.worth) for kind in kinds]))
    share = np.concatenate([ONES[: len(k.worth)] if explore or k.shares is None else k.shares for k in kinds])
    if len(kinds) > 1:
        worth = np.concatenate([kind.worth for kind in kinds])
        order = (-worth).argsort(kind="stable")
        worth, share, kind_of, depth = worth[order], share[order], kind_of[order], depth[order]
    count = int(np.count_nonzero(worth >= LEAST))
    rows = np.array([float(kind.rows) for kind in kinds])[kind_of[:count]]
    if sum([kind.rows for kind in kinds]) * MAX_K > limit:
        total = rows.cumsum()
        if count and total[-1] > limit:
            count = int(total.searchsorted(limit)) + 1
            rows = rows[:count]
            rows[-1] -= total[count - 1] - limit
    worth, share, kind_of, depth = worth[:count], share[:count], kind_of[:count], depth[:count]
    return _Levels(worth, share, rows, kind_of, _draft_seconds(offers, kind_of, depth))


def _draft_seconds(offers: SequenceOf[Offer], kind_of: Ints, depth: Floats) -> Floats:
    """Of all drafts that go as deep as a level, or one before it."""
    if len(offers) == 1:
        a, b = offers[0].line
        return a + b * np.maximum.accumulate(depth)
    seconds, first = np.zeros(len(depth)), 0
    for offer in offers:
        (a, b), end = offer.line, first + len(offer.kinds)
        mine = (first <= kind_of) & (kind_of < end)
        seconds += np.maximum.accumulate(np.where(mine, a + b * depth, 0.0))
        first = end
    return seconds


@lru_cache(256)
def _columns(sizes: tuple[int, ...]) -> tuple[Ints, Floats]:
    """The kind of each node of kinds with so many nodes, and its depth."""
    return np.arange(len(sizes)).repeat(sizes), np.concatenate([COUNTS[:size] for size in sizes])


def by_row(offers: SequenceOf[Offer], budgets: Budgets) -> list[list[int]]:
    """The nodes of each row of each offer; of rows of a kind the first ones have the further node."""
    made, nodes, (further, left) = [], iter(budgets.nodes), budgets.further
    for offer in offers:
        each = [next(nodes) for _ in offer.kinds]
        of_rows = [each[kind] for kind in offer.kind_of]
        if 0 <= further < len(each):
            for at, kind in enumerate(offer.kind_of):
                if kind == further and left:
                    of_rows[at] += 1
                    left -= 1
        further -= len(each)
        made.append(of_rows)
    return made


def mixed(offers: SequenceOf[Offer]) -> list[Offer]:
    """Each row with the method that promises it most; nothing where one method does for all of them."""
    if len(offers) < 2:
        return []
    promise: dict[int, tuple[float, int]] = {}
    for which, offer in enumerate(offers):
        promised = [(kind.promised, which) for kind in offer.kinds]
        for row, kind in zip(offer.rows, offer.kind_of, strict=True):
            if row not in promise or promised[kind] > promise[row]:
                promise[row] = promised[kind]
    method_of = {row: which for row, (_, which) in promise.items()}
    used = set(method_of.values())
    if len(used) < 2:
        return []
    return [_part(offers[which], [method_of[row] == which for row in offers[which].rows]) for which in sorted(used)]


def _part(offer: Offer, kept: list[bool]) -> Offer:
    """Of some rows."""
    columns = offer.rows, offer.level, offer.kind_of
    rows, level, kinds = (list(compress(column, kept)) for column in columns)
    place = {kind: at for at, kind in enumerate(dict.fromkeys(kinds))}
    of = [offer.kinds[kind]._replace(rows=kinds.count(kind)) for kind in place]
    key = None if offer.key is None else (offer.key, *kept)
    return Offer(offer.method, rows, level, [place[kind] for kind in kinds], of, offer.line, offer.values, key)
