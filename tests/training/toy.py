"""A tiny random target, answers of its own, and trainees for it."""

from __future__ import annotations

from pathlib import Path

import torch

from paceline.training.data.batch import DeviceRows
from paceline.training.data.rows import RowSampler, packed
from paceline.training.data.store import Sequences
from paceline.training.loop import Loop, LoopConfig
from paceline.training.trainees.dspark import DSparkOptions, DSparkTrainee
from paceline.training.trainees.target import FrozenTarget

CPU = torch.device("cpu")
VOCAB = 97
SMALL = DSparkOptions(layers=2, block=4, num_taps=2, rank=8, draft_vocab=64, anchors=8)


def toy_target(folder: Path, name: str = "llama-tied") -> FrozenTarget:
    from tests.helpers.tiny import save_tiny  # imports transformers, which the processes of a test need not

    save_tiny(name, folder)
    return FrozenTarget(folder, CPU, torch.float32)


@torch.no_grad()
def continued(target: FrozenTarget, prompt: list[int], count: int) -> list[int]:
    """The target's greedy answer."""
    tokens = list(prompt)
    for _ in range(count):
        row = torch.tensor([tokens])
        hidden = target(row, torch.ones_like(row), torch.arange(len(tokens))[None], ())
        tokens.append(int((hidden.final[0, -1] @ target.head.T).argmax()))
    return tokens[len(prompt) :]


def noise_sequences(count: int = 12, seed: int = 0) -> Sequences:
    """Random tokens of several lengths: enough where only arithmetic is compared."""
    noise = torch.Generator().manual_seed(seed)

    def draw(size: int) -> list[int]:
        return torch.randint(1, VOCAB, (size,), generator=noise).tolist()

    return Sequences.of([(draw(3 + i % 4), draw(9 + i)) for i in range(count)], VOCAB)


def some_vocabulary(size: int = 64) -> torch.Tensor:
    return torch.randperm(VOCAB, generator=torch.Generator().manual_seed(1))[:size].sort().values


def toy_trainee(target: FrozenTarget, options: DSparkOptions = SMALL) -> DSparkTrainee:
    return DSparkTrainee(target, options, some_vocabulary(options.draft_vocab), seed=3, name="toy")


def toy_loop(target: FrozenTarget, folder: Path, steps: int = 6, *, trainee=None, sequences=None, length=32, **changes):
    rows = packed(sequences or noise_sequences(), length)
    settings = {"rows": 4, "lr": 3e-3, "warmup": 2, "log_s": 0.0, "save_s": 0.0, "measure_s": 1e9, **changes}
    return Loop(
        trainee or toy_trainee(target),
        target,
        DeviceRows.of(rows, CPU),
        RowSampler(rows.source, None, 0),
        LoopConfig(steps=steps, **settings),
        folder,
        report=lambda line: None,
    )
