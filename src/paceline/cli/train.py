"""`paceline train`: a drafter for a model, in minutes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.cli.output import print_json, print_note
from paceline.errors import InvalidParameter
from paceline.training.names import TRAINABLE


def train(
    method: Annotated[str, typer.Argument(help="What to train.", metavar="|".join(TRAINABLE))],
    target: Annotated[str, typer.Option("--target", "-t", help="The model that the drafter is for.", metavar="MODEL")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder of the drafter.", metavar="DIR")],
    data: Annotated[
        list[Path] | None,
        typer.Option("--data", help="jsonl of chats or prompts, or text; repeatable.", metavar="FILE"),
    ] = None,
    regenerate: Annotated[
        bool, typer.Option("--regenerate", help="The target answers the prompts of --data anew.")
    ] = False,
    synthesise: Annotated[
        int, typer.Option("--synthesise", min=0, help="Prompts that the target writes itself, and answers.")
    ] = 0,
    mix: Annotated[
        str | None, typer.Option("--mix", help="Weights of sources, by name.", metavar="NAME=WEIGHT,...")
    ] = None,
    init_from: Annotated[
        Path | None, typer.Option("--init-from", help="Continue from this drafter's weights.", metavar="DIR")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the training in --out.")] = False,
    minutes: Annotated[float | None, typer.Option("--minutes", min=0.001, help="Of training; 10 if unset.")] = None,
    steps: Annotated[int | None, typer.Option("--steps", min=1, help="Instead of minutes.")] = None,
    stop_minutes: Annotated[
        float | None, typer.Option("--stop-minutes", min=0.001, help="End this run early; --resume goes on.")
    ] = None,
    rows: Annotated[int, typer.Option("--rows", min=1, help="Of a step.")] = 64,
    length: Annotated[int, typer.Option("--length", min=32, help="Tokens of a row.")] = 512,
    lr: Annotated[float, typer.Option("--lr", min=0.0, help="Highest learning rate.")] = 1e-3,
    warmup: Annotated[int, typer.Option("--warmup", min=0, help="Steps.")] = 200,
    optimizer: Annotated[str, typer.Option("--optimizer", metavar="adamw|muon")] = "adamw",
    size: Annotated[
        list[str] | None,
        typer.Option("--set", help="A size of the method: layers, block, draft_vocab, ...", metavar="NAME=VALUE"),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0)] = 0,
    device: Annotated[str, typer.Option("--device", metavar="auto|cpu|cuda")] = "auto",
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Train a drafter for a model, from its own answers."""
    if method not in TRAINABLE:
        raise InvalidParameter("method", f"{method!r} cannot be trained; choose one of {', '.join(TRAINABLE)}")
    if minutes is not None and steps is not None:
        raise InvalidParameter("steps", "give either steps or minutes")
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
        out=out,
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
    found = {}
    for one in given:
        name, equals, value = one.partition("=")
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
