"""The checks notice when verification is wrong: each mutation of its source, one at a time, must fail one of them."""

from dataclasses import replace

import pytest

from tests.helpers.enumeration import PRODUCT, Fixed, Setting, Toy, chains, check
from tests.helpers.mutants import Mutation, mutant

TOYS = Toy(1, 3), Toy(2, 3)
CHECKS = {
    "block": Setting(*TOYS, tuple(chains(2))),
    "uneven": Setting(Toy(1, 2), Toy(2, 2), tuple(chains(3)), ends=(1,)),
    "filtered": Setting(Toy(1, 3), Fixed([0.3, 0.0, 0.7], [0.6, 0.0, 0.4]), tuple(chains(2)), temperature=0.7, top_k=2),
    "allowed": Setting(*TOYS, tuple(chains(2)), temperature=0.8, allowed=(0, 2)),
    "walk": Setting(Toy(1, 2), Toy(2, 2), tuple(chains(2)), sampled=False),
    "lazy walk": Setting(Toy(1, 2), Toy(2, 2), tuple(chains(2)), sampled=False, temperature=0.8),
}
ALLOWED = "metadata.allowed[nodes.seq]"
UNIFORM = "uniform(lane, key, committed, node + 1)"
ACCEPT = "source(Lane.ACCEPT, key[row], committed[row], node)"
WALK = "source(Lane.WALK, draws.key[seq], draws.committed[seq], nodes.node[coins])"
P_ROW = "drafted.flatten().cumsum(0).view_as(row_of)"
SAME = Mutation("verify.block", "likelihood_ratio", "p / q", "p / q", "block")


def of_block(function, node, becomes, by="block"):
    return Mutation("verify.block", function, node, becomes, by)


MUTATIONS = {
    # the mask
    "tokens not allowed at nodes of a draft": Mutation(
        "verify.processors", "edit", ALLOWED, f"{ALLOWED} | (nodes.depth > 0)[:, None]", "allowed"
    ),
    "the mask the wrong way round": Mutation("verify.processors", "edit", ALLOWED, f"~{ALLOWED}", "allowed"),
    # the coins
    "a key without the committed length": Mutation(
        "core.rng", "coin", UNIFORM, "uniform(lane, key, node + 1)", "block"
    ),
    "a key without the node": Mutation("core.rng", "coin", UNIFORM, "uniform(lane, key, committed)", "block"),
    "acceptance coins of the last step": of_block("node_coins", "committed[row]", "0 * committed[row]"),
    "one coin for every node": of_block("node_coins", ACCEPT, ACCEPT.replace(" node)", " 0 * node)")),
    "a coin for two purposes": of_block("node_coins", "Lane.ACCEPT", "Lane.RESIDUAL"),
    "walk coins of the last step": Mutation(
        "verify.walk", "draw", WALK, WALK.replace("draws.committed[seq]", "0 * draws.committed[seq]"), "walk"
    ),
    # chains
    "block rule the wrong way round": of_block(
        "_accepted",
        "coins <= _acceptance(scale, length, p, q, p_row, q_row)",
        "coins > _acceptance(scale, length, p, q, p_row, q_row)",
    ),
    "block rule stops at the first reject": of_block(
        "_accepted", "torch.where(passed, node + 1, 0).amax(1)", "passed.long().cumprod(1).sum(1)"
    ),
    "p for the residual": of_block("excess", "torch.where(weights.sum(-1, keepdim=True) > 0, weights, p)", "p.clone()"),
    "the residual of another scale": of_block("verify_block", "scale[inner, slot]", "1 + 0 * scale[inner, slot]"),
    "q over p": of_block("likelihood_ratio", "p / q", "q / p"),
    "scales above one": of_block("_scales", "(scales[-1] * ratio[:, i]).clamp_max(1)", "scales[-1] * ratio[:, i]"),
    "acceptance without its normalisation": of_block("_acceptance", "surplus / total", "surplus"),
    "every chain is as long as the longest": of_block("_acceptance", "length[:, None]", "length.max()", "uneven"),
    "the bonus one token early": of_block("verify_block", "stop == draft.num_nodes", "stop == draft.num_nodes - 1"),
    "no bonus at all": of_block("verify_block", "stop == draft.num_nodes", "stop < 0"),
    "the bonus from another node": of_block(
        "verify_block", "row_of.gather(1, stop[:, None])", "row_of.gather(1, 0 * stop[:, None])"
    ),
    "the root's p at every node": of_block("verify_block", f"{P_ROW} - 1", f"{P_ROW} * 0", "filtered"),
    # the walk
    "follows a child of another": Mutation(
        "verify.walk", "walk", "parents[owner] == node[:, None]", "parents[owner] >= node[:, None]", "lazy walk"
    ),
    "level by level, what was not drawn": Mutation(
        "verify.walk", "walk", "tokens[owner] == drawn[:, None]", "tokens[owner] != drawn[:, None]", "lazy walk"
    ),
    "another p": Mutation("verify.sample", "_sample_batch", "weights.cumsum", "weights.sqrt().cumsum", "walk"),
}


@pytest.mark.parametrize("name", CHECKS)
def test_the_product_passes(name):
    check(CHECKS[name])


def test_a_copy_without_a_mutation_passes():
    same = mutant(SAME)
    assert same.verify is not PRODUCT.verify
    for setting in CHECKS.values():
        check(replace(setting, code=same), steps=1)


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutation_is_noticed(name):
    setting = replace(CHECKS[MUTATIONS[name].check], code=mutant(MUTATIONS[name]))
    with pytest.raises((AssertionError, IndexError, RuntimeError, ValueError)):
        _ = check(setting, steps=1), check(setting)  # most are noticed by the cheaper one


def test_a_mutation_that_fits_no_node_fails():
    with pytest.raises(AssertionError, match="has 0 nodes"):
        mutant(SAME._replace(node="p * q"))
