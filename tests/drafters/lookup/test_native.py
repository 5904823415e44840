"""Lookup in native code against lookup in Python: places, levels, trees and drafts, bit for bit."""

from __future__ import annotations

import random
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.config import SpeculationConfig
from paceline.core.sequence import Sequence
from paceline.drafters import METHODS, DrafterContext, DraftRequest
from paceline.drafters.lookup import index as suffix_index
from paceline.drafters.lookup import suffix
from paceline.drafters.lookup.index import DEPTH, END, SuffixIndex
from paceline.drafters.lookup.native import NativeIndex, NativeLookup
from paceline.engine.policy.adaptive import AdaptivePolicy
from paceline.native.library import load_library, open_library, runnable_variants
from paceline.sampling_params import SamplingParams
from paceline.testing import toy_config
from tests.helpers.contract_toys import make_engine, params, prompt_of, run
from tests.helpers.toys import sequence_of

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the native kernels are not built on Windows")

METHOD_NAMES = ("ngram", "suffix")
SMALL = 4 * SuffixIndex.bytes_for(64) + 100  # a store of 128 tokens, and one sequence with an index of its own


def pair(method, **options):
    context = DrafterContext(toy_config(100_000), torch.device("cpu"), SpeculationConfig(**options))
    return METHODS[method].make(context), METHODS[method].make(context, native=False)


def places_of(drafter, state):
    """(tokens shared, votes, position, whether elsewhere) of all that vote."""
    if isinstance(drafter.backend, NativeLookup):
        places = state.view.places[: state.view.count]
        return [(place.match, place.votes, place.start, bool(place.text)) for place in places]
    return [(match, votes, start, index is not state.index) for match, votes, start, index in state.places]


def same_index(one, other):
    if one is None or other is None:
        return one is other
    arrays = [(index._text, *index._heads, *index._links) for index in (one, other)]
    return one.end == other.end and all(map(np.array_equal, *arrays))


def check_same(both, sequences, node_limits):
    native, plain = both
    asked = [DraftRequest(sequence, max_nodes) for sequence, max_nodes in zip(sequences, node_limits, strict=True)]
    for drafter in both:
        drafter.levels(sequences)  # in the order of these they share the memory there is
    assert [native.level(one) for one in sequences] == [plain.level(one) for one in sequences]
    for sequence in sequences:
        states = [drafter.states[sequence.key] for drafter in both]
        assert places_of(native, states[0]) == places_of(plain, states[1])
        assert same_index(*(state.index for state in states))
        assert same_index(*(state.past for state in states))
    drafts = native.propose(asked), plain.propose(asked)
    drafts[0].validate(100_000)
    for name in ("tokens", "parents", "depth", "num_nodes"):
        assert torch.equal(getattr(drafts[0], name), getattr(drafts[1], name)), name
        assert getattr(drafts[0], name).is_contiguous()


def new_sequence(data, name, alphabet):
    prompt = data.draw(st.lists(st.sampled_from(alphabet), min_size=1, max_size=90))
    return sequence_of(prompt, request_id=name, domain=data.draw(st.sampled_from(["", "", "one", "two"])))


@st.composite
def alphabets(draw):
    return draw(st.sampled_from([[5], [0, 1], [3, 0, 7], [*range(6)], [99_999, 65_536, 1, 0], [*range(40)]]))


