"""`paceline pull` and `paceline models`: the models in the cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import typer

from paceline.cli.flags import Json, option
from paceline.cli.output import human_bytes, print_json, print_note
from paceline.cli.progress import progress
from paceline.errors import InvalidParameter


def pull(
    name: Annotated[
        str, typer.Argument(help="Alias (smollm2, or universal: a drafter for any model) or hub id.", metavar="NAME")
    ],
    json: Json = False,
) -> None:
    """Fetch a model into the cache."""
    from paceline.models.load import hub

    with progress(plain=not json) as report:
        path = hub.resolve(name, progress=report)
    if json:
        print_json({"name": name, "path": str(path)})
    else:
        print(f"{name} is ready: {path}")


def models(
    remove_table: Annotated[
        str | None, option("Remove the table that `paceline warm` filled for this model.", "MODEL")
    ] = None,
    json: Json = False,
) -> None:
    """List the models in the cache, and the tables of successors that `paceline warm` filled."""
    from paceline.models.load import hub

    if remove_table is not None:
        _remove_table(remove_table)
    cached, tables = hub.cached_models(), list(_tables())
    if json:
        rows = [
            {"name": m.name, "path": str(m.path), "bytes": m.bytes, "source": m.source, "format": m.format}
            for m in cached
        ]
        print_json({"cache": str(hub.cache_home()), "models": rows, "tables": tables})
        return
    for table in tables:
        print_note(
            f"table of successors of {table['model']}: {table['answers']} answers, {table['contexts']:,} contexts"
        )
    if not cached:
        print_note(f"no models in {hub.cache_home()} yet: paceline pull smollm2 fetches the default one")
        return
    width = max(len("model"), *(len(m.name) for m in cached))
    print(f"{'model':<{width}}  {'size':>8}  source")
    for m in cached:
        print(f"{m.name:<{width}}  {human_bytes(m.bytes):>8}  {m.source}")
    print_note(f"in {cached[0].path.parent}")


def _tables() -> Iterator[dict[str, Any]]:
    """Yield the tables of successors; a file that cannot be used counts as one without contexts."""
    from paceline.drafters.lookup.table_file import stored_tables

    for path, table in stored_tables():
        found = {"model": path.stem, "answers": 0, "contexts": 0, "bytes": path.stat().st_size, "path": str(path)}
        if table is not None:
            found |= {"model": table.model, "answers": table.answers, "contexts": len(table.entries)}
        yield found


def _remove_table(model: str) -> None:
    from pathlib import Path

    paths = [Path(table["path"]) for table in _tables() if table["model"] == model]
    if not paths:
        raise InvalidParameter(
            "remove_table", f"no table was filled for {model!r}; paceline models lists those there are"
        )
    for path in paths:
        path.unlink(missing_ok=True)
        path.with_suffix(".lock").unlink(missing_ok=True)
