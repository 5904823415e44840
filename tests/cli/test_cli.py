"""The command line over a fake engine: what goes where, exit codes, the JSON object, interruptions."""

from __future__ import annotations

import inspect
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import typer

from paceline import __version__
from paceline.cli.app import app
from paceline.cli.flags import DEFAULT_MAX_TOKENS, flag, with_options
from paceline.cli.output import Tally
from paceline.outputs import SpeculationStats
from paceline.sampling_params import SamplingParams
from tests.helpers.fake_llm import FakeLLM, Result, Screen, environment, start

RESULT_KEYS = {"model", "method", "weights", "activations", "kv_dtype", "choices", "usage", "timing", "speculation"}
CHOICE_KEYS = {"index", "text", "token_ids", "finish_reason", "logprobs"}
SPECULATION_KEYS = {
    "drafts_by_method",
    "estimated_speedup",
    "why_no_draft",
    "num_drafts",
    "num_draft_tokens",
    "num_accepted_tokens",
    "acceptance_rate",
    "mean_acceptance_length",
    "drafted_per_position",
    "accepted_per_position",
}


# -- generate


def test_the_answer_goes_to_stdout_and_one_line_to_stderr(paceline: Callable[..., Result]) -> None:
    result = paceline("generate", "hello there", "--max-tokens", "3", "--method", "none")
    assert result.code == 0
    assert result.out == "word0 word1 word2\n"
    assert result.err == "3 tokens · 1.0 tok/s · no drafts: method none · first after 0.25 s\n"


def test_one_token_has_no_rate(paceline: Callable[..., Result]) -> None:
    assert paceline("generate", "hello", "--max-tokens", "1").err.startswith("1 token · n/a tok/s · ")


def test_a_prompt_goes_through_the_chat_template_unless_raw(paceline: Callable[..., Result]) -> None:
    paceline("generate", "hello")
    paceline("generate", "hello", "--system", "be brief")
    paceline("generate", "hello", "--raw")
    assert [request for request, _ in FakeLLM.requests] == [
        [{"role": "user", "content": "hello"}],
        [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}],
        "hello",
    ]


def test_a_dash_reads_stdin_without_its_last_newline(paceline: Callable[..., Result]) -> None:
    paceline("generate", "--raw", "-", stdin="grüße\n\n".encode())
    assert FakeLLM.requests[0][0] == "grüße\n"


def test_every_sampling_parameter_is_a_flag(paceline: Callable[..., Result]) -> None:
    flags = (
        "--temperature 0.5 --top-k 7 --top-p 0.9 --min-p 0.1 --repetition-penalty 1.1 --presence-penalty 0.2 "
        "--frequency-penalty 0.3 --logit-bias 5=-1.5 --logit-bias 6=2 --bad-word a --bad-word b --min-tokens 1 "
        "--max-tokens 4 --stop x --stop y --stop-token-id 3 --stop-token-id 4 --ignore-eos --seed 0 --n 2 --logprobs 1 "
        "--include-stop-str-in-output --keep-special-tokens --json"
    )
    assert paceline("generate", "hello", *flags.split()).code == 0
    assert FakeLLM.requests[0][1] == SamplingParams(
        temperature=0.5,
        top_k=7,
        top_p=0.9,
        min_p=0.1,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=0.3,
        logit_bias={5: -1.5, 6: 2.0},
        seed=0,
        n=2,
        bad_words=["a", "b"],
        stop=["x", "y"],
        min_tokens=1,
        max_tokens=4,
        stop_token_ids=[3, 4],
        logprobs=1,
        ignore_eos=True,
        include_stop_str_in_output=True,
        skip_special_tokens=False,
    )


def test_unset_flags_leave_the_models_own_defaults(paceline: Callable[..., Result]) -> None:
    paceline("generate", "hello")
    assert FakeLLM.requests[0][1] == SamplingParams(max_tokens=DEFAULT_MAX_TOKENS)


