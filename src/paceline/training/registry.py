"""The table of trainees: from a method's name to something the loop can train and measure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from paceline.drafters.methods import DFLASH, DSPARK, EAGLE, EAGLE3, MEDUSA
from paceline.errors import InvalidParameter
from paceline.training.export import method_of
from paceline.training.loop import Measure
from paceline.training.names import DRAFT
from paceline.training.options import options_of
from paceline.training.trainee import Trainee
from paceline.training.trainees.target import FrozenTarget

Answers = SequenceOf[tuple[SequenceOf[int], SequenceOf[int]]]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a trainee is made from."""

    target: FrozenTarget
    name: str  # of the target, for the checkpoint
    sizes: Mapping[str, Any]  # fields of the method's options
    vocabulary: Callable[[int], Tensor]  # size -> the draft tokens, ascending
    init_from: Path | None
    seed: int
    compiled: bool
    answers: Answers  # held out, to measure τ on


@dataclass(frozen=True)
class Made:
    trainee: Trainee
    recipe: Mapping[str, Any]
    measure: Measure | None  # while training, where that is cheap
    nodes: int  # of a draft when the engine measures the result


def trainee_of(method: str, plan: Plan) -> Made:
    if method not in TRAINEES:
        raise InvalidParameter("method", f"{method!r} cannot be trained; choose one of {', '.join(TRAINEES)}")
    if plan.init_from is not None and method != DRAFT and (found := method_of(plan.init_from)) != method:
        raise InvalidParameter("init_from", f"{plan.init_from} holds a drafter of method {found}; train that one")
    return TRAINEES[method](plan)


def _dspark(plan: Plan, **fixed: int) -> Made:
    from paceline.training.acceptance import by_depth, tau, walk
    from paceline.training.trainees.dspark import DSparkOptions, DSparkTrainee

    options = options_of(DSparkOptions, plan.sizes, fixed)
    if plan.init_from is not None:
        trainee = DSparkTrainee.from_folder(
            plan.init_from, plan.target, options, compiled=plan.compiled, name=plan.name
        )
    else:
        vocabulary = plan.vocabulary(options.draft_vocab)
        trainee = DSparkTrainee(
            plan.target, options, vocabulary, seed=plan.seed, name=plan.name, compiled=plan.compiled
        )

    def measure(parameters: Mapping[str, Tensor]) -> dict[str, Any]:
        chain = walk(trainee, plan.answers, options.block - 1, chain=True, parameters=parameters)
        tree = walk(trainee, plan.answers, 60, parameters=parameters)
        return {
            f"τ chain {options.block - 1}": tau(chain),
            "τ tree 60": tau(tree),
            "by depth": [round(one, 3) for one in by_depth(chain)],
        }

    return Made(trainee, asdict(trainee.options), measure if plan.answers else None, 60)


def _eagle(plan: Plan, *, fused: bool) -> Made:
    from paceline.training.trainees.eagle import EagleOptions, EagleTrainee

    plain = {} if fused else {"steps": 3, "features": 1.0, "ce": 0.1, "tv": 0.0}
    whole = {} if fused else {"draft_vocab": plan.target.config.vocab_size}
    options = options_of(EagleOptions, {**plain, **plan.sizes}, whole)
    trainee = EagleTrainee(
        plan.target,
        options,
        plan.vocabulary(options.draft_vocab),
        fused=fused,
        seed=plan.seed,
        name=plan.name,
        compiled=plan.compiled,
        init_from=plan.init_from,
    )
    return Made(trainee, asdict(options), None, 60 if fused else 30)


def _medusa(plan: Plan) -> Made:
    from paceline.training.trainees.medusa import MedusaOptions, MedusaTrainee

    options = options_of(MedusaOptions, plan.sizes)
    trainee = MedusaTrainee(plan.target, options, name=plan.name, compiled=plan.compiled, init_from=plan.init_from)
    return Made(trainee, asdict(trainee.options), None, 30)


def _draft(plan: Plan) -> Made:
    from paceline.training.trainees.draft_model import DraftOptions, DraftTrainee

    options = options_of(DraftOptions, plan.sizes)
    trainee = DraftTrainee(plan.target, options, compiled=plan.compiled, init_from=plan.init_from)
    return Made(trainee, asdict(trainee.options), None, 5)


TRAINEES: Mapping[str, Callable[[Plan], Made]] = {
    DSPARK: _dspark,
    DFLASH: lambda plan: _dspark(plan, rank=0),
    EAGLE3: lambda plan: _eagle(plan, fused=True),
    EAGLE: lambda plan: _eagle(plan, fused=False),
    MEDUSA: _medusa,
    DRAFT: _draft,
}
