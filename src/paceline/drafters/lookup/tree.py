"""The draft tree, grown from the places where the last tokens occurred before (after suffix decoding, 2411.04975).

Every place votes for the token that followed it; each shared token of context doubles the vote, and a place in a past
answer counts less than one in this text. A node's probability is its parent's, times how often any place has the next
token right (`HIT_RATE`, by the longest context shared), times its share of the votes. The most probable nodes are
taken, best first, down to `THRESHOLD`.

Where a copy deviates from its source, the last token has no match in this context. If the tokens before it match, the
last token may replace a token of the source, or be inserted before it: the copy continues behind that token or with it.

Prompt lookup (`ngram`) takes one place, `longest_place`, and drafts the chain that followed it.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from operator import itemgetter

from paceline.drafters.lookup.index import DEPTH, LEVELS, Context, SuffixIndex

THRESHOLD = 0.1  # nodes less likely than this are not drafted
HIT_RATE = (0.0, 0.38, 0.6, 0.75, 0.78, 0.83, *[0.86] * 3, *[0.91] * 7, *[0.93] * (DEPTH - 15))  # index: tokens shared
STORE_WEIGHT = 0.2  # weight of a vote from a past answer; a vote from this text has 1
# Probabilities that the last token of a deviating copy replaced the source's token, or stands before it.
SUBSTITUTED, INSERTED = 0.2, 0.14

COPY = LEVELS.index(2)  # one token shared is no copy
LEVEL_STEPS = (THRESHOLD, 0.25, 0.45, 0.65)  # probabilities at which a draft's level rises by one

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
        """Return the tokens from the root's child down to a node."""
        if self.tokens and node + 1 == len(self.tokens) == self.depths[-1]:  # a chain
            return self.tokens
        tokens: list[int] = []
        while node >= 0:
            tokens.append(self.tokens[node])
            node = self.parents[node]
        return tokens[::-1]


class Lookup:
    """Occurrences of one context in one index, searched level by level and only as far as needed."""

    def __init__(self, index: SuffixIndex, context: Context, weight: float = 1.0) -> None:
        self.index, self._context, self._weight = index, context, weight
        self.matches: dict[int, int] = {}  # position -> tokens shared
        self._levels: list[list[int]] = []

    def at(self, level: int) -> list[int]:
        """Return the positions known to follow at least LEVELS[level] of the tokens, newest first."""
        while len(self._levels) <= level:
            above = self._levels[-1] if self._levels else []
            new = self.index.occurrences(len(self._levels), self._context, self.matches)
            # Positions that only the longer match found are older than all of these, else this chain would hold them.
            self._levels.append(new + [position for position in above if position < new[-1]] if new else above)
        return self._levels[level]

    def places(self, level: int) -> list[Place]:
        matches, weight, index = self.matches, self._weight, self.index
        return [(matches[at], weight * (1 << matches[at]), at, index) for at in self.at(level)]


def places_of(lookups: SequenceOf[Lookup], own: SuffixIndex | None, context: Context) -> list[Place]:
    """Return all places that share a long context; if there are none, all places, and those where a deviating copy may
    continue.

    Ordered by context, then index, then newest first; all votes sum to the probability that one of the places is right.
    """
    places: list[Place] = []
    for level in (0, len(LEVELS) - 1):
        places = places or [place for lookup in lookups for place in lookup.places(level)]
    places.sort(key=itemgetter(0), reverse=True)
    longest = places[0][0] if places else 0
    per_vote = HIT_RATE[longest] / _votes(places) if places else 0.0
    likely = [(match, votes * per_vote, start, index) for match, votes, start, index in places]
    if longest <= 1 and own is not None:
        likely += [(1, rate * (1 - HIT_RATE[longest]), start, own) for start, rate in _after_deviation(own, context)]
    return likely


def _after_deviation(index: SuffixIndex, context: Context) -> list[tuple[int, float]]:
    """Return positions at which a copy that deviates at its last token may continue, and the probability of each."""
    matches: dict[int, int] = {}
    copies = index.occurrences(COPY, context.before(), matches)
    copies = [position for position in copies if position < index.end - 1]  # without the text's own end
    if not copies:
        return []
    longest = max(copies, key=matches.__getitem__)  # the newest of equals
    candidates = ((longest + 1, SUBSTITUTED), (longest, INSERTED))
    return [(start, rate) for start, rate in candidates if start < index.end - 1]


