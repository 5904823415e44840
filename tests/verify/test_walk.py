"""The walk is lossless for any draft, proven by exact enumeration through the real functions, and seeds mean tokens."""

import inspect
import itertools
import math
import random
import sys
import types

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.draft import Draft
from paceline.core.rng import gumbel_from, unit_row
from paceline.core.verdict import TokenKind
from paceline.models.backends.cpu.kernels import native_draw
from paceline.native.library import open_library, runnable_variants
from paceline.verify import DrawKeys, Nodes, SamplingMetadata, draw, process, verify
from paceline.verify.host import TokenSampler, walk_on_host
from paceline.verify.sample import _sample_batch, _sample_row, sample, sample_seeded
from tests.helpers.enumeration import Toy
from tests.verify.steps import batch_of, draws_of, flatten, greedy_draws, gumbel_noise, tree

VOCAB, EXACT = 3, 1e-12


def rows_of(toy, committed, nodes):
    """(R, V) logits of every row, its sequence's committed tokens and its drafted ancestors before it."""
    contexts = zip(nodes.seq.tolist(), nodes.path.tolist(), strict=True)
    return torch.stack([toy.logits((*committed[s], *[t for t in path if t >= 0])) for s, path in contexts])


def chance(toy, whole, begin=0):
    """The target's probability of these tokens, from `begin` on."""
    return math.prod(float(toy.p(whole[:i])[whole[i]]) for i in range(begin, len(whole)))


TREES = {
    "plain": ([], []),
    "chain": ([0, 2], [-1, 0]),
    "two children": ([1, 0], [-1, -1]),
    "every child": ([0, 1, 2], [-1, -1, -1]),
    "depth two": ([0, 2, 1, 1, 0], [-1, -1, 0, 0, 1]),
    "equal siblings": ([1, 1, 0, 2], [-1, -1, 0, 1]),
    "full": ([0, 1, 0, 2, 1, 2], [-1, -1, 0, 0, 1, 1]),
}


@pytest.mark.parametrize("name", TREES)
def test_the_joint_distribution_of_three_tokens_is_the_targets(name):
    """Law 1, enumerated: a coin matters only through the token whose stretch of cumulative p it falls in."""
    toy, draft = Toy(11, VOCAB), tree(*TREES[name])
    row_of, nodes = flatten(draft)
    logits = rows_of(toy, [()], nodes)
    rows = logits.shape[0]
    stretches = torch.softmax(logits, -1)
    middles = stretches.cumsum(-1) - stretches / 2
    draws = DrawKeys.by_coins(torch.zeros(1), torch.zeros(1))
    joint = dict.fromkeys(itertools.product(range(VOCAB), repeat=3), 0.0)
    for outcome in itertools.product(range(VOCAB), repeat=rows):
        at = torch.tensor(outcome)[:, None]
        weight = float(stretches.gather(1, at).prod())
        coins = middles.gather(1, at)[:, 0]

        def source(lane, key, committed, node, coins=coins):
            return coins[node + 1]

        verdict = verify(draft, logits, row_of, nodes, SamplingMetadata(), draws, max_depth=draft.width, source=source)
        said = tuple(verdict.tokens[0, : int(verdict.num_accepted) + 1].tolist())
        for rest in itertools.product(range(VOCAB), repeat=3 - len(said)):  # the steps after this one, plainly
            whole = (*said, *rest)
            joint[whole] += weight * chance(toy, whole, len(said))
    for whole, probability in joint.items():
        assert abs(probability - chance(toy, whole)) < EXACT


def test_two_steps_through_the_real_coins_give_the_targets_distribution():
    """5,000 requests of three tokens. Chi-square over 27 outcomes; alarms by chance for one choice in three million."""
    toy, requests = Toy(4, VOCAB), 5_000
    said = [()] * requests
    for step in range(3):
        live = [r for r in range(requests) if len(said[r]) < 3]
        draft = batch_of([TREES[("depth two", "chain")[step % 2]]] * len(live))
        row_of, nodes = flatten(draft)
        logits = rows_of(toy, [said[r] for r in live], nodes)
        draws = DrawKeys.by_coins(torch.tensor(live), torch.tensor([len(said[r]) for r in live]))
        verdict = verify(draft, logits, row_of, nodes, SamplingMetadata(), draws, max_depth=2)
        for row, r in enumerate(live):
            said[r] = (*said[r], *verdict.tokens[row, : int(verdict.num_accepted[row]) + 1].tolist())
    statistic = 0.0
    for whole in itertools.product(range(VOCAB), repeat=3):
        expected = requests * chance(toy, whole)
        statistic += (sum(s[:3] == whole for s in said) - expected) ** 2 / expected
    assert statistic < 79.0  # chi-square with 26 degrees of freedom exceeds this with probability 3e-7


