"""Acceptance by depth, learnt from drafts."""

from __future__ import annotations

import pytest

from paceline.config import TRAINED_LEVEL
from paceline.engine.policy.survival import SurvivalTable


def test_acceptance_is_counted_by_depth_and_not_by_nodes():
    """A tree of 8 nodes and depth 2, wholly accepted, is no miss at depth 3."""
    acceptance = SurvivalTable()
    before = acceptance.survival("m", False, 4)
    for _ in range(60):
        acceptance.note("m", False, 4, depth=2, accepted=2)
        acceptance.end_step()
    after = acceptance.survival("m", False, 4)
    assert after[1] > 0.85
    assert after[2] / after[1] == pytest.approx(before[2] / before[1])
    for _ in range(300):
        acceptance.note("m", False, 4, depth=4, accepted=2)
        acceptance.end_step()
    assert max(acceptance.survival("m", False, 4)[2:]) < 0.1


def test_a_model_whose_first_drafts_held_is_trusted_further_ahead_at_once():
    acceptance = SurvivalTable()
    before = {level: acceptance.survival("m", False, level) for level in (2, TRAINED_LEVEL)}
    for level in before:
        acceptance.note("m", False, level, depth=8, accepted=8)
    acceptance.end_step()
    assert acceptance.survival("m", False, TRAINED_LEVEL)[15] > 1.3 * before[TRAINED_LEVEL][15]
    after = acceptance.survival("m", False, 2)
    assert after[15] / after[7] == pytest.approx(before[2][15] / before[2][7]), "a short match is another matter"
