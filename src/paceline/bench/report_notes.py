"""What the report says besides figures: what to be wary of, loops apart, settings and machine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.bench import report_words as words
from paceline.bench.report_frame import Frame
from paceline.bench.results import Cell, Results


@dataclass(frozen=True)
class Warning:
    heading: str
    lines: tuple[str, ...]


def warnings(results: Results) -> list[Warning]:
    found = []
    if not results.complete:
        found.append(Warning("This run was not finished", ("What follows is what had been measured until then.",)))
    if seeded := words.seeded(results.settings):
        found.append(
            Warning("Seeded requests", (f"{seeded[0].upper()}{seeded[1:]}; --seed none measures ordinary ones.",))
        )
    changed = [cell for cell in results.cells if cell.identical is False]
    if changed:
        plain = "plain decoding's" if results.endpoint is None else "the baseline's"
        where = dict.fromkeys(f"{cell.label}, {cell.workload}, {words.at_once(cell.concurrency)}" for cell in changed)
        found.append(Warning(f"Some answers differ from {plain}", tuple(where)))
    reasons = Counter(cell.too_short for cell in results.cells if cell.too_short)
    if reasons:
        cells = f"{words.count(sum(reasons.values()), 'cell')} of {len(results.cells)}"
        lines = (f"{reason} ({words.count(n, 'cell')})" for reason, n in reasons.most_common())
        found.append(Warning(f"Too little was measured for a figure in {cells}", tuple(lines)))
    return found


def loops(frame: Frame) -> list[Cell]:
    return [cell for cell in frame.overall if cell.looping and not cell.plain]


def settings(results: Results) -> list[tuple[str, str]]:
    """As given; prompts that filled no group are said in words."""
    given = dict(results.settings)
    left_out = given.pop("left_out", None) or {}
    said = [f"{words.count(n, 'prompt')} with {words.at_once(int(level))}" for level, n in left_out.items() if n]
    return facts({**given, "left out": f"{words.listed(said)}, for they filled no group" if said else None})


def facts(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Names and values, without what is not known."""
    return [(name.replace("_", " "), _said(value)) for name, value in found.items() if value not in (None, "", [], {})]


def _said(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(
            f"{name.replace('_', ' ')} {_said(entry)}" for name, entry in value.items() if entry is not None
        )
    if isinstance(value, (list, tuple)):
        return ", ".join(_said(entry) for entry in value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,.6g}" if isinstance(value, float) else str(value)
