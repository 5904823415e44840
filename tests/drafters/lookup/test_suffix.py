"""Suffix decoding against a naive count over all occurrences, its memory, its file, and through the engine."""

from __future__ import annotations

import logging
import random
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from paceline.config import SpeculationConfig
from paceline.drafters import DrafterContext, DraftRequest
from paceline.drafters.lookup import index as suffix_index
from paceline.drafters.lookup.index import DEPTH, END, LEVELS, LIMIT, Context, SuffixIndex
from paceline.drafters.lookup.store import MAX_CORPUS, SuffixStore
from paceline.drafters.lookup.suffix import SuffixDrafter
from paceline.drafters.lookup.tree import (
    EVIDENCE_STEPS,
    HIT_RATE,
    INSERTED,
    STORE_WEIGHT,
    SUBSTITUTED,
    THRESHOLD,
    Lookup,
    evidence_of,
    grow,
    places_of,
)
from paceline.engine.policy.interface import DraftPlan
from paceline.errors import InvalidParameter
from paceline.testing import toy_config
from tests.helpers.toys import greedy_periodic, propose, run_engine, sequence_of, thread_seconds

CLOSE = 1e-9
texts = st.integers(0, 4).flatmap(lambda size: st.lists(st.integers(0, size), min_size=1, max_size=44))


def make(encode=None, vocab_size=11, **speculation):
    context = DrafterContext(
        toy_config(vocab_size), torch.device("cpu"), SpeculationConfig(**speculation), encode=encode
    )
    return SuffixDrafter(context)


def encode(text):
    return [ord(letter) % 11 for letter in text]


def answer(drafter, tokens, request_id="past"):
    """Let the drafter see a finished answer."""
    sequence = sequence_of([9, *tokens], 1, request_id)
    drafter.index_prompt(sequence, len(sequence.tokens) - 1)
    sequence.finish_reason = "stop"
    drafter.release(sequence)


# -- the naive reference -----------------------------------------------------------------------------------------


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


def naive_places(structures, tokens):
    """(tokens shared, votes, text, position) of all that may vote: the own text's first, a past one's for less."""
    known = [
        (match, weight * 2**match, text, position)
        for text, weight in zip(structures, (1, STORE_WEIGHT), strict=True)
        for position, match in naive_occurrences(text, tokens).items()
    ]
    long = [
        (match, weight * 2**match, text, position)
        for text, weight in zip(structures, (1, STORE_WEIGHT), strict=True)
        for position, match in naive_occurrences(text, tokens, LEVELS[:1]).items()
    ]
    known = long or known
    longest, total = max((place[0] for place in known), default=0), sum(place[1] for place in known)
    places = [(match, HIT_RATE[longest] * votes / total, text, position) for match, votes, text, position in known]
    if longest <= 1:
        own, last = structures[0], len(tokens) - 1
        copied = naive_occurrences(own, tokens[:-1], (2,), 1 + LIMIT)
        recent = sorted((p for p in copied if p != last), reverse=True)
        if recent := recent[: LIMIT - (last in copied)]:
            left_out = max(recent, key=copied.get)
            for start, often in ((left_out + 1, SUBSTITUTED), (left_out, INSERTED)):
                if start < last:
                    places.append((1, often * (1 - HIT_RATE[longest]), own, start))
    return places


def naive_paths(places, own):
    """path -> probability of all that are likely enough, or as good as."""
    likely, frontier = {}, [((), 1.0, places)]
    while frontier:
        path, probability, voters = frontier.pop()
        worth = 1.0
        if path:
            sure = HIT_RATE[min(max(place[0] for place in voters) + len(path), DEPTH)]
            worth = probability * sure / sum(place[1] for place in voters)
        children = {}
        for match, votes, text, start in voters:
            longer = [*text, *path] if text is own else text
            children.setdefault(longer[start + len(path)], []).append((match, votes, text, start))
        for token, those in children.items():
            chance = worth * sum(place[1] for place in those)
            if token != END and chance >= THRESHOLD - CLOSE and len(path) < 9:
                likely[(*path, token)] = chance
                frontier.append(((*path, token), chance, those))
    return likely


