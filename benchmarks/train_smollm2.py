"""Trains the drafter that ships with smollm2, in stages that continue from a work folder. One H200, under 25 minutes.

    python -m benchmarks.train_smollm2 data     --work W --target T --minutes 5 --gsm8k-train gsm8k_train.jsonl \
                                                --mt-bench mt_bench.jsonl --gsm8k gsm8k.jsonl
    python -m benchmarks.train_smollm2 train    --work W --target T --minutes 17 --call-minutes 9.2   # run twice
    python -m benchmarks.train_smollm2 pack     --work W --target T --out DIR

`data`: the target writes prompts and answers them, and answers the questions of gsm8k_train; prompts of mt_bench and
gsm8k are answered apart, to be measured on, and never trained on. `train` continues where the last run stopped; its
schedule ends after `--minutes` of steps over all runs, and `--call-minutes` bound one call, start-up included.
`pack`: int8, with τ of a chain of 7, trees of 15 and 60 before and after, walked as an engine walks the target's own
answers. Every stage prints what its time went into. `train --init-from DIR` begins with a drafter that is
there; `speculation drafter --answers W/answers.json` counts τ by the engine.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.harness import finish
from paceline.drafters.block.config import W2
from paceline.drafters.methods import DSPARK
from paceline.models.load.hub import resolve
from paceline.models.load.open_model import choose_device
from paceline.sampling_params import SamplingParams
from paceline.training.acceptance import by_depth, tau, walk
from paceline.training.card import write_card, write_curve
from paceline.training.data.batch import DeviceRows
from paceline.training.data.examples import read_examples
from paceline.training.data.generate import Maker, draft_vocabulary, open_generator
from paceline.training.data.rows import HELD_OUT, RowSampler, answers_of, held_out, packed
from paceline.training.data.store import Sequences, TokenStore
from paceline.training.loop import Loop, LoopConfig
from paceline.training.output_folder import STATE, publish
from paceline.training.registry import Answers, TraineeContext, build_trainee
from paceline.training.trainees.dspark import DSparkTrainee
from paceline.training.trainees.target import FrozenTarget

TARGET = "smollm2"  # name in the card and the checkpoint
SHAPES = {"chain 7": (7, True), "tree 15": (15, False), "tree 60": (60, False)}
RECIPE = "recipe.json"  # settings of a training, for the card
ANSWERS = "answers.json"  # answers to the prompts that are measured on
BEGAN = time.perf_counter()
Costs = dict[str, float]  # seconds by what they went into
SPARE_S = 25  # time of a call for imports, the last checkpoint and the drafter
SHIPPED_BYTES, FILE_BYTES = 28_000_000, 16_000_000


@contextmanager
def spent(costs: Costs, what: str) -> Iterator[None]:
    began = time.perf_counter()
    try:
        yield
    finally:
        costs[what] = costs.get(what, 0.0) + time.perf_counter() - began


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


# -- stages


def data(args: argparse.Namespace, costs: Costs) -> dict[str, Any]:
    began = time.perf_counter()
    deadline = began + 60 * args.minutes
    with spent(costs, "starting the engine"):
        llm = open_generator(args.target, args.device, args.rows)
    say(f"engine started in {time.perf_counter() - began:.0f} s")
    store = TokenStore(args.work / "tokens", llm.config.vocab_size)
    tokenizer = llm.tokenizer

    def prompts(path: Path) -> list[list[int]]:
        texts = [tokenizer.render_chat(example.prompts[:1]) for example in read_examples(path)[: args.limit]]
        return tokenizer.encode_each(texts, add_special_tokens=False)

    if not (args.work / ANSWERS).exists():
        with spent(costs, "answers to measure on"):
            measured = {}
            for path in (args.mt_bench, args.gsm8k):
                given = prompts(path) if path is not None else []
                for temperature in (0.0, 0.7) if given else ():
                    params = SamplingParams(temperature=temperature, top_p=1.0, top_k=0, max_tokens=256)
                    outputs = llm.generate(given, params)
                    measured[f"{path.stem} T {temperature:g}"] = [
                        (prompt, output.outputs[0].token_ids) for prompt, output in zip(given, outputs, strict=True)
                    ]
            (args.work / ANSWERS).write_text(json.dumps(measured))
    maker = Maker(llm, store, args.length, say)
    if args.gsm8k_train is not None:
        with spent(costs, "answers to gsm8k_train"):
            maker.answer_prompts(prompts(args.gsm8k_train), "gsm8k_train", answers=3, deadline=deadline)
    with spent(costs, "prompts and answers of the target"):
        maker.synthesise(args.synthesise, deadline=deadline, answers=2)
    sequences = store.read()
    llm.close()
    return {"sequences": len(sequences), "tokens": len(sequences.tokens), "answer_tokens": int(sequences.answer.sum())}


def opened(args: argparse.Namespace, costs: Costs) -> FrozenTarget:
    device = choose_device(args.device)
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.backends.cuda.enable_cudnn_sdp(False)
        torch.set_float32_matmul_precision("high")
    with spent(costs, "opening the target"):
        return FrozenTarget(resolve(args.target), device, torch.bfloat16 if on_gpu else torch.float32, compiled=on_gpu)


def trained(args: argparse.Namespace, costs: Costs) -> dict[str, Any]:
    target = opened(args, costs)
    config = target.config
    with spent(costs, "packing rows"):
        store = TokenStore(args.work / "tokens", config.vocab_size)
        sequences = store.read()
        apart = held_out(sequences, HELD_OUT)
        learnt, tested = sequences.chosen(~apart), sequences.chosen(apart)
        rows = packed(learnt, args.length)
    filled = float((rows.segments > 0).mean())
    say(f"{len(rows):,} rows of {args.length}, {filled:.0%} full, {int(learnt.answer.sum()):,} answer tokens")
    context = TraineeContext(
        target=target,
        name=TARGET,
        sizes={"temperature": args.temperature},
        vocabulary=lambda size: torch.from_numpy(
            draft_vocabulary(learnt, size, config.vocab_size, config.eos_token_ids)
        ),
        init_from=args.init_from,
        seed=0,
        compiled=target.device.type == "cuda",
        answers=spread(tested if len(tested) else learnt, args.length),
    )
    built = build_trainee(DSPARK, context)
    trainee = built.trainee
    loop_config = LoopConfig(
        rows=args.rows or 64,
        minutes=args.minutes if args.steps is None else None,
        steps=args.steps,
        stop_minutes=None,
        lr=args.lr,
        warmup=args.warmup,
        optimizer=args.optimizer,
        save_s=150,
        measure_s=args.measure_s,
    )

    def measure(parameters: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        with spent(costs, "measuring τ"):
            return built.measure(parameters) if built.measure is not None else {}

    sampler = RowSampler(rows.source, _mix(args.mix, store), 0)
    folder = args.work / (args.name or DSPARK)
    device_rows = DeviceRows.of(rows, target.device)
    loop = Loop(trainee, target, device_rows, sampler, loop_config, folder, report=say, measure=measure)
    if (folder / STATE).exists():
        loop.resume()
        say(f"continues at step {loop.progress.step}, after {loop.progress.elapsed_s:.0f} s of steps")
    size = sum(one.numel() for one in trainee.parameters.values())
    say(f"{size:,} parameters, taps {trainee.taps}, {loop_config}")
    with spent(costs, "compiling, and the first step"):
        loop.trainee.loss(
            loop.rows.batch(
                torch.arange(loop_config.rows, device=target.device) % len(rows), target, trainee.taps, (0, 0)
            )
        ).loss.backward()
        for weight in loop.weights:
            weight.grad = None
        _wait(target.device)
    _profile(loop)
    left = args.call_minutes - (time.perf_counter() - BEGAN + SPARE_S) / 60
    loop.config = replace(loop_config, stop_minutes=max(left, 0.05))
    with spent(costs, "steps"):
        loop.run()
    publish(folder, lambda where: trainee.save(where, loop.averaged()))
    begun = "a drafter trained before" if args.init_from is not None else "random weights"
    recipe = {
        **built.recipe,
        **asdict(loop_config),
        "length": args.length,
        "mix": args.mix or "by size",
        "begun": begun,
    }
    (folder / RECIPE).write_text(json.dumps(recipe))
    if loop.progress.curve:
        loop.progress.curve[-1] |= measure(loop.averaged())
    write_curve(folder, loop.progress.curve, f"{DSPARK} for {TARGET}")
    last = loop.progress.curve[-1] if loop.progress.curve else {}
    return {"steps": loop.progress.step, "seconds": loop.progress.elapsed_s, "parameters": size, **last}


def _profile(loop: Loop) -> None:
    """Print the time of a step by part, from three steps that are not kept."""
    target, device = loop.target, loop.target.device
    which = torch.arange(loop.config.rows, device=device) % len(loop.rows.tokens)
    for _ in range(3):
        began = time.perf_counter()
        batch = loop.rows.batch(which, target, loop.trainee.taps, (0, 0))
        _wait(device)
        middle = time.perf_counter()
        found = loop.trainee.loss(batch).loss
        _wait(device)
        forward = time.perf_counter()
        found.backward()  # type: ignore[no-untyped-call]
        _wait(device)
        end = time.perf_counter()
        for weight in loop.weights:
            weight.grad = None
    say(
        f"a step: target {1e3 * (middle - began):.1f} ms, drafter and loss {1e3 * (forward - middle):.1f} ms, "
        f"backward {1e3 * (end - forward):.1f} ms"
    )


def figures(args: argparse.Namespace, trainee: DSparkTrainee) -> dict[str, Any]:
    answers = json.loads((args.work / ANSWERS).read_text())
    found: dict[str, Any] = {}
    for name, each in answers.items():
        each = each[: args.limit]
        row: dict[str, Any] = {}
        for shape, (nodes, chain) in SHAPES.items():
            walks = walk(trainee, each, nodes, chain=chain)
            row[shape] = tau(walks)
            row[f"{shape}, no loops"] = tau(walks, without_loops=True)
            if chain:
                row["loops"] = f"{sum(one.loops for one in walks)} of {len(walks)}"
                depths = [round(one, 3) for one in by_depth(walks)]
        found[name] = row
        say(f"{name}: " + ", ".join(f"{k} {v:.2f}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()))
        say(f"{name}: chain accepted by depth {depths}")
    return found


def pack(args: argparse.Namespace, costs: Costs) -> dict[str, Any]:
    target = opened(args, costs)
    folder = args.drafter or args.work / (args.name or DSPARK)
    trainee = DSparkTrainee.from_folder(folder, target)
    store = TokenStore(args.work / "tokens", target.config.vocab_size)
    sequences = store.read()
    with spent(costs, "choosing a temperature"):
        softened = soften(trainee, args.soften, spread(sequences.chosen(held_out(sequences, HELD_OUT)), args.length))
    with spent(costs, "walking"):
        say("before:")
        before = figures(args, trainee)
    publish(args.out, lambda where: trainee.save(where, int8=True))
    with spent(costs, "walking"):
        say("after:")
        after = figures(args, DSparkTrainee.from_folder(args.out, target))
    files = {file.name: file.stat().st_size for file in args.out.iterdir() if file.suffix in (".safetensors", ".json")}
    largest, total = max(files.values()), sum(files.values())
    say(f"{total:,} bytes in {len(files)} files, the largest {largest:,}")
    if total > SHIPPED_BYTES or largest > FILE_BYTES:
        say(f"too large to ship: at most {SHIPPED_BYTES:,} bytes, {FILE_BYTES:,} a file; train with fewer layers")
    curve = json.loads((folder / "curve.json").read_text()) if (folder / "curve.json").exists() else []
    counts = {name: int((sequences.source == i).sum()) for i, name in enumerate(store.sources)}
    last = curve[-1] if curve else {}
    recipe = json.loads((folder / RECIPE).read_text()) if (folder / RECIPE).exists() else {}
    write_card(
        args.out,
        method=trainee.config.method,
        target=TARGET,
        data={"sequences": counts, "answer tokens": f"{int(sequences.answer.sum()):,}"},
        recipe={**recipe, "logits divided by": softened},
        figures=after,
        cost={
            "steps": last.get("step", ""),
            "seconds of steps": last.get("seconds", ""),
            "epochs": last.get("epochs", ""),
        },
    )
    return {"before": before, "after": after, "bytes": total}


def spread(sequences: Sequences, length: int, count: int = 64) -> Answers:
    """Return `count` answers, evenly from all shards, which begin with those of one source."""
    every = np.arange(len(sequences)) % max(1, len(sequences) // count) == 0
    return answers_of(sequences.chosen(every), count, length)


def soften(trainee: DSparkTrainee, temperatures: list[float], answers: Answers) -> float:
    """Divide the drafter's logits by the temperature whose trees are accepted furthest on held-out answers. A loss of
    mostly TV leaves them too sharp, and trees then too narrow. Chains stay as they are."""
    given = dict(trainee.parameters)
    found = {}
    for temperature in temperatures if len(temperatures) > 1 else ():
        parameters = divided(given, temperature)
        each = [tau(walk(trainee, answers, nodes, parameters=parameters)) for nodes in (15, 60)]
        found[temperature] = sum(each)
        say(f"logits divided by {temperature:g}: held-out τ of trees of 15 {each[0]:.3f}, of 60 {each[1]:.3f}")
    best = max(found, key=lambda one: found[one]) if found else temperatures[0]
    trainee.parameters = divided(given, best)
    return best


def divided(given: Mapping[str, torch.Tensor], temperature: float) -> dict[str, torch.Tensor]:
    """Return parameters whose logits, of the head's input and the Markov head, are divided by the temperature."""
    found = {name: one.detach().clone() for name, one in given.items()}
    for name in ("norm.weight", W2):
        if name in found:
            found[name] /= temperature
    return found


