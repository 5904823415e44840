"""The draft tree, grown from the places where the last tokens occurred before (after suffix decoding, 2411.04975).

Every place votes for the token that followed it; each shared token of context doubles the vote, and a place in a past
answer counts less than one in this text. A node's probability is its parent's, times how often any place has the next
token right (`HIT_RATE`, by the longest context shared), times its share of the votes. The most probable nodes are
taken, best first, down to `THRESHOLD`.

Where a copy deviates from its source, the last token has no match in this context. If the tokens before it match, the
last token may replace a token of the source, or be inserted before it: the copy continues behind that token or with it.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from operator import itemgetter

from paceline.drafters.lookup.index import DEPTH, LEVELS, Context, SuffixIndex

THRESHOLD = 0.1  # nodes less likely than this are not drafted
HIT_RATE = (0.0, 0.38, 0.6, 0.75, 0.78, 0.83, *[0.86] * 3, *[0.91] * 7, *[0.93] * (DEPTH - 15))  # by tokens shared
STORE_WEIGHT = 0.2  # of a vote from a past answer, where one from the same text has 1
# A copy whose last token differs from its source: how often that token replaced the source's, or stands before it.
SUBSTITUTED, INSERTED = 0.2, 0.14

COPY = LEVELS.index(2)  # one token shared is no copy
EVIDENCE_STEPS = (THRESHOLD, 0.25, 0.45, 0.65)  # probabilities at which evidence rises by one

Place = tuple[int, float, int, SuffixIndex]  # tokens shared, votes, position of the token that followed, index


@dataclass
class Tree:
    """Nodes in topological order, parent -1 = the last committed token."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)

    def add(self, token: int, parent: int, depth: int) -> int:
        self.tokens.append(token)
        self.parents.append(parent)
        self.depths.append(depth)
        return len(self.tokens) - 1

    def path(self, node: int) -> list[int]:
        """The tokens from the root's child down to a node."""
        if self.tokens and node + 1 == len(self.tokens) == self.depths[-1]:  # a chain
            return self.tokens
        tokens: list[int] = []
        while node >= 0:
            tokens.append(self.tokens[node])
            node = self.parents[node]
        return tokens[::-1]


class Lookup:
    """Occurrences of one context in one index, searched level by level and only as far as needed."""

    def __init__(self, index: SuffixIndex, context: Context, votes: float = 1.0) -> None:
        self.index, self._context, self._votes = index, context, votes
        self.matches: dict[int, int] = {}  # position -> how many tokens agree
        self._levels: list[list[int]] = []

    def at(self, level: int) -> list[int]:
        """The positions known to follow at least LEVELS[level] of the tokens, newest first."""
        while len(self._levels) <= level:
            above = self._levels[-1] if self._levels else []
            found = self.index.occurrences(len(self._levels), self._context, self.matches)
            # Positions found only by the longer match are older than all of these, else this chain would hold them.
            self._levels.append(found + [position for position in above if position < found[-1]] if found else above)
        return self._levels[level]

    def places(self, level: int) -> list[Place]:
        matches, votes, index = self.matches, self._votes, self.index
        return [(matches[at], votes * (1 << matches[at]), at, index) for at in self.at(level)]


def places_of(lookups: SequenceOf[Lookup], own: SuffixIndex | None, context: Context) -> list[Place]:
    """All places that share a long context; if there are none, all places, and those where a deviating copy may go on.

    Ordered by context, then index, then newest first; all votes sum to the probability that one of the places is right.
    """
    places: list[Place] = []
    for level in (0, len(LEVELS) - 1):
        places = places or [place for lookup in lookups for place in lookup.places(level)]
    places.sort(key=itemgetter(0), reverse=True)
    longest = places[0][0] if places else 0
    share = HIT_RATE[longest] / _votes(places) if places else 0.0
    likely = [(match, votes * share, start, index) for match, votes, start, index in places]
    if longest <= 1 and own is not None:
        likely += [(1, often * (1 - HIT_RATE[longest]), start, own) for start, often in _after_deviation(own, context)]
    return likely


