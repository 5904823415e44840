"""Files, filters, the store and rows."""

from __future__ import annotations

import itertools
import json
from types import SimpleNamespace

import numpy as np
import pytest

from paceline.text.tokenizer import Tokenizer
from paceline.training.data import generate as data
from paceline.training.data.examples import encoded, read_examples
from paceline.training.data.filters import loop_ends, repeats, without_loops
from paceline.training.data.generate import Maker, draft_vocabulary
from paceline.training.data.rows import RowSampler, held_out, packed
from paceline.training.data.store import Sequences, TokenStore
from tests.helpers.errors import refused


def numbers(count, seed=0):
    return np.random.default_rng(seed).integers(1, 90, count).tolist()


def test_a_loop_is_cut_where_its_passage_comes_for_the_third_time():
    passage, other = numbers(20), numbers(64, seed=1)
    looping = [*other[:5], *passage * 5]
    sequences = Sequences.of([(other[:8], looping), (other[:8], other), (passage * 4, other)], 97)
    assert loop_ends(sequences).tolist() == [8 + 5 + 40 + 16, 72, 80 + 64]
    cut = without_loops(sequences)
    assert [len(tokens) for tokens, _ in cut] == [69, 72, 144]
    assert [tokens.tolist() for tokens, _ in cut][1] == other[:8] + other
    assert repeats(np.array(looping))
    assert not repeats(np.array(other))


def test_a_passage_shared_by_two_sequences_is_no_loop():
    text = numbers(60)
    sequences = Sequences.of([((), text)] * 4, 97)
    assert loop_ends(sequences).tolist() == [60] * 4


def test_a_store_gives_back_what_was_added_and_knows_its_vocabulary(tmp_path):
    store = TokenStore(tmp_path, 70_000)
    first = Sequences.of([([1, 2], [69_999, 4]), ([5], [6, 7, 8])], 70_000, store.source("one"))
    store.add("a", first)
    store.add("b", Sequences.of([([9], [10])], 70_000, store.source("two")))
    again = TokenStore(tmp_path, 70_000)
    found = again.read()
    assert again.sources == ["one", "two"]
    assert [tokens.tolist() for tokens, _ in found] == [[1, 2, 69_999, 4], [5, 6, 7, 8], [9, 10]]
    assert found.answer[:4].tolist() == [False, False, True, True]
    assert found.source.tolist() == [0, 0, 1]
    assert not list(tmp_path.glob("*.part"))
    with refused("data"):
        TokenStore(tmp_path, 100)


def test_a_damaged_shard_is_named(tmp_path):
    store = TokenStore(tmp_path, 97)
    (tmp_path / "a.npz").write_bytes(b"PK nothing")
    with refused("data") as caught:
        store.read()
    assert "a.npz" in str(caught.value)


def test_rows_hold_whole_sequences_and_every_answer_once():
    sequences = Sequences.of([(numbers(2, i), numbers(3 + i, i)) for i in range(30)], 97)
    rows = packed(sequences, 40)
    found = []
    for tokens, segments, answer in zip(rows.tokens, rows.segments, rows.answer, strict=True):
        for number in range(1, segments.max() + 1):
            at = np.flatnonzero(segments == number)
            assert (np.diff(at) == 1).all()
            assert not answer[at[:2]].any()
            assert answer[at[2:]].all()
            found.append(tokens[at].tolist())
    assert sorted(found) == sorted(tokens.tolist() for tokens, _ in sequences)
    assert (rows.segments > 0).mean() > 0.9
    with refused("data"):
        packed(Sequences.of([(numbers(50), [1, 2, 3])], 97), 40)


def test_every_row_comes_once_in_an_epoch_and_sources_by_their_weight():
    source = np.array([0] * 10 + [1] * 30)
    sampler = RowSampler(source, None, 0)
    rows = np.concatenate([sampler.next(8) for _ in range(50)])
    counts = np.bincount(rows, minlength=40)
    assert counts[:10].max() - counts[:10].min() <= 1
    assert counts[10:].max() - counts[10:].min() <= 1
    weighted = RowSampler(source, {0: 3.0, 1: 1.0}, 0)
    drawn = np.concatenate([weighted.next(8) for _ in range(200)])
    assert (drawn < 10).mean() == pytest.approx(0.75, abs=0.05)
    state = weighted.state()
    expected = weighted.next(8)
    other = RowSampler(source, {0: 3.0, 1: 1.0}, 0)
    other.restore(state)
    assert other.next(8).tolist() == expected.tolist()
    with refused("mix"):
        RowSampler(source, {7: 1.0}, 0)


def test_answers_to_one_prompt_are_held_out_together():
    prompts = [numbers(4, i) for i in range(400)]
    sequences = Sequences.of([(prompt, numbers(5, i)) for prompt in prompts for i in range(3)], 97)
    apart = held_out(sequences, 0.2).reshape(-1, 3)
    assert (apart.all(1) | ~apart.any(1)).all()
    assert apart.mean() == pytest.approx(0.2, abs=0.06)


def test_the_draft_vocabulary_is_the_answers_most_frequent_tokens():
    sequences = Sequences.of([([50] * 20, [7, 7, 7, 3, 3, 9])], 97)
    assert draft_vocabulary(sequences, 3, 97, (60,)).tolist() == [3, 7, 60]
    assert len(draft_vocabulary(sequences, 200, 97, ())) == 97


