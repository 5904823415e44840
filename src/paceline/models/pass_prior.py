"""How the time of a pass grows with its rows, before any was timed: what kind of machine it runs on.

Whoever plans passes starts from it and learns the rest.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from paceline.models.buckets import STEPS
from paceline.models.decoder import Decoder


@dataclass(frozen=True)
class PassPrior:
    times: tuple[tuple[int, float], ...]  # (rows, time against one row), linear between, proportional to rows beyond
    padded_to: tuple[int, ...] = ()  # a pass of fewer rows takes what the next of these takes; (): no padding
    drifts: bool = False  # other work slows the machine down, for seconds at a time


# A memory-bound CPU, as measured on two cores, whose products take twelve rows at once.
CPU = PassPrior(
    (
        *((1, 1.0), (2, 1.02), (4, 1.06), (8, 1.12), (12, 1.21), (13, 1.4), (16, 1.49), (24, 1.74), (32, 2.1)),
        *((64, 3.8), (128, 7.4), (512, 29.0)),
    ),
    drifts=True,
)
# A large GPU: flat while the weights take longer from memory than the products do, as measured on an H200.
GPU = PassPrior(
    (
        *((1, 1.0), (16, 1.04), (32, 1.1), (64, 1.17), (128, 1.63), (256, 2.3), (384, 2.95), (512, 3.4)),
        *((640, 4.75), (768, 5.3), (1024, 6.0), (1280, 8.0), (2048, 13.0)),
    )
)


def prior_of(decoder: Decoder) -> PassPrior:
    """Passes that are replayed from graphs are padded to the rows of one."""
    if decoder.device.type == "cpu":
        return CPU
    return GPU if decoder.graphs is None else replace(GPU, padded_to=STEPS)