def test_an_answer_ends_at_a_default_limit_and_the_last_line_says_so(paceline, monkeypatch) -> None:
    monkeypatch.setattr(FakeLLM, "default_limit", None)
    assert paceline("generate", "hello", "--max-model-len", "2000").err.startswith(
        "1024 tokens (stopped at 1024: --max-tokens allows more) · "
    )
    assert paceline("generate", "hello", "--max-model-len", "100").err.startswith("99 tokens (the context is full) · ")
    assert paceline("generate", "hello", "--max-tokens", "1024", "--max-model-len", "2000").err.startswith(
        "1024 tokens · "
    )
    paceline("generate", "hello", "--min-tokens", "1500")
    assert FakeLLM.requests[-1][1].max_tokens == 1500


def test_a_seed_without_effect_is_remarked_upon(paceline: Callable[..., Result]) -> None:
    remark = "--seed has no effect: decoding is greedy"
    assert paceline("generate", "hello", "--seed", "1").err.startswith(remark)
    assert paceline("chat", "--seed", "1", "--temperature", "0", stdin=b"").err.startswith(remark)
    assert remark not in paceline("generate", "hello", "--seed", "1", "--temperature", "0.5").err
    assert paceline("generate", "hello", "--seed", "1", "--json").err == ""


def test_bytes_that_are_not_text_are_blamed_on_their_flag(paceline: Callable[..., Result]) -> None:
    for switch, name in {"--bad-word": "bad_words", "--stop": "stop", "--system": "system", "--model": "model"}.items():
        assert field_of(paceline("generate", "hello", switch, "a\udcff")) == name


def test_model_flags_reach_the_engine(paceline: Callable[..., Result]) -> None:
    flags = "-m folder --dtype float32 --device cpu --threads 2 --activations int8 "
    flags += "--kv-cache-dtype fp8 --max-model-len 50 --gpu-memory-fraction 0.5"
    paceline("generate", "hello", *flags.split())
    assert FakeLLM.created == [
        {
            "model": "folder",
            "dtype": "float32",
            "device": "cpu",
            "activations": "int8",
            "kv_dtype": "fp8",
            "threads": 2,
            "method": "auto",
            "k": None,
            "draft_model": (),
            "drafter": (),
            "suffix_corpus": (),
            "suffix_store": None,
            "speculative_config": None,
            "max_model_len": 50,
            "gpu_memory_fraction": 0.5,
            "progress": None,
        }
    ]


def test_drafting_flags_reach_the_engine(paceline: Callable[..., Result]) -> None:
    flags = "--k 4 --draft-model small --draft-model tiny --drafter head"
    flags += " --suffix-corpus a.txt --suffix-corpus b.txt --suffix-store store"
    paceline("generate", "hello", *flags.split(), "--speculative-config", '{"prompt_lookup_max": 3}')
    paceline("chat", "--method", "ngram", "--k", "auto", stdin=b"")
    first, second = FakeLLM.created
    assert (first["method"], first["k"], first["draft_model"]) == ("auto", 4, ("small", "tiny"))
    assert first["drafter"] == ("head",)
    assert (first["suffix_corpus"], first["suffix_store"]) == (("a.txt", "b.txt"), "store")
    assert first["speculative_config"] == '{"prompt_lookup_max": 3}'
    assert (second["method"], second["k"]) == ("ngram", None)


def stats(**drafts_by_method: int) -> SpeculationStats:
    """18 drafts of 4 nodes and 48 of 72 accepted, in 20 passes that took half as long as plain decoding would have."""
    return SpeculationStats(
        num_drafts=18,
        num_draft_tokens=72,
        num_accepted_tokens=48,
        num_target_passes=20,
        num_committed_tokens=68,
        drafts_by_method=drafts_by_method,
        spent_s=1.0,
        plain_s=2.0,
    )


