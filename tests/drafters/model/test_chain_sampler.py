"""A draft model that continues rows without the host: which rows do, the chain's inputs, and the state afterwards."""

from __future__ import annotations

import random

import pytest
import torch

from paceline.config import SpeculationConfig
from paceline.core.rng import Lane, coin
from paceline.core.sequence import Sequence
from paceline.drafters import METHODS, DrafterContext
from paceline.drafters.model.chain_sampler import ChainSampler, SampledChains, SamplingGraphs
from paceline.drafters.model.draft_model import DraftModelDrafter
from paceline.engine.policy import DraftPlan
from paceline.testing import toy_config
from paceline.verify import sample_weighted
from tests.helpers.contract_toys import (
    VOCAB,
    ByRequest,
    ChainModel,
    FunctionModel,
    exercised,
    imitating,
    make_engine,
    params,
    plain,
    prompt_of,
    repeating,
    run,
)


def test_greedy_rows_draft_at_once_and_read_one_or_two_tokens():
    model = ChainModel(repeating)
    engine = make_engine([DraftModelDrafter(model)], k=4)
    requests = [(0, str(i), prompt_of(i, 5 + i), params(max_tokens=1 + 3 * 5)) for i in range(2)]
    sequences, _ = run(engine, requests)
    assert model.asked == [[(1, 4)] * 2, [(2, 4)] * 2, [(2, 4)] * 2], "the prompt is read by a pass"
    for sequence in sequences.values():
        assert sequence.stats.num_accepted_tokens == sequence.stats.num_draft_tokens == 3 * 4


SAMPLINGS = {
    "greedy": [{}] * 2,
    "coins": [{"temperature": 1.3}] * 3,
    "seeds": [{"temperature": 1.3, "seed": seed} for seed in (3, 3, 4)],
    "filters": [{"temperature": 2.0, **one} for one in ({"top_k": 6}, {"top_p": 0.8}, {"min_p": 0.1})],
    "all kinds": [{"temperature": 1.3}, {}, {"temperature": 0.9, "seed": 3}, {"temperature": 2.0, "top_k": 6}],
}


@pytest.mark.parametrize(
    ("samplings", "logits_of"),
    [(SAMPLINGS["greedy"], repeating), *((each, imitating) for each in SAMPLINGS.values())],
    ids=["greedy, always right", *SAMPLINGS],
)
def test_rows_draft_the_same_by_the_same_coins_whichever_way_they_go(samplings, logits_of, monkeypatch):
    """Step by step the same tokens are committed: no coin is shifted, and none is used in two steps, where a draft was
    begun when only the device knew how many tokens the step under way would commit."""
    requests = [(0, str(i), prompt_of(i, 4 + 7 * i), params(max_tokens=40, **one)) for i, one in enumerate(samplings)]
    results, models = [], []
    for model, ahead in (
        (FunctionModel(logits_of), False),
        (ChainModel(logits_of), False),
        (ChainModel(logits_of), True),
    ):
        keys = random.Random(5)
        monkeypatch.setattr("paceline.core.sequence.secrets.randbits", keys.getrandbits)
        model.most_rows = len(samplings)
        engine = make_engine([DraftModelDrafter(model)], k=3, ahead=ahead)
        sequences, outputs = run(engine, requests)
        assert engine.drafters.failures == 0
        assert logits_of is repeating or exercised(sequences.values())
        results.append({name: [output.tokens for output in outputs[name]] for name in sequences})
        models.append(model)
    assert results[0] == results[1] == results[2]
    _, chain, ahead = models
    assert samplings is SAMPLINGS["greedy"] or min(chain.sampled, ahead.sampled) > 5
    assert not chain.ahead
    assert len(ahead.ahead) > 5 > len(ahead.asked), "only the first and the last drafts are asked for in their step"


def test_the_number_of_tokens_a_step_under_way_commits_is_part_of_the_key(monkeypatch):
    """The test above would notice coins of another length: here they are those of the step before."""

    def stale(self, graphs, sequences, count, unread):
        real(self, graphs, sequences, count, None)

    requests = [(0, "a", prompt_of(0, 9), params(max_tokens=40, temperature=1.3))]
    results = []
    for fault in (False, True):
        real, keys = ChainSampler.__init__, random.Random(5)
        with monkeypatch.context() as patched:
            patched.setattr("paceline.core.sequence.secrets.randbits", keys.getrandbits)
            if fault:
                patched.setattr(ChainSampler, "__init__", stale)
            results.append(
                run(make_engine([DraftModelDrafter(ChainModel(imitating))], k=3, ahead=True), requests)[1]["a"]
            )
    assert [one.tokens for one in results[0]] != [one.tokens for one in results[1]]


