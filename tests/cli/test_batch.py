"""`paceline generate --prompts FILE --out FILE`: forms of lines, and a file that survives being killed."""

from __future__ import annotations

import json
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.app import run
from tests.helpers.fake_llm import FakeLLM, Result, start

URL = "/v1/chat/completions"


def batch_line(custom_id: str, content: str = "hello", url: str = URL, **body: Any) -> dict[str, Any]:
    asked = (
        {"prompt": content} if url.endswith("/v1/completions") else {"messages": [{"role": "user", "content": content}]}
    )
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {**asked, **body}}


def write(path: Path, *lines: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def job(tmp_path: Path, *lines: dict[str, Any]) -> tuple[list[str], Path]:
    """Write a file of prompts; return the command that answers it, and the file of answers."""
    file, out = write(tmp_path / "prompts.jsonl", *lines), tmp_path / "out.jsonl"
    return ["generate", "--prompts", str(file), "--out", str(out)], out


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# -- lines


def test_every_form_of_a_line_is_answered_in_the_order_of_the_file(tmp_path, paceline) -> None:
    talk = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "two words"}]
    command, out = job(
        tmp_path,
        {"prompt": "hello", "id": "my own"},
        {"messages": talk, "workload": "chat"},
        {"turns": ["first", "second"]},
        batch_line("a", max_tokens=2, temperature=0.5, logit_bias={"7": -1}, user="me", stream=False),
        batch_line("b", "raw text", url="/v1/completions", max_completion_tokens=1),
    )
    result = paceline(*command, "--seed", "3", "--temperature", "1")
    assert (result.code, result.out) == (0, "")
    assert result.err.splitlines()[-1].startswith(f"5 answers in {out} · 2 cut off by --max-tokens or the context · ")
    one, two, turns, chat, raw = read(out)
    assert (one["line"], one["prompt_id"], one["usage"]) == (1, "my own", {"prompt_tokens": 1, "completion_tokens": 5})
    assert one["choices"][0] == {
        "index": 0, "text": "word0 word1 word2 word3 word4", "finish_reason": "stop", "logprobs": None,
    }  # fmt: skip
    assert two["usage"]["prompt_tokens"] == 4
    assert [turn["usage"]["prompt_tokens"] for turn in turns["turns"]] == [1, 7]  # the first answer is in the second
    assert (chat["custom_id"], chat["error"], chat["response"]["status_code"]) == ("a", None, 200)
    body = chat["response"]["body"]
    assert (body["object"], body["model"]) == ("chat.completion", "smollm2")
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "word0 word1"}
    assert body["usage"] == {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}
    assert raw["response"]["body"]["choices"][0]["text"] == "word0"
    asked = {str(request): params for request, params in FakeLLM.requests}
    assert asked["raw text"].max_tokens == 1
    own = next(params for params in asked.values() if params.max_tokens == 2)
    assert (own.temperature, own.logit_bias, own.seed) == (0.5, {7: -1.0}, 3)  # its own, and the command line's


def test_plain_text_is_a_prompt_a_line_and_flags_apply_to_all(tmp_path: Path, paceline: Callable[..., Result]) -> None:
    prompts, out = tmp_path / "prompts.txt", tmp_path / "out.jsonl"
    prompts.write_text("first\n\nsecond one\n")
    flags = ["--system", "be brief", "--max-tokens", "3", "--n", "2", "--temperature", "1", "--json"]
    result = paceline("generate", "--prompts", str(prompts), "--out", str(out), *flags)
    assert (result.code, result.err) == (0, "")
    assert (result.json["answers"], result.json["failed"], result.json["completion_tokens"]) == (2, 0, 12)
    assert [(line["line"], len(line["choices"])) for line in read(out)] == [(1, 2), (3, 2)]
    assert all(request[0] == {"role": "system", "content": "be brief"} for request, _ in FakeLLM.requests)


def test_log_probabilities_are_in_the_file(tmp_path: Path, paceline: Callable[..., Result]) -> None:
    command, out = job(tmp_path, {"prompt": "hello"})
    assert paceline(*command, "--logprobs", "1").code == 0
    assert read(out)[0]["choices"][0]["logprobs"][0]["top_logprobs"][0]["token"] == "word1"


