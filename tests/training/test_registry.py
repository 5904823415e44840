"""Every trainee learns one answer by heart, and the engine accepts its drafts; a saved one can be trained on."""

from __future__ import annotations

import copy
import json

import pytest
import torch

from paceline.drafters.folder import target_of
from paceline.drafters.heads.checkpoint import load_heads, save_heads
from paceline.drafters.methods import DFLASH, DSPARK, EAGLE, EAGLE3, MEDUSA, MTP
from paceline.errors import BrokenModel, InvalidParameter
from paceline.files.json_fields import JsonFields
from paceline.training.acceptance import engine_tau
from paceline.training.data.store import Sequences
from paceline.training.registry import DRAFT, TRAINEES, TraineeContext, build_trainee, drafting_method
from tests.helpers.errors import refused
from tests.training.toy import VOCAB, continued, toy_loop, toy_target

PROMPT = [5, 9, 33, 2]
# Sizes, steps and learning rate, and the least τ of drafts of 3 tokens, which is 3.6 if all of them are accepted. The
# target's distributions are flat, so the likeliest token is learnt: a tree would spend its nodes on siblings.
SHARP = {"anchors": 40, "temperature": 0.05}
CASES = {
    DSPARK: ({"layers": 2, "block": 4, "num_taps": 2, "rank": 8, "anchors": 24, "temperature": 0.3}, 120, 1e-2, 3.0),
    EAGLE3: ({"steps": 3, **SHARP}, 100, 1e-2, 3.0),
    EAGLE: ({"steps": 3, "ce": 0.3, "tv": 0.7, "features": 0.1, **SHARP}, 150, 1e-2, 2.5),
    MTP: ({**SHARP}, 100, 1e-2, 2.5),
    MEDUSA: ({"heads": 3, **SHARP}, 150, 1e-2, 2.5),
    DRAFT: ({"layers": 2, **SHARP}, 100, 3e-3, 3.0),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return toy_target(tmp_path_factory.mktemp("target"))


def context_for(target, init_from=None, **sizes):
    return TraineeContext(
        target=target,
        name="toy",
        sizes=sizes,
        vocabulary=lambda size: torch.arange(VOCAB),
        init_from=init_from,
        seed=0,
        compiled=False,
        answers=[],
    )


@pytest.mark.parametrize("name", CASES)
def test_one_answer_is_learnt_by_heart_and_the_engine_accepts_it(target, tmp_path, name):
    sizes, steps, lr, least = CASES[name]
    answer = continued(target, PROMPT, 40)
    built = build_trainee(name, context_for(target, **sizes))
    settings = {"rows": 1, "length": 48, "lr": lr, "ema": 0.9, "warmup": 10, "log_s": 1e9, "save_s": 1e9}
    sequences = Sequences.of([(PROMPT, answer)], VOCAB)
    loop = toy_loop(target, tmp_path / "work", steps, trainee=built.trainee, sequences=sequences, **settings)
    loop.run()
    built.trainee.save(tmp_path / "out", loop.averaged())
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
    with refused("method"):
        build_trainee("lookahead", context_for(target))
    for name in TRAINEES:
        with refused("wheels"):
            build_trainee(name, context_for(target, wheels=4))


@pytest.mark.parametrize(
    ("name", "size", "value"),
    [
        (MEDUSA, "heads", 1000),
        (MEDUSA, "heads", True),
        (MEDUSA, "heads", 2.5),
        (MEDUSA, "anchors", 0),
        (MEDUSA, "ce", -5),
        (MEDUSA, "ce", float("nan")),
        (DSPARK, "block", 1),
        (DSPARK, "layers", 0),
        (DSPARK, "draft_vocab", 1),
        (DSPARK, "portable", 1),
        (DFLASH, "rank", 8),
        (EAGLE3, "steps", 0),
        (EAGLE, "draft_vocab", 5),
        (DRAFT, "layers", 3.5),
    ],
)
def test_a_size_that_no_drafter_can_have_is_refused_before_training(target, name, size, value):
    with refused(size):
        build_trainee(name, context_for(target, **{size: value}))


BLOCK = {"layers": 2, "block": 4, "num_taps": 2}
SIZES = {DSPARK: {**BLOCK, "rank": 8}, DFLASH: BLOCK, EAGLE3: {}, EAGLE: {}, MTP: {}}
SIZES |= {MEDUSA: {"heads": 2}, DRAFT: {"layers": 2}}


@pytest.mark.parametrize("name", TRAINEES)
def test_a_saved_drafter_is_trained_on_in_its_own_sizes(target, tmp_path, name):
    first = build_trainee(name, context_for(target, **SIZES[name])).trainee
    first.save(tmp_path)
    again = build_trainee(name, context_for(target, tmp_path)).trainee
    assert again.parameters.keys() == first.parameters.keys()
    for key, one in first.parameters.items():
        torch.testing.assert_close(again.parameters[key], one, atol=1e-2, rtol=1e-2)
    other = EAGLE3 if name != EAGLE3 else MEDUSA
    with pytest.raises((InvalidParameter, BrokenModel)):
        build_trainee(other, context_for(target, tmp_path))


@pytest.mark.parametrize("name", [DSPARK, EAGLE3])
def test_a_drafter_of_another_model_becomes_one_of_the_model_it_is_trained_on_for(target, tmp_path, name):
    other = copy.copy(target)
    other.embedding = target.embedding.flip(0)
    build_trainee(name, context_for(other, **SIZES[name])).trainee.save(tmp_path / "first")
    build_trainee(name, context_for(target, tmp_path / "first")).trainee.save(tmp_path / "again")
    for folder, mine in (("first", False), ("again", True)):
        found = target_of(JsonFields(json.loads((tmp_path / folder / "config.json").read_text()), folder))
        assert found.is_like(target.embedding) == mine


def test_a_folder_of_another_kind_is_not_trained_on(target, tmp_path):
    build_trainee(MEDUSA, context_for(target, heads=1)).trainee.save(tmp_path / "shared")
    [head] = load_heads(tmp_path / "shared", target.config)
    save_heads(tmp_path / "own", [head._replace(output=target.head.clone())])
    other = toy_target(tmp_path / "other", "qwen3")
    for name, folder in ((MEDUSA, tmp_path / "own"), (DRAFT, other.path)):
        with refused("init_from"):
            build_trainee(name, context_for(target, folder))