def random_draft(data, vocab, width):
    nodes = data.draw(st.integers(0, width))
    parents = [data.draw(st.integers(-1, node - 1)) for node in range(nodes)]
    return data.draw(st.lists(st.integers(0, vocab - 1), min_size=nodes, max_size=nodes)), parents


def naive_walk(tokens, parents, said):
    """`said[slot]` is the token drawn there. Returns (committed tokens, accepted nodes, kind of the last)."""
    at, path = -1, []
    while True:
        y = said[at + 1]
        children = [node for node, parent in enumerate(parents) if parent == at]
        match = [node for node in children if tokens[node] == y]
        if not match:
            return [tokens[node] for node in path] + [y], path, TokenKind.RECOVERED if children else TokenKind.BONUS
        at = match[0]
        path.append(at)


def by_argmax(walk_on_host):
    """The highest logit of each row is the token drawn there, tied with a later one."""

    def walked(draft, drawn, row_of, max_depth):
        logits = torch.nn.functional.one_hot(drawn, 3).float()
        logits[:, 2] = 1.0  # a tie: the first of the highest is said
        greedy = TokenSampler(0.0, 0, False)
        return walk_on_host(draft, logits, row_of.tolist(), max_depth, [greedy] * draft.batch, [0] * draft.batch)

    return walked


def the_long_way(draft, logits, row_of, max_depth, samplers, committed):
    given = torch.tensor(row_of), flatten(draft)[1], SamplingMetadata(), greedy_draws(draft.batch)
    return verify(draft, logits, *given, max_depth=max_depth)


def check_against_a_loop(walks, rows, drawn, draft, row_of):
    verdict = walks(draft, drawn, row_of, 7)
    assert verdict.tokens.shape == verdict.kinds.shape == (len(rows), 8)
    for b, (tokens, parents) in enumerate(rows):
        expected, path, kind = naive_walk(tokens, parents, drawn[row_of[b].clamp_min(0)].tolist())
        n = len(path)
        assert int(verdict.num_accepted[b]) == n
        assert verdict.tokens[b].tolist() == expected + [-1] * (7 - n)
        assert verdict.path[b].tolist() == path + [-1] * (7 - n)
        assert verdict.kinds[b].tolist() == [TokenKind.DRAFTED] * n + [kind] + [TokenKind.PAD] * (7 - n)


@pytest.mark.parametrize("walks", [by_argmax(the_long_way), by_argmax(walk_on_host)], ids=["walk", "greedy"])
@settings(max_examples=200, deadline=None)
@given(st.data())
def test_the_walk_equals_a_loop_over_nodes(walks, data):
    rows = [random_draft(data, 2, 7) for _ in range(data.draw(st.integers(1, 4)))]
    draft = batch_of(rows, width=7)
    draft.validate(2)
    row_of, nodes = flatten(draft)
    size = nodes.seq.shape[0]
    drawn = torch.tensor(data.draw(st.lists(st.integers(0, 1), min_size=size, max_size=size)))
    check_against_a_loop(walks, rows, drawn, draft, row_of)