def tree_of(tokens, max_nodes, *indexes):
    context = Context(tokens)
    lookups = [Lookup(index, context, STORE_WEIGHT if at else 1.0) for at, index in enumerate(indexes)]
    places = places_of(lookups, indexes[0], context)
    return grow(places, max_nodes), evidence_of(places)


def paths_of(tree):
    paths = []
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return paths


@settings(max_examples=300, deadline=None)
@given(texts, st.lists(texts, max_size=3), st.integers(0, 6))
def test_the_tree_is_the_one_a_naive_count_finds(tokens, past, max_nodes):
    local, store = SuffixIndex(), SuffixIndex(256)
    local.extend(tokens)
    for text in past:
        store.extend([*text, END])
    tree, level = tree_of(tokens, max_nodes, local, store)
    structures = [tokens, [token for text in past for token in [*text, END]]]
    places = naive_places(structures, tokens)
    likely = naive_paths(places, tokens)
    assume(all(abs(chance - THRESHOLD) > CLOSE for chance in likely.values()))
    highest = sum(sorted(likely.values(), reverse=True)[:max_nodes])
    assert sum(likely[path] for path in paths_of(tree)) == pytest.approx(highest)
    assert tree.depths == [len(path) for path in paths_of(tree)]
    assert len(set(paths_of(tree))) == len(tree.tokens) <= max_nodes, "siblings differ"
    assert tree.tokens == tree_of(tokens, max_nodes + 3, local, store)[0].tokens[: len(tree.tokens)]
    longest = max((place[0] for place in places), default=0)
    if longest >= LEVELS[0]:
        assert level == longest
    else:
        sure = sum(chance for path, chance in likely.items() if len(path) == 1)
        assert level in {sum(sure >= step + close for step in EVIDENCE_STEPS) for close in (-CLOSE, CLOSE)}
        assert (level == 0) == (not likely), "an empty draft has no evidence"


def test_it_branches_where_the_evidence_does():
    index = SuffixIndex()
    tokens = [1, 2, 3, 5, 6, 1, 2, 3, 5, 7, 1, 2, 3, 8, 9, 1, 2, 3]
    index.extend(tokens)
    tree, level = tree_of(tokens, 4, index)
    assert level == 4
    assert paths_of(tree)[:2] == [(5,), (8,)], "two of three say 5"
    assert set(paths_of(tree)[2:]) < {(5, 6), (5, 7), (8, 9)}, "which are as likely as one another"
    whole = paths_of(tree_of(tokens, 6, index)[0])
    assert whole.index((5, 7)) < whole.index((5, 6)), "of equals the newest"


def test_the_longer_context_and_the_own_text_count_more():
    local, store = SuffixIndex(), SuffixIndex(256)
    tokens = [1, 2, 4, 5, 3, 2, 6, 5, 1, 2]
    local.extend(tokens)
    store.extend([1, 2, 7, END])
    for indexes in ([local], [local, store]):
        tree, _ = tree_of(tokens, 1, *indexes)
        assert tree.tokens == [4]


def test_a_copy_that_strayed_goes_on_behind_the_token_left_out_or_with_it():
    sequence = sequence_of([1, 2, 3, 4, 5, 6, 9, 1, 2, 3, 8])
    drafter = make()
    tokens, parents = propose(drafter, sequence, 8)
    assert [token for token, parent in zip(tokens, parents, strict=True) if parent < 0] == [5, 4]
    assert propose(drafter, sequence, 2) == ([5, 4], [-1, -1])
    assert drafter.level(sequence) == sum(step <= SUBSTITUTED + INSERTED for step in EVIDENCE_STEPS) > 0
    sequence.tokens += [5]
    assert propose(drafter, sequence, 1)[0] == [6], "and then follows it again"
    assert propose(make(), sequence_of([1, 2, 3, 4, 9, 3, 8]), 8) == ([], []), "one token shared is no copy"


