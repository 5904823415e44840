"""`paceline advise`: whether to draft on this machine with these prompts, how, and up to how many requests at once.

Everything that can be refused is refused before the model is loaded. If a run ends early, the results until then are
printed and written, with a list of what is missing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.advisor.advice import FILES, Advice
from paceline.advisor.halves import check_halves, halves
from paceline.bench.grid import concurrencies
from paceline.bench.prompts import QUICK_WORKLOADS, WORKLOADS, Prompt, from_file, shipped
from paceline.cli.bench import check_sampling, choose_folder
from paceline.cli.output import print_json, print_note
from paceline.cli.progress import live
from paceline.errors import InvalidParameter

CONCURRENCY, QUICK_CONCURRENCY = "1,4,16", "1,4"
MAX_TOKENS, QUICK_MAX_TOKENS = 64, 48
PER_WORKLOAD, QUICK_PROMPTS = 6, 40


def advise(
    model: Annotated[
        str | None, typer.Argument(help="Alias, folder, .gguf file or hub id; smollm2 if unset.", metavar="MODEL")
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option("--prompts", help="Your own: jsonl, or text with one a line; ours if unset.", metavar="FILE"),
    ] = None,
    concurrency: Annotated[
        str | None,
        typer.Option("--concurrency", help=f"Requests at once to advise for; {CONCURRENCY} if unset.", metavar="N,N"),
    ] = None,
    draft_model: Annotated[
        list[str] | None,
        typer.Option("--draft-model", help="A smaller model that might draft; repeatable.", metavar="MODEL"),
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", help=f"Of each answer; {MAX_TOKENS} if unset.")
    ] = None,
    temperature: Annotated[float, typer.Option("--temperature", help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option("--seed", help="Of the order, and of sampling.")] = 0,
    out: Annotated[
        Path | None, typer.Option("--out", help="Where advice.json and the settings go.", metavar="FOLDER")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Less of everything: some five minutes on two cores.")] = False,
    raw: Annotated[bool, typer.Option("--raw", help="Continue prompts as text, without the chat template.")] = False,
    dtype: Annotated[str, typer.Option("--dtype", help="Weights.", metavar="auto|float32|bfloat16")] = "auto",
    device: Annotated[str, typer.Option("--device", help="Where to run.", metavar="auto|cpu|cuda")] = "auto",
    threads: Annotated[int | None, typer.Option("--threads", help="CPU threads; all usable cores if unset.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the advice as one JSON object and nothing else.")] = False,
) -> int:
    """Find out whether drafting pays here, with which method and k: chosen on half the prompts, checked on the rest."""
    levels = sorted(concurrencies(concurrency or (QUICK_CONCURRENCY if quick else CONCURRENCY)))
    if max_tokens is None:
        max_tokens = QUICK_MAX_TOKENS if quick else MAX_TOKENS
    check_sampling(temperature, str(seed), max_tokens)
    asked = choose_prompts(prompts, quick=quick, raw=raw, most=max(levels))
    check_halves(halves(asked), levels, max_tokens)
    name = model or "smollm2"
    folder = choose_folder(out, name, "paceline-advice", FILES)
    settings: dict[str, Any] = {
        "concurrency": levels,
        "max_tokens": max_tokens,
        "temperature": temperature,
        "seed": seed,
        "prompts": str(prompts) if prompts else ", ".join(dict.fromkeys(prompt.workload for prompt in asked)),
        "num_prompts": len(asked),
        "draft_models": draft_model or [],
        "quick": quick,
    }
    options = {"raw": raw, "dtype": dtype, "device": device, "threads": threads}
    advice, stopped = run(name, draft_model or [], options, asked, settings)
    finish(advice, folder, as_json=json)
    if isinstance(stopped, KeyboardInterrupt):
        print_note(f"interrupted; missing: {', '.join(advice.missing)}")
        return 130
    if stopped is not None:
        raise stopped
    return 0


def run(
    name: str, draft_models: list[str], options: dict[str, Any], prompts: list[Prompt], settings: dict[str, Any]
) -> tuple[Advice, BaseException | None]:
    with live() as bar:
        bar.stage("starting")
        from paceline.advisor.advise import LENGTHS, QUICK_LENGTHS, Advisor
        from paceline.advisor.machine import Machine
        from paceline.bench.runner import Plan

        subject = Machine(name, draft_models=draft_models, progress=bar.load, **options)
        for draft_model, why in subject.refused.items():
            print_note(f"going on without {draft_model}: {why}")
        subject.check(prompts, settings["max_tokens"])
        plan = Plan(
            concurrencies=settings["concurrency"],
            max_tokens=settings["max_tokens"],
            temperature=settings["temperature"],
            seed=settings["seed"],
        )
        advice = Advice(model=name, settings=settings, where=subject.where(), refused=subject.refused)
        quick = settings["quick"]
        lengths = QUICK_LENGTHS if quick else LENGTHS
        stopped = Advisor(subject, prompts, plan, advice, bar.work, lengths, rival=not quick).run()
    if stopped is not None and (advice.cost is None or isinstance(stopped, InvalidParameter)):
        if isinstance(stopped, KeyboardInterrupt):
            print_note(f"stopped before there was a result; missing: {', '.join(advice.missing)}")
        raise stopped
    return advice, stopped


# -- what can be refused before anything is loaded


def choose_prompts(file: Path | None, *, quick: bool, raw: bool, most: int) -> list[Prompt]:
    """The user's prompts, or the package's; a quick run takes as many as the halves need, spread over the file."""
    if file is not None:
        prompts = from_file(file)
        return prompts[:: max(len(prompts) // max(QUICK_PROMPTS, 2 * most), 1)] if quick else prompts
    names = [name for name in (QUICK_WORKLOADS if quick else WORKLOADS) if not (raw and name == "multi-turn")]
    wanted = QUICK_PROMPTS if quick else PER_WORKLOAD * len(names)
    return shipped(names, -(-max(wanted, 2 * most) // len(names)))


# -- what comes out


def finish(advice: Advice, folder: Path, *, as_json: bool) -> None:
    """Print first: the advice must be seen even if the disk is full."""
    from paceline.cli.advise_words import print_advice

    if as_json:
        print_json(advice.to_json())
    else:
        print_advice(advice)
    try:
        written = advice.save(folder)
    except OSError as error:
        raise InvalidParameter("out", f"the advice could not be written to {folder}: {error.strerror}") from error
    print_note(f"written to {folder}: {', '.join(path.name for path in written)}")