def check_random_trees(walks):
    noise = random.Random(1)
    for _ in range(50):
        rows = []
        for _ in range(2):
            parents = [noise.randint(-1, node - 1) for node in range(noise.randint(0, 7))]
            rows.append(([noise.randint(0, 1) for _ in parents], parents))
        draft = batch_of(rows, width=7)
        row_of, nodes = flatten(draft)
        drawn = torch.tensor([noise.randint(0, 1) for _ in range(nodes.seq.shape[0])])
        check_against_a_loop(walks, rows, drawn, draft, row_of)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("parents[child] != node", "parents[child] > node"),
        ("drafted[child] == wanted", "drafted[child] != wanted"),
        ("at[node + 1]", "at[node]"),
        ("at[node + 1]", "node + 1"),
        ("at[0]", "0"),
        ("is_leaf = False", "is_leaf = True"),
        ("node, is_leaf = child, True", "node, is_leaf = child, False"),
        ("path.append(child)", "path.append(node)"),
    ],
)
def test_a_mutation_of_the_greedy_walk_is_noticed(old, new):
    text = inspect.getsource(inspect.getmodule(walk_on_host))
    assert text.count(old) == 1
    with pytest.raises((AssertionError, IndexError)):
        check_random_trees(by_argmax(mutant(text.replace(old, new)).walk_on_host))


def mutant(text):
    module = types.ModuleType("mutant")
    sys.modules["mutant"] = module  # dataclasses look their module up
    exec(compile(text, "mutant", "exec"), module.__dict__)
    return module


FILTERS = {
    "unfiltered": {},
    "filtered": {
        "top_k": torch.tensor([3, 0, 0, 4]),
        "top_p": torch.tensor([1.0, 0.8, 0.9, 0.95], dtype=torch.float64),
        "min_p": torch.tensor([0.0, 0.3, 0.1, 0.2]),
    },
}


def check_host_against_the_long_way(host, native=None, filters=FILTERS["unfiltered"]):
    """Trees of sequences that are greedy, seeded and drawn by coins, at several temperatures: the same verdict."""
    noise, generator = random.Random(3), torch.Generator().manual_seed(3)
    temperatures = [0.7, 1.0, 0.0, 1.6]
    for vocab in (5, 300):
        rows = []
        for _ in temperatures:
            parents = [noise.randint(-1, node - 1) for node in range(7)]
            rows.append(([noise.randrange(5) for _ in parents], parents))
        draft = batch_of(rows, width=7)
        row_of, nodes = flatten(draft)
        logits = torch.randn(len(nodes.seq), vocab, generator=generator)
        logits[:, :5] += 6  # drafts are mostly of these
        for trial in range(40):
            key, committed = torch.arange(4) + 10 * trial, torch.arange(4) * 7 + trial
            seeded = [trial % 2 == index % 2 for index in range(4)]
            others = ["seeded" if own else "coins" for own in seeded]
            kinds = ["greedy" if t == 0 else other for t, other in zip(temperatures, others, strict=True)]
            draws = draws_of(key, committed, kinds)
            metadata = SamplingMetadata(
                temperature=torch.tensor(temperatures), fallback=torch.zeros(4, dtype=torch.int64), **filters
            )
            told = verify(draft, logits, row_of, nodes, metadata, draws, max_depth=7)
            given = zip(metadata.on_host, key.tolist(), seeded, strict=True)
            samplers = [host.TokenSampler(temperature, *rest, *asked) for (temperature, *asked), *rest in given]
            found = host.walk_on_host(draft, logits, row_of.tolist(), 7, samplers, committed.tolist(), native)
            for name in ("tokens", "num_accepted", "path", "kinds"):
                assert getattr(found, name).tolist() == getattr(told, name).tolist()


@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("variant", [None, *runnable_variants()])
def test_the_walk_on_the_host_equals_the_general_walk(variant, filters):
    native = None if variant is None else native_draw(library(variant))
    check_host_against_the_long_way(inspect.getmodule(walk_on_host), native, FILTERS[filters])


def library(variant):
    try:
        return open_library(variant)
    except OSError as problem:
        pytest.skip(str(problem))