def test_a_prompt_that_cannot_be_answered_is_a_line_of_its_own(tmp_path: Path, paceline: Callable[..., Result]) -> None:
    command, out = job(tmp_path, {"prompt": "one two three"}, batch_line("a", "one two three"), {"prompt": "one"})
    result = paceline(*command, "--max-model-len", "3")
    assert (result.code, "2 could not be answered: see their error" in result.err) == (0, True)
    ours, theirs, fine = read(out)
    assert ours["error"]["type"] == theirs["error"]["code"] == "InvalidPrompt"
    assert theirs["response"]["status_code"] == 400
    assert "choices" in fine


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "line 2 of {file} is not JSON"),
        ({"text": "hello"}, "line 2 of {file} must be an object with one of prompt, messages, turns"),
        ({"prompt": " "}, "prompt must be some text"),
        (batch_line("a", temperature=-1), "line 2 of {file}: temperature: must be at least 0"),
        (batch_line("a", tools=[]), "tools is not honoured here"),
        (batch_line("a", stream=True), "stream is not honoured here"),
        (batch_line("a", logit_bias={"x": 1}), "line 2 of {file}: invalid literal"),
        (batch_line("a", model="gpt-4o"), "asks for model 'gpt-4o' and this run is of 'smollm2'"),
        (batch_line("a", url="/v1/embeddings"), "only POST to /v1/chat/completions or /v1/completions"),
        (batch_line("a", url="/v1/completions", prompt=["a", "b"]), "body needs prompt: one text, or its token ids"),
        (batch_line("same"), "a custom_id occurs twice"),
        ({"custom_id": 5, "body": {}, "url": URL}, "custom_id must be some text, got 5"),
    ],
)
def test_a_wrong_line_is_refused_before_anything_is_asked(line, reason, tmp_path, paceline) -> None:
    file, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    file.write_text(f"{json.dumps(batch_line('same'))}\n{line if isinstance(line, str) else json.dumps(line)}\n")
    result = paceline("generate", "--prompts", str(file), "--out", str(out))
    assert (result.code, result.err.count("\n")) == (1, 1)
    assert reason.format(file=file) in result.err
    assert not FakeLLM.created
    assert not out.exists()


@pytest.mark.parametrize(
    ("line", "flags", "reason"),
    [
        (batch_line("a"), ["--raw"], "leave --raw out"),
        (batch_line("a"), ["--system", "x"], "leave --system out"),
        (batch_line("a"), ["--logprobs", "2"], "leave --logprobs out"),
        ({"turns": ["a", "b"]}, ["--raw"], "leave --raw out"),
        ({"messages": [{"role": "system", "content": "x"}, {"role": "user", "content": "y"}]}, ["--system", "z"],
         "leave --system out"),
    ],
)  # fmt: skip
def test_a_flag_that_contradicts_a_line_is_refused(line, flags, reason, tmp_path, paceline) -> None:
    command, _ = job(tmp_path, line)
    result = paceline(*command, *flags)
    assert (result.code, reason in result.err) == (1, True)


@pytest.mark.parametrize(
    "arguments",
    [["--prompts", "a"], ["--out", "a"], ["hello", "--prompts", "a", "--out", "b"], []],
    ids=str,
)
def test_prompts_and_out_belong_together_and_stand_for_a_prompt(arguments, paceline) -> None:
    result = paceline("generate", *arguments)
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)


# -- the file


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("my notes\n", "line 1 of {file} is no result"),
        ("my notes", "the end of {file} is no result"),
        ('{"id": "0123456789abcdef", "line": 1}\n', "line 1 of {file} answers another prompt or has other settings"),
    ],
)
def test_a_file_that_is_not_this_runs_is_left_as_it_is(content, reason, tmp_path, paceline) -> None:
    command, out = job(tmp_path, {"prompt": "hello"})
    out.write_text(content)
    result = paceline(*command)
    assert (result.code, reason.format(file=out) in result.err) == (1, True)
    assert out.read_text() == content
    assert not FakeLLM.created


def test_other_settings_do_not_continue_a_file(tmp_path: Path, paceline: Callable[..., Result]) -> None:
    command, _ = job(tmp_path, {"prompt": "hello"})
    assert paceline(*command).code == 0
    target = ["-m", "other"], ["--dtype", "float32"], ["--activations", "int8"], ["--kv-dtype", "fp8"]
    for flags in (["--temperature", "0.3"], ["--raw"], ["--system", "x"], *target):
        assert "other settings" in paceline(*command, *flags).err, flags
    job(tmp_path, {"prompt": "hello"}, {"prompt": "one more"})  # prompts may be added
    assert "2 answers in" in paceline(*command).err
    assert len(FakeLLM.requests) == 2


