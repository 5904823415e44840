"""results.json: what is written is read back the same, and what is not one is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from paceline.bench.results import Cell, Results, Speedup, Spread, WithoutLoops
from paceline.errors import InvalidParameter

CELL = Cell(
    workload="chat",
    concurrency=4,
    method="ngram",
    k=4,
    label="ngram k=4",
    answers=12,
    tokens=800,
    seconds=20.0,
    tokens_per_s=40.0,
    speedup=Speedup(ratio=1.3, low=1.2, high=1.4, pairs=12),
    tau=1.5,
    drafted_per_position=(10, 8),
    accepted_per_position=(6, 3),
    ttft_s=Spread(p50=0.1, p99=0.2),
    without_loops=WithoutLoops(answers=10, speedup=Speedup(ratio=1.2, low=1.1, high=1.3, pairs=10)),
    identical=True,
)
RESULTS = Results(
    paceline="0.1.0", date="2026-11-15", model="smollm2", where={"cores": 2}, settings={"k": [4]}, cells=(CELL,)
)


def test_results_survive_a_file(tmp_path: Path) -> None:
    RESULTS.save(tmp_path / "results.json")
    assert Results.load(tmp_path / "results.json") == RESULTS
    assert [file.name for file in tmp_path.iterdir()] == ["results.json"]


def test_fields_of_a_later_version_are_left_out() -> None:
    found = RESULTS.to_json()
    found["moon"] = found["cells"][0]["moon"] = "full"
    assert Results.from_json(found) == RESULTS


def test_what_is_not_finite_becomes_null() -> None:
    found = Results(paceline="0", date="", model="m", where={"x": math.nan, "y": [math.inf, 1.5]}).to_json()
    assert found["where"] == {"x": None, "y": [None, 1.5]}


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"cells": 5}', '{"cells": [{}]}', '{"cells": [5]}', "null"])
def test_what_is_no_results_file_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "results.json"
    path.write_text(text)
    with pytest.raises(InvalidParameter, match="results: "):
        Results.load(path)
    with pytest.raises(InvalidParameter, match="cannot read"):
        Results.load(tmp_path / "missing.json")


def test_the_keys_are_those_the_report_and_others_rely_on() -> None:
    keys = set(json.loads(json.dumps(RESULTS.to_json()))["cells"][0])
    assert keys >= {"workload", "concurrency", "method", "k", "label", "speedup", "too_short", "tau", "identical"}
    assert CELL.plain is False
