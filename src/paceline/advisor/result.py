"""The advisor's findings, as in advice.json, and the choice as settings for paceline and for vLLM. No torch."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.advisor.choice import (
    OFF,
    Choice,
    Figure,
    Figures,
    combined,
    decide,
    draft_model_of,
    levels_of,
    of_contender,
    pays_somewhere,
    ranked,
    up_to,
)
from paceline.advisor.cost import ActivationsCost, DrafterCost, PassCost
from paceline.advisor.reasons import Case, Reason, uncertain, why_off
from paceline.bench.grid import Contender
from paceline.config import AUTO, SpeculationConfig
from paceline.drafters.methods import METHODS, SUFFIX
from paceline.drafters.speculative_config import RENAMED

FILES = ("advice.json", "paceline.json", "vllm.json")
Found = dict[tuple[int, Contender], Figure]


@dataclass(kw_only=True)
class Advice:
    """Grows as the run goes on; if the run is interrupted, the content remains valid, and `missing` lists the rest."""

    model: str
    settings: Mapping[str, Any]
    where: Mapping[str, Any] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)  # draft model -> reason
    cost: PassCost | None = None
    drafters: Sequence[DrafterCost] = ()
    activations: ActivationsCost | None = None  # what int8 would cost and change; None: not to be had here
    predicted: Found = field(default_factory=dict)  # on the half of the prompts that the choice is made on
    measured: Found = field(default_factory=dict)  # on the other half
    between: Found = field(default_factory=dict)  # the choice at further concurrencies, on the other half
    missing: list[str] = field(default_factory=list)

    @property
    def known(self) -> Figures:
        """The figures behind the choice: both halves, or the first alone."""
        return combined(self.predicted, self.measured)

    @property
    def choice(self) -> Choice | None:
        """None: nothing is known yet."""
        return decide(self.known) if self.known else None

    @property
    def best_fixed(self) -> Contender | None:
        """The best fixed choice that pays somewhere."""
        fixed = ranked(self.known)
        return fixed[0] if fixed and pays_somewhere(self.known, fixed[0]) else None

    @property
    def _of_choice(self) -> dict[int, Figure]:
        """The choice's figures by concurrency, those between included; empty where it is off."""
        choice = self.choice
        return {} if choice is None or choice.off else of_contender({**self.between, **self.known}, choice.contender)

    @property
    def stops_at(self) -> int | None:
        """The least concurrency, of those measured, from which on the choice no longer pays."""
        highest = max((level for level, figure in self._of_choice.items() if figure.pays), default=0)
        return min((level for level in self._of_choice if level > highest), default=None)

    @property
    def not_yet(self) -> list[int]:
        """Concurrencies at which the choice does not pay, though it does at higher ones."""
        highest, asked = self.choice.up_to if self.choice else 0, levels_of(self.known)
        mine = self._of_choice.items()
        return sorted(level for level, figure in mine if level in asked and level < highest and not figure.pays)

    def reason(self, level: int) -> Reason | None:
        """Why nothing pays at this concurrency; None where something does, or nothing is known."""
        here = [(contender, figure) for (where, contender), figure in self.known.items() if where == level]
        candidates = [(contender, figure) for contender, figure in here if contender.method != AUTO]
        off = self.choice is not None and self.choice.off
        if self.cost is None or not candidates or any(f.surely_pays if off else f.pays for _, f in here):
            return None
        leader, best = max(here, key=lambda entry: entry[1].ratio)
        if best.pays:
            return uncertain(leader.label, best)
        contender, figure = max(candidates, key=lambda entry: entry[1].ratio)
        assert contender.k is not None
        seconds = next((cost.at(level) for cost in self.drafters if cost.serves(contender)), 0.0)
        case = Case(
            label=contender.label,
            k=contender.k,
            concurrency=level,
            figure=figure,
            draft_cost=seconds / self.cost.decoding(level, 0),
            verify_cost=self.cost.verify_cost(level, contender.k),
            temperature=float(self.settings.get("temperature", 0.0)),
            pays_alone=any(figure.pays for (where, _), figure in self.known.items() if where < level),
        )
        return why_off(case)

    @property
    def vllm(self) -> VllmConfig:
        assert self.choice is not None
        return vllm_config(self.choice.contender, self.best_fixed)

    def to_json(self) -> dict[str, Any]:
        choice, levels = self.choice, levels_of(self.known)
        chosen: dict[str, Any] | None = None
        if choice is not None:
            chosen = {
                "label": "off" if choice.off else choice.contender.label,
                "paceline": paceline_config(choice.contender),
                "flags": paceline_flags(choice.contender),
                "vllm": dataclasses.asdict(self.vllm),
                "pays_up_to": up_to(self.known, choice.contender),
                "stops_at": self.stops_at,
                "checked": levels_of(self.measured),
                "why_not": {str(level): dataclasses.asdict(why) for level in levels if (why := self.reason(level))},
            }
        return {
            "model": self.model,
            "where": dict(self.where),
            "settings": dict(self.settings),
            "choice": chosen,
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
        """The files written; vllm.json only where vLLM has something that fits."""
        found = {FILES[0]: self.to_json()}
        if self.choice is not None:
            found[FILES[1]] = paceline_config(self.choice.contender)
            if self.vllm.speculative_config is not None:
                found[FILES[2]] = self.vllm.speculative_config
        folder.mkdir(parents=True, exist_ok=True)
        for name, value in found.items():
            (folder / name).write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
        return [folder / name for name in found]


def _as_json(found: Figures) -> list[dict[str, object]]:
    return [
        {"concurrency": level, "label": contender.label, **dataclasses.asdict(contender), **dataclasses.asdict(figure)}
        for (level, contender), figure in found.items()
    ]


# -- settings


@dataclass(frozen=True)
class VllmConfig:
    """`speculative_config` is None where vLLM has nothing that fits; `note` is the reason, or a caveat."""

    speculative_config: dict[str, Any] | None
    note: str | None = None

    def flag(self) -> str | None:
        if self.speculative_config is None:
            return None
        return f"--speculative-config {shlex.quote(json.dumps(self.speculative_config))}"


def paceline_config(contender: Contender) -> dict[str, Any]:
    """Keywords of `LLM`, and the names of the command line's flags."""
    given = {"method": contender.method, "k": contender.k, "draft_model": draft_model_of(contender)}
    return {name: value for name, value in given.items() if value is not None}


def paceline_flags(contender: Contender) -> str:
    config = paceline_config(contender)
    return " ".join(f"--{name.replace('_', '-')} {shlex.quote(str(value))}" for name, value in config.items())


def vllm_config(chosen: Contender, best_fixed: Contender | None) -> VllmConfig:
    """`best_fixed`: the best fixed choice that pays, since vLLM has no `auto`."""
    if chosen == OFF:
        return VllmConfig(None, "plain decoding needs no setting")
    if chosen.method != AUTO:
        return _fixed(chosen)
    if best_fixed is None:
        return VllmConfig(None, "vLLM has no method that chooses step by step as auto does, and no fixed choice pays")
    fixed = _fixed(best_fixed)
    note = f"vLLM has nothing that chooses step by step as auto does; this is the best fixed choice, {best_fixed.label}"
    return VllmConfig(fixed.speculative_config, f"{note}. {fixed.note}" if fixed.note else note)


def _fixed(contender: Contender) -> VllmConfig:
    name = METHODS[contender.method].vllm
    if name is None:
        return VllmConfig(None, f"vLLM has no method {contender.method}")
    config: dict[str, Any] = {"method": name, "num_speculative_tokens": contender.k}
    ours = SpeculationConfig()
    options = METHODS[contender.method].options
    config |= {theirs: getattr(ours, field) for theirs, field in RENAMED.items() if field in options}
    if draft_model := draft_model_of(contender):
        config["model"] = draft_model
    return VllmConfig(config, VLLM_NOTES.get(contender.method))


VLLM_NOTES = {SUFFIX: "vLLM's suffix method needs the package arctic-inference"}
