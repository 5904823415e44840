"""Habits of vLLM users work where the meaning is equal; anything else is a PacelineError with a sentence."""

from __future__ import annotations

import asyncio
import inspect
import math
import re
import shutil
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch

import paceline
from paceline import LLM, AsyncLLM, PacelineError, SamplingParams
from paceline.config import SpeculationConfig
from paceline.drafters.speculative_config import read
from paceline.errors import BrokenModel, InvalidPrompt, short_repr
from tests.helpers.errors import refused
from tests.helpers.tiny import save_tiny

HUGE = 10**5000  # more digits than Python prints
IDS = [5, 6, 7, 8]
TEXT = "w5 w6 w7 w8"
HELLO = [{"role": "user", "content": "w5 w6"}]
SHORT = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
TEMPLATE = (
    "{% for m in messages %}{{ m.role }} {{ m.content | trim }} end {% endfor %}{{ mood }} {{ tools | tojson }} "
    "{% if add_generation_prompt %}w9{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    save_tiny("llama-tied", path)
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


def name_of(value) -> str:
    """Without addresses: a test has the same name in every process."""
    return re.sub("0x[0-9a-f]+", "0x", short_repr(value, 60))


def make(folder: Path | str, **options) -> LLM:
    return LLM(folder, **{"device": "cpu", "threads": 1, "kv_cache_bytes": 4 << 20, **options})


@pytest.fixture(scope="module")
def llm(folder: Path):
    with make(folder) as llm:
        yield llm


def tokens(outputs) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


# -- making an LLM


def test_arguments_of_vllm_that_mean_the_same_are_honoured(folder: Path) -> None:
    same = {
        "gpu_memory_utilization": 0.5,
        "enable_prefix_caching": False,
        "kv_cache_dtype": "auto",
        "tensor_parallel_size": 1,
        "revision": None,
        "trust_remote_code": False,
        "enforce_eager": True,  # nothing is captured on a CPU
        "use_v2_block_manager": True,
        "dtype": torch.float32,
        "tokenizer": str(folder),
        "tokenizer_mode": "auto",
        "speculative_model": "[ngram]",
        "num_speculative_tokens": 3,
        "ngram_prompt_lookup_max": 4,
        "seed": np.int64(7),
        "max_model_len": np.int64(64),
    }
    with make(folder, **same) as llm:
        assert llm.engine.config.gpu_memory_fraction == 0.5
        assert not llm.engine.config.prefix_caching
        assert llm.max_model_len == 64
        spec = llm.speculation
        assert (spec.method, spec.k, spec.ngram_max) == ("ngram", 3, 4)
        assert llm.get_tokenizer() is llm.tokenizer
        assert llm.get_tokenizer().encode(TEXT) == IDS


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"tensor_parallel_size": 2}, "tensor_parallel_size"),
        ({"revision": "v2"}, "revision"),
        ({"trust_remote_code": True}, "trust_remote_code"),
        ({"quantization": "awq"}, "quantization"),
        ({"kv_cache_dtype": "fp8"}, "kv_dtype"),
        ({"kv_dtype": "fp8_e4m3"}, "kv_dtype"),
        ({"kv_dtype": "int4"}, "kv_dtype"),
        ({"kv_dtype": 8}, "kv_dtype"),
        ({"kv_dtype": "fp8", "kv_cache_dtype": "fp8"}, "kv_cache_dtype"),
        ({"use_v2_block_manager": False}, "use_v2_block_manager"),
        ({"speculative_K": 5}, "speculative_K"),
        ({"acceptance_threshold": 0.3}, "acceptance_threshold"),
        ({"spec_decoding_acceptance_method": "typical_acceptance_sampler"}, "spec_decoding_acceptance_method"),
        ({"speculative_config": {"method": "ngram", "acceptance_threshold": 0.3}}, "speculative_config"),
        ({"speculative_config": {"model": "[eagle9]"}}, "speculative_config"),
        ({"speculative_config": {"method": "ngram"}, "num_speculative_tokens": 3}, "num_speculative_tokens"),
        ({"speculative_config": 5}, "speculative_config"),
        ({"speculative_config": {"model": 5}}, "speculative_config"),
        ({"speculative_config": {HUGE: 5}}, "speculative_config"),
        ({"gpu_memory_utilization": 0.5, "gpu_memory_fraction": 0.6}, "gpu_memory_utilization"),
        ({"gpu_memory_utilization": "most"}, "gpu_memory_fraction"),
        ({"enable_prefix_caching": "false"}, "prefix_caching"),
        ({"prefix_caching": "false"}, "prefix_caching"),
        ({"max_modellen": 5}, "max_modellen"),
        ({"paged": 1}, "paged"),
        ({"kv_cache_bytes": 1e9}, "kv_cache_bytes"),
        ({"kv_cache_bytes": -HUGE}, "kv_cache_bytes"),
        ({"max_model_len": "x"}, "max_model_len"),
        ({"max_num_seqs": None}, "max_num_seqs"),
        ({"max_num_seqs": True}, "max_num_seqs"),
        ({"threads": 1.5}, "threads"),
        ({"seed": "x"}, "seed"),
        ({"seed": -1}, "seed"),
        ({"model": 5}, "model"),
        ({"model": None}, "model"),
        ({"model": b"smollm2"}, "model"),
        ({"draft_model": 5}, "draft_model"),
        ({"drafter": 5}, "drafter"),
        ({"tokenizer": 5}, "tokenizer"),
        ({"suffix_corpus": 5}, "suffix_corpus"),
        ({"suffix_corpus": [5]}, "suffix_corpus"),
        ({"method": 5}, "method"),
        ({"k": 2.5}, "k"),
        ({"dtype": 5}, "dtype"),
        ({"device": 5}, "device"),
        ({"device": torch.device("meta")}, "device"),
        ({"activations": ["int8"]}, "activations"),
        ({"numerics": "fast"}, "numerics"),
        ({"dtype": torch.int8}, "dtype"),
        ({"enforce_eager": "yes"}, "enforce_eager"),
    ],
    ids=name_of,
)
def test_anything_else_is_refused_by_name(options, field: str, folder: Path) -> None:
    with refused(field) as caught:
        make(**{"folder": folder, **options} if "model" not in options else {"folder": options["model"]})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("given", [{"kv_cache_bytes": 10**18}, {"kv_cache_bytes": 2**63 - 1}], ids=str)
