"""Bad input through the real command line and engine: one line with what to do, an exit code, no traceback."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.cli.app import run
from tests.helpers.tiny import save_tiny

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
MAMBA = {**TINY, "architectures": ["MambaForCausalLM"], "model_type": "mamba"}


def folder(path: Path, config: dict[str, object]) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    return path


def truncated_safetensors() -> bytes:
    """A header that promises an embedding of 32 × 8 floats, and only some of its bytes."""
    header = json.dumps({"model.embed_tokens.weight": {"dtype": "F32", "shape": [32, 8], "data_offsets": [0, 1024]}})
    return struct.pack("<Q", len(header)) + header.encode() + b"\0" * 100


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, str]:
    """Return the error object of --json, whose message is the one line printed without it."""
    assert run(arguments) == 1
    plain = capsys.readouterr()
    assert plain.out == ""
    assert plain.err.startswith("error: ")
    assert plain.err.count("\n") == 1
    assert run([*arguments, "--json"]) == 1
    error: dict[str, str] = json.loads(capsys.readouterr().out)["error"]
    assert error["message"] == plain.err.removeprefix("error: ").rstrip("\n")
    return error


@pytest.mark.parametrize("name", ["smollm3", "./nowhere", "nowhere.gguf"])
def test_no_such_model(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, "generate", "hello", "--model", name)["type"] == "ModelNotFound"


@pytest.mark.parametrize(
    ("config", "weights", "error", "names"),
    [
        (None, None, "BrokenModel", ["config.json"]),
        (TINY, None, "BrokenModel", ["model.safetensors"]),
        (TINY, truncated_safetensors(), "BrokenModel", ["model.safetensors"]),
        (MAMBA, None, "UnsupportedModel", ["mamba", "llama", "mistral", "qwen2", "qwen3"]),
    ],
    ids=["empty", "without weights", "truncated", "of another architecture"],
)
def test_a_folder_that_is_no_model(config, weights, error, names, tmp_path, capsys) -> None:
    path = tmp_path if config is None else folder(tmp_path / "model", config)
    if weights is not None:
        (path / "model.safetensors").write_bytes(weights)
    refusal = refused(capsys, "generate", "hello", "--model", str(path))
    assert refusal["type"] == error
    assert all(name in refusal["message"].lower() for name in names)


@pytest.mark.parametrize(
    "flags",
    [
        ["--drafter", "folder", "--method", "ngram"],
        ["--suffix-corpus", "nowhere.txt"],
        ["--dtype", "int3"],
        ["--device", "abacus"],
        ["--threads", "0"],
        ["--max-model-len", "0"],
        ["--max-model-len", "1000000"],
        ["--threads", "100000"],
        ["--logit-bias", "49152=1"],
        ["--top-k", str(2**63)],
        ["--n", "1000000", "--temperature", "1"],
        ["--suffix-corpus", "/dev/zero"],
        ["--speculative-config", '{"method": "ngram", "prompt_lookup_max": 1000000000}'],
    ],
    ids=" ".join,
)
def test_a_value_that_model_or_machine_refuses_names_its_field(flags, tiny_model, capsys) -> None:
    field = flags[0].removeprefix("--").replace("-", "_")
    assert refused(capsys, "generate", "hello", "--model", str(tiny_model), *flags)["field"] == field


def test_a_lossy_option_is_refused_by_its_own_name(capsys: pytest.CaptureFixture[str]) -> None:
    config = '{"method": "ngram", "posterior_threshold": 0.3}'
    error = refused(capsys, "generate", "hello", "--speculative-config", config)
    assert error["field"] == "speculative_config"
    assert "posterior_threshold" in error["message"]


def test_a_draft_model_that_is_not_there(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    error = refused(capsys, "generate", "hello", "--model", str(tiny_model), "--draft-model", "./nowhere")
    assert error["type"] == "ModelNotFound"


def test_a_draft_model_with_another_vocabulary(tiny_model, tmp_path, capsys) -> None:
    save_tiny("llama-tied", tmp_path)
    capsys.readouterr()  # saving draws a bar
    error = refused(capsys, "generate", "hello", "--model", str(tiny_model), "--draft-model", str(tmp_path))
    assert error["field"] == "draft_model"
    assert "another vocabulary" in error["message"]


def test_an_empty_prompt(capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, "generate", "")["type"] == "InvalidPrompt"


def test_a_prompt_longer_than_the_context(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    error = refused(capsys, "generate", "word " * 100, "--model", str(tiny_model), "--max-model-len", "64")
    assert error["type"] == "PromptTooLong"
    assert "64" in error["message"]


def process(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "paceline", *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


def is_one_line(done: subprocess.CompletedProcess[str]) -> bool:
    return done.returncode == 1 and done.stdout == "" and done.stderr.count("\n") == 1 and "error: " in done.stderr


def test_a_cache_folder_that_cannot_be_written(tmp_path: Path) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.write_text("")
    for home in (in_the_way, in_the_way / "below"):
        done = process("pull", "smollm2", PACELINE_HOME=str(home))
        assert is_one_line(done), done.stderr
        assert "PACELINE_HOME" in done.stderr
    found = process("doctor", "--json", PACELINE_HOME=str(home))
    assert found.returncode == 1
    assert any(finding["fatal"] for finding in json.loads(found.stdout)["findings"])


def test_no_network(tmp_path: Path) -> None:
    nowhere = "http://127.0.0.1:9"
    offline = {
        **dict.fromkeys(("HF_ENDPOINT", "HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), nowhere),
        "PIP_INDEX_URL": f"{nowhere}/simple",
        "PIP_EXTRA_INDEX_URL": "",
        "PIP_FIND_LINKS": "",
        "PIP_CONFIG_FILE": os.devnull,
        "PACELINE_HOME": str(tmp_path),
        "NO_PROXY": "",
        "no_proxy": "",
    }
    done = process("generate", "hello", **offline)
    assert is_one_line(done), done.stderr
    assert "network" in done.stderr
    left = [path for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".lock"]
    assert {path.name for path in left} <= {"amx.json"}, "no part of a model; a CPU with AMX was examined"
