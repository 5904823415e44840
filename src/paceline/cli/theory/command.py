"""`paceline theory`: the speed-up of drafting by the formulas of docs/theory.md, without running a model."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.cli.flags import Json, with_options
from paceline.cli.output import print_json, print_note
from paceline.cli.theory.input import read
from paceline.theory.table import best_tree_row, rows

ACCEPTANCE, COST, BATCH, MEMORY = (
    "Acceptance (one of --alpha, --acceptance, --siblings)",
    "Cost, in plain passes",
    "Batch roofline (gives the verification cost)",
    "Memory",
)


def _flag(name: str, help: str, metavar: str | None = None, panel: str | None = None) -> Any:
    return typer.Option(name, help=help, metavar=metavar, rich_help_panel=panel, show_default=False)


@dataclass(frozen=True, kw_only=True)
class TheoryOptions:
    alpha: Annotated[float | None, _flag("--alpha", "How often a drafted token is accepted.", "A", ACCEPTANCE)] = None
    acceptance: Annotated[
        str | None,
        _flag(
            "--acceptance",
            "Share of drafts accepted up to position 1, up to position 2, and so on.",
            "A1,A2,...",
            ACCEPTANCE,
        ),
    ] = None
    conditional: Annotated[
        bool,
        _flag(
            "--conditional",
            "Take --acceptance as shares of those whose earlier positions were accepted.",
            panel=ACCEPTANCE,
        ),
    ] = False
    siblings: Annotated[
        str | None,
        _flag("--siblings", "How often the first, the second, ... guess is right; for trees.", "A1,A2,...", ACCEPTANCE),
    ] = None
    k: Annotated[int | None, _flag("--k", "Tokens drafted ahead; unset: the best k.", "N")] = None
    draft_cost: Annotated[float | None, _flag("--draft-cost", "Cost of one drafted token; unset: 0.", "C", COST)] = None
    verify_cost: Annotated[
        str | None,
        _flag(
            "--verify-cost", "Cost of a verifying pass, at every k or at k = 1, 2, ...; unset: 1.", "V|V1,V2,...", COST
        ),
    ] = None
    bandwidth: Annotated[float | None, _flag("--bandwidth", "Bandwidth of the device's memory.", "GB/s", BATCH)] = None
    tflops: Annotated[float | None, _flag("--tflops", "Speed of the device's arithmetic.", "TFLOP/s", BATCH)] = None
    parameters: Annotated[
        str | None, _flag("--parameters", "Parameters of the target, such as 8B, 135M or 8e9.", "N", BATCH)
    ] = None
    bytes_per_parameter: Annotated[
        float | None, _flag("--bytes-per-parameter", "Bytes of a parameter; unset: 2, which is bf16.", "N", BATCH)
    ] = None
    batch: Annotated[int | None, _flag("--batch", "Sequences decoded together; unset: 1.", "N", BATCH)] = None
    context: Annotated[
        int | None, _flag("--context", "Tokens in the cache of each sequence; unset: 0.", "N", BATCH)
    ] = None
    kv_bytes: Annotated[float | None, _flag("--kv-bytes", "Bytes of a token's keys and values.", "N", BATCH)] = None
    memory: Annotated[float | None, _flag("--memory", "Memory of the device.", "GB", MEMORY)] = None
    draft_parameters: Annotated[
        str | None,
        _flag("--draft-parameters", "Parameters of the drafter; its cost too, where that is unset.", "N", MEMORY),
    ] = None
    draft_kv_bytes: Annotated[
        float | None, _flag("--draft-kv-bytes", "Bytes of a token's keys and values in the drafter.", "N", MEMORY)
    ] = None
    plot: Annotated[Path | None, _flag("--plot", "Draw the curves into a .png or .svg.", "FILE")] = None
    json: Json = False


@with_options
def theory(*, options: TheoryOptions) -> None:
    """Compute the speed-up of drafting by the formulas."""
    asked = read(vars(options))
    case, roofline = asked.case, asked.case.roofline
    if options.plot is not None:
        from paceline.theory.plot import draw

        draw(case, asked.k, options.plot, batch=asked.batch)
    if options.json:
        table = rows(case)
        print_json(
            {
                "draft_cost": case.draft_cost,
                "k": asdict(table[asked.k - 1]) if asked.k else None,
                "best": {**asdict(case.best), "is_limit": case.limited},
                "best_tree": None if (tree := best_tree_row(table)) is None else asdict(tree),
                "rows": [asdict(each) for each in table],
                "roofline": roofline
                and {**asdict(roofline), "ridge": roofline.ridge(asked.batch), "batch": asked.batch},
                "memory": asked.memory and {**asdict(asked.memory), "lost_share": asked.memory.lost_share},
                "plot": None if options.plot is None else str(options.plot),
            }
        )
        return
    from paceline.cli.theory.table import print_case  # rich takes a while

    print_case(case, asked.k, asked.memory, asked.batch)
    if options.plot is not None:
        print_note(f"curves in {options.plot}")
