"""The METHODS table: what it promises, and that no other file spells a method's name."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

import paceline
from paceline.config import AUTO, NONE, SpeculationConfig
from paceline.drafters.base import DrafterContext
from paceline.drafters.method_names import by_vllm_name, drafter_specs, matches_method
from paceline.drafters.methods import DFLASH, DRAFT_MODEL, GRAMMAR, MEDUSA, METHODS, NGRAM, SUFFIX
from paceline.drafters.speculative_config import FIELD, check, read
from paceline.errors import InvalidParameter
from paceline.testing import toy_config
from tests.helpers.errors import refused

SOURCE = Path(paceline.__file__).parent
TABLE, NO_METHODS = "drafters/methods.py", "config.py"
STRUCTURED = ("text/", "server/api/")  # "grammar" is a kind of structured output there
ABOUT_METHODS = ("method", "methods", "speculation")  # names beside which "none" and "auto" are methods


def spelt_names(tree: ast.Module) -> Iterator[str]:
    """Method names written as literals, alone or in a list such as a|b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from (word for word in node.value.split("|") if word in METHODS)


def spelt_choices(tree: ast.Module) -> Iterator[str]:
    """The literals "none" and "auto" as the value, default or comparison of something named after a method."""

    def literal(node: ast.AST | None) -> bool:
        return isinstance(node, ast.Constant) and node.value in (NONE, AUTO)

    def about(node: ast.AST) -> bool:
        name = getattr(node, "attr", None) or getattr(node, "id", None) or getattr(node, "arg", None)
        return name in ABOUT_METHODS

    for node in ast.walk(tree):
        if isinstance(node, ast.keyword | ast.AnnAssign | ast.Assign):
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", node)]
            if literal(node.value) and any(map(about, targets)):
                yield ast.unparse(node)
        elif isinstance(node, ast.Compare) and any(map(about, (node.left, *node.comparators))):
            yield from (ast.unparse(node) for side in (node.left, *node.comparators) if literal(side))
        elif isinstance(node, ast.arguments):
            named = [*node.posonlyargs, *node.args][-len(node.defaults) :] if node.defaults else []
            pairs = [*zip(named, node.defaults, strict=True), *zip(node.kwonlyargs, node.kw_defaults, strict=True)]
            yield from (name.arg for name, default in pairs if about(name) and literal(default))


def test_no_other_file_spells_a_method() -> None:
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        name = path.relative_to(SOURCE).as_posix()
        tree = ast.parse(path.read_text())
        spelt = [*([] if name == TABLE else spelt_names(tree)), *([] if name == NO_METHODS else spelt_choices(tree))]
        spelt = [word for word in spelt if word != GRAMMAR or not name.startswith(STRUCTURED)]
        if spelt:
            found[name] = spelt
    assert not found


def test_the_rule_would_notice() -> None:
    for code in ('x = "ngram"', 'f(metavar="auto|draft-model")', 'if method in ("suffix",): pass'):
        assert list(spelt_names(ast.parse(code))), code
    for code in (
        'f(method="none")',
        'a.method == "auto"',
        "class A:\n method: str = 'auto'",
        'def f(method="none"): pass',
    ):
        assert list(spelt_choices(ast.parse(code))), code
    assert not list(spelt_choices(ast.parse('def f(dtype="auto", device="auto"): return x == "none"')))


def test_every_option_is_a_field_and_every_need_an_option() -> None:
    known = {field.name for field in fields(SpeculationConfig)}
    for name, method in METHODS.items():
        assert method.name == name
        assert set(method.options) <= known
        assert set(method.needs) <= set(method.options)


@pytest.mark.parametrize(
    "name", [name for name, method in METHODS.items() if not method.needs and not method.only_by_name]
)
def test_a_drafter_carries_the_name_it_is_made_by(name: str) -> None:
    context = DrafterContext(toy_config(11), torch.device("cpu"), SpeculationConfig(method=name))
    assert METHODS[name].make(context).name == name


def test_methods_are_available_once_their_needs_are_met() -> None:
    assert drafter_specs(SpeculationConfig()) == []
    names = [method.name for method in drafter_specs(SpeculationConfig(method=AUTO))]
    assert (NGRAM in names, SUFFIX in names, DRAFT_MODEL in names) == (True, True, False)
    assert DRAFT_MODEL in [each.name for each in drafter_specs(SpeculationConfig(method=NGRAM, draft_model=("small",)))]


def test_several_drafters_of_a_method_have_names_of_their_own(tmp_path: Path) -> None:
    folders = [tmp_path / "a" / "head", tmp_path / "b" / "head", tmp_path / "c"]
    for folder, raw in zip(
        folders, ({"medusa_num_heads": 2}, {"medusa_num_heads": 1}, {"dflash_config": {}}), strict=True
    ):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(raw))
    wanted = drafter_specs(SpeculationConfig(method=AUTO, draft_model=("x/small", "other")), folders)
    names = {each.name: each.source for each in wanted if each.method.needs}
    assert names == {
        f"{DRAFT_MODEL}:small": "x/small",
        f"{DRAFT_MODEL}:other": "other",
        f"{MEDUSA}:head": folders[0],
        f"{MEDUSA}:head-2": folders[1],
        DFLASH: folders[2],
    }
    numbered = drafter_specs(SpeculationConfig(method=AUTO, draft_model=("a/m-2", "b/m", "c/m", "none/m-2")), [])
    assert len({each.name for each in numbered}) == len(numbered)
    assert not any(each.method.needs for each in drafter_specs(SpeculationConfig(method=AUTO, draft_model=(NONE,)), []))
    assert matches_method(f"{DRAFT_MODEL}:small", DRAFT_MODEL)
    assert matches_method(f"{DRAFT_MODEL}:small", f"{DRAFT_MODEL}:small")
    assert not matches_method(f"{DRAFT_MODEL}:small", f"{DRAFT_MODEL}:other")


