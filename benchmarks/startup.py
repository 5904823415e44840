"""Time from `paceline generate` to the first token on the screen, the model cached: a fresh process each time.

python -m benchmarks.startup [--rounds 5]
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time

from benchmarks.harness import finish


def first_byte() -> float:
    started = time.perf_counter()
    command = [sys.executable, "-m", "paceline", "generate", "Say hello.", "--max-tokens", "4", "--temperature", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0) as process:
        assert process.stdout is not None
        if not process.stdout.read(1):
            raise SystemExit("paceline generate printed nothing; run it by hand to see why")
        seconds = time.perf_counter() - started
        process.stdout.read()
    return seconds


def help_page() -> float:
    started = time.perf_counter()
    subprocess.run([sys.executable, "-m", "paceline", "--help"], stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    first_byte()  # the model file into the page cache
    seconds = [first_byte() for _ in range(rounds)]
    pages = [help_page() for _ in range(rounds)]
    print(f"to the first token   {statistics.median(seconds):.2f} s, worst {max(seconds):.2f} s  (goal 6 s)")
    print(f"paceline --help      {statistics.median(pages):.2f} s, worst {max(pages):.2f} s  (goal 0.5 s)")
    finish("startup", {"first_token_s": seconds, "help_s": pages})


if __name__ == "__main__":
    main()
