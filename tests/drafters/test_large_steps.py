"""Steps larger than those that are captured, drafts cut after they were begun, and drafters of both kinds in one step,
with a vocabulary for which trees are grown by kernels on a GPU: answers are the plain ones. On a CPU and on a GPU."""

from __future__ import annotations

import random

import pytest
import torch

from paceline.config import EngineConfig
from paceline.core.device_draft import DeviceDraft
from paceline.drafters.model.draft_model import DraftModelDrafter
from paceline.engine.engine import Engine
from paceline.engine.policy import DraftPlan, FixedPolicy
from paceline.engine.sampler import Sampler
from paceline.verify import verify
from tests.drafters.block.dspark_reference import knowing, make
from tests.helpers.contract_toys import ByRequest, exercised, params, run
from tests.helpers.random_llama import decoder_and_drafter, llama

CONFIG = llama(vocab_size=128, max_positions=256)
DEVICES = [torch.device("cpu"), pytest.param(torch.device("cuda"), marks=pytest.mark.cuda)]
ASKED = {"greedy": {}, "seeded": {"temperature": 0.6}}
LENGTH = 24
CUTS = 6, 2, 5, 1  # nodes asked for in one step after the other


@pytest.fixture(params=DEVICES, ids=lambda device: device.type)
def device(request):
    return request.param


def requests_of(count, asked):
    """Return requests of `count` prompts; where they are sampled each has a seed."""
    prompts = [[(7 * at + at * at * which) % 120 for at in range(8 + which % 16)] for which in range(count)]
    return [
        (0, str(at), prompt, params(max_tokens=LENGTH, ignore_eos=True, **asked, **({"seed": at} if asked else {})))
        for at, prompt in enumerate(prompts)
    ]


def engine_for(decoder, drafters, policy, **sizes):
    config = EngineConfig(prefix_caching=False, num_blocks=512, block_size=16, **sizes)
    engine = Engine(decoder, config, drafters=drafters, policy=policy)
    engine.runs_ahead = True
    return engine


def answers(engine, requests):
    sequences, _ = run(engine, requests)
    assert engine.drafters.failures == 0
    assert engine.blocks.num_free == engine.blocks.num_blocks
    assert {one.finish_reason for one in sequences.values()} == {"length"}
    return sequences, {name: one.output_tokens for name, one in sequences.items()}


def block_drafter(decoder, device, texts):
    """It knows the texts, and drafts any token of the vocabulary."""
    config, tensors = knowing(CONFIG, decoder.embedding.cpu(), [*texts, list(range(CONFIG.vocab_size))])
    drafter = make(config, tensors, decoder.embedding, kernels=decoder.kernels, device=device, dtypes=decoder.dtypes)
    assert device.type == "cpu" or drafter._tree_kernels is not None
    return drafter


@pytest.mark.parametrize("asked", ASKED)
def test_sixteen_trees_of_sixty_nodes_change_no_answer(device, asked):
    """A pass of 976 rows: more than verification of trees is captured for, where trees are parts of wider tensors."""
    sizes = {"max_num_seqs": 16, "max_num_batched_tokens": 2048}
    decoder, _ = decoder_and_drafter(CONFIG, device)
    requests = requests_of(16, ASKED[asked])
    _, plain = answers(engine_for(decoder, [], ByRequest({}), **sizes), requests)
    drafter = block_drafter(decoder, device, [[*prompt, *plain[name]] for _, name, prompt, _ in requests])
    engine = engine_for(decoder, [drafter], ByRequest({}, DraftPlan(drafter.name, 60)), **sizes)
    sequences, found = answers(engine, requests)
    assert found == plain
    assert exercised(sequences.values())
    assert sum(one.stats.num_accepted_tokens for one in sequences.values()) > 16 * 4
    assert device.type == "cpu" or engine.runner.sampler.uncaptured


class Varying(FixedPolicy):
    """Asks now for more nodes than were begun, now for fewer."""

    def choose(self, sequence):
        return DraftPlan("draft-model", CUTS[sequence.stats.num_target_passes % len(CUTS)])


@pytest.fixture
def cuts(monkeypatch):
    """Number of rows that were cut, for each draft that was begun."""
    found, take = [], DeviceDraft.take

    def taking(self, rows, counts):
        found.append(sum(count < there for count, there in zip(counts, self.num_nodes[rows].tolist(), strict=True)))
        return take(self, rows, counts)

    monkeypatch.setattr(DeviceDraft, "take", taking)
    return found


@pytest.mark.parametrize("asked", ASKED)
def test_chains_of_sixty_four_sequences_that_are_cut_once_begun_change_no_answer(device, asked, cuts):
    sizes = {"max_num_seqs": 64, "max_num_batched_tokens": 1024}
    target, small = decoder_and_drafter(CONFIG, device)
    requests = requests_of(64, ASKED[asked])
    _, plain = answers(engine_for(target, [], ByRequest({}), **sizes), requests)
    sequences, found = answers(engine_for(target, [DraftModelDrafter(small)], Varying(), **sizes), requests)
    assert found == plain
    assert exercised(sequences.values())
    assert device.type == "cpu" or max(cuts) > 32


def test_what_is_sampled_of_cut_chains_does_not_depend_on_what_is_captured(device, monkeypatch, cuts):
    """Coins are the same in all runs, and no policy looks at a clock."""
    target, small = decoder_and_drafter(CONFIG, device)
    engine = engine_for(target, [DraftModelDrafter(small)], Varying(), max_num_seqs=64, max_num_batched_tokens=1024)
    requests = [(0, name, prompt, params(max_tokens=LENGTH, ignore_eos=True, temperature=0.8))
                for _, name, prompt, _ in requests_of(64, {})]  # fmt: skip
    outputs = []
    for captured in (True, False):
        monkeypatch.setattr("paceline.core.sequence.secrets.randbits", random.Random(3).getrandbits)
        if not captured:
            engine.runner.sampler = Sampler(target.config.vocab_size, frozenset(), device, verifier=verify)
        outputs.append(answers(engine, requests)[1])
    assert outputs[0] == outputs[1]
    assert device.type == "cpu" or max(cuts) > 32


def test_trees_of_the_device_and_sampled_chains_share_a_step(device):
    """Rows of a block drafter, greedy and seeded, beside rows of a draft model that draw by coins."""
    sizes = {"max_num_seqs": 6, "max_num_batched_tokens": 256}
    target, small = decoder_and_drafter(CONFIG, device)
    ways = ({}, {"temperature": 0.6, "seed": 1}, {"temperature": 0.9})
    requests = [
        (0, name, prompt, params(max_tokens=LENGTH, ignore_eos=True, **ways[at % 3]))
        for at, (_, name, prompt, _) in enumerate(requests_of(6, {}))
    ]
    _, plain = answers(engine_for(target, [], ByRequest({}), **sizes), requests)
    trees = block_drafter(target, device, [[*prompt, *plain[name]] for _, name, prompt, _ in requests])
    choices = {name: DraftPlan(*(("draft-model", 5), (trees.name, 17))[at % 3 < 2]) for at, name in enumerate(plain)}
    engine = engine_for(target, [trees, DraftModelDrafter(small)], ByRequest(choices), **sizes)
    sequences, found = answers(engine, requests)
    for at, name in enumerate(plain):
        assert at % 3 == 2 or found[name] == plain[name]
        assert sequences[name].stats.num_drafts > 2
    assert sum(one.stats.num_accepted_tokens for one in sequences.values()) > 20
