"""What int8 activations would cost and change: passes of both in turn, and the distance of their output."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from paceline.advisor.cost import ActivationsCost
from paceline.models.distance import Alone, distance
from paceline.models.runtime import LoadedModel

ROWS = (1, 4, 8, 16)
CONTEXT = 48
ROUNDS = 7  # the least of them counts: other processes only add time
MOST_PROMPTS, LONGEST = 16, 128  # that are compared, and tokens of each


def activations_cost(
    loaded: LoadedModel,
    rounded: LoadedModel,
    prompts: Sequence[Sequence[int]],
    clock: Callable[[], float] = time.perf_counter,
) -> ActivationsCost:
    """`rounded`: the same model with int8 activations."""
    longest = CONTEXT + max(ROWS)
    tokens = [at % loaded.config.vocab_size for at in range(3, 3 + longest)]
    sequences = [Alone(model.decoder, longest) for model in (loaded, rounded)]
    for sequence in sequences:
        sequence.logits(tokens)
    least: list[dict[int, float]] = [dict.fromkeys(ROWS, float("inf")) for _ in sequences]
    for _ in range(ROUNDS):
        for rows in ROWS:
            for sequence, found in zip(sequences, least, strict=True):
                begun = clock()
                sequence.logits(tokens[CONTEXT : CONTEXT + rows], CONTEXT)
                found[rows] = min(found[rows], clock() - begun)
    compared = [prompt[:LONGEST] for prompt in prompts[:: max(1, len(prompts) // MOST_PROMPTS)][:MOST_PROMPTS]]
    float32_s, int8_s = least
    moved = distance(loaded.decoder, rounded.decoder, compared)
    return ActivationsCost(float32_s=float32_s, int8_s=int8_s, distance=moved)
