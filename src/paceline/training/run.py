"""`paceline train`: from a target and some data to a drafter's folder.

OUT/config.json, *.safetensors      the drafter, as the engine reads it
OUT/README.md, curve.png, .json     the card, written by the run itself
OUT/training/tokens, training.pt    what a later run continues from
"""

from __future__ import annotations

import json
import math
import os
import shutil
import time
import zlib
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from paceline.drafters.methods import METHODS
from paceline.errors import InvalidParameter, PacelineError
from paceline.models.load.hub import resolve
from paceline.models.load.loader import load_config
from paceline.models.load.open_model import choose_device
from paceline.text.tokenizer import Tokenizer
from paceline.training.card import write_card, write_curve
from paceline.training.data.batch import DeviceRows
from paceline.training.data.generate import Maker, chat_frame, draft_vocabulary, open_generator, read_file
from paceline.training.data.rows import RowSampler, held_out, packed
from paceline.training.data.sources import fingerprint, sources_of
from paceline.training.data.store import Sequences, Source, TokenStore, disk_error, write_whole
from paceline.training.engine_tau import engine_tau
from paceline.training.loop import Loop, LoopConfig, Processes, Report
from paceline.training.names import drafting_method
from paceline.training.output_folder import STATE, TOKENS, TRAINING, check_out
from paceline.training.registry import Made, Plan, trainee_of
from paceline.training.state import check_settings, damaged, read_state
from paceline.training.trainees.target import FrozenTarget

HELD_OUT = 0.01  # of all prompts, never trained on
MEASURED = 32  # held-out answers whose τ is measured while training
PROMPTS = 8  # held-out prompts that the engine answers at the end


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


@dataclass(frozen=True)
class Begun:
    """What a run learns from and under which settings, compared with the training that it continues."""

    sources: tuple[Source, ...]
    asked: bool  # for these sources, which are otherwise those of the training before
    settings: Mapping[str, Any]  # that stay equal when it is continued
    state: Mapping[str, Any] | None  # of the training before

    @staticmethod
    def of(options: TrainOptions, target: str) -> Begun:
        """Reads, and writes nothing: a run that is refused leaves a training as it was."""
        asked = sources_of(
            options.data,
            regenerate=options.regenerate,
            synthesise=options.synthesise,
            length=options.length,
            target=target,
        )
        loop = options.loop
        settings = {"method": options.method, "target": target, "seed": loop.seed, "rows": loop.rows}
        settings |= {"length": options.length, "optimizer": loop.optimizer}
        path = options.out / TRAINING / STATE
        state = read_state(path) if options.resume else None
        if asked:
            settings["sources"] = [asdict(one) for one in asked]
        elif state is None:
            raise InvalidParameter("data", "there is nothing to train on; give --data FILE or --synthesise N")
        if state is None:
            return Begun(asked, True, settings, None)
        check_settings(path, state, settings)
        sources = _sources_before(path, state)
        return Begun(sources, bool(asked), {**settings, "sources": state["settings"]["sources"]}, state)


def _sources_before(path: Path, state: Mapping[str, Any]) -> tuple[Source, ...]:
    try:
        return tuple(Source(**one) for one in state["settings"]["sources"])
    except (KeyError, TypeError) as error:
        raise damaged(path, error) from error


