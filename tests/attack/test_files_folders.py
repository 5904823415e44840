"""Folders and files of hostile models: what is no file, too large, twice there or a trap is refused, in one line."""

from __future__ import annotations

import json
import os
import random
import re
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from paceline import LLM
from paceline.errors import BrokenModel, ModelError, PacelineError
from paceline.files.gguf import GGUFFile
from paceline.files.patterns import WrongPattern, compiled
from paceline.files.safetensors_reader import SafetensorsFile
from paceline.models.load.hf_folder import TensorFiles
from paceline.models.load.hub import resolve
from paceline.models.load.loader import load_config, load_weights
from paceline.models.load.quantized_config import parse_quantization
from paceline.text.tokenizer import Tokenizer
from tests.helpers.tiny_model import CONFIG, write_tiny_model

JSON_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tiny_model(tmp_path, resolve("smollm2"))
    return tmp_path


def read_all(folder: Path) -> None:
    config = load_config(folder)
    for weight in load_weights(folder, config).values():
        assert weight.data is not None
    Tokenizer.from_path(folder).encode("Hello")


@pytest.mark.parametrize("name", [*JSON_FILES, "chat_template.jinja", "model.safetensors"])
@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_what_is_no_regular_file_is_refused_at_once(name: str, kind: str, folder: Path) -> None:
    read_all(folder)
    (folder / name).unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(folder / name)
    elif kind == "device":
        (folder / name).symlink_to("/dev/zero")
    else:
        (folder / name).mkdir()
    began = time.monotonic()
    with pytest.raises(PacelineError) as caught:
        read_all(folder)
    assert time.monotonic() - began < 5
    assert "\n" not in str(caught.value)
    assert name in str(caught.value)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "chat_template.jinja"])
def test_a_file_beyond_its_size_is_not_read(name: str, folder: Path) -> None:
    with (folder / name).open("wb") as file:
        file.truncate(1 << 40)  # takes no space
    with pytest.raises(PacelineError):
        read_all(folder)


def test_a_link_to_a_regular_file_is_read(folder: Path) -> None:
    (folder / "config.json").rename(folder / "elsewhere.json")
    (folder / "config.json").symlink_to(folder / "elsewhere.json")
    read_all(folder)


def test_two_shards_with_one_tensor_are_refused(folder: Path) -> None:
    file = SafetensorsFile(folder / "model.safetensors")
    shards = [{}, {}]
    for at, name in enumerate(file.headers):
        shards[at % 2][name] = file.read(name)
    (twice,) = list(shards[0])[:1]
    (folder / "model.safetensors").unlink()
    index = {name: f"part-{at}.safetensors" for at in (0, 1) for name in shards[at]}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    for at in (0, 1):
        save_file(shards[at], folder / f"part-{at}.safetensors")
    read_all(folder)
    save_file(shards[1] | {twice: shards[0][twice]}, folder / "part-1.safetensors")
    with pytest.raises(BrokenModel) as caught:
        TensorFiles(folder)
    assert twice in str(caught.value)


def test_two_keys_of_a_gguf_file_with_one_name_are_refused(tmp_path: Path) -> None:
    def entry(name: bytes) -> bytes:
        return struct.pack("<Q", len(name)) + name + struct.pack("<II", 4, 7)

    for names, fits in (((b"a", b"b"), True), ((b"a", b"a"), False)):
        body = b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + b"".join(map(entry, names))
        (tmp_path / "m.gguf").write_bytes(body + bytes(64))
        if fits:
            assert GGUFFile(tmp_path / "m.gguf").metadata == {"a": 7, "b": 7}
        else:
            with pytest.raises(BrokenModel):
                GGUFFile(tmp_path / "m.gguf")


