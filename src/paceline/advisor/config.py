"""The choice as settings: for paceline, and for vLLM where it has the method. No torch."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from typing import Any

from paceline.advisor.candidates import draft_model_of
from paceline.bench.grid import AUTO, Contender
from paceline.bench.results import PLAIN
from paceline.config import SpeculationConfig

FILES = ("advice.json", "paceline.json", "vllm.json")
VLLM = {"ngram": "ngram", "suffix": "suffix", "draft-model": "draft_model"}


@dataclass(frozen=True)
class VllmConfig:
    """`speculative_config` is None where vLLM has nothing that fits; `note` says why, or what to know."""

    speculative_config: dict[str, Any] | None
    note: str | None = None

    def flag(self) -> str | None:
        if self.speculative_config is None:
            return None
        return f"--speculative-config {shlex.quote(json.dumps(self.speculative_config))}"


def paceline_config(contender: Contender) -> dict[str, Any]:
    """Keywords of `LLM`, and the names of the command line's flags."""
    config: dict[str, Any] = {"method": contender.method}
    if contender.k is not None:
        config["k"] = contender.k
    if draft_model := draft_model_of(contender):
        config["draft_model"] = draft_model
    return config


def paceline_flags(contender: Contender) -> str:
    config = paceline_config(contender)
    return " ".join(f"--{name.replace('_', '-')} {shlex.quote(str(value))}" for name, value in config.items())


def vllm_config(chosen: Contender, best_fixed: Contender | None) -> VllmConfig:
    """`best_fixed`: the best fixed choice that pays, for whoever cannot have `auto`."""
    if chosen.method == PLAIN:
        return VllmConfig(None, "plain decoding needs no setting")
    if chosen.method != AUTO:
        return _fixed(chosen)
    if best_fixed is None:
        return VllmConfig(None, "vLLM has no method that chooses step by step as auto does, and no fixed choice pays")
    fixed = _fixed(best_fixed)
    note = f"vLLM has nothing that chooses step by step as auto does; this is the best fixed choice, {best_fixed.label}"
    return VllmConfig(fixed.speculative_config, f"{note}. {fixed.note}" if fixed.note else note)


def _fixed(contender: Contender) -> VllmConfig:
    name = VLLM.get(contender.method)
    if name is None:
        return VllmConfig(None, f"vLLM has no method {contender.method}")
    config: dict[str, Any] = {"method": name, "num_speculative_tokens": contender.k}
    note = None
    if name == "ngram":
        ours = SpeculationConfig()
        config |= {"prompt_lookup_max": ours.ngram_max, "prompt_lookup_min": ours.ngram_min}
    elif name == "suffix":
        note = "vLLM's suffix method needs the package arctic-inference"
    else:
        config["model"] = draft_model_of(contender)
    return VllmConfig(config, note)
