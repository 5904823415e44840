"""Drafters of both rules: what they propose, keep and learn, and their output through the engine."""

from __future__ import annotations

import random
import tracemalloc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.config import SpeculationConfig
from paceline.core.sequence import Owner
from paceline.drafters import METHODS, DrafterContext, DraftRequest
from paceline.drafters.lookup.index import END
from paceline.drafters.lookup.suffix import SuffixDrafter
from paceline.drafters.lookup.tree import INSERTED, LEVEL_STEPS, SUBSTITUTED
from paceline.testing import toy_config
from tests.helpers.contract_toys import make_engine, params, prompt_of, run
from tests.helpers.toys import propose, sequence_of, thread_seconds

METHOD_NAMES = ("ngram", "suffix")
texts = st.integers(0, 4).flatmap(lambda size: st.lists(st.integers(0, size), min_size=1, max_size=44))


def make(method, **speculation):
    context = DrafterContext(toy_config(11), torch.device("cpu"), SpeculationConfig(**speculation))
    return METHODS[method].make(context)


def make_suffix(encode=None, vocab_size=11, **speculation):
    context = DrafterContext(
        toy_config(vocab_size), torch.device("cpu"), SpeculationConfig(**speculation), encode=encode
    )
    return SuffixDrafter(context)


def encode(text):
    return [ord(letter) % 11 for letter in text]


def answer(drafter, tokens, request_id="past", domain=""):
    """Let the drafter see a finished answer."""
    sequence = sequence_of([9, *tokens], 1, request_id, domain=domain)
    drafter.index_prompt(sequence, len(sequence.tokens) - 1)
    sequence.finish_reason = "stop"
    drafter.release(sequence)


def kept(drafter, domain=""):
    """The past answers of a domain."""
    index = drafter.store.answers(domain)
    return [] if index is None else index.tokens().tolist()


# -- both rules --------------------------------------------------------------------------------------------------


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
    assert method == "ngram" or not kept(drafter), "learned before the end"


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


@pytest.mark.parametrize("method", METHOD_NAMES)
def test_a_prompt_in_chunks_is_indexed_once_and_whole(method):
    drafter, sequence = make(method), sequence_of([1, 2] * 50)
    drafter.index_prompt(sequence, 10)
    assert method == "ngram" or drafter.states[sequence.key].indexed == 10
    assert propose(drafter, sequence, 3)[0] == [1, 2, 1], "a draft asked for early takes in the rest"
    assert drafter.states[sequence.key].indexed == 100


@pytest.mark.parametrize("method", METHOD_NAMES)
def test_released_sequences_leave_nothing_behind(method):
    drafter, sequence = make(method), sequence_of([1, 2, 1, 2])
    drafter.release(sequence)
    propose(drafter, sequence, 2)
    drafter.release(sequence)
    assert drafter.states == {}


@pytest.mark.parametrize("method", METHOD_NAMES)
def test_a_reused_request_id_does_not_see_the_old_text(method):
    drafter = make(method)
    assert propose(drafter, sequence_of([1, 2, 3, 1, 2]), 1)[0] == [3]
    assert propose(drafter, sequence_of([1, 2, 4, 1, 2]), 1)[0] == [4]


# -- the longest match -------------------------------------------------------------------------------------------


def test_ngram_drafts_the_nodes_it_may_have_and_no_matter_how_likely():
    drafter, sequence = make("ngram"), sequence_of([7, 1, 2, 3, 1, 2, 3])
    assert propose(drafter, sequence, 8) == ([1, 2, 3, 1, 2, 3, 1, 2], [*range(-1, 7)])
    assert drafter.level(sequence) == 3
    assert propose(make("ngram"), sequence_of([3, 3]), 9) == ([], []), "one token shared is less than ngram_min"
    assert propose(make("ngram", ngram_min=1), sequence_of([3, 3]), 9)[0] == [3] * 9


def test_ngram_reads_no_past_answers():
    drafter = make("ngram")
    past = sequence_of([9, 1, 2, 3, 4], 1, "past")
    propose(drafter, past, 4)
    past.finish_reason = "stop"
    drafter.release(past)
    assert propose(drafter, sequence_of([8, 1, 2, 3]), 4) == ([], [])


# -- trees -------------------------------------------------------------------------------------------------------


def test_a_copy_that_strayed_goes_on_behind_the_token_left_out_or_with_it():
    sequence = sequence_of([1, 2, 3, 4, 5, 6, 9, 1, 2, 3, 8])
    drafter = make_suffix()
    tokens, parents = propose(drafter, sequence, 8)
    assert [token for token, parent in zip(tokens, parents, strict=True) if parent < 0] == [5, 4]
    assert propose(drafter, sequence, 2) == ([5, 4], [-1, -1])
    assert drafter.level(sequence) == sum(step <= SUBSTITUTED + INSERTED for step in LEVEL_STEPS) > 0
    sequence.tokens += [5]
    assert propose(drafter, sequence, 1)[0] == [6], "and then follows it again"
    assert propose(make_suffix(), sequence_of([1, 2, 3, 4, 9, 3, 8]), 8) == ([], []), "one token shared is no copy"


