"""The policy beside its alternatives on a known clock: gains over plain decoding by category and batch, cold.

    python -m benchmarks.policy.run smollm2.jsonl --clock cpu --batches 1 4 16 32 --seeds 5
    python -m benchmarks.policy.run smollm2.jsonl --clock gpu --batches 1 4 16 32 64 --by file
    python -m benchmarks.policy.run pair.jsonl --clock pair --prices 0.1 0.2 0.45 0.8 --batches 1 4
    python -m benchmarks.policy.run pair.jsonl --clock pair --best      # the most a draft model can bring, by k

Without a seed the clock has no noise. `best`: of all fixed settings, each a method and k. `useless`: a draft model that
is never right, over `auto` without one.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import finish
from benchmarks.policy.replay import CLOCKS, DRAFT_MODEL, Clock, Record, Replay, gain, load


def cells(records: Sequence[Record], by: str) -> Iterator[tuple[str, bool, list[Record]]]:
    """Return the records of each category, or file, and temperature."""
    for name in dict.fromkeys(one[by] for one in records):
        for sampled in (False, True):
            some = [one for one in records if one[by] == name and one["sampled"] == sampled]
            if some:
                yield name, sampled, sorted(some, key=lambda one: str(one["category"]))


def policy_us(records: Sequence[Record], batch: int, clock: Clock) -> float:
    """Return the policy's processor time of a step, in microseconds."""
    replay = Replay("auto", None, clock)
    for start in range(0, len(records), batch):
        replay.seconds(records[start : start + batch])
    return 1e6 * replay.spent.watched_s / replay.steps


def measure(records: Sequence[Record], batch: int, clock: Clock, args: argparse.Namespace) -> dict[str, Any]:
    """Return gains over plain decoding: of `auto`, the mean over seeds."""
    seeds = range(args.seeds) if args.seeds else [None]
    each: dict[str, Any] = {"max_tokens": args.tokens}
    row: dict[str, Any] = {
        "auto": statistics.mean(gain(records, batch, clock, "auto", seed=seed, **each) for seed in seeds),
        "policy_us": policy_us(records, batch, clock),
    }
    fixed = {f"{method} k={k}": gain(records, batch, clock, method, k, **each) for method, k in clock.fixed}
    row["best"], row["best_gain"] = max(fixed.items(), key=lambda one: one[1])
    if args.best:
        row["fixed"] = fixed
    if DRAFT_MODEL in clock.drafting:
        row["without"] = gain(records, batch, clock, "auto", leave_out=[DRAFT_MODEL], **each)
        row["useless"] = gain(records, batch, clock, "auto", useless=True, **each) / row["without"]
    return row


def report(row: dict[str, Any]) -> str:
    text = f"auto {row['auto']:.3f}x, {row['auto'] / max(row['best_gain'], 1.0):.3f} of {row['best']}"
    if "without" in row:
        text += f"; without a draft model {row['without']:.3f}x, with a useless one {row['useless']:.3f} of that"
    if "fixed" in row:
        text += "; " + ", ".join(f"{name} {value:.2f}x" for name, value in row["fixed"].items())
    return f"{text}; {row['policy_us']:.0f} us a step"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", type=Path, help="made by benchmarks.policy.record")
    parser.add_argument("--clock", choices=list(CLOCKS), default="cpu")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--by", choices=["category", "file"], default="category")
    parser.add_argument("--prices", type=float, nargs="+", help="of a pass of the draft model, over the target's")
    parser.add_argument("--stated", type=float, help="the price in the offers, where it differs")
    parser.add_argument("--seeds", type=int, default=0, help="runs with noise; 0: one without")
    parser.add_argument("--first", type=int, help="records of each cell")
    parser.add_argument("--tokens", type=int, default=224, help="of each answer, at most")
    parser.add_argument("--steep", type=float, default=1.0, help="times what rows beyond the first add to a pass")
    parser.add_argument("--best", action="store_true", help="every fixed setting, not only the best one")
    args = parser.parse_args()
    clock = CLOCKS[args.clock].steeper(args.steep)
    rows = []
    for price in args.prices or [None]:
        priced = clock if price is None else clock.with_draft_model(price, args.stated)
        for name, sampled, some in cells(load(args.records), args.by):
            for batch in args.batches:
                row = measure(some[: args.first], batch, priced, args)
                rows.append({"price": price, "cell": name, "sampled": sampled, "batch": batch, **row})
                temperature = "T 0.7" if sampled else "T 0"
                label = f"{'' if price is None else f'price {price:<5}'} {name:16} {temperature:5} batch {batch:<3}"
                print(label, report(row), flush=True)
    gains = [row["auto"] for row in rows]
    print(f"geometric mean of auto: {statistics.geometric_mean(gains):.4f}")
    finish("policy", {"clock": args.clock, "steep": args.steep, "seeds": args.seeds, "rows": rows})


if __name__ == "__main__":
    main()
