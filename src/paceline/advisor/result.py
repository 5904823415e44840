"""The advisor's findings, as in advice.json: the recommendation as settings for paceline and for vLLM, and the reasons
why speculation does not pay. No torch.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.advisor.choice import (
    OFF,
    PAYS,
    Figure,
    Figures,
    Recommendation,
    by_level,
    combined,
    levels_of,
    pays_somewhere,
    ranked,
    recommend,
    up_to,
)
from paceline.bench.grid import Contender
from paceline.config import AUTO, SpeculationConfig
from paceline.drafters.methods import METHODS, SUFFIX
from paceline.drafters.speculative_config import RENAMED
from paceline.theory import break_even, speedup

if TYPE_CHECKING:
    from paceline.advisor.subject import ActivationsCost, DrafterCost, PassCost

FILES = ("advice.json", "paceline.json", "vllm.json")


@dataclass(kw_only=True)
class Advice:
    """The findings so far; `missing` lists what an interrupted run did not measure."""

    model: str
    settings: Mapping[str, Any]
    where: Mapping[str, Any] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)  # draft model -> reason
    cost: PassCost | None = None
    drafters: Sequence[DrafterCost] = ()
    activations: ActivationsCost | None = None  # cost of int8; None: it is not available here
    predicted: dict[tuple[int, Contender], Figure] = field(default_factory=dict)  # first half, which is chosen on
    measured: dict[tuple[int, Contender], Figure] = field(default_factory=dict)  # second half
    between: dict[tuple[int, Contender], Figure] = field(default_factory=dict)  # second half, further concurrencies
    missing: list[str] = field(default_factory=list)

    @property
    def known(self) -> Figures:
        """The figures behind the recommendation: both halves, or the first alone."""
        return combined(self.predicted, self.measured)

    @property
    def recommendation(self) -> Recommendation | None:
        """Return the recommendation; None: nothing is known yet."""
        return recommend(self.known) if self.known else None

    @property
    def best_fixed(self) -> Contender | None:
        """The best fixed setting that pays somewhere."""
        fixed = ranked(self.known)
        return fixed[0] if fixed and pays_somewhere(self.known, fixed[0]) else None

    @property
    def _recommended(self) -> dict[int, Figure]:
        """The recommended setting's figures by concurrency, those between included; empty where it is off."""
        best = self.recommendation
        return {} if best is None or best.off else by_level({**self.between, **self.known}, best.contender)

    @property
    def stops_at(self) -> int | None:
        """The least measured concurrency from which on the recommended setting no longer pays."""
        highest = max((level for level, figure in self._recommended.items() if figure.pays), default=0)
        return min((level for level in self._recommended if level > highest), default=None)

    @property
    def not_yet(self) -> list[int]:
        """Concurrencies at which the recommended setting does not pay, though it does at higher ones."""
        highest, asked = self.recommendation.up_to if self.recommendation else 0, levels_of(self.known)
        figures = self._recommended.items()
        return sorted(level for level, figure in figures if level in asked and level < highest and not figure.pays)

    def reason(self, level: int) -> Reason | None:
        """Return why nothing pays at this concurrency; None where something does, or nothing is known."""
        figures = {contender: figure for (at, contender), figure in self.known.items() if at == level}
        fixed = {contender: figure for contender, figure in figures.items() if contender.method != AUTO}
        off = self.recommendation is not None and self.recommendation.off
        if self.cost is None or not fixed or any(f.surely_pays if off else f.pays for f in figures.values()):
            return None
        leader = max(figures, key=lambda contender: figures[contender].ratio)
        if figures[leader].pays:
            return uncertain(leader.label, figures[leader])
        contender = max(fixed, key=lambda contender: fixed[contender].ratio)
        assert contender.k is not None
        seconds = next((cost.at(level) for cost in self.drafters if cost.serves(contender)), 0.0)
        return why_off(
            fixed[contender],
            label=contender.label,
            k=contender.k,
            concurrency=level,
            draft_cost=seconds / self.cost.step_s(level, 0),
            verify_cost=self.cost.verify_cost(level, contender.k),
            temperature=float(self.settings.get("temperature", 0.0)),
            pays_below=any(figure.pays for (at, _), figure in self.known.items() if at < level),
        )

    @property
    def vllm(self) -> VllmConfig:
        assert self.recommendation is not None
        return vllm_config(self.recommendation.contender, self.best_fixed)

    def to_json(self) -> dict[str, Any]:
        best, levels = self.recommendation, levels_of(self.known)
        choice: dict[str, Any] | None = None
        if best is not None:
            choice = {
                "label": "off" if best.off else best.contender.label,
                "paceline": paceline_config(best.contender),
                "flags": paceline_flags(best.contender),
                "vllm": dataclasses.asdict(self.vllm),
                "pays_up_to": up_to(self.known, best.contender),
                "stops_at": self.stops_at,
                "checked": levels_of(self.measured),
                "why_not": {str(level): dataclasses.asdict(why) for level in levels if (why := self.reason(level))},
            }
        return {
            "model": self.model,
            "where": dict(self.where),
            "settings": dict(self.settings),
            "choice": choice,
            "missing": list(self.missing),
            "refused": dict(self.refused),
            "predicted": _as_json(self.predicted),
            "between": _as_json(self.between),
            "measured": _as_json(self.measured),
            "profile": None if self.cost is None else dataclasses.asdict(self.cost),
            "drafters": [dataclasses.asdict(cost) for cost in self.drafters],
            "activations": None if self.activations is None else dataclasses.asdict(self.activations),
        }

    def save(self, folder: Path) -> list[Path]:
        """Write the files and return them; vllm.json only where vLLM has a setting that fits."""
        contents = {FILES[0]: self.to_json()}
        if self.recommendation is not None:
            contents[FILES[1]] = paceline_config(self.recommendation.contender)
            if self.vllm.speculative_config is not None:
                contents[FILES[2]] = self.vllm.speculative_config
        for name, value in contents.items():
            (folder / name).write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
        return [folder / name for name in contents]


