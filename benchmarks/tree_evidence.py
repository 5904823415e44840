"""What could decide how many nodes a tree gets, or which drafter a row: from the steps that tree_trials.py recorded.

- *Nodes.* A logistic fit predicts each node's survival from its score (the drafter's probability of its path), with and
  without the confidence head, on half of the prompts; on the other half a step takes nodes while the prediction is
  above a level tuned on the first half. Tokens by time are compared with the best fixed number of nodes; a node costs a
  share of a plain step, a draft `DRAFT` of one.
- *Drafter* (steps recorded with --lookup). The merged tree against one of the two, chosen by the lookup's evidence.

    python benchmarks/tree_evidence.py steps.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from common import finish

DRAFT = 0.15
COSTS = (0.03, 0.06, 0.1)
Floats = np.ndarray[Any, np.dtype[np.float64]]


class Nodes:
    """(steps, nodes) of the trees of likeliest nodes."""

    def __init__(self, steps: list[dict[str, Any]]) -> None:
        self.count = min(len(step["top"]) for step in steps)
        self.survival = self._column(steps, "top")
        self.score = self._column(steps, "top score")
        self.confidence = np.log(self._column(steps, "confidence"))
        self.path = np.zeros_like(self.confidence)  # confidence of the whole path
        for row, step in enumerate(steps):
            for node, parent in enumerate(step["parents"][: self.count]):
                self.path[row, node] = self.confidence[row, node] + (self.path[row, parent] if parent >= 0 else 0)
        self.half = np.array([step["prompt"] % 2 == 0 for step in steps])

    def _column(self, steps: list[dict[str, Any]], name: str) -> Floats:
        return np.array([step[name][: self.count] for step in steps])

    def rate(self, nodes: Any, rows: Any, cost: float) -> float:
        """Tokens by time where each step has so many nodes."""
        taken = np.arange(self.count) < nodes[rows][:, None]
        tokens = len(taken) + float((self.survival[rows] * taken).sum())
        return tokens / float((1 + DRAFT + cost * nodes[rows]).sum())

    def predicted(self, rows: Any, with_confidence: bool) -> Floats:
        """Survival of all nodes, fitted on some rows."""
        order = np.broadcast_to(np.sqrt(np.arange(self.count)), self.score.shape)
        columns = [np.ones_like(self.score), self.score, self.score**2, order]
        if with_confidence:
            columns += [self.confidence, self.path, self.path * self.score]
        features = np.stack(columns, -1)
        known, wanted = features[rows].reshape(-1, len(columns)), self.survival[rows].ravel()
        weights = np.zeros(len(columns))
        for _ in range(15):  # Newton's method
            guess = 1 / (1 + np.exp(-(known @ weights)))
            curve = (known * (guess * (1 - guess) + 1e-4)[:, None]).T @ known + 1e-3 * np.eye(len(columns))
            weights += np.linalg.solve(curve, known.T @ (wanted - guess))
        found: Floats = 1 / (1 + np.exp(-(features @ weights)))
        return found

    def gains(self, cost: float) -> dict[str, float]:
        rates: dict[str, list[float]] = {"fixed": [], "score": [], "score and confidence": []}
        for tested in (self.half, ~self.half):
            rows = len(self.half)
            fixed = [np.full(rows, count) for count in range(self.count + 1)]
            best = max(fixed, key=lambda nodes: self.rate(nodes, ~tested, cost))
            rates["fixed"].append(self.rate(best, tested, cost))
            for name in ("score", "score and confidence"):
                least = np.minimum.accumulate(self.predicted(~tested, name != "score"), 1)
                chosen = [(least > level * cost).sum(1) for level in np.linspace(0.5, 4, 15)]
                best = max(chosen, key=lambda nodes: self.rate(nodes, ~tested, cost))
                rates[name].append(self.rate(best, tested, cost))
        means = {name: float(np.mean(values)) for name, values in rates.items()}
        return {name: value / means["fixed"] - 1 for name, value in means.items() if name != "fixed"}


def merged_or_chosen(steps: list[dict[str, Any]], size: int) -> dict[str, float]:
    """Tokens a step."""
    own, lookup = (np.array([sum(step[name][:size]) for step in steps]) for name in ("top", "suffix"))
    support = np.array([step["support"] for step in steps])
    chosen = max(float(np.where(support >= least, lookup, own).mean()) for least in range(int(support.max()) + 2))
    merged = float(np.mean([sum(step[f"merged {size}"]) for step in steps]))
    return {
        "drafter": 1 + float(own.mean()),
        "lookup": 1 + float(lookup.mean()),
        "merged": 1 + merged,
        "chosen": 1 + chosen,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("steps")
    steps = json.loads(Path(parser.parse_args().steps).read_text())
    sizes = [int(name.removeprefix("merged ")) for name in steps[0] if name.startswith("merged ")]
    result: dict[str, Any] = {f"{size} nodes": merged_or_chosen(steps, size) for size in sizes}
    if not sizes:
        nodes = Nodes(steps)
        result = {f"a node costs {cost}": nodes.gains(cost) for cost in COSTS}
    for name, figures in result.items():
        print(name, {what: round(value, 3) for what, value in figures.items()})
    finish("tree_evidence", {"steps": len(steps), **result})


if __name__ == "__main__":
    main()