def train(options: TrainOptions, report: Report = print) -> dict[str, Any]:
    began = time.perf_counter()
    device = _processes(choose_device(options.device))
    path = resolve(options.target)
    config = load_config(path)
    work = options.out / TRAINING
    if Processes.current().rank == 0:
        check_out(options.out, options.method, resume=options.resume, target=path, init_from=options.init_from)
    begun = Begun.of(options, fingerprint(path, config))
    _check_mix(options.mix, begun.sources)
    if Processes.current().rank == 0:
        store = _new_store(work / TOKENS, config.vocab_size)
        if begun.asked:
            collect(store, begun.sources, options, Tokenizer.from_path(path), report)
    _meet()
    store = TokenStore(work / TOKENS, config.vocab_size)
    data_s = time.perf_counter() - began
    sequences = store.read(shards_of(store, begun.sources))
    apart = (
        held_out(sequences, HELD_OUT) if len(sequences) >= 50 else torch.zeros(len(sequences), dtype=torch.bool).numpy()
    )
    learnt, tested = sequences.chosen(~apart), sequences.chosen(apart)
    rows = packed(learnt, options.length)
    compiled = device.type == "cuda"
    if compiled:
        torch.backends.cuda.enable_cudnn_sdp(False)  # its kernels with masks have been wrong before
    target = FrozenTarget(path, device, torch.bfloat16 if compiled else torch.float32, compiled=compiled)
    plan = Plan(
        target=target,
        name=options.target,
        sizes=dict(options.sizes or {}),
        vocabulary=lambda size: torch.from_numpy(
            draft_vocabulary(learnt, size, config.vocab_size, config.eos_token_ids)
        ),
        init_from=options.init_from,
        seed=options.loop.seed,
        compiled=compiled,
        answers=answers_of(tested if len(tested) else learnt, MEASURED, options.length),
    )
    made = trainee_of(options.method, plan)
    sampler = RowSampler(rows.source, _weights(options.mix, store), options.loop.seed)
    loop = Loop(
        made.trainee,
        target,
        DeviceRows.of(rows, device),
        sampler,
        options.loop,
        work,
        report=report,
        measure=made.measure,
        settings={**begun.settings, "tokens": _checksum(sequences)},
    )
    if begun.state is not None:
        loop.resume(begun.state)
    _forecast(loop, options, report)
    loop.run()
    if Processes.current().rank:
        return {}
    figures = made.measure(loop.averaged()) if made.measure is not None else {}
    publish(options.out, lambda folder: made.trainee.save(folder, loop.averaged()))
    figures |= by_engine(options, made, [list(prompt) for prompt, _ in plan.answers[:PROMPTS]], report)
    return finish(loop, made, options, sequences, store, figures, data_s)


def finish(
    loop: Loop,
    made: Made,
    options: TrainOptions,
    sequences: Sequences,
    store: TokenStore,
    figures: Mapping[str, Any],
    data_s: float,
) -> dict[str, Any]:
    """The card and the curve."""
    progress = loop.progress
    if progress.curve:
        progress.curve[-1].update(figures)
    write_curve(options.out, progress.curve, f"{options.method} for {options.target}")
    counts = {name: int((sequences.source == i).sum()) for i, name in enumerate(store.sources)}
    tokens = {name: count for name, count in counts.items() if count}
    write_card(
        options.out,
        method=options.method,
        target=options.target,
        data={
            "sequences": tokens,
            "answer tokens": f"{int(sequences.answer.sum()):,}",
            "mix": options.mix or "by size",
        },
        recipe={**made.recipe, **{k: v for k, v in asdict(loop.config).items() if not k.endswith("_s")}},
        figures=figures,
        cost={
            "data": f"{data_s:.0f} s",
            "training": f"{progress.elapsed_s:.0f} s, {progress.step} steps",
            "device": _device_name(loop.target.device),
        },
        flag="--" + METHODS[drafting_method(options.method)].needs[0].replace("_", "-"),
    )
    return {"out": str(options.out), "steps": progress.step, "seconds": progress.elapsed_s, **figures}


def by_engine(options: TrainOptions, made: Made, prompts: list[list[int]], report: Report) -> dict[str, Any]:
    """τ as the engine counts it. A drafter that it cannot run is reported, and kept."""
    if not prompts:
        return {}
    method = drafting_method(options.method)
    found: dict[str, Any] = {}
    try:
        for temperature in (0.0, 0.7):
            measured = engine_tau(
                options.target,
                options.out,
                method,
                prompts,
                nodes=made.nodes,
                temperature=temperature,
                device=options.device,
            )
            found[f"τ of the engine, {made.nodes} nodes, T {temperature:g}"] = measured["tau"]
            found[f"accepted by depth, T {temperature:g}"] = measured["by depth"]
            report(f"{options.out}: τ {measured['tau']:.2f} at T {temperature:g}, by depth {measured['by depth']}")
    except PacelineError as error:
        report(f"the engine could not measure {options.out}: {error}")
    return found


def publish(out: Path, save: Callable[[Path], None]) -> None:
    """Files written by `save`, moved into `out` once all of them are whole."""
    part = out / ".part"
    shutil.rmtree(part, ignore_errors=True)
    try:
        save(part)
        for old in (*out.glob("*.safetensors"), *out.glob("*.safetensors.index.json")):
            old.unlink()
        for file in sorted(part.iterdir()):
            file.replace(out / file.name)
    except OSError as error:
        raise disk_error(out, error) from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _new_store(folder: Path, vocab_size: int) -> TokenStore:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidParameter("out", f"cannot write to {folder}: {error.strerror}; name another folder") from error
    return TokenStore(folder, vocab_size)


