"""The pure parts: cost between measurements, halves, choice, reasons and settings."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from paceline.advisor.advise import check_halves, halves
from paceline.advisor.choice import OFF, Figure, Figures, combined, levels_between, ranked, recommend, to_check
from paceline.advisor.result import Advice, paceline_config, paceline_flags, vllm_config, why_off
from paceline.advisor.subject import DrafterCost, PassCost, interpolated
from paceline.bench.grid import Contender
from paceline.bench.prompts import Prompt
from paceline.cli.advise.words import notes, sentences, settings
from paceline.config import SpeculationConfig
from paceline.drafters.speculative_config import read
from paceline.errors import InvalidParameter

NGRAM, SUFFIX, AUTO = Contender("ngram", 4), Contender("suffix", 2), Contender("auto")
MODEL = Contender("draft-model", 3, "some/small-model")


def figure(ratio: float, **more: float) -> Figure:
    return Figure(**{"ratio": ratio, "groups": 9, "alpha": 0.4, "decode_ratio": ratio, **more})  # type: ignore[arg-type]


def at(level: int, **ratios: float) -> Figures:
    names = {"ngram": NGRAM, "suffix": SUFFIX, "auto": AUTO, "model": MODEL}
    return {(level, names[name]): figure(ratio) for name, ratio in ratios.items()}


# -- cost


def test_cost_is_straight_between_measurements_and_goes_on_as_steep_beyond() -> None:
    points = {1: 10.0, 4: 13.0, 8: 21.0}
    assert [interpolated(points, x) for x in (0, 1, 2, 4, 6, 8, 10)] == [10, 10, 11, 13, 17, 21, 25]
    assert interpolated({3: 7.0}, 100) == 7


def test_a_checking_pass_is_priced_in_plain_passes_of_as_many_sequences() -> None:
    cost = PassCost(decode={1: {0: 1.0, 4: 1.4}, 4: {0: 1.3, 16: 2.9}})
    assert cost.step_s(1, 2) == pytest.approx(1.2)
    assert cost.step_s(2, 0) == pytest.approx(1.1)
    assert cost.verify_cost(4, 4) == pytest.approx(2.9 / 1.3)


# -- halves


def prompts(**counts: int) -> list[Prompt]:
    return [
        Prompt(workload=name, turns=(f"{name} {n}",), origin=f"{name} {n}")
        for name, count in counts.items()
        for n in range(count)
    ]


def test_halves_share_no_prompt_and_every_workload_is_in_both() -> None:
    asked = prompts(chat=7, code=5, sql=4)
    first, second = halves(asked)
    assert sorted(each.origin for each in first + second) == sorted(each.origin for each in asked)
    assert abs(len(first) - len(second)) <= 1
    for half in (first, second):
        assert {each.workload for each in half} == {"chat", "code", "sql"}


@pytest.mark.parametrize(
    ("count", "levels", "tokens", "field"),
    [(9, [1], 64, "prompts"), (20, [1, 16], 64, "concurrency"), (10, [1], 8, "max_tokens")],
)
def test_a_run_that_could_not_end_in_advice_is_refused(count, levels, tokens, field) -> None:
    with pytest.raises(InvalidParameter) as caught:
        check_halves(halves(prompts(chat=count)), levels, tokens)
    assert caught.value.field == field


# -- choice


def test_the_best_fixed_choice_counts_as_plain_where_it_is_switched_off() -> None:
    found = {**at(1, ngram=1.5, suffix=1.3), **at(16, ngram=0.7, suffix=1.0)}
    assert ranked(found)[0] == NGRAM
    assert recommend(found).contender == NGRAM
    assert recommend(found).up_to == 1


def test_auto_is_advised_where_it_is_as_good_and_not_where_it_is_worse() -> None:
    assert recommend(at(1, ngram=1.5, auto=1.48)).contender == AUTO
    assert recommend(at(1, ngram=1.5, auto=1.40)).contender == NGRAM
    assert recommend({**at(1, ngram=1.5, auto=1.5), **at(16, ngram=0.7, auto=0.8)}).contender == NGRAM


def test_a_draft_model_is_advised_where_it_is_worth_its_memory() -> None:
    with_model = Contender("auto", None, "small")
    for ratio, advised in ((1.51, AUTO), (1.6, with_model)):
        assert recommend({**at(1, ngram=1.4, auto=1.5), (1, with_model): figure(ratio)}).contender == advised


def test_nothing_is_advised_where_nothing_pays() -> None:
    assert recommend(at(1, ngram=1.01, suffix=0.9, auto=1.0)).off
    assert recommend(at(1, auto=1.2)).contender == AUTO  # pays, though no fixed choice does


def test_a_gain_that_may_be_chance_is_not_advised() -> None:
    for low, off in ((0.99, True), (1.01, False)):
        assert recommend({(1, NGRAM): figure(1.04, low=low, high=1.08)}).off is off


def test_a_second_method_is_checked_only_if_it_is_close() -> None:
    assert to_check(at(1, ngram=1.5, suffix=1.45, auto=1.4)) == [NGRAM, SUFFIX, AUTO]
    assert to_check(at(1, ngram=1.5, suffix=1.2, auto=1.4)) == [NGRAM, AUTO]
    assert to_check(at(1, ngram=1.5, suffix=1.45, auto=1.4), rival=False) == [NGRAM, AUTO]


def test_where_a_choice_stops_paying_is_looked_for_between_the_concurrencies_asked_about() -> None:
    found = {**at(1, ngram=1.5), **at(4, ngram=1.2), **at(32, ngram=0.8)}
    assert levels_between(found, NGRAM) == [8, 16]
    assert levels_between(at(1, ngram=0.9), NGRAM) == []
    assert levels_between(found, SUFFIX) == []


def test_both_halves_count_by_how_sure_they_are() -> None:
    predicted = {(1, NGRAM): figure(1.2, low=1.19, high=1.21)}
    sure = {(1, NGRAM): figure(1.0, low=0.99, high=1.01)}
    unsure = {(1, NGRAM): figure(1.0, low=0.6, high=1.7)}
    assert combined(predicted, sure)[1, NGRAM].ratio < 1.02
    assert combined(predicted, unsure)[1, NGRAM].ratio > 1.15
    assert combined(predicted, {}) == predicted


def test_a_check_cut_short_leaves_the_predictions_of_the_levels_it_did_not_reach() -> None:
    predicted = {**at(1, ngram=1.5, suffix=1.1), **at(16, ngram=0.7, suffix=0.9)}
    measured = at(1, ngram=1.4)
    known = combined(predicted, measured)
    assert known[16, NGRAM] == predicted[16, NGRAM]
    assert (16, SUFFIX) not in known  # it was not chosen for the check, so it counts at no level
    found = advice(measured)
    found.predicted = predicted
    assert found.stops_at == 16
    assert found.to_json()["choice"]["checked"] == [1]
    text = " ".join(sentences(found))
    assert "Measured: 1.40x with one request at a time; Predicted, not checked: 0.70x with 16" in text


def test_a_choice_that_pays_only_from_some_number_on_is_not_switched_off_there() -> None:
    found = advice({**at(1, ngram=1.01), **at(4, ngram=1.5), **at(16, ngram=0.8)})
    assert found.recommendation is not None
    assert found.recommendation.up_to == 4
    assert found.stops_at == 16
    text = " ".join(sentences(found))
    assert "With one request at a time it gains nothing. Switch it off from 16 requests at once." in text
    assert advice({**at(1, ngram=1.01), **at(4, ngram=1.5)}).stops_at is None


def test_a_figure_without_an_interval_is_sure_only_if_it_is_large() -> None:
    assert not figure(1.15).surely_pays
    assert figure(1.2).surely_pays


# -- reasons

CASE: dict[str, Any] = {
    "figure": figure(0.98),
    "label": "ngram k=4",
    "k": 4,
    "concurrency": 1,
    "draft_cost": 0.0,
    "verify_cost": 1.0,
    "temperature": 0.0,
}


@pytest.mark.parametrize(
    ("changes", "kind", "problem"),
    [
        ({"figure": figure(1.01, decode_ratio=1.4, tokens_per_answer=6)}, "short-outputs", r"short \(6 tokens"),
        ({"draft_cost": 0.5}, "costly-drafter", "50% of a pass of the model for every token"),
        ({"verify_cost": 2.5, "concurrency": 16}, "saturated", "16 requests at once.*4 tokens more for each request"),
        ({"verify_cost": 1.2, "figure": figure(0.9, alpha=0.05)}, "acceptance", "an acceptance of 5%"),
        ({"temperature": 1.2, "verify_cost": 1.1, "figure": figure(0.9, alpha=0.02)}, "temperature", "temperature 1.2"),
        ({"verify_cost": 1.2}, "little", r"would be 1\.37x where it drafts; 0\.98x over all steps"),
    ],
)
def test_the_reason_is_the_condition_that_fails(changes: dict[str, object], kind: str, problem: str) -> None:
    reason = why_off(**CASE | changes)
    assert reason.kind == kind
    assert re.search(problem, reason.words)


def test_a_gain_that_may_be_chance_is_called_that_and_nothing_else_is_blamed() -> None:
    found = advice({(1, NGRAM): figure(1.10, low=0.90, high=1.35, decode_ratio=1.12)})
    found.measured = {}
    assert found.recommendation is not None
    assert found.recommendation.off
    reason = found.reason(1)
    assert reason is not None
    assert reason.kind == "uncertain"
    assert "1.10x [0.90, 1.35] may be chance: give more prompts" in sentences(found)[0]


def test_answers_are_not_called_short_where_decoding_is_most_of_the_wait() -> None:
    long = figure(1.02, decode_ratio=1.055, tokens_per_answer=300)
    mostly = figure(1.04, decode_ratio=1.055, tokens_per_answer=300)
    assert why_off(**CASE | {"figure": long}).kind == "short-outputs"
    assert why_off(**CASE | {"figure": mostly}).kind != "short-outputs"


# -- settings


@pytest.mark.parametrize("contender", [NGRAM, SUFFIX, MODEL])
def test_paceline_reads_what_is_written_for_vllm_as_the_same_choice(contender: Contender) -> None:
    config = vllm_config(contender, None).speculative_config
    assert config is not None
    meant = read(json.dumps(config), SpeculationConfig())
    ours = paceline_config(contender)
    assert {"method": meant.method, "k": meant.k} == {"method": ours["method"], "k": ours["k"]}
    assert meant.draft_model == ((ours["draft_model"],) if "draft_model" in ours else ())


def test_vllm_gets_null_with_a_reason_where_it_has_no_such_method() -> None:
    assert vllm_config(OFF, None).speculative_config is None
    nothing = vllm_config(AUTO, None)
    assert nothing.speculative_config is None
    assert "no fixed choice pays" in str(nothing.note)
    instead = vllm_config(AUTO, NGRAM)
    assert instead.speculative_config is not None
    assert instead.speculative_config["method"] == "ngram"
    assert "ngram k=4" in str(instead.note)
    assert paceline_flags(MODEL) == "--method draft-model --k 3 --draft-model some/small-model"


# -- words


def advice(measured: Figures, **more: object) -> Advice:
    cost = PassCost(decode={1: {0: 1.0, 16: 1.2}, 16: {0: 1.3, 64: 9.0}})
    return Advice(model="toy", settings={}, cost=cost, predicted=measured, measured=measured, **more)  # type: ignore[arg-type]


def test_the_sentences_say_what_to_do_and_up_to_where() -> None:
    fixed = " ".join(sentences(advice({**at(1, ngram=1.5, auto=1.2), **at(16, ngram=0.7, auto=0.8)})))
    assert fixed.startswith("Use ngram k=4. Measured: 1.50x with one request at a time and 0.70x with 16")
    assert "Switch it off from 16 requests at once." in fixed
    assert "With 16 requests at once the machine is busy computing" in fixed
    default = " ".join(sentences(advice(at(1, ngram=1.5, auto=1.5))))
    assert default.startswith("Keep the default, auto: it is as good as the best fixed setting (ngram k=4)")
    off = " ".join(sentences(advice(at(1, ngram=0.9, auto=1.0))))
    assert off.startswith("Leave speculation off. ")
    nothing = Advice(model="toy", settings={})
    assert sentences(nothing) == ["Nothing can be advised yet: the run ended before a prediction."]


def test_what_a_reader_must_know_is_noted() -> None:
    suffix = DrafterCost(method="suffix", seconds={1: 1e-5}, memory_bytes=20_000, most_bytes=200 << 20)
    found = advice(at(1, ngram=1.5), drafters=[suffix])
    assert any("up to 2" in line and "as answers come" in line for line in notes(found))
    assert not any("seeded" in line for line in notes(found))
    found.settings = {"draft_models": ["small"], "temperature": 0.8, "seed": 0}
    assert any("`paceline bench --seed none` measures ordinary ones" in line for line in notes(found))


def test_a_prediction_alone_is_labelled_as_one() -> None:
    found = advice(at(1, ngram=1.5))
    found.measured = {}
    assert "Predicted, not checked: 1.50x" in sentences(found)[0]


def test_the_files_hold_the_settings_and_all_that_was_found(tmp_path: Path) -> None:
    found = advice(at(1, ngram=1.5))
    written = found.save(tmp_path)
    assert [path.name for path in written] == ["advice.json", "paceline.json", "vllm.json"]
    assert json.loads(written[1].read_text()) == {"method": "ngram", "k": 4}
    assert json.loads(written[2].read_text())["num_speculative_tokens"] == 4
    whole = json.loads(written[0].read_text())
    assert whole["choice"]["pays_up_to"] == 1
    assert whole["predicted"][0]["label"] == "ngram k=4"
    assert [line.split()[0] for line in settings(found)[::2]] == ["paceline", "vLLM"]
    off = advice(at(1, ngram=0.9))
    assert [path.name for path in off.save(tmp_path)] == ["advice.json", "paceline.json"]
