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
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.bench.grid import concurrencies, split
from paceline.bench.prompts import QUICK_WORKLOADS, WORKLOADS, Prompt, from_file, shipped
from paceline.bench.runner import Plan
from paceline.cli import flags
from paceline.cli.flags import flag
from paceline.cli.output import print_json, print_note
from paceline.cli.progress import live
from paceline.errors import InvalidParameter

if TYPE_CHECKING:
    from paceline.bench.results import Results

PER_WORKLOAD = 5
MAX_TOKENS, QUICK_MAX_TOKENS = 64, 48
ENGINE = ("draft_model", "drafter", "dtype", "device", "threads", "raw")
OURS = ("methods", "k", *ENGINE)  # flags that shape our own engines
THEIRS = ("baseline_endpoint", "api_key", "timeout", "no_counters")  # flags for servers
FILES = ("results.json", "report.html")
Text = str | None


def bench(
    context: typer.Context,
    model: Annotated[
        Text,
        typer.Argument(help="Alias, folder, .gguf file or hub id; with --endpoint: its name there.", metavar="MODEL"),
    ] = None,
    methods: Annotated[
        Text,
        flag("--methods", help="Methods to measure, with commas between; plain decoding always runs.", metavar="NAMES"),
    ] = None,
    k: Annotated[
        Text, flag("--k", help="Numbers of tokens drafted ahead, each measured by itself.", metavar="N,N|auto")
    ] = None,
    concurrency: Annotated[
        str, flag("--concurrency", help="Numbers of requests at once, each measured by itself.", metavar="N,N")
    ] = "1",
    prompts: flags.Prompts = None,
    workloads: Annotated[
        Text,
        flag("--workloads", help=f"Use only some of {', '.join(WORKLOADS)}, or of those in FILE.", metavar="NAMES"),
    ] = None,
    per_workload: Annotated[
        int | None,
        flag(
            "--per-workload",
            help="Prompts to use of each workload; unset: 5 of the packaged ones, all of FILE.",
            min=1,
            metavar="N",
        ),
    ] = None,
    max_tokens: flags.MaxTokens = None,
    temperature: flags.Temperature = 0.0,
    seed: Annotated[
        str,
        flag(
            "--seed",
            help="Seed of the order of the prompts and of sampling; none: sampling is unseeded.",
            metavar="N|none",
        ),
    ] = "0",
    out: flags.Out = None,
    quick: flags.Quick = False,
    raw: flags.Raw = False,
    draft_model: flags.DraftModel = None,
    drafter: flags.Drafter = None,
    dtype: flags.Dtype = "auto",
    device: flags.Device = "auto",
    threads: flags.Threads = None,
    endpoint: Annotated[Text, flag("--endpoint", help="Measure this OpenAI-compatible server.", metavar="URL")] = None,
    baseline_endpoint: Annotated[
        Text, flag("--baseline-endpoint", help="The same server without speculation, to compare with.", metavar="URL")
    ] = None,
    api_key: Annotated[
        Text, flag("--api-key", help="Key of the server.", metavar="KEY", envvar="OPENAI_API_KEY")
    ] = None,
    timeout: Annotated[float, flag("--timeout", help="Seconds a server may take for an answer.")] = 300.0,
    no_counters: Annotated[
        bool, flag("--no-counters", help="Do not read the server's /metrics: others use it too.")
    ] = False,
    compare: Annotated[
        tuple[Path, Path] | None, flag("--compare", help="Measure nothing: compare two results.json.", metavar="A B")
    ] = None,
    json: flags.Json = False,
) -> int:
    """Measure what drafting gives: speed-up over plain decoding with its interval, acceptance, latency."""
    if compare:
        return compare_results(context, *compare)
    given = context.params
    refuse_idle_flags(context, OURS if endpoint else THEIRS, "our own engines" if endpoint else "servers")
    levels = concurrencies(concurrency)
    if max_tokens is None:
        max_tokens = QUICK_MAX_TOKENS if quick else MAX_TOKENS
    plan = Plan(
        concurrencies=levels,
        max_tokens=max_tokens,
        temperature=temperature,
        seed=check_sampling(temperature, seed, max_tokens),
    )
    asked = choose_prompts(prompts, workloads, per_workload, max(levels), quick=quick, raw=raw)
    folder = choose_folder(out, model or ("endpoint" if endpoint else "smollm2"))
    settings = {**settings_of(plan, prompts, asked), "command": command_of(context)}
    results, stopped = (bench_endpoint if endpoint else bench_engines)(given, asked, plan, settings)
    finish(results, folder, as_json=json)
    if isinstance(stopped, KeyboardInterrupt):
        print_note("interrupted: the figures are of what was measured until then")
        return 130
    if stopped is not None:
        raise stopped
    return 0 if says_something(results) else 1


def command_of(context: typer.Context) -> str:
    """The command line to repeat the run, without the server's key."""
    words = ["paceline", str(context.info_name)]
    for parameter in context.command.params:
        name, value = str(parameter.name), context.params.get(str(parameter.name))
        if name != "api_key" and _given(context, name):
            flag_name = [] if parameter.param_type_name == "argument" else [max(parameter.opts, key=len)]
            for each in value if isinstance(value, list) else [value]:
                words += [*flag_name, *([] if each is True else [str(each)])]
    return shlex.join(words)