def live(data, both, alphabet):
    """Sequences come, say more, are preempted, end; now and then all are asked."""
    sequences, made = [], 0
    for _ in range(data.draw(st.integers(1, 25))):
        what = data.draw(st.sampled_from(["come", "more", "more", "ask", "ask", "repeat", "preempt", "end", "commit"]))
        if (what == "come" and len(sequences) < 5) or not sequences:
            made += 1
            sequences.append(new_sequence(data, data.draw(st.sampled_from([str(made), "again"])), alphabet))
            if [one.key for one in sequences].count(sequences[-1].key) > 1:
                sequences.pop()  # a name is used again only once it is free
            continue
        sequence = data.draw(st.sampled_from(sequences))
        if what == "more":
            sequence.tokens += data.draw(st.lists(st.sampled_from(alphabet), max_size=70))
        elif what == "repeat":
            start = data.draw(st.integers(0, len(sequence.tokens)))
            sequence.tokens += sequence.tokens[start : start + data.draw(st.integers(0, 40))]
        elif what == "ask":
            some = data.draw(st.permutations(sequences))[: data.draw(st.integers(1, len(sequences)))]
            check_same(both, some, [data.draw(st.sampled_from([0, 1, 2, 5, 8, 64])) for _ in some])
        elif what == "commit":
            count = data.draw(st.integers(1, len(sequence.tokens)))
            for drafter in both:
                drafter.index_prompt(sequence, count)
        else:
            sequences.remove(sequence)
            sequence.finish_reason = data.draw(st.sampled_from(["stop", "abort"])) if what == "end" else None
            for drafter in both:
                drafter.release(sequence)
            if what == "preempt":
                sequences.append(sequence)
                for drafter in both:
                    drafter.admit(sequence, 0, 0)
    check_same(both, sequences, [7] * len(sequences))


@settings(max_examples=80, deadline=None)
@given(st.data(), alphabets(), st.integers(1, 3), st.integers(0, 20))
def test_ngram_finds_and_drafts_the_same(data, alphabet, ngram_min, more):
    live(data, pair("ngram", ngram_min=ngram_min, ngram_max=ngram_min + more), alphabet)


@settings(max_examples=150, deadline=None)
@given(st.data(), alphabets(), st.sampled_from([200_000, 20_000, SMALL, 9_300, 0]))
def test_suffix_finds_and_drafts_the_same(data, alphabet, suffix_bytes):
    """From plenty of memory to none: rings that are full, sequences without an index, no store."""
    live(data, pair("suffix", suffix_bytes=suffix_bytes), alphabet)


@settings(max_examples=12, deadline=None)
@given(st.data(), st.integers(0, 3))
def test_copies_that_stray_and_branch_are_followed_alike(data, changes):
    """A long text with copies of its own and of past answers, a few tokens changed: trees of all shapes."""
    both = pair("suffix")
    noise = data.draw(st.randoms(use_true_random=False))
    words = [[noise.randrange(50) for _ in range(noise.randint(1, 9))] for _ in range(12)]
    for number in range(6):
        sequence = sequence_of([1], request_id=str(number))
        for _ in range(25):
            word = list(noise.choice(words))
            for _ in range(changes):
                if noise.random() < 0.3:
                    word[noise.randrange(len(word))] = noise.randrange(50)
            sequence.tokens += word
            check_same(both, [sequence], [noise.choice([1, 4, 8, 30])])
        sequence.finish_reason = "stop"
        for drafter in both:
            drafter.release(sequence)


@pytest.mark.parametrize(
    ("method", "options"), [("ngram", {"ngram_max": 7}), ("suffix", {"suffix_bytes": SMALL}), ("suffix", {})]
)
@pytest.mark.parametrize("size", [2, 30])
def test_a_long_text_is_followed_step_by_step(method, options, size):
    """So that tables fill, buckets collide and small rings go round, and drafts come to where they begin again."""
    both, noise = pair(method, **options), random.Random(size)
    sequence = sequence_of([0, 1], request_id="0")
    while len(sequence.tokens) < 900:
        start = noise.randrange(max(len(sequence.tokens) - 60, 0), len(sequence.tokens))
        copied = sequence.tokens[start : start + noise.choice([0, 0, 3, 40])]
        for token in [*copied, noise.randrange(size)]:
            sequence.tokens.append(token)
            check_same(both, [sequence], [noise.choice([3, 64])])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(END, 3), max_size=90), max_size=8), st.booleans(), st.sampled_from([300, 1 << 30]))
