"""The public API on the real model: what vLLM users know, and what seeds promise."""

from __future__ import annotations

import copy
import math
import pickle
import random

import pytest
import torch

from paceline import LLM, SamplingParams
from paceline.client import StreamedRequest
from paceline.engine.events import Delta, Ended, FinishedAnswer
from paceline.errors import DeviceError, InvalidPrompt
from paceline.outputs import SpeculationStats
from paceline.text.stop_strings import OutputText
from tests.helpers.errors import refused

QUESTION = [{"role": "user", "content": "Name three fruits and describe each in one sentence."}]


def greedy(**kwargs):
    return SamplingParams(temperature=0, **{"max_tokens": 40, **kwargs})


def test_outputs_have_the_shape_vllm_users_know(smollm2):
    (output,) = smollm2.generate("The capital of France is", greedy(max_tokens=8, speculation="none"))
    (completion,) = output.outputs
    assert output.finished
    assert output.prompt == "The capital of France is"
    assert completion.text == smollm2.tokenizer.decode(completion.token_ids)
    assert "Paris" in completion.text
    assert len(completion.token_ids) == 8
    assert completion.finish_reason == "length"
    assert completion.speculation.mean_acceptance_length == 1.0
    assert completion.speculation.acceptance_rate is None
    assert output.metrics.ttft_s > 0


def test_a_row_is_the_same_alone_and_in_any_batch(smollm2):
    """Greedy and seeded, with companions of other lengths and parameters, in chunks beside decodes."""
    prompts = [f"Item {i}: " + "the quick brown fox " * (1 + 5 * i) for i in range(6)]
    params = [
        greedy() if i % 2 else SamplingParams(temperature=0.9, top_p=0.9, seed=i, max_tokens=40) for i in range(6)
    ]
    together = smollm2.generate(prompts, params)
    for prompt, param, output in zip(prompts, params, together, strict=True):
        (alone,) = smollm2.generate(prompt, param)
        assert alone.outputs[0].token_ids == output.outputs[0].token_ids


def test_seeds_decide_and_sub_seeds_differ(smollm2):
    params = SamplingParams(temperature=1.0, seed=11, n=3, max_tokens=16)
    (first,), (second,) = smollm2.chat(QUESTION, params), smollm2.chat(QUESTION, params)
    texts = [completion.text for completion in first.outputs]
    assert texts == [completion.text for completion in second.outputs]
    assert len(set(texts)) == 3
    assert [completion.index for completion in first.outputs] == [0, 1, 2]
    (lone,) = smollm2.chat(QUESTION, SamplingParams(temperature=1.0, seed=11, max_tokens=16))
    assert lone.outputs[0].text == texts[0]
    (unseeded,) = smollm2.chat(QUESTION, SamplingParams(temperature=1.0, n=3, max_tokens=16))
    assert len({completion.text for completion in unseeded.outputs}) == 3


