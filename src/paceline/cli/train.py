"""`paceline train`: a drafter for a model, in minutes."""

from __future__ import annotations

from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any

from paceline.cli.flags import Json, argument, flag, shared_fields, with_options
from paceline.cli.output import print_json, print_note
from paceline.errors import InvalidParameter
from paceline.training.registry import TRAINEES

DEFAULT_MINUTES = 10.0  # minutes of training, where neither minutes nor steps are given


@dataclass(frozen=True, kw_only=True)
class TrainFlags:
    method: str = argument(MISSING, f"What to train: {', '.join(TRAINEES)}.", "METHOD")
    target: str = flag(MISSING, "The model that the drafter is for.", "MODEL", "--target", "-t")
    out: str = flag(MISSING, "Folder for the drafter.", "DIR", "--out", "-o")
    data: list[Path] | None = flag(None, "Chats or prompts as jsonl, or a text; repeatable.", "FILE")
    regenerate: bool = flag(False, "Have the target answer the prompts of --data anew.")
    synthesise: int = flag(0, "Have the target write and answer this many prompts.", "N", min=0)
    mix: str | None = flag(None, "How much each source counts, by its name.", "NAME=WEIGHT,...")
    init_from: Path | None = flag(None, "Continue from this drafter's weights.", "DIR")
    resume: bool = flag(False, "Continue the training in --out.")
    minutes: float | None = flag(None, "Minutes of training; unset: 10.", "MINUTES", min=0.001)
    steps: int | None = flag(None, "Steps of training, instead of --minutes.", "N", min=1)
    stop_minutes: float | None = flag(None, "End this run early; --resume goes on.", "MINUTES", min=0.001)
    rows: int = flag(64, "Rows of a step.", "N", min=1)
    length: int = flag(512, "Tokens of each row.", "N", min=32)
    lr: float = flag(0.001, "Highest learning rate.", "N", min=0.0)
    warmup: int = flag(200, "Steps over which the learning rate rises.", "N", min=0)
    optimizer: str = flag("adamw", "Optimizer: adamw or muon.", "NAME")
    size: list[str] | None = flag(
        None, "A size of the method, such as layers, block or draft_vocab; repeatable.", "NAME=VALUE", "--set"
    )
    seed: int = flag(0, "Seed of the weights and of the order of the data.", "N", min=0)
    device: str = flag("auto", "Where to train: auto, cpu or cuda.", "NAME")
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
    training = shared_fields(options, TrainOptions) | {
        "out": Path(options.out),
        "data": tuple(options.data or ()),
        "mix": _pairs(options.mix.split(","), "mix", float) if options.mix else None,
        "sizes": _pairs(options.size or [], "set", _value),
        "loop": LoopConfig(**shared_fields(options, LoopConfig) | {"minutes": minutes}),
    }
    result = run(TrainOptions(**training), print_note)
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
