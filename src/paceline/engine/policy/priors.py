"""First guesses as data, which the policy corrects by measurement: times of a pass by its rows, by kind of machine and
weights, and the acceptance of a tree's nodes; and the divisions of what is counted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from paceline.config import MAX_K
from paceline.models.buckets import STEPS
from paceline.models.decoder import Decoder
from paceline.models.kernels import INT8
from paceline.models.weights import WeightKind

# Counts of rows with a factor of their own, where passes are not padded.
GRID = (1, 2, 3, 4, 5, 6, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 64, 80, 96, 128, 192, 256, 384, 512)
BUCKETS = (1, 2, 3, 4, 6, 9, 16)  # levels at which a new record begins
BANDS = (0, 1, 2, 4, 8, 16, 32, MAX_K)  # first nodes of the bands of a tree whose records are taken together
# Share of trees whose n-th node is accepted: 2.5 tokens of 15 nodes, 3.2 of 60, as measured on trained drafters.
TREE_GUESS = [0.7 * (1 + node / 2) ** -1.35 for node in range(MAX_K)]


@dataclass(frozen=True)
class PassPrior:
    times: tuple[tuple[int, float], ...]  # (rows, time against one row); linear between, proportional beyond
    padded_to: tuple[int, ...] = ()  # row counts that passes are padded to; (): no padding


# A memory-bound CPU; engine steps on two cores, which include a little work for each row. The row count at which the
# time jumps (twelve with AVX-512) differs between machines, so the prior has no jump.
CPU = PassPrior(
    (
        *((1, 1.0), (2, 1.03), (4, 1.07), (8, 1.15), (12, 1.25), (16, 1.5), (24, 1.8), (32, 2.15)),
        *((64, 3.8), (128, 7.4), (512, 29.0)),
    )
)
# Weights in blocks are read several times as fast, so arithmetic is the limit from a few rows on, and later with int8
# activations; passes on two cores at 1, 4, 8, 16 and 256 rows.
CPU_BLOCKS = PassPrior(
    (
        *((1, 1.0), (2, 1.16), (4, 1.48), (8, 2.36), (12, 3.4), (16, 4.5), (24, 6.6), (32, 8.2)),
        *((64, 14.0), (128, 26.0), (512, 99.0)),
    )
)
CPU_INT8 = PassPrior(
    (
        *((1, 1.0), (2, 1.05), (4, 1.17), (8, 1.45), (12, 2.0), (16, 2.57), (24, 3.4), (32, 4.3)),
        *((64, 7.9), (128, 15.0), (512, 58.0)),
    )
)
# A large GPU, flat while reading the weights takes longer than the products; passes on an H200.
GPU = PassPrior(
    (
        *((1, 1.0), (16, 1.05), (32, 1.13), (64, 1.2), (96, 1.36), (128, 1.38), (256, 2.13), (384, 3.06)),
        *((512, 3.7), (640, 5.1), (768, 5.9), (1024, 7.1), (2048, 14.1)),
    )
)
# Weights stored as codes are read sooner, so arithmetic is the limit sooner; int4 and fp8 passes on an H200 up to 128
# rows, beyond that the passes above and the expansion of the weights.
GPU_CODES = PassPrior(
    (
        *((1, 1.0), (4, 1.04), (16, 1.08), (32, 1.35), (64, 1.65), (128, 3.0), (256, 5.2), (512, 8.7)),
        *((1024, 15.0), (2048, 28.0)),
    )
)


def prior_of(decoder: Decoder, kind: WeightKind) -> PassPrior:
    """Return the prior of a decoder; passes that are replayed from graphs are padded to the graph's rows."""
    if decoder.device.type == "cpu":
        if not kind.is_blocks:
            return CPU
        return CPU_INT8 if decoder.kernels.activations == INT8 else CPU_BLOCKS
    prior = GPU_CODES if kind.is_blocks or kind.has_scales else GPU
    return prior if decoder.graphs is None else replace(prior, padded_to=STEPS)