def test_a_tensor_of_a_gguf_file_without_numbers_is_refused(tmp_path: Path) -> None:
    table = struct.pack("<Q", 1) + b"a" + struct.pack("<IQQIQ", 2, 8, 0, 0, 0)
    start = b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + table
    (tmp_path / "m.gguf").write_bytes(start + bytes(64))
    with pytest.raises(BrokenModel):
        GGUFFile(tmp_path / "m.gguf")


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True}


@pytest.mark.parametrize("wrong", [5, "lm_head", {"lm_head": 1}, [1], [["lm_head"]]])
def test_layers_that_are_not_converted_are_a_list_of_names(wrong: Any) -> None:
    parse_quantization({"quantization_config": AWQ | {"modules_to_not_convert": ["lm_head"]}}, "config.json")
    parse_quantization({"quantization_config": AWQ | {"modules_to_not_convert": None}}, "config.json")
    with pytest.raises(BrokenModel):
        parse_quantization({"quantization_config": AWQ | {"modules_to_not_convert": wrong}}, "config.json")


def _compressed(**fields: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "group_size": 32, "strategy": "group"}}
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"g": group}}
    return {"quantization_config": config | fields}


TRAPS = ("(a+)+$", "(a*)*b", "(.*a.*)*b", "(a|aa)+$", "a?" * 60 + "a" * 60, "(a{0,999}){0,999}c", ".*a" * 30 + "b")


@pytest.mark.parametrize("trap", TRAPS)
def test_a_pattern_that_python_would_match_for_years_is_matched_at_once(trap: str) -> None:
    began = time.thread_time()
    found = parse_quantization(_compressed(ignore=[f"re:{trap}"]), "config.json")
    assert found is not None
    for layer in range(300):
        found.scheme_of(f"model.layers.{layer}." + "a" * 60 + "!")
    found.scheme_of("a" * 60 + "!")
    assert time.thread_time() - began < 5


@pytest.mark.parametrize("wrong", ["(", "[a", "a**", "(?i)a", r"\1", "((((a*)*)*)*)*", "a" * 5000, "(" * 30 + ")" * 30])
def test_a_pattern_that_is_not_read_is_refused_by_name(wrong: str) -> None:
    with pytest.raises(BrokenModel):
        parse_quantization(_compressed(ignore=[f"re:{wrong}"]), "config.json")
    with pytest.raises(BrokenModel):
        parse_quantization(_compressed(ignore=["re:a"] * 1000), "config.json")


def test_patterns_match_what_python_matches() -> None:
    """Random patterns on short names, where backtracking ends."""
    rng, names = random.Random(0), ["lm_head", "layers", "a", "aa", "aab", "", "x.y\n", "a.b1"]

    def pattern(depth: int) -> str:
        if depth == 0:
            return rng.choice(["a", "b", ".", r"\.", "[ab]", "[^a]", r"\d", r"\w", "lay", "^", "$", r"\b", "x", r"\Z"])
        part, kind = pattern(depth - 1), rng.randrange(4)
        if kind == 0:
            return f"({part}|{pattern(depth - 1)})"
        if kind == 1:
            return part + pattern(depth - 1)
        if kind == 2:
            return f"(?{rng.choice('=!')}{part})"
        return f"(?:{part})" + rng.choice(["*", "+", "?", "{2}", "{1,3}", "{0,2}?", "*?"])

    compared = 0
    for _ in range(1500):
        text = pattern(rng.randint(0, 4))
        try:
            matches = compiled(text)
        except WrongPattern:  # repetitions are nested too deep
            continue
        compared += 1
        for name in names:
            assert matches(name) == bool(re.match(text, name)), (text, name)
    assert compared > 1300


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": float("inf")},
        {"temperature": -1},
        {"temperature": True},
        {"top_p": 7},
        {"top_k": 1e300},
        {"repetition_penalty": 0, "temperature": 1},
        {"do_sample": 1},
        {"eos_token_id": 10**5000},
        {"eos_token_id": -1},
    ],
)
def test_generation_defaults_out_of_range_are_the_files_fault_at_load(wrong: dict[str, Any], folder: Path) -> None:
    text = json.dumps(wrong) if "eos_token_id" not in wrong else '{"eos_token_id": %s}' % ("9" * 5000)
    (folder / "generation_config.json").write_text(text.replace("Infinity", "1e999"))
    with pytest.raises(BrokenModel) as caught:
        load_config(folder)  # reads the defaults, for the end-of-text ids
    assert "generation_config.json" in str(caught.value)
    assert len(str(caught.value)) < 600


