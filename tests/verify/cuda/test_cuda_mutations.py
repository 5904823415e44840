"""The checks notice when a kernel is wrong: each mutation of the device's source must fail one of them.

As test_mutations, and with the mutated source in a file: Triton reads a kernel's source from there.
"""

import pytest
import torch

from paceline.verify import Nodes, SamplingMetadata, process, verify
from tests.helpers.enumeration import chains
from tests.helpers.mutants import Mutation, mutant
from tests.verify import device
from tests.verify.test_block import sampled_batch

# Kernels must give the host's verdicts on these; the host's own rules are enumerated.
BATCHES = {
    "block": sampled_batch(150, [chains(2)] * 150),
    "walk": sampled_batch(150, [[-1, -1, 0]] * 150),
}
RATIO = "tl.minimum(a * tl.load(chains.ratio + row * chains.width + node, more, 0.0), 1.0)"
SCALED = "inverse(tl.load(p.total + row, live, 1.0).to(DTYPE), DTYPE)[:, None]"
HELD = "_held(held, row, live, splits, way + 1, SPLITS)"
SAME = ("block", "_stop", "coin <= keep.to(tl.float64)", "coin <= keep.to(tl.float64)", "block")
MUTATIONS = {
    # p
    "p that does not sum to one": ("tiles", "probability", f"weight * {SCALED}", f"weight + 0 * {SCALED}", "block"),
    "a coin that is not scaled to the sum": ("tiles", "find_split", "coin * tl.max(ends, 1)", "coin", "walk"),
    "the wrong side of the coin": (
        "tiles", "first_with_weight", "ends <= point[:, None]", "ends > point[:, None]", "walk"
    ),
    "another p": (
        "target_distribution", "_weigh", "weight.to(tl.float64)", "weight.to(tl.float64) + 1.0", "walk"
    ),
    "the last token kept is not": (
        "tiles", "kept", "key_of(logit, DTYPE) <= cut", "key_of(logit, DTYPE) < cut", "filters"
    ),
    "one token too many": ("cut", "_narrow", f"{HELD} >= enough", f"{HELD} > enough", "filters"),
    "no temperature": ("tiles", "tempered", "p.scale is not None", "p.stride is None", "filters"),
    # the walk
    "walk coins of the last step": (
        "walk", "draw_tokens", "source(Lane.WALK, key, committed, nodes.node)",
        "source(Lane.WALK, key, 0 * committed, nodes.node)", "walk",
    ),
    "follows what was not drawn": (
        "walk", "_walk", "token == tl.load(drawn + logit_row, used, -2)",
        "token != tl.load(drawn + logit_row, used, -2)", "walk",
    ),
    "follows a child of another": (
        "walk", "_walk", "agrees & (above == at[:, None])", "agrees & (above >= at[:, None])", "walk"
    ),
    # chains
    "q over p": (
        "sampled", "likelihood_ratio", "divide(p, tl.where(q > 0, q, 1.0), DTYPE)",
        "divide(q, tl.where(p > 0, p, 1.0), DTYPE)", "block",
    ),
    "block rule the wrong way round": (
        "block", "_stop", "coin <= keep.to(tl.float64)", "coin > keep.to(tl.float64)", "block"
    ),
    "acceptance without its normalisation": (
        "block", "kept_share", "divide(surplus, tl.where(total > 0, total, 1.0), DTYPE)", "surplus", "block"
    ),
    "scales that stay one": ("block", "_scale", RATIO, f"1 + 0 * {RATIO}", "block"),
    "the excess of another scale": ("block", "_excess", "a * target", "target", "block"),
    "p for the residual": ("sampled", "last_weights", "share > 0", "share < 0", "block"),
    "residual coins of the last step": (
        "recover", "recover", "source(Lane.RESIDUAL, draws.key, draws.committed, chains.stop - 1)",
        "source(Lane.RESIDUAL, draws.key, 0 * draws.committed, chains.stop - 1)", "block",
    ),
}  # fmt: skip


def kernel_mutant(folder, stem, *mutation):
    """Return the package with a mutation of one kernel file, every tensor sent to its kernels."""
    code = mutant(Mutation(f"verify.cuda.{stem}", *mutation), folder / f"{stem}.py")
    served = device.served(code.kernels)
    code.dispatch.kernels = lambda tensor: served
    return code


def check_filters(code):
    """Compare the tokens that a mutant's kernels leave of a few rows with those the host leaves."""
    logits = torch.randn(4, 6, generator=torch.Generator().manual_seed(6))
    metadata = SamplingMetadata(temperature=torch.tensor([0.7, 1.0, 1.3, 1.0]), top_k=torch.tensor([2, 0, 3, 1]))
    kernels = device.served(code.kernels)
    assert torch.equal(kernels.process(logits, metadata, Nodes.roots(4)), process(logits, metadata, Nodes.roots(4)))


def run_check(name, code):
    if name == "filters":
        check_filters(code)
        return
    step = BATCHES[name]
    host, kernels = verify(*step, max_depth=2), code.verify.verify(*step, max_depth=2)
    assert host.num_accepted.unique().numel() > 1
    for part in ("tokens", "num_accepted", "path", "kinds"):
        assert torch.equal(getattr(host, part), getattr(kernels, part)), part


@pytest.mark.usefixtures("kernels_alone")
def test_a_copy_without_a_mutation_passes(tmp_path):
    same = kernel_mutant(tmp_path, *SAME)
    for name in (*BATCHES, "filters"):
        run_check(name, same)


@pytest.mark.usefixtures("kernels_alone")
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutation_is_noticed(name, tmp_path):
    mutation = MUTATIONS[name]
    changed = kernel_mutant(tmp_path, *mutation)
    with pytest.raises((AssertionError, IndexError, RuntimeError, ValueError)):
        run_check(mutation[-1], changed)
