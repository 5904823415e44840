"""Methods that can be trained and exported, by the names of the command line. Building a trainee imports torch.

A new trainee is one file in trainees/ with a function `build`, and an entry in TRAINEES. Its options (--set) are the
fields of a dataclass; `between` gives a field the range that is checked before anything is trained.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import Field, dataclass, field, fields
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from paceline.drafters.methods import DFLASH, DRAFT_MODEL, DSPARK, EAGLE, EAGLE3, MEDUSA, MTP, SPECULATORS
from paceline.errors import InvalidParameter

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.training.trainee import Trainee
    from paceline.training.trainees.target import FrozenTarget

DRAFT = "draft"  # a model of its own, for the method of draft models
FORMATS = {  # formats of export, and the methods that each has a place for
    EAGLE3: (EAGLE3,),
    SPECULATORS: (EAGLE3, DSPARK, DFLASH),
    MEDUSA: (MEDUSA,),
    DSPARK: (DSPARK, DFLASH),
}
MOST_WEIGHT = 1000.0  # highest weight of a loss
MOST_TOKENS = 1 << 31  # tokens; largest vocabulary

Answers = SequenceOf[tuple[SequenceOf[int], SequenceOf[int]]]  # prompts and answers
Measure = Callable[[Mapping[str, "Tensor"]], dict[str, Any]]  # weights -> figures for the curve


@dataclass(frozen=True, kw_only=True)
class TraineeContext:
    """The material from which a trainee is built."""

    target: FrozenTarget
    name: str  # name of the target, for the checkpoint
    sizes: Mapping[str, Any]  # fields of the method's options that differ from their defaults
    vocabulary: Callable[[int], Tensor]  # size -> the draft tokens, ascending
    init_from: Path | None
    seed: int
    compiled: bool
    answers: Answers  # held-out answers, to measure τ on


@dataclass(frozen=True)
class BuiltTrainee:
    trainee: Trainee
    recipe: Mapping[str, Any]  # its options, for the card
    measure: Measure | None  # τ while training, where that is cheap
    nodes: int  # size of a draft when the engine measures the result


def _built_by(module: str, **fixed: Any) -> Callable[[TraineeContext], BuiltTrainee]:
    """Return a call of `build` in a module of trainees, most of which have a method's name; `fixed`: its arguments."""

    def build(context: TraineeContext) -> BuiltTrainee:
        built: BuiltTrainee = import_module(f"paceline.training.trainees.{module}").build(context, **fixed)
        return built

    return build


TRAINEES: Mapping[str, Callable[[TraineeContext], BuiltTrainee]] = {
    DSPARK: _built_by(DSPARK),
    DFLASH: _built_by(DSPARK, rank=0),
    **{method: _built_by(EAGLE, method=method) for method in (EAGLE3, EAGLE, MTP)},
    MEDUSA: _built_by(MEDUSA),
    DRAFT: _built_by("draft_model"),
}


def build_trainee(method: str, context: TraineeContext) -> BuiltTrainee:
    if method not in TRAINEES:
        raise InvalidParameter("method", f"{method!r} cannot be trained; choose one of {', '.join(TRAINEES)}")
    if context.init_from is not None and method != DRAFT:
        from paceline.training.export import method_of

        stored = method_of(context.init_from)
        if stored != method:
            raise InvalidParameter("init_from", f"{context.init_from} holds a drafter of method {stored}; train that")
    return TRAINEES[method](context)


def drafting_method(trained: str) -> str:
    """Return the engine's method that uses what was trained."""
    return DRAFT_MODEL if trained == DRAFT else trained


def between(least: float, most: float, default: float) -> Any:
    """Return a field that takes numbers of the default's type from `least` to `most`."""
    return field(default=default, metadata={"least": least, "most": most})


def options_of(kind: Any, sizes: Mapping[str, Any], fixed: Mapping[str, Any] = MappingProxyType({})) -> Any:
    """Return options of this kind; `fixed` are fields that the method does not leave open."""
    known = {option.name: option for option in fields(kind) if option.name not in fixed}
    for name, value in sizes.items():
        if name not in known:
            raise InvalidParameter(name, f"means nothing to this method; it has {', '.join(sorted(known))}")
        _check(known[name], value)
    return kind(**sizes, **fixed)


def _check(option: Field[Any], value: Any) -> None:
    if type(option.default) is bool:
        if type(value) is not bool:
            raise InvalidParameter(option.name, f"must be true or false, got {value!r}")
        return
    whole, (least, most) = type(option.default) is int, (option.metadata[end] for end in ("least", "most"))
    numbers = (int,) if whole else (int, float)
    if type(value) not in numbers or not least <= value <= most:
        kind = "whole number" if whole else "number"
        raise InvalidParameter(option.name, f"must be a {kind} from {least} to {most}, got {value!r}")