def test_a_cache_that_no_machine_holds_is_refused(given, folder: Path) -> None:
    with pytest.raises(PacelineError):
        make(folder, **given)


def test_weights_may_be_kept_in_float16_under_any_of_its_names(folder: Path) -> None:
    for name in ("float16", "half", torch.float16):
        with make(folder, dtype=name) as llm:
            assert llm.dtype_name == "float16"
            plain, drafted = (
                tokens(llm.generate([IDS * 4], SamplingParams(temperature=0, max_tokens=12, speculation=own)))
                for own in ("none", {"method": "ngram", "k": 4})
            )
            assert plain == drafted


def test_weights_beyond_float16_are_refused(folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    copy = tmp_path / "wide"
    shutil.copytree(folder, copy)
    [file] = copy.glob("*.safetensors")
    weights = load_file(file)
    weights["model.layers.0.mlp.down_proj.weight"][0, 0] = 1e5
    save_file(weights, file)
    with refused("dtype"):
        make(copy, dtype="float16")
    with make(copy, dtype="bfloat16"):
        pass


def test_a_path_object_names_a_model_and_one_path_is_a_corpus(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.txt"
    assert SpeculationConfig(method="suffix", suffix_corpus=corpus).suffix_corpus == (str(corpus),)
    with pytest.raises(BrokenModel):
        LLM(tmp_path)


def test_a_method_in_brackets_is_a_method_without_a_model() -> None:
    assert read({"model": "[ngram]", "num_speculative_tokens": 4}, SpeculationConfig(method="auto")).k == 4
    assert read({"model": "[ngram]", "draft_tensor_parallel_size": 1}, SpeculationConfig()).method == "ngram"


def test_a_seed_of_the_model_seeds_every_request_anew(folder: Path) -> None:
    wish = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True)

    def answers(seed):
        with make(folder, seed=seed) as llm:
            streamed = [token for chunk in llm.stream(IDS, wish) for token in chunk.token_ids]
            return [streamed, *tokens(llm.generate([IDS, IDS], wish))]

    first = answers(3)
    assert answers(3) == first
    assert answers(4) != first
    assert len({tuple(answer) for answer in first}) == 3


def test_another_tokenizer_serves(folder: Path, tmp_path: Path) -> None:
    from tests.helpers.tiny import write_tokenizer

    write_tokenizer(tmp_path, 20)
    bare = tmp_path / "without a tokenizer of its own"
    shutil.copytree(folder, bare, ignore=shutil.ignore_patterns("tokenizer*"))
    for model in (folder, bare):
        with make(model, tokenizer=tmp_path) as llm:
            assert llm.generate("w50", SHORT)[0].prompt_token_ids == [0]  # w50 is unknown there
    (tmp_path / "tokenizer.json").write_text("{")
    for model, options in ((folder, {"tokenizer": tmp_path}), (bare, {})):
        with pytest.raises(BrokenModel):
            make(model, **options)


# -- prompts


PROMPTS = {
    "text": TEXT,
    "ids": IDS,
    "a tuple": tuple(IDS),
    "a range": range(5, 9),
    "an array": np.array(IDS),
    "a tensor": torch.tensor(IDS),
    "numpy's integers": [np.int32(token) for token in IDS],
    "arrays without dimensions": [np.array(token) for token in IDS],
    "a dict of text": {"prompt": TEXT},
    "a dict of ids": {"prompt_token_ids": np.array(IDS)},
}


@pytest.mark.parametrize("prompt", PROMPTS.values(), ids=PROMPTS)
def test_a_prompt_of_any_form_is_the_same_prompt(prompt, llm: LLM) -> None:
    expected = tokens(llm.generate(IDS, SHORT))
    assert tokens(llm.generate(prompt, sampling_params=SHORT)) == expected
    assert tokens(llm.generate([prompt, prompt], SHORT)) == expected * 2
    assert [token for chunk in llm.stream(prompt, SHORT) for token in chunk.token_ids] == expected[0]


ODD = [None, 5, 5.0, {5, 6}, [5.0, 6.0], b"w5", bytearray(b"w5"), memoryview(b"w5"), [True, False], np.array(5), HUGE]
ODD += [np.array([1.5]), [b"w5"], [None], [5, "w6"], ["w5", 6], {}, {"prompt": None}, {"prompt": "w5", "image": 1}]
ODD += [
    {"prompt": "w5", "prompt_token_ids": [5]},
    HELLO,
    object(),
    [[]],
    "",
    [HUGE],
    [-1],
    [np.bool_(True)],
    [[5], [5.5]],
]


@pytest.mark.parametrize("prompt", ODD, ids=name_of)
def test_what_is_no_prompt_gets_a_sentence(prompt, llm: LLM) -> None:
    with pytest.raises(InvalidPrompt) as caught:
        llm.generate(prompt, SHORT)
    assert 20 < len(str(caught.value)) < 300
    assert llm.call(lambda engine: not engine.has_work)


def test_a_call_without_a_prompt_gets_a_sentence(llm: LLM) -> None:
    with refused("prompt_token_ids"):
        llm.generate(prompt_token_ids=[IDS], sampling_params=SHORT)
    for call in (llm.generate, llm.stream, llm.chat):
        with pytest.raises(InvalidPrompt):
            call(sampling_params=SHORT)
    with pytest.raises(InvalidPrompt):
        asyncio.run(AsyncLLM(llm).generate(sampling_params=SHORT))


def test_a_generator_of_prompts_is_refused_before_it_is_read(llm: LLM) -> None:
    with pytest.raises(InvalidPrompt):
        llm.generate((TEXT for _ in range(2)), SHORT)


# -- arguments of a call


def test_parameters_may_be_a_dict_under_either_name(llm: LLM) -> None:
    asked = {"temperature": 0, "max_tokens": 5, "ignore_eos": True}
    expected = tokens(llm.generate(IDS, SHORT))
    assert tokens(llm.generate(IDS, asked)) == expected
    assert tokens(llm.generate([IDS, IDS], sampling_params=[asked, SHORT])) == expected * 2
    assert tokens(llm.generate(IDS, asked, use_tqdm=False, lora_request=None, priority=0)) == expected
    assert [chunk.token_ids for chunk in llm.stream(IDS, asked)][-1][-1] == expected[0][-1]


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"params": 5}, "sampling_params"),
        ({"params": "hot"}, "sampling_params"),
        ({"params": [5]}, "sampling_params"),
        ({"params": {"warmth": 1}}, "warmth"),
        ({"params": {1: 1}}, "sampling_params"),
        ({"params": [SHORT, SHORT]}, "sampling_params"),
        ({"params": SHORT, "sampling_params": SHORT}, "sampling_params"),
        ({"use_tqdm": 5}, "use_tqdm"),
        ({"lora_request": "x"}, "lora_request"),
        ({"prompt_token_ids": IDS}, "prompt_token_ids"),
        ({"sampling_param": SHORT}, "sampling_param"),
        ({"request_id": "7"}, "request_id"),
    ],
    ids=name_of,
)
def test_a_call_refuses_other_arguments_by_name(arguments, field: str, llm: LLM) -> None:
    with refused(field):
        llm.generate(IDS, **arguments)


