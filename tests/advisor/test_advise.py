"""The whole advisor on a machine whose costs are known: its choice against the full grid, its promise against truth.

The truth is a benchmark of every choice on all prompts, with the same engine on a clock without noise. What the advisor
sees is noisy, half of the prompts to choose on and half to check on. Where one setting has to serve several
concurrencies it is held against the best single setting. The clock is seeded, so a test passes always or never.
"""

from __future__ import annotations

import math

import pytest

from paceline.advisor.advise import Advisor
from paceline.advisor.choice import OFF, Figure, Figures, contenders_of, score
from paceline.advisor.result import Advice
from paceline.bench.grid import Contender
from paceline.bench.measurement import Measurement, cells
from paceline.bench.prompts import Prompt
from paceline.bench.results import ALL
from paceline.bench.runner import RunPlan, measure
from tests.advisor.fake_machine import Costs, FakeMachine

LENGTHS = (1, 2, 4, 8)


def asked(count: int) -> list[Prompt]:
    return [Prompt(workload=f"w{n % 2}", turns=(f"prompt {n}",), origin=f"line {n + 1}") for n in range(count)]


def advise(machine: FakeMachine, levels: list[int], prompts: int, max_tokens: int) -> Advice:
    advice = Advice(model="toy", settings={"temperature": 0.0})
    plan = RunPlan(concurrencies=levels, max_tokens=max_tokens)
    stopped = Advisor(machine, asked(prompts), plan, advice, lengths=LENGTHS).run()
    assert stopped is None
    return advice


def truth(costs: Costs, patch: pytest.MonkeyPatch, levels: list[int], prompts: int, tokens: int, size: int) -> Figures:
    quiet = Costs(**{**vars(costs), "noise": 0.0})
    machine = FakeMachine(quiet, patch, prompt_tokens=size)
    machine.contenders = [OFF, *(Contender("knowing", k) for k in LENGTHS), Contender("auto")]
    measurement = Measurement(machine.contenders)
    measure(machine, asked(prompts), RunPlan(concurrencies=levels, max_tokens=tokens), measurement)
    by_label = {contender.label: contender for contender in machine.contenders}
    whole = [cell for cell in cells(measurement) if cell.workload == ALL]
    found = {(cell.concurrency, by_label[cell.label]): Figure.of(cell, interval=True) for cell in whole}
    return {key: figure for key, figure in found.items() if figure is not None}


def grid(true: Figures) -> list[Contender]:
    return [OFF, *contenders_of(true)]


SITUATIONS = {
    # memory-bound: a pass of ten tokens costs what one of one token costs
    "memory-bound": (Costs(right=0.8), [1], 24, 28, 12, None),
    "memory-bound, guesses so so": (Costs(right=0.5), [1], 24, 28, 12, None),
    "a batch that fills the machine": (Costs(right=0.6, row_s=0.004), [1, 4], 40, 24, 12, None),
    "saturated": (Costs(right=0.5, read_s=0.002, row_s=0.030), [1], 20, 24, 12, "saturated"),
    "low acceptance": (Costs(right=0.03), [1], 20, 24, 12, "acceptance"),
    "costly drafter": (Costs(right=0.5, draft_s=0.024), [1], 20, 24, 12, "costly-drafter"),
    "short outputs": (Costs(right=0.7, prompt_row_s=0.03), [1], 140, 4, 200, "short-outputs"),
}


@pytest.mark.parametrize("name", SITUATIONS)
def test_the_choice_is_within_5_percent_of_the_best_and_the_promise_within_15(name, monkeypatch) -> None:
    costs, levels, prompts, tokens, size, off_because = SITUATIONS[name]
    true = truth(costs, monkeypatch, levels, prompts, tokens, size)
    advice = advise(FakeMachine(costs, monkeypatch, prompt_tokens=size, seed=1), levels, prompts, tokens)
    choice = advice.recommendation
    assert choice is not None
    assert math.exp(score(true, choice.contender)) >= 0.95 * math.exp(max(score(true, each) for each in grid(true)))
    for key, measured in advice.measured.items():
        assert advice.predicted[key].ratio == pytest.approx(measured.ratio, rel=0.15), key
        assert advice.predicted[key].ratio == pytest.approx(true[key].ratio, rel=0.15), key
    if off_because is None:
        assert not choice.off
    else:
        assert choice.off
        reason = advice.reason(1)
        assert reason is not None
        assert reason.kind == off_because
