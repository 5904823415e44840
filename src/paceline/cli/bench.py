"""`paceline bench`: the speed-up of each method on this model, on this machine, on the user's own prompts.

Everything that can be refused is refused before the model is loaded, the folder for the results included. If a run ends
early, the table is printed and the files are written from what was measured.
"""

from __future__ import annotations

import os
import re
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
from paceline.cli.output import print_json, print_note
from paceline.cli.progress import live
from paceline.errors import InvalidParameter

if TYPE_CHECKING:
    from paceline.bench.results import Results

PER_WORKLOAD = 5
MAX_TOKENS, QUICK_MAX_TOKENS = 64, 48
OURS = (
    "methods",
    "k",
    "draft_model",
    "drafter",
    "dtype",
    "device",
    "threads",
    "raw",
)  # flags that shape our own engines
THEIRS = ("baseline_endpoint", "api_key", "timeout", "no_counters")  # flags for servers
FILES = ("results.json", "report.html")


def flag(name: str, help: str, metavar: str | None = None, **more: Any) -> Any:
    return typer.Option(name, help=help, metavar=metavar, **more)


MODEL = typer.Argument(help="Alias, folder, .gguf file or hub id; smollm2 if unset.", metavar="MODEL")
Text = str | None


def bench(
    model: Annotated[Text, MODEL] = None,
    methods: Annotated[
        Text, flag("--methods", "Comma-separated; plain decoding (none) always runs too.", "NAMES")
    ] = None,
    k: Annotated[Text, flag("--k", "Tokens drafted ahead, each a run of its own; auto chooses.", "N,N|auto")] = None,
    concurrency: Annotated[str, flag("--concurrency", "Requests at once, each a run of its own.", "N,N")] = "1",
    prompts: Annotated[Path | None, flag("--prompts", "Your own: jsonl, or text with one a line.", "FILE")] = None,
    workloads: Annotated[Text, flag("--workloads", f"Some of {', '.join(WORKLOADS)}, or of FILE's.", "NAMES")] = None,
    per_workload: Annotated[
        int | None, flag("--per-workload", "Prompts of each workload; 5 of ours, all of FILE's.", min=1)
    ] = None,
    max_tokens: Annotated[int | None, flag("--max-tokens", f"Of each answer; {MAX_TOKENS} if unset.")] = None,
    temperature: Annotated[float, flag("--temperature", "0 is greedy.")] = 0.0,
    seed: Annotated[str, flag("--seed", "Of the order, and of sampling unless none.", "N|none")] = "0",
    out: Annotated[Path | None, flag("--out", "Where results.json and report.html go.", "FOLDER")] = None,
    quick: Annotated[bool, flag("--quick", "Less of everything: two minutes on two cores.")] = False,
    raw: Annotated[bool, flag("--raw", "Continue prompts as text, without the chat template.")] = False,
    draft_model: Annotated[Text, flag("--draft-model", "For methods that need one, and for auto.", "MODEL")] = None,
    drafter: Annotated[
        Text, flag("--drafter", "Trained for this model: for methods that need one, auto.", "PATH")
    ] = None,
    dtype: Annotated[Text, flag("--dtype", "Weights; auto if unset.", "auto|float32|bfloat16")] = None,
    device: Annotated[Text, flag("--device", "Where to run; auto if unset.", "auto|cpu|cuda")] = None,
    threads: Annotated[int | None, flag("--threads", "CPU threads; all usable cores if unset.")] = None,
    endpoint: Annotated[Text, flag("--endpoint", "Bench this OpenAI-compatible server instead.", "URL")] = None,
    baseline_endpoint: Annotated[Text, flag("--baseline-endpoint", "The same without speculation.", "URL")] = None,
    api_key: Annotated[Text, flag("--api-key", "Of the server.", "KEY", envvar="OPENAI_API_KEY")] = None,
    timeout: Annotated[float | None, flag("--timeout", "Seconds a request may take; 300 if unset.")] = None,
    no_counters: Annotated[bool, flag("--no-counters", "Do not read /metrics: other clients use it too.")] = False,
    json: Annotated[bool, flag("--json", "Print the results as one JSON object and no table.")] = False,
) -> int:
    """Measure what drafting gives: speed-up over plain decoding with its interval, acceptance, latency."""
    flags = dict(locals())
    refuse_idle_flags(flags, given_to_server=endpoint is not None)
    levels = concurrencies(concurrency)
    if max_tokens is None:
        max_tokens = QUICK_MAX_TOKENS if quick else MAX_TOKENS
    chosen_seed = check_sampling(temperature, seed, max_tokens)
    asked = choose_prompts(prompts, workloads, per_workload, max(levels), quick=quick, raw=raw)
    folder = choose_folder(out, model or ("endpoint" if endpoint else "smollm2"))
    settings: dict[str, Any] = {
        "concurrency": levels,
        "max_tokens": max_tokens,
        "temperature": temperature,
        "seed": chosen_seed,
        "prompts": str(prompts) if prompts else ", ".join(dict.fromkeys(prompt.workload for prompt in asked)),
        "num_prompts": len(asked),
    }
    plan = Plan(concurrencies=levels, max_tokens=max_tokens, temperature=temperature, seed=chosen_seed)
    bench_one = bench_endpoint if endpoint is not None else bench_engines
    results, stopped = bench_one(flags, asked, plan, settings)
    finish(results, folder, as_json=json)
    if isinstance(stopped, KeyboardInterrupt):
        print_note("interrupted: the figures are of what was measured until then")
        return 130
    if stopped is not None:
        raise stopped
    return 0 if says_something(results) else 1