def test_sampling_parameters_that_ask_for_what_is_so_are_taken() -> None:
    plain = SamplingParams(stop_token_ids=[np.array(5), np.int64(6)])
    assert plain.stop_token_ids == (5, 6)
    assert SamplingParams(best_of=1, logits_processors=None, detokenize=True, stop_token_ids=[5, 6]) == plain
    with refused("SamplingParams"):
        SamplingParams(0.7)


class RecordingBar:
    def __init__(self, total, desc):
        self.total, self.done, self.closed = total, [], False

    def update(self, n):
        self.done.append(n)

    def set_postfix_str(self, s):
        assert s.endswith("tok/s")

    def close(self):
        self.closed = True


def test_a_progress_bar_counts_answers_as_they_come(llm: LLM, capsys) -> None:
    bars = []

    def tqdm(**options):
        bars.append(RecordingBar(**options))
        return bars[-1]

    wishes = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (2, 30, 60, 90)]
    assert len(llm.generate([IDS] * 4, wishes, use_tqdm=tqdm)) == 4
    assert (bars[0].total, sum(bars[0].done), bars[0].closed) == (4, 4, True)
    assert len(bars[0].done) > 1, "it moves before the last answer"
    with pytest.raises(InvalidPrompt):
        llm.generate([IDS, [10**6]], SHORT, use_tqdm=tqdm)
    assert bars[1].closed
    asyncio.run(AsyncLLM(llm).generate([IDS] * 3, SHORT, use_tqdm=tqdm))
    assert sum(bars[2].done) == 3
    llm.generate([IDS] * 3, SHORT, use_tqdm=True)
    assert "3/3" in capsys.readouterr().err
    llm.generate([IDS] * 3, SHORT)
    assert capsys.readouterr().err == ""


