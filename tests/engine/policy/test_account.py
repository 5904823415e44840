"""Accounts: what a method may lose."""

from __future__ import annotations

from paceline.engine.policy.account import CAP, CREDIT, DRIP, Account


def test_a_method_that_never_pays_loses_its_credit_and_what_drips_in():
    account, lost = Account(), 0.0
    for step in range(10_000):
        if account.at(step) >= 0.5:  # a draft that may lose half a plain step
            account.add(-0.5, step)
            lost += 0.5
    assert lost <= CREDIT + 10_000 * DRIP


def test_wins_may_be_lost_again_up_to_a_cap():
    account = Account()
    for step in range(1000):
        account.add(1.0, step)
    assert account.at(1000) <= CAP + DRIP
    account.add(-CAP, 1000)
    assert account.at(1001) < 1