def bench_engines(
    flags: dict[str, Any], prompts: list[Prompt], plan: Plan, settings: dict[str, Any]
) -> tuple[Results, BaseException | None]:
    with live() as bar:
        bar.stage("starting")
        from paceline.bench.local import Wish, run

        wish = Wish(
            model=flags["model"] or "smollm2",
            dtype=flags["dtype"] or "auto",
            device=flags["device"] or "auto",
            **{name: flags[name] for name in ("methods", "k", "draft_model", "drafter", "threads", "raw")},
        )
        return run(wish, prompts, plan, settings, on_load=bar.load, on_progress=bar.work)


def bench_endpoint(
    flags: dict[str, Any], prompts: list[Prompt], plan: Plan, settings: dict[str, Any]
) -> tuple[Results, BaseException | None]:
    from paceline.bench.endpoint import measure
    from paceline.bench.groups import check_enough

    if flags["baseline_endpoint"] is not None:
        check_enough(prompts, plan.concurrencies, plan.max_tokens)
    with live() as bar:
        bar.stage("connecting")
        return measure(
            flags["endpoint"],
            prompts,
            plan,
            settings,
            model=flags["model"],
            api_key=flags["api_key"],
            timeout_s=300.0 if flags["timeout"] is None else flags["timeout"],
            baseline_url=flags["baseline_endpoint"],
            counters=not flags["no_counters"],
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
    from paceline.bench.statistics import MIN_PAIRS

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


def refuse_idle_flags(flags: dict[str, Any], *, given_to_server: bool) -> None:
    """A flag that would have no effect is refused. A key from the environment is no flag."""
    for name in OURS if given_to_server else THEIRS:
        if name == "api_key" and flags[name] == os.environ.get("OPENAI_API_KEY"):
            continue
        if flags[name] is not None and flags[name] is not False:
            why = "is for our own engines only" if given_to_server else "is for servers only"
            raise InvalidParameter(name, f"{why}; leave it out" + ("" if given_to_server else ", or give --endpoint"))


# -- what comes out


def finish(results: Results, folder: Path, *, as_json: bool) -> None:
    """Print first: the figures must be seen even if the disk is full."""
    from paceline.bench import report
    from paceline.cli.bench_table import print_results

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
