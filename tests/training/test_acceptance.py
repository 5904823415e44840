"""The walk over stored answers counts the passes that an engine takes with the folder that a trainer wrote."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from paceline.drafters.methods import DSPARK
from paceline.training.acceptance import engine_tau, tau, walk
from paceline.training.data.store import Sequences
from paceline.training.trainees.dspark import DSparkTrainee
from tests.training.toy import SMALL, VOCAB, continued, toy_loop, toy_target

PROMPTS = ([5, 9, 33, 2], [8, 8, 41, 17, 60])


def test_the_walk_counts_what_the_engine_counts(tmp_path):
    nodes = 15
    target = toy_target(tmp_path / "target")
    answers = [(prompt, continued(target, prompt, 40)) for prompt in PROMPTS]
    trainee = DSparkTrainee(
        target, replace(SMALL, draft_vocab=VOCAB, anchors=24), torch.arange(VOCAB), seed=0, name="toy"
    )
    settings = {"rows": 2, "length": 48, "lr": 1e-2, "ema": 0.0, "log_s": 1e9, "save_s": 1e9}
    toy_loop(target, tmp_path, 40, trainee=trainee, sequences=Sequences.of(answers, VOCAB), **settings).run()
    trainee.save(tmp_path / "drafter")
    saved = DSparkTrainee.from_folder(tmp_path / "drafter", target)
    walked = tau(walk(saved, answers, nodes))
    assert 1.3 < walked < 5, "half trained, so that both accepts and rejects are walked"
    prompts = [prompt for prompt, _ in answers]
    engine = engine_tau(
        str(tmp_path / "target"), tmp_path / "drafter", DSPARK, prompts, nodes=nodes, max_tokens=40, device="cpu"
    )
    # An engine drafts no more nodes than max_tokens leaves room for, which costs a few passes at the end of an answer.
    assert engine["tau"] == pytest.approx(walked, rel=0.1)
