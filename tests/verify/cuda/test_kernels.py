"""The device's kernels: lossless by the same enumeration, and row for row what the host says.

Interpreted, in float64 and exact to 1e-12, where there is no CUDA device. Float32, which a device computes in, is held
against float64: p within 2e-6 of itself, noise within 4 units in the last place.
"""

import math
from dataclasses import replace

import pytest
import torch

from paceline.core import rng
from paceline.core.draft import Proposal
from paceline.core.rng import Lane, coin
from paceline.core.verdict import TokenKind
from paceline.platform.staging import Staging
from paceline.verify import (
    DrawKeys,
    Nodes,
    SamplingMetadata,
    SamplingMode,
    draw,
    probabilities,
    process,
    propose,
    verify,
)
from paceline.verify.cuda.graphs import GraphCache
from paceline.verify.dispatch import moved
from tests.helpers.enumeration import Fixed, Setting, Toy, chains, check
from tests.verify.device import interpreted
from tests.verify.steps import draws_of, greedy_draws, gumbel_noise
from tests.verify.test_block import SHAPES, sampled_batch
from tests.verify.test_processors import Asked, controls_of

PARTS = ("tokens", "num_accepted", "path", "kinds")
TARGET, DRAFTER, NEAR = Toy(1, 3), Toy(2, 3), 5e-14
FEW = Fixed([0.3, 0.0, 0.7], [0.6, 0.0, 0.4])

