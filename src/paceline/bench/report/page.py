"""report.html: one file that needs neither a network nor scripts.

JavaScript only adds sorting and the switch between light and dark. The template escapes all text from outside, and a
content security policy keeps the page from loading or running anything that is not in it.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from paceline.bench import findings
from paceline.bench.report import words as report_words
from paceline.bench.report.figures import Figures
from paceline.bench.results import Cell, Results
from paceline.files.folders import replace_text

HERE = Path(__file__).parent


def write(results: Results, path: Path) -> None:
    replace_text(path, render(results))


def render(results: Results) -> str:
    environment = Environment(
        loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    script = (HERE / "report.js").read_text(encoding="utf-8")
    return environment.get_template("report.html.j2").render(
        results=results,
        verdict=findings.verdict(results),
        notes=findings.notes(results),
        figures=Figures(results),
        settings=facts({**results.settings, "left_out": findings.left_out(results)}),
        facts=facts,
        markdown=markdown(results),
        words=report_words,
        style=Markup((HERE / "report.css").read_text(encoding="utf-8")),
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


def markdown(results: Results) -> str:
    """Return the cells of all workloads together as a table to paste into an issue or a page."""
    columns: dict[str, Callable[[Cell], str]] = {
        "engine": lambda cell: cell.label,
        "at a time": lambda cell: str(cell.concurrency),
        "tokens/s": lambda cell: report_words.rate(cell.tokens_per_s),
        "prompt tokens/s": lambda cell: report_words.rate(cell.prompt_tokens_per_s),
        "speed-up": lambda cell: report_words.figure(cell.speedup),
        "τ": lambda cell: report_words.decimal(cell.tau),
        "first token p50 / p99": lambda cell: report_words.spread(cell.ttft_s),
    }
    rows = [list(columns), ["---"] * len(columns)]
    rows += [[of(cell) for of in columns.values()] for cell in findings.overall(results)]
    lines = [f"| {' | '.join(entry.replace('|', '/') for entry in row)} |" for row in rows]
    return "\n".join([f"{results.model}, {results.date}, paceline {results.paceline}", "", *lines])


def facts(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return names and values of the known facts."""
    return [(name.replace("_", " "), _text(value)) for name, value in values.items() if value not in (None, "", [], {})]


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(
            f"{name.replace('_', ' ')} {_text(entry)}" for name, entry in value.items() if entry is not None
        )
    if isinstance(value, (list, tuple)):
        return ", ".join(_text(entry) for entry in value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) and abs(value) >= 10_000:
        return f"{value:,}"
    return f"{value:,.6g}" if isinstance(value, float) else str(value)
