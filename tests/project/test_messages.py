"""Every error message that a user can get, read from the source and compared with `messages.txt`.

Tests elsewhere assert an error's class and `.field` only. After a message was changed on purpose:

    python -m tests.project.test_messages --write
"""

from __future__ import annotations

import ast
import difflib
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "paceline"
GOLDEN = Path(__file__).with_name("messages.txt")
BASES = {"PacelineError", "BadParameter", "VllmArgument"}  # also typer's error and the table of vLLM's arguments


def trees() -> dict[str, ast.Module]:
    """Return the syntax trees of the package by module."""
    return {
        ".".join(path.relative_to(SOURCE).with_suffix("").parts): ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted(SOURCE.rglob("*.py"))
    }


def error_names(modules: list[ast.Module]) -> set[str]:
    """Return the error classes, and the functions that are annotated to return one."""
    nodes = [node for tree in modules for node in ast.walk(tree) if isinstance(node, ast.ClassDef | ast.FunctionDef)]
    bases = {node.name: {_name(base) for base in node.bases} for node in nodes if isinstance(node, ast.ClassDef)}
    classes, before = set(BASES), 0
    while len(classes) > before:
        before = len(classes)
        classes |= {name for name, own in bases.items() if classes & own}
    functions = (node for node in nodes if isinstance(node, ast.FunctionDef) and node.returns is not None)
    return classes | {node.name for node in functions if _name(node.returns) in classes}


def messages(tree: ast.Module, names: set[str]) -> Iterator[str]:
    """Yield the calls of `names` with their texts; `{}` stands for a value."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _name(node.func) in names:
            texts = [_template(value) for value in (*node.args, *(keyword.value for keyword in node.keywords))]
            if any(text != "{}" for text in texts):
                yield f"{_name(node.func)}: {': '.join(texts)}"


def _name(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):  # a quoted annotation
        return node.value
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _template(node: ast.expr) -> str:
    match node:
        case ast.Constant(value=str(text)):
            return text.replace("\n", "\\n")
        case ast.JoinedStr(values=values):
            return "".join(map(_template, values))
        case ast.FormattedValue(value=value):
            return _template(value) if isinstance(value, ast.IfExp) else "{}"
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _template(left) + _template(right)
        case ast.IfExp(body=body, orelse=orelse):
            return f"{{{_template(body)}|{_template(orelse)}}}"
    return "{}"


def collected() -> str:
    modules = trees()
    names = error_names(list(modules.values()))
    lines = {f"{module}: {message}" for module, tree in modules.items() for message in messages(tree, names)}
    return "\n".join(sorted(lines)) + "\n"


def test_messages_are_the_written_ones() -> None:
    written, current = GOLDEN.read_text(encoding="utf-8").splitlines(), collected().splitlines()
    changed = "\n".join(difflib.unified_diff(written, current, "messages.txt", "source", n=0, lineterm=""))
    assert not changed, f"{changed}\n\npython -m tests.project.test_messages --write, if this is meant"


def test_classes_functions_and_holes_are_seen() -> None:
    tree = ast.parse(
        "class Late(errors.PacelineError): ...\n"
        "def late(name: str) -> Late: return Late('too ' + ('late' if name else 'early'), field=name)\n"
        "raise late(f'by {day} days')\n"
        "raise ValueError('no error of ours')\n"
    )
    names = error_names([tree])
    assert names >= {"Late", "late"}
    assert sorted(messages(tree, names)) == ["Late: too {late|early}: {}", "late: by {} days"]


if __name__ == "__main__" and sys.argv[1:] == ["--write"]:
    GOLDEN.write_text(collected(), encoding="utf-8")
