"""`paceline warm`: a model's own answers fill the table of successors from which `recycling` drafts."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cli.flags import Json, ModelOptions, flag, with_options
from paceline.cli.output import human_bytes, print_json, print_note
from paceline.cli.progress import live, progress

if TYPE_CHECKING:
    from paceline.build import LoadedTarget
    from paceline.drafters.lookup.recycling import RecyclingDrafter
    from paceline.engine.engine import Engine

ANSWERS, LONGEST = 300, 250  # answers, and tokens of each at most: 75,000 tokens fill a table of some 3 MB
TOGETHER = 4  # answers at a time; also those after which the table is written
TRIAL = 16  # tokens of the first answer that is timed
TEMPERATURE = 0.8  # of answers to prompts that were answered greedily before


@dataclass(frozen=True, kw_only=True)
class WarmOptions(ModelOptions):
    data: Path | None = flag(
        None, "Prompts to answer, jsonl or a text with one a line; unset: the packaged ones.", "FILE"
    )
    minutes: float | None = flag(None, "Stop after this many minutes; the next call goes on.", "MINUTES", min=0.0)
    json: Json = False


@with_options
def warm(options: WarmOptions) -> None:
    """Fill the table of successors that `recycling` drafts from, with 300 answers of the model.

    Some 5 minutes for smollm2 on two cores. Interrupted at any time, the next call goes on.
    """
    with progress(plain=not options.json) as report:
        from paceline import build
        from paceline.drafters.lookup.table_file import known_table, table_path
        from paceline.errors import DeviceError
        from paceline.native.library import library_status, load_library

        if load_library() is None:
            raise DeviceError(f"the table of successors needs the native library: {library_status()}")
        target = build.load(options.model, progress=report, **options.load_options)
    embedding = target.loaded.decoder.embedding
    path, known = table_path(embedding), known_table(embedding)
    done = 0 if known is None else known.answers
    if done < ANSWERS:
        with _alone(path):
            done = _fill(options, target, path, done)
    table = known_table(embedding)
    contexts, size = (0, 0) if table is None else (len(table.entries), path.stat().st_size)
    if options.json:
        print_json({"model": options.model, "path": str(path), "answers": done, "contexts": contexts, "bytes": size})
        return
    goes_on = "" if done >= ANSWERS else "; the next call goes on"
    print(f"{options.model}: {done} of {ANSWERS} answers, {contexts:,} contexts, {human_bytes(size)}{goes_on}")


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Refuse a second writer of a table, and remove what a killed one has left."""
    from paceline.errors import CacheFolderError
    from paceline.files.folders import Lock, disk_errors, lock_file

    lock = path.with_suffix(".lock")
    with disk_errors(lambda error: CacheFolderError(f"{lock} cannot be written ({error.strerror or error})")):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = lock.open("w")
    with file:
        if lock_file(file) is Lock.HELD:
            raise CacheFolderError("another paceline warm fills the table of this model; wait for it")
        for leftover in path.parent.glob(f".{path.name}.*"):
            leftover.unlink(missing_ok=True)
        yield


def _fill(options: WarmOptions, target: LoadedTarget, path: Path, done: int) -> int:
    """Answer prompts until the table is full or the time is over; return the number of answers in the table."""
    from paceline import build
    from paceline.bench.prompts import from_file, shipped
    from paceline.config import EngineConfig, SpeculationConfig
    from paceline.drafters.lookup.recycling import RecyclingDrafter
    from paceline.drafters.methods import RECYCLING

    talks = shipped() if options.data is None else from_file(options.data)
    tokenizer = target.loaded.tokenizer
    prompts = [tokenizer.apply_chat_template(talk.messages(())) for talk in talks]
    config = EngineConfig(max_num_seqs=TOGETHER, prefix_caching=False)
    bundle = build.build(target, config, SpeculationConfig(method=RECYCLING), remember=False)
    engine = bundle.engine
    (drafter,) = (one for one in engine.drafters.drafters if isinstance(one, RecyclingDrafter))
    prompts = [prompt for prompt in prompts if len(prompt) + TRIAL < engine.max_model_len]
    with contextlib.closing(bundle):
        _say_how_long(engine, prompts[0], ANSWERS - done)
        until = time.monotonic() + 60 * (options.minutes if options.minutes is not None else float("inf"))
        with live() as bar:
            while done < ANSWERS and time.monotonic() < until:
                numbers = range(done, min(done + TOGETHER, ANSWERS))
                _answer(engine, prompts, numbers)
                done = numbers.stop
                _write(drafter, target, options.model, path, done)
                bar.work(done, ANSWERS, f"{done} of {ANSWERS} answers")
    return done


def _say_how_long(engine: Engine, prompt: list[int], answers: int) -> None:
    """Print how long the answers will take, from the time of a short one."""
    from paceline.sampling_params import SamplingParams

    engine.add_request("trial", prompt, SamplingParams(temperature=0, max_tokens=TRIAL, ignore_eos=True).resolve({}))
    while engine.has_work:
        engine.step()
    tokens, seconds = engine.stats.num_committed_tokens, engine.stats.step_s
    minutes = answers * LONGEST * seconds / tokens / 60
    print_note(f"{answers} answers of up to {LONGEST} tokens: about {minutes:.0f} min; --minutes N stops sooner")


def _answer(engine: Engine, prompts: list[list[int]], numbers: range) -> None:
    """Answer the prompts of these numbers, greedily the first time that a prompt comes."""
    from paceline.sampling_params import SamplingParams

    for number in numbers:
        prompt, again = prompts[number % len(prompts)], number >= len(prompts)
        sampling = {"temperature": TEMPERATURE, "seed": number} if again else {"temperature": 0}
        engine.add_request(str(number), prompt, SamplingParams(max_tokens=LONGEST, **sampling).resolve({}))
    while engine.has_work:
        engine.step()


def _write(drafter: RecyclingDrafter, target: LoadedTarget, model: str, path: Path, answers: int) -> None:
    from paceline.drafters.lookup.table_file import TableFile

    embedding = target.loaded.decoder.embedding
    TableFile(model, path.stem, len(embedding), answers, drafter.contexts()).write(path)
