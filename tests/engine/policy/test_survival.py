"""Acceptance by depth, learnt from drafts."""

from __future__ import annotations

import pytest

from paceline.config import TRAINED_LEVEL
from paceline.engine.policy.survival import SurvivalTable


def survival(table, level):
    return table.estimate("m", False, level).survival


def test_acceptance_is_counted_by_depth_and_not_by_nodes():
    """A tree of 8 nodes and depth 2, wholly accepted, is no miss at depth 3."""
    table = SurvivalTable()
    before = survival(table, 4)
    for _ in range(60):
        table.note_chain("m", False, 4, depth=2, accepted=2)
    after = survival(table, 4)
    assert after[1] > 0.85
    assert after[2] / after[1] == pytest.approx(before[2] / before[1])
    for _ in range(300):
        table.note_chain("m", False, 4, depth=4, accepted=2)
    assert max(survival(table, 4)[2:]) < 0.1


def test_a_model_whose_first_drafts_held_is_trusted_further_ahead_at_once():
    table = SurvivalTable()
    before = {level: survival(table, level) for level in (2, TRAINED_LEVEL)}
    for level in before:
        table.note_chain("m", False, level, depth=8, accepted=8)
    assert survival(table, TRAINED_LEVEL)[15] > 1.2 * before[TRAINED_LEVEL][15]
    after = survival(table, 2)
    assert after[15] / after[7] == pytest.approx(before[2][15] / before[2][7]), "a short match is another matter"


def test_a_method_that_brings_less_than_it_promises_is_trusted_less():
    table, other = SurvivalTable(), SurvivalTable()
    for _ in range(40):
        table.note_chain("m", False, 9, depth=4, accepted=0)
    assert survival(table, 3)[0] < 0.6 * survival(other, 3)[0], "of all levels"
    table.forget("m")
    assert survival(table, 3)[0] == survival(other, 3)[0]
