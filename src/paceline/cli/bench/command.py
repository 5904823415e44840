"""`paceline bench`: the speed-up of each method on this model, on this machine, on the user's own prompts.

Everything that can be refused is refused before the model is loaded, the folder for the results included. If a run ends
early, the table is printed and the files are written from what was measured.
"""

from __future__ import annotations

import re
import shlex
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from paceline.bench.grid import concurrencies, split
from paceline.bench.prompts import QUICK_WORKLOADS, USUAL_WORKLOADS, WORKLOADS, Prompt, from_file, shipped
from paceline.bench.runner import RunPlan
from paceline.cli.flags import Drafter, MeasureOptions, argument, flag, with_options
from paceline.cli.output import exit_code, print_and_save, print_json
from paceline.cli.progress import live
from paceline.errors import InvalidParameter

if TYPE_CHECKING:
    from paceline.bench.results import Results

PER_WORKLOAD = 5
MAX_TOKENS, QUICK_MAX_TOKENS = 64, 48
FOR_ENGINES = ("methods", "k", "draft_model", "drafter", "dtype", "device", "threads", "raw")
FOR_SERVERS = ("baseline_endpoint", "api_key", "timeout", "no_counters")
FILES = ("results.json", "report.html")


@dataclass(frozen=True, kw_only=True)
class BenchOptions(MeasureOptions):
    model: str | None = argument(None, "Alias, folder, .gguf file or hub id; with --endpoint: its name there.", "MODEL")
    methods: str | None = flag(None, "Methods to measure, with commas between; plain decoding always runs.", "NAMES")
    k: str | None = flag(None, "Numbers of tokens drafted ahead, each measured by itself.", "N,N|auto")
    drafter: Drafter = None
    concurrency: str = flag("1", "Numbers of requests at once, each measured by itself.", "N,N")
    workloads: str | None = flag(None, f"Use only some of {', '.join(WORKLOADS)}, or of those in FILE.", "NAMES")
    per_workload: int | None = flag(
        None, "Prompts to use of each workload; unset: 5 of the packaged ones, all of FILE.", "N", min=1
    )
    seed: str = flag("0", "Seed of the order of the prompts and of sampling; none: sampling is unseeded.", "N|none")
    endpoint: str | None = flag(None, "Measure this OpenAI-compatible server.", "URL")
    baseline_endpoint: str | None = flag(None, "The same server without speculation, to compare with.", "URL")
    api_key: str | None = flag(None, "Key of the server.", "KEY", envvar="OPENAI_API_KEY")
    timeout: float = flag(300.0, "Seconds a server may take for an answer.", "SECONDS", min=0.001)
    no_counters: bool = flag(False, "Do not read the server's /metrics: others use it too.")
    compare: tuple[Path, Path] | None = flag(None, "Measure nothing: compare two results.json.", "A B")


@with_options
def bench(context: typer.Context, *, options: BenchOptions) -> int:
    """Measure what drafting gives: speed-up over plain decoding with its interval, acceptance, latency."""
    if options.compare:
        return compare_results(context, options.compare, as_json=options.json)
    if options.endpoint is None:
        refuse_idle_flags(context, FOR_SERVERS, "servers")
    else:
        refuse_idle_flags(context, FOR_ENGINES, "our own engines")
    plan = plan_of(options, concurrencies(options.concurrency), options.seed)
    prompts = choose_prompts(options, max(plan.concurrencies))
    folder = choose_folder(options.out, options.model or ("endpoint" if options.endpoint else "smollm2"))
    settings = {**settings_of(plan, options.prompts, prompts), "command": command_of(context)}
    results, stopped = (bench_endpoint if options.endpoint else bench_engines)(options, prompts, plan, settings)
    print_and_save(folder, lambda: show(results, as_json=options.json), lambda folder: save_results(results, folder))
    code = exit_code(stopped, "interrupted: the figures are of what was measured until then")
    return code or (0 if says_something(results) else 1)


def command_of(context: typer.Context) -> str:
    """Return the command line that repeats the run, without the server's key."""
    words = ["paceline", str(context.info_name)]
    for parameter in context.command.params:
        name, value = str(parameter.name), context.params.get(str(parameter.name))
        if name != "api_key" and _on_command_line(context, name):
            flag_name = [] if parameter.param_type_name == "argument" else [max(parameter.opts, key=len)]
            for each in value if isinstance(value, list) else [value]:
                words += [*flag_name, *([] if each is True else [str(each)])]
    return shlex.join(words)


