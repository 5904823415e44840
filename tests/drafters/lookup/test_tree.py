"""Trees and chains against a naive count over all occurrences."""

from __future__ import annotations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from paceline.drafters.lookup.index import DEPTH, END, LEVELS, LIMIT, Context, SuffixIndex
from paceline.drafters.lookup.tree import (
    HIT_RATE,
    INSERTED,
    LEVEL_STEPS,
    STORE_WEIGHT,
    SUBSTITUTED,
    THRESHOLD,
    Lookup,
    continuation,
    grow,
    level_of,
    longest_place,
    places_of,
)
from tests.drafters.lookup.naive import naive_occurrences

CLOSE = 1e-9
texts = st.integers(0, 4).flatmap(lambda size: st.lists(st.integers(0, size), min_size=1, max_size=44))


def naive_places(structures, tokens):
    """(tokens shared, votes, text, position) of all that may vote: the own text's first, a past one's for less."""
    known = [
        (match, weight * 2**match, text, position)
        for text, weight in zip(structures, (1, STORE_WEIGHT), strict=True)
        for position, match in naive_occurrences(text, tokens).items()
    ]
    long = [
        (match, weight * 2**match, text, position)
        for text, weight in zip(structures, (1, STORE_WEIGHT), strict=True)
        for position, match in naive_occurrences(text, tokens, LEVELS[:1]).items()
    ]
    known = long or known
    longest, total = max((place[0] for place in known), default=0), sum(place[1] for place in known)
    places = [(match, HIT_RATE[longest] * votes / total, text, position) for match, votes, text, position in known]
    if longest <= 1:
        own, last = structures[0], len(tokens) - 1
        copied = naive_occurrences(own, tokens[:-1], (2,), 1 + LIMIT)
        recent = sorted((p for p in copied if p != last), reverse=True)
        if recent := recent[: LIMIT - (last in copied)]:
            left_out = max(recent, key=copied.get)
            for start, often in ((left_out + 1, SUBSTITUTED), (left_out, INSERTED)):
                if start < last:
                    places.append((1, often * (1 - HIT_RATE[longest]), own, start))
    return places


def naive_paths(places, own):
    """path -> probability of all that are likely enough, or as good as."""
    likely, frontier = {}, [((), 1.0, places)]
    while frontier:
        path, probability, voters = frontier.pop()
        worth = 1.0
        if path:
            sure = HIT_RATE[min(max(place[0] for place in voters) + len(path), DEPTH)]
            worth = probability * sure / sum(place[1] for place in voters)
        children = {}
        for match, votes, text, start in voters:
            longer = [*text, *path] if text is own else text
            children.setdefault(longer[start + len(path)], []).append((match, votes, text, start))
        for token, those in children.items():
            chance = worth * sum(place[1] for place in those)
            if token != END and chance >= THRESHOLD - CLOSE and len(path) < 9:
                likely[(*path, token)] = chance
                frontier.append(((*path, token), chance, those))
    return likely


def tree_of(tokens, max_nodes, *indexes):
    context = Context(tokens)
    lookups = [Lookup(index, context, STORE_WEIGHT if at else 1.0) for at, index in enumerate(indexes)]
    places = places_of(lookups, indexes[0], context)
    return grow(places, max_nodes), level_of(places)


def paths_of(tree):
    paths = []
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return paths


@settings(max_examples=300, deadline=None)
@given(texts, st.lists(texts, max_size=3), st.integers(0, 6))
def test_the_tree_is_the_one_a_naive_count_finds(tokens, past, max_nodes):
    local, store = SuffixIndex(), SuffixIndex(256)
    local.extend(tokens)
    for text in past:
        store.extend([*text, END])
    tree, level = tree_of(tokens, max_nodes, local, store)
    structures = [tokens, [token for text in past for token in [*text, END]]]
    places = naive_places(structures, tokens)
    likely = naive_paths(places, tokens)
    assume(all(abs(chance - THRESHOLD) > CLOSE for chance in likely.values()))
    highest = sum(sorted(likely.values(), reverse=True)[:max_nodes])
    assert sum(likely[path] for path in paths_of(tree)) == pytest.approx(highest)
    assert tree.depths == [len(path) for path in paths_of(tree)]
    assert len(set(paths_of(tree))) == len(tree.tokens) <= max_nodes, "siblings differ"
    assert tree.tokens == tree_of(tokens, max_nodes + 3, local, store)[0].tokens[: len(tree.tokens)]
    longest = max((place[0] for place in places), default=0)
    if longest >= LEVELS[0]:
        assert level == longest
    else:
        sure = sum(chance for path, chance in likely.items() if len(path) == 1)
        assert level in {sum(sure >= step + close for step in LEVEL_STEPS) for close in (-CLOSE, CLOSE)}
        assert (level == 0) == (not likely), "an empty draft has no evidence"