def test_drafts_that_are_sampled_may_be_cut_by_what_is_asked_for_next():
    """q goes with the nodes that are left of it."""
    drafted = SampledChains(torch.arange(12).view(3, 4), torch.arange(12.0)[:, None].expand(12, 20), (0, 2))
    draft = drafted.chains([3, 2, 1])
    assert draft.tokens_on_device
    assert draft.tokens.tolist() == [[0, 1, 2], [4, 5, 6], [8, 9, 10]]
    assert draft.num_nodes.tolist() == [3, 2, 1]
    assert draft.q.row_of.tolist() == [[0, 3, 6, -1], [-1] * 4, [2, -1, -1, -1]]
    draft.validate(20)


def test_logits_that_are_no_numbers_leave_q_finite_and_cost_no_answer():
    def broken(context, vocab_size):
        logits = list(imitating(context, vocab_size))
        return [float("nan")] * vocab_size if len(context) % 3 == 0 else [*logits[:-2], float("nan"), float("inf")]

    model = ChainModel(broken)
    engine = make_engine([DraftModelDrafter(model)], k=3, ahead=True)
    samplings = [{"temperature": 1.3, "seed": 3}, {"temperature": 1.3}]
    requests = [(0, str(i), prompt_of(i, 6), params(max_tokens=30, **one)) for i, one in enumerate(samplings)]
    verified, propose = [], engine.drafters.propose
    engine.drafters.propose = lambda *asked: verified.append(propose(*asked)) or verified[-1]
    sequences, _ = run(engine, requests)
    assert sequences["0"].output_tokens == plain(requests[:1])["0"].output_tokens
    assert sequences["1"].num_output == 30
    sampled = [draft.q.probs for draft in verified if draft.q is not None]
    assert len(sampled) > 5
    for q in sampled:
        torch.testing.assert_close(q.sum(1), torch.ones(len(q)))


@pytest.mark.cuda
@pytest.mark.parametrize("asked", [{}, {"seed": 3}, {"top_k": 40, "top_p": 0.9}])
def test_a_captured_sample_equals_its_kernels_one_by_one(asked):
    device, vocab, wanted = torch.device("cuda"), 5000, params(temperature=0.7, **asked)
    graphs = SamplingGraphs(vocab, device)
    for rows in (1, 3, 1):
        sequences = [Sequence(str(row), [0] * (3 + row), wanted, max_len=99) for row in range(rows)]
        one, other = (ChainSampler(graphs, sequences, 4, None) for _ in "ab")
        other._graph = None
        for depth in range(4):
            logits = 3 * torch.randn(rows, vocab, device=device)
            assert torch.equal(one(logits, depth), other(logits, depth))
        assert not asked.get("seed") or not len(one._q)
        assert torch.equal(one._q, other._q)


class Again:
    """A recording by hand: the graph's work once more, into where it wrote first."""

    def __init__(self, work):
        self.work, self.result = work, tuple(part.clone() for part in work())

    def replay(self):
        for into, value in zip(self.result, self.work(), strict=True):
            into.copy_(value)


@pytest.mark.parametrize("fails", [False, True])
def test_samples_do_not_depend_on_whether_they_are_recorded(fails, monkeypatch):
    """A replay overwrites the result of the one before, so q must have been copied; padding rows have no effect."""

    def record(work):
        graph = work.__self__
        captured.append(graph)
        if fails:
            raise RuntimeError("no memory left\nfor a recording")
        depth = graph._depth.clone()
        recording = Again(work)
        graph._depth.copy_(depth)  # what is recorded does not run
        return recording

    captured, graphs, wanted = [], SamplingGraphs(50, torch.device("cpu")), params(temperature=0.7)
    monkeypatch.setattr(graphs._recorder, "capture", record)
    for rows in (3, 4, 3):
        sequences = [Sequence(str(row), [0] * (3 + row), wanted, max_len=99) for row in range(rows)]
        one, other = (ChainSampler(graphs, sequences, 4, None) for _ in "ab")
        one._graph._captures, other._graph = one._graph._captured is None and not captured, None
        for depth in range(4):
            logits = 3 * torch.randn(rows, 50, generator=torch.Generator().manual_seed(10 * rows + depth))
            assert torch.equal(one(logits, depth), other(logits, depth))
        assert torch.equal(one._q, other._q)
    assert len(captured) == 1