def _on_command_line(context: typer.Context, name: str) -> bool:
    """Return whether a flag is on the command line; a key from the environment is not."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def compare_results(context: typer.Context, paths: tuple[Path, Path], *, as_json: bool) -> int:
    from paceline.bench.results import Results
    from paceline.cli.bench.tables import compared, print_comparison

    refuse_idle_flags(
        context, [name for name in context.params if name not in ("compare", "json")], "runs that measure"
    )
    one, other = (Results.load(path / FILES[0] if path.is_dir() else path) for path in paths)
    if as_json:
        print_json({"cells": compared(one, other)})
    else:
        print_comparison(one, other)
    return 0


def plan_of(options: MeasureOptions, levels: Sequence[int], seed: str) -> RunPlan:
    """`levels`: concurrencies; `seed`: a number, or none."""
    from paceline.sampling_params import SamplingParams

    max_tokens = options.max_tokens
    if max_tokens is None:
        max_tokens = QUICK_MAX_TOKENS if options.quick else MAX_TOKENS
    try:
        number = None if seed == "none" else int(seed)
    except ValueError:
        raise InvalidParameter("seed", f"must be a whole number, or none; got {seed!r}") from None
    SamplingParams(temperature=options.temperature, seed=number, max_tokens=max_tokens)  # refuses wrong values
    return RunPlan(concurrencies=levels, max_tokens=max_tokens, temperature=options.temperature, seed=number)


def settings_of(plan: RunPlan, file: Path | None, prompts: Sequence[Prompt]) -> dict[str, Any]:
    names = ", ".join(dict.fromkeys(prompt.workload for prompt in prompts))
    used = {"concurrency": plan.concurrencies, "max_tokens": plan.max_tokens, "temperature": plan.temperature}
    return {**used, "seed": plan.seed, "prompts": str(file) if file else names, "num_prompts": len(prompts)}


def bench_engines(
    options: BenchOptions, prompts: list[Prompt], plan: RunPlan, settings: dict[str, Any]
) -> tuple[Results, BaseException | None]:
    with live() as bar:
        bar.stage("starting")
        from paceline.bench.command import run

        engine = {name: getattr(options, name) for name in FOR_ENGINES}
        model = options.model or "smollm2"
        return run(model, prompts, plan, settings, on_load=bar.load, on_progress=bar.work, **engine)


def bench_endpoint(
    options: BenchOptions, prompts: list[Prompt], plan: RunPlan, settings: dict[str, Any]
) -> tuple[Results, BaseException | None]:
    from paceline.bench.endpoint import measure
    from paceline.bench.groups import check_enough
    from paceline.bench.intervals import MIN_PAIRS

    assert options.endpoint is not None
    pairs = MIN_PAIRS if options.baseline_endpoint is not None else 1
    check_enough(prompts, plan.concurrencies, plan.max_tokens, pairs)
    with live() as bar:
        bar.stage("connecting")
        return measure(
            options.endpoint,
            prompts,
            plan,
            settings,
            model=options.model,
            api_key=options.api_key,
            timeout_s=options.timeout,
            baseline_url=options.baseline_endpoint,
            counters=not options.no_counters,
            on_progress=bar.work,
        )


# -- what can be refused before anything is loaded


def choose_prompts(options: BenchOptions, most: int) -> list[Prompt]:
    """Read the user's prompts, or choose packaged ones: enough for figures at `most` requests at once."""
    from paceline.bench.intervals import MIN_PAIRS

    names = None if options.workloads is None else split(options.workloads)
    if names is not None and not names:
        raise InvalidParameter("workloads", f"is empty; choose from {', '.join(WORKLOADS)}")
    each = options.per_workload
    if options.prompts is not None:
        return from_file(options.prompts, names, each or (PER_WORKLOAD if options.quick else None))
    names = names or packaged_workloads(options)
    alike = max(len(names) - 1, 1)  # conversations of several turns make no group with others
    return shipped(names, each or max(PER_WORKLOAD, -(-most * MIN_PAIRS // alike)))


def packaged_workloads(options: MeasureOptions) -> list[str]:
    """Return the packaged workloads of a run; one of several turns needs the chat template."""
    names = QUICK_WORKLOADS if options.quick else USUAL_WORKLOADS
    return [name for name in names if not (options.raw and name == "multi-turn")]


def choose_folder(out: Path | None, model: str, home: str = "paceline-bench", files: Sequence[str] = FILES) -> Path:
    """Choose the folder for the files and check that it can be written; `print_and_save` creates it."""
    slug = re.sub(r"[^\w.-]+", "-", Path(model).name) or "model"
    folder = out or Path(home) / f"{slug}-{time.strftime('%Y%m%d-%H%M%S')}"
    for name in files:
        if (folder / name).exists():
            raise InvalidParameter("out", f"{folder} already holds {name}; choose another folder, or remove it")
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:  # write a file: permission bits do not show full disks or read-only file systems
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"results")
    except OSError as error:
        raise InvalidParameter("out", f"cannot write to {folder}: {error.strerror}; choose another folder") from error
    finally:
        for path in missing:
            with suppress(OSError):
                path.rmdir()
    return folder


def refuse_idle_flags(context: typer.Context, idle: Sequence[str], purpose: str) -> None:
    """Refuse flags that would have no effect."""
    for name in idle:
        if _on_command_line(context, name):
            or_else = ", or give --endpoint" if purpose == "servers" else ""
            raise InvalidParameter(name, f"is for {purpose} only; leave it out{or_else}")


# -- what comes out


def show(results: Results, *, as_json: bool) -> None:
    if as_json:
        print_json(results.to_json())
    else:
        from paceline.cli.bench.tables import print_results  # rich takes a while

        print_results(results)


def save_results(results: Results, folder: Path) -> list[Path]:
    from paceline.bench.report import page

    files = [folder / name for name in FILES]
    results.save(files[0])
    page.write(results, files[1])
    return files


def says_something(results: Results) -> bool:
    """Return whether the run gave a figure; an endpoint without a baseline has no speed-up."""
    return any(cell.speedup is not None or (results.endpoint and cell.tokens_per_s) for cell in results.cells)