@pytest.mark.parametrize(
    ("field", "value"), [("draft_model", ("a", "b", "a")), ("drafter", ("a", NONE)), ("drafter", 7)]
)
def test_drafters_that_contradict_each_other_are_refused(field: str, value: Any) -> None:
    with refused(field):
        SpeculationConfig(method=AUTO, **{field: value})


@pytest.mark.parametrize(
    ("given", "only_chosen", "field"),
    [
        ({"method": "magic"}, False, "method"),
        ({"method": DRAFT_MODEL}, False, "draft_model"),
        ({"method": NONE, "suffix_store": "file"}, False, "suffix_store"),
        ({"method": NGRAM, "suffix_store": "file"}, True, "suffix_store"),
        ({"method": SUFFIX, "ngram_max": 4}, True, "ngram_max"),
    ],
)
def test_an_option_without_effect_is_refused(given: dict[str, object], only_chosen: bool, field: str) -> None:
    with refused(field):
        check(SpeculationConfig(**given), only_chosen=only_chosen)  # type: ignore[arg-type]


def test_options_of_other_methods_are_fine_where_requests_may_choose() -> None:
    check(SpeculationConfig(method=NGRAM, suffix_store="file", draft_model=("small",)))
    check(SpeculationConfig(method=AUTO, suffix_store="file", draft_model=("small",)), only_chosen=True)


@pytest.mark.parametrize("method", [method for method in METHODS.values() if method.vllm], ids=lambda each: each.name)
def test_vllms_spelling_is_understood(method) -> None:
    given = {"method": method.vllm, "num_speculative_tokens": 3} | ({"model": "small"} if method.needs else {})
    meant = read(given, SpeculationConfig(method=AUTO))
    assert (meant.method, meant.k) == (method.name, 3)
    assert all(getattr(meant, need) == ("small",) for need in method.needs)
    assert by_vllm_name(method.name) is method


def test_a_list_of_vllms_settings_names_several_drafters() -> None:
    base = SpeculationConfig(method=AUTO)
    meant = read([{"model": "a"}, {"model": "b"}], base)
    assert (meant.method, meant.draft_model, meant.drafter) == (DRAFT_MODEL, ("a", "b"), ())
    meant = read('[{"method": "medusa", "model": "head"}, {"model": "a"}, {"method": "suffix"}]', base)
    assert (meant.method, meant.draft_model, meant.drafter) == (AUTO, ("a",), ("head",))
    meant = read([{"model": "a"}, {"method": "ngram", "prompt_lookup_max": 3}], base)
    assert (meant.drafter, meant.ngram_max) == ((NONE,), 3), "no packaged drafter beside those that are named"
    assert read([{"method": "ngram", "num_speculative_tokens": 3}], base).k == 3
    for wrong, field in (
        ([], "speculative_config"),
        ([{"method": "ngram"}, "suffix"], "speculative_config"),
        ([{"method": "ngram"}, {"method": "ngram"}], "speculative_config"),
        ([{"model": "a"}, {"model": "a"}], "draft_model"),
        ([{"method": "ngram"}, {}], "speculative_config"),
        ([{"method": "medusa", "model": "a"}, {"method": "medusa"}], "speculative_config"),
        ([{"model": "a", "num_speculative_tokens": 3}, {"method": "suffix"}], "speculative_config"),
    ):
        with refused(field):
            read(wrong, base)  # type: ignore[arg-type]


def test_vllms_settings_are_understood_and_lossy_options_are_refused_by_name() -> None:
    base = SpeculationConfig(method=AUTO)
    meant = read('{"method": "ngram", "num_speculative_tokens": 6, "prompt_lookup_max": 4}', base)
    assert (meant.method, meant.k, meant.ngram_max) == (NGRAM, 6, 4)
    assert read({"model": "smollm2"}, base).method == DRAFT_MODEL
    assert read({"prompt_lookup_max": 1}, base).ngram_min == 1
    given = {"method": "dspark", "model": "b", "num_speculative_tokens": 4}
    for beside in ({"drafter": "a"}, {"method": AUTO, "k": 3}, {"method": SUFFIX}):
        with pytest.raises(InvalidParameter):
            read(given, SpeculationConfig(**beside))
    for wrong, named in (
        ({"posterior_threshold": 0.1}, "posterior_threshold"),
        ({"method": "mlp_speculator"}, "mlp_speculator"),
        ({"method": ["ngram"]}, "ngram"),
        ({"method": NONE}, NONE),
        ({"method": SUFFIX, "prompt_lookup_max": 3}, "prompt_lookup_max"),
        ({"method": NGRAM, "model": "smollm2"}, "model"),
        ({"warp": 9}, "'warp'"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens"),
        ({"num_speculative_tokens": "many"}, "num_speculative_tokens"),
        ("{", "JSON"),
        ("[]", "empty"),
    ):
        with refused(FIELD) as caught:
            read(wrong, base)  # type: ignore[arg-type]
        assert named in str(caught.value)
