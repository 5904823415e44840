"""`paceline advise`: whether to draft on this machine with these prompts, how, and up to how many requests at once.

Everything that can be refused is refused before the model is loaded. If a run ends early, the results until then are
printed and written, with a list of what is missing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from paceline.advisor.advice import FILES, Advice
from paceline.advisor.halves import check_halves, halves
from paceline.bench.grid import concurrencies
from paceline.bench.prompts import QUICK_WORKLOADS, WORKLOADS, Prompt, from_file, shipped
from paceline.bench.runner import Plan
from paceline.cli import flags
from paceline.cli.bench.command import MAX_TOKENS, QUICK_MAX_TOKENS, check_sampling, choose_folder, settings_of
from paceline.cli.flags import flag
from paceline.cli.output import print_json, print_note
from paceline.cli.progress import live
from paceline.errors import InvalidParameter

CONCURRENCY, QUICK_CONCURRENCY = "1,4,16", "1,4"
PER_WORKLOAD, QUICK_PROMPTS = 6, 40


def advise(
    model: flags.Model = "smollm2",
    prompts: flags.Prompts = None,
    concurrency: Annotated[
        str | None,
        flag("--concurrency", help=f"Numbers of requests at once to measure; unset: {CONCURRENCY}.", metavar="N,N"),
    ] = None,
    draft_model: flags.DraftModel = None,
    max_tokens: flags.MaxTokens = None,
    temperature: flags.Temperature = 0.0,
    traffic: Annotated[
        str | None,
        flag(
            "--traffic",
            help="Count the machines that serve this traffic, with commas between: rate=2 (requests a second), "
            "prompt=200 and answer=100 (tokens), ttft=1 and inter_token=0.1 (limits of p99, in seconds).",
            metavar="NAME=N,...",
        ),
    ] = None,
    price: Annotated[float | None, flag("--price", help="Price of a machine for an hour; needs --traffic.")] = None,
    seed: Annotated[int, flag("--seed", help="Seed of the order of the prompts and of sampling.")] = 0,
    out: flags.Out = None,
    quick: flags.Quick = False,
    raw: flags.Raw = False,
    dtype: flags.Dtype = "auto",
    device: flags.Device = "auto",
    threads: flags.Threads = None,
    json: flags.Json = False,
) -> int:
    """Find out whether drafting pays here, with which method and k: chosen on half the prompts, checked on the rest."""
    options = {"dtype": dtype, "device": device, "threads": threads}
    if traffic is not None:
        from paceline.cli.advise.capacity import advise_traffic, check

        others = {"concurrency": concurrency, "max-tokens": max_tokens, "seed": seed, "out": out}
        wanted = check(traffic, price, others)
        return advise_traffic(
            model,
            wanted,
            price=price,
            prompts=prompts,
            draft_models=draft_model or [],
            temperature=temperature,
            quick=quick,
            raw=raw,
            as_json=json,
            options=options,
        )
    if price is not None:
        raise InvalidParameter("price", "has no meaning without --traffic; leave it out")
    levels = sorted(concurrencies(concurrency or (QUICK_CONCURRENCY if quick else CONCURRENCY)))
    if max_tokens is None:
        max_tokens = QUICK_MAX_TOKENS if quick else MAX_TOKENS
    check_sampling(temperature, str(seed), max_tokens)
    plan = Plan(concurrencies=levels, max_tokens=max_tokens, temperature=temperature, seed=seed)
    asked = choose_prompts(prompts, quick=quick, raw=raw, most=max(levels))
    check_halves(halves(asked), levels, max_tokens)
    folder = choose_folder(out, model, "paceline-advice", FILES)
    settings = {**settings_of(plan, prompts, asked), "draft_models": draft_model or [], "quick": quick}
    advice, stopped = run(model, {"raw": raw, **options}, asked, plan, settings)
    finish(advice, folder, as_json=json)
    if isinstance(stopped, KeyboardInterrupt):
        print_note(f"interrupted; missing: {', '.join(advice.missing)}")
        return 130
    if stopped is not None:
        raise stopped
    return 0


def run(
    name: str, options: dict[str, Any], prompts: list[Prompt], plan: Plan, settings: dict[str, Any]
) -> tuple[Advice, BaseException | None]:
    with live() as bar:
        bar.stage("starting")
        from paceline.advisor.advise import LENGTHS, QUICK_LENGTHS, Advisor
        from paceline.advisor.machine import Machine

        subject = Machine(name, draft_models=settings["draft_models"], progress=bar.load, **options)
        for draft_model, why in subject.refused.items():
            print_note(f"going on without {draft_model}: {why}")
        subject.check(prompts, plan.max_tokens)
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
    from paceline.cli.advise.words import print_advice

    if as_json:
        print_json(advice.to_json())
    else:
        print_advice(advice)
    try:
        written = advice.save(folder)
    except OSError as error:
        raise InvalidParameter("out", f"the advice could not be written to {folder}: {error.strerror}") from error
    print_note(f"written to {folder}: {', '.join(path.name for path in written)}")