@pytest.mark.parametrize(
    ("flags", "drafted", "gain", "expected"),
    [
        ("--method auto", stats(suffix=18), 1.5, "suffix k≈4 · τ 3.4 · est. 2.0x"),
        ("--method auto", stats(ngram=6, suffix=12), 1.5, "suffix+ngram k≈4 · τ 3.4 · est. 2.0x"),
        ("--method auto", stats(ngram=1, suffix=17), 1.5, "suffix k≈4 · τ 3.4 · est. 2.0x"),
        ("--method ngram --k 4", stats(ngram=18), None, "ngram k≈4 · τ 3.4 · est. 2.0x"),
        ("--method auto", None, 0.9, "no drafts: expected 0.9x"),
        ("--method ngram", None, 0.9, "no drafts: expected 0.9x"),
        ("--method auto", None, 1.5, "no drafts: earlier ones did not pay"),
        ("--method auto", None, None, "no drafts: nothing to draft from"),
        ("--method ngram --k 4", None, 0.9, "no drafts: nothing to draft from"),
        ("--method none", None, None, "no drafts: method none"),
    ],
)
def test_the_last_line_says_what_drafting_did(flags, drafted, gain, expected, paceline) -> None:
    FakeLLM.drafted, FakeLLM.expected_gain = drafted, gain
    err = paceline("generate", "hello", "--max-tokens", "41", *flags.split()).err
    assert err == f"41 tokens · 20 tok/s · {expected} · first after 0.25 s\n"


def test_the_last_line_of_a_short_answer_says_that_it_was_short(paceline: Callable[..., Result]) -> None:
    FakeLLM.expected_gain = 1.5
    assert " · no drafts: too short · " in paceline("generate", "hello", "--max-tokens", "2").err
    FakeLLM.drafted = replace(stats(suffix=18), spent_s=0.0)
    assert "τ 3.4 · too short to time" in paceline("generate", "hello", "--max-tokens", "9").err


def test_json_names_the_engines_method_and_keeps_its_keys_when_drafts_were_made(paceline) -> None:
    FakeLLM.drafted = stats(suffix=18)
    result = paceline("generate", "hello", "--json").json
    assert (set(result), result["method"], set(result["speculation"])) == (RESULT_KEYS, "auto", SPECULATION_KEYS)
    expected = {"num_accepted_tokens": 48, "drafts_by_method": {"suffix": 18}, "estimated_speedup": 2.0}
    assert result["speculation"].items() >= {**expected, "why_no_draft": None}.items()
    FakeLLM.drafted = None
    speculation = paceline("generate", "hello", "--json", "--method", "none").json["speculation"]
    assert (speculation["estimated_speedup"], speculation["why_no_draft"]) == (None, "method none")


def test_several_answers_are_printed_in_order_under_headings(paceline: Callable[..., Result]) -> None:
    result = paceline("generate", "hello", "--n", "2", "--max-tokens", "2", "--temperature", "1")
    assert result.out == "── 1 of 2 ──\nword0 word1\n── 2 of 2 ──\nword0 word1\n"
    assert result.err.startswith("4 tokens · 1.0 tok/s")


@pytest.mark.parametrize(
    ("flags", "words", "name", "value"),
    [
        (["--activations", "int8"], "int8 activations", "activations", "int8"),
        (["--kv-dtype", "fp8"], "fp8 cache", "kv_dtype", "fp8"),
        (["--kv-dtype", "int8"], "int8 cache", "kv_dtype", "int8"),
    ],
)
def test_an_option_that_changes_the_target_is_named(flags, words, name, value, paceline) -> None:
    assert paceline("generate", "hello", *flags).err.endswith(f"first after 0.25 s · {words}\n")
    assert paceline("generate", "hello", *flags, "--json").json[name] == value


def test_json_is_one_object_with_exactly_the_promised_keys(paceline: Callable[..., Result]) -> None:
    result = paceline("generate", "hello there", "--json", "--max-tokens", "3", "--n", "2", "--temperature", "1")
    assert result.code == 0
    assert result.err == ""
    found = result.json
    assert set(found) == RESULT_KEYS
    assert [set(choice) for choice in found["choices"]] == [CHOICE_KEYS, CHOICE_KEYS]
    assert found["choices"][1] == {
        "index": 1,
        "text": "word0 word1 word2",
        "token_ids": [0, 1, 2],
        "finish_reason": "length",
        "logprobs": None,
    }
    assert found["usage"] == {"prompt_tokens": 2, "completion_tokens": 6}
    assert found["timing"] == {"load_s": 0.5, "ttft_s": 0.25, "decode_s": 2.0, "tokens_per_second": 2.0}
    assert set(found["speculation"]) == SPECULATION_KEYS
    assert found["speculation"]["acceptance_rate"] is None
    assert found["speculation"]["mean_acceptance_length"] == 1.0


