"""Every trainee learns one answer by heart, and the engine accepts its drafts."""

from __future__ import annotations

import pytest
import torch

from paceline.drafters.methods import EAGLE, EAGLE3, MEDUSA
from paceline.errors import InvalidParameter
from paceline.training.engine_tau import engine_tau
from paceline.training.names import DRAFT, drafting_method
from paceline.training.store import Sequences
from paceline.training.trainees import TRAINEES, Plan, trainee_of
from tests.training.toy import VOCAB, continued, toy_loop, toy_target

PROMPT = [5, 9, 33, 2]
# Sizes, steps and learning rate, and the least τ of drafts of 3 tokens, which is 3.6 if all of them are accepted. The
# target's distributions are flat, so the likeliest token is learnt: a tree would spend its nodes on siblings.
SHARP = {"anchors": 40, "temperature": 0.05}
CASES = {
    EAGLE3: ({"steps": 3, **SHARP}, 100, 1e-2, 3.0),
    EAGLE: ({"steps": 3, "ce": 0.3, "tv": 0.7, "features": 0.1, **SHARP}, 150, 1e-2, 2.5),
    MEDUSA: ({"heads": 3, **SHARP}, 150, 1e-2, 2.5),
    DRAFT: ({"layers": 2, **SHARP}, 100, 3e-3, 3.0),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return toy_target(tmp_path_factory.mktemp("target"))


def plan_for(target, **sizes):
    return Plan(
        target=target,
        name="toy",
        sizes=sizes,
        vocabulary=lambda size: torch.arange(VOCAB),
        init_from=None,
        seed=0,
        compiled=False,
        answers=[],
    )


@pytest.mark.parametrize("name", CASES)
def test_one_answer_is_learnt_by_heart_and_the_engine_accepts_it(target, tmp_path, name):
    sizes, steps, lr, least = CASES[name]
    answer = continued(target, PROMPT, 40)
    made = trainee_of(name, plan_for(target, **sizes))
    settings = {"rows": 1, "length": 48, "lr": lr, "ema": 0.9, "warmup": 10, "log_s": 1e9, "save_s": 1e9}
    sequences = Sequences.of([(PROMPT, answer)], VOCAB)
    loop = toy_loop(target, tmp_path / "work", steps, trainee=made.trainee, sequences=sequences, **settings)
    loop.run()
    made.trainee.save(tmp_path / "out", loop.averaged())
    found = engine_tau(
        str(target.path),
        tmp_path / "out",
        drafting_method(name),
        [PROMPT],
        nodes=3,
        max_tokens=40,
        device="cpu",
    )
    assert found["tau"] > least, found


def test_unknown_methods_and_sizes_are_refused(target):
    with pytest.raises(InvalidParameter, match="choose one of"):
        trainee_of("lookahead", plan_for(target))
    for name in TRAINEES:
        with pytest.raises(InvalidParameter, match="wheels: means nothing"):
            trainee_of(name, plan_for(target, wheels=4))