def _as_json(figures: Figures) -> list[dict[str, object]]:
    return [
        {"concurrency": level, "label": contender.label, **dataclasses.asdict(contender), **dataclasses.asdict(figure)}
        for (level, contender), figure in figures.items()
    ]


# -- settings


def paceline_config(contender: Contender) -> dict[str, Any]:
    """Return keywords of `LLM`, which are the names of the command line's flags."""
    return {name: value for name, value in dataclasses.asdict(contender).items() if value is not None}


def paceline_flags(contender: Contender) -> str:
    config = paceline_config(contender)
    return " ".join(f"--{name.replace('_', '-')} {shlex.quote(str(value))}" for name, value in config.items())


@dataclass(frozen=True)
class VllmConfig:
    """`speculative_config` is None where vLLM has nothing that fits; `note` is the reason, or a caveat."""

    speculative_config: dict[str, Any] | None
    note: str | None = None

    def flag(self) -> str | None:
        if self.speculative_config is None:
            return None
        return f"--speculative-config {shlex.quote(json.dumps(self.speculative_config))}"


def vllm_config(recommended: Contender, best_fixed: Contender | None) -> VllmConfig:
    """`best_fixed`: the best fixed setting that pays, since vLLM has no `auto`."""
    if recommended == OFF:
        return VllmConfig(None, "plain decoding needs no setting")
    if recommended.method != AUTO:
        return _fixed(recommended)
    if best_fixed is None:
        return VllmConfig(None, "vLLM has no method that chooses step by step as auto does, and no fixed choice pays")
    fixed = _fixed(best_fixed)
    note = f"vLLM has nothing that chooses step by step as auto does; this is the best fixed choice, {best_fixed.label}"
    return VllmConfig(fixed.speculative_config, f"{note}. {fixed.note}" if fixed.note else note)


def _fixed(contender: Contender) -> VllmConfig:
    method = METHODS[contender.method]
    if method.vllm is None:
        return VllmConfig(None, f"vLLM has no method {contender.method}")
    config: dict[str, Any] = {"method": method.vllm, "num_speculative_tokens": contender.k}
    defaults = SpeculationConfig()
    config |= {name: getattr(defaults, option) for name, option in RENAMED.items() if option in method.options}
    if contender.draft_model is not None:
        config["model"] = contender.draft_model
    needs = "vLLM's suffix method needs the package arctic-inference"
    return VllmConfig(config, needs if contender.method == SUFFIX else None)


