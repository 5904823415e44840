"""`paceline train`: a drafter for a model, in minutes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.cli.output import print_json, print_note
from paceline.errors import InvalidParameter
from paceline.training.names import TRAINABLE


def train(
    method: Annotated[str, typer.Argument(help=f"What to train: {', '.join(TRAINABLE)}.", metavar="METHOD")],
    target: Annotated[str, typer.Option("--target", "-t", help="The model that the drafter is for.", metavar="MODEL")],
    out: Annotated[str, typer.Option("--out", "-o", help="Folder for the drafter.", metavar="DIR")],
    data: Annotated[
        list[Path] | None,
        typer.Option("--data", help="Chats or prompts as jsonl, or a text; repeatable.", metavar="FILE"),
    ] = None,
    regenerate: Annotated[
        bool, typer.Option("--regenerate", help="Have the target answer the prompts of --data anew.")
    ] = False,
    synthesise: Annotated[
        int,
        typer.Option("--synthesise", min=0, help="Have the target write and answer this many prompts.", metavar="N"),
    ] = 0,
    mix: Annotated[
        str | None, typer.Option("--mix", help="How much each source counts, by its name.", metavar="NAME=WEIGHT,...")
    ] = None,
    init_from: Annotated[
        Path | None, typer.Option("--init-from", help="Continue from this drafter's weights.", metavar="DIR")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the training in --out.")] = False,
    minutes: Annotated[
        float | None, typer.Option("--minutes", min=0.001, help="Minutes of training; unset: 10.", metavar="MINUTES")
    ] = None,
    steps: Annotated[
        int | None, typer.Option("--steps", min=1, help="Steps of training, instead of --minutes.", metavar="N")
    ] = None,
    stop_minutes: Annotated[
        float | None,
        typer.Option("--stop-minutes", min=0.001, help="End this run early; --resume goes on.", metavar="MINUTES"),
    ] = None,
    rows: Annotated[int, typer.Option("--rows", min=1, help="Rows of a step.", metavar="N")] = 64,
    length: Annotated[int, typer.Option("--length", min=32, help="Tokens of each row.", metavar="N")] = 512,
    lr: Annotated[float, typer.Option("--lr", min=0.0, help="Highest learning rate.", metavar="N")] = 1e-3,
    warmup: Annotated[
        int, typer.Option("--warmup", min=0, help="Steps over which the learning rate rises.", metavar="N")
    ] = 200,
    optimizer: Annotated[str, typer.Option("--optimizer", help="Optimizer: adamw or muon.", metavar="NAME")] = "adamw",
    size: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="A size of the method, such as layers, block or draft_vocab; repeatable.",
            metavar="NAME=VALUE",
        ),
    ] = None,
    seed: Annotated[
        int, typer.Option("--seed", min=0, help="Seed of the weights and of the order of the data.", metavar="N")
    ] = 0,
    device: Annotated[
        str, typer.Option("--device", help="Where to train: auto, cpu or cuda.", metavar="NAME")
    ] = "auto",
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Train a drafter for a model, from its own answers."""
    if method not in TRAINABLE:
        raise InvalidParameter("method", f"{method!r} cannot be trained; choose one of {', '.join(TRAINABLE)}")
    if minutes is not None and steps is not None:
        raise InvalidParameter("steps", "give either steps or minutes")
    if not out.strip():
        raise InvalidParameter("out", "is empty; name a folder")
    if regenerate and not data:
        raise InvalidParameter("regenerate", "needs --data FILE with prompts")
    if resume and init_from is not None:
        raise InvalidParameter("init_from", "a resumed training has its weights; leave one of the two out")
    from paceline.training.loop import LoopConfig
    from paceline.training.run import TrainOptions
    from paceline.training.run import train as run

    loop = LoopConfig(
        rows=rows,
        minutes=None if steps else 10.0 if minutes is None else minutes,
        steps=steps,
        stop_minutes=stop_minutes,
        lr=lr,
        warmup=warmup,
        optimizer=optimizer,
        seed=seed,
    )
    options = TrainOptions(
        method=method,
        target=target,
        out=Path(out),
        data=tuple(data or ()),
        regenerate=regenerate,
        synthesise=synthesise,
        mix=_pairs(mix.split(","), "mix", float) if mix else None,
        init_from=init_from,
        resume=resume,
        device=device,
        length=length,
        sizes=_pairs(size or [], "set", _value),
        loop=loop,
    )
    result = run(options, print_note)
    if json:
        print_json(result)


def _pairs(given: list[str], field: str, read: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for one in given:
        name, equals, value = one.partition("=")
        if name.strip() in found:
            raise InvalidParameter(field, f"{name.strip()!r} is given twice; leave one out")
        try:
            if not equals:
                raise ValueError
            found[name.strip()] = read(value)
        except ValueError:
            raise InvalidParameter(field, f"{one!r} is not of the form NAME=VALUE") from None
    return found


def _value(text: str) -> int | float | bool:
    if text in ("true", "false"):
        return text == "true"
    return float(text) if "." in text or "e" in text else int(text)
