"""The committed text in a drafter's own tokens equals a fresh encoding of it, whatever the steps it came in."""

import codecs
import itertools
import random

import pytest

from paceline.drafters.model.make import retokenizer
from paceline.drafters.model.retokenize import MOST_AGAIN, GrowingText, Retokenizer
from paceline.drafters.model.token_bytes import TokenBytes
from paceline.drafters.model.vocabulary_map import VocabularyMap
from tests.helpers.small_tokenizers import TORTURE, small_tokenizers

KINDS = ["byte level", "llama", "sentencepiece", "gemma"]


def rules_of(target, own):
    """Rules of two tokenizers by name, and the bytes of the first."""
    tokenizers = small_tokenizers()
    spelt, drafts = (TokenBytes.of_tokenizer(tokenizers[name]) for name in (target, own))
    vocabulary = VocabularyMap.of(spelt, drafts, len(spelt.of), len(drafts.of))
    return retokenizer(spelt, drafts, tokenizers[own], vocabulary), spelt.of


@pytest.mark.parametrize(("target", "own"), [*itertools.permutations(KINDS, 2)])
def test_ids_are_those_of_a_fresh_encoding_after_every_step(target, own):
    rules, spelt = rules_of(target, own)
    chance, text, followed = random.Random(3), GrowingText(rules), 0
    tokens = small_tokenizers()[target].encode(TORTURE * 2, add_special_tokens=False)
    again = 0
    while followed < len(tokens):
        followed = min(followed + chance.randint(1, 5), len(tokens))
        before = list(text.ids)
        unchanged = text.follow(tokens[:followed])
        assert text.ids[:unchanged] == before[:unchanged]
        again += len(text.ids) - unchanged
        decoder = codecs.getincrementaldecoder("utf-8")("strict")  # incomplete characters are held back
        known = decoder.decode(b"".join(spelt[token] for token in tokens[:followed]))
        assert text.ids == [*rules.prefix, *rules.encode(known)]
        assert text.is_whole == (not decoder.getstate()[0])
    assert again < 4 * len(text.ids), "most of the text is encoded once"


def test_a_special_token_is_matched_by_role_and_one_spelt_in_text_stays_text():
    rules, _ = rules_of("byte level", "llama")
    tokenizer = small_tokenizers()["byte level"]
    as_text = tokenizer.encode("hi<|im_end|>there", add_special_tokens=False)
    assert 2 not in as_text
    text = GrowingText(rules)
    text.follow(as_text)
    assert 3 not in text.ids, "no <|eot_id|>"
    marked = GrowingText(rules)
    marked.follow([1, *tokenizer.encode("hi"), 2, *tokenizer.encode("there"), 0])
    assert marked.ids == [2, *rules.encode("hi"), 3, *rules.encode("there"), 1]


def test_special_tokens_without_a_match_are_left_out_and_a_first_token_is_there_once():
    spelt = [None, None, b"a"]
    rules = Retokenizer(spelt, [None, b"a"], {0: 0}, lambda text: [1] * len(text), prefix=(0,))
    text = GrowingText(rules)
    assert text.follow([0, 2, 1, 2]) == 1
    assert text.ids == [0, 1, 1]
    assert text.follow([0, 2, 1, 2, 0, 2, 2]) == 3
    assert text.ids == [0, 1, 1, 0, 1, 1]


def test_bytes_that_are_no_text_become_one_replacement_character_each_and_end_with_the_next_special_token():
    spelt = [None, *(bytes([byte]) for byte in b"a\xe6\x97\xff")]
    letters = "a日\ufffd"
    own = [letter.encode() for letter in letters]
    rules = Retokenizer(spelt, own, {0: 0}, lambda text: [letters.index(letter) for letter in text])
    text = GrowingText(rules)
    text.follow([1, 2, 3])
    assert (text.ids, text.is_whole) == ([0], False)
    text.follow([1, 2, 3, 4, 1])
    assert (text.ids, text.is_whole) == ([0, 2, 2, 0], True)
    text.follow([1, 2, 3, 4, 1, 2, 0])
    assert text.ids == [0, 2, 2, 0, 2, 0]
    assert text.is_whole


def test_a_long_text_without_a_border_costs_a_bounded_amount_a_step():
    rules, _ = rules_of("gemma", "byte level")
    encoded = []
    counting = Retokenizer(
        rules.target_bytes,
        rules.draft_bytes,
        rules.specials,
        lambda text: encoded.append(len(text)) or rules.encode(text),
    )
    tokens = small_tokenizers()["gemma"].encode("日本語" * 400, add_special_tokens=False)
    text = GrowingText(counting)
    for end in range(1, len(tokens) + 1):
        text.follow(tokens[:end])
    assert max(encoded) < MOST_AGAIN + 8