@pytest.mark.parametrize("variant", runnable_variants())
@pytest.mark.parametrize("size", [1, 7, 300, 5003])
def test_the_native_draw_returns_the_token_of_numpy_or_none(variant, size):
    """Flat, peaked, tied and banned rows; and it must not give up where nothing is near a boundary."""
    native, noise = native_draw(library(variant)), np.random.default_rng(size)
    rows = [(noise.standard_normal(size) * spread).astype(np.float32) for spread in (0.0, 1.0, 3.0, 9.0) for _ in "ab"]
    rows += [np.round(row) for row in rows]
    for row in rows[::3]:
        row[noise.random(size) < 0.3] = -np.inf
        row[-1] = 0.5
    asked = [(0, 1.0, 0.0), (0, 0.9, 0.0), (2, 1.0, 0.0), (0, 1.0, 0.05), (40, 0.95, 0.02), (3, 0.5, 0.3)]
    decided = []
    for trial, (row, (top_k, top_p, min_p)) in enumerate(itertools.product(rows, asked)):
        for temperature, seeded in itertools.product((0.0, 0.02, 0.7, 1.0), (False, True)):
            sampler = TokenSampler(temperature, trial, seeded, top_k, top_p, min_p)
            named, logits = [], torch.from_numpy(row)[None]
            draw = native(logits)
            sampler.draw(logits, 0, 11, 2, 1, lambda *given, named=named, draw=draw: named.append(draw(*given)))
            assert named[0] in (None, sampler.draw(logits, 0, 11, 2, 1))
            if temperature:
                decided.append(named[0] is not None)
    assert sum(decided) > 0.6 * len(decided)


@pytest.mark.parametrize("variant", runnable_variants())
def test_the_kernel_gives_up_where_rounding_could_decide(variant):
    def native(row, *asked):
        return native_draw(library(variant))(torch.from_numpy(row)[None])(0, *asked)

    even = np.zeros(4, np.float32)
    off = (0, 1.0)  # top_k, top_p
    assert native(even, 1.0, -math.inf, *off, 0.6, 0) == 2
    assert native(even, 1.0, -math.inf, *off, 0.5 - 1e-7, 0) is None  # between two tokens
    assert native(even, 1.0, -math.inf, 0, 0.5 + 1e-7, 0.6, 0) is None  # of equals all stay or none
    assert native(np.array([0, np.nan, 1], np.float32), 1.0, -math.inf, *off, 0.6, 0) is None
    assert native(np.array([0, np.inf, 1], np.float32), 1.0, -math.inf, *off, 0.6, 0) is None
    assert native(np.full(40, -np.inf, np.float32), 1.0, -math.inf, *off, 0.6, 0) is None
    banned = np.full(70, -np.inf, np.float32)
    banned[[1, 2]] = np.nan, 0
    assert native(banned, 1.0, -math.inf, *off, -1.0, 7) is None  # what comes behind it does not hide it
    key = 12345
    units = unit_row(key, np.arange(2, dtype=np.uint32))
    apart = float(np.diff(gumbel_from(units))[0])
    for gap, named in ((1e-4, None), (0.1, 0)):
        assert native(np.array([apart + gap, 0], np.float32), 1.0, -math.inf, *off, -1.0, key) is named


@pytest.mark.parametrize("variant", runnable_variants())
@pytest.mark.parametrize("temperature", [1e30, 3e38])
def test_the_kernel_bears_a_temperature_that_makes_all_tokens_alike(variant, temperature):
    row, sampler = torch.arange(1000.0)[None], TokenSampler(temperature, 1, False, top_k=5, top_p=0.9)
    assert sampler.draw(row, 0, 11, 2, 1, native_draw(library(variant))(row)) == sampler.draw(row, 0, 11, 2, 1)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("committed + depth", "committed"),
        ("committed, node)", "committed, depth)"),
        ("length, node, len(path)", "length, -1, len(path)"),
        ("length, node, len(path)", "length, node, 0"),
        ("Lane.GUMBEL", "Lane.WALK"),
        ("temperature != 1", "temperature > 1"),
        ("at[node + 1]", "node + 1"),
        ("self.temperature == 0", "self.temperature < 0.8"),
        ("tempered < lowest", "tempered <= lowest"),
        ("self.top_k, self.top_p, self.min_p)", "0, self.top_p, self.min_p)"),
        ("self.top_k, self.top_p, self.min_p)", "self.top_k, 1.0, self.min_p)"),
        ("self.top_k, self.top_p, self.min_p)", "self.top_k, self.top_p, 0.0)"),
    ],
)
def test_a_mutation_of_what_is_drawn_on_the_host_is_noticed(old, new):
    text = inspect.getsource(inspect.getmodule(walk_on_host))
    assert text.count(old) == 1
    with pytest.raises((AssertionError, IndexError)):
        check_host_against_the_long_way(mutant(text.replace(old, new)), filters=FILTERS["filtered"])


