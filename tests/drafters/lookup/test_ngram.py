"""Prompt lookup against a naive search, and through the engine on a target that repeats itself."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.config import SpeculationConfig
from paceline.drafters import DrafterContext, DraftRequest
from paceline.drafters.lookup.ngram import MATCH_LIMIT, NgramDrafter, NgramIndex
from paceline.engine.policy.interface import DraftPlan
from paceline.testing import toy_config
from tests.helpers import toys
from tests.helpers.toys import greedy_periodic, run_engine, sequence_of, thread_seconds

texts = st.integers(1, 4).flatmap(lambda size: st.lists(st.integers(0, size), min_size=1, max_size=60))


def make(ngram_min=2, ngram_max=5, vocab_size=11, native=True):
    speculation = SpeculationConfig(ngram_min=ngram_min, ngram_max=ngram_max)
    return NgramDrafter(DrafterContext(toy_config(vocab_size), torch.device("cpu"), speculation), native)


def propose(drafter, sequence, max_nodes):
    tokens, parents = toys.propose(drafter, sequence, max_nodes)
    assert parents == [*range(-1, len(parents) - 1)]
    return tokens


def naive(tokens, max_nodes, ngram_min, ngram_max):
    """(chain, match length) by searching backwards for every n."""
    end = len(tokens)
    for n in range(ngram_max, ngram_min - 1, -1):
        for start in range(end - 1, n - 1, -1):
            if tokens[start - n : start] == tokens[end - n :]:
                text = list(tokens)
                for offset in range(max_nodes):
                    text.append(text[start + offset])
                longest = max(
                    m for m in range(min(start, MATCH_LIMIT) + 1) if tokens[start - m : start] == tokens[end - m : end]
                )
                return text[end:], longest
    return [], 0


@settings(max_examples=300, deadline=None)
@given(texts, st.integers(0, 9), st.integers(1, 3), st.integers(0, 4))
def test_a_proposal_is_what_a_naive_search_finds(tokens, max_nodes, ngram_min, more):
    expected, length = naive(tokens, max_nodes, ngram_min, ngram_min + more)
    for native in (True, False):
        drafter, sequence = make(ngram_min, ngram_min + more, native=native), sequence_of(tokens)
        assert drafter.level(sequence) == length
        assert propose(drafter, sequence, max_nodes) == expected


@settings(max_examples=100, deadline=None)
@given(texts, st.data())
def test_an_index_grown_in_pieces_equals_one_built_at_once(tokens, data):
    grown, whole = NgramIndex(1, 4, 5), NgramIndex(1, 4, 5)
    whole.extend(tokens, len(tokens))
    while grown.length < len(tokens):
        grown.extend(tokens, data.draw(st.integers(grown.length, len(tokens))))
        grown.extend(tokens, grown.length + 1 if grown.length < len(tokens) else grown.length)
    assert grown._tables == whole._tables
    assert grown.find(tokens) == whole.find(tokens)


def test_a_prompt_is_indexed_no_further_than_it_is_computed():
    for native in (True, False):
        drafter, sequence = make(native=native), sequence_of([1, 2] * 50)
        drafter.index_prompt(sequence, 10)
        state = drafter.states[sequence.key]
        assert (state.indexed if native else state.index.length) == 10
        assert propose(drafter, sequence, 3) == [1, 2, 1], "a draft asked for early takes in the rest"


def test_a_repetition_is_continued_past_the_end_of_the_text():
    assert propose(make(), sequence_of([7, 1, 2, 3, 1, 2, 3]), 8) == [1, 2, 3, 1, 2, 3, 1, 2]


@pytest.mark.parametrize("tokens", [[3], [3, 3], [1, 2, 3, 4, 5]])
@pytest.mark.parametrize("max_nodes", [0, 1, 50])
def test_little_or_no_history_gives_an_empty_or_a_small_draft(tokens, max_nodes):
    assert propose(make(), sequence_of(tokens), max_nodes) == []
    assert propose(make(ngram_min=1), sequence_of([3, 3]), max_nodes) == [3] * max_nodes


def test_released_sequences_leave_nothing_behind():
    drafter, sequence = make(), sequence_of([1, 2, 1, 2])
    drafter.release(sequence)
    propose(drafter, sequence, 2)
    drafter.release(sequence)
    assert drafter.states == {}


def test_a_reused_request_id_does_not_see_the_old_text():
    drafter = make()
    assert propose(drafter, sequence_of([1, 2, 3, 1, 2]), 1) == [3]
    assert propose(drafter, sequence_of([1, 2, 4, 1, 2]), 1) == [4]


@pytest.mark.parametrize("num_blocks", [128, 14])
def test_greedy_output_is_unchanged_and_comes_in_fewer_passes(num_blocks):
    """At 14 blocks of 4 the four sequences preempt one another."""
    prompts = {str(i): [1, 2, 3, 4, 5, 1, 2, 3 + i] for i in range(4)}
    drafter = make()
    sequences, passes = run_engine([drafter], {name: DraftPlan("ngram", 4) for name in prompts}, prompts, num_blocks)
    for name, prompt in prompts.items():
        assert sequences[name].output_tokens == greedy_periodic(prompt, 24)
    _, plain = run_engine([], {}, prompts, num_blocks)
    assert passes < plain
    assert sum(s.stats.num_accepted_tokens for s in sequences.values()) > 20
    assert sum(s.num_preemptions for s in sequences.values()) > 0 or num_blocks == 128
    assert drafter.states == {}


def test_costs_do_not_grow_with_the_context():
    """A context of 20,000 tokens beside one of 500, on this machine and by turns; others' time does not count."""
    noise = torch.randint(0, 49152, (20_000,), generator=torch.Generator().manual_seed(0)).tolist()
    drafter, read_s, times = make(vocab_size=49152), {}, {500: [], 20_000: []}
    sequences = {length: sequence_of([*noise[:length], *noise[300:310]], None, str(length)) for length in times}
    for length, sequence in sequences.items():
        read_s[length] = thread_seconds(lambda sequence=sequence: drafter.index_prompt(sequence, len(sequence.tokens)))
    assert read_s[20_000] / 20_000 < 4 * read_s[500] / 500
    for _ in range(50):
        for length, sequence in sequences.items():
            times[length].append(thread_seconds(lambda sequence=sequence: drafter.propose([DraftRequest(sequence, 8)])))
    assert min(times[20_000]) < 3 * min(times[500])
    for sequence in sequences.values():
        assert drafter.propose([DraftRequest(sequence, 8)]).tokens[0].tolist() == noise[310:318]