def _given(context: typer.Context, name: str) -> bool:
    """On the command line; a key from the environment is no flag."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def compare_results(context: typer.Context, *paths: Path) -> int:
    from paceline.bench.results import Results
    from paceline.cli.bench.tables import compared, print_comparison

    idle = [name for name in context.params if name not in ("compare", "json")]
    refuse_idle_flags(context, idle, "runs that measure")
    one, other = (Results.load(path / FILES[0] if path.is_dir() else path) for path in paths)
    if context.params["json"]:
        print_json({"cells": compared(one, other)})
    else:
        print_comparison(one, other)
    return 0


def settings_of(plan: Plan, file: Path | None, prompts: Sequence[Prompt]) -> dict[str, Any]:
    names = ", ".join(dict.fromkeys(prompt.workload for prompt in prompts))
    used = {"concurrency": plan.concurrencies, "max_tokens": plan.max_tokens, "temperature": plan.temperature}
    return {**used, "seed": plan.seed, "prompts": str(file) if file else names, "num_prompts": len(prompts)}


def bench_engines(
    given: dict[str, Any], prompts: list[Prompt], plan: Plan, settings: dict[str, Any]
) -> tuple[Results, BaseException | None]:
    with live() as bar:
        bar.stage("starting")
        from paceline.bench.command import run

        options = {name: given[name] for name in OURS}
        model = given["model"] or "smollm2"
        return run(model, prompts, plan, settings, on_load=bar.load, on_progress=bar.work, **options)


def bench_endpoint(
    given: dict[str, Any], prompts: list[Prompt], plan: Plan, settings: dict[str, Any]
) -> tuple[Results, BaseException | None]:
    from paceline.bench.endpoint import measure
    from paceline.bench.groups import check_enough

    if given["baseline_endpoint"] is not None:
        check_enough(prompts, plan.concurrencies, plan.max_tokens)
    with live() as bar:
        bar.stage("connecting")
        return measure(
            given["endpoint"],
            prompts,
            plan,
            settings,
            model=given["model"],
            api_key=given["api_key"],
            timeout_s=given["timeout"],
            baseline_url=given["baseline_endpoint"],
            counters=not given["no_counters"],
            on_progress=bar.work,
        )


# -- what can be refused before anything is loaded


def check_sampling(temperature: float, seed: str, max_tokens: int) -> int | None:
    """The seed as a number, or None for requests without one."""
    from paceline.sampling_params import SamplingParams

    try:
        number = None if seed == "none" else int(seed)
    except ValueError:
        raise InvalidParameter("seed", f"must be a whole number, or none; got {seed!r}") from None
    SamplingParams(temperature=temperature, seed=number, max_tokens=max_tokens)
    return number


def choose_prompts(
    file: Path | None, names: str | None, per_workload: int | None, most: int, *, quick: bool, raw: bool
) -> list[Prompt]:
    """The user's, or ours: as many as figures at the highest concurrency take."""
    from paceline.bench.intervals import MIN_PAIRS

    wanted = None if names is None else split(names)
    if wanted is not None and not wanted:
        raise InvalidParameter("workloads", f"is empty; choose from {', '.join(WORKLOADS)}")
    if file is not None:
        return from_file(file, wanted, per_workload or (PER_WORKLOAD if quick else None))
    if wanted is None:
        wanted = [name for name in (QUICK_WORKLOADS if quick else WORKLOADS) if not (raw and name == "multi-turn")]
    if per_workload is None:
        per_workload = max(PER_WORKLOAD, -(-most * MIN_PAIRS // len(wanted)))
    return shipped(wanted, per_workload)


def choose_folder(out: Path | None, model: str, home: str = "paceline-bench", files: Sequence[str] = FILES) -> Path:
    """The folder for the files: created when there is something to write, but checked now to be writable."""
    slug = re.sub(r"[^\w.-]+", "-", Path(model).name) or "model"
    folder = out or Path(home) / f"{slug}-{time.strftime('%Y%m%d-%H%M%S')}"
    for name in files:
        if (folder / name).exists():
            raise InvalidParameter("out", f"{folder} already holds {name}; choose another folder, or remove it")
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:  # write a file: permission bits do not show full disks or read-only file systems
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"results")
    except OSError as error:
        raise InvalidParameter("out", f"cannot write to {folder}: {error.strerror}; choose another folder") from error
    finally:
        for path in made:
            with suppress(OSError):
                path.rmdir()
    return folder


def refuse_idle_flags(context: typer.Context, idle: Sequence[str], purpose: str) -> None:
    """A flag that would have no effect is refused."""
    for name in idle:
        if _given(context, name):
            or_else = ", or give --endpoint" if purpose == "servers" else ""
            raise InvalidParameter(name, f"is for {purpose} only; leave it out{or_else}")


# -- what comes out


def finish(results: Results, folder: Path, *, as_json: bool) -> None:
    """Print first: the figures must be seen even if the disk is full."""
    from paceline.bench.report import page as report
    from paceline.cli.bench.tables import print_results

    if as_json:
        print_json(results.to_json())
    else:
        print_results(results)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        results.save(folder / FILES[0])
        report.write(results, folder / FILES[1])
    except OSError as error:
        raise InvalidParameter("out", f"the results could not be written to {folder}: {error.strerror}") from error
    print_note(f"written: {folder / FILES[0]} and {FILES[1]} beside it")


def says_something(results: Results) -> bool:
    """Whether the run gave a figure; an endpoint alone has no speed-up."""
    return any(cell.speedup is not None or (results.endpoint and cell.tokens_per_s) for cell in results.cells)
