"""`paceline pull` and `paceline models`: the models in the cache."""

from __future__ import annotations

from typing import Annotated

import typer

from paceline.cli.flags import Json
from paceline.cli.output import human_bytes, print_json, print_note
from paceline.cli.progress import progress


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
    json: Json = False,
) -> None:
    """List the models in the cache."""
    from paceline.models.load import hub

    cached = hub.cached_models()
    if json:
        rows = [
            {"name": m.name, "path": str(m.path), "bytes": m.bytes, "source": m.source, "format": m.format}
            for m in cached
        ]
        print_json({"cache": str(hub.cache_home()), "models": rows})
        return
    if not cached:
        print_note(f"no models in {hub.cache_home()} yet: paceline pull smollm2 fetches the default one")
        return
    width = max(len("model"), *(len(m.name) for m in cached))
    print(f"{'model':<{width}}  {'size':>8}  source")
    for m in cached:
        print(f"{m.name:<{width}}  {human_bytes(m.bytes):>8}  {m.source}")
    print_note(f"in {cached[0].path.parent}")