@pytest.mark.parametrize("tokens", [[3], [1, 2, 3, 4, 5]])
@pytest.mark.parametrize("max_nodes", [0, 1, 64])
def test_little_or_no_history_gives_an_empty_draft(tokens, max_nodes):
    drafter, sequence = make_suffix(), sequence_of(tokens)
    assert propose(drafter, sequence, max_nodes) == ([], [])
    assert drafter.level(sequence) == 0
    assert drafter.propose([]).batch == 0


def test_no_nodes_or_more_than_there_are():
    sequence = sequence_of([1, 2, 3, 1, 2])
    assert propose(make_suffix(), sequence, 0) == ([], [])
    assert propose(make_suffix(), sequence, 1) == ([3], [-1])
    assert propose(make_suffix(), sequence, 64) == ([3, 1, 2] * 4 + [3], [*range(-1, 12)]), "as far as it is likely"


def test_a_loop_is_continued_past_the_end_of_the_text():
    drafter, sequence = make_suffix(), sequence_of([1, 2, 3] * 6)
    assert propose(drafter, sequence, 9) == ([1, 2, 3] * 3, [*range(-1, 8)])
    assert drafter.level(sequence) == 15


def test_unknown_sequences_can_be_released_and_teach_nothing():
    drafter, sequence = make_suffix(), sequence_of([1, 2, 3, 4, 5], 1)
    sequence.finish_reason = "stop"
    drafter.release(sequence)
    assert not kept(drafter)
    assert drafter.nbytes == drafter.store.nbytes


def test_finished_answers_serve_later_requests_and_are_learned_once():
    drafter = make_suffix()
    past = sequence_of([9, 9, 1, 2, 3, 4, 5, 6], 2, "past")
    drafter.admit(past, 0, 0)
    drafter.index_prompt(past, 5)
    drafter.release(past)  # preempted
    assert not kept(drafter)
    drafter.admit(past, 0, 0)
    drafter.index_prompt(past, 7)
    past.finish_reason = "length"
    drafter.release(past)
    drafter.release(past)
    assert kept(drafter) == [1, 2, 3, 4, 5, 6, END], "the output alone, once"
    assert propose(drafter, sequence_of([8, 1, 2, 3]), 8) == ([4, 5, 6], [-1, 0, 1])
    assert propose(drafter, sequence_of([7, 2, 3]), 1) == ([4], [-1])


def test_aborted_answers_are_not_learned():
    drafter = make_suffix()
    past = sequence_of([9, 1, 2, 3, 4], 1)
    drafter.index_prompt(past, 4)
    drafter.release(past)
    past.finish_reason = "abort"
    drafter.release(past)
    assert not kept(drafter)


def test_a_domain_drafts_from_its_own_answers_alone():
    drafter = make_suffix()
    waiting = {name: sequence_of([8, 1, 2], request_id=name, domain=name) for name in ("one", "two")}
    assert drafter.levels([*waiting.values()]) == [0, 0]
    answer(drafter, [1, 2, 3, 4, 5], domain="one")
    answer(drafter, [1, 2, 6, 7, 0], domain="two")
    for name, tokens in (("one", [3, 4, 5]), ("two", [6, 7, 0])):
        assert propose(drafter, waiting[name], 8)[0] == tokens
        assert propose(drafter, sequence_of([4, 1, 2], request_id="new " + name, domain=name), 8)[0] == tokens
    assert propose(drafter, sequence_of([8, 1, 2], request_id="three", domain="three"), 8)[0] == []


def test_a_request_that_is_its_own_domain_leaves_nothing_behind():
    drafter = make_suffix()
    alone = sequence_of([9, 1, 2, 3, 4], 1, "alone")
    alone.owner = Owner("alone", lasts=False)
    drafter.index_prompt(alone, 4)
    alone.finish_reason = "stop"
    drafter.release(alone)
    assert drafter.nbytes == 0


def test_without_past_answers_only_the_text_and_the_corpus_draft(tmp_path):
    (tmp_path / "corpus.txt").write_text("hello world")
    drafter = make_suffix(encode, suffix_answers=False, suffix_corpus=(str(tmp_path / "corpus.txt"),))
    answer(drafter, [1, 2, 3, 4, 5])
    assert not kept(drafter)
    assert propose(drafter, sequence_of(encode("hello wo"), domain="any"), 3)[0] == encode("rld")


# -- memory ------------------------------------------------------------------------------------------------------


