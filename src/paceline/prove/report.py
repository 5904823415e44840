"""The checks, the drafts seen during each, and the results; also as the object that `--json` prints."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from paceline.prove.g_test import FALSE_ALARM, POWER, GTest
from paceline.prove.tap import Seen

PASS, FAIL, NOT_EXERCISED = "pass", "fail", "not exercised"


@dataclass
class Check:
    """One check. It passes only if drafts were accepted, rejected and followed by a bonus while it ran."""

    name: str
    compared: str
    seen: Seen = field(default_factory=Seen)
    comparisons: int = 0
    failures: list[str] = field(default_factory=list)
    tests: list[GTest] = field(default_factory=list)
    missing: str | None = None  # a further case the check needed and did not see
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def expect(self, right: bool, what: str) -> None:
        self.comparisons += 1
        if not right:
            self.failures.append(what)


@dataclass
class Report:
    model: str
    settings: dict[str, Any]
    checks: list[Check] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def alpha(self) -> float:
        """Return the level of one test: a run raises a false alarm with at most FALSE_ALARM (Bonferroni)."""
        return FALSE_ALARM / max(sum(len(check.tests) for check in self.checks), 1)

    def result(self, check: Check) -> str:
        if check.failures or any(test.p_value <= self.alpha for test in check.tests):
            return FAIL
        if not check.seen.complete or check.missing or not (check.comparisons or check.tests):
            return NOT_EXERCISED
        return PASS

    def detectable(self, check: Check) -> float | None:
        """Return the total variation that every test with the most samples would find."""
        most = max((test.samples for test in check.tests), default=0)
        full = [test for test in check.tests if test.samples == most]
        return max((d for test in full if (d := test.detectable(self.alpha)) is not None), default=None)

    def detail(self, check: Check) -> str:
        """Return why the check did not pass; otherwise its notes."""
        if check.failures:
            more = f" (and {len(check.failures) - 1} more)" if len(check.failures) > 1 else ""
            return check.failures[0] + more
        worst = min((test.p_value for test in check.tests), default=1.0)
        if worst <= self.alpha:
            return f"p-value {worst:.1e}, allowed {self.alpha:.1e}"
        if self.result(check) == NOT_EXERCISED:
            named = (("accept", check.seen.accepts), ("reject", check.seen.rejects), ("bonus", check.seen.bonus))
            lacking = [f"no {name}" for name, count in named if not count]
            return ", ".join([*lacking, *([check.missing] if check.missing else [])]) or "nothing was compared"
        return "; ".join(check.notes)

    @property
    def passed(self) -> bool:
        return bool(self.checks) and all(self.result(check) == PASS for check in self.checks)

    def as_dict(self) -> dict[str, Any]:
        return {
            "model": self.model,
            **self.settings,
            "passed": self.passed,
            "false_alarm": FALSE_ALARM,
            "false_alarm_per_test": self.alpha,
            "power": POWER,
            "rows": [self._check(check) for check in self.checks],
            "seconds": self.seconds,
        }

    def _check(self, check: Check) -> dict[str, Any]:
        return {
            "name": check.name,
            "compared": check.compared,
            "result": self.result(check),
            "detail": self.detail(check),
            "accepts": check.seen.accepts,
            "rejects": check.seen.rejects,
            "bonus": check.seen.bonus,
            "comparisons": check.comparisons,
            "tests": len(check.tests),
            "samples": sum(test.samples for test in check.tests),
            "smallest_p_value": min((test.p_value for test in check.tests), default=None),
            "detectable_tv": self.detectable(check),
            "failures": check.failures,
            "seconds": check.seconds,
        }