def test_the_greedy_walk_of_nothing_drafted_is_plain_decoding():
    logits = torch.tensor([[0.0, 2.0, 2.0], [3.0, 1.0, 0.0]])
    verdict = walk_on_host(Draft.empty(2), logits, [[1], [0]], 0, [TokenSampler(0.0, 0, False)] * 2, [5, 5])
    assert verdict.tokens.tolist() == [[0], [1]]
    assert verdict.kinds.tolist() == [[TokenKind.BONUS]] * 2
    assert verdict.num_accepted.tolist() == [0, 0]


def test_plain_decoding_is_the_empty_draft(path):
    logits = torch.tensor([[0.0, 2.0, 1.0], [3.0, 0.0, 1.0]])
    given = Draft.empty(2), logits, torch.tensor([[0], [1]]), Nodes.roots(2), SamplingMetadata(), greedy_draws(2)
    verdict = verify(*given, max_depth=0, num_logprobs=1)
    assert verdict.tokens.tolist() == [[1], [0]]
    assert verdict.kinds.tolist() == [[TokenKind.BONUS], [TokenKind.BONUS]]
    assert verdict.num_accepted.tolist() == [0, 0]
    assert verdict.path.shape == (2, 0)
    assert verdict.logprobs.rank.tolist() == [[1], [1]]
    assert verdict.logprobs.top_tokens.tolist() == [[[1]], [[0]]]


def test_logprobs_belong_to_the_rows_the_tokens_were_drawn_at():
    toy, draft = Toy(2, VOCAB), tree([0, 1, 2, 0, 1], [-1, -1, -1, 0, 0])
    row_of, nodes = flatten(draft)
    logits = rows_of(toy, [()], nodes)
    given = draft, logits, row_of, nodes, SamplingMetadata(), greedy_draws(1)
    verdict = verify(*given, max_depth=2, num_logprobs=2)
    said = verdict.tokens[0, : int(verdict.num_accepted) + 1].tolist()
    assert len(said) > 1
    for i, token in enumerate(said):
        assert float(verdict.logprobs.chosen[0, i]) == pytest.approx(math.log(toy.p(tuple(said[:i]))[token]))


KINDS = ("greedy", "seeded", "coins")


def generate(toy, kinds, drafts, length, seed=5):
    """Run rows of mixed kinds to `length` tokens; drafts(said) -> (tokens, parents) for one row."""
    said = [(1,)] * len(kinds)
    while any(len(s) <= length for s in said):
        draft = batch_of([drafts(s) for s in said])
        row_of, nodes = flatten(draft)
        draws = draws_of(torch.arange(len(kinds)) + seed, torch.tensor([len(s) for s in said]), kinds)
        temperature = torch.tensor([0.0 if kind == "greedy" else 0.8 for kind in kinds])
        metadata = SamplingMetadata(temperature=temperature, top_p=torch.full((len(kinds),), 0.95))
        verdict = verify(
            draft, rows_of(toy, said, nodes), row_of, nodes, metadata, draws, max_depth=max(draft.width, 1)
        )
        for row, n in enumerate(verdict.num_accepted.tolist()):
            said[row] += tuple(verdict.tokens[row, : n + 1].tolist())
    return [s[1 : length + 1] for s in said]


def nothing(said):
    return [], []


def top_two_tree(toy):
    def drafts(said):
        first = toy.logits(said).topk(2).indices.tolist()
        below = [toy.logits((*said, token)).topk(2).indices.tolist() for token in first]
        return [*first, *below[0], *below[1]], [-1, -1, 0, 0, 1, 1]

    return drafts


def hashed_chain(said):
    length = hash(said) % 5
    return [hash((said, i)) % 6 for i in range(length)], list(range(-1, length - 1))


def test_a_seeded_or_greedy_request_commits_the_same_under_any_draft_and_in_any_batch():
    toy, length = Toy(8, 6), 40
    mixed = ["seeded", "greedy", "coins", "seeded", "greedy", "seeded"]
    plainly = generate(toy, mixed, nothing, length)
    for drafts in (top_two_tree(toy), hashed_chain):
        speculatively = generate(toy, mixed, drafts, length)
        for row, kind in enumerate(mixed):
            if kind != "coins":
                assert speculatively[row] == plainly[row]
    alone = generate(toy, ["seeded"], nothing, length, seed=5 + 3)
    assert alone[0] == plainly[3]
    assert plainly[0] != plainly[3]  # two seeds