# -- reasons

WARM = 0.5  # temperature; the cause is it from there on
MOST_OF_IT = 0.5  # decoding's share of the time; below it answers are short
WOULD_PAY = 1.1  # speed-up; a condition is the cause if the speed-up without it would be this high


@dataclass(frozen=True)
class Reason:
    kind: str  # uncertain, short-outputs, little, costly-drafter, saturated, temperature, acceptance
    words: str


def uncertain(label: str, figure: Figure) -> Reason:
    """Explain a figure that would pay, but may be chance."""
    low, high = figure.bounds
    words = f"{label} looks best, but its {figure.ratio:.2f}x [{low:.2f}, {high:.2f}] may be chance: give more prompts."
    return Reason("uncertain", words)


def why_off(
    figure: Figure,
    *,
    label: str,
    k: int,
    concurrency: int,
    draft_cost: float,
    verify_cost: float,
    temperature: float,
    pays_below: bool = False,
) -> Reason:
    """Return the condition that fails by theory, in the order in which conditions can be fixed.

    `figure` is of the best fixed setting at a concurrency where none pays; `pays_below`: it pays at a lower one. Costs
    are in plain passes.
    """
    alpha = figure.alpha or 0.0
    acceptance = f"an acceptance of {alpha:.0%}"
    if _answers_are_short(figure):
        words = (
            f"The answers are short ({figure.tokens_per_answer:.0f} tokens on average): most of the wait is reading "
            f"the prompt, which drafting does not shorten. Writing alone would be {figure.decode_ratio:.2f}x as fast, "
            f"the whole request {figure.ratio:.2f}x."
        )
        return Reason("short-outputs", words)
    expected = speedup(alpha, k, draft_cost, verify_cost)
    if expected >= PAYS:  # no condition fails, so none may be blamed
        words = (
            f"By {acceptance} and the cost of passes here {label} would be {expected:.2f}x where it drafts; "
            f"{figure.ratio:.2f}x over all steps is too little for a setting."
        )
        return Reason("little", words)
    if draft_cost >= 0.05 and speedup(alpha, k, 0.0, verify_cost) >= WOULD_PAY:
        words = (
            f"{label} takes {draft_cost:.0%} of a pass of the model for every token it drafts; at {acceptance} "
            "that costs what it saves, or more. A smaller drafter might pay."
        )
        return Reason("costly-drafter", words)
    if verify_cost >= 1.1 and (pays_below or speedup(alpha, k, draft_cost, 1.0) >= WOULD_PAY):
        return Reason("saturated", _saturated(k, concurrency, verify_cost, acceptance))
    needed = break_even(k, PAYS * draft_cost, PAYS * verify_cost)
    more = (
        "no acceptance would be enough" if needed is None else f"it takes more than {needed:.0%} to gain {PAYS - 1:.0%}"
    )
    words = f"drafts find {acceptance}, and at what passes cost here {more}."
    if temperature >= WARM:
        chance = f"At temperature {temperature:g} answers are partly chance and hard to guess"
        return Reason("temperature", f"{chance}: {words}")
    return Reason("acceptance", f"The answers are hard to guess: {words}")


def _answers_are_short(figure: Figure) -> bool:
    """Return whether decoding gains, and is the smaller part of the time."""
    if figure.decode_ratio is None or figure.decode_ratio < PAYS + 0.02:
        return False
    return (1 - 1 / figure.ratio) / (1 - 1 / figure.decode_ratio) < MOST_OF_IT


def _saturated(k: int, concurrency: int, verify_cost: float, acceptance: str) -> str:
    one = concurrency == 1
    at_once = "one request" if one else f"{concurrency} requests at once"
    more = f"{k} token{'s' * (k > 1)} more{'' if one else ' for each request'}"
    return (
        f"With {at_once} the machine is busy computing: a pass that checks {more} takes "
        f"{verify_cost:.1f} times as long as one that checks none, which {acceptance} does not win back."
    )