def test_there_is_one_graph_for_each_form_whatever_rows_ask_for():
    graphs, made = SamplingGraphs(50, torch.device("cpu")), []
    for asked in ({}, {"top_p": 0.9}, {"seed": 4}, {"top_k": 5}, {}, {"min_p": 0.1, "seed": 4}):
        sequence = Sequence("0", [0], params(temperature=0.7, **asked), max_len=9)
        made.append(ChainSampler(graphs, [sequence], 1, None)._graph)
    assert made[0] is made[2] is made[4]
    assert made[1] is made[5]
    assert len(graphs._made) == 3


def test_rows_that_depend_on_earlier_tokens_go_by_passes():
    model = ChainModel(imitating)
    engine = make_engine([DraftModelDrafter(model)], k=3)
    wishes = [
        {},
        {"temperature": 0.8, "seed": 3, "presence_penalty": 0.3},
        {"repetition_penalty": 1.2},
        {"logit_bias": {3: 1.0}},
        {"temperature": 0.8, "seed": 3, "bad_words": ["ab"]},
        {"min_tokens": 15},
    ]
    requests = [(0, str(i), prompt_of(i, 6), params(max_tokens=16, **wish)) for i, wish in enumerate(wishes)]
    sequences, _ = run(engine, requests)
    results = plain(requests)
    assert model.asked
    assert all(len(asked) == 1 for asked in model.asked), "the first; the last when it may end"
    assert engine.drafters.failures == 0
    for name, sequence in sequences.items():
        assert sequence.output_tokens == results[name].output_tokens
        assert sequence.stats.num_draft_tokens > 0


def test_too_many_greedy_rows_go_by_passes():
    model = ChainModel(repeating)
    requests = [(0, str(i), prompt_of(i, 5), params(max_tokens=9)) for i in range(3)]
    run(make_engine([DraftModelDrafter(model)], k=3), requests)
    assert model.asked == []


def test_a_chain_that_fails_is_not_asked_again_and_nothing_of_it_is_trusted():
    model = ChainModel(imitating)
    drafter = DraftModelDrafter(model)
    engine = make_engine([drafter], k=4)
    request = (0, "a", prompt_of(0, 9), params(max_tokens=30))

    def fail(engine):
        model.broken = True

    sequence = run(engine, [request], after_step=fail)[0]["a"]
    assert engine.drafters.failures == 1
    assert drafter._chain is None
    assert sequence.output_tokens == plain([request])["a"].output_tokens
    assert sequence.stats.num_accepted_tokens > 0


def test_who_ends_or_comes_or_gives_way_while_drafts_are_under_way_changes_no_answer():
    for eos, blocks in (((), 64), ((3,), 64), ((), 22)):
        model = ChainModel(imitating)
        model.most_rows = 8
        engine = make_engine(
            [DraftModelDrafter(model, eos_token_ids=eos)], ahead=True, k=3, eos=eos, num_blocks=blocks, max_num_seqs=5
        )
        kinds = [{}, {"temperature": 0.8, "seed": 3}, {"temperature": 0.8, "seed": 4, "top_k": 6}]
        requests = [
            (3 * i, str(i), prompt_of(i % 3, 5 + i), params(max_tokens=9 + 4 * i, **kinds[(i + blocks) % 3]))
            for i in range(7)
        ]
        sequences, _ = run(engine, requests, cancel=[(9, "2"), (10, "3")])
        results = plain(requests, eos=eos)
        assert model.ahead
        assert engine.drafters.failures == 0
        for name, sequence in sequences.items():
            told_tokens = results[name].output_tokens
            if sequence.finish_reason == "abort":
                told_tokens = told_tokens[: sequence.num_output]
            assert sequence.output_tokens == told_tokens
        assert engine.blocks.num_free == blocks


class Wavering(ByRequest):
    """Another k for each sequence and step, and now and then another method or none."""

    def __init__(self, methods, seed):
        super().__init__({}, DraftPlan())
        self.methods, self.noise = methods, random.Random(seed)

    def choose(self, sequence):
        return DraftPlan(self.noise.choice(self.methods), self.noise.randint(0, 6))