def test_it_branches_where_the_evidence_does():
    index = SuffixIndex()
    tokens = [1, 2, 3, 5, 6, 1, 2, 3, 5, 7, 1, 2, 3, 8, 9, 1, 2, 3]
    index.extend(tokens)
    tree, level = tree_of(tokens, 4, index)
    assert level == 4
    assert paths_of(tree)[:2] == [(5,), (8,)], "two of three say 5"
    assert set(paths_of(tree)[2:]) < {(5, 6), (5, 7), (8, 9)}, "which are as likely as one another"
    whole = paths_of(tree_of(tokens, 6, index)[0])
    assert whole.index((5, 7)) < whole.index((5, 6)), "of equals the newest"


def test_the_longer_context_and_the_own_text_count_more():
    local, store = SuffixIndex(), SuffixIndex(256)
    tokens = [1, 2, 4, 5, 3, 2, 6, 5, 1, 2]
    local.extend(tokens)
    store.extend([1, 2, 7, END])
    for indexes in ([local], [local, store]):
        tree, _ = tree_of(tokens, 1, *indexes)
        assert tree.tokens == [4]


# -- the longest match -------------------------------------------------------------------------------------------


def naive_longest(tokens, shortest, longest):
    """(position, match) of the newest of the longest matches that the chains show; None: there is none."""
    levels = [n for at, n in enumerate(LEVELS) if at == 0 or LEVELS[at - 1] > shortest]
    matches = naive_occurrences(tokens, tokens, levels)
    ranked = [(min(match, longest), position) for position, match in matches.items() if match >= shortest]
    return (max(ranked)[1], matches[max(ranked)[1]]) if ranked else None


@settings(max_examples=300, deadline=None)
@given(texts, st.integers(1, 7), st.integers(0, 4), st.integers(0, 9))
def test_the_longest_place_is_the_one_a_naive_search_finds(tokens, shortest, more, max_nodes):
    index = SuffixIndex()
    index.extend(tokens)
    places = longest_place(index, Context(tokens), shortest, shortest + more)
    naive = naive_longest(tokens, shortest, shortest + more)
    assert [(start - DEPTH, match) for match, _, start, _ in places] == ([] if naive is None else [naive])
    chain = continuation(places, max_nodes)
    text = list(tokens)
    for _ in range(max_nodes if naive else 0):
        text.append(text[naive[0] + len(text) - len(tokens)])
    assert chain.tokens == text[len(tokens) :]
    assert chain.parents == [*range(-1, len(chain.tokens) - 1)]
    assert chain.depths == [*range(1, len(chain.tokens) + 1)]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=44), st.integers(1, 4), st.integers(0, 4))
def test_where_little_repeats_no_longer_match_is_missed(tokens, shortest, more):
    assume(max(tokens.count(token) for token in tokens) <= LIMIT)
    index, end = SuffixIndex(), len(tokens)
    index.extend(tokens)
    longest = shortest + more
    shared = [
        (min(longest, max(m for m in range(at + 1) if tokens[at - m : at] == tokens[end - m :])), at)
        for at in range(1, end)
    ]
    newest = max((pair for pair in shared if pair[0] >= shortest), default=None)
    places = longest_place(index, Context(tokens), shortest, longest)
    assert [start - DEPTH for _, _, start, _ in places] == ([] if newest is None else [newest[1]])
