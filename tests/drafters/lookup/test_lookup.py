"""What both lookups, `ngram` and `suffix`, must do alike."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.config import SpeculationConfig
from paceline.drafters import METHODS, DrafterContext, DraftRequest
from paceline.testing import toy_config
from tests.helpers.toys import propose, sequence_of

METHOD_NAMES = ("ngram", "suffix")
texts = st.integers(0, 4).flatmap(lambda size: st.lists(st.integers(0, size), min_size=1, max_size=44))


def make(method):
    return METHODS[method].make(DrafterContext(toy_config(11), torch.device("cpu"), SpeculationConfig()))


@pytest.mark.parametrize("method", METHOD_NAMES)
@settings(max_examples=80, deadline=None)
@given(texts, st.data())
def test_commits_propose_the_same_as_a_fresh_drafter(method, tokens, data):
    """Prefill chunks, then decodes of one token or more, with preemptions in between."""
    drafter, sequence = make(method), sequence_of(tokens, data.draw(st.integers(1, len(tokens))))
    sequence.tokens = tokens[: sequence.num_prompt]
    drafter.admit(sequence, 0, 0)
    computed = 0
    while computed < sequence.num_prompt:
        computed += data.draw(st.integers(1, sequence.num_prompt - computed))
        drafter.index_prompt(sequence, computed)
    while len(sequence.tokens) < len(tokens):
        if data.draw(st.booleans()):
            drafter.release(sequence)
            drafter.admit(sequence, 0, 0)
        sequence.tokens += tokens[len(sequence.tokens) :][: data.draw(st.integers(1, 3))]
        drafter.index_prompt(sequence, len(sequence.tokens) - 1)
        assert propose(drafter, sequence, 5) == propose(make(method), sequence, 5)
    assert method == "ngram" or drafter.store.index.end == make(method).store.index.end, "learned before the end"


@pytest.mark.parametrize("method", METHOD_NAMES)
def test_answers_to_one_request_do_not_mix_and_rows_may_differ(method):
    texts = ([1, 2, 3, 1, 2], [5, 6, 7, 8], [1, 2, 4, 1, 2])
    rows = [DraftRequest(sequence_of(text, index=at), 4 if at < 2 else 1) for at, text in enumerate(texts)]
    drafter = make(method)
    draft = drafter.propose(rows)
    draft.validate(11)
    assert draft.num_nodes.tolist() == [4, 0, 1]
    assert draft.tokens.tolist() == [[3, 1, 2, 3], [0] * 4, [4, 0, 0, 0]]
    assert drafter.propose([]).batch == 0