def test_json_logprobs_name_the_chosen_token_and_the_likeliest(paceline: Callable[..., Result]) -> None:
    found = paceline("generate", "hello", "--json", "--logprobs", "1", "--max-tokens", "1").json
    assert found["choices"][0]["logprobs"] == [
        {
            "token_id": 0,
            "token": "word0",
            "logprob": -0.5,
            "rank": 2,
            "top_logprobs": [{"token_id": 1, "token": "word1", "logprob": -0.25, "rank": 1}],
        }
    ]


# -- errors


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (["", ""], None),
        (["hello", "--max-tokens", "0"], "max_tokens"),
        (["hello", "--top-p", "0"], "top_p"),
        (["hello", "--top-p", "1.5"], "top_p"),
        (["hello", "--method", "eagle9"], "method"),
        (["hello", "--k", "0"], "k"),
        (["hello", "--k", "200"], "k"),
        (["hello", "--k", "many"], "k"),
        (["hello", "--method", "none", "--k", "4"], "k"),
        (["hello", "--method", "none", "--draft-model", "small"], "draft_model"),
        (["hello", "--method", "ngram", "--draft-model", "small"], "draft_model"),
        (["hello", "--method", "ngram", "--suffix-corpus", "a.txt"], "suffix_corpus"),
        (["hello", "--method", "draft-model", "--suffix-store", "file"], "suffix_store"),
        (["hello", "--speculative-config", "{"], "speculative_config"),
        (["hello", "--speculative-config", '{"method": "ngram", "posterior_threshold": 0.1}'], "speculative_config"),
        (["hello", "--speculative-config", '{"method": "hydra"}'], "speculative_config"),
        (["hello", "--method", "suffix", "--speculative-config", '{"method": "ngram"}'], "method"),
        (["hello", "--k", "4", "--speculative-config", '{"num_speculative_tokens": 5}'], "k"),
        (["hello", "--draft-model", "a", "--speculative-config", '{"model": "b"}'], "draft_model"),
        (["hello", "--draft-model", "a", "--speculative-config", '{"method": "ngram"}'], "draft_model"),
        (["one two three", "--raw", "--max-model-len", "2"], None),
    ],
)
def test_bad_values_are_one_line_and_exit_code_1(arguments, field, paceline) -> None:
    arguments = [argument for argument in arguments if argument] or [""]
    plain = paceline("generate", *arguments)
    assert (plain.code, plain.out) == (1, "")
    assert plain.err.startswith("error: ")
    assert plain.err.count("\n") == 1
    result = paceline("generate", *arguments, "--json")
    assert (result.code, result.err) == (1, "")
    error = result.json["error"]
    assert plain.err == f"error: {error['message']}\n"
    assert error.get("field") == field
    assert set(error) == {"type", "message"} | ({"field"} if field else set())


def test_an_address_that_cannot_be_listened_on_is_named(paceline: Callable[..., Result]) -> None:
    for host in ("nowhere.invalid", "ü" * 100, "\udc80", "", " "):
        assert field_of(paceline("serve", "--host", host)) == "host"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        result = paceline("serve", "--port", port)
        assert (field_of(result), result.err.count(port)) == ("port", 1)


def field_of(result: Result) -> str:
    """Return the field that a refusal of one line names."""
    assert (result.code, result.out, result.err.count("\n")) == (1, "", 1)
    return result.err.removeprefix("error: ").partition(":")[0]


@pytest.mark.parametrize("method", ["draft_model", "prompt-lookup", "lookahead", "ngrams"])
def test_a_method_of_another_name_or_engine_is_answered_with_ours(method: str, paceline: Callable[..., Result]) -> None:
    result = paceline("generate", "hello", "--method", method)
    assert field_of(result) == "method"
    assert re.search("draft-model|ngram|auto", result.err.removeprefix(f"error: method: '{method}'"))


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate"],
        ["generate", "hello", "--top-p", "much"],
        ["generate", "hello", "--temperatur", "1"],
        ["generate", "hello", "--logit-bias", "5"],
        ["generate", "hello", "--raw", "--system", "be brief"],
        ["generate", "hello", "--logprobs", "2"],
        ["chat", "--raw"],
        ["chat", "--n", "2"],
        ["chat", "--logprobs", "2"],
        ["no-such-command"],
    ],
    ids=" ".join,
)
def test_usage_errors_are_one_line_and_exit_code_2(arguments: list[str], paceline: Callable[..., Result]) -> None:
    result = paceline(*arguments)
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("error: ")
    assert result.err.count("\n") == 1
    assert not FakeLLM.created