def test_memory_stays_within_its_bound_and_the_oldest_answers_go_first():
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        limit = 2 << 20
        drafter = make_suffix(vocab_size=49152, suffix_bytes=limit)
        noise = random.Random(0)
        first = [noise.randrange(49152) for _ in range(200)]
        answer(drafter, first)
        assert propose(drafter, sequence_of(first[:20], request_id="b"), 4)[0] == first[20:24]
        drafter.release(sequence_of([], request_id="b"))
        for number in range(400):
            last = [noise.randrange(49152) for _ in range(200)]
            answer(drafter, last, str(number))
            assert drafter.nbytes <= limit
        live = [sequence_of([*last * 10, *last[:50]], request_id=f"live {number}") for number in range(20)]
        for sequence in live:  # 720 kB if all of it were kept; a quarter of the bound is theirs
            drafter.index_prompt(sequence, len(sequence.tokens))
        assert drafter.nbytes <= limit
        used = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert 0.5 * limit < used < 1.1 * limit, "the arrays are all there is, but for a few objects per sequence"
    assert propose(drafter, sequence_of(last[:20], request_id="c"), 4)[0] == last[20:24]
    assert propose(drafter, sequence_of(first[:20], request_id="d"), 4)[0][:2] != first[20:22]
    for sequence in live:
        assert len(propose(drafter, sequence, 4)[0]) == 4, "a sequence without room of its own still has the store"
        drafter.release(sequence)


def test_the_domain_used_least_recently_goes_first():
    noise = random.Random(1)
    drafter = make_suffix(vocab_size=49152, suffix_bytes=614_400)
    texts = {name: [noise.randrange(49152) for _ in range(3_000)] for name in "abcdef"}
    for name in "abcd":
        answer(drafter, texts[name], domain=name)
    assert propose(drafter, sequence_of(texts["a"][:9], request_id="x", domain="a"), 2)[0] == texts["a"][9:11]
    for name in "ef":
        answer(drafter, texts[name], domain=name)
        assert drafter.nbytes <= 614_400
    left = [name for name in "abcdef" if kept(drafter, name)]
    assert {"a", "e", "f"} <= {*left}
    assert "b" not in left


@pytest.mark.parametrize("suffix_bytes", [0, 100, 9_300])
def test_a_bound_too_small_for_anything_drafts_nothing(suffix_bytes):
    drafter = make_suffix(suffix_bytes=suffix_bytes)
    answer(drafter, [1, 2, 3, 4])
    assert drafter.nbytes <= suffix_bytes
    propose(drafter, sequence_of([1, 2, 3, 1, 2]), 4)
    assert drafter.nbytes <= suffix_bytes


# -- in the engine -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_blocks", [128, 14])
def test_answers_come_in_fewer_passes_and_are_learned_once_whatever_was_preempted(num_blocks):
    """At 14 blocks of 4 the four sequences preempt one another. That answers stay the same is the contract's."""
    requests, passes = [(0, str(i), prompt_of(i, 8), params(max_tokens=24)) for i in range(4)], []
    drafter = make_suffix()
    for drafters in ([], [drafter], [drafter]):
        engine = make_engine(drafters, num_blocks=num_blocks)
        sequences, _ = run(engine, requests)
        assert sum(one.num_preemptions for one in sequences.values()) > 0 or num_blocks == 128
        passes.append(engine.stats.num_steps)
        if drafters and len(passes) == 2:
            assert len(kept(drafter)) == 4 * 25, "every answer once"
            assert drafter.nbytes == drafter.store.nbytes
    plain, cold, warm = passes
    assert cold < plain
    assert warm < cold or num_blocks != 128


# -- costs -------------------------------------------------------------------------------------------------------


def test_costs_do_not_grow_with_the_context():
    """A context of 8,000 words beside one of 400, on this machine and by turns; others' time does not count."""
    noise = random.Random(0)
    words = [[noise.randrange(49152) for _ in range(noise.randint(1, 4))] for _ in range(300)]
    tokens = [token for _ in range(8000) for token in words[int(noise.paretovariate(0.7)) % 300]]
    drafter, read_s, times = make_suffix(vocab_size=49152), {}, {len(tokens) // 20: [], len(tokens): []}
    short, long = times
    for number in range(20):
        answer(drafter, tokens[500 * number :][:800], str(number))
    sequences = {length: sequence_of(tokens[:length], None, f"of {length}") for length in times}
    for length, sequence in sequences.items():
        read_s[length] = thread_seconds(lambda sequence=sequence: drafter.index_prompt(sequence, len(sequence.tokens)))
    assert read_s[long] / long < 4 * read_s[short] / short
    for token in tokens[:200]:
        for length, sequence in sequences.items():
            sequence.tokens.append(token)
            drafter.index_prompt(sequence, len(sequence.tokens) - 2 + 1)
            times[length].append(thread_seconds(lambda sequence=sequence: drafter.propose([DraftRequest(sequence, 8)])))
    assert sorted(times[long])[100] < 3 * sorted(times[short])[100]
