"""EAGLE drafters on a CPU and on a GPU, with steps launched before the one before is read."""

from __future__ import annotations

import pytest
import torch

from paceline.engine.engine import Engine
from paceline.engine.policy import DraftPlan
from tests.cuda.test_cuda import PROMPTS
from tests.drafters.eagle.eagles import fitted
from tests.drafters.overfit import taps_of, tiny_decoder
from tests.drafters.test_on_device import ASKED, DEVICES, SIZES, check_answers, engine_for, outputs, requests_of
from tests.helpers.contract_toys import ByRequest, run

FUSED = pytest.mark.parametrize("fused", [True, False], ids=["eagle3", "eagle"])


@pytest.fixture(scope="module", params=DEVICES, ids=lambda device: device.type)
def answered(request):
    """The device, and plain answers by way of sampling and request."""
    engine = Engine(tiny_decoder(request.param), SIZES)
    return request.param, {asked: outputs(run(engine, requests_of(asked))[0]) for asked in ASKED}


@pytest.mark.parametrize("weights", ["random", "fitted"])
@FUSED
def test_eagle_changes_when_tokens_come_never_which(answered, fused, weights):
    device, expected = answered
    decoder = tiny_decoder(device)
    texts = [[*prompt, *each[str(at)]] for each in expected.values() for at, prompt in enumerate(PROMPTS)]
    drafter = fitted(tiny_decoder(), texts, taps_of, fused=fused, into=decoder, fits=weights == "fitted")
    engine = engine_for(drafter, decoder, ByRequest({str(at): DraftPlan(drafter.name, at * 6 + 2) for at in range(4)}))
    for asked in ASKED if weights == "fitted" else ("greedy",):
        check_answers(engine, drafter, expected, asked, knows=weights == "fitted", good=weights == "fitted")
    if device.type == "cuda":
        assert drafter._graphs, "drafts are captured"


@pytest.mark.cuda
@FUSED
def test_captured_trees_are_those_of_the_kernels_one_by_one(fused):
    """Whatever rows and nodes they are padded to."""
    decoder, drafts = tiny_decoder(torch.device("cuda")), {}
    texts = [prompt[:40] for prompt in PROMPTS]
    for captured in (True, False):
        drafter = fitted(tiny_decoder(), texts, taps_of, fused=fused, into=decoder)
        engine = Engine(decoder, SIZES, drafters=[drafter], policy=ByRequest({}, DraftPlan(drafter.name, 21)))
        if not captured:
            drafter._graphs = {}
        propose, seen = drafter.propose, drafts.setdefault(captured, [])

        def recorded(rows, after=None, propose=propose, seen=seen):
            draft = propose(rows, after)
            seen.append((draft.tokens.cpu(), draft.device_parents.cpu()))
            return draft

        drafter.propose = recorded
        engine.runs_ahead = False
        run(engine, requests_of("greedy"))
    assert len(drafts[True]) == len(drafts[False]) > 5
    pairs = [pair for both in zip(*drafts.values(), strict=True) for pair in zip(*both, strict=True)]
    assert sum(torch.equal(a, b) for a, b in pairs) > 0.9 * len(pairs), "near-ties aside"
