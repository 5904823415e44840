"""Drafters that read hidden states of a real decoder, on a CPU and on a GPU: Medusa, and one with K/V of its own and
trees that only the device knows. Steps are launched before the one before is read, on the CPU too."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import pytest
import torch

from paceline.config import EngineConfig
from paceline.core.device_draft import DeviceDraft
from paceline.core.draft import packed_to
from paceline.core.verdict import TokenKind, Verdict
from paceline.drafters.heads.medusa import MedusaDrafter
from paceline.drafters.tapped import TappedDrafter
from paceline.engine.engine import Engine
from paceline.engine.policy import DraftPlan
from paceline.engine.sampler import Sampler
from paceline.models.decoder import FINAL
from paceline.models.kv_cache import KVSpec, slots_of
from paceline.verify import verify
from paceline.verify.cuda.graphs import WIDTHS
from tests.cuda.test_cuda import CONFIG, LENGTH, PROMPTS
from tests.drafters.block.dspark_reference import knowing
from tests.drafters.block.dspark_reference import make as make_block_drafter
from tests.drafters.overfit import CPU, overfit_heads, random_heads, taps_of, tiny_decoder
from tests.helpers.contract_toys import ByRequest, NowAndThen, exercised, params, run

DEVICES = [CPU, pytest.param(torch.device("cuda"), marks=pytest.mark.cuda)]
ASKED = {"greedy": {}, "seeded": {"temperature": 0.6}}
SIZES = EngineConfig(prefix_caching=False, num_blocks=256, block_size=16, max_num_seqs=4, max_num_batched_tokens=96)


def requests_of(asked):
    sampling = ASKED[asked]
    return [
        (
            at,
            str(at),
            prompt,
            params(max_tokens=LENGTH, ignore_eos=True, **sampling, **({"seed": at} if sampling else {})),
        )
        for at, prompt in enumerate(PROMPTS)
    ]


@pytest.fixture(scope="module", params=DEVICES, ids=lambda device: device.type)
def device(request):
    return request.param


@pytest.fixture(scope="module")
def plain(device):
    """Answers by way of sampling and request, and heads that have seen them."""
    engine = Engine(tiny_decoder(device), SIZES)
    expected = {asked: outputs(run(engine, requests_of(asked))[0]) for asked in ASKED}
    texts = [[*prompt, *each[str(at)]] for each in expected.values() for at, prompt in enumerate(PROMPTS)]
    begins = [len(prompt) - 2 for _ in expected for prompt in PROMPTS]
    return expected, overfit_heads(tiny_decoder(), texts, begins=begins)


def knowing_drafter(decoder, texts, **kind):
    """A block drafter that has seen the texts."""
    config, tensors = knowing(CONFIG, decoder.embedding.cpu(), texts, **kind)
    options = {"kernels": decoder.kernels, "device": decoder.device, "dtypes": decoder.dtypes}
    return make_block_drafter(config, tensors, decoder.embedding, **options)


def outputs(sequences):
    return {name: sequence.output_tokens for name, sequence in sequences.items()}


def watch(drafter):
    """How many drafts were begun behind a step; on a GPU none of them may wait for it."""
    propose, begun = drafter.propose, []

    def watched(rows, after=None):
        begun.append(after is not None)
        waits = drafter.device.type == "cuda"
        if waits:
            torch.cuda.set_sync_debug_mode("error")
        try:
            return propose(rows, after)
        finally:
            if waits:
                torch.cuda.set_sync_debug_mode("default")

    drafter.propose = watched
    return begun


def engine_for(drafter, decoder, policy):
    engine = Engine(decoder, SIZES, drafters=[drafter], policy=policy)
    engine.runs_ahead = True
    return engine


def check_answers(engine, drafter, expected, asked, *, knows, good):
    """Answers are the plain ones, and drafts are begun early. `knows`: drafts are right now and then; `good`: often."""
    begun = watch(drafter)
    sequences, _ = run(engine, requests_of(asked))
    assert outputs(sequences) == expected[asked]
    assert sum(begun) > 5, "drafts are begun behind steps under way"
    assert exercised(sequences.values()) or not knows
    assert sum(one.stats.num_accepted_tokens for one in sequences.values()) > 40 or not good
    assert engine.drafters.failures == 0
    assert engine.blocks.num_free == engine.blocks.num_blocks


@pytest.mark.parametrize("weights", ["random", "overfit"])
def test_medusa_changes_when_tokens_come_never_which(device, plain, weights):
    expected, heads = plain
    decoder = tiny_decoder(device)
    if weights == "random":
        heads = random_heads(CONFIG.hidden_size, CONFIG.vocab_size, layers=2)
    drafter = MedusaDrafter(
        heads, CONFIG.vocab_size, kernels=decoder.kernels, device=device, dtype=decoder.dtypes.compute
    )
    engine = engine_for(drafter, decoder, ByRequest({str(at): DraftPlan(drafter.name, at * 5 + 2) for at in range(4)}))
    for asked in ASKED:
        check_answers(engine, drafter, expected, asked, knows=weights == "overfit", good=weights == "overfit")
    if device.type == "cuda":
        assert drafter._graphs, "the heads are captured"


@pytest.mark.parametrize("captured", [True, False], ids=["captured", "kernel by kernel"])
@pytest.mark.parametrize("kind", [{}, {"markov_rank": 0, "qk_norm": True}], ids=["dspark", "dflash"])
def test_block_drafters_change_when_tokens_come_never_which(device, plain, kind, captured):
    """Also where a step is larger than any verification that was captured."""
    expected, _ = plain
    decoder = tiny_decoder(device)
    texts = [[*prompt, *each[str(at)]] for each in expected.values() for at, prompt in enumerate(PROMPTS)]
    drafter = knowing_drafter(decoder, texts, **kind)
    choices = {str(at): DraftPlan(drafter.name, (1, 5, 17, 60)[at]) for at in range(4)}
    engine = engine_for(drafter, decoder, ByRequest(choices))
    if not captured:
        engine.runner.sampler = Sampler(CONFIG.vocab_size, frozenset(), device, verifier=verify)
    for asked in ASKED:
        check_answers(engine, drafter, expected, asked, knows=True, good="markov_rank" not in kind)
    if device.type == "cuda":
        assert drafter._passes._captured
        assert drafter._context_kv._graphs


def test_a_verdict_as_wide_as_its_graph_costs_a_drafter_no_context(device, plain):
    """A captured verification of 60 nodes gives verdicts of 65 tokens, more than the ring holds; trees are far less
    deep. Context K/V stay, and every draft is that of an exact verdict."""
    expected, _ = plain
    texts = [[*prompt, *expected["greedy"][str(at)]] for at, prompt in enumerate(PROMPTS)]
    accepted = {}
    for width in (0, WIDTHS[-1]):
        decoder = tiny_decoder(device)
        drafter = knowing_drafter(decoder, texts)
        engine = engine_for(drafter, decoder, ByRequest({}, DraftPlan(drafter.name, 60)))
        sampler = engine.runner.sampler
        sampler.verify = functools.partial(widened, sampler.verify, width)
        positions = counted(drafter)

        def context_is_whole(engine, drafter=drafter):
            for sequence in engine.scheduler.running:
                assert drafter.kv_range(sequence)[0] == 0

        sequences, _ = run(engine, requests_of("greedy"), after_step=context_is_whole)
        assert outputs(sequences) == expected["greedy"]
        accepted[width] = [one.stats.num_accepted_tokens for one in sequences.values()], sum(positions)
        assert engine.drafters.failures == 0
    narrow, wide = accepted.values()
    assert narrow == wide
    assert sum(narrow[0]) > 40


SPARE = 8  # slots of the shorter context behind the last token


@pytest.mark.parametrize("context", [None, 20 + LENGTH + SPARE], ids=["spare slots", "full"])
def test_a_tree_may_have_more_nodes_than_tokens_are_left(device, plain, context):
    """It cannot commit more than it is deep; only where the context itself ends are there no slots for its nodes."""
    expected, _ = plain
    decoder = tiny_decoder(device)
    drafter = knowing_drafter(decoder, [[*PROMPTS[0], *expected["greedy"]["0"]]])
    propose, asked = drafter.propose, []

    def noted(rows, after=None):
        for sequence, max_nodes, _ in rows:
            asked.append((max_nodes, sequence.max_len - len(sequence.tokens)))
        return propose(rows, after)

    drafter.propose = noted
    sizes = replace(SIZES, max_model_len=context, max_num_batched_tokens=192)
    engine = Engine(decoder, sizes, drafters=[drafter], policy=ByRequest({}, DraftPlan(drafter.name, 60)))
    engine.runs_ahead = True
    sequences, _ = run(engine, requests_of("greedy")[:1])
    (sequence,) = sequences.values()
    assert sequence.output_tokens == expected["greedy"]["0"]
    assert sequence.stats.num_accepted_tokens > 10
    assert any(nodes > left + SPARE for nodes, left in asked) == (context is None)
    assert engine.drafters.failures == 0


def counted(drafter):
    """Count the positions whose context K/V each call writes, padding included."""
    write_context_kv, counts = drafter.write_context_kv, []

    def counting(batch):
        counts.append(len(batch.taps))
        write_context_kv(batch)

    drafter.write_context_kv = counting
    return counts


def widened(verify, width, *args, **options):
    """A verdict padded as captured verification pads it."""
    verdict = verify(*args, **options)
    batch, depth = verdict.path.shape
    if depth >= width:
        return verdict
    wide = Verdict.blank(batch, width, verdict.path.device)
    wide.tokens.fill_(-1)
    wide.path.fill_(-1)
    wide.kinds.fill_(int(TokenKind.PAD))
    wide.num_accepted.copy_(verdict.num_accepted)
    wide.tokens[:, : depth + 1], wide.path[:, :depth] = verdict.tokens, verdict.path
    wide.kinds[:, : depth + 1] = verdict.kinds
    return wide


class DynamicTrees(TappedDrafter):
    """Keeps (hidden state of t, token t + 1) in slot t + 1, drafts from the last of them alone, and lets the device
    decide whether nodes go deep or side by side."""

    name, taps = "dynamic trees", (FINAL, 1)
    kv_layers = (KVSpec(num_kv_heads=1, head_dim=CONFIG.hidden_size),)
    MARGIN = 0.05  # of the likeliest token over the next: about half of the rows have more
    DEEP, WIDE = (-1, 0, 1, -1), (-1, -1, 0, -1)  # parents

    def __init__(self, heads, device):
        super().__init__()
        self.outputs = torch.stack([head.output for head in heads]).to(device)
        self.deep = []  # by draft: how many rows' trees are

    def bind(self, caches, block_size):
        super().bind(caches, block_size)
        (self.cache,) = caches
        self.shapes = torch.tensor([self.DEEP, self.WIDE], device=self.device)

    @torch.inference_mode()
    def write_context_kv(self, batch):
        """Padding writes what some valid pair writes, where that does: an index of the host's would be waited for."""
        valid = batch.slots >= 0
        some = valid.int().argmax()
        row = torch.where(valid, torch.arange(len(valid), device=self.device), some)
        value = batch.taps[:, 1].clone()
        value[:, 0] = batch.tokens.to(value.dtype)
        self.cache.k[batch.slots[row], 0] = batch.taps[row, 0]
        self.cache.v[batch.slots[row], 0] = value[row]

    @torch.inference_mode()
    def draft(self, rows, req_indices, lengths):
        width = max(len(row.sequence.blocks) for row in rows)
        tables = torch.tensor([[*row.sequence.blocks, *[0] * (width - len(row.sequence.blocks))] for row in rows])
        (tables,) = packed_to(self.device, tables)
        last = lengths - 1
        slots = tables.gather(1, (last // self.block_size)[:, None])[:, 0] * self.block_size + last % self.block_size
        logits = torch.einsum("bh,dvh->bdv", self.cache.k[slots, 0].float(), self.outputs)
        best, tokens = logits.topk(3)
        sure = best[:, 0, 0] - best[:, 0, 1] > self.MARGIN
        self.deep.append(sure.sum())
        (a, b, c), (d, *_) = tokens[:, 0].unbind(1), tokens[:, 1].unbind(1)
        e = tokens[:, 2, 0]
        drafted = torch.where(sure[:, None], torch.stack((a, d, e, b), 1), torch.stack((a, b, d, c), 1))
        parents = torch.where(sure[:, None], self.shapes[0], self.shapes[1])
        counts = torch.tensor([min(row.max_nodes, 4) for row in rows])
        most = int(counts.max())
        return DeviceDraft.trees(drafted[:, :most], parents[:, :most], counts, 3)


def test_trees_that_only_the_device_knows_change_nothing(device, plain):
    expected, heads = plain
    drafter = DynamicTrees(heads, device)
    engine = engine_for(
        drafter, tiny_decoder(device), ByRequest({str(at): DraftPlan(drafter.name, at + 1) for at in range(4)})
    )
    for asked in ASKED:
        begun, drafter.deep = watch(drafter), []
        sequences, _ = run(engine, requests_of(asked))
        assert outputs(sequences) == expected[asked]
        assert exercised(sequences.values())
        assert sum(begun) > 5, "drafts are begun behind steps under way"
        assert 0 < sum(map(int, drafter.deep)) < sum(one.stats.num_drafts for one in sequences.values()), "both shapes"
        assert engine.drafters.failures == 0


def test_the_drafters_own_cache_is_that_of_a_pass_over_the_committed_tokens(device, plain):
    """After accepted and rejected branches, and after plain steps in between, which it catches up with."""
    drafter = DynamicTrees(plain[1], device)
    engine = engine_for(drafter, tiny_decoder(device), NowAndThen(drafter.name, [4], 0.6))
    sequences = [engine.add_request(name, prompt, wanted)[0] for _, name, prompt, wanted in requests_of("greedy")]
    while max(sequence.num_output for sequence in sequences) < LENGTH - 6:
        engine.step()
    assert exercised(sequences)
    checked, fresh = 0, tiny_decoder(device)
    for sequence in sequences:
        start, end = drafter.kv_range(sequence)
        positions = np.arange(max(start, 1), end)
        slots = torch.from_numpy(slots_of(np.array([sequence.blocks]), 0, positions, SIZES.block_size)).to(device)
        taps = taps_of(fresh, sequence.tokens[: end - 1], drafter.taps)[positions[0] - 1 :]
        assert torch.equal(drafter.cache.k[slots, 0], taps[:, 0])
        assert torch.equal(drafter.cache.v[slots, 0, 1:], taps[:, 1, 1:])
        assert drafter.cache.v[slots, 0, 0].long().tolist() == sequence.tokens[positions[0] : end]
        checked += end - len(PROMPTS[int(sequence.request_id)])
    assert checked > 2 * LENGTH, "context K/V of answers were written, not of the prompts alone"
    assert engine.drafters.failures == 0
