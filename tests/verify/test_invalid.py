"""Logits that are no numbers give INVALID in place of a token, on every path, and leave all other rows alone."""

import itertools
import math
from dataclasses import replace

import pytest
import torch

from paceline.core.draft import Draft
from paceline.core.verdict import INVALID
from paceline.engine.sampler import Sampler
from paceline.models.backends.cpu.kernels import native_draw
from paceline.native.library import load_library
from paceline.verify import DrawKeys, Nodes, SamplingMetadata, draw, process, sample_weighted, verify
from paceline.verify.host import TokenSampler
from tests.helpers.enumeration import chains
from tests.verify import steps
from tests.verify.test_block import sampled_batch

BROKEN = {"nan": math.nan, "inf": math.inf, "nothing": -math.inf}


def spoil(logits, row, how):
    logits[row] = BROKEN[how] if how == "nothing" else logits[row]
    logits[row, 3] = BROKEN[how]


def invalid(verdict):
    """(B,) bool: rows whose request ends with an error."""
    return verdict.tokens.gather(1, verdict.num_accepted[:, None])[:, 0] == INVALID


@pytest.mark.parametrize("asked", steps.ASKED)
@pytest.mark.parametrize("path", ["host", "pure", "kernels"])
@torch.inference_mode()
def test_a_row_without_numbers_is_found_and_others_are_as_they_were(path, asked, request):
    if path == "kernels":
        request.getfixturevalue("kernels")
    verifier = None if path == "host" else verify
    sampler = Sampler(40, frozenset({2}), torch.device("cpu"), verifier=verifier)
    sequences, generator = steps.sequences_of(asked, 6), torch.Generator().manual_seed(1)
    logits = torch.randn(6, 40, generator=generator)
    given = Draft.empty(6), logits, torch.arange(6)[:, None]
    sound = sampler.verify(sequences, *given)
    assert not invalid(sound).any()
    for row, how in zip((1, 3, 5), BROKEN, strict=True):  # one of each kind, where each asks for its own
        spoil(logits, row, how)
    broken = sampler.verify(sequences, *given)
    assert invalid(broken).tolist() == [False, True] * 3
    assert (broken.tokens[1::2, 0] == INVALID).all()
    assert torch.equal(broken.tokens[::2], sound.tokens[::2])


@pytest.mark.parametrize("shape", [chains(3), [-1, -1, 0, 1]], ids=["chain", "tree"])
@pytest.mark.parametrize("slot", [0, 1])
@pytest.mark.parametrize("walked", [False, True])
def test_a_draft_stops_at_a_node_without_numbers(path, walked, slot, shape):
    """Nothing is committed from such a node: the row ends there, INVALID, or before it."""
    drafted = (lambda b, slot: False) if walked else None
    draft, logits, row_of, nodes, metadata, draws = sampled_batch(120, [shape] * 120, drafted=drafted)
    sound = verify(draft, logits, row_of, nodes, metadata, draws, max_depth=3)
    ways = itertools.cycle(BROKEN)
    for row in range(0, 120, 2):
        spoil(logits, int(row_of[row, slot]), next(ways))
    verdict = verify(draft, logits, row_of, nodes, metadata, draws, max_depth=3)
    slots = torch.cat((torch.zeros(120, 1, dtype=torch.int64), verdict.path + 1), 1)
    at = slots.gather(1, verdict.num_accepted[:, None])[:, 0]
    spoiled = torch.arange(120) % 2 == 0
    assert torch.equal(invalid(verdict), spoiled & (at == slot))
    for way in range(len(BROKEN)):
        assert invalid(verdict)[2 * way :: 2 * len(BROKEN)].any()
    passed = (slots[:, :-1] == slot) & (torch.arange(3) < verdict.num_accepted[:, None])
    assert not (passed.any(1) & spoiled).any(), "it goes on below"
    for name in ("tokens", "num_accepted", "path", "kinds"):
        assert torch.equal(getattr(verdict, name)[~spoiled], getattr(sound, name)[~spoiled])


@pytest.mark.parametrize("native", [False, True])
def test_a_lone_row_on_the_host_is_found(native):
    call = native_draw(load_library()) if native else None
    for how in BROKEN:
        row = torch.randn(1, 300, generator=torch.Generator().manual_seed(2))
        spoil(row, 0, how)
        for temperature, seeded, top_p in ((0.0, False, 1.0), (0.7, False, 1.0), (0.7, True, 1.0), (0.7, True, 0.9)):
            sampler = TokenSampler(temperature, 1, seeded, top_p=top_p)
            assert sampler.draw(row, 0, 5, -1, 0, call and call(row)) == INVALID


def test_weights_without_numbers_are_found_in_any_vocabulary():
    for vocab in (10, 1000):
        weights = torch.ones(4, vocab)
        weights[1, 3], weights[2] = math.nan, 0.0
        coins = torch.full((4,), 0.5, dtype=torch.float64)
        assert (sample_weighted(weights, coins) == INVALID).tolist() == [False, True, True, False]


def test_a_ban_of_every_token_is_not_taken_for_a_broken_model():
    """-inf alone is what bans leave; some token must be finite."""
    logits = torch.full((2, 6), -torch.inf)
    logits[:, 4] = 1.0
    every = torch.arange(2)
    draws, nodes = DrawKeys.by_coins(every, every), Nodes.roots(2)
    assert draw(process(logits, SamplingMetadata(temperature=torch.ones(2)), nodes), draws, nodes).tolist() == [4, 4]


@torch.inference_mode()
def test_a_bound_of_the_depth_may_exceed_it():
    """Where only the device knows the trees the verdict is wider, and otherwise the same."""
    sampler, generator = Sampler(40, frozenset({2}), torch.device("cpu")), torch.Generator().manual_seed(3)
    for asked in ("greedy", "sampled", "penalties"):
        for kind in ("trees", "trees and sampled chains"):
            draft, rows, row_of = steps.step(kind, 3, 4, torch.empty(15, 40), 0, generator)
            sequences = steps.sequences_of(asked, 3)
            tight = sampler.verify(sequences, draft, rows, row_of)
            wide = replace(draft, depth_bound=4)
            loose = sampler.verify(sequences, wide, rows, row_of)
            assert loose.path.shape[1] == 4
            assert steps.unlike(tight, loose) == []