def test_a_prompt_without_quotes_is_told_of_them(paceline: Callable[..., Result]) -> None:
    assert "put a prompt of several words in quotes" in paceline("generate", "write", "a", "poem").err
    assert "quotes" not in paceline("chat", "hello").err


def test_white_space_is_a_prompt_only_where_it_is_continued(paceline: Callable[..., Result]) -> None:
    assert (paceline("generate", " \n").code, paceline("generate", " \n", "--raw").code) == (1, 0)


def test_usage_errors_are_objects_with_json(paceline: Callable[..., Result]) -> None:
    result = paceline("generate", "hello", "--top-p", "much", "--json")
    assert (result.code, result.err) == (2, "")
    assert result.json["error"]["type"] == "UsageError"


def test_a_prompt_that_reads_like_a_flag_is_still_a_prompt(paceline: Callable[..., Result]) -> None:
    assert paceline("generate", "--max-tokens", "1", "--", "--json").out == "word0\n"
    assert FakeLLM.requests[0][0] == [{"role": "user", "content": "--json"}]


def test_stdin_that_is_not_utf8_is_refused(paceline: Callable[..., Result]) -> None:
    result = paceline("generate", "-", "--json", stdin=b"\xff\xfe")
    assert (result.code, result.json["error"]["type"]) == (1, "InvalidPrompt")


def test_an_unexpected_exception_is_one_line_that_tells_how_to_see_more(paceline, monkeypatch) -> None:
    monkeypatch.delenv("PACELINE_DEBUG", raising=False)
    FakeLLM.error = ZeroDivisionError("two\nlines")
    result = paceline("generate", "hello")
    assert result.code == 1
    assert result.err == "error: unexpected ZeroDivisionError: two lines (set PACELINE_DEBUG=1 for the traceback)\n"
    assert paceline("generate", "hello", "--json").json["error"]["message"].startswith("unexpected ZeroDivisionError")
    monkeypatch.setenv("PACELINE_DEBUG", "1")
    with pytest.raises(ZeroDivisionError):
        paceline("generate", "hello")


# -- demo


def test_the_demo_answers_three_prompts_both_ways_speculatively_first(paceline: Callable[..., Result]) -> None:
    FakeLLM.drafted = stats(suffix=18)
    result = paceline("demo")
    assert result.code == 0
    assert result.out.count("identical output: yes") == 3
    assert "\x1b" not in result.out
    [created] = FakeLLM.created
    assert not created["prefix_caching"]
    warm_up, *asked = FakeLLM.requests
    assert warm_up[1].speculation == "none"
    assert [params.speculation for _, params in asked] == [None, "none"] * 3
    assert all(params.temperature == 0 and params.max_tokens == 160 for _, params in asked)
    requests = [str(request) for request, _ in asked]
    assert requests[::2] == requests[1::2]
    assert len(set(requests)) == 3


def test_the_demo_compares_tokens_and_fails_when_they_differ(paceline: Callable[..., Result]) -> None:
    FakeLLM.plain_says = 999
    result = paceline("demo", "hello", "--max-tokens", "20")
    assert result.code == 1
    assert "identical output: NO, they differ at token 19" in result.out
    found = paceline("demo", "hello", "--max-tokens", "20", "--json")
    assert (found.code, found.err) == (1, "")
    assert [(one["identical"], one["first_difference"]) for one in found.json["rounds"]] == [(False, 19)]


