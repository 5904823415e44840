"""`prove` on a tiny model: all is well, and each fault put in on purpose is found by the rows that should find it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from paceline import LLM
from paceline.cli.app import run
from paceline.core.rng import Lane, coin
from paceline.core.sequence import Sequence
from paceline.core.verdict import Verdict
from paceline.engine.policy import DraftPlan
from paceline.prove import inject, rollback
from paceline.prove.g_test import FALSE_ALARM, g_test
from paceline.prove.identity import ChangingPolicy
from paceline.prove.prover import prove
from paceline.prove.replay import toy
from paceline.prove.report import FAIL, NOT_EXERCISED, PASS, Check, Report
from paceline.prove.subject import Effort, ProofSubject, encoded_prompts
from paceline.prove.tap import Seen
from paceline.sampling_params import SamplingParams
from paceline.verify import verify
from tests.prove.conftest import EFFORT, motifs

METHODS = ("suffix", "draft-model")
LEVEL = FALSE_ALARM / 50  # of one test, as in a run with fifty


def results(report: Report) -> dict[str, str]:
    return {check.name: report.result(check) for check in report.checks}


def failing(report: Report) -> set[str]:
    return {name for name, result in results(report).items() if result == FAIL}


def test_a_sound_engine_is_proven(tiny: LLM) -> None:
    """A false alarm has probability 1e-6."""
    report = prove(tiny, methods=METHODS, effort=EFFORT, prompts=motifs())
    assert not failing(report), [report.detail(check) for check in report.checks]
    found = results(report)
    assert found["greedy · suffix alone"] == found["cache · suffix"] == found["greedy · batches of 4"] == PASS
    assert found["sampling · draft-model replayed"] == found["sampling · coins over steps"] == PASS
    assert found["sampling · whole generations"] == PASS
    assert "from q" in next(
        check.compared for check in report.checks if check.name == "sampling · draft-model replayed"
    )


@pytest.mark.parametrize(
    ("fault", "rows"),
    [
        ("bias", {"sampling · coins over steps"}),  # the toy's two tests both miss it with probability 1e-8
        ("rollback", {"cache · suffix", "cache · draft-model"}),
        ("bonus", {"greedy · batches of 4", "seeds · suffix alone"}),
        ("coins", {"sampling · coins over steps"}),
    ],
)
def test_each_injected_fault_is_found(tiny: LLM, fault: str, rows: set[str]) -> None:
    # Total variations of a few percent take more samples.
    effort = replace(EFFORT, replays=24_000) if fault in ("bias", "coins") else EFFORT
    report = prove(tiny, methods=METHODS, effort=effort, prompts=motifs(), fault=fault)
    assert not report.passed
    assert rows <= failing(report), results(report)
    untouched = {"bias": "greedy", "rollback": "sampling · coins", "bonus": "cache", "coins": "seeds"}[fault]
    assert not any(name.startswith(untouched) for name in failing(report))


def test_a_fault_is_gone_when_the_proof_is_over(tiny: LLM) -> None:
    before = vars(tiny.engine.runner).copy()
    for fault in inject.FAULTS:
        with inject.injected(tiny, fault):
            assert vars(tiny.engine.runner) != before
        assert vars(tiny.engine.runner) == before


def test_a_coin_kept_by_its_position_is_found_too() -> None:
    """The subtle fault: right for token-level rules, wrong for those that look ahead (TV some percent)."""

    def by_position(*args: object, **rest: object) -> Verdict:
        def source(lane: Lane, key: torch.Tensor, committed: torch.Tensor, node: torch.Tensor) -> torch.Tensor:
            return coin(lane, key, committed + node, torch.zeros_like(node))

        return verify(*args, **{**rest, "source": source})  # type: ignore[arg-type]

    stream, generator = toy(torch.device("cpu")), torch.Generator().manual_seed(0)
    sound = stream.replay(verify, 20_000, generator, Seen(), k=3, tokens=3)
    broken = stream.replay(by_position, 20_000, generator, Seen(), k=3, tokens=3)
    assert min(test.p_value for test in sound) > LEVEL
    assert broken[1].p_value < LEVEL


def test_rollback_is_found_on_the_real_model(smollm2_path: Path) -> None:
    llm = LLM(str(smollm2_path), device="cpu", method="auto", prefix_caching=False)
    effort = Effort(prompts=1, few=1, max_tokens=8, replays=0, steps=0, generations=0)
    found = {}
    for fault in (None, "rollback"):
        with inject.injected(llm, fault) as verifier:
            prompts = encoded_prompts(llm, 4)
            subject = ProofSubject(llm, verifier, ("ngram",), effort, prompts[:1], prompts[1:], torch.Generator(), 0)
            row = rollback.cache_after_rollback(subject, "ngram")
        report = Report("smollm2", {}, [row])
        found[fault] = report.result(row)
    assert found == {None: PASS, "rollback": FAIL}


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_caches_of_every_dtype_are_compared(
    tiny: LLM, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, exact: bool
) -> None:
    """A cache in fp8 needs a GPU to be written; what is read from it is compared the same way everywhere."""
    monkeypatch.setattr(ProofSubject, "exact", exact)
    kept = torch.randn(2, 5, 1, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    effort = Effort(prompts=1, few=1, max_tokens=4, replays=0, steps=0, generations=0)
    for fresh, differs in ((kept.clone(), False), (kept.flip(1), True)):
        found = iter(([1, 2], [values]) for values in (kept, fresh))
        monkeypatch.setattr(rollback, "_computed", lambda *_, found=found, **__: next(found))
        subject = ProofSubject(tiny, verify, ("suffix",), effort, [[1]], [], torch.Generator(), 0)
        row = rollback.cache_after_rollback(subject, "suffix")
        assert (row.comparisons, len(row.failures)) == (1, int(differs))


def sequence(speculation: str, length: int) -> Sequence:
    made = Sequence("s", [5], SamplingParams(max_tokens=99, speculation=speculation).resolve({}), max_len=100)
    made.tokens += [1] * length
    return made


def test_the_changing_policy_leaves_plain_answers_plain_and_tries_every_method_and_many_lengths() -> None:
    """Otherwise the proof would compare drafts with drafts."""
    policy = ChangingPolicy(("ngram", "suffix"))
    assert {policy.choose(sequence("none", length)) for length in range(40)} == {DraftPlan()}
    drawn = [policy.choose(sequence("auto", length)) for length in range(90)]
    assert {choice.method for choice in drawn} == {"none", "ngram", "suffix"}
    assert {choice.max_nodes for choice in drawn} == set(range(9))
    assert policy.choose(sequence("auto", 98)) == DraftPlan(), "the last token is the target's own"


# -- rows


def test_a_row_that_saw_too_little_does_not_pass() -> None:
    report = Report("m", {}, [Check("a", "b", Seen(accepts=3, rejects=0, bonus=1), comparisons=2)])
    assert results(report) == {"a": NOT_EXERCISED}
    assert report.detail(report.checks[0]) == "no reject"
    assert not report.passed


def test_failures_are_named_before_anything_else() -> None:
    row = Check("a", "b", Seen(), comparisons=1, failures=["token 3 differs", "token 4 differs"])
    report = Report("m", {}, [row])
    assert results(report) == {"a": FAIL}
    assert report.detail(row) == "token 3 differs (and 1 more)"


def test_the_false_alarm_is_shared_among_all_tests() -> None:
    tests = [g_test([500, 500], [0.5, 0.5])] * 4
    seen = Seen(accepts=1, rejects=1, bonus=1)
    report = Report("m", {}, [Check("a", "b", seen, tests=tests), Check("c", "d", seen, tests=tests)])
    assert report.alpha == pytest.approx(FALSE_ALARM / 8)
    assert report.passed
    assert 0 < (report.detectable(report.checks[0]) or 0) < 0.3


# -- the command


@pytest.fixture
def _little_effort(monkeypatch: pytest.MonkeyPatch) -> None:
    little = Effort(prompts=1, few=1, max_tokens=8, replays=500, steps=1, generations=16)
    monkeypatch.setattr(Effort, "of", staticmethod(lambda quick, prompts: little))


@pytest.mark.usefixtures("_little_effort")
def test_json_is_one_object_and_a_failure_exits_with_1(tiny_paths, capsys) -> None:
    code = run(["prove", "--model", str(tiny_paths[0]), "--methods", "suffix", "--inject", "coins", "--json"])
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    value = json.loads(out)
    assert code == 1
    assert (value["passed"], value["injected"], value["methods"]) == (False, "coins", ["suffix"])
    assert value["false_alarm"] == FALSE_ALARM
    assert {"name", "compared", "result", "accepts", "rejects", "bonus", "detectable_tv"} <= set(value["rows"][0])


@pytest.mark.usefixtures("_little_effort")
def test_the_table_names_every_row_and_what_is_not_proven(tiny_paths, capsys) -> None:
    assert run(["prove", "--model", str(tiny_paths[0]), "--methods", "ngram", "--quick"]) == 1
    captured = capsys.readouterr()
    assert "greedy · ngram alone" in captured.out
    assert "not exercised" in captured.out
    assert "not proven: " in captured.err
    assert "false alarm with probability 1e-06" in captured.err


@pytest.mark.usefixtures("_little_effort")
def test_every_one_of_several_draft_models_is_proven(tiny_paths, capsys) -> None:
    target, draft = tiny_paths
    run(["prove", "--model", str(target), "--methods", "draft-model", "--json",
         "--draft-model", str(draft), "--draft-model", str(target)])  # fmt: skip
    assert json.loads(capsys.readouterr().out)["methods"] == [f"draft-model:{each.name}" for each in (draft, target)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "no/such/folder/here"], "no/such/folder/here"),
        (["--model", "no/such/folder", "--methods", "prompt_lookup"], "methods: 'prompt_lookup' is called ngram here"),
        (["--inject", "nonsense"], "inject: 'nonsense' is not one of bias, rollback, bonus, coins"),
    ],
)
def test_errors_are_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["prove", *arguments]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert message in captured.err


def test_an_unknown_method_is_refused_by_name(tiny_paths, capsys) -> None:
    for method, flag in (("draft-model", "--draft-model"), ("medusa", "--drafter")):
        assert run(["prove", "--model", str(tiny_paths[0]), "--methods", method]) == 1
        assert f"methods: {method} is not loaded; give {flag}" in capsys.readouterr().err
