"""Drafted texts as tokens of the target: those that its tokenizer gives the whole text, but for the last."""

from __future__ import annotations

import pytest

from paceline.drafters.model.reencode import reencoded
from paceline.drafters.model.token_bytes import TokenBytes
from paceline.testing import toy_config
from tests.helpers.contract_toys import VOCAB, exercised, make_engine, other_vocabulary, params, plain, prompt_of, run
from tests.helpers.small_tokenizers import small_tokenizers

TEXT = "The quick brown fox jumps over the lazy dog. It's 1234 o'clock; naïve 日本 isn't it?\n  def get(self):"


@pytest.mark.parametrize("name", ["byte level", "llama", "gemma", "sentencepiece"])
def test_drafted_text_is_continued_mostly_by_the_tokens_of_the_whole_text(name):
    tokenizer = small_tokenizers()[name]
    spelt, ids = TokenBytes.of_tokenizer(tokenizer).of, tokenizer.encode(TEXT, add_special_tokens=False)

    def encode(text):
        return tokenizer.encode(text, add_special_tokens=False)

    drafted = right = 0
    for end in range(4, len(ids) - 4):
        rest = b"".join(spelt[token] for token in ids[end : end + 4])
        found = reencoded(ids[:end], rest, spelt, encode)
        assert rest.startswith(b"".join(spelt[token] for token in found))
        drafted += len(found)
        right += sum(one == other for one, other in zip(found, ids[end:], strict=False))
    assert drafted > len(ids)
    assert right > 0.7 * drafted, "but for a word that is cut"


def test_a_draft_that_changes_committed_tokens_or_spells_a_special_one_is_none():
    spelt = [None, b"a", b"b", b"ab", b"\xff"]

    def encode(text):
        pieces = {"a": 1, "b": 2, "ab": 3, "<end>": 0}
        ids = []
        while text:
            piece = next(one for one in ("<end>", "ab", "a", "b") if text.startswith(one))
            ids.append(pieces[piece])
            text = text.removeprefix(piece)
        return ids

    assert reencoded([1, 2], b"aba", spelt, encode) == [], "the committed tokens are ab here"
    assert reencoded([2, 1], b"aba", spelt, encode) == [3]
    assert reencoded([2, 1], b"a<end>bb", spelt, encode) == [1]
    assert reencoded([0, 1], b"aba", spelt, encode) == [3], "a special token is a border"
    assert reencoded([2], b"\xffb", spelt, encode) == []
    assert reencoded([2], "aaé".encode()[:-1], spelt, encode) == [1], "half a character is left out"


def test_the_measured_probability_of_shared_tokens_chooses_the_way():
    """The last letter, which the drafter has not, and two letters as one token are a part of its distributions."""
    for below, expected in ((2.0, True), (0.01, False)):
        drafter = other_vocabulary(toy_config(VOCAB), reencode_below=below)
        requests = [(0, str(i), prompt_of(i, 9), params(max_tokens=60)) for i in range(3)]
        sequences = run(make_engine([drafter]), requests)[0]
        assert drafter.reencodes == expected
        assert exercised(sequences.values())
        for name, alone in plain(requests).items():
            assert sequences[name].output_tokens == alone.output_tokens
