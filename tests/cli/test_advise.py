"""`paceline advise` from its arguments to its files, on a tiny model, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.cli.app import run
from tests.bench.fake_subject import repetitive
from tests.conftest import Output
from tests.helpers.tiny import save_tiny


@pytest.fixture
def advise(measuring: Callable[..., Output]) -> Callable[..., Output]:
    def call(*arguments: str) -> Output:
        return measuring("advise", 12, *arguments, *([] if "--concurrency" in arguments else ["--concurrency", "1"]))

    return call


def test_the_command_says_what_to_do_and_writes_it_down(advise, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("paceline.cli.advise.command.LENGTHS", (2, 3))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "results.json").write_text("{}")  # a benchmark's, which stays
    code, out, err = advise("--max-tokens", "40")
    assert code == 0
    assert out.startswith(("Use ", "Keep the default", "Leave speculation off."))
    assert "predicted" in out
    assert "measured" in out
    assert "vLLM " in out
    assert "a pass takes" in err
    assert "written to" in err
    found = json.loads((tmp_path / "out" / "advice.json").read_text())
    assert {entry["label"] for entry in found["measured"]} >= {"auto"}
    assert json.loads((tmp_path / "out" / "paceline.json").read_text()) == found["choice"]["paceline"]
    again = advise()
    assert again[0] == 1
    assert "already holds advice.json" in again[2]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("--prompts", "nowhere.jsonl"), "prompts"),
        (("--concurrency", "1,64"), "concurrency"),
        (("--concurrency", "0"), "concurrency"),
        (("--max-tokens", "3"), "max_tokens"),
        (("--max-tokens", "250"), "InvalidPrompt"),
        (("--temperature", "-1"), "temperature"),
        (("--out", "/proc/nowhere"), "out"),
        (("--draft-model", "./no-such-folder"), "ModelNotFound"),
    ],
)
def test_bad_input_is_refused_by_its_field(
    advise: Callable[..., Output], arguments: tuple[str, ...], error: str
) -> None:
    code, out, _ = advise(*arguments, "--json")
    refusal = json.loads(out)["error"]
    assert (code, refusal.get("field", refusal["type"])) == (1, error)


def test_too_few_prompts_are_refused_before_the_model_is_loaded(advise: Callable[..., Output], tmp_path: Path) -> None:
    few = tmp_path / "few.txt"
    few.write_text("one\ntwo\nthree")
    code, out, _ = advise("--prompts", str(few), "--json")
    assert (code, json.loads(out)["error"]["field"]) == (1, "prompts")


def test_answers_that_end_at_once_are_reported_as_too_short(tmp_path, capsys) -> None:
    terse = tmp_path / "terse"
    save_tiny("llama-tied", terse)
    found = json.loads((terse / "generation_config.json").read_text())
    (terse / "generation_config.json").write_text(json.dumps({**found, "eos_token_id": list(range(97))}))
    prompts = tmp_path / "mine.txt"
    prompts.write_text("\n".join(prompt.turns[0] for prompt in repetitive(12)))
    code = run(["advise", str(terse), "--raw", "--device", "cpu", "--concurrency", "1", "--prompts", str(prompts)])
    assert code == 1
    assert not Path("paceline-advice").exists()
    assert "fewer than 200 are not enough: give more prompts, or more tokens to each" in capsys.readouterr().err


def test_ctrl_c_before_a_profile_says_what_is_missing(
    advise: Callable[..., Output], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("paceline.advisor.subject.pass_cost", interrupted)
    code, _, err = advise("--max-tokens", "40")
    assert code == 130
    assert "missing: the profile, the prediction, the check" in err
