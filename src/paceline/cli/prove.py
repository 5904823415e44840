"""`paceline prove`: checks that the output is unchanged, on this model and this machine."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.output import print_json, print_note
from paceline.cli.progress import progress
from paceline.config import AUTO

if TYPE_CHECKING:
    from paceline.llm import LLM
    from paceline.prove.report import Report

STYLES = {"pass": "green", "fail": "bold red", "not exercised": "yellow"}


def prove(
    model: Annotated[
        str, typer.Option("--model", "-m", help="Alias, folder, .gguf file or hub id.", metavar="MODEL")
    ] = "smollm2",
    methods: Annotated[
        str | None, typer.Option("--methods", help="Comma-separated; all that are there if unset.", metavar="NAMES")
    ] = None,
    draft_model: Annotated[
        str | None, typer.Option("--draft-model", help="Prove draft-model too, with this one.", metavar="MODEL")
    ] = None,
    drafter: Annotated[
        str | None, typer.Option("--drafter", help="Prove the method of this trained drafter too.", metavar="PATH")
    ] = None,
    prompts: Annotated[int | None, typer.Option("--prompts", min=1, help="How many; 12, with --quick 4.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Less of everything, under a minute.")] = False,
    inject: Annotated[
        str | None,
        typer.Option(
            "--inject", help="Break one thing on purpose: it must be found.", metavar="bias|rollback|bonus|coins"
        ),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of seeded requests and of replays.")] = 0,
    dtype: Annotated[str, typer.Option("--dtype", help="Weights.", metavar="auto|float32|bfloat16")] = "auto",
    device: Annotated[str, typer.Option("--device", help="Where to run.", metavar="auto|cpu|cuda")] = "auto",
    activations: Annotated[
        str, typer.Option("--activations", help="The target's: int8 is another model.", metavar="float32|int8")
    ] = "float32",
    numerics: Annotated[
        str,
        typer.Option("--numerics", help="fast: near-ties that fall differently are reported.", metavar="exact|fast"),
    ] = "exact",
    threads: Annotated[int | None, typer.Option("--threads", help="CPU threads; all usable cores if unset.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> int:
    """Check that drafting does not change the model's output."""
    with progress(plain=False) as report:
        if report is not None:
            report(f"loading {model}", 0, None)
        from paceline.llm import LLM
        from paceline.prove import inject as faults
        from paceline.prove.prover import prove as run

        faults.check(inject)
        llm = LLM(
            model,
            dtype=dtype,
            device=device,
            numerics=numerics,
            activations=activations,
            threads=threads,
            method=AUTO,
            draft_model=draft_model,
            drafter=drafter,
            prefix_caching=False,
            progress=report,
        )
        outcome = run(
            llm,
            methods=[name.strip() for name in methods.split(",") if name.strip()] if methods else (),
            num_prompts=prompts,
            quick=quick,
            seed=seed,
            fault=inject,
            on_row=lambda name: report(f"proving {name}", 0, None) if report is not None else None,
        )
    if json:
        print_json(outcome.as_dict())
    else:
        print_table(outcome, llm)
    return 0 if outcome.passed else 1


def print_table(report: Report, llm: LLM) -> None:
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from paceline.prove.statistics import FALSE_ALARM, POWER

    console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    table = Table(box=SIMPLE, title=f"{llm.name} · {llm.device_name} · {llm.dtype_name} · {llm.kernels_name}")
    for heading, justify in (
        ("check", "left"),
        ("compared", "left"),
        ("accepts", "right"),
        ("rejects", "right"),
        ("bonus", "right"),
        ("detects TV", "right"),
        ("result", "left"),
    ):
        table.add_column(heading, justify=justify)  # type: ignore[arg-type]
    for row in report.rows:
        result, detectable, detail = report.result(row), report.detectable(row), report.detail(row)
        table.add_row(
            row.name,
            row.compared,
            str(row.seen.accepts),
            str(row.seen.rejects),
            str(row.seen.bonus),
            "" if detectable is None else f"{detectable:.3f}",
            Text(result + (f": {detail}" if detail else ""), style=STYLES[result]),
        )
    console.print(table)
    tests = sum(len(row.tests) for row in report.rows)
    print_note(
        f"{tests} G-tests: together they raise a false alarm with probability {FALSE_ALARM:.0e} at most, "
        f"and find the total variation given, or more, with probability {POWER}"
    )
    failed = [row.name for row in report.rows if report.result(row) != "pass"]
    print_note(f"not proven: {', '.join(failed)}" if failed else f"proven in {report.seconds:.0f} s")
