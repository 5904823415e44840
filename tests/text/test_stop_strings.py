"""Stop strings against a naive reference: whatever the token borders, nothing of a stop string is ever shown."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paceline.text.stop_strings import OutputText


class Pieces:
    """A decoder whose token i is the i-th piece of text."""

    def __init__(self, pieces):
        self.pieces = pieces

    def push(self, token):
        return self.pieces[token]

    def flush(self):
        return ""


def naive(pieces, stops, include, min_tokens):
    """After every token look through all the text from where stopping was first allowed."""
    text, allowed_from = "", 0
    for count, piece in enumerate(pieces, start=1):
        text += piece
        if count < min_tokens:
            allowed_from = len(text)
            continue
        found = [(text.find(stop, allowed_from), -len(stop), stop) for stop in stops]
        found = [match for match in found if match[0] >= 0]
        if found:
            at, _, stop = min(found)
            return text[: at + (len(stop) if include else 0)], stop, count
    return text, None, len(pieces)


pieces_strategy = st.lists(st.text("ab.", max_size=4), max_size=12)
stops_strategy = st.lists(st.text("ab.", min_size=1, max_size=5), max_size=3)


@given(pieces_strategy, stops_strategy, st.booleans(), st.integers(0, 4))
def test_stop_strings_match_a_naive_reference(pieces, stops, include, min_tokens):
    expected, stop, count = naive(pieces, stops, include, min_tokens)
    text = OutputText(Pieces(pieces), stops, include_stop=include)
    streamed = ""
    for token in range(len(pieces)):
        stopped = text.push(token, may_stop=token + 1 >= min_tokens)
        if stopped:
            text.finish()
        streamed += text.take()
        assert expected.startswith(streamed), "what was shown must never be taken back"
        if stopped:
            assert token + 1 == count
            break
    text.finish()
    streamed += text.take()
    assert text.stop == stop
    assert streamed == text.text == expected


@given(pieces_strategy, stops_strategy)
def test_only_a_possible_beginning_of_a_stop_string_is_held_back(pieces, stops):
    text = OutputText(Pieces(pieces), stops)
    streamed = ""
    for token in range(len(pieces)):
        if text.push(token):
            break
        streamed += text.take()
        held = text.text[len(streamed) :]
        assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)