# -- the index ---------------------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(st.lists(st.lists(st.integers(0, 3), max_size=70), max_size=8), st.booleans())
def test_one_by_one_in_bulk_and_grown_are_the_same(pieces, grow):
    single, bulk = SuffixIndex(64 if grow else 1024), SuffixIndex(64 if grow else 1024)
    whole = []
    for piece in pieces:
        whole += piece
        for index in (single, bulk):
            if grow:
                index.make_room(len(piece), 1 << 20)
        for token in piece:
            single.extend([token])
        bulk.extend(np.array(piece, np.int32))
    assert single.tokens().tolist() == bulk.tokens().tolist() == whole
    assert single._recent == bulk._recent
    for one, other in zip(single._chains, bulk._chains, strict=True):
        assert one[0].tolist() == other[0].tolist()
        assert one[1].tolist() == other[1].tolist()


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 2), min_size=100, max_size=250), st.lists(st.integers(9, 90), min_size=1))
def test_a_full_ring_forgets_the_oldest_and_finds_the_rest(tokens, sizes):
    index, at = SuffixIndex(64), 0
    while at < len(tokens):
        size = sizes[at % len(sizes)]
        index.extend(tokens[at : at + size])
        at += size
        seen = tokens[:at]
        assert index.tokens().tolist() == seen[-64:]
        assert index.tokens(5).tolist() == seen[-5:]
        for level, n in enumerate(LEVELS):
            matches = {}
            for position in index.occurrences(level, Context(seen), matches):
                match = matches[position]
                start = position - DEPTH  # the text begins at position DEPTH
                assert match >= n
                assert match == common_suffix(seen, start, seen)
                assert start > len(seen) - 64
    assert index.nbytes == SuffixIndex.bytes_for(64)


def test_positions_start_again_before_they_overflow(monkeypatch):
    monkeypatch.setattr(suffix_index, "_LAST_POSITION", 300)
    index = SuffixIndex()
    noise = random.Random(0)
    tokens = [noise.randrange(3) for _ in range(1000)]
    for first in range(0, 1000, 7):
        index.extend(tokens[first : first + 7])
        assert index.tokens(40).tolist() == tokens[: first + 7][-40:]
        assert index.end < 400
    assert index.occurrences(LEVELS.index(1), Context(tokens), {})


# -- the drafter -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [[3], [1, 2, 3, 4, 5]])
@pytest.mark.parametrize("max_nodes", [0, 1, 64])
def test_little_or_no_history_gives_an_empty_draft(tokens, max_nodes):
    drafter, sequence = make(), sequence_of(tokens)
    assert propose(drafter, sequence, max_nodes) == ([], [])
    assert drafter.level(sequence) == 0
    assert drafter.propose([]).batch == 0


def test_a_budget_of_nothing_or_more_than_there_is():
    sequence = sequence_of([1, 2, 3, 1, 2])
    assert propose(make(), sequence, 0) == ([], [])
    assert propose(make(), sequence, 1) == ([3], [-1])
    assert propose(make(), sequence, 64) == ([3, 1, 2] * 4 + [3], [*range(-1, 12)]), "as far as it is likely"


def test_a_loop_is_continued_past_the_end_of_the_text():
    drafter, sequence = make(), sequence_of([1, 2, 3] * 6)
    assert propose(drafter, sequence, 9) == ([1, 2, 3] * 3, [*range(-1, 8)])
    assert drafter.level(sequence) == 15


def test_unknown_sequences_can_be_released_and_teach_nothing():
    drafter, sequence = make(), sequence_of([1, 2, 3, 4, 5], 1)
    sequence.finish_reason = "stop"
    drafter.release(sequence)
    assert drafter.store.index.end == DEPTH
    assert drafter.nbytes == drafter.store.nbytes


def test_finished_answers_serve_later_requests_and_are_learned_once():
    drafter = make()
    past = sequence_of([9, 9, 1, 2, 3, 4, 5, 6], 2, "past")
    drafter.admit(past, 0, 0)
    drafter.index_prompt(past, 5)
    drafter.release(past)  # preempted
    assert drafter.store.index.end == DEPTH
    drafter.admit(past, 0, 0)
    drafter.index_prompt(past, 7)
    past.finish_reason = "length"
    drafter.release(past)
    drafter.release(past)
    assert drafter.store.index.tokens().tolist() == [1, 2, 3, 4, 5, 6, END], "the output alone, once"
    assert propose(drafter, sequence_of([8, 1, 2, 3]), 8) == ([4, 5, 6], [-1, 0, 1])
    assert propose(drafter, sequence_of([7, 2, 3]), 1) == ([4], [-1])


def test_aborted_answers_are_not_learned():
    drafter = make()
    past = sequence_of([9, 1, 2, 3, 4], 1)
    drafter.index_prompt(past, 4)
    drafter.release(past)
    past.finish_reason = "abort"
    drafter.release(past)
    assert drafter.store.index.end == DEPTH