def _mix(given: str | None, store: TokenStore) -> dict[int, float] | None:
    if not given:
        return None
    pairs = dict(part.split("=") for part in given.split(","))
    return {store.sources.index(name): float(weight) for name, weight in pairs.items()}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


STAGES = {"data": data, "train": trained, "pack": pack}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=STAGES)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--minutes", type=float, default=5.0, help="of data, or of the whole training")
    parser.add_argument("--call-minutes", type=float, default=9.2, help="of this call of the training, all included")
    parser.add_argument("--length", type=int, default=512, help="tokens of a row")
    parser.add_argument("--rows", type=int, help="sequences at once (512 on a GPU), or rows of a step (64)")
    parser.add_argument("--limit", type=int, help="prompts of a file, to try the script")
    parser.add_argument("--name", help="folder of this drafter in the work folder; the method's name if unset")
    of_data = parser.add_argument_group("data")
    of_data.add_argument("--gsm8k-train", type=Path)
    of_data.add_argument("--mt-bench", type=Path)
    of_data.add_argument("--gsm8k", type=Path)
    of_data.add_argument("--synthesise", type=int, default=1_000_000, help="prompts at most; the time ends it")
    of_train = parser.add_argument_group("train")
    of_train.add_argument("--steps", type=int, help="instead of minutes")
    of_train.add_argument("--init-from", type=Path)
    of_train.add_argument("--temperature", type=float, default=1.0)
    of_train.add_argument("--lr", type=float, default=1e-3)
    of_train.add_argument("--warmup", type=int, default=200)
    of_train.add_argument("--optimizer", default="adamw")
    of_train.add_argument("--mix", help="weights of sources: synthetic=0.8,gsm8k_train=0.2; by size if unset")
    of_train.add_argument("--measure-s", type=float, default=120.0)
    parser.add_argument("--drafter", type=Path, help="another folder than the work folder's")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--soften", type=float, nargs="+", default=[1.0], help="temperatures that `pack` chooses from")
    args = parser.parse_args()
    if args.stage == "pack" and args.out is None:
        sys.exit("pack needs --out DIR")
    args.work.mkdir(parents=True, exist_ok=True)
    costs, began = Costs(), time.perf_counter()
    result = STAGES[args.stage](args, costs)
    say(f"{args.stage} took {time.perf_counter() - began:.0f} s; costs: {costs}")
    finish(f"train_smollm2 {args.stage}", {"result": result, "costs": costs})


if __name__ == "__main__":
    main()
