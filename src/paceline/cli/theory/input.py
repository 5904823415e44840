"""Flags of `paceline theory` as numbers: every value is used, or refused by the name of its flag."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.config import MAX_K
from paceline.errors import InvalidParameter
from paceline.theory import Cost, Roofline, checks, geometric_survival, survival_from_conditional
from paceline.theory.table import Case, MemoryUse, memory_use

GIGA, TERA = 1e9, 1e12
SUFFIXES = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
# Flags that need one flag of each group.
NEEDS: dict[str, tuple[tuple[str, ...], ...]] = {
    "bandwidth": (("tflops",), ("parameters",)),
    "tflops": (("bandwidth",), ("parameters",)),
    "parameters": (("bandwidth", "draft_parameters"),),
    "bytes_per_parameter": (("bandwidth", "memory"),),
    "batch": (("bandwidth",),),
    "context": (("bandwidth",), ("kv_bytes",)),
    "kv_bytes": (("context", "memory"),),
    "memory": (("parameters",), ("draft_parameters",), ("kv_bytes",)),
    "draft_parameters": (("parameters",),),
    "draft_kv_bytes": (("memory",),),
}


@dataclass(frozen=True)
class Question:
    case: Case
    k: int  # value of --k, or the best k; 0: none pays
    memory: MemoryUse | None
    batch: int


def read(flags: Mapping[str, Any]) -> Question:
    """Read `flags`, by the names of the command's parameters; None: not set."""
    for name, groups in NEEDS.items():
        for group in groups if flags[name] is not None else ():
            if all(flags[other] is None for other in group):
                raise InvalidParameter(_flag(name), f"means something only with {' or '.join(map(_flag, group))}")
    parameters, drafter = _size(flags, "parameters"), _size(flags, "draft_parameters")
    each = checks.positive("--bytes-per-parameter", _or(flags["bytes_per_parameter"], 2.0))
    batch = checks.count("--batch", _or(flags["batch"], 1), least=1)
    roofline = memory = None
    if flags["bandwidth"] is not None:
        roofline = Roofline(
            bandwidth=checks.positive("--bandwidth", flags["bandwidth"]) * GIGA,
            flops=checks.positive("--tflops", flags["tflops"]) * TERA,
            parameters=parameters,
            bytes_per_parameter=each,
            kv_bytes_per_token=checks.cost("--kv-bytes", _or(flags["kv_bytes"], 0.0)),
            context=checks.count("--context", _or(flags["context"], 0)),
        )
    if flags["memory"] is not None:
        memory = memory_use(
            checks.positive("--memory", flags["memory"]) * GIGA,
            parameters * each,
            checks.positive("--kv-bytes", flags["kv_bytes"]),
            drafter * each,
            checks.cost("--draft-kv-bytes", _or(flags["draft_kv_bytes"], 0.0)),
        )
    draft_cost = checks.cost("--draft-cost", _or(flags["draft_cost"], drafter / parameters if drafter else 0.0))
    verify_cost = _verify_cost(flags["verify_cost"], roofline, batch)
    survival, siblings = _acceptance(flags)
    survival = _known(flags["k"], survival, verify_cost)
    case = Case(survival=survival, draft_cost=draft_cost, verify_cost=verify_cost, siblings=siblings, roofline=roofline)
    return Question(case, flags["k"] or case.best.k, memory, batch)


def _acceptance(flags: Mapping[str, Any]) -> tuple[list[float], list[float]]:
    """Return survival by depth, as far as it is known, and the rates of siblings."""
    alpha, acceptance, siblings = flags["alpha"], flags["acceptance"], flags["siblings"]
    if sum(source is not None for source in (alpha, acceptance, siblings)) != 1:
        raise InvalidParameter("--alpha", "give one of --alpha, --acceptance and --siblings")
    if flags["conditional"] and acceptance is None:
        raise InvalidParameter("--conditional", "changes the meaning of --acceptance; give that too")
    if acceptance is not None:
        return _measured(checks.probabilities("--acceptance", _numbers("--acceptance", acceptance)), flags), []
    ranks = [] if siblings is None else checks.probabilities("--siblings", _numbers("--siblings", siblings))
    if sum(ranks) > 1 + 1e-9:
        raise InvalidParameter("--siblings", f"sum to {sum(ranks):g}; one guess at most is right, so to 1 at most")
    first = ranks[0] if alpha is None else checks.probability("--alpha", alpha)
    return geometric_survival(first, MAX_K), ranks


def _measured(rates: list[float], flags: Mapping[str, Any]) -> list[float]:
    if len(rates) > MAX_K:
        raise InvalidParameter("--acceptance", f"has {len(rates)} positions; {MAX_K} at most")
    if flags["conditional"]:
        return survival_from_conditional(rates)
    for position, (before, now) in enumerate(itertools.pairwise(rates), start=2):
        if now > before:
            raise InvalidParameter(
                "--acceptance",
                f"rises at position {position}: a prefix cannot be accepted more often than a shorter one; "
                "add --conditional if each rate is given that all before were accepted",
            )
    return rates


def _known(k: int | None, survival: Sequence[float], verify_cost: Cost) -> list[float]:
    """Cut survival to the depths at which costs are known."""
    if k is not None and not 1 <= k <= MAX_K:
        raise InvalidParameter("--k", f"must lie between 1 and {MAX_K}, got {k}")
    known = {"--acceptance": len(survival)}
    if isinstance(verify_cost, Sequence):
        known["--verify-cost"] = len(verify_cost)
    for flag, length in known.items():
        if k is not None and k > length:
            raise InvalidParameter("--k", f"is {k}, but {flag} ends at k = {length}")
    return list(survival[: min(known.values())])


def _verify_cost(text: str | None, roofline: Roofline | None, batch: int) -> Cost:
    if roofline is not None:
        if text is not None:
            raise InvalidParameter("--verify-cost", "follows from --bandwidth and --tflops; leave one of them out")
        return roofline.verify_cost(batch)
    costs = [checks.positive("--verify-cost", cost) for cost in _numbers("--verify-cost", _or(text, "1"))]
    return costs if len(costs) > 1 else costs[0]


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _numbers(flag: str, text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise InvalidParameter(flag, f"must be numbers with commas between, got {text!r}") from None


def _size(flags: Mapping[str, Any], name: str) -> float:
    """Read a number of parameters; 0: not set."""
    if (text := flags[name]) is None:
        return 0.0
    digits, unit = (text[:-1], SUFFIXES[text[-1].upper()]) if text[-1:].upper() in SUFFIXES else (text, 1.0)
    try:
        return checks.positive(_flag(name), float(digits) * unit)
    except ValueError:
        raise InvalidParameter(_flag(name), f"must be a number such as 8B, 135M or 8e9, got {text!r}") from None