# -- memory ------------------------------------------------------------------------------------------------------


def test_memory_stays_within_its_bound_and_the_oldest_answers_go_first():
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        limit = 2 << 20
        drafter = make(vocab_size=49152, suffix_bytes=limit)
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


@pytest.mark.parametrize("suffix_bytes", [0, 100, 9_300])
def test_a_bound_too_small_for_anything_drafts_nothing(suffix_bytes):
    drafter = make(suffix_bytes=suffix_bytes)
    answer(drafter, [1, 2, 3, 4])
    assert drafter.nbytes <= suffix_bytes
    propose(drafter, sequence_of([1, 2, 3, 1, 2]), 4)
    assert drafter.nbytes <= suffix_bytes


# -- kept between runs -------------------------------------------------------------------------------------------


def test_what_was_learned_is_kept_between_runs(tmp_path):
    path = tmp_path / "deep" / "store"
    drafter = make(encode, suffix_store=str(path))
    answer(drafter, [1, 2, 3, 4, 5])
    drafter.close()
    again = make(encode, suffix_store=str(path))
    assert propose(again, sequence_of([2, 3]), 4)[0] == [4, 5]
    answer(again, [6, 7, 8])
    again.save()
    again.save()
    third = make(encode, suffix_store=str(path))
    assert third.store.index.tokens().tolist() == [1, 2, 3, 4, 5, END, 6, 7, 8, END]
    assert [file.name for file in path.parent.iterdir()] == ["store"]


def test_a_store_without_news_is_not_written(tmp_path):
    drafter = make(encode, suffix_store=str(tmp_path / "store"))
    drafter.close()
    assert list(tmp_path.iterdir()) == []
    make(encode).close()


def broken_files(good):
    header, _, payload = good.partition(b"\n")
    yield "damaged", good[:-3]
    yield "damaged", header + b"\n"
    yield "damaged", header + b"\n" + payload[:-4] + b"\xff\xff\xff\x7f"
    yield "damaged", header.replace(b'"tokens": 6', b'"tokens": "x"') + b"\n" + payload
    yield "left as it is", header.replace(b'"format": 1', b'"format": 2') + b"\n" + payload
    yield "left as it is", header.replace(b'"vocab_size": 11', b'"vocab_size": 12') + b"\n" + payload
    yield "left as it is", b"dear diary\n" + payload
    yield "left as it is", b"[1, 2]\n"
    yield "left as it is", b"\xff\xfe\x00" * 4000


def test_a_broken_or_foreign_file_is_no_obstacle(tmp_path, caplog):
    path = tmp_path / "store"
    drafter = make(encode, suffix_store=str(path))
    answer(drafter, [1, 2, 3, 4, 5])
    drafter.save()
    good = path.read_bytes()
    for problem, content in broken_files(good):
        path.write_bytes(content)
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="paceline"):
            started = make(encode, suffix_store=str(path))
        assert problem in caplog.text, content[:100]
        assert started.store.index.end == DEPTH
        answer(started, [1, 2, 3])
        started.close()
        assert (path.read_bytes() == content) == (problem != "damaged"), "only our own broken file is replaced"
    path.write_bytes(good)
    caplog.clear()
    other = make(lambda text: encode(text)[::-1], suffix_store=str(path))
    assert "another tokenizer" in caplog.text
    assert other.store.index.end == DEPTH


