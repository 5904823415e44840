"""What the advisor found, as advice.json holds it: profile, predictions, check and choice, and what is missing."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.advisor import figures as figures_of
from paceline.advisor.config import FILES, VllmConfig, paceline_config, paceline_flags, vllm_config
from paceline.advisor.figures import Figure, Figures
from paceline.advisor.pass_cost import PassCost
from paceline.advisor.profile import DrafterCost
from paceline.advisor.reasons import Case, Reason, uncertain, why_off
from paceline.advisor.recommend import OFF, Choice, decide, pays_somewhere, ranked, up_to
from paceline.bench.grid import AUTO, Contender


@dataclass(kw_only=True)
class Advice:
    """Grows as the run goes on; whatever ends it, what is in it stands, and `missing` says what is not."""

    model: str
    settings: Mapping[str, Any]
    where: Mapping[str, Any] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)  # draft model -> why
    cost: PassCost | None = None
    drafters: Sequence[DrafterCost] = ()
    predicted: Figures = field(default_factory=dict)
    between: Figures = field(default_factory=dict)  # the best choice at further numbers of requests at once
    measured: Figures = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)

    @property
    def known(self) -> Figures:
        """What the choice rests on: prediction and check together, or the prediction alone."""
        return figures_of.combined(self.predicted, self.measured)

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
    def stops_at(self) -> int | None:
        """The least number of requests at once, of those looked at, from which on the choice no longer pays."""
        choice = self.choice
        if choice is None or choice.off:
            return None
        looked_at = {**self.between, **self.known}
        highest = up_to(looked_at, choice.contender)
        return min((level for level, who in looked_at if who == choice.contender and level > highest), default=None)

    @property
    def not_yet(self) -> list[int]:
        """Numbers of requests at once at which the choice does not pay, though it does with more."""
        choice = self.choice
        if choice is None or choice.off:
            return []
        mine = {level: figure for (level, who), figure in self.known.items() if who == choice.contender}
        return sorted(level for level, figure in mine.items() if level < choice.up_to and not figure.pays)

    def reason(self, level: int) -> Reason | None:
        """Why nothing pays at this number of requests at once; None where something does, or nothing is known."""
        here = figures_of.at_level(self.known, level)
        candidates = [(contender, figure) for contender, figure in here if contender.method != AUTO]
        off = self.choice is not None and self.choice.off
        if self.cost is None or not candidates or any(f.surely_pays if off else f.pays for _, f in here):
            return None
        leader, best = max(here, key=lambda entry: entry[1].ratio)
        if best.pays:
            return uncertain(leader.label, best)
        contender, figure = max(candidates, key=lambda entry: entry[1].ratio)
        return why_off(self._case(level, contender, figure))

    def _case(self, level: int, contender: Contender, figure: Figure) -> Case:
        assert self.cost is not None
        assert contender.k is not None
        plain = self.cost.decoding(level, 0)
        seconds = next((cost.at(level) for cost in self.drafters if cost.serves(contender)), 0.0)
        return Case(
            label=contender.label,
            k=contender.k,
            concurrency=level,
            figure=figure,
            draft_cost=seconds / plain,
            verify_cost=self.cost.verify_cost(level, contender.k),
            temperature=float(self.settings.get("temperature", 0.0)),
            pays_alone=any(figure.pays for (where, _), figure in self.known.items() if where < level),
        )

    @property
    def vllm(self) -> VllmConfig:
        assert self.choice is not None
        return vllm_config(self.choice.contender, self.best_fixed)

    def to_json(self) -> dict[str, Any]:
        choice = self.choice
        levels = figures_of.levels_of(self.known)
        reasons = {str(level): dataclasses.asdict(found) for level in levels if (found := self.reason(level))}
        chosen: dict[str, Any] | None = None
        if choice is not None:
            chosen = {
                "label": "off" if choice.contender == OFF else choice.contender.label,
                "paceline": paceline_config(choice.contender),
                "flags": paceline_flags(choice.contender),
                "vllm": dataclasses.asdict(self.vllm),
                "pays_up_to": up_to(self.known, choice.contender),
                "stops_at": self.stops_at,
                "checked": figures_of.levels_of(self.measured),
                "why_not": reasons,
            }
        return {
            "model": self.model,
            "where": dict(self.where),
            "settings": dict(self.settings),
            "choice": chosen,
            "missing": list(self.missing),
            "refused": dict(self.refused),
            "predicted": figures_of.as_json(self.predicted),
            "between": figures_of.as_json(self.between),
            "measured": figures_of.as_json(self.measured),
            "profile": None if self.cost is None else dataclasses.asdict(self.cost),
            "drafters": [dataclasses.asdict(cost) for cost in self.drafters],
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
