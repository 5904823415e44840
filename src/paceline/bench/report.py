"""report.html: one file that needs nothing else, neither a network nor scripts; JavaScript only adds sorting and the
switch between light and dark. Whatever comes from outside is escaped by the template, and a content security policy
keeps the page from loading or running anything that is not in it.
"""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from paceline.bench import report_figures, report_notes, report_speedups, report_words
from paceline.bench.report_frame import Frame
from paceline.bench.report_verdict import verdict
from paceline.bench.results import Results

HERE = Path(__file__).parent


def write(results: Results, path: Path) -> None:
    """Written beside and renamed into place: an interruption leaves the old file or the new one."""
    draft = path.with_name(f".{path.name}.draft")
    draft.write_text(render(results), encoding="utf-8")
    draft.replace(path)


def render(results: Results) -> str:
    environment = Environment(
        loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    script = (HERE / "report.js").read_text(encoding="utf-8")
    return environment.get_template("report.html.j2").render(
        results=results,
        verdict=verdict(results),
        frame=Frame(results),
        speedups=report_speedups,
        figures=report_figures,
        notes=report_notes,
        words=report_words,
        style=Markup((HERE / "report.css").read_text(encoding="utf-8")),
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )
