"""One client sends more than its share: others, and its own short requests, begin in time."""

from __future__ import annotations

import pytest

from benchmarks.fairness import CONTEXT, NUM_BLOCKS, PLACES, STEP_TOKENS, Simulation, measure

ATTACKS = {
    "many long answers to one prompt": lambda load, name: load.send(name, 8, 200, n=48),
    "many long prompts with one token each": lambda load, name: [load.send(name, 200, 1) for _ in range(48)],
    "the same in one request": lambda load, name: load.send(name, 200, 1, n=48),
    "prompts as long as the context": lambda load, name: [load.send(name, CONTEXT - 40, 40) for _ in range(30)],
}


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("client", ["light", "heavy"])
@pytest.mark.parametrize("after", [1, 7, 40, 100])
def test_a_short_request_begins_in_the_next_step_whatever_one_client_sends(
    attack: str, client: str, after: int
) -> None:
    """The next step is the second chunk: the first one was under way."""
    load = Simulation(0)
    ATTACKS[attack](load, "heavy")
    for _ in range(after):
        load.step()
    load.send(client, 4, 4)
    (sequence,) = [one for one in load.scheduler.waiting if one.max_len == 8]
    for _ in range(5):
        load.step()
    assert load.waits.get(sequence.key) is None or load.waits[sequence.key].first is not None
    (wait,) = [wait for one, wait, _ in load.ended if one is sequence]
    assert wait.first == after + 1, "it waited for more than its own chunk"
    load.check()


def test_the_first_token_of_a_short_request_waits_for_no_part_of_a_long_prompt() -> None:
    load = Simulation(0)
    for _ in range(8):
        load.send("heavy", 200, 1)
    load.step()
    sizes = []
    for _ in range(8):  # a short request before each step
        load.send("light", 4, 1)
        sizes.append(load.step().num_tokens)
    assert sizes[0::2] == [4] * 4
    assert sizes[1::2] == [STEP_TOKENS] * 4, "every second step computes long prompts all the same"


def test_no_request_starves() -> None:
    found = measure(1_500, seed=1)
    assert found["longest_wait_of_bound"] <= 1
    assert found["longest_wait_of_a_short_request_steps"] <= 4
    assert NUM_BLOCKS * 4 > PLACES * STEP_TOKENS


def test_clients_that_come_and_go_are_charged_what_they_were() -> None:
    """A client that sends its next request once the last one has ended does not pass others by that."""
    load = Simulation(0)
    for _ in range(8):
        load.send("heavy", 200, 1)
        load.send("steady", 200, 1)
    for _ in range(60):
        if not load.open["light"]:
            load.send("light", STEP_TOKENS, 1)
        load.step()
    assert load.served["light"] <= min(load.served["heavy"], load.served["steady"]) + 2 * STEP_TOKENS
    assert load.waits, "all still have work"
