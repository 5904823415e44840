"""How long a short request waits for its first token while one client sends far too much, at a real server.

    python -m benchmarks.neighbours [--model smollm2] [--seconds 12]

Each attack runs for some seconds under one key; requests of four tokens are sent under another key and under the same
one. The last line has the longest and the median wait of each, in seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

WORD = " one"  # about a token
ATTACKS: dict[str, list[dict[str, Any]]] = {
    "128 answers of 2,000 tokens": [{"prompt": "Tell me a story.", "n": 128, "max_tokens": 2000, "ignore_eos": True}],
    "256 prompts with one token each": [{"prompt": [f"{at}{WORD * 2000}" for at in range(256)], "max_tokens": 1}],
    "64 prompts of 8,000 tokens": [{"prompt": [f"{at}{WORD * 7900}" for at in range(64)], "max_tokens": 16}],
    "64 requests of 8,000 tokens": [{"prompt": f"{at}{WORD * 7900}", "max_tokens": 16} for at in range(64)],
}
SHORT = {"prompt": "Count: one, two,", "max_tokens": 4, "stream": True}


def post(url: str, key: str, body: Mapping[str, Any]) -> float:
    """Return the seconds to the first token, or to the end of an answer that is not streamed."""
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    began = time.perf_counter()
    with urllib.request.urlopen(request, timeout=600) as answer:
        answer.readline()
        return time.perf_counter() - began


def attack(url: str, body: Mapping[str, Any]) -> None:
    with contextlib.suppress(OSError):  # the server is killed meanwhile
        post(url, "key-a", body)


def measure(model: str, bodies: list[dict[str, Any]], seconds: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys"
        keys.write_text("attacker key-a\nhonest key-b\n")
        command = [sys.executable, "-m", "paceline", "serve", "--model", model, "--port", "0"]
        server = subprocess.Popen([*command, "--api-key-file", str(keys)], stderr=subprocess.PIPE, env=os.environ)
        try:
            assert server.stderr is not None
            url = next(filter(None, (re.search(rb" at (http://\S+)", line) for line in server.stderr)))[1].decode()
            threading.Thread(target=server.stderr.read, daemon=True).start()
            for key in ("key-a", "key-b"):
                post(url, key, SHORT)
            for body in bodies:
                threading.Thread(target=attack, args=(url, body), daemon=True).start()
            time.sleep(1)
            waits: dict[str, list[float]] = {"key-a": [], "key-b": []}
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                for key, found in waits.items():
                    found.append(post(url, key, SHORT))
        finally:
            server.kill()
            server.wait()
    names = {"key-a": "same key", "key-b": "another key"}
    return {
        names[key]: {
            "most_s": round(max(found), 2),
            "median_s": round(statistics.median(found), 2),
            "asked": len(found),
        }
        for key, found in waits.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--seconds", type=float, default=12.0, help="of each attack")
    arguments = parser.parse_args()
    result = {}
    for name, bodies in ATTACKS.items():
        result[name] = measure(arguments.model, bodies, arguments.seconds)
        print(name, result[name], flush=True)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
