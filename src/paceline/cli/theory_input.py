"""What `paceline theory` was asked, as numbers: every value is used or refused by the name of its flag."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from paceline.config import MAX_K
from paceline.errors import InvalidParameter
from paceline.theory import Cost, Roofline, checks, geometric_survival, survival_from_conditional
from paceline.theory.table import MemoryUse, memory_use

GIGA, TERA = 1e9, 1e12
SUFFIXES = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
# A flag means something only beside one flag of each group.
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


def refuse_idle(**given: object) -> None:
    for name, groups in NEEDS.items():
        for group in groups if given[name] is not None else ():
            if all(given[other] is None for other in group):
                raise InvalidParameter(_flag(name), f"means something only with {' or '.join(map(_flag, group))}")


def read_acceptance(
    alpha: float | None, acceptance: str | None, conditional: bool, siblings: str | None
) -> tuple[list[float], list[float]]:
    """Survival by position, as far as it is known, and the rates of siblings where they were given."""
    if sum(source is not None for source in (alpha, acceptance, siblings)) != 1:
        raise InvalidParameter("--alpha", "give one of --alpha, --acceptance and --siblings")
    if conditional and acceptance is None:
        raise InvalidParameter("--conditional", "says how --acceptance is meant; give that too")
    if acceptance is not None:
        return _measured(checks.probabilities("--acceptance", _numbers("--acceptance", acceptance)), conditional), []
    ranks = [] if siblings is None else checks.probabilities("--siblings", _numbers("--siblings", siblings))
    if sum(ranks) > 1 + 1e-9:
        raise InvalidParameter("--siblings", f"sum to {sum(ranks):g}; one guess at most is right, so to 1 at most")
    first = ranks[0] if alpha is None else checks.probability("--alpha", alpha)
    return geometric_survival(first, MAX_K), ranks


def _measured(rates: list[float], conditional: bool) -> list[float]:
    if len(rates) > MAX_K:
        raise InvalidParameter("--acceptance", f"has {len(rates)} positions; {MAX_K} at most")
    if conditional:
        return survival_from_conditional(rates)
    for position, (before, now) in enumerate(itertools.pairwise(rates), start=2):
        if now > before:
            raise InvalidParameter(
                "--acceptance",
                f"rises at position {position}: a prefix cannot be accepted more often than a shorter one; "
                "add --conditional if each rate is given that all before were accepted",
            )
    return rates


def read_k(k: int | None, survival: Sequence[float], verify_cost: Cost) -> tuple[int | None, list[float]]:
    """k, and survival cut to where everything is known."""
    if k is not None and not 1 <= k <= MAX_K:
        raise InvalidParameter("--k", f"must lie between 1 and {MAX_K}, got {k}")
    known = {"--acceptance": len(survival)}
    if isinstance(verify_cost, Sequence):
        known["--verify-cost"] = len(verify_cost)
    for flag, length in known.items():
        if k is not None and k > length:
            raise InvalidParameter("--k", f"is {k}, but {flag} ends at k = {length}")
    return k, list(survival[: min(known.values())])


def read_costs(
    draft_cost: float | None,
    verify_cost: str | None,
    parameters: str | None,
    draft_parameters: str | None,
    roofline: Roofline | None,
    batch: int | None,
) -> tuple[float, Cost]:
    drafting = 0.0 if draft_cost is None else checks.cost("--draft-cost", draft_cost)
    if draft_cost is None and draft_parameters is not None and parameters is not None:
        drafting = _size("--draft-parameters", draft_parameters) / _size("--parameters", parameters)
    if roofline is not None:
        if verify_cost is not None:
            raise InvalidParameter("--verify-cost", "follows from --bandwidth and --tflops; leave one of them out")
        return drafting, roofline.verify_cost(checks.count("--batch", 1 if batch is None else batch, least=1))
    if verify_cost is None:
        return drafting, 1.0
    costs = [checks.positive("--verify-cost", cost) for cost in _numbers("--verify-cost", verify_cost)]
    return drafting, costs if len(costs) > 1 else costs[0]


def read_roofline(
    bandwidth: float | None,
    tflops: float | None,
    parameters: str | None,
    bytes_per_parameter: float | None,
    kv_bytes: float | None,
    context: int | None,
) -> Roofline | None:
    if bandwidth is None or tflops is None or parameters is None:
        return None
    return Roofline(
        bandwidth=checks.positive("--bandwidth", bandwidth) * GIGA,
        flops=checks.positive("--tflops", tflops) * TERA,
        parameters=_size("--parameters", parameters),
        bytes_per_parameter=_bytes_per_parameter(bytes_per_parameter),
        kv_bytes_per_token=checks.cost("--kv-bytes", kv_bytes or 0.0),
        context=checks.count("--context", context or 0),
    )


def read_memory(
    memory: float | None,
    parameters: str | None,
    bytes_per_parameter: float | None,
    kv_bytes: float | None,
    draft_parameters: str | None,
    draft_kv_bytes: float | None,
) -> MemoryUse | None:
    if memory is None or parameters is None or kv_bytes is None or draft_parameters is None:
        return None
    each = _bytes_per_parameter(bytes_per_parameter)
    return memory_use(
        checks.positive("--memory", memory) * GIGA,
        _size("--parameters", parameters) * each,
        checks.positive("--kv-bytes", kv_bytes),
        _size("--draft-parameters", draft_parameters) * each,
        checks.cost("--draft-kv-bytes", draft_kv_bytes or 0.0),
    )


def _bytes_per_parameter(value: float | None) -> float:
    return 2.0 if value is None else checks.positive("--bytes-per-parameter", value)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _numbers(flag: str, text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise InvalidParameter(flag, f"must be numbers with commas between, got {text!r}") from None


def _size(flag: str, text: str) -> float:
    digits, unit = (text[:-1], SUFFIXES[text[-1].upper()]) if text[-1:].upper() in SUFFIXES else (text, 1.0)
    try:
        return checks.positive(flag, float(digits) * unit)
    except ValueError:
        raise InvalidParameter(flag, f"must be a number such as 8B, 135M or 8e9, got {text!r}") from None