# -- chats


def test_tools_and_variables_reach_the_template(llm: LLM) -> None:
    tools = [{"type": "function", "function": {"name": "w7"}}]
    (plain,) = llm.chat(HELLO, SHORT)
    (asked,) = llm.chat(HELLO, SHORT, tools=tools, chat_template_kwargs={"mood": "calm"})
    assert plain.prompt == "user w5 w6 end  null w9"
    assert asked.prompt == 'user w5 w6 end calm [{"type": "function", "function": {"name": "w7"}}] w9'
    (streamed,) = [c.output for c in llm.stream(HELLO, SHORT, chat_template_kwargs={"mood": "calm"}) if c.output]
    assert streamed.prompt == "user w5 w6 end calm null w9"
    (other,) = llm.chat(HELLO, SHORT, chat_template="{{ messages[0].content }}", tools=[])
    assert other.prompt == "w5 w6"
    tokenizer = llm.get_tokenizer()
    assert tokenizer.apply_chat_template(HELLO, tokenize=False, return_dict=False) == plain.prompt
    with refused("return_tensors"):
        tokenizer.apply_chat_template(HELLO, return_tensors="pt")


def test_text_parts_are_text_and_the_last_message_may_be_continued(llm: LLM) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "w5"}, {"type": "text", "text": "w6"}]}]
    assert llm.chat(parts, SHORT)[0].prompt == "user w5\nw6 end  null w9"
    begun = [*HELLO, {"role": "assistant", "content": "w7 w8 "}]
    for more in ({}, {"add_generation_prompt": False}):
        assert llm.chat(begun, SHORT, continue_final_message=True, **more)[0].prompt == (
            "user w5 w6 end assistant w7 w8 "
        )
    assert llm.chat(HELLO, SHORT, add_generation_prompt=False)[0].prompt == "user w5 w6 end  null "


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"tools": 5}, "tools"),
        ({"chat_template": "w5", "tools": [{"type": "function"}]}, "tools"),
        ({"chat_template_kwargs": {"enable_thinking": True}}, "enable_thinking"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": 5}, "chat_template_kwargs"),
        ({"chat_template": 5}, "chat_template"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"continue_final_message": "yes"}, "continue_final_message"),
        ({"documents": ["x"]}, "documents"),
    ],
    ids=name_of,
)
def test_a_chat_refuses_options_by_name(options, field: str, llm: LLM) -> None:
    with refused(field):
        llm.chat(HELLO, SHORT, **options)
    assert llm.call(lambda engine: not engine.has_work)


