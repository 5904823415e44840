"""How much lookup could gain at most: a drafter that always knew from which earlier place to copy, and how far.

Answers recorded by policy_replay.py are gone through on its clock. At every step the place in the text so far is taken
that goes on longest as the answer does, and its tokens are drafted exactly as far as they hold. Copies of fewer than
`--least` tokens are left out: nearly every token occurred before somewhere, and no context shows where.

    python benchmarks/policy_replay.py --record answers.json --temperature 0.7 --seed 1
    python benchmarks/copy_limit.py answers.json [more.json ...] --max-tokens 96
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from common import finish
from policy_replay import CLOCKS, Record

MOST = 16  # tokens drafted at once


def longest_copy(tokens: list[int], end: int) -> int:
    """Of the tokens from `end` on, as many as follow some earlier place alike; one is left for the target to say."""
    most, best = min(MOST, len(tokens) - end - 1), 0
    for start in range(end):
        length = 0
        while length < most and tokens[start + length] == tokens[end + length]:
            length += 1
        best = max(best, length)
    return best


def seconds(one: Record, least: int, max_tokens: int) -> tuple[float, float]:
    """(plain, with drafts) from the first token to the last."""
    clock = CLOCKS["cpu"]
    answer = one["answer"][:max_tokens]
    tokens, end, taken = one["prompt"] + answer, len(one["prompt"]) + 1, 0.0
    while end < len(tokens):
        copied = longest_copy(tokens, end)
        copied = copied if copied >= least else 0
        taken += clock.step(1, copied) + (clock.drafting["suffix"].seconds(1, copied) if copied else 0.0)
        end += copied + 1
    return clock.step(1, 0) * (len(answer) - 1), taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("records", nargs="+")
    parser.add_argument("--least", type=int, nargs="+", default=[1, 2, 3, 4])
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--file", default="copy")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for path in args.records:
        records = [one for one in json.loads(Path(path).read_text()) if one["file"] == args.file]
        gains = {}
        for least in args.min_node_probability:
            plain, drafted = zip(*(seconds(one, least, args.max_tokens) for one in records), strict=True)
            gains[least] = sum(plain) / sum(drafted)
        rows.append({"records": Path(path).name, "answers": len(records), "gains": gains})
        print(f"{Path(path).name:20}", "  ".join(f"copies of {n} or more {gain:.2f}x" for n, gain in gains.items()))
    finish("copy_limit", {"file": args.file, "max_tokens": args.max_tokens, "rows": rows})


if __name__ == "__main__":
    main()
