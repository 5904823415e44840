"""Law 2: chains drawn from q are verified losslessly, by exact enumeration through the real functions."""

import math
import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.draft import Draft, Proposal
from paceline.core.rng import Lane, coin
from paceline.core.verdict import TokenKind
from paceline.verify import DrawKeys, Nodes, SamplingMetadata, probabilities, process, verify
from paceline.verify.block import drawn_chains
from paceline.verify.dispatch import moved
from tests.helpers.enumeration import Fixed, Setting, Toy, chains, check, stages, stop_at
from tests.verify.steps import batch_of, draws_of, flatten
from tests.verify.test_processors import controls_of, requests

TARGET, DRAFTER = Toy(1, 3), Toy(2, 3)
SPARSE_P = Fixed([0.5, 0.5, 0.0], [0.0, 0.25, 0.75], [0.2, 0.8, 0.0])
SPARSE_Q = Fixed([0.25, 0.0, 0.75], [0.5, 0.5, 0.0], [0.0, 0.6, 0.4])
FEW = Fixed([0.3, 0.0, 0.7], [0.6, 0.0, 0.4])  # a draft vocabulary of tokens 0 and 2

SETTINGS = {
    "block, chain of 3": Setting(TARGET, DRAFTER, tuple(chains(3))),
    "block, chain of 2, four tokens": Setting(Toy(3, 4), Toy(4, 4), tuple(chains(2))),
    "block, zeros in p and q": Setting(SPARSE_P, SPARSE_Q, tuple(chains(3))),
    "block, a chain that stops after a token": Setting(TARGET, DRAFTER, tuple(chains(3)), ends=(1,)),
    "block, small draft vocabulary": Setting(TARGET, FEW, tuple(chains(3)), ids=(0, 2)),
    "block, p filtered": Setting(TARGET, DRAFTER, tuple(chains(3)), temperature=0.7, top_k=2),
    "block, p filtered, small draft vocabulary": Setting(
        TARGET, FEW, tuple(chains(2)), ids=(2, 0), temperature=1.3, top_k=2
    ),
    "block, two of three tokens allowed": Setting(TARGET, DRAFTER, tuple(chains(3)), temperature=1.0, allowed=(0, 2)),
    "walk, two of three tokens allowed": Setting(
        TARGET, DRAFTER, (-1, -1, 0), sampled=False, temperature=0.8, allowed=(0, 1)
    ),
    "walk, chain": Setting(TARGET, DRAFTER, tuple(chains(2)), sampled=False),
    "walk, tree": Setting(TARGET, DRAFTER, (-1, -1, 0), sampled=False),
    "walk, only where it gets to": Setting(TARGET, DRAFTER, tuple(chains(2)), sampled=False, temperature=0.8),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_three_tokens_over_two_steps_are_distributed_as_the_targets(name):
    check(SETTINGS[name])


# --- batches drawn at random ---


def sampled_batch(size, shapes, *, vocab=6, seed=0, dtype=torch.float64, spread=0.7, metadata=None, drafted=None):
    """Drafts of these shapes, drawn from a q near the target's p. Trees have no q, nor slots that are not `drafted`."""
    generator = torch.Generator().manual_seed(seed)
    rows, width = [], max(len(shape) for shape in shapes)
    logits = torch.randn(size, width + 1, vocab, generator=generator, dtype=dtype) * 1.5
    q = torch.softmax(logits + torch.randn(logits.shape, generator=generator, dtype=dtype) * spread, -1)
    row_of_q = torch.full((size, width + 1), -1)
    for b, shape in enumerate(shapes):
        tokens = [0] * len(shape)
        for slot in range(len(shape) + 1):
            children = [node for node, parent in enumerate(shape) if parent == slot - 1]
            if children:
                drawn = torch.multinomial(q[b, slot].float(), len(children), generator=generator)
                for node, token in zip(children, drawn.tolist(), strict=True):
                    tokens[node] = token
                if list(shape) == chains(len(shape)) and (drafted is None or drafted(b, slot)):
                    row_of_q[b, slot] = b * (width + 1) + slot
        rows.append((tokens, list(shape)))
    draft = replace(batch_of(rows, width), q=Proposal(probs=q.flatten(0, 1), row_of=row_of_q))
    row_of, nodes = flatten(draft)
    used = torch.arange(width + 1) <= draft.num_nodes[:, None]
    draws = DrawKeys.by_coins(torch.arange(size) * 977 + seed, torch.arange(size) % 13)
    return draft, logits[used], row_of, nodes, metadata or SamplingMetadata(), draws


def test_a_hostile_drafter_gets_nothing_accepted():
    """p and q on disjoint tokens: τ = 1."""
    draft, logits, row_of, nodes, _, draws = sampled_batch(400, [chains(3)] * 400)
    q = draft.q.probs.clone()
    q[:, :3] = 0
    draft = replace(draft, q=replace(draft.q, probs=q / q.sum(-1, keepdim=True)), tokens=3 + draft.tokens % 3)
    logits = logits.clone()
    logits[:, 3:] = -math.inf
    verdict = verify(draft, logits, row_of, nodes, SamplingMetadata(), draws, max_depth=3)
    assert not verdict.num_accepted.any()
    assert (verdict.tokens[:, 0] < 3).all()
    assert (verdict.kinds[:, 0] == TokenKind.RECOVERED).all()


SHAPES = [chains(3), [], [-1, -1, 0, 1], chains(1), [-1, -1, -1], chains(4), [-1, 0, 0, 2, -1], chains(2)]


def test_rows_of_all_kinds_share_a_batch_and_none_notices():
    """Greedy, seeded, trees, and chains with and without q, of different sizes: each as if it were alone."""
    size = 64
    kinds = [("coins", "coins", "greedy", "seeded", "coins")[b % 5] for b in range(size)]
    shapes = [SHAPES[b % len(SHAPES)] for b in range(size)]
    temperature = torch.tensor([0.0 if kind == "greedy" else 0.9 for kind in kinds])
    metadata = SamplingMetadata(temperature=temperature, top_k=torch.arange(size) % 3 * 2)
    draft, logits, row_of, nodes, _, draws = sampled_batch(
        size, shapes, drafted=lambda b, slot: b % 7 != 3 and (b % 11 != 5 or slot == 0)
    )
    of = draws_of(draws.key, draws.committed, kinds)
    drawn = drawn_chains(draft, of)
    assert 5 < int(drawn.sum()) < size - 5
    assert all(kinds[b] == "coins" and shapes[b] == chains(len(shapes[b])) for b in drawn.nonzero()[:, 0].tolist())
    together = verify(draft, logits, row_of, nodes, metadata, of, max_depth=4, num_logprobs=2)
    draft.validate(6)
    for b in range(size):
        rows = row_of[b][row_of[b] >= 0]
        alone = Draft(
            tokens=draft.tokens[b : b + 1],
            parents=draft.parents[b : b + 1],
            depth=draft.depth[b : b + 1],
            num_nodes=draft.num_nodes[b : b + 1],
            q=replace(draft.q, row_of=draft.q.row_of[b : b + 1]),
        )
        own_rows, own_nodes = flatten(alone)
        own = draws_of(draws.key[b : b + 1], draws.committed[b : b + 1], [kinds[b]])
        only = SamplingMetadata(temperature=temperature[b : b + 1], top_k=metadata.top_k[b : b + 1])
        verdict = verify(alone, logits[rows], own_rows, own_nodes, only, own, max_depth=4, num_logprobs=2)
        for name in ("tokens", "num_accepted", "path", "kinds"):
            assert torch.equal(getattr(verdict, name)[0], getattr(together, name)[b])
        count = int(verdict.num_accepted) + 1
        assert torch.equal(verdict.logprobs.chosen[0, :count], together.logprobs.chosen[b, :count])


def test_on_a_device_without_kernels_the_host_judges_copies(monkeypatch):
    given = sampled_batch(8, [SHAPES[b] for b in range(8)])
    expected = verify(*given, max_depth=4, num_logprobs=2)
    copies = []
    monkeypatch.setattr(torch.Tensor, "is_cpu", property(lambda tensor: bool(copies)))

    def copied(part, to):
        copies.append(to)
        return moved(part, to)

    monkeypatch.setattr("paceline.verify.dispatch.moved", copied)
    found = verify(*given, max_depth=4)
    assert copies
    for name in ("tokens", "num_accepted", "path", "kinds"):
        assert torch.equal(getattr(found, name), getattr(expected, name))


def test_a_row_sampled_only_in_part_is_walked():
    draft, _, _, _, _, draws = sampled_batch(3, [chains(3)] * 3, drafted=lambda b, slot: b != 1 or slot != 1)
    assert drawn_chains(draft, draws).tolist() == [True, False, True]


def test_a_tree_is_walked_whatever_it_carries():
    """`Draft.validate` refuses it."""
    draft, _, _, _, _, draws = sampled_batch(2, [[-1, -1], chains(2)])
    carrying = replace(draft, q=replace(draft.q, row_of=torch.tensor([[0, -1, -1], [3, 4, -1]])))
    assert drawn_chains(carrying, draws).tolist() == [False, True]
    with pytest.raises(ValueError, match=r"^row 0: a tree carries q"):
        carrying.validate(6)
    draft.validate(6)


# --- against plain loops, every node's p from a one-token call ---


def by_coin(weights, u):
    point, total = u * sum(weights), 0.0
    for token, weight in enumerate(weights):
        total += weight
        if point < total:
            return token
    raise AssertionError(weights)


@settings(max_examples=80, deadline=None)
@given(st.lists(requests, min_size=1, max_size=4), st.integers(0, 10**6), st.data())
def test_sampled_drafts_are_judged_as_by_loops_over_one_token_calls(asked, seed, data):
    """Every sampling parameter: p at each node comes from a call for that node's history alone."""
    asked = [replace(one, temperature=one.temperature or 0.8) for one in asked]
    shapes = [chains(data.draw(st.integers(1, 4))) for _ in asked]
    draft, logits, row_of, nodes, _, draws = sampled_batch(len(asked), shapes, vocab=7, seed=seed)
    verdict = verify(draft, logits, row_of, nodes, controls_of(asked), draws, max_depth=4)
    for b, one in enumerate(asked):
        tokens = draft.tokens[b].tolist()[: len(shapes[b])]
        p, q = [], []
        for slot in range(len(tokens) + 1):
            history = controls_of([replace(one, output=(*one.output, *tokens[:slot]))])
            row = logits[row_of[b, slot]][None]
            p.append(probabilities(process(row, history, Nodes.roots(1)))[0].tolist())
            q.append(draft.q.probs[draft.q.row_of[b, slot]].tolist())
        key, committed = draws.key[b : b + 1], draws.committed[b : b + 1]
        u = [float(coin(Lane.ACCEPT, key, committed, torch.tensor([node]))) for node in range(len(tokens))]
        node, _, weights = stop_at(stages(tokens, p, q), u)
        path = list(range(node + 1))
        last = by_coin(weights, float(coin(Lane.RESIDUAL, key, committed, torch.tensor([node]))))
        assert verdict.path[b].tolist() == path + [-1] * (4 - len(path))
        assert verdict.tokens[b].tolist() == [tokens[n] for n in path] + [last] + [-1] * (4 - len(path))


# --- what must not happen, and does not hurt ---


@pytest.mark.parametrize("filtered", [False, True])
def test_a_broken_q_costs_the_draft_and_never_the_answer(path, filtered):
    draft, logits, row_of, nodes, _, draws = sampled_batch(200, [chains(3)] * 200, dtype=torch.float32)
    q = draft.q.probs.clone().view(200, -1, 6)
    harms = 0.0, math.nan, 1e-42  # of every third row
    for at, harm in enumerate(harms):
        q[at::3, 1] = harm
    draft = replace(draft, q=replace(draft.q, probs=q.flatten(0, 1)))
    metadata = (
        SamplingMetadata(temperature=torch.ones(200), top_k=torch.full((200,), 4)) if filtered else SamplingMetadata()
    )
    verdict = verify(draft, logits, row_of, nodes, metadata, draws, max_depth=3)
    rows = torch.arange(200)
    assert ((verdict.tokens[rows, verdict.num_accepted] >= 0) & (verdict.tokens[rows, verdict.num_accepted] < 6)).all()
    # Not the child of node 0, whose q is broken. A tiny q is still one.
    assert not (verdict.path[rows % 3 < 2] == 1).any()


def test_a_chain_whose_q_is_no_number_ends_before_it_losslessly():
    """Node 0 keeps its full chance, and what follows it comes from p: as if nothing had been drafted there."""
    draft, logits, row_of, nodes, metadata, draws = sampled_batch(300, [chains(2)] * 300)
    q = draft.q.probs.clone().view(300, 3, 6)
    q[:, 1] = math.nan
    broken = replace(draft, q=replace(draft.q, probs=q.flatten(0, 1)))
    short = Draft.chains(draft.tokens[:, :1], torch.ones(300, dtype=torch.int64), 0)
    short = replace(short, q=replace(draft.q, row_of=draft.q.row_of[:, :2]))
    rows = row_of[:, :2]
    long_verdict = verify(broken, logits, row_of, nodes, metadata, draws, max_depth=2)
    short_verdict = verify(short, logits, rows, nodes, metadata, draws, max_depth=1)
    assert torch.equal(long_verdict.tokens[:, :2], short_verdict.tokens)
    assert short_verdict.num_accepted.unique().numel() == 2


def test_the_ratio_uses_the_very_tensor_that_was_sampled(monkeypatch):
    seen = []
    module = sys.modules["paceline.verify"]
    real = module.verify_block
    monkeypatch.setattr(
        module, "verify_block", lambda draft, *rest, **how: seen.append(draft.q.probs) or real(draft, *rest, **how)
    )
    arguments = sampled_batch(4, [chains(2)] * 4)
    verify(*arguments, max_depth=2)
    assert seen[0] is arguments[0].q.probs
