"""The run on a clock that is known: the speed-up comes out, drift cancels, and what was measured survives."""

from __future__ import annotations

import random

import pytest

from paceline.bench.grid import Contender
from paceline.bench.measurement import Measurement, Run, TimedAnswer, cells
from paceline.bench.results import Cell
from paceline.bench.runner import WARM_UP, RunPlan, measure
from tests.bench.fake_subject import FAST, PLAIN, FakeSubject, prompts

AUTO = Contender("auto")


def plan(*concurrencies: int, seed: int | None = 0, temperature: float = 0.0) -> RunPlan:
    return RunPlan(concurrencies=concurrencies or (1,), max_tokens=64, seed=seed, temperature=temperature)


def bench(subject: FakeSubject, asked, plan: RunPlan) -> tuple[Measurement, dict[tuple[str, int, str], Cell]]:
    measurement = Measurement(list(subject.speeds))
    measure(subject, asked, plan, measurement)
    return measurement, {(cell.workload, cell.concurrency, cell.label): cell for cell in cells(measurement)}


def test_the_speedup_of_a_known_clock_is_found_and_its_interval_covers_it() -> None:
    """A cover of 92 % or more: of 200 runs fewer than 172 hold the truth with probability below 0.002."""
    covered, ratios = 0, []
    for seed in range(200):
        subject = FakeSubject({PLAIN: 1.0, FAST: 1.5}, luck=0.2, seed=seed)
        _, found = bench(subject, prompts(10), plan(seed=seed))
        speedup = found["all", 1, "ngram k=4"].speedup
        covered += speedup.low <= 1.5 <= speedup.high
        ratios.append(speedup.ratio)
    assert covered >= 172
    assert sum(ratios) / 200 == pytest.approx(1.5, rel=0.03)  # some 5 standard errors


def test_a_machine_that_slows_down_does_not_change_the_speedup() -> None:
    subject = FakeSubject({PLAIN: 1.0, FAST: 1.5}, luck=0.0, slowness=lambda now: 1 + now / 100)
    _, found = bench(subject, prompts(40), plan())
    speedup = found["all", 1, "ngram k=4"].speedup
    assert subject.slowness(subject.now) > 2  # it did slow down
    assert speedup.ratio == pytest.approx(1.5, rel=0.05)


def test_every_engine_answers_every_prompt_once_and_in_changing_order() -> None:
    subject = FakeSubject({PLAIN: 1.0, FAST: 1.5, AUTO: 1.2})
    bench(subject, prompts(30), plan())
    warm = tuple(subject.encode(WARM_UP, []))
    assert [entry[1] for entry in subject.log[:3]] == [(warm,)] * 3
    measured = subject.log[3:]
    assert len({(engine, asked) for engine, asked, _ in measured}) == len(measured) == 90
    rounds = [measured[start : start + 3] for start in range(0, 90, 3)]
    assert all(len({asked for _, asked, _ in group}) == 1 for group in rounds)  # all engines before the next prompt
    assert len({tuple(engine.label for engine, *_ in group) for group in rounds}) == 6  # every order occurs


def test_each_concurrency_has_new_engines_and_full_groups() -> None:
    subject = FakeSubject({PLAIN: 1.0, FAST: 1.5})
    measurement, found = bench(subject, [*prompts(22), *prompts(7, "code")], plan(1, 4))
    assert subject.opened == [1, 4]
    assert {size for *_, size in subject.log} == {1, 4}
    assert measurement.left_out == {1: 0, 4: 1}
    assert found["chat", 4, "plain"].answers == 20
    assert found["code", 4, "plain"].answers == 4
    assert found["all", 4, "plain"].answers == 28  # one group is mixed
    assert found["code", 4, "ngram k=4"].speedup is None
    assert "1 pair measured" in str(found["code", 4, "ngram k=4"].too_short)
    assert found["all", 4, "ngram k=4"].speedup is not None


def test_the_next_turn_continues_from_plain_decodings_answer() -> None:
    subject = FakeSubject({PLAIN: 1.0, FAST: 1.5})
    subject.answers[PLAIN] = lambda prompt: list(range(7, 57))
    subject.answers[FAST] = lambda prompt: list(range(9, 80))
    _, found = bench(subject, prompts(6, turns=3), plan())
    asked = {bytes(entry[1][0][:-1]).decode() for entry in subject.log[2:] if entry[1][0][-1] == 2}
    assert len(asked) == 6
    assert all(text.endswith("50 tokens from 7|50 tokens from 7") for text in asked)
    speedup = found["all", 1, "ngram k=4"].speedup
    assert speedup.pairs == 6  # a conversation is one pair
    assert found["all", 1, "plain"].answers == 18
    assert found["all", 1, "ngram k=4"].identical is False


