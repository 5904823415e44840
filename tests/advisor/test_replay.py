"""A replay against the real engine on a tiny model: the same drafts, the same acceptance, step for step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.advisor.advice import Advice
from paceline.advisor.advise import Advisor
from paceline.advisor.candidates import Drafted
from paceline.advisor.guesses import read_guesses
from paceline.advisor.machine import Machine
from paceline.advisor.pass_cost import PassCost
from paceline.advisor.profile import DrafterCost, host_drafter, model_drafter, profile
from paceline.advisor.records import Records, record
from paceline.advisor.replay import Replay
from paceline.bench.grid import Contender
from paceline.bench.measurement import Measurement, cells
from paceline.bench.prompts import Prompt
from paceline.bench.results import PLAIN
from paceline.bench.runner import Plan, measure
from tests.models.tiny import save_tiny

COST = PassCost(decode={1: {0: 0.03, 8: 0.04}, 4: {0: 0.035, 32: 0.07}}, context=20, prompt={32: 0.05})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    return endless(folder)


def endless(folder: Path) -> Path:
    """A tiny model whose answers have all the tokens they may have."""
    save_tiny("llama-tied", folder)
    for name in ("config.json", "generation_config.json"):
        found = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**found, "eos_token_id": None}))
    return folder


@pytest.fixture(scope="module")
def machine(folder: Path) -> Machine:
    found = Machine(str(folder), draft_models=[str(folder)], device="cpu", raw=True)
    found.check(asked(), 24)
    return found


def asked(count: int = 8) -> list[Prompt]:
    texts = [" ".join(f"w{7 if n % 2 else (first + n) % 90}" for n in range(12)) for first in range(count)]
    return [Prompt(workload="words", turns=(text,), origin=f"line {n}") for n, text in enumerate(texts, start=1)]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_what_a_replay_drafts_and_accepts_is_what_the_engine_does(machine: Machine, temperature: float) -> None:
    """Greedy at one and at four requests at once. Sampled answers are seeded by prompt in a record and by request in a
    benchmark, so there the records are taken from the benchmark itself, where each prompt is asked once."""
    name = machine.draft_models[0].name
    contenders = [Contender(PLAIN), Contender("ngram", 3), Contender("suffix", 4), Drafted("draft-model", 3, name)]
    levels = [1, 4] if temperature == 0 else [1]
    plan = Plan(concurrencies=levels, max_tokens=24, temperature=temperature)
    machine.contenders = list(contenders)
    real = Measurement(contenders)
    records = Records()
    if temperature == 0:
        record(machine, asked(), plan, records, lambda *_: None)
        machine.contenders = list(contenders)
    else:
        records = _recording(machine, plan)
        machine.contenders = list(contenders)
    measure(machine, asked(), plan, real)
    decoder = machine.draft_models[0].loaded.decoder
    drafter = machine.drafters(contenders[-1])[-1]
    guesses = {name: read_guesses(drafter, list(records.values()), decoder.cache_dtype, decoder.device)}
    costs = {name: DrafterCost(method="draft-model", draft_model=name, seconds={1: 0.01}, memory_bytes=0)}
    replay = Replay(
        subject=machine, records=records, cost=COST, model_costs=costs, guesses=guesses, contenders=contenders
    )
    again = Measurement(contenders)
    measure(replay, asked(), plan, again)
    for mine, theirs in zip(cells(again), cells(real), strict=True):
        assert mine.tokens == theirs.tokens
        assert mine.tau == theirs.tau, mine.label
        assert mine.drafted_per_position == theirs.drafted_per_position, mine.label
        assert mine.accepted_per_position == theirs.accepted_per_position, mine.label


def _recording(machine: Machine, plan: Plan) -> Records:
    """The answers of a benchmark, with the parameters each was asked with."""
    from paceline.advisor.records import Record

    records = Records()
    machine.contenders = [Contender(PLAIN)]
    real_open = type(machine).open

    class Listening:
        defaults, encode, decode = machine.defaults, machine.encode, machine.decode

        @staticmethod
        def open(concurrency):
            timed = real_open(machine, concurrency)[Contender(PLAIN)]

            class Answerer:
                @staticmethod
                def answer(prompts, params):
                    run = timed.answer(prompts, params)
                    for prompt, each, answer in zip(prompts, params, run.answers, strict=True):
                        records[tuple(prompt)] = Record(tuple(prompt), answer.tokens, each)
                    return run

            return {Contender(PLAIN): Answerer}

    measure(Listening, asked(), plan, Measurement([Contender(PLAIN)]))  # type: ignore[arg-type]
    return records


def test_a_profile_of_a_real_engine_has_a_time_for_everything(machine: Machine) -> None:
    plan = Plan(concurrencies=[1, 2], max_tokens=24)
    cost = profile(machine, [1, 2], 200, plan)
    assert set(cost.decode) == {1, 2}
    assert all(seconds > 0 for curve in cost.decode.values() for seconds in curve.values())
    assert set(cost.prompt) == {32, 128}
    records = Records()
    record(machine, asked(2), plan, records, lambda *_: None)
    longest = max(records.values(), key=lambda each: len(each.answer))
    for method in machine.methods:
        found = host_drafter(machine, method, longest)
        assert found.at(1) > 0
        assert found.memory_bytes > 1000
    model = model_drafter(machine, machine.draft_models[0], [1, 2], plan)
    assert model.at(2) > 0
    assert model.kv_bytes == 2 * 3 * 2 * 8 * 4  # K and V, 3 layers, 2 heads of 8, fp32


def test_a_draft_model_is_timed_with_more_prompts_than_it_reads_in_one_step(machine: Machine) -> None:
    found = model_drafter(machine, machine.draft_models[0], [64], Plan(concurrencies=[64], max_tokens=24))
    assert set(found.seconds) == {1, 4, 16, 64}


def test_a_draft_model_that_cannot_be_timed_leaves_what_passes_cost(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("paceline.advisor.advise.model_drafter", interrupted)
    found = Advice(model="tiny", settings={"temperature": 0.0})
    Advisor(machine, asked(18), Plan(concurrencies=[1], max_tokens=24), found, lengths=(2,)).run()
    assert found.cost is not None
    assert [each.method for each in found.drafters] == machine.methods
    assert found.missing == ["the rest of the profile", "the prediction", "the check"]


def test_a_draft_model_of_another_vocabulary_is_left_out_and_said(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    save_tiny("llama-tied", other)
    spelt = json.loads((other / "tokenizer.json").read_text())
    spelt["model"]["vocab"] = {f"x{word}": token for word, token in spelt["model"]["vocab"].items()}
    spelt["model"]["unk_token"] = "xw0"
    (other / "tokenizer.json").write_text(json.dumps(spelt))
    found = Machine(str(folder), draft_models=[str(other)], device="cpu", raw=True)
    assert found.draft_models == []
    assert "another vocabulary" in found.refused[str(other)]


def test_a_draft_model_that_does_not_fit_is_left_out_and_said(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.machine.memory", lambda: type("M", (), {"available": 1000})())
    found = Machine(str(folder), draft_models=[str(folder)], device="cpu", raw=True)
    assert "of memory are free" in found.refused[str(folder)]


def test_an_interruption_keeps_what_was_found_and_says_what_is_missing(machine: Machine) -> None:
    found = Advice(model="tiny", settings={"temperature": 0.0})

    def interrupt(done: float, total: float, what: str) -> None:
        if found.predicted and done > 0.9:
            raise KeyboardInterrupt

    plan = Plan(concurrencies=[1], max_tokens=24)
    stopped = Advisor(machine, asked(18), plan, found, interrupt, lengths=(2,)).run()
    assert isinstance(stopped, KeyboardInterrupt)
    assert found.missing == ["the check"]
    assert found.cost is not None
    assert found.choice is not None
    assert found.to_json()["missing"] == ["the check"]