def test_streaming_gives_the_same_text_and_never_a_piece_of_a_stop_string(smollm2):
    (whole,) = smollm2.chat(QUESTION, greedy())
    text = whole.outputs[0].text
    stop = text[len(text) // 2 : len(text) // 2 + 7]  # crosses token borders somewhere
    at = text.index(stop)
    chunks = list(smollm2.stream(QUESTION, greedy(stop=stop)))
    streamed = ""
    for chunk in chunks:
        streamed += chunk.text
        assert text[:at].startswith(streamed)
    assert streamed == text[:at]
    assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    last = chunks[-1]
    assert last.finish_reason == "stop"
    assert last.output.outputs[0].stop_reason == stop
    assert last.output.outputs[0].text == text[:at]
    (included,) = smollm2.chat(QUESTION, greedy(stop=stop, include_stop_str_in_output=True))
    assert included.outputs[0].text == text[: at + len(stop)]


def eager(tokenizer, tokens, skip):
    """Text as it is decoded token by token."""
    text = OutputText(tokenizer.incremental_decoder(skip))
    for token in tokens:
        text.push(token)
    text.finish()
    return text.take()


@pytest.mark.parametrize("skip", [True, False])
def test_text_is_what_decoding_token_by_token_gives(smollm2, skip):
    """Whole answers, and streams in pieces of any size: special tokens, halves of characters, ids without a token."""
    tokenizer, chance = smollm2.tokenizer, random.Random(7)
    halves = [token for text in ("🦊", "é", "字") for token in tokenizer.encode(text, add_special_tokens=False)]
    frequent = [*halves, *smollm2.config.eos_token_ids, 0, 1, 2]
    params = SamplingParams(skip_special_tokens=skip)
    for _ in range(60):
        tokens = [chance.choice(frequent) if chance.random() < 0.6 else chance.randrange(49152) for _ in range(25)]
        expected = eager(tokenizer, tokens, skip)
        request = StreamedRequest(smollm2.client, [1, 2], params)
        answer = FinishedAnswer(0, tokens, "", "length", None, None, SpeculationStats())
        ended = Ended("0", [answer], 1.0, 2.0, 0)
        pieces, at = [], 0
        while at < len(tokens):
            step = tokens[at : at + chance.randrange(1, 6)]
            at += len(step)
            reason = "length" if at == len(tokens) else None
            pieces.append(request.chunk(Delta("0", 0, step, [2] * len(step), "", reason, None, None)))
        assert pieces.pop() is None  # until the whole answer is there
        pieces.append(request.chunk(ended))
        (completion,) = pieces[-1].output.outputs
        assert (completion.text, completion.token_ids) == (expected, tokens)
        assert "".join(chunk.text for chunk in pieces) == expected


def test_text_is_decoded_when_it_is_read_and_travels_with_its_answer(smollm2, monkeypatch):
    decoders = []
    make = smollm2.tokenizer.incremental_decoder
    monkeypatch.setattr(smollm2.tokenizer, "incremental_decoder", lambda skip: decoders.append(skip) or make(skip))
    first, second, third = (smollm2.generate("The capital of France is", greedy(max_tokens=8))[0] for _ in range(3))
    assert not decoders
    assert pickle.loads(pickle.dumps(first)) == first
    assert copy.deepcopy(second) == second
    assert "Paris" in third.outputs[0].text
    assert first.outputs[0].text == second.outputs[0].text == third.outputs[0].text
    assert len(decoders) == 3, "once for each answer"
    with pytest.raises(AttributeError):
        _ = first.outputs[0].texts
    smollm2.generate("The capital of France is", greedy(max_tokens=8, stop="never"))
    assert len(decoders) == 4, "a stop string is the engine's to find"


def test_streams_open_at_once_each_get_all_that_is_theirs(smollm2):
    questions = ["Name a colour.", "Count to five.", "Say hello to Ada."]
    conversations = [[{"role": "user", "content": question}] for question in questions]
    expected = [output.outputs[0].text for output in smollm2.chat(conversations, greedy(max_tokens=12))]
    first, second, third = (smollm2.stream(conversation, greedy(max_tokens=12)) for conversation in conversations)
    texts = [next(first).text, "", ""]
    texts[1] = "".join(chunk.text for chunk in second)  # steps the engine for all three
    (alone,) = smollm2.chat(conversations[2], greedy(max_tokens=12))
    texts[0] += "".join(chunk.text for chunk in first)
    chunks = list(third)
    texts[2] = "".join(chunk.text for chunk in chunks)
    assert texts == expected
    assert alone.outputs[0].text == expected[2]
    assert [chunk.output is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]


def test_of_several_answers_only_the_last_chunk_carries_the_whole(smollm2):
    chunks = list(smollm2.stream(QUESTION, SamplingParams(temperature=1.0, seed=1, n=2, max_tokens=5)))
    assert [chunk.output is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert sorted(chunk.index for chunk in chunks if chunk.finish_reason) == [0, 1]


def test_a_request_chooses_its_own_speculation(smollm2):
    (plain,) = smollm2.chat(QUESTION, greedy(speculation="none"))
    assert plain.outputs[0].speculation.num_drafts == 0
    for own in ("auto", "ngram", {"method": "suffix", "k": 3}, {"k": 2}, {"method": "auto", "k": 4}):
        (output,) = smollm2.chat(QUESTION, greedy(speculation=own))
        assert output.outputs[0].token_ids == plain.outputs[0].token_ids
        assert set(output.outputs[0].speculation.drafts_by_method) <= {"ngram", "suffix", "dspark"}
    for wrong in ("warp", {"method": "none", "k": 3}):
        with refused("speculation"):
            smollm2.chat(QUESTION, greedy(speculation=wrong))
    assert not smollm2.engine.has_work


def test_an_engine_without_drafters_says_so_when_asked_to_draft(smollm2_path):
    llm = LLM(str(smollm2_path), method="none")
    for own in ("auto", "ngram", {"k": 4}, {"method": "auto", "k": 4}):
        with refused("speculation"):
            llm.generate("a", greedy(speculation=own))
    llm.generate("a", greedy(max_tokens=1, speculation="none"))
    for contradiction in ({"k": 4}, {"draft_model": "smollm2"}, {"suffix_corpus": ["x"]}, {"suffix_store": "y"}):
        with refused(*contradiction):
            LLM(str(smollm2_path), method="none", **contradiction)
    for k in (0, 65, 2.5, "many"):
        with refused("k"):
            LLM(str(smollm2_path), method="ngram", k=k)


def test_eos_ends_the_answer_unless_ignored(smollm2):
    question = [{"role": "user", "content": "Say hi."}]
    (ended,) = smollm2.chat(question, greedy(max_tokens=200))
    completion = ended.outputs[0]
    assert completion.finish_reason == "stop"
    assert completion.token_ids[-1] in smollm2.config.eos_token_ids
    assert "<|im_end|>" not in completion.text
    (going_on,) = smollm2.chat(question, greedy(max_tokens=len(completion.token_ids) + 5, ignore_eos=True))
    assert going_on.outputs[0].finish_reason == "length"
    assert going_on.outputs[0].token_ids[: len(completion.token_ids)] == completion.token_ids


def test_logprobs_are_those_of_the_raw_distribution(smollm2):
    (output,) = smollm2.chat(QUESTION, SamplingParams(temperature=0.7, top_k=5, seed=1, max_tokens=6, logprobs=3))
    completion = output.outputs[0]
    assert len(completion.logprobs) == 6
    for token, entry in zip(completion.token_ids, completion.logprobs, strict=True):
        assert token in entry
        assert 3 <= len(entry) <= 4
        best = sorted(entry.values(), key=lambda logprob: logprob.rank)
        assert [logprob.rank for logprob in best[:3]] == [1, 2, 3]
        assert best[0].logprob >= best[1].logprob >= best[2].logprob
        assert sum(math.exp(logprob.logprob) for logprob in entry.values()) <= 1.0 + 1e-6
        assert entry[token].decoded_token == smollm2.tokenizer.token_text(token)


def test_bad_words_do_not_appear_and_bias_forces(smollm2):
    (plain,) = smollm2.chat(QUESTION, greedy())
    word = next(word for word in plain.outputs[0].text.split() if word.isalpha() and len(word) > 4)
    (without,) = smollm2.chat(QUESTION, greedy(bad_words=[word]))
    assert word not in without.outputs[0].text
    token = smollm2.tokenizer.encode(" banana", add_special_tokens=False)[0]
    (forced,) = smollm2.chat(QUESTION, greedy(max_tokens=3, logit_bias={token: 100.0}))
    assert forced.outputs[0].token_ids == [token] * 3


def test_a_conversation_reuses_its_beginning(smollm2):
    (first,) = smollm2.chat(QUESTION, greedy())
    longer = [*QUESTION, {"role": "assistant", "content": first.outputs[0].text}, {"role": "user", "content": "More."}]
    (second,) = smollm2.chat(longer, greedy(max_tokens=4))
    assert second.num_cached_tokens >= len(first.prompt_token_ids) // 16 * 16


def test_what_cannot_be_done_is_refused_by_name(smollm2, smollm2_path):
    assert smollm2.generate([]) == []
    with pytest.raises(InvalidPrompt):
        smollm2.chat([])
    with pytest.raises(InvalidPrompt):
        smollm2.stream([{"role": "user", "content": ""}])
    with pytest.raises(InvalidPrompt):
        smollm2.generate(["fine", "word " * 9000])
    with refused("sampling_params"):
        smollm2.generate(["a", "b"], [greedy()])
    with refused("logit_bias"):
        smollm2.generate("a", greedy(logit_bias={10**6: 1.0}))
    for wrong in ({"dtype": "float8"}, {"device": "tpu"}, {"threads": 0}, {"method": "magic"}, {"max_model_len": 9000}):
        with refused(*wrong):
            LLM(str(smollm2_path), **wrong)
    if not torch.cuda.is_available():
        with pytest.raises(DeviceError):
            LLM(str(smollm2_path), device="cuda")
    assert not smollm2.engine.has_work
    assert smollm2.engine.blocks.num_free == smollm2.engine.blocks.num_blocks


def test_a_salt_narrows_with_whom_a_prompt_is_shared(smollm2):
    prompt = "One two three four five six seven eight. " * 8

    def cached(salt):
        (output,) = smollm2.generate([{"prompt": prompt, "cache_salt": salt}], SamplingParams(max_tokens=1))
        return output.num_cached_tokens

    assert [cached(salt) > 0 for salt in ("a", "b", "a", None, "b")] == [False, False, True, False, True]
    for salt in ("", 3):
        with pytest.raises(InvalidPrompt):
            cached(salt)
