"""Every odd value in every place where a caller may put one: taken, or refused by a PacelineError of one line."""

from __future__ import annotations

import decimal
import fractions
import inspect
from pathlib import Path

import numpy as np
import pytest
import torch

from paceline import LLM, PacelineError, SamplingParams
from paceline.config import EngineConfig, SpeculationConfig
from paceline.drafters.speculative_config import read
from tests.helpers.tiny import save_tiny


class Sullen:
    """It can neither be shown nor compared."""

    __hash__ = object.__hash__

    def __repr__(self):
        raise RuntimeError("no")

    def __eq__(self, other):
        raise RuntimeError("no")


def nested(depth: int) -> list[object]:
    value: list[object] = []
    for _ in range(depth):
        value = [value]
    return value


NUMBERS = [0, 1, -1, 2**31, 2**63, 2**64, 10**400, 10**5000, -(10**5000), 0.0, 1.5, 1e308, *map(float, ("nan", "inf"))]
NUMBERS += [
    decimal.Decimal(1),
    decimal.Decimal("nan"),
    fractions.Fraction(10**400, 3),
    1j,
    np.int64(3),
    np.float32(0.5),
]
TEXTS = ["", "x", "false", "\ud800", "\0", "a" * 5000, b"x", bytearray(b"x"), memoryview(b"x"), Path("x")]
ARRAYS = [np.array(5), np.array([5]), np.array([[5]]), np.array([1.5]), np.array(["x"]), np.array([]), torch.tensor(5)]
ARRAYS += [torch.tensor([5]), torch.tensor([1.5]), torch.tensor([]), [np.array(5)], [np.array([5])]]
LISTS = [
    [],
    [1],
    [None],
    ["x"],
    [""],
    [[]],
    [1.5],
    [True],
    ["\ud800"],
    (),
    (1,),
    {1},
    range(3),
    nested(3000),
    [[1], "x"],
]
DICTS = [{}, {"a": 1}, {1: 1}, {1: 10**400}, {10**5000: 1}, {-1: 1}, {"prompt": 1}, {"prompt_token_ids": "x"}]
DICTS += [[{}], [{"role": "user"}], [{"role": "user", "content": nested(3000)}], {"a": Sullen()}]
OTHERS = [None, True, False, np.bool_(True), object(), Sullen(), [Sullen()], Sullen, int, len, Ellipsis]
VALUES = [*NUMBERS, *TEXTS, *ARRAYS, *LISTS, *DICTS, *OTHERS]


def accepted(call) -> int:
    """How many of the values the call took; the others were refused with a sentence."""
    taken, sentences = 0, []
    for value in [*VALUES, iter([1]), (x for x in "ab")]:
        try:
            result = call(value)
        except PacelineError as refused:
            sentences.append(str(refused))
        else:
            taken += 1
            if hasattr(result, "close"):
                result.close()
    assert all("\n" not in sentence and len(sentence) < 400 for sentence in sentences)
    return taken


@pytest.mark.parametrize("field", inspect.signature(SamplingParams).parameters)
def test_a_sampling_parameter(field: str) -> None:
    assert accepted(lambda value: SamplingParams(**{field: value})) < len(VALUES) / 2


@pytest.mark.parametrize(
    ("config", "field"),
    [
        (config, field)
        for config in (EngineConfig, SpeculationConfig)
        for field in inspect.signature(config).parameters
        if field != "method"  # by `read`, below
    ],
)
def test_a_setting(config, field: str) -> None:
    method = {"method": "auto"} if config is SpeculationConfig else {}
    assert accepted(lambda value: config(**method, **{field: value})) < len(VALUES) / 2


@pytest.mark.parametrize("key", ["method", "model", "num_speculative_tokens", "prompt_lookup_min", "anything", None])
def test_a_speculative_config(key: str | None) -> None:
    base = SpeculationConfig(method="auto")
    assert accepted(lambda value: read(value if key is None else {key: value}, base)) < len(VALUES) / 4


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny("llama-tied", folder)
    template = "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}{{ mood }}{{ tools }}"
    (folder / "chat_template.jinja").write_text(template)
    with LLM(folder, device="cpu", threads=1, kv_cache_bytes=4 << 20, max_model_len=64) as llm:
        yield llm


SHORT = SamplingParams(max_tokens=2)
HELLO = {"role": "user", "content": "w5"}
CALLS = {
    "a prompt": lambda llm, value: llm.generate(value, SHORT),
    "one of two prompts": lambda llm, value: llm.generate(["w5", value], SHORT),
    "a token": lambda llm, value: llm.generate([5, value], SHORT),
    "a streamed prompt": lambda llm, value: llm.stream(value, SHORT),
    "parameters": lambda llm, value: llm.generate([5], value),
    "a list of parameters": lambda llm, value: llm.generate([5], [value]),
    "messages": lambda llm, value: llm.chat(value, SHORT),
    "content": lambda llm, value: llm.chat([{"role": "user", "content": value}], SHORT),
    "a part": lambda llm, value: llm.chat([{"role": "user", "content": [{"type": "text", "text": value}]}], SHORT),
    "a role": lambda llm, value: llm.chat([{"role": value, "content": "w5"}], SHORT),
    "more of a message": lambda llm, value: llm.chat([{**HELLO, "more": value}], SHORT),
    "a variable": lambda llm, value: llm.chat([HELLO], SHORT, chat_template_kwargs={"mood": value}),
    **{
        option: lambda llm, value, option=option: llm.chat([HELLO], SHORT, **{option: value})
        for option in (
            "tools",
            "chat_template",
            "chat_template_kwargs",
            "continue_final_message",
            "use_tqdm",
            "priority",
        )
    },
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call(name: str, llm: LLM) -> None:
    assert accepted(lambda value: CALLS[name](llm, value)) < len(VALUES)
    assert llm.call(lambda engine: not engine.has_work)
