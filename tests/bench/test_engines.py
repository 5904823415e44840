"""Real engines over a tiny model, and the command from its arguments to its files."""

from __future__ import annotations

import errno
import hashlib
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from paceline.bench.engines import Engines, TimedEngine
from paceline.bench.grid import Contender
from paceline.bench.measurement import Measurement, Run, TimedAnswer, cells
from paceline.bench.prompts import Prompt
from paceline.bench.results import Results
from paceline.bench.runner import RunPlan, measure
from paceline.cli.app import run
from paceline.drafters.heads.checkpoint import save_heads
from paceline.drafters.method_names import method_names
from paceline.errors import InvalidPrompt
from paceline.models.load.loader import load_config
from tests.bench.fake_subject import repetitive
from tests.conftest import Output
from tests.drafters.overfit import random_heads
from tests.helpers.errors import refused

CONTENDERS = [Contender("none"), Contender("ngram", 3), Contender("suffix", 2), Contender("auto")]


@pytest.fixture(scope="module")
def measured(endless: Path) -> Measurement:
    subject = Engines(str(endless), CONTENDERS, device="cpu", raw=True)
    subject.check(repetitive(8), 40)
    measurement = Measurement(CONTENDERS)
    measure(subject, repetitive(8), RunPlan(concurrencies=[1, 4], max_tokens=40), measurement)
    return measurement


def test_all_engines_answer_the_same_and_tokens_are_counted_where_they_are_committed(measured: Measurement) -> None:
    found = cells(measured)
    assert {cell.identical for cell in found} == {True}
    for cell in found:
        assert cell.tokens == 8 * 40
        assert cell.tokens_per_s == pytest.approx(cell.tokens / cell.seconds)
        assert 0 < cell.engine_share < 1
    plain, ngram, *_ = [cell for cell in found if (cell.workload, cell.concurrency) == ("all", 1)]
    assert plain.tau == 1
    assert plain.acceptance_rate is None
    assert ngram.drafted_per_position
    assert len(ngram.drafted_per_position) <= 3
    assert ngram.speedup is not None
    at_four = [cell for cell in found if (cell.workload, cell.concurrency) == ("all", 4)]
    assert all(cell.speedup is None for cell in at_four)
    assert "2 pairs" in str(at_four[1].too_short)


def test_engines_share_the_weights_and_nothing_else(endless: Path) -> None:
    subject = Engines(str(endless), CONTENDERS, device="cpu", raw=True)
    subject.check(repetitive(8), 40)
    engines = [timed._engine for timed in subject.open(2).values()]
    assert len({id(engine.model) for engine in engines}) == 1
    drafters = [drafter for engine in engines for drafter in engine.drafters.drafters]
    assert len({id(drafter) for drafter in drafters}) == len(drafters) == 12
    assert [type(engine.policy).__name__ for engine in engines] == ["AdaptivePolicy"] * 4


