"""`paceline train`: a drafter for a model, in minutes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.cli.flags import Json, flag, with_options
from paceline.cli.output import print_json, print_note
from paceline.errors import InvalidParameter
from paceline.training.registry import TRAINEES

DEFAULT_MINUTES = 10.0  # of training, where neither minutes nor steps are given
LOOP_FLAGS = ("rows", "steps", "stop_minutes", "lr", "warmup", "optimizer", "seed")  # fields of LoopConfig
RUN_FLAGS = (
    "method",
    "target",
    "regenerate",
    "synthesise",
    "init_from",
    "resume",
    "device",
    "length",
)  # of TrainOptions


@dataclass(frozen=True, kw_only=True)
class TrainFlags:
    method: Annotated[str, typer.Argument(help=f"What to train: {', '.join(TRAINEES)}.", metavar="METHOD")]
    target: Annotated[str, flag("--target", "-t", help="The model that the drafter is for.", metavar="MODEL")]
    out: Annotated[str, flag("--out", "-o", help="Folder for the drafter.", metavar="DIR")]
    data: Annotated[
        list[Path] | None,
        flag("--data", help="Chats or prompts as jsonl, or a text; repeatable.", metavar="FILE"),
    ] = None
    regenerate: Annotated[bool, flag("--regenerate", help="Have the target answer the prompts of --data anew.")] = False
    synthesise: Annotated[
        int,
        flag("--synthesise", min=0, help="Have the target write and answer this many prompts.", metavar="N"),
    ] = 0
    mix: Annotated[
        str | None, flag("--mix", help="How much each source counts, by its name.", metavar="NAME=WEIGHT,...")
    ] = None
    init_from: Annotated[
        Path | None, flag("--init-from", help="Continue from this drafter's weights.", metavar="DIR")
    ] = None
    resume: Annotated[bool, flag("--resume", help="Continue the training in --out.")] = False
    minutes: Annotated[
        float | None, flag("--minutes", min=0.001, help="Minutes of training; unset: 10.", metavar="MINUTES")
    ] = None
    steps: Annotated[
        int | None, flag("--steps", min=1, help="Steps of training, instead of --minutes.", metavar="N")
    ] = None
    stop_minutes: Annotated[
        float | None,
        flag("--stop-minutes", min=0.001, help="End this run early; --resume goes on.", metavar="MINUTES"),
    ] = None
    rows: Annotated[int, flag("--rows", min=1, help="Rows of a step.", metavar="N")] = 64
    length: Annotated[int, flag("--length", min=32, help="Tokens of each row.", metavar="N")] = 512
    lr: Annotated[float, flag("--lr", min=0.0, help="Highest learning rate.", metavar="N")] = 1e-3
    warmup: Annotated[int, flag("--warmup", min=0, help="Steps over which the learning rate rises.", metavar="N")] = 200
    optimizer: Annotated[str, flag("--optimizer", help="Optimizer: adamw or muon.", metavar="NAME")] = "adamw"
    size: Annotated[
        list[str] | None,
        flag(
            "--set",
            help="A size of the method, such as layers, block or draft_vocab; repeatable.",
            metavar="NAME=VALUE",
        ),
    ] = None
    seed: Annotated[
        int, flag("--seed", min=0, help="Seed of the weights and of the order of the data.", metavar="N")
    ] = 0
    device: Annotated[str, flag("--device", help="Where to train: auto, cpu or cuda.", metavar="NAME")] = "auto"
    json: Json = False

    def check(self) -> None:
        if self.method not in TRAINEES:
            raise InvalidParameter("method", f"{self.method!r} cannot be trained; choose one of {', '.join(TRAINEES)}")
        if self.minutes is not None and self.steps is not None:
            raise InvalidParameter("steps", "give either steps or minutes")
        if not self.out.strip():
            raise InvalidParameter("out", "is empty; name a folder")
        if self.regenerate and not self.data:
            raise InvalidParameter("regenerate", "needs --data FILE with prompts")
        if self.resume and self.init_from is not None:
            raise InvalidParameter("init_from", "a resumed training has its weights; leave one of the two out")


@with_options
def train(*, options: TrainFlags) -> None:
    """Train a drafter for a model, from its own answers."""
    options.check()
    from paceline.training.loop import LoopConfig
    from paceline.training.run import TrainOptions
    from paceline.training.run import train as run

    minutes = None if options.steps else DEFAULT_MINUTES if options.minutes is None else options.minutes
    loop = LoopConfig(**{name: getattr(options, name) for name in LOOP_FLAGS}, minutes=minutes)
    training = TrainOptions(
        **{name: getattr(options, name) for name in RUN_FLAGS},
        out=Path(options.out),
        data=tuple(options.data or ()),
        mix=_pairs(options.mix.split(","), "mix", float) if options.mix else None,
        sizes=_pairs(options.size or [], "set", _value),
        loop=loop,
    )
    result = run(training, print_note)
    if options.json:
        print_json(result)


def _pairs(items: list[str], field: str, read: Any) -> dict[str, Any]:
    pairs: dict[str, Any] = {}
    for item in items:
        name, equals, value = item.partition("=")
        if name.strip() in pairs:
            raise InvalidParameter(field, f"{name.strip()!r} is given twice; leave one out")
        try:
            if not equals:
                raise ValueError
            pairs[name.strip()] = read(value)
        except ValueError:
            raise InvalidParameter(field, f"{item!r} is not of the form NAME=VALUE") from None
    return pairs


def _value(text: str) -> int | float | bool:
    if text in ("true", "false"):
        return text == "true"
    return float(text) if "." in text or "e" in text else int(text)
