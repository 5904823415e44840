"""The contract on a CUDA device, for what no CPU can run: passes, verification and picks of a chain replayed from
recordings, attention in Gluon, paths moved into place behind a verdict. `pytest -m cuda` runs all tests of that kind.
"""

from __future__ import annotations

import random
from unittest import mock

import numpy as np
import pytest
import torch

from paceline.config import EngineConfig
from paceline.core.draft import Draft
from paceline.drafters import METHODS as TABLE
from paceline.drafters.base import HostDrafter
from paceline.drafters.model.draft_model import DraftModelDrafter
from paceline.engine.engine import Engine
from paceline.engine.policy import DraftPlan
from paceline.engine.sampler import Sampler
from paceline.models.kv_cache import slots_of
from paceline.models.plan import PassPlan
from paceline.verify import verify
from tests.helpers.contract_toys import ByRequest, context_for, exercised, params, run
from tests.helpers.random_llama import decoder_and_drafter, llama

pytestmark = pytest.mark.cuda
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CONFIG = llama()
PROMPTS = [[(7 * at + at * at * which) % 90 for at in range(20 + 50 * which)] for which in range(4)]
METHODS = ("ngram", "suffix", "draft-model", "bushes")
LENGTH, K = 50, 6


class Bushes(HostDrafter):
    """Knows the answers; at every depth a wrong token comes before the right one, and now and then there is no right
    one, so accepted paths have to be moved, and end."""

    name, feedback = "bushes", 3

    def __init__(self):
        self.answers, self.rows_walked = {}, 0

    def on_feedback(self, feedback):
        """Follow greedy answers through the rows: the token behind each row is the likeliest there."""
        for sequence, length, start, end in zip(
            feedback.sequences, feedback.lengths, feedback.starts, feedback.ends, strict=True
        ):
            row, params = start, sequence.params
            assert feedback.tokens[row] == sequence.tokens[length - 1]
            for token in sequence.tokens[length:] if params.greedy and not params.allowed_token_ids else ():
                likeliest = feedback.probs[row] == feedback.probs[row, 0]  # several, where they tie
                assert token in feedback.ids[row][likeliest]
                self.rows_walked += 1
                behind = feedback.parents[start:end] == row
                found = np.flatnonzero(behind & (feedback.tokens[start:end] == token))
                if not len(found):
                    break
                row = start + found[0]

    def propose(self, rows):
        draft = Draft.empty(len(rows), width=max(row.max_nodes for row in rows))
        for at, row in enumerate(rows):
            outputs, parent, node = row.sequence.num_output, -1, 0
            for depth, token in enumerate(
                self.answers[row.sequence.request_id][outputs : outputs + row.max_nodes // 2], start=1
            ):
                missed = (outputs + depth) % 7 == 0
                for drafted in ((token + depth) % CONFIG.vocab_size, token)[: 1 if missed else 2]:
                    draft.tokens[at, node], draft.parents[at, node], draft.depth[at, node] = drafted, parent, depth
                    node += 1
                if missed:
                    break
                parent = node - 1
            draft.num_nodes[at] = node
        return draft


@pytest.fixture(scope="module")
def engine():
    target, small = decoder_and_drafter(CONFIG, DEVICE)
    drafters = [
        TABLE["ngram"].make(context_for(CONFIG, ngram_min=1, ngram_max=3)),
        TABLE["suffix"].make(context_for(CONFIG)),
        DraftModelDrafter(small),
        Bushes(),
    ]
    config = EngineConfig(
        prefix_caching=False, num_blocks=256, block_size=16, max_num_seqs=4, max_num_batched_tokens=96
    )
    return Engine(target, config, drafters=drafters, policy=ByRequest({}))


def answers(engine, wanted, methods):
    """Answer all prompts in one batch, each drafted for by its method: sequences by request id."""
    engine.policy.choices = {str(at): DraftPlan(method, K) for at, method in enumerate(methods) if method != "none"}
    requests = [(at, str(at), prompt, one) for at, (prompt, one) in enumerate(zip(PROMPTS, wanted, strict=True))]
    sequences, _ = run(engine, requests)
    assert engine.drafters.failures == 0
    assert engine.blocks.num_free == engine.blocks.num_blocks
    return sequences


SOME = range(0, 90, 3)  # token ids
ASKED = {
    "greedy": [{}] * 4,
    "allowed": [
        {"allowed_token_ids": SOME},
        {"allowed_token_ids": SOME, "temperature": 0.6, "seed": 1},
        {},
        {"allowed_token_ids": SOME, "temperature": 0.9, "top_p": 0.8, "seed": 2},
    ],
    "seeded": [{"temperature": 0.6, "seed": at} for at in range(4)],
    "each its own": [{}, {"temperature": 0.6, "seed": 1}, {"top_p": 0.7, "temperature": 0.9, "seed": 2}, {}],
}


@pytest.mark.parametrize("asked", ASKED)
def test_speculation_changes_when_tokens_come_never_which(engine, asked):
    wanted = [params(max_tokens=LENGTH, ignore_eos=True, **one) for one in ASKED[asked]]
    plain = {name: one.output_tokens for name, one in answers(engine, wanted, ["none"] * 4).items()}
    for name, one in zip(plain, ASKED[asked], strict=True):
        assert set(plain[name]) <= set(one.get("allowed_token_ids", range(CONFIG.vocab_size)))
    engine.drafters.drafters[-1].answers = plain
    for methods in (*([method] * 4 for method in METHODS), METHODS):
        sequences = answers(engine, wanted, methods)
        assert {name: one.output_tokens for name, one in sequences.items()} == plain, methods
        assert exercised(sequences.values()), methods
        if asked == "greedy":
            tokens = sum(sequence.num_output for sequence in sequences.values())
            assert engine.drafters.drafters[-1].rows_walked >= tokens
            engine.drafters.drafters[-1].rows_walked = 0


@pytest.mark.parametrize("method", ["ngram", "draft-model"])
def test_what_is_sampled_does_not_depend_on_what_is_captured(engine, method, monkeypatch):
    """Coins are the same in both runs, and no policy looks at a clock."""
    wanted = [
        params(max_tokens=LENGTH, temperature=0.8, ignore_eos=True, **one) for one in ({}, {}, {"top_p": 0.9}, {})
    ]
    sampler, graphs = engine.runner.sampler, engine.drafters.drafters[2]._graphs
    outputs = []
    before = sampler.uncaptured
    for captured in (True, True, False):
        keys = random.Random(3)
        monkeypatch.setattr("paceline.core.sequence.secrets.randbits", keys.getrandbits)
        uncaptured = Sampler(engine.model.config.vocab_size, frozenset(), DEVICE, verifier=verify)
        monkeypatch.setattr(engine.runner, "sampler", sampler if captured else uncaptured)
        with mock.patch.object(graphs, "of", graphs.of if captured else lambda *given: None):
            outputs.append(answers(engine, wanted, [method] * 4))
        assert sampler.uncaptured == before or not captured
    assert exercised(outputs[0].values())
    texts = [[one.output_tokens for one in each.values()] for each in outputs]
    assert texts[0] == texts[1] == texts[2]
    if DEVICE.type == "cuda":
        assert len(sampler._graphs) > 0
        assert method != "draft-model" or any(graph._captured for graph in graphs._made.values())


def test_prompt_logprobs_are_those_the_tokens_had_when_they_were_generated(engine):
    """In chunks, beside decodes with drafts of other requests."""
    wanted = [params(max_tokens=LENGTH, logprobs=2, ignore_eos=True)] * 4
    said = answers(engine, wanted, (*METHODS[:3], "none"))
    engine.policy.choices = {f"again {at}": DraftPlan("ngram", K) for at in range(4)}
    requests = [
        (at, f"again {at}", [*prompt, *said[str(at)].output_tokens], params(max_tokens=20, prompt_logprobs=2))
        for at, prompt in enumerate(PROMPTS)
    ]
    again, _ = run(engine, requests)
    for at, prompt in enumerate(PROMPTS):
        found, expected = again[f"again {at}"].prompt_logprobs, said[str(at)].logprobs
        assert len(found) == len(prompt) + LENGTH - 1
        for mine, theirs in zip(found[len(prompt) - 1 :], expected, strict=True):
            assert list(mine) == list(theirs)
            assert [rank for _, rank in mine.values()] == [rank for _, rank in theirs.values()]
            assert [value for value, _ in mine.values()] == pytest.approx(
                [value for value, _ in theirs.values()], abs=1e-5
            )


def test_the_cache_after_accepted_and_rejected_branches_is_a_fresh_prefills(engine):
    wanted = params(max_tokens=LENGTH, ignore_eos=True)
    bushes, cache = engine.drafters.drafters[-1], engine.runner.cache
    bushes.answers = {name: one.output_tokens for name, one in answers(engine, [wanted] * 4, ["none"] * 4).items()}
    moved, compact = [], cache.compact

    def counting(nodes, path):
        moved.append((path > torch.arange(path.shape[1], device=path.device)).sum())
        compact(nodes, path)

    engine.policy.choices = {str(at): DraftPlan("bushes", K) for at in range(4)}
    sequences = [engine.add_request(str(at), prompt, wanted)[0] for at, prompt in enumerate(PROMPTS)]
    with mock.patch.object(cache, "compact", counting):
        while max(sequence.num_output for sequence in sequences) < LENGTH - K:
            engine.step()
    kept = [(sequence.tokens[: sequence.num_computed], read(engine, sequence)) for sequence in sequences]
    for sequence in sequences:
        engine.cancel(sequence.request_id)
    assert sum(int(one) for one in moved) > 20
    engine.policy.choices = {}
    for tokens, found in kept:
        (sequence,) = engine.add_request("fresh", tokens, wanted)
        while sequence.num_computed < len(tokens):
            engine.step()
        for one, other in zip(found, read(engine, sequence, len(tokens)), strict=True):
            assert torch.equal(one, other)
        engine.cancel("fresh")


def read(engine, sequence, count=None):
    """(2, n, heads, dim) of each of the target's layers."""
    cache = engine.runner.cache
    slots = slots_of(np.array([sequence.blocks]), 0, np.arange(count or sequence.num_computed), cache.block_size)
    layers = cache.layers[: CONFIG.num_layers]
    return [torch.stack((layer.k[slots], layer.v[slots])) for layer in layers]


@pytest.mark.parametrize(("kv_heads", "group", "dim"), [(2, 4, 64), (1, 7, 128)])
def test_attention_in_gluon_has_the_bits_of_the_kernel_that_serves_all(kv_heads, group, dim):
    from paceline.models.backends.cuda.attention import attention

    if not attention.pipelines(torch.empty(1, 1, dim, dtype=torch.bfloat16, device=DEVICE)):
        pytest.skip("no such kernel for this device")
    torch.manual_seed(0)
    ends, counts = torch.tensor([5, 64, 200, 700, 700]), torch.tensor([1, 3, 20, 1, 40])
    blocks = torch.randperm(5 * 44, dtype=torch.int32).view(5, 44)
    owner = torch.arange(5).repeat_interleave(counts)
    positions = (ends - counts - (counts.cumsum(0) - counts))[owner] + torch.arange(len(owner))
    plan = PassPlan.in_order(positions.int(), positions.int(), owner.int(), blocks, 16, 700).to(DEVICE)
    shape = (blocks.numel() * 16, kv_heads, dim)
    cache = attention.LayerCache(*(torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) for _ in "kv"))
    q = torch.randn(len(owner), kv_heads * group, dim, device=DEVICE, dtype=torch.bfloat16)
    work, workspace = attention.work_of(plan, group, kv_heads), attention.Workspace(DEVICE)

    def attended():
        return attention.attention(q, plan, work, cache, dim**-0.5, None, workspace).clone()

    gluon = attended()
    with mock.patch.object(attention, "pipelines", return_value=False):
        assert torch.equal(gluon, attended())
    assert bool(gluon.isfinite().all())