def collect(
    store: TokenStore, sources: SequenceOf[Source], options: TrainOptions, tokenizer: Tokenizer, report: Report
) -> None:
    """Fill the store with what is asked for and not there yet."""
    done = store.folder / "complete.json"
    if done.is_file() and done.read_bytes() == _inventory(store, sources).encode():
        return
    eos = load_config(resolve(options.target)).eos_token_ids
    for source in sources:
        store.accept(source)
    if not options.regenerate:
        for path in options.data:
            if not store.has(path.stem):
                store.add(path.stem, read_file(path, tokenizer, eos, store.vocab_size, store.source(path.stem)))
    if options.synthesise:
        chat_frame(tokenizer)  # refuses a model without a chat template before an engine is started
    if options.synthesise or options.regenerate:
        with open_generator(options.target, options.device) as llm:
            maker = Maker(llm, store, options.length, report)
            for path in options.data if options.regenerate else ():
                maker.regenerate(path)
            if options.synthesise:
                maker.synthesise(options.synthesise)
    shards_of(store, sources)
    write_whole(done, _inventory(store, sources))


def shards_of(store: TokenStore, sources: SequenceOf[Source]) -> list[str]:
    """The names of all their shards; each has some."""
    found = [store.shards_of(source.name, made=source.made) for source in sources]
    for source, names in zip(sources, found, strict=True):
        if not names:
            raise InvalidParameter(
                "data",
                f"{store.folder} holds no tokens of {source.name}; give its --data or --synthesise again, "
                "or a larger --length where its prompts leave no room for answers",
            )
    return [name for names in found for name in names]


def _inventory(store: TokenStore, sources: SequenceOf[Source]) -> str:
    """As complete.json has it when nothing is missing."""
    shards = [store.shards_of(source.name, made=source.made) for source in sources]
    return json.dumps({"sources": [asdict(source) for source in sources], "shards": shards})


def answers_of(sequences: Sequences, count: int, length: int) -> list[tuple[list[int], list[int]]]:
    """(prompt, answer) of the first sequences, of their first answers."""
    found: list[tuple[list[int], list[int]]] = []
    for tokens, answer in sequences:
        if len(found) == count:
            break
        tokens, answer = tokens[:length], answer[:length]
        start = int(answer.argmax())
        end = start + (int((~answer[start:]).argmax()) or len(answer) - start)
        if start > 0 and end - start >= 8:
            found.append((tokens[:start].tolist(), tokens[start:end].tolist()))
    return found


def _weights(mix: Mapping[str, float] | None, store: TokenStore) -> dict[int, float] | None:
    if mix is None:
        return None
    return {store.sources.index(name): weight for name, weight in mix.items()}


def _check_mix(mix: Mapping[str, float] | None, sources: SequenceOf[Source]) -> None:
    names = [source.name for source in sources]
    for name in mix or ():
        if name not in names:
            raise InvalidParameter("mix", f"{name!r} is not one of the sources {', '.join(names)}")


def _checksum(sequences: Sequences) -> int:
    found = 0
    for part in (sequences.tokens, sequences.answer, sequences.ends, sequences.source):
        found = zlib.crc32(part.tobytes(), found)
    return found


def _forecast(loop: Loop, options: TrainOptions, report: Report) -> None:
    """On a CPU: how long the steps will take, from the first one. That step is not kept."""
    if loop.target.device.type != "cpu" or options.loop.steps is None or Processes.current().world > 1:
        return
    which = torch.arange(options.loop.rows) % len(loop.rows.tokens)
    began = time.perf_counter()
    loop.trainee.loss(loop.rows.batch(which, loop.target, loop.trainee.taps, (0, 0))).loss.backward()  # type: ignore[no-untyped-call]
    for weight in loop.weights:
        weight.grad = None
    hours = (time.perf_counter() - began) * (options.loop.steps - loop.progress.step) / 3600
    if hours > 0.1:
        report(f"on this CPU {options.loop.steps} steps take about {hours:.1f} hours; a GPU is far faster")


def _processes(device: torch.device) -> torch.device:
    """Join the other processes of torchrun, and take a GPU each."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return device
    if not dist.is_initialized():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _meet() -> None:
    if dist.is_initialized():
        dist.barrier()


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