# A few: interpreting is slow. The rest follows from kernels that say, row for row, what the enumerated host says.
SETTINGS = {
    "block, chain of 3": (Setting(TARGET, DRAFTER, tuple(chains(3)), near=NEAR), 1),
    "block, tempered, small draft vocabulary": (
        Setting(TARGET, FEW, tuple(chains(2)), ids=(2, 0), temperature=1.3, near=NEAR),
        1,
    ),
    "block, two steps": (Setting(Toy(1, 2), Toy(2, 2), tuple(chains(2)), near=NEAR), 2),
    "block, two of three tokens allowed": (
        Setting(TARGET, DRAFTER, tuple(chains(2)), temperature=1.3, allowed=(0, 2), near=NEAR),
        1,
    ),
    "walk, two of three tokens allowed": (
        Setting(TARGET, DRAFTER, (-1, -1, 0), sampled=False, temperature=1.3, allowed=(1, 2)),
        1,
    ),
    "walk": (Setting(Toy(1, 2), Toy(2, 2), (-1, -1, 0), sampled=False), 2),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_three_tokens_are_distributed_as_the_targets(kernels, name):
    setting, steps = SETTINGS[name]
    check(setting, steps)


# --- what the host says, row for row ---


@pytest.fixture
def small_splits(kernels_alone, monkeypatch):
    """Rows of more than one split."""
    from paceline.verify.cuda import tiles

    monkeypatch.setattr(tiles, "BLOCK", 16)


@pytest.fixture
def a_row_a_program(kernels_alone, monkeypatch):
    """Give each program one row, as on a device."""
    from paceline.verify.cuda import tiles

    monkeypatch.setattr(tiles, "ROWS", 1)


def both(given, **options):
    """The same verdict by the host and by the kernels."""
    host = verify(*given, **options)
    with pytest.MonkeyPatch.context() as patch:
        return host, _through(patch, given, options)


def _through(patch, given, options):
    from paceline.verify.cuda import kernels as package
    from tests.verify.device import served

    kernels = served(package)
    patch.setattr("paceline.verify.dispatch.kernels", lambda tensor: kernels)
    return verify(*given, **options)


def assert_same(one, other):
    for name in PARTS:
        assert torch.equal(getattr(one, name), getattr(other, name)), name


def mixed_batch(size, vocab, *, seed=0, dtype=torch.float64):
    """Greedy, seeded, deterministic, drawn chains and trees, under every kind of filter."""
    kinds = [("coins", "coins", "greedy", "seeded", "coins")[b % 5] for b in range(size)]
    shapes = [SHAPES[b % len(SHAPES)] for b in range(size)]
    metadata = SamplingMetadata(
        temperature=torch.tensor([0.0 if kind == "greedy" else (0.9, 1.0, 1.7)[b % 3] for b, kind in enumerate(kinds)]),
        top_p=torch.tensor([(1.0, 0.9, 0.6, 0.3)[b % 4] for b in range(size)], dtype=torch.float64),
        min_p=torch.tensor([(0.0, 0.02)[b % 2] for b in range(size)]),
        top_k=torch.tensor([(0, 0, 4)[b % 3] for b in range(size)]),
    )
    draft, logits, row_of, nodes, _, draws = sampled_batch(
        size,
        shapes,
        vocab=vocab,
        seed=seed,
        dtype=dtype,
        drafted=lambda b, slot: b % 7 != 3 and (b % 11 != 5 or not slot),
    )
    return draft, logits, row_of, nodes, metadata, draws_of(draws.key, draws.committed, kinds)


def test_rows_of_all_kinds_are_judged_as_on_the_host(kernels_alone):
    host, device = both(mixed_batch(120, 11), max_depth=4)
    assert_same(host, device)
    assert host.num_accepted.unique().numel() > 3


def test_drafts_that_are_parts_of_wider_tensors_are_judged_as_on_the_host(kernels_alone):
    """A drafter on the device cuts its drafts out of a buffer as wide as its largest: rows are further apart."""
    draft, *rest = mixed_batch(24, 11, seed=5)
    for q in (draft.q, None):
        cut = replace(draft, q=q, **{name: wider(getattr(draft, name)) for name in ("tokens", "parents", "depth")})
        host, device = both((cut, *rest), max_depth=4)
        assert_same(host, device)
        assert host.num_accepted.any()


def wider(part):
    """The same numbers, as the first columns of a larger tensor."""
    return torch.cat((part, torch.full((len(part), 3), 7)), 1)[:, :-3]


def test_rows_of_several_splits_are_judged_as_on_the_host(kernels_alone, small_splits):
    given = mixed_batch(60, 40, seed=3, dtype=torch.float32)
    assert_same(*both(given, max_depth=4))


def test_a_row_a_program_is_judged_as_on_the_host(kernels_alone, a_row_a_program):
    shapes = [[-1, -1, 1], chains(2)]
    assert_same(*both(sampled_batch(2, shapes, seed=8), max_depth=2))


def test_chains_alone_are_judged_as_on_the_host(kernels_alone):
    given = sampled_batch(200, [chains(b % 5) for b in range(200)], seed=9)
    assert_same(*both(given, max_depth=4))


# --- p and the filters ---


def asked_in_many_ways(size):
    generator = torch.Generator().manual_seed(11)

    def one_of(*values):
        return values[int(torch.randint(len(values), (), generator=generator))]

    return [
        Asked(
            temperature=one_of(0.0, 0.3, 1.0, 2.5),
            top_k=one_of(0, 1, 3, 9, 200),
            top_p=one_of(0.0, 0.05, 0.31, 0.77, 0.95, 1.0),
            min_p=one_of(0.0, 0.0, 0.02, 0.9),
            repetition=one_of(1.0, 1.3),
            output=(1, 2, 2),
            bias=one_of({}, {3: 2.0}),
            bad_words=one_of((), ((4,),)),
            allowed=one_of((), tuple(range(0, 90, 3))),
        )
        for _ in range(size)
    ]


def test_the_filters_keep_what_the_host_keeps(kernels_alone, monkeypatch):
    """Ties included: every fourth token has its neighbour's logit."""
    size, vocab = 60, 90
    logits = torch.randn(size, vocab, generator=torch.Generator().manual_seed(2)) * 3
    logits[:, ::4] = logits[:, 1::4][:, : logits[:, ::4].shape[1]]
    requests, nodes = asked_in_many_ways(size), Nodes.roots(size)
    metadata = controls_of(requests, vocab)
    host = process(logits, metadata, nodes)
    monkeypatch.setattr("paceline.verify.dispatch.kernels", lambda tensor: _served(kernels_alone))
    device = process(logits, metadata, nodes)
    assert torch.equal(device, host)
    assert (host == -math.inf).any(1).sum() > size // 2
    error = (probabilities(device).double() - torch.softmax(host.double(), -1)).abs()
    assert float((error / torch.softmax(host.double(), -1).clamp_min(1e-30)).max()) < 2e-6


def _served(package):
    from tests.verify.device import served

    return served(package)


def test_a_row_is_the_same_bits_in_any_batch(kernels, small_splits):
    logits = torch.randn(3, 60, generator=torch.Generator().manual_seed(3)) * 4

    def p_of(rows):
        metadata = SamplingMetadata(temperature=torch.tensor([1.0, 0.7, 0.0])[rows])
        return probabilities(process(logits[rows], metadata, Nodes.roots(logits[rows].shape[0])))

    assert torch.equal(p_of(slice(1, 2)), p_of(slice(0, 3))[1:2])


def test_the_first_of_equal_logits_wins_across_splits(kernels, small_splits, a_row_a_program):
    logits = torch.zeros(2, 50)
    logits[0, [33, 40]] = 1.0
    assert draw(logits, greedy_draws(2), Nodes.roots(2)).tolist() == [33, 0]


def test_coins_at_the_very_ends_draw_tokens_of_positive_probability(kernels, small_splits, a_row_a_program):
    logits = torch.full((4, 60), -math.inf, dtype=torch.float64)
    logits[:, 20], logits[:, 37], logits[:, 41] = 0.0, -200.0, 1.0
    ends = torch.tensor([2.0**-53, 1 - 2.0**-53, 0.1, 0.9], dtype=torch.float64)
    draws = DrawKeys.by_coins(torch.arange(4), torch.arange(4))
    said = draw(logits, draws, Nodes.roots(4), lambda lane, key, committed, node: ends.to(key.device))
    assert said.tolist() == [20, 41, 20, 41]


def test_a_drafter_proposes_what_it_proposes_on_the_host(kernels_alone, monkeypatch):
    size, vocab = 24, 90
    logits = torch.randn(size, vocab, dtype=torch.float64, generator=torch.Generator().manual_seed(5)) * 3
    nodes = replace(Nodes.roots(size), node=torch.arange(size) % 4, depth=torch.arange(size) % 4 + 1)
    asked = [Asked(temperature=0.5 + row / size, min_p=0.02 * (row % 5), bias={3: 2.0}) for row in range(size)]
    metadata, every = controls_of(asked, vocab), torch.arange(size)
    for kind, coins in ((every % 3, True), (torch.full_like(every, SamplingMode.SEEDED), False)):
        draws = DrawKeys(key=every * 7, committed=every + 20, kind=kind, coins=coins)
        with monkeypatch.context() as patched:
            host, p = propose(logits, metadata, draws, nodes)
            patched.setattr("paceline.verify.dispatch.kernels", lambda tensor: _served(kernels_alone))
            device, q = propose(logits, metadata, draws, nodes)
        assert torch.equal(host, device)
        assert (q is None) == (p is None) is not coins
        if q is not None:
            torch.testing.assert_close(q, p, rtol=1e-12, atol=0.0)


# --- randomness ---


def test_the_hashes_are_the_hosts_bit_for_bit(kernels_alone):
    from paceline.core import rng_triton

    generator = torch.Generator().manual_seed(1)
    words = [torch.randint(-(2**63), 2**63 - 1, (300,), generator=generator) for _ in range(3)]
    where = "cpu" if interpreted() else "cuda"
    there = [word.to(where) for word in words]
    for lane in Lane:
        start = rng.lane_constant(lane)
        for count in (1, 2, 3):
            assert torch.equal(rng_triton.bits(start, there[:count]).cpu(), rng.bits(lane, *words[:count]))
        assert torch.equal(rng_triton.uniform(start, there).cpu(), rng.uniform(lane, *words))


def test_noise_is_the_hosts_to_the_last_bits(kernels_alone):
    vocab, seeds = 4096, torch.arange(16) * 12345
    where = "cpu" if interpreted() else "cuda"
    keys = rng.bits(Lane.GUMBEL, seeds, seeds + 7)
    out = torch.empty(16, vocab, device=where)
    _noise[(16,)](keys.to(where), out, vocab)
    host = gumbel_noise(seeds, seeds + 7, vocab)
    off = (out.cpu() - host).abs() / torch.maximum(host.abs(), torch.tensor(1.0))
    assert float(off.max()) < 4 * 2.0**-23


# --- what must not happen ---


@pytest.mark.parametrize("length", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_draft_from_the_target_itself_is_accepted_whole_with_a_bonus(path, dtype, length):
    """τ = k + 1 exactly, whatever the coins: q made by the same code is the same bits."""

    def hostile(lane, key, committed, node):
        return torch.full(key.shape, 1 - 2.0**-53, dtype=torch.float64, device=key.device)

    for source in (coin, hostile):
        shapes = [chains(length)] * 50
        draft, logits, row_of, nodes, metadata, draws = sampled_batch(50, shapes, spread=0.0, dtype=dtype)
        assert torch.equal(row_of, draft.q.row_of.where(draft.q.row_of >= 0, row_of))
        tempered = replace(metadata, temperature=torch.full((50,), 0.7))
        _, q = propose(logits, tempered, draws, nodes)
        for asked, probs in ((metadata, probabilities(logits)), (tempered, q)):
            draft = replace(draft, q=Proposal(probs=probs, row_of=draft.q.row_of))
            verdict = verify(draft, logits, row_of, nodes, asked, draws, max_depth=4, source=source)
            assert (verdict.num_accepted == length).all()
            assert (verdict.kinds[:, length] == TokenKind.BONUS).all()


def test_the_models_logits_are_never_written_into(kernels):
    given = sampled_batch(4, [chains(2), [-1, -1, 0]] * 2)
    kept = given[1].clone()
    verify(*given, max_depth=2)
    assert torch.equal(given[1], kept)


# --- on a device ---


@pytest.mark.cuda
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("vocab", [11, 5000])
def test_a_graph_replays_verification_without_the_host(vocab):
    """Captured once; replayed on other logits, coins and lengths it says what an eager call says."""
    given = moved(mixed_batch(40, vocab, dtype=torch.float32), "cuda")
    verify(*given, max_depth=4)  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            verdict = verify(*given, max_depth=4)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for seed in range(3):
        other = mixed_batch(40, vocab, seed=seed, dtype=torch.float32)
        given[1].copy_(other[1])
        given[0].tokens.copy_(other[0].tokens)
        given[0].q.probs.copy_(other[0].q.probs)
        given[5].committed.add_(1)
        graph.replay()
        eager = verify(*given, max_depth=4)
        assert_same(eager, verdict)
        assert_same(moved(eager, "cpu"), verify(*moved(given, "cpu"), max_depth=4))


@pytest.mark.cuda
def test_bfloat16_logits_are_read_as_float32():
    given = mixed_batch(40, 5000, dtype=torch.float32)
    rounded = (given[0], given[1].bfloat16(), *given[2:])
    widened = (given[0], given[1].bfloat16().float(), *given[2:])
    assert_same(moved(verify(*moved(rounded, "cuda"), max_depth=4), "cpu"), verify(*widened, max_depth=4))


try:
    import triton
    import triton.language as tl

    from paceline.core.rng_triton import gumbel

    @triton.jit
    def _noise(keys, out, VOCAB: tl.constexpr):
        row = tl.program_id(0)
        token = tl.arange(0, VOCAB)
        tl.store(out + row * VOCAB + token, gumbel(tl.load(keys + row), token))

except ImportError:
    _noise = None


def test_every_kind_of_step_of_the_warm_up_runs_on_the_kernels(kernels):
    graphs = GraphCache(torch.device("cpu"), Staging(torch.device("cpu")))
    graphs.prepare(torch.zeros(4, 40), sequences=2, rows=4, q_rows=3)
    for key in graphs.kinds():
        assert graphs.run(key, verify).tokens.shape == (key.batch, key.width + 1)