def test_the_demo_asks_only_the_users_prompt_where_there_is_one(paceline: Callable[..., Result]) -> None:
    FakeLLM.drafted = stats(suffix=18)
    [one] = paceline("demo", "hello", "--json").json["rounds"]
    assert (one["prompt"], one["identical"], one["speedup"], one["loops"]) == ("hello", True, 1.0, False)
    assert (one["acceptance_rate"], one["mean_acceptance_length"]) == (48 / 72, 3.4)
    assert one["drafted_by"] == {"suffix": 18}


def test_the_demo_drafts_with_several_models(paceline: Callable[..., Result]) -> None:
    paceline("demo", "hello", "--draft-model", "small", "--draft-model", "tiny")
    [created] = FakeLLM.created
    assert created["draft_model"] == ("small", "tiny")


def test_the_demo_says_when_nothing_was_gained(paceline: Callable[..., Result]) -> None:
    assert "no speed-up here: there was nothing worth drafting" in paceline("demo", "hello").out
    FakeLLM.drafted = stats(suffix=18)
    assert "no speed-up here: drafts were made and did not pay" in paceline("demo", "hello").out


def test_the_demo_refuses_what_it_cannot_compare(paceline: Callable[..., Result]) -> None:
    for flags in (["--method", "none"], ["--max-tokens", "0"], ["--method", "ngram", "--draft-model", "small"]):
        result = paceline("demo", "hello", *flags)
        assert (result.code, result.out, result.err.count("\n")) == (1, "", 1)
    assert not FakeLLM.created


def test_the_demo_colours_accepted_drafts_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    with on_terminal("demo", "hello", "--max-tokens", "3", streams=("stdin", "stdout", "stderr")) as (process, screen):
        screen.wait_for("word0 \x1b[1;32mword1 \x1b[0mword2")  # drafted: the odd ones
        screen.wait_for("word0 word1 word2")
        assert process.wait(timeout=60) == 0


# -- the process itself


@contextmanager
def on_terminal(*arguments: str, streams: tuple[str, ...]) -> Iterator[tuple[subprocess.Popen[str], Screen]]:
    terminal, inside = os.openpty()
    process = start(*arguments, delay_s=0, **dict.fromkeys(streams, inside))
    os.close(inside)
    try:
        yield process, Screen(terminal)
    finally:
        process.kill()
        process.wait()
        os.close(terminal)


def _after_first_words(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    assert process.stdout.read(5) == "word0"


def test_ctrl_c_keeps_what_was_streamed_and_exits_130() -> None:
    process = start("generate", "hello", "--max-tokens", "900")
    _after_first_words(process)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert out == "\n" or out.startswith(" word1")
    assert re.fullmatch(r"interrupted after \d+ tokens? · .* · suffix k≈2 · τ 1\.8 · est\. 1\.5x · first .*\n", err)


def test_a_stopped_stream_of_the_real_engine_tells_what_drafting_did(smollm2: Any) -> None:
    params = SamplingParams(temperature=0, max_tokens=60, speculation={"method": "ngram", "k": 4})
    stream = smollm2.stream("one two three one two three one two three one two", params)
    tally = Tally(smollm2, params, sequences=stream.sequences)
    for _, chunk in zip(range(6), stream, strict=False):
        tally.add(chunk)
    stream.close()
    assert (tally.output, tally.speculation.num_drafts > 0) == (None, True)
    assert re.search(r"ngram k≈4 · τ \d\.\d · est\. \d\.\dx", tally.line())


def test_a_long_prompt_shows_that_it_is_being_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_PROMPT_S", "2")
    monkeypatch.setenv("TERM", "xterm")
    with on_terminal("generate", "four words of prompt", streams=("stderr",)) as (process, screen):
        for words in ("reading the prompt", "50 %", "5 tokens"):
            screen.wait_for(words)
        out, _ = process.communicate(timeout=60)
        assert (process.returncode, out) == (0, "word0 word1 word2 word3 word4\n")


def test_ctrl_c_ends_the_demo_with_130() -> None:
    process = start("demo", "hello")
    assert process.stdout is not None
    while "speculatively" not in process.stdout.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "interrupted\n")
    assert not out or out.endswith("\n")


