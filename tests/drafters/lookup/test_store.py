"""The store of past answers: its file, its seed, its memory."""

from __future__ import annotations

import logging
import random

import pytest

from paceline.drafters.lookup.index import END
from paceline.drafters.lookup.store import MAX_CORPUS, SuffixStore
from paceline.errors import InvalidParameter
from tests.drafters.lookup.test_suffix import answer, encode, kept, make_suffix
from tests.helpers.toys import propose, sequence_of


def test_what_was_learned_is_kept_between_runs(tmp_path):
    path = tmp_path / "deep" / "store"
    drafter = make_suffix(encode, suffix_store=str(path))
    answer(drafter, [1, 2, 3, 4, 5])
    drafter.close()
    again = make_suffix(encode, suffix_store=str(path))
    assert propose(again, sequence_of([2, 3]), 4)[0] == [4, 5]
    answer(again, [6, 7, 8])
    again.save()
    again.save()
    third = make_suffix(encode, suffix_store=str(path))
    assert kept(third) == [1, 2, 3, 4, 5, END, 6, 7, 8, END]
    assert [file.name for file in path.parent.iterdir()] == ["store"]


def test_answers_are_kept_by_domain(tmp_path):
    path = str(tmp_path / "store")
    drafter = make_suffix(encode, suffix_store=path)
    answer(drafter, [1, 2, 3], domain="one")
    answer(drafter, [4, 5], domain="two")
    drafter.close()
    again = make_suffix(encode, suffix_store=path)
    assert [kept(again, name) for name in ("one", "two", "")] == [[1, 2, 3, END], [4, 5, END], []]


def test_a_store_without_news_is_not_written(tmp_path):
    drafter = make_suffix(encode, suffix_store=str(tmp_path / "store"))
    drafter.close()
    assert list(tmp_path.iterdir()) == []
    make_suffix(encode).close()


def broken_files(good):
    header, _, payload = good.partition(b"\n")
    yield "damaged", good[:-3]
    yield "damaged", header + b"\n"
    yield "damaged", header + b"\n" + payload[:-4] + b"\xff\xff\xff\x7f"
    yield "damaged", header.replace(b'["", 6]', b'["", "x"]') + b"\n" + payload
    yield "left as it is", header.replace(b'"format": 2', b'"format": 1') + b"\n" + payload
    yield "left as it is", header.replace(b'"vocab_size": 11', b'"vocab_size": 12') + b"\n" + payload
    yield "left as it is", b"dear diary\n" + payload
    yield "left as it is", b"[1, 2]\n"
    yield "left as it is", b"\xff\xfe\x00" * 4000


def test_a_broken_or_foreign_file_is_no_obstacle(tmp_path, caplog):
    path = tmp_path / "store"
    drafter = make_suffix(encode, suffix_store=str(path))
    answer(drafter, [1, 2, 3, 4, 5])
    drafter.save()
    good = path.read_bytes()
    for problem, content in broken_files(good):
        path.write_bytes(content)
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="paceline"):
            started = make_suffix(encode, suffix_store=str(path))
        assert problem in caplog.text, content[:100]
        assert not kept(started)
        answer(started, [1, 2, 3])
        started.close()
        assert (path.read_bytes() == content) == (problem != "damaged"), "only our own broken file is replaced"
    path.write_bytes(good)
    caplog.clear()
    other = make_suffix(lambda text: encode(text)[::-1], suffix_store=str(path))
    assert "another tokenizer" in caplog.text
    assert not kept(other)


def test_a_store_that_cannot_be_written_warns(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    drafter = make_suffix(encode, suffix_store=str(tmp_path / "file" / "store"))
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
    few, all_of_them = small.answers(""), large.answers("")
    assert few.tokens().tolist() == all_of_them.tokens().tolist()[-few.rows :]


def test_a_corpus_seeds_the_store_but_is_not_saved_with_it(tmp_path):
    (tmp_path / "one.txt").write_text("hello world\n" * 3)
    (tmp_path / "two.txt").write_text("other words", encoding="utf-8")
    corpus = (str(tmp_path / "one.txt"), str(tmp_path / "two.txt"))
    drafter = make_suffix(encode, suffix_corpus=corpus, suffix_store=str(tmp_path / "store"))
    text = [*encode("hello world\n" * 3), END, *encode("other words"), END]
    assert drafter.store.corpus.tokens().tolist() == text
    assert propose(drafter, sequence_of(encode("hello wo")), 3)[0] == encode("rld")
    answer(drafter, [1, 2, 3])
    drafter.close()
    again = make_suffix(encode, suffix_corpus=corpus, suffix_store=str(tmp_path / "store"))
    assert again.store.corpus.tokens().tolist() == text
    assert kept(again) == [1, 2, 3, END]


def test_a_corpus_that_cannot_be_read_is_refused_by_name(tmp_path):
    missing = str(tmp_path / "missing.txt")
    with pytest.raises(InvalidParameter, match=r"suffix_corpus.*missing\.txt"):
        make_suffix(encode, suffix_corpus=(missing,))
    with pytest.raises(InvalidParameter, match="suffix_corpus"):
        make_suffix(encode, suffix_corpus=(str(tmp_path),))
    with pytest.raises(InvalidParameter, match="not a regular file"):
        make_suffix(encode, suffix_corpus=("/dev/zero",))
    large = tmp_path / "large.txt"
    with large.open("wb") as file:
        file.truncate(MAX_CORPUS + 1)  # a hole: it takes no space
    with pytest.raises(InvalidParameter, match=r"large\.txt has 256 MiB; give at most 256 MiB"):
        make_suffix(encode, suffix_corpus=(str(large),))
    with pytest.raises(InvalidParameter, match="tokenizer"):
        make_suffix(None, suffix_corpus=(missing,))