def test_a_draft_model_is_loaded_once_and_its_cache_is_counted(endless: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    contenders = [*CONTENDERS[:2], Contender("draft-model", 2), Contender("draft-model", 4), Contender("auto")]
    subject = Engines(str(endless), contenders, draft_model=[str(endless)], device="cpu", raw=True)
    subject.check(repetitive(8), 40)
    engines = {contender: timed._engine for contender, timed in subject.open(1).items()}
    models = [
        drafter for engine in engines.values() for drafter in engine.drafters.drafters if drafter.name == "draft-model"
    ]
    assert len({id(drafter) for drafter in models}) == 3
    assert len({id(drafter.model) for drafter in models}) == 1  # type: ignore[attr-defined]
    caches = sum(
        2 * layer.k.numel() * layer.k.element_size()
        for engine in engines.values()
        for layer in engine.runner.cache.layers
    )
    monkeypatch.setattr("paceline.bench.engines._free_bytes", lambda device: int(caches / 0.8) - 1000)
    with refused("concurrency"):
        subject.open(1)
    monkeypatch.setattr("paceline.bench.engines._free_bytes", lambda device: int(caches / 0.8) + 1000)
    subject.open(1)


def test_several_draft_models_serve_as_in_an_llm(endless: Path, tmp_path: Path) -> None:
    (tmp_path / "other").symlink_to(endless)
    paths = [str(endless), str(tmp_path / "other")]
    contenders = [*CONTENDERS[:2], Contender("draft-model", 2), Contender("auto")]
    subject = Engines(str(endless), contenders, draft_model=paths, device="cpu", raw=True)
    subject.check(repetitive(8), 40)
    used = {
        contender.label: [drafter.name for drafter in timed._engine.drafters.drafters]
        for contender, timed in subject.open(1).items()
    }
    both = [f"draft-model:{endless.name}", "draft-model:other"]
    assert used["draft-model k=2"][-2:] == used["auto"][-2:] == both
    assert not {*both, "draft-model"} & {*used["plain"], *used[CONTENDERS[1].label]}
    layers = [len(subject._kv_layers(contender)) for contender in contenders]
    assert layers == [layers[0], layers[0], 3 * layers[0], 3 * layers[0]]


def test_a_trained_drafter_goes_to_the_engines_that_may_use_it(endless: Path, tmp_path: Path) -> None:
    config = load_config(endless)
    save_heads(tmp_path, random_heads(config.hidden_size, config.vocab_size))
    contenders = [*CONTENDERS[:2], Contender("medusa", 3), Contender("auto")]
    subject = Engines(str(endless), contenders, drafter=[str(tmp_path)], device="cpu", raw=True)
    subject.check(repetitive(8), 40)
    used = {one.label: [each.name for each in subject.drafters(one)] for one in contenders}
    assert [label for label, names in used.items() if "medusa" in names] == ["medusa k=3", "auto"]


def test_a_prompt_that_does_not_fit_is_named(endless: Path) -> None:
    subject = Engines(str(endless), CONTENDERS[:2], device="cpu", raw=True)
    long = Prompt(workload="words", turns=("w7 " * 250,), origin="line 3 of mine.txt")
    with pytest.raises(InvalidPrompt, match=r"line 3 of mine.txt: 250 tokens and 40 of answer .* context of 256"):
        subject.check([*repetitive(8), long], 40)
    talk = Prompt(workload="words", turns=("w1", "w2"), origin="line 4")
    with pytest.raises(InvalidPrompt, match="line 4: a conversation needs the chat template"):
        subject.check([talk], 40)


def test_caches_that_do_not_fit_are_refused_before_they_are_made(
    endless: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = Engines(str(endless), CONTENDERS, device="cpu", raw=True)
    subject.check(repetitive(8), 40)
    monkeypatch.setattr("paceline.bench.engines._free_bytes", lambda device: 1_000_000)
    with refused("concurrency"):
        subject.open(64)


# -- the command


@pytest.fixture
def bench(measuring: Callable[..., Output]) -> Callable[..., Output]:
    return partial(measuring, "bench", 8)


def test_the_command_takes_several_draft_models_and_repeats_them_in_its_own(bench, endless, tmp_path) -> None:
    (tmp_path / "other").symlink_to(endless)
    both = ("--draft-model", str(endless), "--draft-model", str(tmp_path / "other"))
    code, _, err = bench("--methods", "draft-model", "--k", "2", "--max-tokens", "40", *both)
    assert code == 0, err
    settings = Results.load(tmp_path / "out" / "results.json").settings
    assert settings["draft_model"] == [str(endless), str(tmp_path / "other")]
    assert " ".join(both) in settings["command"]


def test_the_command_refuses_a_draft_model_that_is_given_twice(bench, endless) -> None:
    code, _, err = bench("--methods", "draft-model", "--draft-model", str(endless), "--draft-model", str(endless))
    assert code == 1
    assert "draft_model: names" in err
    assert "twice" in err


def test_the_command_prints_a_table_and_writes_both_files(bench, endless, tmp_path, capsys) -> None:
    code, out, err = bench("--methods", "ngram,auto", "--k", "2", "--max-tokens", "40")
    assert code == 0, err
    for word in ("plain", "ngram k=2", "auto", "speed-up [95 %]", "one request at a time"):
        assert word in out
    assert "of 8" in out
    assert "8 pairs" in err
    assert "100 %" in err
    results = Results.load(tmp_path / "out" / "results.json")
    assert results.complete
    assert results.settings["methods"] == ["none", "ngram", "auto"]
    assert results.settings["k"] == [2]
    assert results.settings["max_tokens"] == 40
    assert results.where["device"] == "cpu"
    weights = (endless / "model.safetensors").read_bytes()
    assert results.where["weight_bytes"] == len(weights)
    assert results.where["weights_sha256"] == hashlib.sha256(weights).hexdigest()
    assert results.settings["command"].startswith(f"paceline bench {endless} --methods ngram,auto --k 2 --prompts ")
    assert all(cell.prompt_tokens_per_s for cell in results.cells)
    assert results.sample is not None
    assert any(drafted for _, drafted in results.sample["pieces"])
    assert "<html" in (tmp_path / "out" / "report.html").read_text()
    code, _, err = bench("--methods", "ngram")
    assert (code, "already holds results.json" in err) == (1, True)
    again = results.to_json() | {"model": "another"}
    (tmp_path / "again.json").write_text(json.dumps(again))
    assert run(["bench", "--compare", str(tmp_path / "out"), str(tmp_path / "again.json")]) == 0
    assert run(["bench", "--compare", "a", "b", "--quick"]) == 1
    assert run(["bench", "--compare", str(tmp_path / "out"), str(tmp_path / "no.json")]) == 1
    said = capsys.readouterr()
    assert "1.00×" in said.out
    assert "B: another" in said.out
    assert "quick: is for runs that measure only" in said.err


def test_json_prints_the_results_and_nothing_else(bench: Any) -> None:
    code, out, _ = bench("--methods", "ngram", "--max-tokens", "30", "--temperature", "0.8", "--json")
    assert code == 0
    found = Results.from_json(json.loads(out))
    assert {cell.label for cell in found.cells} == {"plain", "ngram k=auto"}
    assert all(cell.identical for cell in found.cells)  # seeded


def test_ctrl_c_keeps_what_was_measured(bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer, calls = TimedEngine.answer, []

    def interrupted(self: TimedEngine, *arguments: Any) -> Run:
        calls.append(self)
        if len(calls) > 2 + 2 * 6:  # the warm-up, then six prompts on two engines
            raise KeyboardInterrupt
        return answer(self, *arguments)

    monkeypatch.setattr(TimedEngine, "answer", interrupted)
    code, out, err = bench("--methods", "ngram", "--max-tokens", "40")
    assert code == 130
    assert "interrupted" in err
    assert "ngram k=auto" in out
    results = Results.load(tmp_path / "out" / "results.json")
    assert not results.complete
    assert {cell.answers for cell in results.cells} == {6}


def test_a_disk_that_fills_up_loses_no_figure(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Results, path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Results, "save", full)
    code, out, err = bench("--methods", "ngram", "--max-tokens", "40")
    assert code == 1
    assert "ngram k=auto" in out
    assert "out: the results could not be written to" in err
    assert "No space left on device" in err


def test_an_interruption_before_anything_was_measured_leaves_nothing(bench, tmp_path, monkeypatch) -> None:
    def interrupted(self: TimedEngine, *arguments: Any) -> Run:
        raise KeyboardInterrupt

    monkeypatch.setattr(TimedEngine, "answer", interrupted)
    code, out, _ = bench("--methods", "ngram")
    assert (code, out) == (130, "")
    assert not (tmp_path / "out").exists()


def test_answers_too_short_for_a_figure_give_a_sentence_and_exit_code_1(bench, monkeypatch) -> None:
    def brief(self: TimedEngine, prompts: Any, params: Any) -> Run:
        return Run(tuple(TimedAnswer((1, 2), ((0.1, 1), (0.2, 1))) for _ in prompts))

    monkeypatch.setattr(TimedEngine, "answer", brief)
    code, out, err = bench("--methods", "ngram")
    assert code == 1
    assert "x [" not in out
    assert "16 tokens measured, and fewer than 200 are not enough" in err


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--methods", "magic"], f"methods: 'magic' is not one of {', '.join(method_names())}, auto"),
        (["--methods", "ngram", "--k", "0"], "k: must be between 1 and 64"),
        (["--methods", "ngram", "--k", "200"], "k: must be between 1 and 64"),
        (["--prompts", "missing.jsonl"], "prompts: cannot read missing.jsonl"),
        (["--max-tokens", "3"], "max_tokens: at most 24 tokens would be measured"),
        (["--concurrency", "4"], "concurrency: 8 prompts fill 2 groups of 4"),
        (["--max-tokens", "250"], "line 1 of"),
        (["--temperature", "-1"], "temperature: must be at least 0"),
        (["--seed", "soon"], "seed: must be a whole number, or none"),
        (["--workloads", "chat"], "workloads: 'chat' is not one of prompts"),
        (["--timeout", "5"], "timeout: is for servers only"),
        (["--out", "/proc/results"], "out: cannot write to /proc/results"),
        (["--endpoint", "http://127.0.0.1:9"], "device: is for our own engines only"),
    ],
)
def test_nonsense_is_refused_in_one_line_and_leaves_nothing(bench, tmp_path, arguments, problem) -> None:
    code, out, err = bench(*arguments)
    assert code == 1
    assert out == ""
    assert problem in err
    assert err.strip().count("\n") == 0
    assert not (tmp_path / "out").exists()
