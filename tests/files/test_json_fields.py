"""Every reader of a JSON object: its value, its default, and an error that names the file and the key."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import BrokenModel, UnsupportedModel
from paceline.files.json_fields import JsonFields, read_json

Read = Callable[[JsonFields], Any]

READERS: dict[str, tuple[Read, list[Any], list[Any]]] = {  # values that are read, values that are refused
    "integer": (lambda fields: fields.integer("x"), [1, 7, 2**31 - 1], [0, -1, 2**31, 1.0, True, "7", [7]]),
    "integer from 0": (lambda fields: fields.integer("x", least=0, most=3), [0, 3], [-1, 4, False]),
    "number": (lambda fields: fields.number("x"), [1, 0.5], [0, -1.0, float("inf"), float("nan"), True, "1.0"]),
    "flag": (lambda fields: fields.flag("x"), [True, False], ["false", 0, 1, []]),
    "text": (lambda fields: fields.text("x"), ["a", ""], [1, ["a"], {}]),
    "names": (lambda fields: list(fields.names("x")), [["a"], []], ["a", [1], {"a": 1}]),
    "integers": (lambda fields: list(fields.integers("x", "layers")), [[0, 3], []], [[-1], [True], "3", [1.0]]),
    "section": (lambda fields: fields.section("x").values, [{"y": 1}, {}], [[], "y", 5]),
}


@pytest.mark.parametrize("name", READERS)
def test_a_reader_takes_values_of_its_type_and_names_the_key_of_others(name: str) -> None:
    read, valid, invalid = READERS[name]
    for value in valid:
        assert read(JsonFields({"x": value}, "config.json")) == value
    for value in invalid:
        with pytest.raises(BrokenModel) as caught:
            read(JsonFields({"x": value}, "config.json", "{} of section"))
        assert str(caught.value).startswith("config.json: x of section must be ")


def test_a_key_that_is_absent_or_null_has_its_default_or_is_missing() -> None:
    for values in ({}, {"x": None}):
        fields = JsonFields(values, "config.json")
        assert (fields.integer("x", 5), fields.number("x", 2.5), fields.flag("x", True)) == (5, 2.5, True)
        assert (fields.flag("x"), fields.names("x"), fields.integers("x", "ids"), fields.section("x").values) == (
            *(False, (), ()),
            {},
        )
        for read in (fields.integer, fields.number):
            with pytest.raises(BrokenModel) as caught:
                read("x")
            assert str(caught.value) == "config.json: the key x is missing"


def test_one_integer_is_a_list_of_one() -> None:
    assert JsonFields({"x": 4}, "config.json").integers("x", "ids") == (4,)


def test_an_option_is_refused_unless_it_is_neutral() -> None:
    fields = JsonFields({"scale": 1.0, "experts": None, "cap": 30.0}, "config.json")
    fields.refuse_options({"scale": 1.0, "experts": None, "absent": 0})
    with pytest.raises(UnsupportedModel) as caught:
        fields.refuse_options({"cap": None})
    assert str(caught.value) == "config.json: the option cap is not supported"


def test_a_file_without_an_object_is_named(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    assert read_json(path, {}) == {}
    with pytest.raises(BrokenModel) as caught:
        read_json(path, hint=lambda folder: f"; look in {folder.name}")
    assert str(caught.value) == f"{tmp_path} holds no config.json; look in {tmp_path.name}"
    for text in ("[1]", "{", "\xff", "[" * 100_000):
        path.write_bytes(text.encode("latin-1"))
        with pytest.raises(BrokenModel) as caught:
            read_json(path, {})
        assert str(caught.value).startswith(str(path))
    path.write_text('{"a": 1}')
    assert read_json(path) == {"a": 1}
