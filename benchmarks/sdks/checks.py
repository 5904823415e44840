"""What the scripts beside this file share: the server's address, the model's name, and the report of their checks."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

URL, MODEL = sys.argv[1], sys.argv[2]
QUESTION = "Name one planet. Answer with one word."


def report(**checks: Callable[[], object]) -> None:
    """Run the checks and print which pass. A check passes if it returns something true."""
    results: dict[str, bool | str] = {}
    for name, check in checks.items():
        try:
            results[name] = bool(check()) or "returned nothing"
        except Exception as error:
            results[name] = f"{type(error).__name__}: {error}"[:400]
    print(json.dumps(results))
