"""Reads vLLM's `--speculative-config '{...}'`. Settings without a counterpart here are refused by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from paceline.config import AUTO, SpeculationConfig, path_or_name
from paceline.drafters.methods import DRAFT_MODEL, METHODS, OPTIONS, by_vllm_name, unknown_method
from paceline.errors import InvalidParameter, shown

FIELD = "speculative_config"
RENAMED = {"num_speculative_tokens": "k", "prompt_lookup_max": "ngram_max", "prompt_lookup_min": "ngram_min"}
# Settings that accept tokens the target would not have produced.
LOSSY = {
    "acceptance_method",
    "acceptance_threshold",
    "posterior_alpha",
    "posterior_threshold",
    "rejection_sample_method",
    "relaxed_thinking",
    "synthetic_acceptance_rate",
    "typical_acceptance_sampler_posterior_alpha",
    "typical_acceptance_sampler_posterior_threshold",
}


def read(value: str | Mapping[str, Any], base: SpeculationConfig) -> SpeculationConfig:
    """The given settings over `base`."""
    given = {key: setting for key, setting in _parse(value).items() if setting is not None}
    if _brackets(given.get("model")) is not None:  # as older versions name a method without a model: "[ngram]"
        given["method"] = _brackets(given.pop("model"))
    changes: dict[str, Any] = {"method": _method(given, base)}
    for key, setting in given.items():
        if key in LOSSY:
            raise InvalidParameter(FIELD, f"{key} would change the model's output; paceline is always lossless")
        if key == "model":
            changes[_model_option(changes["method"])] = path_or_name(FIELD, setting)
        elif key == "draft_tensor_parallel_size" and setting == 1:  # one device is all there is
            continue
        elif key in RENAMED:
            if not isinstance(setting, int) or isinstance(setting, bool):
                raise InvalidParameter(FIELD, f"{key} must be a whole number, got {shown(setting)}")
            _refuse_without_meaning(key, RENAMED[key], changes["method"])
            changes[RENAMED[key]] = setting
        elif key != "method":
            raise InvalidParameter(
                FIELD, f"{shown(key)} is not understood; known are method, model, {', '.join(RENAMED)}"
            )
    if changes.get("ngram_max", base.ngram_max) < base.ngram_min:
        changes.setdefault("ngram_min", changes["ngram_max"])
    try:
        return replace(base, **changes)
    except InvalidParameter as refused:
        theirs = {ours: key for key, ours in RENAMED.items() if key in given}
        problem = str(refused).removeprefix(f"{refused.field}: ")
        raise InvalidParameter(FIELD, f"{theirs.get(refused.field, refused.field)} {problem}") from refused


def _method(given: Mapping[str, Any], base: SpeculationConfig) -> str:
    """As named; a model without a method is a draft model, as in vLLM."""
    if "method" not in given:
        return DRAFT_MODEL if "model" in given else base.method
    name = given["method"]
    if not isinstance(name, str):
        raise InvalidParameter(FIELD, f"method must be a name, got {shown(name)}")
    method = by_vllm_name(name)
    if method is None:
        known = [each.vllm for each in METHODS.values() if each.vllm]
        raise InvalidParameter(FIELD, f"method {unknown_method(name, known)}")
    return method.name


def _model_option(method: str) -> str:
    """The option that vLLM's `model` sets: the checkpoint the method needs."""
    needs = METHODS[method].needs if method in METHODS else ()
    if len(needs) != 1:
        raise InvalidParameter(FIELD, f"model has no meaning for method {method}; leave it out")
    return needs[0]


def _refuse_without_meaning(key: str, option: str, method: str) -> None:
    taken = OPTIONS if method == AUTO else METHODS[method].options if method in METHODS else ()
    if option not in ("k", *taken):
        raise InvalidParameter(FIELD, f"{key} has no meaning for method {method}; leave it out")


def _parse(value: str | Mapping[str, Any]) -> Mapping[str, Any]:
    if isinstance(value, Mapping):
        return value
    if not isinstance(value, str):
        raise InvalidParameter(FIELD, f"must be a dict or a JSON object, got {shown(value)}")
    try:
        parsed = json.loads(value)
    except (ValueError, RecursionError) as error:
        raise InvalidParameter(FIELD, f"is not JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise InvalidParameter(FIELD, f"must be a JSON object, got {shown(value)}")
    return parsed


def _brackets(model: Any) -> str | None:
    return model[1:-1] if isinstance(model, str) and model.startswith("[") and model.endswith("]") else None