@pytest.mark.parametrize("torn", [b"{", b'{"id": "', b'{"id": "0123", "line": 2, "choi'])
def test_a_torn_last_line_is_written_again(torn: bytes, tmp_path: Path, paceline: Callable[..., Result]) -> None:
    command, out = job(tmp_path, {"prompt": "a"}, {"prompt": "b"})
    paceline(*command)
    whole = out.read_bytes()
    first, _ = whole.splitlines(keepends=True)
    out.write_bytes(first + torn)
    assert "1 of them from an earlier run" in paceline(*command).err
    assert out.read_bytes() == whole
    assert len(FakeLLM.requests) == 3


def test_kill_9_loses_no_line_and_doubles_none(tmp_path: Path) -> None:
    number = 60
    lines = [batch_line(f"request {i}", max_tokens=1 + i) for i in range(number)]  # the i-th ends after i waits
    command, out = job(tmp_path, *lines)
    kept: list[str] = []
    for more in (5, 12, 20):
        process = start(*command, delay_s=0.05)
        while not out.exists() or out.read_bytes().count(b"\n") < len(kept) + more:
            assert process.poll() is None, process.communicate()
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        *whole, torn = out.read_text().split("\n")
        assert torn == ""
        assert whole[: len(kept)] == kept  # answers of earlier runs stand as they are
        assert len(kept) < len(whole) < number
        kept = whole
    process = start(*command, delay_s=0.001)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert f"{number} answers in {out} · {len(kept)} of them from an earlier run" in err
    results = read(out)
    assert [line["custom_id"] for line in results] == [line["custom_id"] for line in lines]  # in order, each once
    assert [line["response"]["body"]["usage"]["completion_tokens"] for line in results] == [*range(1, number + 1)]
    assert set(kept) <= set(out.read_text().split("\n"))


def test_a_second_run_on_the_same_file_is_refused(tmp_path: Path, paceline: Callable[..., Result]) -> None:
    command, out = job(tmp_path, batch_line("a", max_tokens=1), batch_line("b", max_tokens=900))
    process = start(*command, delay_s=0.05)
    while not out.exists() or not out.read_bytes():
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    try:
        result = paceline(*command)
        assert (result.code, "another run is writing" in result.err) == (1, True)
    finally:
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.splitlines()[-1].startswith(f"interrupted: 1 of 2 answers are in {out}; the same command goes on")


def test_a_full_disk_is_one_line_and_the_file_stays_whole(tmp_path: Path) -> None:
    command, out = job(tmp_path, *(batch_line(f"request {i}", max_tokens=1 + i) for i in range(40)))

    def small_files() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))

    process = start(*command, delay_s=0.01, preexec_fn=small_files)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    number = out.read_bytes().count(b"\n")
    assert out.read_bytes().endswith(b"\n")
    assert err.splitlines()[-1].startswith(f"error: cannot write {out}: File too large; {number} answers are in it")


def test_a_batch_gives_each_prompt_the_answer_it_has_alone(tmp_path: Path, smollm2_path: Path) -> None:
    from paceline import LLM, SamplingParams

    asked = ["The capital of France is", "One, two, three,", "Once upon a time", "def add(a, b):"]
    prompts, out = tmp_path / "prompts.txt", tmp_path / "out.jsonl"
    prompts.write_text("\n".join(asked))
    flags = ["--raw", "--max-tokens", "12", "--seed", "5", "--temperature", "0.8", "--json"]
    flags += ["-m", str(smollm2_path), "--dtype", "float32", "--device", "cpu"]
    assert run(["generate", "--prompts", str(prompts), "--out", str(out), *flags]) == 0
    params = SamplingParams(max_tokens=12, seed=5, temperature=0.8)
    with LLM(str(smollm2_path), dtype="float32", device="cpu") as llm:
        alone = [llm.generate(prompt, params)[0].outputs[0].text for prompt in asked]
    assert [line["choices"][0]["text"] for line in read(out)] == alone
