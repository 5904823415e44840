"""What a block drafter's size brings: short trainings that differ in the number of layers alone.

    python benchmarks/drafter_sizes.py --work W --target T --layers 1 3 5 8 --steps 400

W holds the tokens and answers that `train_smollm2.py data` made. Every training has the same rows in the same order. τ
is walked over the target's answers to mt_bench and gsm8k, which are in no training; bytes are those of the drafter's
folder in int8. A short training favours small drafters: large ones gain longest from more steps.
"""

from __future__ import annotations

import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from drafter_questions import DOMAIN, GENERAL, chosen_answers, common_options, short_training, walked
from harness import finish
from train_smollm2 import TARGET, Costs, opened, say

from paceline.training.data.generate import draft_vocabulary
from paceline.training.data.rows import HELD_OUT, held_out, packed
from paceline.training.data.store import TokenStore
from paceline.training.trainees.dspark import DSparkOptions, DSparkTrainee

SHARES = {GENERAL: 0.9, DOMAIN: 0.1}  # of a step's rows


def main() -> None:
    parser = common_options(__doc__)
    parser.add_argument("--layers", type=int, nargs="+", default=[1, 3, 5, 8])
    args = parser.parse_args()
    target = opened(args, Costs())
    store = TokenStore(args.work / "tokens", target.config.vocab_size)
    sequences = store.read()
    learnt = sequences.chosen(~held_out(sequences, HELD_OUT))
    vocabulary = draft_vocabulary(learnt, 16_384, target.config.vocab_size, target.config.eos_token_ids)
    rows = packed(learnt, args.length)
    weights = {store.sources.index(name): share for name, share in SHARES.items() if name in store.sources}
    answers = chosen_answers(args)
    compiled = target.device.type == "cuda" and args.compile
    results: list[dict[str, Any]] = []
    for layers in args.layers:
        torch.compiler.reset()
        trainee = DSparkTrainee(
            target,
            DSparkOptions(layers=layers, temperature=0.7),
            torch.from_numpy(vocabulary),
            seed=0,
            name=TARGET,
            compiled=compiled,
        )
        started = time.perf_counter()
        loop = short_training(trainee, rows, weights, args)
        row: dict[str, Any] = {
            "layers": layers,
            "parameters": sum(one.numel() for one in trainee.parameters.values()),
            "passes": loop.sampler.epochs,
            "seconds": time.perf_counter() - started,
        }
        parameters = {name: one.clone() for name, one in loop.averaged().items()}
        for name, each in answers.items():
            row |= walked(trainee, parameters, name, each)
        trainee.parameters = parameters
        with TemporaryDirectory() as folder:
            trainee.save(Path(folder), int8=True)
            row["bytes"] = sum(file.stat().st_size for file in Path(folder).iterdir())
        results.append(row)
        say("  ".join(f"{key} {one:.3f}" if isinstance(one, float) else f"{key} {one}" for key, one in row.items()))
    finish("drafter_sizes", {"rows": results, "steps": args.steps})


if __name__ == "__main__":
    main()