def _changed(folder: Path, change: Callable[[dict[str, Any]], None], name: str = "tokenizer.json") -> None:
    body = json.loads((folder / name).read_text())
    change(body)
    (folder / name).write_text(json.dumps(body))


def _split(regex: str) -> Callable[[dict[str, Any]], None]:
    part = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
    return lambda body: body.update(pre_tokenizer=part)


def _replace(regex: str) -> Callable[[dict[str, Any]], None]:
    return lambda body: body.update(normalizer={"type": "Replace", "pattern": {"Regex": regex}, "content": "x"})


def _added(count: int) -> Callable[[dict[str, Any]], None]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    return lambda body: body.update(
        added_tokens=[{"id": 49152 + at, "content": f"<t{at}>", **flags} for at in range(count)]
    )


TOKENIZERS: dict[str, Callable[[dict[str, Any]], None]] = {
    "a split that goes back and forth": _split("(a+)+$"),
    "another one": _split(r"(\w+\s?)*$"),
    "a normalizer that goes back and forth": _replace("(a*)*b"),
    "200,000 added tokens": _added(200_000),
    "merges outside of the vocabulary": lambda body: body["model"].update(merges=[["qqqq", "zzzzz"]]),
    "an unknown token that is missing": lambda body: body.update(
        model={"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "<unk>"}, added_tokens=[]
    ),
    "a pattern that is none": _split("("),
    "no model": lambda body: body.pop("model"),
}


@pytest.mark.parametrize("case", TOKENIZERS)
def test_a_hostile_tokenizer_is_refused_when_it_is_loaded(case: str, folder: Path) -> None:
    _changed(folder, TOKENIZERS[case])
    began = time.thread_time()
    with pytest.raises(ModelError) as caught:
        Tokenizer.from_path(folder)
    assert time.thread_time() - began < 5
    assert "\n" not in str(caught.value)


def test_added_tokens_of_the_config_are_bounded_and_keep_their_order(folder: Path) -> None:
    name, flags = "tokenizer_config.json", {"special": True}
    _changed(
        folder,
        lambda body: body.update(
            added_tokens_decoder={str(60_000 + at): {"content": f"<n{at}>", "special": at % 3 == 0} for at in range(9)}
        ),
        name,
    )
    tokenizer = Tokenizer.from_path(folder)
    numbers = [tokenizer.encode(f"<n{at}>") for at in range(9)]
    assert numbers == [[numbers[0][0] + at] for at in range(9)]
    for wrong in ({"9" * 5000: {"content": "<x>"}}, {str(at): {"content": f"<{at}>", **flags} for at in range(99_999)}):
        _changed(folder, lambda body, wrong=wrong: body.update(added_tokens_decoder=wrong), name)  # type: ignore[misc]
        with pytest.raises(BrokenModel):
            Tokenizer.from_path(folder)


def test_a_token_id_beyond_32_bits_is_refused_where_it_is_decoded(smollm2: LLM) -> None:
    for wrong in ([1 << 40], [-1], [10**5000]):
        with pytest.raises(PacelineError):
            smollm2.tokenizer.decode(wrong)


def test_the_config_of_the_tiny_model_is_read(folder: Path) -> None:
    assert load_config(folder).vocab_size == CONFIG["vocab_size"]
    assert torch.isfinite(load_weights(folder, load_config(folder))["model.norm.weight"].data).all()
