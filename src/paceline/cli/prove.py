"""`paceline prove`: checks that the output is unchanged, on this model and this machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.bench.grid import split
from paceline.cli import flags
from paceline.cli.flags import ModelOptions, flag, with_options
from paceline.cli.output import print_json, print_note
from paceline.cli.progress import progress
from paceline.config import AUTO
from paceline.drafters.method_names import unknown_method
from paceline.drafters.methods import METHODS
from paceline.errors import InvalidParameter

if TYPE_CHECKING:
    from paceline.llm import LLM
    from paceline.prove.report import Report

STYLES = {"pass": "green", "fail": "bold red", "not exercised": "yellow"}


@dataclass(frozen=True, kw_only=True)
class ProveOptions(ModelOptions):
    methods: str | None = flag(None, "Methods to check, with commas between; unset: all that are loaded.", "NAMES")
    draft_model: flags.DraftModel = None
    drafter: flags.Drafter = None
    prompts: int | None = flag(None, "How many prompts to use; unset: 12, with --quick 4.", "N", min=1)
    quick: flags.Quick = False
    inject: str | None = flag(None, "Plant a fault that must be found: bias, rollback, bonus or coins.", "NAME")
    seed: int = flag(0, "Seed of the seeded requests and of the replays.", "N", min=0)
    json: flags.Json = False


@with_options
def prove(*, options: ProveOptions) -> int:
    """Check that drafting does not change the model's output."""
    names = split(options.methods or "")
    for name in names:
        if name not in METHODS:  # before the model is loaded
            raise InvalidParameter("methods", unknown_method(name, list(METHODS)))
    with progress(plain=False) as display:
        if display is not None:
            display(f"loading {options.model}", 0, None)
        from paceline.llm import LLM
        from paceline.prove import inject as faults
        from paceline.prove.prover import prove as run

        faults.validate(options.inject)
        llm = LLM(
            options.model,
            **options.load_options,
            method=AUTO,
            draft_model=options.draft_model,
            drafter=options.drafter,
            prefix_caching=False,
            progress=display,
        )
        report = run(
            llm,
            methods=names,
            num_prompts=options.prompts,
            quick=options.quick,
            seed=options.seed,
            fault=options.inject,
            on_check=lambda name: display(f"proving {name}", 0, None) if display is not None else None,
        )
    if options.json:
        print_json(report.as_dict())
    else:
        print_report(report, llm)
    return 0 if report.passed else 1


def print_report(report: Report, llm: LLM) -> None:
    from rich.text import Text

    from paceline.cli.table import print_table
    from paceline.prove.g_test import FALSE_ALARM, POWER

    rows: list[list[str | Text]] = []
    for check in report.checks:
        result, detectable, detail = report.result(check), report.detectable(check), report.detail(check)
        seen = [str(count) for count in (check.seen.accepts, check.seen.rejects, check.seen.bonus)]
        outcome = Text(result + (f": {detail}" if detail else ""), style=STYLES[result])
        rows.append([check.name, check.compared, *seen, "" if detectable is None else f"{detectable:.3f}", outcome])
    headings = ("check", "compared", "accepts", "rejects", "bonus", "detects TV", "result")
    title = f"{llm.name} · {llm.device_name} · {llm.dtype_name} · {llm.kernels_name}"
    print_table(title, headings, rows, left="compared result")
    tests = sum(len(check.tests) for check in report.checks)
    print_note(
        f"{tests} G-tests: together they raise a false alarm with probability {FALSE_ALARM:.0e} at most, "
        f"and find the total variation given, or more, with probability {POWER}"
    )
    failed = [check.name for check in report.checks if report.result(check) != "pass"]
    print_note(f"not proven: {', '.join(failed)}" if failed else f"proven in {report.seconds:.0f} s")
