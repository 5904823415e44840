"""The machine a benchmark ran on, as results.json says it. No torch."""

from __future__ import annotations

import platform
from typing import Any

from paceline import machine


def machine_facts() -> dict[str, Any]:
    return {"cpu": machine.cpu_name(), "cores": machine.usable_cores(), "python": platform.python_version()}
