"""Files that a training writes about itself: README.md (the model card), curve.json and curve.png."""

from __future__ import annotations

import json
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from typing import Any

from paceline.training.data.store import unwritable, write_text


def write_card(
    folder: Path,
    *,
    method: str,
    target: str,
    data: Mapping[str, Any],
    recipe: Mapping[str, Any],
    figures: Mapping[str, Any],
    cost: Mapping[str, Any],
    flag: str = "--drafter",
) -> None:
    """Write the model card. A nested mapping in `figures` becomes a table with a row for each entry; `flag` is the
    option by which the engine takes the folder."""
    lines = [
        f"# {method} drafter for {target}",
        "",
        f"Drafts for `{target}`: the output stays the target's own, whatever this drafter proposes.",
        "",
        f"    paceline generate --model TARGET {flag} THIS_FOLDER 'a prompt'",
        "",
        "## τ (committed tokens a target pass)",
        *_table(figures),
        "## Data",
        *_list(data),
        "## Recipe",
        *_list(recipe),
        "## Cost",
        *_list(cost),
    ]
    write_text(folder / "README.md", "\n".join(lines) + "\n")


def write_curve(folder: Path, curve: SequenceOf[Mapping[str, Any]], title: str) -> None:
    """Write the curve; its PNG only if matplotlib is installed."""
    write_text(folder / "curve.json", json.dumps(list(curve)) + "\n")
    try:
        import matplotlib
    except ImportError:
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4))
    steps = [entry["step"] for entry in curve]
    left.plot(steps, [entry["loss"] for entry in curve])
    left.set(xlabel="step", ylabel="loss", title=title)
    right.plot(steps, [entry["block_tau"] for entry in curve], label="by block, training rows")
    names = sorted({name for entry in curve for name in entry if name.startswith("τ ")})
    for name in names:
        points = [(entry["step"], entry[name]) for entry in curve if name in entry]
        right.plot(*zip(*points, strict=True), "o-", label=name)
    right.set(xlabel="step", ylabel="τ")
    right.legend(fontsize=8)
    figure.tight_layout()
    try:
        with unwritable(folder):
            figure.savefig(folder / "curve.png", dpi=110)
    finally:
        plt.close(figure)


def _list(values: Mapping[str, Any]) -> list[str]:
    return ["", *(f"- {name}: {_words(value)}" for name, value in values.items()), ""]


def _table(figures: Mapping[str, Any]) -> list[str]:
    nested = {name: value for name, value in figures.items() if isinstance(value, Mapping)}
    plain = {name: value for name, value in figures.items() if not isinstance(value, Mapping)}
    lines = _list(plain) if plain else [""]
    if nested:
        columns = list(dict.fromkeys(column for row in nested.values() for column in row))
        lines += [f"| | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
        lines += [
            f"| {name} | {' | '.join(_words(row.get(one, '')) for one in columns)} |" for name, row in nested.items()
        ]
        lines.append("")
    return lines


def _words(value: Any) -> str:
    if isinstance(value, float):
        if 0 < abs(value) < 0.01:
            return f"{value:.2g}"  # a learning rate
        return f"{value:,.3f}" if abs(value) < 100 else f"{value:,.0f}"
    if isinstance(value, (list, tuple)):
        return " ".join(_words(one) for one in value)
    return str(value)
