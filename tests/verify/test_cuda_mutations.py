"""The checks notice when a kernel is wrong: each mutation of the device's source must fail one of them.

As test_mutations, and with the mutated text in a file: Triton reads a kernel's source from there.
"""

import importlib
import sys
from types import SimpleNamespace

import pytest
import torch

from paceline.verify import Nodes, SamplingMetadata, process, verify
from tests.helpers.enumeration import chains
from tests.verify import device
from tests.verify.test_mutations import FOLDER, fresh
from tests.verify.test_sampled import sampled_batch

# Kernels must give the host's verdicts on these; the host's own rules are enumerated.
BATCHES = {
    "block": sampled_batch(150, [chains(2)] * 150),
    "walk": sampled_batch(150, [[-1, -1, 0]] * 150),
}


MUTATIONS = {
    # p
    "p that does not sum to one": (
        "tiles",
        "    return weight * inverse(",
        "    return weight + 0 * inverse(",
        "block",
    ),
    "a coin that is not scaled to the sum": ("tiles", "coin * tl.max(ends, 1)", "coin", "walk"),
    "the wrong side of the coin": ("tiles", "(ends <= point[:, None])", "(ends > point[:, None])", "walk"),
    "another p": (
        "target_distribution",
        "tl.sum(weight.to(tl.float64), 1)",
        "tl.sum(weight.to(tl.float64) + 1.0, 1)",
        "walk",
    ),
    "the last token kept is not": ("tiles", "key_of(logit, DTYPE) <= cut", "key_of(logit, DTYPE) < cut", "filters"),
    "one token too many": ("cut", ">= enough) |", "> enough) |", "filters"),
    "no temperature": ("tiles", "    if p.scale is not None:", "    if p.stride is None:", "filters"),
    # the walk
    "walk coins of the last step": ("walk", "Lane.WALK, key, committed,", "Lane.WALK, key, 0 * committed,", "walk"),
    "follows what was not drawn": ("walk", "used & (token == tl.load(drawn", "used & (token != tl.load(drawn", "walk"),
    "follows a child of another": (
        "walk",
        "agrees & (above == at[:, None])",
        "agrees & (above >= at[:, None])",
        "walk",
    ),
    # chains
    "q over p": (
        "sampled",
        "divide(p, tl.where(q > 0, q, 1.0), DTYPE)",
        "divide(q, tl.where(p > 0, p, 1.0), DTYPE)",
        "block",
    ),
    "block rule the wrong way round": ("block", "coin <= keep.to", "coin > keep.to", "block"),
    "acceptance without its normalisation": (
        "block",
        "divide(surplus, tl.where(total > 0, total, 1.0), DTYPE), a)",
        "surplus, a)",
        "block",
    ),
    "scales that stay one": (
        "block",
        "a = tl.minimum(a * tl.load(chains.ratio",
        "a = 1 + 0 * tl.minimum(a * tl.load(chains.ratio",
        "block",
    ),
    "the excess of another scale": (
        "block",
        "positive(a * target - drafter).to",
        "positive(target - drafter).to",
        "block",
    ),
    "p for the residual": ("sampled", "tl.where(share > 0, positive", "tl.where(share < 0, positive", "block"),
    "residual coins of the last step": (
        "recover",
        "draws.committed, chains.stop",
        "0 * draws.committed, chains.stop",
        "block",
    ),
}


def mutant(folder, stem, old, new):
    """The package with one text of one kernel file replaced, every tensor sent to its kernels."""
    path = FOLDER / "verify" / "cuda" / f"{stem}.py"
    text = path.read_text()
    assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times in {path.name}"
    changed = folder / path.name
    changed.write_text(text.replace(old, new))
    with fresh(f"paceline.verify.cuda.{stem}", changed, changed.read_text()):
        package = importlib.import_module("paceline.verify")
        kernels = device.served(importlib.import_module("paceline.verify.cuda.kernels"))
        sys.modules["paceline.verify.dispatch"].kernels = lambda tensor: kernels
        return SimpleNamespace(verify=package, rng=sys.modules["paceline.core.rng"], kernels=kernels)


def check_filters(code):
    """What a mutant's kernels leave of a few rows is what the host leaves."""
    logits = torch.randn(4, 6, generator=torch.Generator().manual_seed(6))
    metadata = SamplingMetadata(temperature=torch.tensor([0.7, 1.0, 1.3, 1.0]), top_k=torch.tensor([2, 0, 3, 1]))
    assert torch.equal(code.process(logits, metadata, Nodes.roots(4)), process(logits, metadata, Nodes.roots(4)))


def run_check(by, code):
    if by == "filters":
        check_filters(code.kernels)
        return
    given = BATCHES[by]
    host, there = verify(*given, max_depth=2), code.verify.verify(*given, max_depth=2)
    assert host.num_accepted.unique().numel() > 1
    for name in ("tokens", "num_accepted", "path", "kinds"):
        assert torch.equal(getattr(host, name), getattr(there, name)), name


@pytest.mark.usefixtures("kernels_alone")
def test_a_copy_without_a_mutation_passes(tmp_path):
    same = mutant(tmp_path, "block", "coin <= keep.to", "coin <= keep.to")
    for by in (*BATCHES, "filters"):
        run_check(by, same)


@pytest.mark.usefixtures("kernels_alone")
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutation_is_noticed(name, tmp_path):
    stem, old, new, by = MUTATIONS[name]
    changed = mutant(tmp_path, stem, old, new)
    with pytest.raises((AssertionError, IndexError, RuntimeError, ValueError)):
        run_check(by, changed)