@pytest.mark.parametrize(
    ("messages", "options", "error"),
    [
        (HELLO, {"chat_template_kwargs": {"mood": object()}}, PacelineError),
        (HELLO, {"chat_template": "{% if %}"}, PacelineError),
        (HELLO, {"continue_final_message": True, "chat_template": "w5"}, PacelineError),
        ([{"role": "robot", "content": "w5"}], {}, InvalidPrompt),
        ([{"role": 5, "content": "w5"}], {}, InvalidPrompt),
        ([{"role": "user", "content": 5}], {}, InvalidPrompt),
        ([{"role": "user", "content": [5]}], {}, InvalidPrompt),
        ([{"role": "user", "content": [{"type": "image_url"}]}], {}, InvalidPrompt),
        ("w5", {}, InvalidPrompt),
        (None, {}, InvalidPrompt),
        (HELLO[0], {}, InvalidPrompt),
        (iter(HELLO), {}, InvalidPrompt),
        ([HELLO, None], {}, InvalidPrompt),
        (["w5"], {}, InvalidPrompt),
    ],
    ids=name_of,
)
def test_a_chat_that_cannot_be_read_is_refused(messages, options, error, llm: LLM) -> None:
    with pytest.raises(PacelineError) as caught:
        llm.chat(messages, SHORT, **options)
    assert type(caught.value) is error
    assert llm.call(lambda engine: not engine.has_work)


def test_a_role_that_the_template_names_is_known(llm: LLM) -> None:
    template = "{% for m in messages %}{% if m.role == 'robot' %}w7{% endif %}{% endfor %}"
    assert llm.chat([{"role": "robot", "content": "x"}], SHORT, chat_template=template)[0].prompt == "w7"


