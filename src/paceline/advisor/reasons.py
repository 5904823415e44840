"""Why speculation does not pay, in sentences: which condition fails, by theory, with measured numbers. No torch.

The conditions are tried in the order in which they can be fixed: answers too short to matter, a drafter too expensive,
passes that are already compute-bound, drafts that are rejected too often.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.advisor.choice import PAYS, Figure
from paceline.theory import break_even, speedup

WARM = 0.5  # temperature from which it is named as a cause
MOST_OF_IT = 0.5  # decoding's share of the time from which answers are not called short
WOULD_PAY = 1.1  # a condition is the cause if the speed-up without it would be this high


@dataclass(frozen=True, kw_only=True)
class Case:
    """The best fixed setting at one concurrency, and what it cost."""

    label: str
    k: int
    concurrency: int
    figure: Figure
    draft_cost: float  # of a token drafted ahead, in plain passes
    verify_cost: float  # of the checking pass, in plain passes
    temperature: float
    pays_alone: bool = False  # whether it pays at a lower concurrency

    @property
    def alpha(self) -> float:
        return self.figure.alpha or 0.0

    @property
    def acceptance(self) -> str:
        return f"an acceptance of {self.alpha:.0%}"


@dataclass(frozen=True)
class Reason:
    kind: str  # uncertain, short-outputs, little, costly-drafter, saturated, temperature, acceptance
    words: str


def why_off(case: Case) -> Reason:
    return _short_outputs(case) or _little(case) or _costly_drafter(case) or _saturated(case) or _rejected(case)


def uncertain(label: str, figure: Figure) -> Reason:
    """The figure would pay, but may be chance."""
    low, high = figure.bounds
    words = f"{label} looks best, but its {figure.ratio:.2f}x [{low:.2f}, {high:.2f}] may be chance: give more prompts."
    return Reason("uncertain", words)


def _short_outputs(case: Case) -> Reason | None:
    figure = case.figure
    if figure.decode_ratio is None or figure.decode_ratio < PAYS + 0.02:
        return None
    if (1 - 1 / figure.ratio) / (1 - 1 / figure.decode_ratio) >= MOST_OF_IT:
        return None
    words = (
        f"The answers are short ({figure.tokens_per_answer:.0f} tokens on average): most of the wait is reading the "
        f"prompt, which drafting does not shorten. Writing alone would be {figure.decode_ratio:.2f}x as fast, "
        f"the whole request {figure.ratio:.2f}x."
    )
    return Reason("short-outputs", words)


def _little(case: Case) -> Reason | None:
    """No condition fails by theory, so none may be blamed."""
    expected = speedup(case.alpha, case.k, case.draft_cost, case.verify_cost)
    if expected < PAYS:
        return None
    words = (
        f"By {case.acceptance} and the cost of passes here {case.label} would be {expected:.2f}x where it drafts; "
        f"{case.figure.ratio:.2f}x over all steps is too little for a setting."
    )
    return Reason("little", words)


def _costly_drafter(case: Case) -> Reason | None:
    if case.draft_cost < 0.05 or speedup(case.alpha, case.k, 0.0, case.verify_cost) < WOULD_PAY:
        return None
    words = (
        f"{case.label} takes {case.draft_cost:.0%} of a pass of the model for every token it drafts; at "
        f"{case.acceptance} that costs what it saves, or more. A smaller drafter might pay."
    )
    return Reason("costly-drafter", words)


def _saturated(case: Case) -> Reason | None:
    memory_bound = speedup(case.alpha, case.k, case.draft_cost, 1.0)
    if case.verify_cost < 1.1 or (memory_bound < WOULD_PAY and not case.pays_alone):
        return None
    each = "" if case.concurrency == 1 else " for each request"
    at_once = "one request" if case.concurrency == 1 else f"{case.concurrency} requests at once"
    more = "1 token more" if case.k == 1 else f"{case.k} tokens more"
    words = (
        f"With {at_once} the machine is busy computing: a pass that checks {more}{each} takes "
        f"{case.verify_cost:.1f} times as long as one that checks none, which {case.acceptance} does not win back."
    )
    return Reason("saturated", words)


def _rejected(case: Case) -> Reason:
    needed = break_even(case.k, PAYS * case.draft_cost, PAYS * case.verify_cost)
    more = (
        "no acceptance would be enough" if needed is None else f"it takes more than {needed:.0%} to gain {PAYS - 1:.0%}"
    )
    found = f"drafts find {case.acceptance}, and at what passes cost here {more}."
    if case.temperature >= WARM:
        words = f"At temperature {case.temperature:g} answers are partly chance and hard to guess: {found}"
        return Reason("temperature", words)
    return Reason("acceptance", f"The answers are hard to guess: {found}")