def test_an_index_is_the_same_arrays(pieces, grows, last_position):
    library = load_library()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(suffix_index, "_LAST_POSITION", last_position)
        native, plain = NativeIndex(library.function("index_extend")), SuffixIndex()
        for piece in pieces:
            for index in (native, plain):
                if grows:
                    index.make_room(len(piece), 1 << 20)
                index.extend(piece)
            assert same_index(native, plain)
            assert native.tokens().tolist() == plain.tokens().tolist()


def test_a_text_longer_than_its_positions_is_numbered_afresh(monkeypatch):
    monkeypatch.setattr(suffix_index, "_LAST_POSITION", 300)
    native, plain = pair("suffix", suffix_bytes=SMALL)
    sequence = sequence_of([1, 2, 3], request_id="0")
    for step in range(600):
        sequence.tokens.append(1 + step * step % 7)
        native.level(sequence)
        assert native.states["0/0"].index.end <= 301
    rows = [DraftRequest(sequence, 4)]
    assert torch.equal(native.propose(rows).tokens, plain.propose(rows).tokens)


@pytest.mark.parametrize("native", [True, False])
def test_positions_stay_where_nothing_is_new(native, monkeypatch):
    monkeypatch.setattr(suffix_index, "_LAST_POSITION", 130)
    drafter = pair("suffix", suffix_bytes=SMALL)[0 if native else 1]
    sequence = sequence_of([1] * 300, request_id="0")
    drafter.level(sequence)
    end = drafter.states["0/0"].index.end
    drafter.index_prompt(sequence, 7)  # read again, perhaps
    assert drafter.states["0/0"].index.end == end, "what was found is of these positions"


@pytest.mark.parametrize("native", [True, False])
def test_nothing_before_a_full_ring_is_read(native):
    """The longest match that ends where the ring begins again: what lies before the text is not its own."""
    drafter = pair("suffix", suffix_bytes=SMALL)[0 if native else 1]
    repeated = [*range(100, 100 + DEPTH)]
    sequence = sequence_of([7] * 64 + repeated, request_id="0")
    drafter.level(sequence)
    index = drafter.states["0/0"].index
    assert index.rows == 64, "no memory to grow"
    sequence.tokens += [5] * (-index.end % 64) + repeated + [6, 8]  # the 6 comes to lie at DEPTH
    drafter.level(sequence)
    assert index.text[DEPTH] == 6
    around = np.full(index.rows + 2 * DEPTH, -2, np.int32)  # equal to what stands behind a context
    around[DEPTH:] = index._text
    index._use(index.rows, around[DEPTH:], index._heads, index._links)
    sequence.tokens += repeated
    drafter.level(sequence)
    ((match, _, start, _),) = places_of(drafter, drafter.states["0/0"])
    assert (match, start & 63) == (DEPTH, DEPTH)


def failing(monkeypatch, name, after):
    """numpy's `name` has no memory once it was called so often."""
    real, left = getattr(np, name), [after]

    def call(*args, **options):
        left[0] -= 1
        if left[0] == -1:
            raise MemoryError
        return real(*args, **options)

    monkeypatch.setattr(np, name, call)


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize(
    ("method", "name", "after"),
    [
        (method, name, after)
        for method in METHOD_NAMES
        for name, most in (("full", 4), ("tile", 3))
        for after in range(most)
    ],
)
def test_where_memory_is_missing_nothing_has_changed(method, name, after, native, monkeypatch):
    """Memory is missing for one of two texts: its stored part still serves, and the other one misses nothing."""
    drafter, fresh = pair(method)[0 if native else 1], pair(method)[1]
    texts = [[1, 2, 3, 4, 5], [*range(30)] * 2]
    sequences = [Sequence(str(i), text, SamplingParams().resolve({}), max_len=9_999) for i, text in enumerate(texts)]
    drafter.levels(sequences)
    sequences[0].tokens += [1, 2, 3, 4]
    sequences[1].tokens += [*range(30)] * 9
    held = drafter.nbytes if method == "suffix" else 0
    with monkeypatch.context() as patched:
        failing(patched, name, after)
        with pytest.raises(MemoryError):
            drafter.levels(sequences)
    assert method == "ngram" or drafter.nbytes == held
    for _ in range(2):
        assert drafter.levels(sequences) == fresh.levels(sequences)
        rows = [DraftRequest(sequence, 5) for sequence in sequences]
        assert torch.equal(drafter.propose(rows).tokens, fresh.propose(rows).tokens)
        for sequence in sequences:
            sequence.tokens += [5, 1, 2]