@pytest.mark.parametrize(
    "line",
    [
        "{",
        '{"answer": "x"}',
        '{"messages": []}',
        '{"messages": [{"role": "robot", "content": "x"}]}',
        '{"messages": [{"role": ["user"], "content": "x"}]}',
        '{"conversations": [{"from": "gpt", "value": "x"}]}',
        '{"prompt": " "}',
        '{"prompt": "a", "text": "b"}',
    ],
)
def test_a_bad_line_is_named(tmp_path, line):
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "a", "response": "b"}\n' + line + "\n")
    with refused("data") as caught:
        read_examples(path)
    assert "line 2 of" in str(caught.value)


def test_every_form_of_a_chat_gives_the_same_tokens_and_marks(tmp_path, smollm2_path):
    talk = [("user", "Say hi."), ("assistant", "Hi!"), ("user", "Again."), ("assistant", "Hi again!")]
    path = tmp_path / "data.jsonl"
    forms = [
        {"messages": [{"role": role, "content": text} for role, text in talk]},
        {
            "conversations": [
                {"from": {"user": "human", "assistant": "gpt"}[role], "value": text} for role, text in talk
            ]
        },
    ]
    path.write_text("\n".join(map(json.dumps, forms)))
    tokenizer = Tokenizer.from_path(smollm2_path)
    eos = (tokenizer.eos_token_id,)
    (one,), (other,) = (encoded(example, tokenizer, eos) for example in read_examples(path))
    assert one == other
    tokens, answer = one
    assert tokens == tokenizer.apply_chat_template(forms[0]["messages"], add_generation_prompt=False)
    written = [token for token, mark in zip(tokens, answer, strict=True) if mark]
    assert tokenizer.decode(written, skip_special_tokens=False) == "Hi!<|im_end|>Hi again!<|im_end|>"


TEMPLATE = """{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' and not (KEPT and loop.last) %}{{ message.content.split('</think>')[-1].lstrip() }}
{%- else %}{{ message.content }}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\nOPENED' }}{% endif %}"""


@pytest.mark.parametrize("kept", ["true", "false"])
@pytest.mark.parametrize("opened", ["", "<think>\\n"])
def test_thoughts_are_learnt_whatever_the_template_leaves_out(tmp_path, smollm2_path, kept, opened):
    answers = ["<think>\nHm\n</think>\n\nYes", "<think>\nSo\n</think>\n\nNo"]
    talk = [("user", "One?"), ("assistant", answers[0]), ("user", "Two?"), ("assistant", answers[1])]
    messages = [{"role": role, "content": text} for role, text in talk]
    apart = [*messages[:1], {"role": "assistant", "content": "Yes", "reasoning_content": "Hm"}, *messages[2:]]
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(json.dumps({"messages": each}) for each in (messages, apart)))
    plain = Tokenizer.from_path(smollm2_path)
    template = TEMPLATE.replace("KEPT", kept).replace("OPENED", opened)
    tokenizer = Tokenizer(plain.backend, {}, {"default": template})
    one, other = (encoded(example, tokenizer, (2,)) for example in read_examples(path))
    assert one == other
    assert len(one) == 2  # the second prompt is without the first thought
    written = [
        tokenizer.decode([token for token, mark in zip(*each, strict=True) if mark], skip_special_tokens=False)
        for each in one
    ]
    opening = "<think>\n" if opened else ""
    assert written == [answer.removeprefix(opening) + "<|im_end|>" for answer in answers]


@pytest.fixture
def maker_of(monkeypatch):
    """Makers whose model writes one new prompt after the other, of which every fifth is too long for a row."""
    numbers = itertools.count()

    def write(llm, count, known):
        return [(n // 90 + 1, n % 90 + 1, *[3] * (60 if n % 5 == 0 else 2)) for n in itertools.islice(numbers, count)]

    def answers(llm, prompts, length, source, *, turn=0):
        fitting = [prompt for prompt in prompts if len(prompt) <= length - data.LEAST_ROOM]
        return Sequences.of([(prompt, [5] * 8) for prompt in fitting], 97, source)

    monkeypatch.setattr(data, "chat_frame", lambda tokenizer: ([1, 2], [4]))
    monkeypatch.setattr(data, "write_prompts", write)
    monkeypatch.setattr(data, "answer", answers)
    monkeypatch.setattr(data, "SHARD", 32)
    return lambda store, report=print: Maker(SimpleNamespace(tokenizer=None), store, 48, report)


def test_synthesis_that_was_cut_short_goes_on_with_the_prompts_it_has(tmp_path, maker_of):
    whole, cut = TokenStore(tmp_path / "whole", 97), TokenStore(tmp_path / "cut", 97)
    maker_of(whole).synthesise(50)

    def killed(line):
        if len(cut.shards()) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        maker_of(cut, killed).synthesise(50)
    assert 0 < len(cut.read()) < 100
    assert maker_of(cut).synthesise(50) == 50
    assert len(cut.read()) == len(whole.read()) == 100
    shards = len(cut.shards())
    assert maker_of(cut).synthesise(50) == 50
    assert len(cut.shards()) == shards


def test_a_shard_without_answers_is_not_kept(tmp_path, maker_of):
    store, lines = TokenStore(tmp_path, 97), []
    maker_of(store, lines.append).answer_prompts([[3] * 40], "long")
    assert not store.shards()
    assert "none of 1 prompts leaves room for an answer in 48 tokens" in lines[0]
