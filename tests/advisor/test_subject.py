"""The advisor over the real engine on a tiny model: its profile, its draft models, and runs that end early."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from paceline.advisor.advise import Advisor
from paceline.advisor.result import Advice
from paceline.advisor.subject import AdviceSubject, DrafterCost, activations_cost, drafter_cost, pass_cost
from paceline.bench.grid import Contender
from paceline.bench.runner import RunPlan
from paceline.cli.advise.words import notes
from paceline.drafters import METHODS
from paceline.drafters.block.checkpoint import write
from paceline.drafters.heads.checkpoint import save_heads
from paceline.models.load.loader import load_config
from paceline.models.quant.quantize import quantize_folder
from tests.bench.fake_subject import repetitive
from tests.drafters.block.dspark_reference import drafter_config, random_tensors
from tests.drafters.overfit import random_heads
from tests.helpers.tiny import save_tiny
from tests.models.quant.test_quantize import sized_model


@pytest.fixture(scope="module")
def machine(endless: Path) -> AdviceSubject:
    found = AdviceSubject(str(endless), draft_models=[str(endless)], device="cpu", raw=True)
    found.check(repetitive(8), 24)
    return found


def test_a_profile_of_a_real_engine_has_a_time_for_everything(machine: AdviceSubject) -> None:
    plan = RunPlan(concurrencies=[1, 2], max_tokens=24)
    cost = pass_cost(machine, plan)
    assert set(cost.decode) == {1, 2}
    assert all(seconds > 0 for curve in cost.decode.values() for seconds in curve.values())
    for method in machine.methods:
        found = drafter_cost(machine, Contender(method), cost, plan, [5, 6, 7, 8] * 10)
        assert found.at(1) > 0
        assert found.memory_bytes > (0 if METHODS[method].structured else 1000)  # forced text keeps no tables
    many = dataclasses.replace(cost, decode=dict.fromkeys((1, 64), cost.decode[2]))
    model = drafter_cost(machine, Contender("draft-model", None, machine.draft_models[0].name), many, plan, [])
    assert set(model.seconds) == {1, 64}  # 64 prompts are more than it reads in one step
    assert model.at(2) > 0
    assert model.kv_bytes == 2 * 3 * 2 * 8 * 4  # K and V, 3 layers, 2 heads of 8, fp32


def test_every_drafter_is_tried_and_the_best_with_every_k(machine: AdviceSubject) -> None:
    found = Advice(model="tiny", settings={"temperature": 0.0})
    plan = RunPlan(concurrencies=[1], max_tokens=24)
    assert Advisor(machine, repetitive(20), plan, found, lengths=(1, 2, 3), rival=False).run() is None
    tried = [contender for _, contender in found.predicted]
    model = machine.draft_models[0].name
    assert {contender.method for contender in tried} == {*machine.methods, "draft-model", "auto"}
    best = next(contender for _, contender in found.measured if contender.k)
    assert {contender.k for contender in tried if contender.method == best.method} == {1, 2, 3}
    assert all(contender.k == 2 for contender in tried if contender.method not in (best.method, "auto"))
    assert any(entry.get("draft_model") == model for entry in found.to_json()["predicted"])
    assert {contender.method for _, contender in found.measured} == {best.method, "auto"}
    assert not found.missing


@pytest.mark.parametrize("method", ["dspark", "medusa"])
def test_a_trained_drafter_is_timed_in_the_steps_of_an_engine(method: str, endless: Path, tmp_path: Path) -> None:
    target = load_config(endless)
    if method == "medusa":
        save_heads(tmp_path, random_heads(target.hidden_size, target.vocab_size))
    else:
        config = drafter_config(target, taps=(0, 2))
        write(tmp_path, config, random_tensors(config))
    trained = AdviceSubject(str(endless), drafter=[str(tmp_path)], device="cpu", raw=True)
    trained.check(repetitive(8), 24)
    found = Advice(model="tiny", settings={"temperature": 0.0})
    plan = RunPlan(concurrencies=[1], max_tokens=24)
    assert Advisor(trained, repetitive(20), plan, found, lengths=(2,), rival=False).run() is None
    cost = next(each for each in found.drafters if each.method == method)
    assert set(cost.seconds) == {1}
    assert cost.memory_bytes == sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
    assert (cost.kv_bytes > 0) == (method == "dspark")


@pytest.mark.parametrize("problem", ["vocabulary", "memory"])
def test_a_draft_model_that_does_not_fit_is_left_out_with_its_reason(problem, endless, tmp_path, monkeypatch) -> None:
    save_tiny("llama-tied", tmp_path)
    if problem == "vocabulary":
        spelt = json.loads((tmp_path / "tokenizer.json").read_text())
        spelt["model"]["vocab"] = {f"x{word}": token for word, token in spelt["model"]["vocab"].items()}
        spelt["model"]["unk_token"] = "xw0"
        (tmp_path / "tokenizer.json").write_text(json.dumps(spelt))
    else:
        monkeypatch.setattr("paceline.platform.cpu.memory", lambda: type("M", (), {"available": 1000})())
    found = AdviceSubject(str(endless), draft_models=[str(tmp_path)], device="cpu", raw=True)
    assert found.draft_models == []
    says = {"vocabulary": "another vocabulary", "memory": "of memory are free"}[problem]
    assert says in found.refused[str(tmp_path)]


def test_a_draft_model_that_cannot_be_timed_leaves_what_passes_cost(machine, monkeypatch) -> None:
    def interrupted(subject: AdviceSubject, contender: Contender, *rest: Any) -> DrafterCost:
        if contender.draft_model is not None:
            raise KeyboardInterrupt
        return drafter_cost(subject, contender, *rest)

    monkeypatch.setattr("paceline.advisor.subject.drafter_cost", interrupted)
    found = Advice(model="tiny", settings={"temperature": 0.0})
    Advisor(machine, repetitive(18), RunPlan(concurrencies=[1], max_tokens=24), found, lengths=(2,)).run()
    assert found.cost is not None
    assert [each.method for each in found.drafters] == machine.methods
    assert found.missing == ["the rest of the profile", "the prediction", "the check"]


@pytest.mark.parametrize(("until", "missing"), [(0.7, ["the check"]), (0.85, ["the rest of the check"])])
def test_an_interruption_keeps_what_was_found_and_says_what_is_missing(machine, until, missing) -> None:
    found = Advice(model="tiny", settings={"temperature": 0.0})

    def interrupt(done: float, total: float, what: str) -> None:
        if done > until:
            raise KeyboardInterrupt

    plan = RunPlan(concurrencies=[1], max_tokens=48)
    stopped = Advisor(machine, repetitive(18), plan, found, interrupt, lengths=(2,)).run()
    assert isinstance(stopped, KeyboardInterrupt)
    assert found.missing == missing
    assert found.cost is not None
    assert found.recommendation is not None
    assert found.to_json()["missing"] == missing
    assert bool(found.measured) == (missing != ["the check"])


def test_int8_activations_are_timed_and_their_distance_is_told(tmp_path: Path) -> None:
    sized_model(tmp_path / "model")
    quantize_folder(tmp_path / "model", "q8_0", tmp_path / "blocks", lambda done, total: None)
    machine = AdviceSubject(str(tmp_path / "blocks"), device="cpu", raw=True)
    rounded = machine.with_int8()
    assert rounded is not None
    cost = activations_cost(machine.loaded, rounded, [[5, 6, 7] * 4, [8, 9] * 3], machine.clock)
    assert set(cost.float32_s) == set(cost.int8_s) == {1, 4, 8, 16}
    assert min(*cost.float32_s.values(), *cost.int8_s.values()) > 0
    assert cost.distance["tokens"] == 18
    assert 0 < cost.distance["mean_kl"] < 0.1
    advice = Advice(model="m", settings={}, activations=cost)
    assert f"{cost.share(8):.2f}x for 8 rows" in "".join(notes(advice))
    assert json.loads(json.dumps(advice.to_json()))["activations"]["distance"] == cost.distance


def test_a_model_without_blocks_has_no_int8_activations(machine: AdviceSubject) -> None:
    assert machine.with_int8() is None