def test_a_perfect_draft_is_accepted_whole_and_a_hostile_one_not_at_all():
    toy = Toy(1, 5)
    chain, said = [], ()
    for _ in range(4):
        chain.append(int(toy.logits(said).argmax()))
        said = (*said, chain[-1])
    for tokens, accepted in ((chain, 4), ([(t + 1) % 5 for t in chain], 0)):
        draft = Draft.chains(torch.tensor([tokens]), torch.tensor([4]))
        row_of, nodes = flatten(draft)
        verdict = verify(
            draft, rows_of(toy, [()], nodes), row_of, nodes, SamplingMetadata(), greedy_draws(1), max_depth=4
        )
        assert verdict.num_accepted.tolist() == [accepted]
        assert verdict.tokens[0, : min(accepted + 1, 4)].tolist() == chain[: accepted + 1]


def test_coins_at_the_very_ends_draw_tokens_of_positive_probability():
    logits = torch.tensor([[-math.inf, 0.0, -200.0, 1.0, -math.inf]])
    for coin, token in ((2.0**-53, 1), (1 - 2.0**-53, 3)):
        assert sample(logits, torch.tensor([coin], dtype=torch.float64)).tolist() == [token]
        assert _sample_row(logits[0].numpy(), coin) == token


def test_a_coin_draws_by_cumulative_p_in_a_large_vocabulary():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5000, generator=generator, dtype=torch.float64) * 3
    logits[torch.rand(5000, generator=generator) < 0.3] = -math.inf
    cumulative = torch.softmax(logits, -1).cumsum(-1)
    for coin in torch.rand(300, generator=generator, dtype=torch.float64).tolist():
        expected = int(torch.searchsorted(cumulative, torch.tensor([coin], dtype=torch.float64), right=True))
        assert _sample_row(logits.numpy(), coin) == expected
        assert _sample_batch(torch.softmax(logits, -1)[None], torch.tensor([coin], dtype=torch.float64)).tolist() == [
            expected
        ]


@pytest.mark.parametrize("spread", [0.0, 1.0, 12.0])
def test_a_seed_s_token_has_the_highest_sum_of_all_though_few_are_looked_at(spread):
    generator = torch.Generator().manual_seed(2)
    logits = spread * torch.randn(100, 3000, generator=generator)
    logits[torch.rand(100, 3000, generator=generator) < 0.3] = -math.inf
    seeds, positions = torch.arange(100) * 77, torch.arange(100) + 5
    expected = (logits + gumbel_noise(seeds, positions, 3000)).argmax(-1)
    assert sample_seeded(logits, seeds, positions).tolist() == expected.tolist()


def test_a_seed_draws_from_p():
    """8,000 seeds, 8 tokens, one of them banned. 7 cells: chi-square above 42.0 has probability 2e-7."""
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -math.inf, 0.5, 1.5, -2.0]).expand(8_000, 8)
    picked = sample_seeded(logits, torch.arange(8_000), torch.full((8_000,), 9))
    expected = torch.softmax(logits[0].double(), -1) * 8_000
    counts = torch.bincount(picked, minlength=8).double()
    assert counts[4] == 0
    kept = expected > 0
    assert float(((counts - expected) ** 2 / expected)[kept].sum()) < 42.0


def test_a_row_is_drawn_the_same_in_any_batch():
    generator = torch.Generator().manual_seed(9)
    logits = torch.randn(33, 2000, generator=generator) * 3
    key, committed = torch.arange(33) * 1001, torch.arange(33) + 4
    kinds = [KINDS[row % 3] for row in range(33)]

    def drawn(first, last):
        size, of = last - first, kinds[first:last]
        draws = draws_of(key[first:last], committed[first:last], of)
        metadata = SamplingMetadata(temperature=torch.tensor([0.0 if kind == "greedy" else 1.0 for kind in of]))
        nodes = Nodes.roots(size)
        return draw(process(logits[first:last], metadata, nodes), draws, nodes).tolist()

    alone = [drawn(row, row + 1)[0] for row in range(33)]
    for size in range(1, 34):
        assert drawn(0, size) == alone[:size]
