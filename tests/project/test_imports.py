"""Arrows point one way: the package's imports are read from its source, lazy and type-only ones included."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import paceline

SOURCE = Path(paceline.__file__).parent

# A unit is a folder or a lone module under paceline/. It may import units of a lower rank; those that share rank 0 may
# also import one another, as long as no cycle comes of it.
RANKS: list[set[str]] = [
    {
        *("errors", "config", "sampling_params", "outputs", "vllm_compat", "inputs"),
        *("core", "files", "platform", "native", "text", "theory"),
    },
    {"models", "verify"},
    {"drafters"},
    {"engine"},
    {"build", "client"},
    {"llm"},
    {"async_llm"},
    {"server", "bench", "prove", "training"},
    {"advisor"},
    {"cli"},
]
RANK = {unit: rank for rank, units in enumerate(RANKS) for unit in units}
PUBLIC = "__init__"  # the package itself: looks its names up lazily, so any module may import __version__
ENTRY = "__main__"
TOYS = "testing"  # toy models for tests: nothing in src may lean on them
VERIFY_MAY_IMPORT = {"torch", "triton", "numpy", "verify", "core", "platform", "native", "errors"}
METADATA_MAY_IMPORT = {"sampling_params", "text"}  # verify.metadata alone: it turns requests into tensors
NO_TORCH = (
    "errors",
    "config",
    "sampling_params",
    "outputs",
    "vllm_compat",
    "inputs",
    "client",
    "engine.events",
    "server.app",
    "files",
    "platform.cpu",
    "theory",
    "models.load.hub",
    "drafters.method_names",
    "drafters.speculative_config",
    "cli",
)


def modules() -> Iterator[tuple[str, Path]]:
    """Dotted names below paceline: `engine.scheduler`, `cli`, `__init__`."""
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        yield ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts), path


def imported(tree: ast.Module) -> Iterator[str]:
    """Every absolute import as a dotted name; `from a import b` gives a.b, which may be a module or a name in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def unit_of(dotted: str) -> str | None:
    """The unit an import leads to; None outside the package. `from paceline import LLM` leads to the package itself."""
    parts = dotted.split(".")
    if parts[0] != "paceline":
        return None
    known = {*RANK, TOYS, ENTRY}
    return parts[1] if len(parts) > 1 and (parts[1] in known or (SOURCE / parts[1]).exists()) else PUBLIC


def violation(importer: str, target: str) -> str | None:
    """Why an arrow between two units may not be, or None."""
    if importer in (target, PUBLIC, ENTRY) or target == PUBLIC:
        return None
    if target == TOYS:
        return "only tests import the toy models"
    if importer == TOYS:
        return None if RANK[target] <= RANK["models"] else "the toy models know nothing above models"
    if RANK[importer] == RANK[target] == 0:
        return None
    return None if RANK[target] < RANK[importer] else "the arrow points back"


def test_every_module_has_a_rank() -> None:
    units = {name.split(".")[0] for name, _ in modules()}
    assert units <= {*RANK, PUBLIC, ENTRY, TOYS}


def test_no_arrow_points_back() -> None:
    found = []
    for name, path in modules():
        for dotted in imported(ast.parse(path.read_text())):
            target = unit_of(dotted)
            if target is not None and (problem := violation(name.split(".")[0], target)):
                found.append(f"{name} -> {dotted}: {problem}")
    assert not found, "\n".join(found)


def test_the_rule_would_notice() -> None:
    assert violation("models", "engine")
    assert violation("verify", "models")
    assert violation("engine", "llm")
    assert violation("errors", "models")
    assert violation("engine", "testing")
    assert violation("testing", "engine")
    assert violation("llm", "cli")
    assert not violation("cli", "llm")
    assert not violation("config", "errors")


def test_verify_knows_arrays_and_draft_and_nothing_else() -> None:
    allowed = VERIFY_MAY_IMPORT | sys.stdlib_module_names
    for name, path in modules():
        if name.split(".")[0] != "verify":
            continue
        for dotted in imported(ast.parse(path.read_text())):
            further = METADATA_MAY_IMPORT if name == "verify.metadata" else set()
            assert (unit_of(dotted) or dotted.split(".")[0]) in allowed | further, f"{name} -> {dotted}"


def test_modules_do_not_import_one_another_in_a_circle() -> None:
    """Over module-level imports that happen at run time."""
    known = dict(modules())
    graph = {name: set(_at_import_time(ast.parse(path.read_text()).body, known)) for name, path in known.items()}
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join([*trail[trail.index(name) :], name])
        if name not in done:
            for target in sorted(graph[name] - {name}):
                visit(target, (*trail, name))
            done.add(name)

    for name in graph:
        visit(name, ())


def _at_import_time(body: list[ast.stmt], known: dict[str, Path]) -> Iterator[str]:
    for node in body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            for dotted in imported(ast.Module([node], [])):
                below = dotted.removeprefix("paceline.")
                for candidate in (below, below.rpartition(".")[0]):
                    if dotted.startswith("paceline.") and candidate in known:
                        yield candidate
                        break
        elif isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.dump(node.test):
            yield from _at_import_time([*node.body, *node.orelse], known)
        elif isinstance(node, ast.Try):
            yield from _at_import_time([*node.body, *node.orelse, *node.finalbody], known)


def test_what_the_command_line_starts_with_does_not_import_torch() -> None:
    names = ", ".join(f"paceline.{name}" for name in NO_TORCH)
    probe = f"import sys, paceline, {names}; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", probe], cwd=SOURCE.parent, timeout=60)
    assert done.returncode == 0


def test_the_public_names_are_all_there() -> None:
    for name in paceline.__all__:
        assert getattr(paceline, name) is not None
    assert dir(paceline) == sorted(paceline.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Nonsense'"):
        _ = paceline.Nonsense


def names_of(module: str) -> set[str]:
    """Return the names that a module defines or imports at its top level, and the modules of a package."""
    path = SOURCE.parent / module.replace(".", "/")
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    found = {one.stem for one in path.glob("*")} if path.is_dir() else set()
    for node in ast.walk(ast.parse(file.read_text())):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                found.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                found.add(name)
            case ast.alias(name=name, asname=other):
                found.add(other or name)
    return found


@pytest.mark.parametrize("script", sorted((SOURCE.parents[1] / "benchmarks").rglob("*.py")), ids=lambda path: path.stem)
def test_what_a_benchmark_imports_from_the_package_is_there(script: Path) -> None:
    """Scripts for a GPU are run by no test."""
    for node in ast.walk(ast.parse(script.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module is not None and node.module.partition(".")[0] == "paceline":
            public = set(paceline.__all__) if node.module == "paceline" else set()
            missing = {alias.name for alias in node.names} - names_of(node.module) - public
            assert not missing, f"{script.name}: {node.module} has no {', '.join(sorted(missing))}"
