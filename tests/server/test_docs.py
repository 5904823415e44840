"""The dashboard and the guide speak of metrics and flags that exist."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from paceline.cli.serve import serve
from paceline.server.api.fields import ABSENT, AbsentField
from paceline.server.metrics import Metrics

DOCS = Path(__file__).parents[2] / "docs"


def known_metrics() -> set[str]:
    names = re.findall(r"^# HELP paceline:(\w+)", Metrics().render().decode(), re.MULTILINE)
    return {name for name in names if not name.endswith("_created")}


def test_the_dashboard_asks_for_metrics_that_exist() -> None:
    dashboard = json.loads((DOCS / "grafana.json").read_text())
    charts = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    asked = {
        name.removesuffix("_bucket")
        for panel in charts
        for target in panel["targets"]
        for name in re.findall(r"paceline:(\w+)", target["expr"])
    }
    assert asked <= known_metrics()
    assert known_metrics() - asked == set()  # and all of them are shown
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in charts]
    assert len(set(places)) == len(places)


def test_the_guide_names_flags_that_exist() -> None:
    text = "".join((DOCS / "guides" / f"{page}.md").read_text() for page in ("serving", "many-machines"))
    text = re.sub(r"```bash\nvllm .*?```", "", text, flags=re.DOTALL)
    app = typer.Typer(add_completion=False)
    app.command()(serve)
    flags = {flag for parameter in typer.main.get_command(app).params for flag in parameter.opts}
    of_others = ("docker", "apt-get", "pip ", "HEALTHCHECK", "paceline train", "paceline advise")
    lines = [line for line in text.splitlines() if not any(word in line for word in of_others)]
    named = {flag for line in lines for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]+", line)}
    assert named <= flags
    assert len(named) > 10


def listed(name: str, field: AbsentField) -> str:
    neutral = f" ({', '.join(json.dumps(value) for value in field.neutral)})" if field.neutral else ""
    return f"`{name}`{neutral}" + (f" → {field.equal}" if field.equal else "")


def test_the_guide_lists_the_fields_that_are_not_here() -> None:
    text = " ".join((DOCS / "guides" / "requests.md").read_text().split())
    expected = "; ".join(listed(name, field) for name, field in sorted(ABSENT.items())) + "."
    assert expected in text, expected


def test_the_systemd_unit_is_valid(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    (unit,) = re.findall(r"```ini\n(.*?)```", (DOCS / "guides" / "many-machines.md").read_text(), re.DOTALL)
    file = tmp_path / "paceline.service"
    file.write_text(unit.replace("/opt/paceline/bin/paceline", sys.executable))  # the command must be there
    done = subprocess.run(["systemd-analyze", "verify", file], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
