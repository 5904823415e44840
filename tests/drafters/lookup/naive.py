"""A naive search for the occurrences that a suffix index finds."""

from __future__ import annotations

from paceline.drafters.lookup.index import DEPTH, LEVELS, LIMIT


def common_suffix(text, position, tokens):
    length = 0
    while length < min(DEPTH, position, len(tokens)) and text[position - 1 - length] == tokens[-1 - length]:
        length += 1
    return length


def naive_occurrences(text, tokens, levels=LEVELS, limit=LIMIT):
    """position -> match length of the most recent occurrences at each level."""
    matches = {position: common_suffix(text, position, tokens) for position in range(1, len(text))}
    return {
        position: matches[position]
        for n in levels
        for position in sorted((p for p in matches if matches[p] >= n), reverse=True)[:limit]
    }