def test_ctrl_c_with_json_is_an_error_object(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = tmp_path / "started"  # nothing is printed that could be waited for
    monkeypatch.setenv("FAKE_STARTED", str(started))
    process = start("generate", "hello", "--max-tokens", "900", "--json")
    while not started.exists():
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "")
    assert json.loads(out)["error"]["type"] == "Interrupted"


def test_a_closed_pipe_ends_quietly() -> None:
    process = start("generate", "hello", "--max-tokens", "900", delay_s=0.01)
    _after_first_words(process)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    err = process.stderr.read()
    process.stderr.close()
    assert process.wait(timeout=60) != 0
    assert err == ""


@pytest.mark.parametrize("arguments", [["generate", "hello"], ["generate", "hello", "--json"], ["models"]], ids=str)
def test_a_full_disk_is_one_line(arguments: list[str]) -> None:
    with open("/dev/full", "w") as full:
        process = start(*arguments, stdout=full)
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (1, "error: cannot write the output: No space left on device\n")


def test_keys_that_cannot_be_read_are_named_once(tmp_path: Path, paceline: Callable[..., Result]) -> None:
    missing, binary = tmp_path / "missing", tmp_path / "binary"
    binary.write_bytes(b"\xff")
    for file in (missing, binary):
        result = paceline("serve", "--api-key-file", str(file))
        assert (field_of(result), result.err.count(str(file))) == ("api-key-file", 1)


def test_streams_may_be_closed() -> None:
    for closed in (0, 1, 2):
        process = start("generate", "hello", preexec_fn=lambda: os.close(closed), delay_s=0)  # noqa: B023
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0
        assert (out.startswith("word0"), err.startswith("5 tokens")) == (closed != 1, closed != 2)


def busy_s() -> float:
    """Processor seconds of processes that have ended, whatever else the machine does."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_help_imports_nothing_heavy_and_is_quick() -> None:
    probe = "import sys; from paceline.cli.app import run; run(['--help']); print(*sys.modules, file=sys.stderr)"
    marks = [busy_s()]
    for code in ("import typer.rich_utils", probe):
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=True)
        marks.append(busy_s())
    assert "generate" in done.stdout
    loaded = {name.split(".")[0] for name in done.stderr.split()}
    assert not loaded & {"torch", "transformers", "numpy", "huggingface_hub", "tokenizers", "safetensors"}
    assert marks[2] - marks[1] < 5 * (marks[1] - marks[0]), "two times the library's import, and torch ten"


COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]


@pytest.mark.parametrize("columns", [60, 80])
@pytest.mark.parametrize("command", COMMANDS)
def test_help_names_every_flag_in_full_and_shows_a_switch_without_a_type(
    command: str, columns: int, paceline: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    result = paceline(command, "--help")
    assert result.code == 0
    assert max(map(len, result.out.splitlines())) <= columns
    for cut in ("…", "<bool>", " range>"):
        assert cut not in result.out
    for parameter in COMMANDS[command].params:
        if parameter.param_type_name == "option":
            assert all(re.search(rf"{name}\b", result.out) for name in parameter.opts)
        assert len(parameter.metavar or "") <= 16, "it would be broken in mid-word"


@pytest.mark.parametrize("command", COMMANDS)
def test_help_says_what_each_flag_is_in_a_sentence_of_its_own(command: str) -> None:
    for parameter in COMMANDS[command].params:
        help = parameter.help
        assert help, parameter.name
        assert help.endswith("."), help
        assert len(help.split()) > 2, help
        assert not help.startswith(("Of ", "With commas")), help
        assert "[" not in help, "square brackets are markup"


def test_version(paceline: Callable[..., Result]) -> None:
    assert paceline("--version").out == f"paceline {__version__}\n"


@dataclass(frozen=True, kw_only=True)
class MinutesOptions:
    minutes: float = flag(1.0, "Minutes.", "MINUTES")


def test_a_flag_has_its_fields_name_whatever_its_metavar() -> None:
    """Typer 0.27 takes a metavar for the name where both are one word."""

    @with_options
    def command(*, options: MinutesOptions) -> None:
        pass

    (parameter,) = inspect.signature(command).parameters.values()
    assert parameter.annotation.__metadata__[0].param_decls == ("--minutes",)
