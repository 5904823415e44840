"""Drafts by some of the target's own layers: always right if none is skipped; idle layers are found."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from paceline.config import EngineConfig, SpeculationConfig
from paceline.drafters.base import DrafterContext
from paceline.drafters.method_names import drafter_specs, unknown_method
from paceline.drafters.methods import METHODS, SKIP
from paceline.drafters.model import layer_skip
from paceline.drafters.model.layer_skip import SkipDrafter
from paceline.drafters.model.skip_search import SkipSearch, expected_gain
from paceline.engine.engine import Engine
from paceline.engine.policy import DraftPlan
from paceline.models.decoder import Decoder
from paceline.models.kernels import kernels_for
from paceline.models.kv_cache import slots_of
from paceline.models.weights import Dtypes
from tests.helpers.contract_toys import ByRequest, NowAndThen, answers, params, prompt_of, run
from tests.helpers.errors import refused
from tests.helpers.random_llama import llama, random_weights

CPU = torch.device("cpu")
SIZES = EngineConfig(num_blocks=64, block_size=16, max_num_seqs=4, max_num_batched_tokens=96)
IDLE = (2, 4, 5)  # layers whose output is hardly anything
CONFIG = llama(num_layers=7)
REQUESTS = [
    (0, "greedy", prompt_of(0, 40), params(max_tokens=24, ignore_eos=True)),
    (0, "seeded", prompt_of(1, 30), params(max_tokens=24, ignore_eos=True, seed=3)),
    (3, "late", prompt_of(2, 35), params(max_tokens=24, ignore_eos=True)),
]


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    torch.manual_seed(2)
    weights = random_weights(CONFIG, 1.5)
    for layer in IDLE:
        for product in ("self_attn.o_proj", "mlp.down_proj"):
            weights[f"model.layers.{layer}.{product}.weight"] *= 1e-7
    return Decoder(CONFIG, weights, kernels_for(CPU), device=CPU, dtypes=Dtypes.of(torch.float32, CPU))


def engine_of(decoder, drafter, policy=None):
    return Engine(decoder, SIZES, drafters=[drafter], policy=policy or ByRequest({}, DraftPlan(SKIP, 4)))


def test_a_drafter_that_skips_nothing_is_always_right(decoder):
    engine = engine_of(decoder, SkipDrafter(decoder.with_layers, tuple(range(7))))
    sequences, _ = run(engine, REQUESTS)
    for one in sequences.values():
        assert one.stats.num_accepted_tokens == one.stats.num_draft_tokens > 0
    assert engine.drafters.failures == 0


@pytest.mark.parametrize("kept", [(0, 2, 4, 6), (0, 6)])
def test_the_cache_holds_the_targets_own_values_of_committed_tokens(decoder, kept):
    """Skipped and rejected rows leave no trace in any layer."""
    engine = engine_of(decoder, SkipDrafter(decoder.with_layers, kept), NowAndThen(SKIP, (1, 3, 6), 0.7))
    plain = Engine(decoder, SIZES)
    _, _, prompt, wanted = REQUESTS[0]
    (drafted,), (undrafted,) = engine.add_request("0", prompt, wanted), plain.add_request("0", prompt, wanted)
    compared = 0
    while engine.has_work:
        engine.step()
        computed = drafted.num_computed
        while plain.has_work and undrafted.num_computed < computed:
            plain.step()
        if drafted.finished or undrafted.finished or undrafted.num_computed != computed:
            continue
        for own, expected in zip(engine.runner.cache.layers, plain.runner.cache.layers, strict=True):
            at = [slots_of(torch.tensor([one.blocks]), 0, torch.arange(computed), 16) for one in (drafted, undrafted)]
            assert torch.equal(own.k[at[0]], expected.k[at[1]])
            assert torch.equal(own.v[at[0]], expected.v[at[1]])
        compared += 1
    assert compared > 3
    assert drafted.stats.num_accepted_tokens < drafted.stats.num_draft_tokens
    assert drafted.tokens == undrafted.tokens


def test_layers_that_do_nothing_are_found_and_answers_stay(decoder, monkeypatch):
    monkeypatch.setattr(layer_skip, "SEARCH_SHARE", 1e9)
    expected = answers(Engine(decoder, SIZES), REQUESTS)
    drafter = SkipDrafter(decoder.with_layers, (0, 2, 4, 6), search=SkipSearch(decoder, 4))
    sequences, _ = run(engine_of(decoder, drafter), REQUESTS)
    assert {name: one.output_tokens for name, one in sequences.items()} == expected
    assert drafter.kept == tuple(layer for layer in range(7) if layer not in IDLE)
    settled = SkipDrafter(decoder.with_layers, drafter.kept)
    for one in run(engine_of(decoder, settled), REQUESTS)[0].values():
        assert one.stats.num_accepted_tokens == one.stats.num_draft_tokens > 0


def test_searches_take_a_bounded_share_of_the_time(decoder, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(layer_skip.time, "monotonic", lambda: clock[0])
    searched = []

    class Search:
        def run(self, sequence, caches, block_size, own):
            searched.append(clock[0])
            clock[0] += 1.0
            same = layer_skip.SkipSearch(decoder, 2).run(sequence, caches, block_size, own)[0]
            return same, same

    drafter = SkipDrafter(decoder.with_layers, (0, 1, 3, 6), search=Search())
    engine = engine_of(decoder, drafter)
    engine.add_request("0", prompt_of(0, 40), params(max_tokens=100, ignore_eos=True))
    while engine.has_work:
        engine.step()
        clock[0] += 10.0
    assert 1 < len(searched) <= 1 + 0.02 * (clock[0] - 100.0)


def context_of(decoder, **options):
    return DrafterContext(
        config=decoder.config, device=CPU, speculation=SpeculationConfig(method=SKIP, **options), target=decoder
    )


def test_the_table_makes_a_drafter_and_refuses_ratios_that_leave_no_layer(decoder):
    drafter = METHODS[SKIP].make(context_of(decoder))
    assert (drafter.name, drafter.kept) == (SKIP, (0, 2, 4, 6))
    assert 0 < drafter.pass_bytes < decoder.pass_bytes
    for ratio in (0.95, 0.01):
        with refused("skip_ratio"):
            METHODS[SKIP].make(context_of(decoder, skip_ratio=ratio))
    for ratio in (0, 1, -1, "half", True):
        with refused("skip_ratio"):
            SpeculationConfig(skip_ratio=ratio)
    with refused("skip_ratio"):
        METHODS[SKIP].make(context_of(decoder.with_layers((0, 1))))
    with refused("method"):
        METHODS[SKIP].make(replace(context_of(decoder), target=None))


def test_it_is_made_only_where_it_is_asked_for():
    assert SKIP not in [one.name for one in drafter_specs(SpeculationConfig(method="auto"))]
    assert SKIP in [one.name for one in drafter_specs(SpeculationConfig(method=SKIP))]
    assert "called skip here" in unknown_method("LayerSkip")


def test_the_expected_gain_weighs_accuracy_against_price():
    assert expected_gain(0.0, 0.5) == 1.0  # no draft at all
    assert expected_gain(1.0, 0.5) == pytest.approx(9 / 5)
    assert expected_gain(0.9, 0.5) > expected_gain(0.9, 0.8)