def longest_place(index: SuffixIndex, context: Context, shortest: int, longest: int) -> list[Place]:
    """Return the newest place with the longest match of `shortest` to `longest` tokens, if the chains show one."""
    best, place, matches = (0, 0), list[Place](), dict[int, int]()
    for level, n in enumerate(LEVELS):
        for position in index.occurrences(level, context, matches):
            match = min(matches[position], longest), position
            if match[0] >= shortest and match > best:
                best, place = match, [(matches[position], 1.0, position, index)]
        if best[0] >= n or n <= shortest:  # shorter matches, or the places known
            break
    return place


def continuation(places: SequenceOf[Place], max_nodes: int) -> Tree:
    """Return the tokens that followed the one place as a chain."""
    tree = Tree()
    for _, _, start, index in places:
        for depth in range(max_nodes):
            at = start + depth
            # Past the end of the text the draft continues from itself, so a repetition goes on.
            token = index.text[at & index.rows - 1] if at < index.end else tree.tokens[at - index.end]
            tree.add(token, depth - 1, depth + 1)
    return tree


def level_of(places: SequenceOf[Place]) -> int:
    """Return the number of tokens shared, if large; else a lower number, by the probability that a node is right."""
    if not places or places[0][0] >= LEVELS[0]:
        return places[0][0] if places else 0
    by_token: dict[int, float] = {}
    for _, votes, start, index in places:
        token = index.text[start & index.rows - 1]
        by_token[token] = by_token.get(token, 0.0) + votes
    likely = _total([votes for token, votes in by_token.items() if votes >= THRESHOLD and token >= 0])
    return sum([likely >= step for step in LEVEL_STEPS])


def _votes(places: list[Place]) -> float:
    return _total([place[1] for place in places])


def _total(numbers: list[float]) -> float:
    """Add in order, as native code does: since Python 3.12 `sum` compensates for rounding."""
    total = 0.0
    for number in numbers:
        total += number
    return total


def grow(places: list[Place], max_nodes: int) -> Tree:
    """Return the most probable nodes of the places of `places_of`; fewer nodes are a prefix of more."""
    tree = Tree()
    waiting: list[tuple[float, int, int, int, int, list[Place]]] = []  # -probability, order, parent, depth, token, ...
    parent, depth, order, per_vote = -1, 0, 0, 1.0  # per_vote: probability that a vote adds to a child
    while places and len(tree.tokens) < max_nodes:
        # One candidate node, and perhaps one continuation.
        if not waiting and (len(places) == 1 or places[0][0] + depth >= LEVELS[0]):
            probability = per_vote * _votes(places)
            run = _common_run(places, depth, probability, max_nodes - len(tree.tokens))
            for token in run:
                depth += 1
                parent = tree.add(token, parent, depth)
                probability *= HIT_RATE[min(places[0][0] + depth, DEPTH)]
            if run:
                per_vote = probability / _votes(places)
                continue
        children: dict[int, list[Place]] = {}
        for place in places:
            at, index = place[2] + depth, place[3]
            # Past the end of the text the draft continues from itself, so a repetition goes on.
            token = index.text[at & index.rows - 1] if at < index.end else tree.path(parent)[at - index.end]
            children.setdefault(token, []).append(place)
        for token, voters in children.items():
            probability = per_vote * _votes(voters)
            if token >= 0 and probability >= THRESHOLD:
                order += 1
                heapq.heappush(waiting, (-probability, order, parent, depth + 1, token, voters))
        if not waiting:
            break
        less, _, parent, depth, token, places = heapq.heappop(waiting)
        parent = tree.add(token, parent, depth)
        per_vote = -less * HIT_RATE[min(places[0][0] + depth, DEPTH)] / _votes(places)
    return tree


def _common_run(places: list[Place], depth: int, probability: float, most: int) -> list[int]:
    """Return likely and equal tokens that follow every place, at most `most`; none if the places lie in two texts."""
    match, _, _, index = places[0]
    if any(place[3] is not index for place in places[1:]):
        return []
    count = 0
    while count < most and probability >= THRESHOLD:
        count += 1
        probability *= HIT_RATE[min(match + depth + count, DEPTH)]
    return index.common_run([start for _, _, start, _ in places], depth, count)
