"""Clients that others wrote, unchanged, against a server: which of them connect, chat, stream, call tools and parse.

    python -m benchmarks.sdks.run --python ENV/bin/python --node FOLDER [--model smollm2] [--only NAME]

ENV is an environment with the Python clients (`pip install openai-agents instructor 'pydantic-ai-slim[openai]'
anthropic ollama`), FOLDER one in which `npm install openai zod ai @ai-sdk/openai ollama @anthropic-ai/sdk` was called.
A script has two minutes. The last line is JSON: for each client its checks, true or the error.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from benchmarks.clients import Server

HERE = Path(__file__).parent
LIMIT_S = 120
SHARED = ("run", "checks", "__init__")


def scripts(only: str | None) -> list[Path]:
    found = [path for path in sorted([*HERE.glob("*.py"), *HERE.glob("*.mjs")]) if path.stem not in SHARED]
    return [path for path in found if only in (None, path.stem)]


def run(script: Path, url: str, model: str, python: str, node: Path) -> dict[str, bool | str]:
    """Return a script's checks. Node looks for packages beside the script, so it is copied to the folder of them."""
    command = [python, str(script)]
    if script.suffix == ".mjs":
        for name in (script.name, "checks.mjs"):
            shutil.copy(HERE / name, node)
        command = ["node", str(node / script.name)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OPENAI", "PYTHON"))}
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run(
                [*command, url, model], capture_output=True, text=True, timeout=LIMIT_S, cwd=folder, env=environment
            )
        except subprocess.TimeoutExpired:
            return {"connects": f"took more than {LIMIT_S} s"}
    last = (done.stdout.strip().splitlines() or [""])[-1]
    try:
        checks: dict[str, bool | str] = json.loads(last)
    except ValueError:
        return {"connects": (done.stderr.strip().splitlines() or ["wrote nothing"])[-1]}
    return checks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--python", required=True)
    parser.add_argument("--node", type=Path, required=True)
    parser.add_argument("--only")
    options = parser.parse_args()
    server = Server(options.model, "--served-model-name", "m")
    try:
        results = {}
        for script in scripts(options.only):
            checks = run(script, f"http://{server.host}:{server.port}", "m", options.python, options.node)
            results[script.stem] = checks
            print(f"{script.stem:24}", " ".join(f"{name}:{'yes' if ok is True else ok}" for name, ok in checks.items()))
    finally:
        server.stop()
    print(json.dumps(results))


if __name__ == "__main__":
    main()
