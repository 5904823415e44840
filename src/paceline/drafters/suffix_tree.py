"""Which tree to draft from the places where the last tokens occurred before (suffix decoding, 2411.04975).

For each match length the occurrences vote on what follows: a child's probability is its parent's times its share of the
parent's occurrences, and the most probable nodes are taken, best first, down to `THRESHOLD` and up to a budget that
grows with the match. The sum of the probabilities is the number of tokens the tree expects to see accepted; the match
length with the largest sum wins, the longer one on a tie.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from paceline.drafters.suffix_index import DEPTH, LEVELS, Context, SuffixIndex

THRESHOLD = 0.1  # nodes less likely than this are not drafted
FACTOR = 1.0  # nodes per token of match
OFFSET = 0.0


@dataclass
class Tree:
    """Nodes in topological order, parent -1 = the last committed token."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    score: float = 0.0  # expected number of accepted tokens
    match: int = 0  # tokens of context behind it

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

    def best_path(self) -> list[int]:
        """The most probable child of the most probable child, and so on."""
        node = -1
        while node in self.parents:
            node = self.parents.index(node)  # siblings stand in order of probability
        return self.path(node)


def allowance(match: int, budget: int) -> int:
    return min(budget, int(FACTOR * match + OFFSET))


class Lookup:
    """What one index knows of one context, level by level and only as far as it is asked."""

    def __init__(self, index: SuffixIndex, context: Context) -> None:
        self.index, self._context = index, context
        self.matches: dict[int, int] = {}  # position -> how many tokens agree
        self._levels: list[list[int]] = []

    def at(self, level: int) -> list[int]:
        """The positions known to follow at least LEVELS[level] of the tokens, newest first."""
        while len(self._levels) <= level:
            above = self._levels[-1] if self._levels else []
            found = self.index.occurrences(len(self._levels), self._context, self.matches)
            # What only the longer match found is older than all of these, or the chain would have it too.
            self._levels.append(found + [position for position in above if position < found[-1]] if found else above)
        return self._levels[level]


def best_tree(lookups: SequenceOf[Lookup], budget: int) -> Tree:
    """The best over all match lengths and indexes; the earlier index on a tie."""
    best = Tree()
    for lookup in lookups:
        best = _best_of(lookup, budget, best)
    return best


def longest_match(lookups: SequenceOf[Lookup]) -> int:
    for level in range(len(LEVELS)):
        found = [lookup.matches[position] for lookup in lookups for position in lookup.at(level)]
        if found:
            return max(found)
    return 0


def _best_of(lookup: Lookup, budget: int, best: Tree) -> Tree:
    """Long matches first: no tree scores above its allowance, so most of the short ones need not be looked at."""
    longest = DEPTH
    for level, shortest in enumerate(LEVELS):
        if best.score >= allowance(longest, budget):
            break
        found = [(lookup.matches[position], position) for position in lookup.at(level)]
        for match in sorted({match for match, _ in found if match <= longest}, reverse=True):
            if best.score >= allowance(match, budget):
                break
            tree = grow(lookup.index, [start for m, start in found if m >= match], allowance(match, budget))
            if tree.score > best.score:
                best, tree.match = tree, match
        longest = shortest - 1
    return best


def grow(index: SuffixIndex, starts: list[int], budget: int) -> Tree:
    """The most probable nodes of what follows `starts` (newest first); equals go shallow first, then newest first."""
    tree = Tree()
    fewest = THRESHOLD * len(starts)
    waiting: list[tuple[int, int, int, int, int, list[int]]] = []  # -votes, depth, order, parent, token, voters
    order, total, parent, depth, voters = 0, 0, -1, 0, starts
    while len(tree.tokens) < budget:
        run = [] if waiting else index.agreed(voters, depth, budget - len(tree.tokens))
        following = run or _following(index, voters, depth, tree, parent)
        if not waiting and not run and following[0] >= 0 and following.count(following[0]) == len(following):
            run = following[:1]
        if run:  # no rivals and no dispute
            for token in run:
                depth += 1
                parent = tree.add(token, parent, depth)
            total += len(run) * len(voters)
            continue
        children: dict[int, list[int]] = {}
        for start, token in zip(voters, following, strict=True):
            children.setdefault(token, []).append(start)
        for token, those in children.items():
            if token >= 0 and len(those) >= fewest:
                order += 1
                heapq.heappush(waiting, (-len(those), depth + 1, order, parent, token, those))
        if not waiting:
            break
        _, depth, _, parent, token, voters = heapq.heappop(waiting)
        parent = tree.add(token, parent, depth)
        total += len(voters)
    tree.score = total / len(starts)
    return tree


def _following(index: SuffixIndex, starts: list[int], depth: int, tree: Tree, node: int) -> list[int]:
    """The token `depth` after each start; where the text ends the draft follows itself, so a repetition goes on."""
    text, mask, end = index.text, index.rows - 1, index.end - depth
    if starts[0] < end:
        return [text[start + depth & mask] for start in starts]
    path = tree.path(node)
    return [text[start + depth & mask] if start < end else path[start - end] for start in starts]