def test_a_store_that_cannot_be_written_warns(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    drafter = make(encode, suffix_store=str(tmp_path / "file" / "store"))
    answer(drafter, [1, 2, 3])
    with caplog.at_level(logging.WARNING, logger="paceline"):
        drafter.close()
    assert "was not saved" in caplog.text


def test_a_store_larger_than_the_memory_keeps_the_newest(tmp_path):
    path = str(tmp_path / "store")
    large = SuffixStore(1 << 20, 11, encode, path)
    noise = random.Random(0)
    for _ in range(20):
        large.learn([noise.randrange(11) for _ in range(100)])
    large.save()
    small = SuffixStore(10_000, 11, encode, path)
    small.load()
    assert small.nbytes <= 10_000
    assert small.index.tokens().tolist() == large.index.tokens().tolist()[-small.index.rows :]


def test_a_corpus_seeds_the_store_but_is_not_saved_with_it(tmp_path):
    (tmp_path / "one.txt").write_text("hello world\n" * 3)
    (tmp_path / "two.txt").write_text("other words", encoding="utf-8")
    corpus = (str(tmp_path / "one.txt"), str(tmp_path / "two.txt"))
    drafter = make(encode, suffix_corpus=corpus, suffix_store=str(tmp_path / "store"))
    text = [*encode("hello world\n" * 3), END, *encode("other words"), END]
    assert drafter.store.index.tokens().tolist() == text
    assert propose(drafter, sequence_of(encode("hello wo")), 3)[0] == encode("rld")
    answer(drafter, [1, 2, 3])
    drafter.close()
    again = make(encode, suffix_corpus=corpus, suffix_store=str(tmp_path / "store"))
    assert again.store.index.tokens().tolist() == [*text, 1, 2, 3, END]


def test_a_corpus_that_cannot_be_read_is_refused_by_name(tmp_path):
    missing = str(tmp_path / "missing.txt")
    with pytest.raises(InvalidParameter, match=r"suffix_corpus.*missing\.txt"):
        make(encode, suffix_corpus=(missing,))
    with pytest.raises(InvalidParameter, match="suffix_corpus"):
        make(encode, suffix_corpus=(str(tmp_path),))
    with pytest.raises(InvalidParameter, match="not a regular file"):
        make(encode, suffix_corpus=("/dev/zero",))
    large = tmp_path / "large.txt"
    with large.open("wb") as file:
        file.truncate(MAX_CORPUS + 1)  # a hole: it takes no space
    with pytest.raises(InvalidParameter, match=r"large\.txt has 256 MiB; give at most 256 MiB"):
        make(encode, suffix_corpus=(str(large),))
    with pytest.raises(InvalidParameter, match="tokenizer"):
        make(None, suffix_corpus=(missing,))


# -- in the engine -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_blocks", [128, 14])
def test_greedy_output_is_unchanged_and_comes_in_fewer_passes(num_blocks):
    """At 14 blocks of 4 the four sequences preempt one another."""
    prompts = {str(i): [1, 2, 3, 4, 5, 1, 2, 3 + i] for i in range(4)}
    drafter = make()
    choices = {name: DraftPlan("suffix", 4) for name in prompts}
    sequences, passes = run_engine([drafter], choices, prompts, num_blocks)
    for name, prompt in prompts.items():
        assert sequences[name].output_tokens == greedy_periodic(prompt, 24)
    _, plain = run_engine([], {}, prompts, num_blocks)
    assert passes < plain
    assert sum(s.num_preemptions for s in sequences.values()) > 0 or num_blocks == 128
    learned = drafter.store.index.tokens().tolist()
    assert len(learned) == 4 * 25, "every answer once, whatever was preempted"
    assert drafter.nbytes == drafter.store.nbytes
    # Warm: the same questions again.
    again, warm = run_engine([drafter], choices, prompts, num_blocks)
    assert [again[name].output_tokens for name in prompts] == [sequences[name].output_tokens for name in prompts]
    assert warm < passes or num_blocks != 128


def test_sampled_output_with_a_seed_is_unchanged():
    prompts = {str(i): [1, 2, 3, 4, 5, 1, 2, 3 + i] for i in range(4)}
    sampling = {"seed": 5, "temperature": 1.5}
    plain, _ = run_engine([], {}, prompts, **sampling)
    drafted, _ = run_engine([make()], {name: DraftPlan("suffix", 6) for name in prompts}, prompts, **sampling)
    for name in prompts:
        assert drafted[name].output_tokens == plain[name].output_tokens


# -- costs -------------------------------------------------------------------------------------------------------


def test_costs_do_not_grow_with_the_context():
    """A context of 8,000 words beside one of 400, on this machine and by turns; others' time does not count."""
    noise = random.Random(0)
    words = [[noise.randrange(49152) for _ in range(noise.randint(1, 4))] for _ in range(300)]
    tokens = [token for _ in range(8000) for token in words[int(noise.paretovariate(0.7)) % 300]]
    drafter, read_s, times = make(vocab_size=49152), {}, {len(tokens) // 20: [], len(tokens): []}
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
