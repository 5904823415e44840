"""`paceline advise --traffic`: what it takes, how a load curve becomes a number of machines, a run on a tiny model."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import pytest

from paceline.advisor.capacity import (
    Capacity,
    LoadCurve,
    LoadDriver,
    LoadPoint,
    Traffic,
    build_pair,
    measure,
    prompts_of,
)
from paceline.bench.results import Spread
from paceline.build import load
from paceline.cli.app import run
from paceline.config import EngineConfig, SpeculationConfig
from paceline.errors import InvalidParameter

TEXT = "rate=10,prompt=40,answer=8,ttft=0.5,inter-token=0.1"


def point(rate: float, ttft: float, *, finished: bool = True, inter_token: float = 0.05) -> LoadPoint:
    ttft_s, inter_token_s = (Spread(p50=seconds / 2, p99=seconds) for seconds in (ttft, inter_token))
    return LoadPoint(rate=rate, requests=100, finished=finished, ttft_s=ttft_s, inter_token_s=inter_token_s)


def test_a_traffic_is_read_from_its_text() -> None:
    assert Traffic.parse(TEXT) == Traffic(rate=10, prompt=40, answer=8, ttft=0.5, inter_token=0.1)
    assert Traffic.parse("rate=1, prompt=2, answer=3").ttft == math.inf


@pytest.mark.parametrize(
    "text",
    [
        *("", "rate", "rate=1", "speed=1", "rate=0,prompt=1,answer=1", "rate=x,prompt=1,answer=1"),
        *("rate=1,prompt=1.5,answer=1", "rate=1,rate=1,prompt=1,answer=1", "rate=nan,prompt=1,answer=1"),
    ],
)
def test_a_traffic_that_says_too_little_is_refused(text: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        Traffic.parse(text)
    assert caught.value.field == "traffic"


def test_the_greatest_rate_within_the_limits_counts_and_is_narrowed_down() -> None:
    traffic = Traffic.parse(TEXT)
    curve = LoadCurve(5, [point(4, 0.9), point(1, 0.1), point(2, 0.3)])
    assert (curve.within(traffic), curve.beyond(traffic), curve.next_rate(traffic)) == (2, 4, 3)
    lucky = LoadCurve(5, [point(1, 0.1), point(2, 0.7), point(3, 0.2)])
    assert lucky.within(traffic) == 1  # a point beyond one that is not within the limits is luck
    assert LoadCurve(5, [point(1, 0.1, finished=False)]).within(traffic) == 0
    assert LoadCurve(5, [point(1, 0.1, inter_token=0.2)]).within(traffic) == 0
    assert LoadCurve(5, [point(1, 0.1)]).next_rate(traffic) is None


def test_machines_and_the_price_of_a_million_tokens() -> None:
    traffic = Traffic.parse(TEXT)
    found = Capacity(traffic, {"fast": LoadCurve(5, [point(4, 0.1)]), "slow": LoadCurve(5, [point(4, 9.0)])}, price=3.6)
    assert found.machines("fast") == 3
    assert found.per_million("fast") == pytest.approx(3 * 3.6 / 3600 / (10 * 8) * 1e6)
    assert found.machines("slow") is None
    assert found.per_million("slow") is None
    assert json.loads(json.dumps(found.to_json()))["curves"]["fast"]["machines"] == 3


def test_prompts_have_the_length_asked_for_and_end_with_a_text() -> None:
    texts = [[1, 2, 3], [4, 5], [6]]
    made = list(itertools.islice(prompts_of(texts, 4), 6))
    assert all(len(prompt) == 4 for prompt in made)
    assert [prompt[-1] for prompt in made] == [3, 5, 6] * 2
    assert made[:3] != made[3:]
    assert next(prompts_of([[1, 2, 3]], 2)) == [2, 3]


def test_a_drafter_takes_cache_from_sequences(endless: Path) -> None:
    target = load(str(endless), device="cpu")
    traffic = Traffic.parse("rate=50,prompt=20,answer=6")
    config = EngineConfig(max_num_seqs=4)
    plain, drafting, holds = build_pair(
        target, SpeculationConfig(method="auto", draft_model=str(endless)), traffic, config
    )
    assert 0 < holds.drafting < holds.plain
    assert holds.plain / holds.drafting == pytest.approx(2, rel=0.01)  # its K/V are as large as the target's
    texts = [[5, 6, 7], [8, 9]]
    drivers = {
        label: LoadDriver(engine, prompts_of(texts, 20), traffic, 0.0)
        for label, engine in (("plain", plain), ("auto", drafting))
    }
    curves = measure(drivers, traffic, at_once=4, seconds=0.1)
    for label, curve in curves.items():
        assert curve.saturated > 0, label
        assert len(curve.points) >= 4
        assert all(each.requests >= 12 for each in curve.points)
    assert not plain.has_work
    assert plain.blocks.num_free == plain.blocks.num_blocks
    with pytest.raises(InvalidParameter) as caught:
        build_pair(target, SpeculationConfig(), Traffic.parse("rate=1,prompt=100000,answer=5"), config)
    assert caught.value.field == "traffic"


def test_the_command_prints_machines_and_refuses_flags_without_meaning(endless, capsys, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr("paceline.cli.advise.capacity.QUICK_SECONDS", 0.1)
    prompts = tmp_path / "mine.txt"
    prompts.write_text("alpha beta\ngamma delta")
    fixed = ["advise", str(endless), "--device", "cpu", "--raw", "--quick", "--prompts", str(prompts)]
    assert run([*fixed, "--traffic", "rate=5,prompt=20,answer=4", "--price", "2"]) == 0
    captured = capsys.readouterr()
    assert captured.out.count("such machine") == 2
    assert "a million tokens of answers cost" in captured.out
    assert "the cache holds" in captured.err
    for more in (["--concurrency", "2"], ["--max-tokens", "5"], ["--price", "0"]):
        assert run([*fixed, "--traffic", "rate=5,prompt=20,answer=4", *more]) != 0
    assert run([*fixed, "--price", "2"]) != 0
