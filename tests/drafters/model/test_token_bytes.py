"""Bytes of tokens, over tokenizers of every kind, and roles of special tokens."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.drafters.model.token_bytes import TokenBytes
from paceline.errors import BrokenModel
from paceline.text.tokenizer import Tokenizer
from tests.helpers.small_tokenizers import TORTURE, small_tokenizers

KINDS = ["byte level", "llama", "sentencepiece", "gemma"]


def spelt(name, text):
    tokenizer = small_tokenizers()[name]
    of = TokenBytes.of_tokenizer(tokenizer).of
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert all(of[token] is not None for token in ids), "a special token stands for text"
    joined = b"".join(of[token] for token in ids)
    return joined.removeprefix(b" ") if name == "sentencepiece" and not text.startswith(" ") else joined


@pytest.mark.parametrize("name", KINDS)
def test_bytes_of_a_texts_tokens_are_the_texts(name):
    assert spelt(name, TORTURE) == TORTURE.encode()


@settings(max_examples=30, deadline=None)
@given(text=st.text(max_size=40))
def test_bytes_of_any_texts_tokens_are_the_texts(text):
    for name in ("byte level", "gemma"):
        assert spelt(name, text) == text.encode()


def test_special_tokens_have_roles_and_no_bytes():
    chat, llama, piece, gemma = (TokenBytes.of_tokenizer(small_tokenizers()[name]) for name in KINDS)
    assert chat.roles == {"end text": 0, "begin turn": 1, "end turn": 2}
    assert llama.roles == {"begin text": 0, "end text": 1, "begin turn": 2, "end turn": 3}
    assert piece.roles == {"begin text": 1, "end text": 2}
    assert gemma.roles == {"begin text": 1, "end text": 2, "end turn": 3}
    assert [one.of[:3] for one in (chat, llama, piece, gemma)] == [(None, None, None)] * 4
    plain = small_tokenizers()["byte level"].backend.token_to_id("<plain> Ġ")
    assert chat.of[plain] == "<plain> Ġ".encode(), "an added token is written as it is"


def test_a_tokenizer_that_does_not_spell_texts_is_refused():
    from tokenizers import Tokenizer as Backend
    from tokenizers import models, pre_tokenizers

    backend = Backend(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    with pytest.raises(BrokenModel):
        TokenBytes.of_tokenizer(Tokenizer(backend, {}, {}))
