"""Mutants: the verification package imported afresh with one node of one function's syntax tree replaced.

A mutation names its node by an expression that occurs once in the function; where it does not, the mutation fails, so
that no list of mutations falls behind the source.
"""

import ast
import contextlib
import importlib
import importlib.abc
import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import paceline
from tests.helpers.enumeration import PRODUCT

FOLDER = Path(paceline.__file__).parent


class Mutation(NamedTuple):
    module: str  # below paceline
    function: str
    node: str  # an expression of the function
    becomes: str
    check: str  # the check that notices


class _Replace(ast.NodeTransformer):
    def __init__(self, node, becomes):
        self.wanted, self.becomes, self.count = ast.dump(expression(node)), expression(becomes), 0

    def visit(self, node):
        if ast.dump(node) != self.wanted:
            return super().generic_visit(node)
        self.count += 1
        return self.becomes


def expression(text):
    return ast.parse(text, mode="eval").body


def path_of(module):
    return FOLDER / f"{module.replace('.', '/')}.py"


def mutated(mutation):
    """Return the source of the module with the node replaced."""
    tree = ast.parse(path_of(mutation.module).read_text())
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == mutation.function]
    assert len(functions) == 1, f"{mutation.module} has no function {mutation.function}"
    replace = _Replace(mutation.node, mutation.becomes)
    replace.visit(functions[0])
    assert replace.count == 1, f"{mutation.function} has {replace.count} nodes {mutation.node!r}"
    return ast.unparse(tree)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.SourceLoader):
    """Serves one module from changed source, at a path that may be another file's."""

    def __init__(self, name, path, source):
        self.name, self.path, self.source = name, path, source

    def find_spec(self, name, path=None, target=None):
        return importlib.util.spec_from_file_location(name, self.path, loader=self) if name == self.name else None

    def get_filename(self, name):
        return str(self.path)

    def get_data(self, path):
        return self.source.encode()

    def path_stats(self, path):
        raise OSError  # no cached bytecode


def _own_modules():
    """Return what is imported afresh: the modules of mutations, and the modules that import those."""
    return [module for module in sys.modules if module.startswith(("paceline.core.rng", "paceline.verify"))]


@contextlib.contextmanager
def fresh(name, path, source):
    """Import new modules in the `with`, the one called `name` from this source."""
    originals = {module: sys.modules.pop(module) for module in _own_modules()}
    finder = _Finder(name, path, source)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for module in _own_modules():
            del sys.modules[module]
        sys.modules.update(originals)
        paceline.verify, paceline.core.rng = PRODUCT.verify, PRODUCT.rng


def mutant(mutation, path=None):
    """Return the package with the mutation; its changed source is written to `path`, where a file is needed."""
    source = mutated(mutation)
    if path is not None:
        path.write_text(source)
    with fresh(f"paceline.{mutation.module}", path or path_of(mutation.module), source):
        package = importlib.import_module("paceline.verify")
        if path is None:
            return SimpleNamespace(verify=package, rng=sys.modules["paceline.core.rng"])
        kernels = importlib.import_module("paceline.verify.cuda.kernels")
        dispatch = sys.modules["paceline.verify.dispatch"]
        return SimpleNamespace(verify=package, rng=sys.modules["paceline.core.rng"], kernels=kernels, dispatch=dispatch)