def test_an_index_that_could_not_be_made_takes_no_memory(monkeypatch):
    drafter = pair("suffix")[0]
    held = drafter.nbytes
    with monkeypatch.context() as patched:
        failing(patched, "full", 2)
        with pytest.raises(MemoryError):
            drafter.levels([sequence_of([1, 2], request_id="0")])
    assert drafter.nbytes == held


@pytest.mark.parametrize("method", METHOD_NAMES)
def test_every_variant_proposes_the_same(method, monkeypatch):
    found_by_variant = []
    for variant in runnable_variants():
        library = open_library(variant)
        monkeypatch.setattr(suffix, "load_library", lambda library=library: library)
        drafter, _ = pair(method)
        sequence = sequence_of([1, 2, 3, 4, 1, 2, 5, 1, 2, 3], request_id="0")
        found_by_variant.append((drafter.level(sequence), drafter.propose([DraftRequest(sequence, 8)]).tokens.tolist()))
    assert found_by_variant == found_by_variant[:1] * len(found_by_variant)


@pytest.mark.parametrize("method", METHOD_NAMES)
def test_native_code_serves_where_there_is_a_library_and_python_elsewhere(method, monkeypatch):
    assert isinstance(pair(method)[0].backend, NativeLookup)
    monkeypatch.setattr(suffix, "load_library", lambda: None)
    assert isinstance(pair(method)[0].backend, suffix.PythonLookup)


@pytest.mark.parametrize("method", METHOD_NAMES)
@pytest.mark.parametrize("native", [True, False])
def test_all_are_looked_up_at_once_and_once(method, native, monkeypatch):
    drafter = pair(method)[0 if native else 1]
    sequences = [Sequence(str(i), [1, 2, i, 1, 2], SamplingParams().resolve({}), max_len=100) for i in range(5)]
    asked = []
    find = drafter.backend.find
    monkeypatch.setattr(drafter.backend, "find", lambda states: (asked.append(len(states)), find(states)))
    drafter.levels([*sequences, sequences[0]])
    assert all(drafter.level(sequence) for sequence in sequences)
    drafter.propose([DraftRequest(sequence, 3) for sequence in sequences])
    assert asked in ([5], [6])
    sequences[1].tokens += [1]
    drafter.levels(sequences)
    assert asked[1:] == [1], "only where the text has grown"
    if method == "suffix":
        sequences[2].finish_reason = "stop"
        sequences[2].tokens += [7, 8, 9]
        drafter.release(sequences[2])
        drafter.levels([sequences[3]])
        assert asked[2:] == [1], "or the store has learned"


@pytest.mark.parametrize(("method", "k"), [("suffix", 3), ("auto", 3), ("suffix", None), ("auto", None)])
def test_the_policy_has_all_looked_up_at_once(method, k, monkeypatch):
    drafters = [pair(name)[0] for name in ("ngram", "suffix")]
    engine = make_engine(drafters, policy=AdaptivePolicy(method, k))
    asked = []
    find = drafters[1].backend.find
    monkeypatch.setattr(drafters[1].backend, "find", lambda states: (asked.append(len(states)), find(states)))
    run(engine, [(0, str(i), prompt_of(i, 9), params(max_tokens=12, ignore_eos=True)) for i in range(6)])
    assert max(asked) == 6
    assert engine.drafters.failures == 0
