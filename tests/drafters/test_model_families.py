"""Drafters that read hidden states, for targets of families whose layers are not Llama's: trained for a second on one
answer of the target, saved, and served. Answers are plain decoding's, and drafts are accepted: the taps, the rotation
and the scale of the head are those of training."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paceline import LLM, SamplingParams
from paceline.drafters.methods import DSPARK, EAGLE3
from paceline.training.data.store import Sequences
from paceline.training.trainees.dspark import DSparkOptions, DSparkTrainee
from paceline.training.trainees.eagle import EagleOptions, EagleTrainee
from paceline.training.trainees.target import FrozenTarget
from tests.training.toy import VOCAB, continued, toy_loop, toy_target

PROMPT = list(range(3, 43))  # beyond the original context of phi4-mini: see families/phi3.py
BLOCK = {"layers": 1, "block": 4, "num_taps": 2, "draft_vocab": VOCAB, "anchors": 40}
FAMILIES = ("gemma3", "ministral3", "phi4-mini", "granite")


@pytest.fixture(scope="module", params=FAMILIES)
def target(request, tmp_path_factory) -> FrozenTarget:
    return toy_target(tmp_path_factory.mktemp(request.param), request.param)


def trainee_of(target: FrozenTarget, method: str):
    vocabulary, common = torch.arange(VOCAB), {"seed": 0, "name": "toy"}
    if method == EAGLE3:
        options = EagleOptions(steps=2, draft_vocab=VOCAB, anchors=40)
        return EagleTrainee(target, options, vocabulary, method, **common)
    return DSparkTrainee(target, DSparkOptions(**BLOCK, rank=8), vocabulary, **common)


@pytest.mark.parametrize("method", [EAGLE3, DSPARK])
def test_a_trained_drafter_is_served_and_changes_no_answer(target: FrozenTarget, method: str, tmp_path: Path) -> None:
    trainee = trainee_of(target, method)
    answer = continued(target, PROMPT, 24)
    sequences = Sequences.of([(PROMPT, answer)] * 4, VOCAB)
    toy_loop(target, tmp_path / "run", 40, trainee=trainee, sequences=sequences, length=64, lr=1e-2).run()
    trainee.save(tmp_path / "drafter")
    accepted = 0
    with LLM(str(target.path), device="cpu", drafter=str(tmp_path / "drafter"), method=method) as llm:
        for kind in ({"temperature": 0.0}, {"temperature": 0.8, "seed": 5}):
            ids = []
            for own in ({"method": method, "k": 3}, "none"):
                params = SamplingParams(max_tokens=24, ignore_eos=True, speculation=own, **kind)
                (result,) = llm.generate(PROMPT, params)
                ids.append(result.outputs[0].token_ids)
                accepted += 0 if "seed" in kind else result.outputs[0].speculation.num_accepted_tokens
            assert ids[0] == ids[1]
        assert llm.engine.drafters.failures == 0
    assert accepted >= 4