@pytest.mark.parametrize("seed", range(4))
def test_what_is_trusted_was_written_whatever_is_asked_for_next(seed, monkeypatch):
    """The model checks that every position it reads holds the token that stands there."""
    monkeypatch.setattr("paceline.core.sequence.secrets.randbits", random.Random(seed).getrandbits)
    model = ChainModel(imitating)
    model.most_rows = 3
    drafter = DraftModelDrafter(model)
    other = METHODS["ngram"].make(DrafterContext(model.config, torch.device("cpu"), SpeculationConfig()))
    policy = Wavering([drafter.name, drafter.name, drafter.name, other.name], seed)
    engine = make_engine([drafter, other], ahead=True, policy=policy, max_num_seqs=3)
    kinds = [
        {},
        {"temperature": 0.8, "seed": 3},
        {"temperature": 1.2},
    ]  # the last cannot be checked by its answer alone
    requests = [(2 * i, str(i), prompt_of(i, 5 + i), params(max_tokens=40, **kinds[(i + seed) % 3])) for i in range(3)]
    drawn = watch_q(engine)
    sequences, _ = run(engine, requests)
    assert model.ahead
    assert engine.drafters.failures == 0
    results = plain([request for request in requests if request[3].greedy or request[3].seed is not None])
    assert len(results) == 2
    assert all(sequences[name].output_tokens == alone.output_tokens for name, alone in results.items())
    assert len(drawn) > 20


@pytest.mark.parametrize("seed", range(3))
def test_every_token_was_drawn_from_the_q_that_goes_with_it_whatever_is_left_of_its_draft(seed, monkeypatch):
    monkeypatch.setattr("paceline.core.sequence.secrets.randbits", random.Random(seed).getrandbits)
    model = ChainModel(imitating, most_rows=4)
    drafter = DraftModelDrafter(model)
    engine = make_engine([drafter], ahead=True, policy=Wavering([drafter.name], seed), max_num_seqs=4)
    kinds = [{"temperature": 0.8}, {}, {"temperature": 1.2}, {"temperature": 1.7}, {"temperature": 1.0, "seed": 3}]
    lengths = [24, 30, 12, 18, 24]
    requests = [(i, str(i), prompt_of(i, 5), params(max_tokens=lengths[i], **one)) for i, one in enumerate(kinds)]
    drawn = watch_q(engine)
    run(engine, requests)
    assert engine.drafters.failures == 0
    assert len(model.ahead) > 5
    assert len(drawn) > 20


def watch_q(engine):
    """Every token drawn by a coin, as it is proposed: from its own q, by the coin of the step it is judged in."""
    propose, drawn = engine.drafters.propose, []

    def watched(batch, *asked):
        draft = propose(batch, *asked)
        for at, index in enumerate(batch.sampling):
            sequence, wanted = batch.sequences[index], batch.sequences[index].params
            method, _ = batch.drafts.get(index, (None, 0))
            if method != DraftModelDrafter.name or wanted.greedy or wanted.seed is not None:
                continue
            tokens = draft.tokens[at, : draft.num_nodes[at]].tolist()
            for node, token in enumerate(tokens):
                logits = torch.tensor(imitating((*sequence.tokens, *tokens[:node])))
                q = draft.q.probs[draft.q.row_of[at, node]][None]
                torch.testing.assert_close(q[0], torch.softmax(logits / wanted.temperature, 0))
                key = (sequence.noise_key, len(sequence.tokens), node - 1)
                coins = coin(Lane.DRAFT, *(torch.tensor([word]) for word in key))
                assert sample_weighted(q, coins).tolist() == [token]
                drawn.append(token)
        return draft

    engine.drafters.propose = watched
    return drawn


def test_a_draft_model_with_a_shorter_context_drafts_to_its_end_and_no_further():
    model = ChainModel(imitating, config=toy_config(VOCAB, max_positions=20))
    engine = make_engine([DraftModelDrafter(model)], ahead=True, k=3)
    request = (0, "a", prompt_of(0, 9), params(max_tokens=30))
    sequence = run(engine, [request])[0]["a"]
    assert engine.drafters.failures == 0
    assert model.ahead
    assert sequence.output_tokens == plain([request])["a"].output_tokens
