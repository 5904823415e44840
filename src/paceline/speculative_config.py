"""vLLM's `--speculative-config '{...}'`, understood. What it cannot mean here is refused by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from paceline.config import SpeculationConfig
from paceline.errors import InvalidParameter

FIELD = "speculative_config"
METHODS = {"ngram": "ngram", "suffix": "suffix", "draft_model": "draft-model", "draft-model": "draft-model"}
RENAMED = {"num_speculative_tokens": "k", "prompt_lookup_max": "ngram_max", "prompt_lookup_min": "ngram_min"}
# Anything that accepts what the target would not have said.
LOSSY = {
    "acceptance_method",
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
    given = _parse(value)
    changes: dict[str, Any] = {}
    for key, setting in given.items():
        if key in LOSSY:
            raise InvalidParameter(FIELD, f"{key} would change what the model says; paceline is always lossless")
        if key == "method":
            if not isinstance(setting, str) or setting not in METHODS:
                raise InvalidParameter(FIELD, f"method {setting!r} is not one of {', '.join(METHODS)}")
            changes["method"] = METHODS[setting]
        elif key == "model":
            changes["draft_model"] = str(setting)
        elif key in RENAMED:
            if not isinstance(setting, int) or isinstance(setting, bool):
                raise InvalidParameter(FIELD, f"{key} must be a whole number, got {setting!r}")
            changes[RENAMED[key]] = setting
        else:
            raise InvalidParameter(FIELD, f"{key} is not understood; known are method, model, {', '.join(RENAMED)}")
    if "draft_model" in changes and "method" not in changes:
        changes["method"] = "draft-model"
    method = changes.get("method", base.method)
    for key, wanted in (("prompt_lookup_max", "ngram"), ("prompt_lookup_min", "ngram"), ("model", "draft-model")):
        if key in given and method not in (wanted, "auto"):
            raise InvalidParameter(FIELD, f"{key} has no meaning for method {method}; leave it out")
    if changes.get("ngram_max", base.ngram_max) < base.ngram_min:
        changes.setdefault("ngram_min", changes["ngram_max"])
    return replace(base, **changes)


def _parse(value: str | Mapping[str, Any]) -> Mapping[str, Any]:
    if isinstance(value, Mapping):
        return value
    try:
        parsed = json.loads(value)
    except ValueError as error:
        raise InvalidParameter(FIELD, f"is not JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise InvalidParameter(FIELD, f"must be a JSON object, got {value!r}")
    return parsed