# -- log-probabilities and allowed tokens, on the real model


def test_prompt_logprobs_are_those_the_tokens_had_when_they_were_generated(smollm2) -> None:
    """Bit for bit, whichever way they were drafted, and though the cache holds the prompt."""
    prompt = smollm2.tokenizer.encode("The list of colours is red, green, blue. Again, the list of colours is")
    for own in ("none", "suffix"):
        wish = SamplingParams(temperature=0.8, seed=2, max_tokens=24, logprobs=2, speculation=own, ignore_eos=True)
        (answer,) = smollm2.generate(prompt, wish)
        (completion,) = answer.outputs
        assert answer.prompt_logprobs is None
        chosen = [e[t].logprob for t, e in zip(completion.token_ids, completion.logprobs, strict=True)]
        assert completion.cumulative_logprob == sum(chosen)
        (again,) = smollm2.generate(prompt + completion.token_ids, SamplingParams(max_tokens=1, prompt_logprobs=2))
        assert again.prompt_logprobs[0] is None
        assert len(again.prompt_logprobs) == len(again.prompt_token_ids)
        assert again.prompt_logprobs[len(prompt) :] == completion.logprobs
    assert smollm2.generate(prompt, SamplingParams(max_tokens=1))[0].outputs[0].cumulative_logprob is None
    assert all(
        math.isfinite(entry[token].logprob) for token, entry in zip(prompt[1:], again.prompt_logprobs[1:], strict=False)
    )


def test_only_allowed_tokens_are_written_and_drafts_change_nothing(smollm2) -> None:
    words = [smollm2.tokenizer.encode(w, add_special_tokens=False)[0] for w in (" red", " green", " blue", ",", " and")]
    prompt = "The list of colours is red, green, blue, red, green, blue, red, green,"
    for sampling in (
        {"temperature": 0},
        {"temperature": 1.2, "seed": 5},
        {"temperature": 1.2, "seed": 6, "top_p": 0.9},
    ):
        plain, drafted = (
            smollm2.generate(
                prompt, SamplingParams(max_tokens=14, allowed_token_ids=words, speculation=own, **sampling)
            )[0].outputs[0]
            for own in ("none", {"method": "ngram", "k": 4})
        )
        assert plain.token_ids == drafted.token_ids
        assert len(plain.token_ids) == 14
        assert set(plain.token_ids) <= set(words)
    assert drafted.speculation.num_drafts > 0
    with refused("allowed_token_ids"):
        smollm2.generate(prompt, SamplingParams(allowed_token_ids=[10**6]))


# -- what is exported


def exported():
    return [getattr(paceline, name) for name in paceline.__all__ if name != "__version__"]


def test_everything_exported_has_a_docstring() -> None:
    for thing in exported():
        assert thing.__doc__, thing
        for name, member in vars(thing).items():
            public = not name.startswith("_") and (
                inspect.isfunction(member) or isinstance(member, property | classmethod)
            )
            assert not public or inspect.getdoc(member), f"{thing.__name__}.{name}"
    errors = inspect.getmembers(paceline.errors, inspect.isclass)
    assert all(error.__doc__ for _, error in errors)


@pytest.mark.parametrize("thing", [LLM, AsyncLLM])
def test_the_example_in_the_docstring_runs(thing, smollm2_path, capsys) -> None:
    lines = inspect.getdoc(thing).splitlines()
    example = textwrap.dedent("\n".join(line for line in lines if line.startswith("    ") or not line))
    exec(compile(example, thing.__name__, "exec"), {"LLM": LLM, "SamplingParams": SamplingParams})
    assert len(capsys.readouterr().out) > 20


def test_an_async_llm_over_a_loaded_one_takes_no_options(llm: LLM) -> None:
    with refused("threads"):
        AsyncLLM(llm, threads=2)
