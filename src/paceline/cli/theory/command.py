"""`paceline theory`: the speed-up of drafting by the formulas of docs/theory.md, without running a model."""

from __future__ import annotations

import functools
from dataclasses import asdict, dataclass
from pathlib import Path

from paceline.cli.flags import Json, flag, with_options
from paceline.cli.output import print_json, print_note
from paceline.cli.theory.input import read
from paceline.theory.table import best_tree_row, rows

_plain = functools.partial(flag, show_default=False)
_acceptance = functools.partial(_plain, rich_help_panel="Acceptance (one of --alpha, --acceptance, --siblings)")
_cost = functools.partial(_plain, rich_help_panel="Cost, in plain passes")
_batch = functools.partial(_plain, rich_help_panel="Batch roofline (gives the verification cost)")
_memory = functools.partial(_plain, rich_help_panel="Memory")


@dataclass(frozen=True, kw_only=True)
class TheoryOptions:
    alpha: float | None = _acceptance(None, "How often a drafted token is accepted.", "A")
    acceptance: str | None = _acceptance(
        None, "Share of drafts accepted up to position 1, up to position 2, and so on.", "A1,A2,..."
    )
    conditional: bool = _acceptance(
        False, "Take --acceptance as shares of those whose earlier positions were accepted."
    )
    siblings: str | None = _acceptance(
        None, "How often the first, the second, ... guess is right; for trees.", "A1,A2,..."
    )
    k: int | None = _plain(None, "Tokens drafted ahead; unset: the best k.", "N")
    draft_cost: float | None = _cost(None, "Cost of one drafted token; unset: 0.", "C")
    verify_cost: str | None = _cost(
        None, "Cost of a verifying pass, at every k or at k = 1, 2, ...; unset: 1.", "V|V1,V2,..."
    )
    bandwidth: float | None = _batch(None, "Bandwidth of the device's memory.", "GB/s")
    tflops: float | None = _batch(None, "Speed of the device's arithmetic.", "TFLOP/s")
    parameters: str | None = _batch(None, "Parameters of the target, such as 8B, 135M or 8e9.", "N")
    bytes_per_parameter: float | None = _batch(None, "Bytes of a parameter; unset: 2, which is bf16.", "N")
    batch: int | None = _batch(None, "Sequences decoded together; unset: 1.", "N")
    context: int | None = _batch(None, "Tokens in the cache of each sequence; unset: 0.", "N")
    kv_bytes: float | None = _batch(None, "Bytes of a token's keys and values.", "N")
    memory: float | None = _memory(None, "Memory of the device.", "GB")
    draft_parameters: str | None = _memory(None, "Parameters of the drafter; its cost too, where that is unset.", "N")
    draft_kv_bytes: float | None = _memory(None, "Bytes of a token's keys and values in the drafter.", "N")
    plot: Path | None = _plain(None, "Draw the curves into a .png or .svg.", "FILE")
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
