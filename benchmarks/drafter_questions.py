"""Three questions about training a drafter, each answered by short trainings on the tokens that train_smollm2.py made:
what tuning on a domain brings, whether the mix of data matters more than its amount, and whether a drafter's
perplexity says anything about its speed-up.

    python benchmarks/drafter_questions.py --work W --target T --steps 400

Every training has the same number of steps and rows, and starts from the same random weights; those that tune continue
from `synthetic`. τ is walked over the target's answers to mt_bench and gsm8k, which are in no training; the perplexity
is exp of the cross-entropy between target and drafter over all positions of blocks in the same answers.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import finish
from train_smollm2 import ANSWERS, TARGET, Costs, opened, say

from paceline.training.acceptance import tau, walk
from paceline.training.data.batch import DeviceRows
from paceline.training.data.generate import draft_vocabulary
from paceline.training.data.rows import HELD_OUT, RowSampler, TokenRows, held_out, packed
from paceline.training.data.store import Sequences, TokenStore
from paceline.training.loop import Loop, LoopConfig
from paceline.training.registry import Answers
from paceline.training.trainees.dspark import DSparkOptions, DSparkTrainee

GENERAL, DOMAIN = "synthetic", "gsm8k_train"
SHAPES = {"chain 7": (7, True), "tree 60": (60, False)}


@dataclass(frozen=True)
class Training:
    name: str
    mix: Mapping[str, float]  # source -> its share of a step's rows
    part: float = 1.0  # of the sequences of each source
    after: str | None = None  # the training whose weights it continues from


TRAININGS = (
    Training("synthetic", {GENERAL: 1.0}),
    Training("50 % gsm8k_train", {GENERAL: 0.5, DOMAIN: 0.5}),
    Training("a quarter of synthetic", {GENERAL: 1.0}, part=1 / 4),
    Training("tuned on gsm8k_train", {DOMAIN: 1.0}, after="synthetic"),
    Training("synthetic, twice as long", {GENERAL: 1.0}, after="synthetic"),
    Training("gsm8k_train alone", {DOMAIN: 1.0}),
    Training("a sixteenth of synthetic", {GENERAL: 1.0}, part=1 / 16),
    Training("10 % gsm8k_train", {GENERAL: 0.9, DOMAIN: 0.1}),
    Training("tuned on both", {GENERAL: 0.5, DOMAIN: 0.5}, after="synthetic"),
)


def perplexity(trainee: DSparkTrainee, parameters: Mapping[str, torch.Tensor], rows: DeviceRows) -> float:
    """exp of -sum p log q over the draft vocabulary, all positions of a block alike."""
    kept = trainee.options, trainee.parameters
    trainee.options = replace(trainee.options, ce=1.0, tv=0.0, temperature=1.0, decay=math.inf)
    trainee.parameters = dict(parameters)
    total = weight = 0.0
    try:
        with torch.no_grad():
            for start in range(0, len(rows.tokens), 16):
                which = torch.arange(start, min(start + 16, len(rows.tokens)), device=rows.tokens.device)
                found = trainee.loss(rows.batch(which, trainee.target, trainee.taps, (0, start)))
                total, weight = total + float(found.loss), weight + float(found.weight)
    finally:
        trainee.options, trainee.parameters = kept
    return math.exp(total / weight)


def short_training(
    trainee: DSparkTrainee, rows: TokenRows, weights: Mapping[int, float], args: argparse.Namespace
) -> Loop:
    """`args.steps` steps of `args.rows` rows each, from the trainee's parameters on; weights are by source."""
    config = LoopConfig(
        rows=args.rows,
        steps=args.steps,
        lr=args.lr,
        warmup=min(100, args.steps // 4),
        ema=0.99,
        optimizer="muon",
        log_s=1e9,
        save_s=1e9,
    )
    target, sampler = trainee.target, RowSampler(rows.source, weights, 0)
    device_rows, folder = DeviceRows.of(rows, target.device), args.work / "questions"
    loop = Loop(trainee, target, device_rows, sampler, config, folder, report=lambda _: None)
    loop.run()
    return loop


def walked(
    trainee: DSparkTrainee, parameters: Mapping[str, torch.Tensor], name: str, answers: Answers
) -> dict[str, float]:
    """τ of each shape over a set of answers."""
    return {
        f"{name}, {shape}": tau(walk(trainee, answers, nodes, chain=chain, parameters=parameters))
        for shape, (nodes, chain) in SHAPES.items()
    }


def chosen_answers(args: argparse.Namespace) -> dict[str, Answers]:
    return {
        name: [(prompt, text) for prompt, text in each[: args.limit]]
        for name, each in json.loads((args.work / ANSWERS).read_text()).items()
        if args.sets is None or name in args.sets
    }


def rank_correlation(first: list[float], second: list[float]) -> float:
    """Spearman's, of figures without ties."""
    ranks = [np.argsort(np.argsort(each)) for each in (first, second)]
    return float(np.corrcoef(*ranks)[0, 1])


def common_options(description: str | None) -> argparse.ArgumentParser:
    """What scripts of short trainings have in common."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    parser.add_argument("--steps", type=int, default=400, help="of each training")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--limit", type=int, default=80, help="answers of each set that are walked")
    parser.add_argument("--sets", nargs="+", help='of answers, as "mt_bench T 0.7"; all of them if unset')
    return parser


def main() -> None:
    parser = common_options(__doc__)
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1e9, help="no training begins after this long")
    args = parser.parse_args()
    began = time.perf_counter()
    target = opened(args, Costs())
    store = TokenStore(args.work / "tokens", target.config.vocab_size)
    sequences = store.read()
    learnt = sequences.chosen(~held_out(sequences, HELD_OUT))
    vocabulary = torch.from_numpy(
        draft_vocabulary(learnt, 16_384, target.config.vocab_size, target.config.eos_token_ids)
    )
    answers = chosen_answers(args)
    measured = {
        name: DeviceRows.of(packed(Sequences.of(each, target.config.vocab_size), args.length), target.device)
        for name, each in answers.items()
    }
    options = DSparkOptions(layers=args.layers, temperature=0.7)
    compiled = target.device.type == "cuda" and args.compile
    trainee = DSparkTrainee(target, options, vocabulary, seed=0, name=TARGET, compiled=compiled)
    first = {name: one.detach().clone() for name, one in trainee.parameters.items()}
    ended: dict[str, dict[str, torch.Tensor]] = {}
    results: list[dict[str, Any]] = []

    for training in TRAININGS:
        if time.perf_counter() - began > args.seconds or (training.after and training.after not in ended):
            say(f"{training.name}: not run, the time is over")
            continue
        part = np.random.default_rng(1).random(len(learnt)) < training.part
        used = np.isin(learnt.source, [store.sources.index(name) for name in training.mix])
        chosen = learnt.chosen(part & used)
        rows = packed(chosen, args.length)
        weights = {store.sources.index(name): share for name, share in training.mix.items()}
        given = ended[training.after] if training.after else first
        with torch.no_grad():
            for name, one in trainee.parameters.items():
                one.copy_(given[name])
        started = time.perf_counter()
        loop = short_training(trainee, rows, weights, args)
        row: dict[str, Any] = {
            "training": training.name,
            "answer_tokens": int(chosen.answer.sum()),
            "passes": loop.sampler.epochs,
            "seconds": time.perf_counter() - started,
        }
        parameters = {name: one.clone() for name, one in loop.averaged().items()}
        ended[training.name] = parameters
        for name, each in answers.items():
            row |= walked(trainee, parameters, name, each)
            row[f"{name}, perplexity"] = perplexity(trainee, parameters, measured[name])
        results.append(row)
        say("  ".join(f"{key} {one:.3f}" if isinstance(one, float) else f"{key} {one}" for key, one in row.items()))

    ranks = {}
    for name in answers if len(results) > 2 else ():
        ppl = [row[f"{name}, perplexity"] for row in results]
        ranks[name] = {shape: rank_correlation(ppl, [row[f"{name}, {shape}"] for row in results]) for shape in SHAPES}
    say(f"rank correlation of perplexity and τ: {ranks}")
    finish("drafter_questions", {"rows": results, "rank_correlation": ranks, "steps": args.steps})


if __name__ == "__main__":
    main()
