"""The checks notice when verification is wrong: each mutation of its source, one at a time, must fail one of them.

A mutant is the whole package imported afresh with one text replaced, in memory; the product's own modules stay as they
are. A mutation that no longer finds its text fails too, so this list cannot fall behind the source.
"""

import contextlib
import importlib
import importlib.abc
import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

import paceline
from tests.helpers.enumeration import PRODUCT, Fixed, Setting, Toy, chains, check

FOLDER = Path(paceline.__file__).parent
FILES = {path.stem: path for path in (FOLDER / "verify").glob("*.py")} | {"rng": FOLDER / "core" / "rng.py"}
TOYS = Toy(1, 3), Toy(2, 3)
CHECKS = {
    "block": Setting(*TOYS, tuple(chains(2))),
    "uneven": Setting(Toy(1, 2), Toy(2, 2), tuple(chains(3)), ends=(1,)),
    "filtered": Setting(Toy(1, 3), Fixed([0.3, 0.0, 0.7], [0.6, 0.0, 0.4]), tuple(chains(2)), temperature=0.7, top_k=2),
    "allowed": Setting(*TOYS, tuple(chains(2)), temperature=0.8, allowed=(0, 2)),
    "walk": Setting(Toy(1, 2), Toy(2, 2), tuple(chains(2)), sampled=False),
    "lazy walk": Setting(Toy(1, 2), Toy(2, 2), tuple(chains(2)), sampled=False, temperature=0.8),
}

MUTATIONS = {
    # the mask
    "tokens not allowed at nodes of a draft": (
        "processors",
        "torch.where(metadata.allowed[nodes.seq],",
        "torch.where(metadata.allowed[nodes.seq] | (nodes.depth > 0)[:, None],",
        "allowed",
    ),
    "the mask the wrong way round": (
        "processors",
        "torch.where(metadata.allowed[nodes.seq],",
        "torch.where(~metadata.allowed[nodes.seq],",
        "allowed",
    ),
    # the coins
    "a key without the committed length": (
        "rng",
        "uniform(lane, key, committed, node + 1)",
        "uniform(lane, key, node + 1)",
        "block",
    ),
    "a key without the node": (
        "rng",
        "uniform(lane, key, committed, node + 1)",
        "uniform(lane, key, committed)",
        "block",
    ),
    "acceptance coins of the last step": ("block", "committed[row], node)", "0 * committed[row], node)", "block"),
    "one coin for every node": ("block", "committed[row], node)", "committed[row], 0 * node)", "block"),
    "a coin for two purposes": ("block", "Lane.ACCEPT,", "Lane.RESIDUAL,", "block"),
    "walk coins of the last step": (
        "walk",
        "committed[seq], nodes.node[coins]",
        "key[seq] * 0, nodes.node[coins]",
        "walk",
    ),
    # chains
    "block rule the wrong way round": ("block", "coins <= _acceptance", "coins > _acceptance", "block"),
    "block rule stops at the first reject": (
        "block",
        "torch.where(passed, node + 1, 0).amax(1)",
        "passed.long().cumprod(1).sum(1)",
        "block",
    ),
    "p for the residual": ("block", "> 0, weights, p)", "> 0, p, p)", "block"),
    "the residual of another scale": (
        "block",
        "excess(scale[inner, slot]",
        "excess(1 + 0 * scale[inner, slot]",
        "block",
    ),
    "q over p": ("block", "p / q, 0)", "q / p, 0)", "block"),
    "scales above one": ("block", "(scales[-1] * ratio[:, i]).clamp_max(1)", "(scales[-1] * ratio[:, i])", "block"),
    "acceptance without its normalisation": ("block", "surplus / total, a)", "surplus, a)", "block"),
    "every chain is as long as the longest": (
        "block",
        "torch.arange(1, scale.shape[1]) == length[:, None]",
        "torch.arange(1, scale.shape[1]) == length.max()",
        "uneven",
    ),
    "the bonus one token early": ("block", "leaf = stop == draft", "leaf = stop == -1 + draft", "block"),
    "no bonus at all": ("block", "leaf = stop == draft", "leaf = stop < 0 * draft", "block"),
    "the bonus from another node": (
        "block",
        "gather(1, stop[:, None])",
        "gather(1, 0 * stop[:, None])",
        "block",
    ),
    "the root's p at every node": ("block", ".view_as(row_of) - 1, 0)", ".view_as(row_of) * 0, 0)", "filtered"),
    # the walk
    "follows a child of another": (
        "walk",
        "parents[owner] == node[:, None]",
        "parents[owner] >= node[:, None]",
        "lazy walk",
    ),
    "level by level, what was not drawn": (
        "walk",
        "tokens[owner] == drawn[:, None]",
        "tokens[owner] != drawn[:, None]",
        "lazy walk",
    ),
    "another p": ("sample", "weights.cumsum(-1, dtype", "weights.sqrt().cumsum(-1, dtype", "walk"),
}


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.SourceLoader):
    """Serves one module from changed text."""

    def __init__(self, name, path, text):
        self.name, self.path, self.text = name, path, text

    def find_spec(self, name, path=None, target=None):
        if name != self.name:
            return None
        folder = [str(self.path.parent)] if self.path.stem == "__init__" else None
        return importlib.util.spec_from_file_location(name, self.path, loader=self, submodule_search_locations=folder)

    def get_filename(self, name):
        return str(self.path)

    def get_data(self, path):
        return self.text.encode()

    def path_stats(self, path):
        raise OSError  # no cached bytecode


def ours():
    """What is imported afresh: the modules a mutation may touch, and the modules that import those."""
    return [m for m in sys.modules if m.startswith(("paceline.core.rng", "paceline.verify"))]


@contextlib.contextmanager
def fresh(name, path, text):
    """Imports in here bring new modules, the one called `name` from this text."""
    kept = {module: sys.modules.pop(module) for module in ours()}
    finder = _Finder(name, path, text)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for module in ours():
            del sys.modules[module]
        sys.modules.update(kept)
        paceline.verify, paceline.core.rng = PRODUCT.verify, PRODUCT.rng


def mutant(stem, old, new):
    path = FILES[stem]
    text = path.read_text()
    assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times in {path.name}"
    name = {"rng": "paceline.core.rng", "__init__": "paceline.verify"}.get(stem, f"paceline.verify.{stem}")
    with fresh(name, path, text.replace(old, new)):
        package = importlib.import_module("paceline.verify")
        return SimpleNamespace(verify=package, rng=sys.modules["paceline.core.rng"])


@pytest.mark.parametrize("name", CHECKS)
def test_the_product_passes(name):
    check(CHECKS[name])


def test_a_copy_without_a_mutation_passes():
    same = mutant("block", "coins <= _acceptance", "coins <= _acceptance")
    assert same.verify is not PRODUCT.verify
    for setting in CHECKS.values():
        check(replace(setting, code=same), steps=1)


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutation_is_noticed(name):
    stem, old, new, by = MUTATIONS[name]
    setting = replace(CHECKS[by], code=mutant(stem, old, new))
    with pytest.raises((AssertionError, IndexError, RuntimeError, ValueError)):
        _ = check(setting, steps=1), check(setting)  # most are noticed by the cheaper one
