"""Which tokens of two vocabularies are alike, and q over those that are."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.drafters.model.token_bytes import TokenBytes
from paceline.drafters.model.vocabulary_map import VocabularyMap
from tests.helpers.enumeration import Setting, Toy, chains, check
from tests.helpers.small_tokenizers import small_tokenizers

spellings = st.lists(st.one_of(st.none(), st.binary(min_size=1, max_size=2)), min_size=1, max_size=12)
# Target a b c d; drafter: c, a, z, a again, b: three of four tokens, one of them twice.
TARGET, DRAFT = TokenBytes((b"a", b"b", b"c", b"d"), {}), TokenBytes((b"c", b"a", b"z", b"a", b"b"), {})
FIVE = VocabularyMap.of(TARGET, DRAFT, 4, 5)


@settings(max_examples=200, deadline=None)
@given(target=spellings, draft=spellings, sizes=st.tuples(st.integers(1, 14), st.integers(1, 14)))
def test_tokens_are_matched_by_bytes_and_never_outside_either_vocabulary(target, draft, sizes):
    vocabulary = VocabularyMap.of(TokenBytes(tuple(target), {}), TokenBytes(tuple(draft), {}), *sizes)
    assert (len(vocabulary.draft_of), len(vocabulary.target_of)) == sizes
    known = target[: sizes[0]]
    for token, of in enumerate(vocabulary.target_of.tolist()):
        spelt = draft[token] if token < len(draft) else None
        assert of == (known.index(spelt) if spelt is not None and spelt in known else -1)
    for token, of in enumerate(vocabulary.draft_of.tolist()):
        back = [draft for draft, target in enumerate(vocabulary.target_of.tolist()) if target == token]
        assert of == (back[0] if back else -1)
    assert vocabulary.is_empty == (max(vocabulary.target_of.tolist()) < 0)


@settings(max_examples=100, deadline=None)
@given(target=spellings, draft=spellings, data=st.data())
def test_probabilities_of_equal_bytes_are_summed(target, draft, data):
    vocabulary = VocabularyMap.of(TokenBytes(tuple(target), {}), TokenBytes(tuple(draft), {}), len(target), len(draft))
    logits = torch.tensor([data.draw(st.lists(st.floats(-5, 5), min_size=len(draft), max_size=len(draft)))])
    found = torch.softmax(logits.double(), -1)[0]
    sums = torch.zeros(len(target), dtype=torch.float64)
    for token, of in enumerate(vocabulary.target_of.tolist()):
        if of >= 0:
            sums[of] += found[token]
    q = torch.zeros_like(sums)
    q[vocabulary.ids] = torch.softmax(vocabulary.shared(logits.double()), -1)[0] if len(vocabulary.ids) else 0.0
    assert torch.allclose(q, sums / sums.sum().clamp_min(1e-300), atol=1e-12)


def test_special_tokens_are_matched_by_role_and_not_by_text():
    text = TokenBytes((b"<|im_end|>", None, None), {"end turn": 1, "begin turn": 2})
    other = TokenBytes((None, b"<|im_end|>"), {"end turn": 0})
    vocabulary = VocabularyMap.of(text, other, 3, 2)
    assert vocabulary.target_of.tolist() == [1, 0]
    assert vocabulary.specials == {1: 0}
    chat = TokenBytes.of_tokenizer(small_tokenizers()["byte level"])
    piece = TokenBytes.of_tokenizer(small_tokenizers()["sentencepiece"])
    both = VocabularyMap.of(chat, piece, len(chat.of), len(piece.of))
    assert both.specials == {0: 2, 2: 2}, "an end of a turn is read as the end of a text where there is no other"
    assert both.target_of[2] == 2, "and drafted as the end of a turn"


class Restricted:
    """A drafter of FIVE: q over the target's tokens. `counted_once`: the second token of the bytes of "a" is lost."""

    def __init__(self, seed, counted_once=False):
        self.own, self.vocab, self.counted_once = Toy(seed, 5), 4, counted_once

    def p(self, said):
        logits = self.own.logits(said)[None]
        shared = logits[:, FIVE.first] if self.counted_once else FIVE.shared(logits)
        return torch.zeros(4, dtype=torch.float64).index_copy(0, FIVE.ids, torch.softmax(shared, -1)[0])


def test_a_draft_of_another_vocabulary_keeps_the_joint_law_of_three_tokens_over_two_steps():
    for parents, ends in (((-1, 0, 1), ()), (chains(2), (1,))):
        check(Setting(Toy(1, 4), Restricted(2), tuple(parents), ends=ends, ids=tuple(FIVE.ids.tolist())))


def test_duplicates_counted_once_are_another_law():
    right, wrong = Restricted(2), Restricted(2, counted_once=True)
    assert all(float(abs(right.p(said) - wrong.p(said)).sum()) > 0.01 for said in itertools.product(range(4), repeat=1))

    class Mixed(Restricted):
        """Tokens are drawn from one q and verified with the other."""

        calls = 0

        def p(self, said):
            Mixed.calls += 1
            return (wrong if Mixed.calls % 2 else right).p(said)

    with pytest.raises(AssertionError):
        check(Setting(Toy(1, 4), Mixed(2), tuple(chains(2)), ids=tuple(FIVE.ids.tolist())))
