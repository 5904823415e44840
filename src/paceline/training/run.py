"""`paceline train`: from a target and some data to a drafter's folder."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from paceline.drafters.methods import METHODS
from paceline.errors import InvalidParameter
from paceline.models.load.hub import resolve
from paceline.models.load.loader import load_config
from paceline.models.load.open_model import choose_device
from paceline.training.acceptance import by_engine
from paceline.training.card import write_card, write_curve
from paceline.training.data.batch import DeviceRows
from paceline.training.data.generate import collect, draft_vocabulary
from paceline.training.data.rows import RowSampler, answers_of, divided, packed
from paceline.training.data.sources import fingerprint
from paceline.training.data.store import Sequences, TokenStore
from paceline.training.loop import Loop, LoopConfig, Processes, Report
from paceline.training.output_folder import TOKENS, TRAINING, ResumePlan, check_out, publish
from paceline.training.registry import Answers, BuiltTrainee, TraineeContext, build_trainee, drafting_method
from paceline.training.trainees.target import FrozenTarget

MEASURED = 32  # held-out answers; τ is measured on them while training
PROMPTS = 8  # held-out prompts; the engine answers them at the end


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    method: str
    target: str
    out: Path
    data: tuple[Path, ...] = ()
    regenerate: bool = False
    synthesise: int = 0
    mix: Mapping[str, float] | None = None  # weights of sources by name
    init_from: Path | None = None
    resume: bool = False
    device: str = "auto"
    length: int = 512  # tokens of a row
    sizes: Mapping[str, Any] | None = None  # fields of the method's options that differ from their defaults
    loop: LoopConfig

    def __post_init__(self) -> None:
        for name, weight in (self.mix or {}).items():
            if not (math.isfinite(weight) and weight >= 0):
                raise InvalidParameter("mix", f"the weight of {name!r} must be 0 or more and finite, got {weight}")


class TrainingTokens(NamedTuple):
    names: list[str]  # names of the sources, by index
    sequences: Sequences  # all of them
    learnt: Sequences  # without those held out
    answers: Answers  # held-out answers, to measure τ on


def train(options: TrainOptions, report: Report = print) -> dict[str, Any]:
    """Train a drafter and publish it; return its figures."""
    began = time.perf_counter()
    device = Processes.join(choose_device(options.device))
    path = resolve(options.target)
    config = load_config(path)
    if Processes.current().rank == 0:
        check_out(options.out, options.method, resume=options.resume, target=path, init_from=options.init_from)

    plan = ResumePlan.of(options, fingerprint(path, config))
    tokens = training_tokens(options, plan, config.vocab_size, report)
    data_s = time.perf_counter() - began
    target = FrozenTarget.for_training(path, device)
    built = build_trainee(options.method, trainee_context(options, target, tokens))
    loop = make_loop(options, plan, tokens, target, built, report)
    loop.forecast()
    loop.run()
    if loop.processes.rank:
        return {}
    figures = built.measure(loop.averaged()) if built.measure is not None else {}
    publish(options.out, lambda folder: built.trainee.save(folder, loop.averaged()))
    figures |= by_engine(
        options.target,
        options.out,
        drafting_method(options.method),
        [prompt for prompt, _ in tokens.answers[:PROMPTS]],
        nodes=built.nodes,
        device=options.device,
        report=report,
    )
    write_files(options, loop, built, tokens, figures, data_s)
    return {"out": str(options.out), "steps": loop.progress.step, "seconds": loop.progress.elapsed_s, **figures}


def training_tokens(options: TrainOptions, plan: ResumePlan, vocab_size: int, report: Report) -> TrainingTokens:
    """Return the tokens of the plan's sources; the first process gathers those that are missing."""
    folder, processes = options.out / TRAINING / TOKENS, Processes.current()
    names = [source.name for source in plan.sources]
    for name in options.mix or ():
        if name not in names:
            raise InvalidParameter("mix", f"{name!r} is not one of the sources {', '.join(names)}")
    if processes.rank == 0:
        store = TokenStore(folder, vocab_size)
        if plan.asked:
            collect(
                store,
                plan.sources,
                options.target,
                data=options.data,
                regenerate=options.regenerate,
                synthesise=options.synthesise,
                length=options.length,
                device=options.device,
                report=report,
            )
    processes.wait_for_all()
    store = TokenStore(folder, vocab_size)
    sequences = store.read([shard for shards in store.shards_by_source(plan.sources) for shard in shards])
    learnt, held_out = divided(sequences)
    answers = answers_of(held_out if len(held_out) else learnt, MEASURED, options.length)
    return TrainingTokens(store.sources, sequences, learnt, answers)


def trainee_context(options: TrainOptions, target: FrozenTarget, tokens: TrainingTokens) -> TraineeContext:
    def vocabulary(size: int) -> torch.Tensor:
        config = target.config
        return torch.from_numpy(draft_vocabulary(tokens.learnt, size, config.vocab_size, config.eos_token_ids))

    return TraineeContext(
        target=target,
        name=options.target,
        sizes=dict(options.sizes or {}),
        vocabulary=vocabulary,
        init_from=options.init_from,
        seed=options.loop.seed,
        compiled=target.device.type == "cuda",
        answers=tokens.answers,
    )


def make_loop(
    options: TrainOptions,
    plan: ResumePlan,
    tokens: TrainingTokens,
    target: FrozenTarget,
    built: BuiltTrainee,
    report: Report,
) -> Loop:
    rows = packed(tokens.learnt, options.length)
    weights = None
    if options.mix is not None:
        weights = {tokens.names.index(name): weight for name, weight in options.mix.items()}
    loop = Loop(
        built.trainee,
        target,
        DeviceRows.of(rows, target.device),
        RowSampler(rows.source, weights, options.loop.seed),
        options.loop,
        options.out / TRAINING,
        report=report,
        measure=built.measure,
        settings={**plan.settings, "tokens": tokens.sequences.checksum},
    )
    if plan.state is not None:
        loop.resume(plan.state)
    return loop


def write_files(
    options: TrainOptions,
    loop: Loop,
    built: BuiltTrainee,
    tokens: TrainingTokens,
    figures: Mapping[str, Any],
    data_s: float,
) -> None:
    """Write the card and the curve."""
    progress, device, sequences = loop.progress, loop.target.device, tokens.sequences
    if progress.curve:
        progress.curve[-1].update(figures)
    write_curve(options.out, progress.curve, f"{options.method} for {options.target}")
    counts = {name: int((sequences.source == i).sum()) for i, name in enumerate(tokens.names)}
    write_card(
        options.out,
        method=options.method,
        target=options.target,
        data={
            "sequences": {name: count for name, count in counts.items() if count},
            "answer tokens": f"{int(sequences.answer.sum()):,}",
            "mix": options.mix or "by size",
        },
        recipe={**built.recipe, **{k: v for k, v in asdict(loop.config).items() if not k.endswith("_s")}},
        figures=figures,
        cost={
            "data": f"{data_s:.0f} s",
            "training": f"{progress.elapsed_s:.0f} s, {progress.step} steps",
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        },
        flag="--" + METHODS[drafting_method(options.method)].needs[0].replace("_", "-"),
    )