def _after_deviation(index: SuffixIndex, context: Context) -> list[tuple[int, float]]:
    """Positions at which a copy that deviates at its last token may continue, and the probability of each."""
    matches: dict[int, int] = {}
    found = index.occurrences(COPY, context.before(), matches)
    found = [position for position in found if position < index.end - 1]  # its own end is there too
    if not found:
        return []
    left_out = max(found, key=matches.__getitem__)  # the newest of equals
    candidates = ((left_out + 1, SUBSTITUTED), (left_out, INSERTED))
    return [(start, often) for start, often in candidates if start < index.end - 1]


def evidence_of(places: SequenceOf[Place]) -> int:
    """The number of tokens shared, where large; else a lower number, by the probability that a node is right."""
    if not places or places[0][0] >= LEVELS[0]:
        return places[0][0] if places else 0
    votes: dict[int, float] = {}
    for _, its, start, index in places:
        token = index.text[start & index.rows - 1]
        votes[token] = votes.get(token, 0.0) + its
    sure = _total([its for token, its in votes.items() if its >= THRESHOLD and token >= 0])
    return sum([sure >= step for step in EVIDENCE_STEPS])


def _votes(places: list[Place]) -> float:
    return _total([place[1] for place in places])


def _total(numbers: list[float]) -> float:
    """Added in order, as native code does: since Python 3.12 `sum` compensates for rounding."""
    total = 0.0
    for number in numbers:
        total += number
    return total


def grow(places: list[Place], max_nodes: int) -> Tree:
    """The most probable nodes, from the places of `places_of`; a smaller budget gives a prefix of a larger one's."""
    tree = Tree()
    waiting: list[tuple[float, int, int, int, int, list[Place]]] = []  # -probability, order, parent, depth, token, ...
    parent, depth, order, worth = -1, 0, 0, 1.0  # `worth`: what a vote of the places adds to a child's probability
    while places and len(tree.tokens) < max_nodes:
        # One candidate node, and perhaps one continuation.
        if not waiting and (len(places) == 1 or places[0][0] + depth >= LEVELS[0]):
            probability = worth * _votes(places)
            run = _common_run(places, depth, probability, max_nodes - len(tree.tokens))
            for token in run:
                depth += 1
                parent = tree.add(token, parent, depth)
                probability *= HIT_RATE[min(places[0][0] + depth, DEPTH)]
            if run:
                worth = probability / _votes(places)
                continue
        children: dict[int, list[Place]] = {}
        for place in places:
            at, index = place[2] + depth, place[3]
            # Past the end of the text the draft continues from itself, so a repetition goes on.
            token = index.text[at & index.rows - 1] if at < index.end else tree.path(parent)[at - index.end]
            children.setdefault(token, []).append(place)
        for token, those in children.items():
            probability = worth * _votes(those)
            if token >= 0 and probability >= THRESHOLD:
                order += 1
                heapq.heappush(waiting, (-probability, order, parent, depth + 1, token, those))
        if not waiting:
            break
        less, _, parent, depth, token, places = heapq.heappop(waiting)
        parent = tree.add(token, parent, depth)
        worth = -less * HIT_RATE[min(places[0][0] + depth, DEPTH)] / _votes(places)
    return tree


def _common_run(places: list[Place], depth: int, probability: float, room: int) -> list[int]:
    """The tokens that follow every place, while they are equal and likely enough; empty if places are of two texts."""
    match, _, _, index = places[0]
    if any(place[3] is not index for place in places[1:]):
        return []
    count = 0
    while count < room and probability >= THRESHOLD:
        count += 1
        probability *= HIT_RATE[min(match + depth + count, DEPTH)]
    return index.common_run([start for _, _, start, _ in places], depth, count)
