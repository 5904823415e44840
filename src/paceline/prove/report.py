"""The checks, the drafts seen during each, and the outcomes; as rows, and as the object `--json` prints."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from paceline.prove.g_test import FALSE_ALARM, POWER, GTest
from paceline.prove.tap import Seen

PASS, FAIL, NOT_EXERCISED = "pass", "fail", "not exercised"


@dataclass
class Row:
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
    rows: list[Row] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def alpha(self) -> float:
        """Level of one test: a whole run raises a false alarm with probability FALSE_ALARM at most (Bonferroni)."""
        return FALSE_ALARM / max(sum(len(row.tests) for row in self.rows), 1)

    def result(self, row: Row) -> str:
        if row.failures or any(test.p_value <= self.alpha for test in row.tests):
            return FAIL
        if not row.seen.complete or row.missing or not (row.comparisons or row.tests):
            return NOT_EXERCISED
        return PASS

    def detectable(self, row: Row) -> float | None:
        """The total variation that every test of the row with the most samples would notice."""
        most = max((test.samples for test in row.tests), default=0)
        full = [test for test in row.tests if test.samples == most]
        found = [d for test in full if (d := test.detectable(self.alpha)) is not None]
        return max(found, default=None)

    def detail(self, row: Row) -> str:
        """Why the row did not pass; otherwise its notes."""
        if row.failures:
            more = f" (and {len(row.failures) - 1} more)" if len(row.failures) > 1 else ""
            return row.failures[0] + more
        worst = min((test.p_value for test in row.tests), default=1.0)
        if worst <= self.alpha:
            return f"p-value {worst:.1e}, allowed {self.alpha:.1e}"
        if self.result(row) == NOT_EXERCISED:
            named = (("accept", row.seen.accepts), ("reject", row.seen.rejects), ("bonus", row.seen.bonus))
            lacking = [f"no {name}" for name, count in named if not count]
            return ", ".join([*lacking, *([row.missing] if row.missing else [])]) or "nothing was compared"
        return "; ".join(row.notes)

    @property
    def passed(self) -> bool:
        return bool(self.rows) and all(self.result(row) == PASS for row in self.rows)

    def as_dict(self) -> dict[str, Any]:
        return {
            "model": self.model,
            **self.settings,
            "passed": self.passed,
            "false_alarm": FALSE_ALARM,
            "false_alarm_per_test": self.alpha,
            "power": POWER,
            "rows": [self._row(row) for row in self.rows],
            "seconds": self.seconds,
        }

    def _row(self, row: Row) -> dict[str, Any]:
        return {
            "name": row.name,
            "compared": row.compared,
            "result": self.result(row),
            "detail": self.detail(row),
            "accepts": row.seen.accepts,
            "rejects": row.seen.rejects,
            "bonus": row.seen.bonus,
            "comparisons": row.comparisons,
            "tests": len(row.tests),
            "samples": sum(test.samples for test in row.tests),
            "smallest_p_value": min((test.p_value for test in row.tests), default=None),
            "detectable_tv": self.detectable(row),
            "failures": row.failures,
            "seconds": row.seconds,
        }
