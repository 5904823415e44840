"""The rules of CONTRIBUTING that a reader of the syntax tree can check."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import paceline

SOURCE = Path(paceline.__file__).parent
TESTS = Path(__file__).parents[1]
FILES = sorted(SOURCE.rglob("*.py"))
MOST_FILES, MOST_LINES, LONG_FUNCTION, MOST_LONG_FUNCTIONS = 14, 450, 50, 10
MANY_FILES = {"models/families"}  # one file for each family
ROLES = {  # names of several files: the noun that a folder qualifies, as in verify/walk and verify/cuda/walk
    *(
        "__init__",
        "app",
        "batch",
        "capacity",
        "checkpoint",
        "client",
        "command",
        "config",
        "drafter",
        "errors",
        "export",
    ),
    *("graphs", "input", "kernels", "loop", "memory", "native", "run", "runner", "store", "subject", "table", "tree"),
    *("acceptance", "weights", "words", "block", "walk", "generate", "quantize"),
    *("draft_model", "dspark", "eagle", "medusa"),  # a trainee is named as its method
}
NO_OPENINGS = {"Of", "By", "What", "Those", "As", "That"}


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    yield from (node for node in ast.walk(tree_of(path)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def classes(path: Path) -> Iterator[ast.ClassDef]:
    yield from (node for node in ast.walk(tree_of(path)) if isinstance(node, ast.ClassDef))


def test_a_folder_has_few_files() -> None:
    for folder in {path.parent for path in FILES}:
        names = [path for path in folder.glob("*.py") if path.stem != "__init__"]
        assert len(names) <= MOST_FILES or str(folder.relative_to(SOURCE)) in MANY_FILES, folder


def test_a_file_is_short() -> None:
    assert not [path for path in FILES if len(path.read_text().splitlines()) > MOST_LINES]


def test_few_functions_are_long() -> None:
    long = [f"{path.name}:{node.name}" for path in FILES for node in functions(path) if lines_of(node) > LONG_FUNCTION]
    assert len(long) <= MOST_LONG_FUNCTIONS, long


def lines_of(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def test_class_names_are_unique() -> None:
    found = defaultdict(list)
    for path in FILES:
        for node in classes(path):
            found[node.name].append(str(path.relative_to(SOURCE)))
    assert not {name: paths for name, paths in found.items() if len(paths) > 1}


def test_file_names_repeat_for_roles_only() -> None:
    found = defaultdict(list)
    for path in FILES:
        found[path.stem].append(str(path.relative_to(SOURCE)))
    assert not {name: paths for name, paths in found.items() if len(paths) > 1 and name not in ROLES}


def test_docstrings_begin_with_a_verb_or_a_noun() -> None:
    found = []
    for path in FILES:
        for node in (tree_of(path), *functions(path), *classes(path)):
            opening = (ast.get_docstring(node) or "").split(maxsplit=1)[:1]
            if opening and opening[0].rstrip(",:") in NO_OPENINGS:
                found.append(f"{path.relative_to(SOURCE)}: {getattr(node, 'name', 'module')}")
    assert not found, "\n".join(found)


def test_no_field_is_made_by_getattr() -> None:
    """A module's `__getattr__` imports lazily; a class has its fields."""
    for path in FILES:
        for node in classes(path):
            methods = {each.name for each in node.body if isinstance(each, ast.FunctionDef)}
            assert "__getattr__" not in methods, f"{path.relative_to(SOURCE)}: {node.name}"


PREDICATES = ("is_", "has_", "can_")


def test_predicates_change_nothing() -> None:
    """A function whose name asks a question assigns to no attribute and returns a value."""
    found = []
    for path in FILES:
        for function in functions(path):
            if not function.name.startswith(PREDICATES):
                continue
            for node in ast.walk(function):
                targets = node.targets if isinstance(node, ast.Assign | ast.Delete) else []
                targets += [node.target] if isinstance(node, ast.AugAssign | ast.AnnAssign) else []
                if any(isinstance(target, ast.Attribute) for target in targets):
                    found.append(f"{path.relative_to(SOURCE)}: {function.name}")
    assert not found, found


@pytest.mark.parametrize("name", ["close"])
def test_closing_deletes_no_attribute(name: str) -> None:
    for path in FILES:
        for function in functions(path):
            deleted = [node for node in ast.walk(function) if isinstance(node, ast.Delete)]
            attributes = [each for node in deleted for each in node.targets if isinstance(each, ast.Attribute)]
            assert function.name != name or not attributes, path


def test_tests_read_no_private_name_of_another_package() -> None:
    """`from paceline.x import _y` and `paceline.x._y` belong to tests of x alone, and best to none."""
    found = []
    for path in sorted(TESTS.rglob("*.py")):
        own = path.relative_to(TESTS).parts[0]
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("paceline."):
                package = (node.module or "").split(".")[1]
                private = [alias.name for alias in node.names if alias.name.startswith("_")]
                if private and package != own:
                    found.append(f"{path.relative_to(TESTS)}: {node.module} {', '.join(private)}")
    assert not found, "\n".join(found)