def test_unseeded_sampling_is_not_compared_token_by_token() -> None:
    for seed, temperature, known in ((None, 0.7, False), (3, 0.7, True), (None, 0.0, True)):
        _, found = bench(FakeSubject({PLAIN: 1.0, FAST: 1.5}), prompts(6), plan(seed=seed, temperature=temperature))
        assert (found["all", 1, "ngram k=4"].identical is not None) is known


def test_a_cell_holds_the_measured_figures() -> None:
    subject = FakeSubject({PLAIN: 1.0, FAST: 2.0}, luck=0.0)
    _, found = bench(subject, prompts(8), plan())
    fast, plain = found["all", 1, "ngram k=4"], found["all", 1, "plain"]
    assert plain.speedup is None
    assert plain.too_short is None
    assert plain.tokens == fast.tokens
    assert plain.tokens_per_s == pytest.approx(1 / 0.03, rel=0.05)
    assert fast.tokens_per_s == pytest.approx(2 / 0.03, rel=0.05)
    assert fast.tau == pytest.approx(2.0, rel=0.05)
    assert fast.inter_token_s is not None  # tokens that come in twos share their wait
    assert fast.inter_token_s.p50 == pytest.approx(0.015, rel=0.1)
    assert fast.request_s.p99 > fast.request_s.p50 > fast.ttft_s.p99
    assert fast.engine_share < 0.01
    assert fast.drafted_per_position[0] >= fast.accepted_per_position[0]
    assert fast.identical is True
    assert fast.decode_speedup.ratio == pytest.approx(2.0, rel=0.1)


def test_looping_answers_are_counted_and_left_out_apart() -> None:
    subject = FakeSubject({PLAIN: 1.0, FAST: 1.5})
    loop = [1, 2] * 30

    def say(prompt):
        return loop if random.Random(bytes(prompt)).random() < 0.4 else list(range(60))

    subject.answers = {PLAIN: say, FAST: say}
    _, found = bench(subject, prompts(20), plan())
    cell = found["all", 1, "ngram k=4"]
    assert 0 < cell.looping < 15
    assert cell.without_loops.answers == 20 - cell.looping
    assert cell.without_loops.speedup.pairs == 20 - cell.looping


def test_an_interruption_keeps_the_groups_that_all_have_answered() -> None:
    subject = FakeSubject({PLAIN: 1.0, FAST: 1.5})
    calls = []

    def interrupt(contender: Contender) -> None:
        calls.append(contender)
        if len(calls) == 2 + 2 * 7 + 2:  # the warm-up, seven prompts, and one engine of the eighth
            raise KeyboardInterrupt

    subject.on_answer = interrupt
    measurement = Measurement(list(subject.speeds))
    with pytest.raises(KeyboardInterrupt):
        measure(subject, prompts(20), plan(), measurement)
    assert not measurement.complete
    assert len(measurement.rows) == 7
    assert {cell.answers for cell in cells(measurement)} == {7}


def test_tokens_committed_together_share_their_wait() -> None:
    answer = TimedAnswer((1, 2, 3, 4), ((1.0, 1), (1.6, 3)))
    assert list(answer.gaps()) == pytest.approx([0.2, 0.2, 0.2])
    run = Run((answer, TimedAnswer((1, 2), ((0.5, 1), (0.8, 1)))))
    assert run.seconds == 1.6
    assert run.decoding() == (pytest.approx(0.6), 3)


def test_progress_ends_at_its_total() -> None:
    seen: list[tuple[float, float, str]] = []
    subject = FakeSubject({PLAIN: 1.0, FAST: 1.5})
    measure(subject, prompts(20), plan(1, 4), Measurement([PLAIN, FAST]), lambda *entry: seen.append(entry))
    done = [entry[0] for entry in seen]
    assert done == sorted(done)
    assert seen[-1][0] == pytest.approx(seen[-1][1])
    assert "4 at once" in seen[-1][2]
