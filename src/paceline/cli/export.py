"""`paceline export`: a drafter's folder in the layout of another engine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.flags import Json, option
from paceline.cli.output import print_json
from paceline.training.registry import FORMATS


def export(
    folder: Annotated[Path, typer.Argument(help="Folder of a trained drafter.", metavar="FOLDER")],
    out: Annotated[Path, option("Folder to write; it must not exist.", "DIR")],
    form: Annotated[str, option(f"Layout to write: {', '.join(FORMATS)}.", "NAME", "--format")],
    model: Annotated[
        str | None, option("The model it drafts for, where the folder needs it.", "MODEL", "--model", "-m")
    ] = None,
    json: Json = False,
) -> None:
    """Write a drafter in the layout of vLLM and speculators."""
    from paceline.training.export import export as write
    from paceline.training.export import target_of

    method = write(folder, form, out, None if model is None else target_of(model))
    if json:
        print_json({"folder": str(folder), "method": method, "format": form, "out": str(out)})
    else:
        print(f"wrote {out}: {method} as {form}")
