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

from paceline.drafters.suffix_index import DEPTH, LEVELS, SuffixIndex

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

    def path(self, node: int) -> list[int]:
        """The tokens from the root's child down to a node."""
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


def best_tree(indexes: SequenceOf[SuffixIndex], pattern: int, budget: int) -> Tree:
    """The best over all match lengths and indexes; the earlier index on a tie."""
    best = Tree()
    for index in indexes:
        best = _best_of(index, pattern, budget, best)
    return best


def longest_match(indexes: SequenceOf[SuffixIndex], pattern: int) -> int:
    for level in range(len(LEVELS)):
        found = [match for index in indexes for match, _ in index.occurrences(level, pattern)]
        if found:
            return max(found)
    return 0


def _best_of(index: SuffixIndex, pattern: int, budget: int, best: Tree) -> Tree:
    """Long matches first: no tree scores above its allowance, so most of the short ones need not be looked at."""
    known: dict[int, int] = {}  # position -> match length
    longest = DEPTH
    for level, shortest in enumerate(LEVELS):
        if best.score >= allowance(longest, budget):
            break
        known.update((position, match) for match, position in index.occurrences(level, pattern))
        for match in sorted({m for m in known.values() if shortest <= m <= longest}, reverse=True):
            if best.score >= allowance(match, budget):
                break
            starts = sorted((position for position, m in known.items() if m >= match), reverse=True)
            tree = grow(index, starts, allowance(match, budget))
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
        following = _following(index, voters, depth, tree, parent)
        token, depth = following[0], depth + 1
        if waiting or token < 0 or following.count(token) < len(following):  # rivals, or not unanimous
            children: dict[int, list[int]] = {}
            for start, token in zip(voters, following, strict=True):
                children.setdefault(token, []).append(start)
            for token, those in children.items():
                if token >= 0 and len(those) >= fewest:
                    order += 1
                    heapq.heappush(waiting, (-len(those), depth, order, parent, token, those))
            if not waiting:
                break
            _, depth, _, parent, token, voters = heapq.heappop(waiting)
        tree.parents.append(parent)
        tree.tokens.append(token)
        tree.depths.append(depth)
        total += len(voters)
        parent = len(tree.tokens) - 1
    tree.score = total / len(starts)
    return tree


def _following(index: SuffixIndex, starts: list[int], depth: int, tree: Tree, node: int) -> list[int]:
    """The token `depth` after each start; where the text ends the draft follows itself, so a repetition goes on."""
    text, mask, end = index.text, index.rows - 1, index.end - depth
    if starts[0] < end:
        return [text[start + depth & mask] for start in starts]
    path = tree.path(node)
    return [text[start + depth & mask] if start < end else path[start - end] for start in starts]
