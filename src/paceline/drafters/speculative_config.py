"""Settings of speculation: vLLM's `--speculative-config '{...}'`, and the check of what was chosen.

A list of vLLM's objects gives several drafters, of which the policy picks one for each row and step. Settings without a
counterpart in this package are refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import fields, replace
from typing import Any

from paceline.config import AUTO, NONE, SpeculationConfig, path_or_name
from paceline.drafters.method_names import by_vllm_name, method_names, unknown_method
from paceline.drafters.methods import DRAFT_MODEL, METHODS, OPTIONS, is_packaged, needs_one
from paceline.errors import InvalidParameter, short_repr

FIELD = "speculative_config"
SEVERAL = ("draft_model", "drafter")  # options of which each object of a list gives one
SpeculativeConfig = str | Mapping[str, Any] | SequenceOf[Mapping[str, Any]]
UNSET = {field.name: field.default for field in fields(SpeculationConfig)}
RENAMED = {"num_speculative_tokens": "k", "prompt_lookup_max": "ngram_max", "prompt_lookup_min": "ngram_min"}
# Settings that accept tokens which the target would not have produced.
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


def given_options(speculation: SpeculationConfig) -> list[str]:
    """Return the options that differ from their defaults, without method and k."""
    return [
        name for name, unset in UNSET.items() if name not in ("method", "k") and getattr(speculation, name) != unset
    ]


def check(speculation: SpeculationConfig, *, only_chosen: bool = False) -> None:
    """Refuse an unknown method, one that lacks what it needs, and options without effect.

    `only_chosen`: no request will choose another method, so options of other methods have no effect either.
    """
    method = speculation.method
    if method not in (*method_names(), AUTO):
        raise InvalidParameter("method", unknown_method(method))
    if method == NONE:
        taken: tuple[str, ...] = ()
    else:
        taken = METHODS[method].options if only_chosen and method != AUTO else OPTIONS
    for option in given_options(speculation):
        if option not in taken:
            raise InvalidParameter(option, f"means nothing to method {method}; leave one of the two out")
    for need in METHODS[method].needs if method in METHODS else ():
        setting = getattr(speculation, need)
        if setting == (NONE,) or not (setting or is_packaged(method) or METHODS[method].native):
            raise InvalidParameter(need, needs_one(method, need))


def read(value: SpeculativeConfig, base: SpeculationConfig) -> SpeculationConfig:
    """Return `base` with vLLM's settings over it."""
    parsed = _parse(value)
    if isinstance(parsed, Mapping):
        return _read_one(parsed, base)
    if not parsed:
        raise InvalidParameter(FIELD, "is an empty list; leave it out, or name a method in it")
    each = [_read_one(one, base) for one in parsed]
    for settings, one in zip(parsed, each, strict=True):
        if not settings.get("method") and not settings.get("model"):
            raise InvalidParameter(FIELD, "an object of the list names neither a method nor a model")
        if one.method in METHODS and METHODS[one.method].needs and not settings.get("model"):
            raise InvalidParameter(FIELD, f"method {one.method} needs a model, and an object of the list names none")
    return _joined(each, base)


def _joined(each: SequenceOf[SpeculationConfig], base: SpeculationConfig) -> SpeculationConfig:
    """Return the settings of several drafters as one; no packaged drafter joins those that are named."""
    if len({one.k for one in each}) > 1:
        raise InvalidParameter(FIELD, "num_speculative_tokens must be the same in all of a list, or left out of all")
    changes: dict[str, Any] = {"k": each[0].k}
    for option in OPTIONS:
        known = [getattr(one, option) for one in each if getattr(one, option) != getattr(base, option)]
        if option in SEVERAL:
            changes[option] = getattr(base, option) + tuple(name for names in known for name in names)
        elif known:
            changes[option] = known[0]  # an option of one method, which a list names once
    methods = {one.method for one in each}
    for method in methods & METHODS.keys():
        if not METHODS[method].needs and sum(one.method == method for one in each) > 1:
            raise InvalidParameter(FIELD, f"names method {method} twice; name it once")
    changes["method"] = methods.pop() if len(methods) == 1 else AUTO
    if changes["method"] == AUTO and not changes["drafter"]:
        changes["drafter"] = NONE
    return replace(base, **changes)


def _read_one(settings: Mapping[str, Any], base: SpeculationConfig) -> SpeculationConfig:
    settings = {key: setting for key, setting in settings.items() if setting is not None}
    if _brackets(settings.get("model")) is not None:  # older versions name a method without a model so: "[ngram]"
        settings["method"] = _brackets(settings.pop("model"))
    changes: dict[str, Any] = {"method": _method(settings, base)}
    for key, setting in settings.items():
        if key in LOSSY:
            raise InvalidParameter(FIELD, f"{key} would change the model's output; paceline is always lossless")
        if key == "model":
            changes[_model_option(changes["method"])] = path_or_name(FIELD, setting)
        elif key == "draft_tensor_parallel_size" and setting == 1:
            continue
        elif key in RENAMED:
            if not isinstance(setting, int) or isinstance(setting, bool):
                raise InvalidParameter(FIELD, f"{key} must be a whole number, got {short_repr(setting)}")
            _refuse_without_meaning(key, RENAMED[key], changes["method"])
            changes[RENAMED[key]] = setting
        elif key != "method":
            raise InvalidParameter(
                FIELD, f"{short_repr(key)} is not understood; known are method, model, {', '.join(RENAMED)}"
            )
    _refuse_given_twice(changes, base)
    if changes.get("ngram_max", base.ngram_max) < base.ngram_min:
        changes.setdefault("ngram_min", changes["ngram_max"])
    try:
        return replace(base, **changes)
    except InvalidParameter as refused:
        vllm_names = {option: key for key, option in RENAMED.items() if key in settings}
        problem = str(refused).removeprefix(f"{refused.field}: ")
        raise InvalidParameter(FIELD, f"{vllm_names.get(refused.field, refused.field)} {problem}") from refused


def _refuse_given_twice(changes: Mapping[str, Any], base: SpeculationConfig) -> None:
    """Refuse an option that is given as an argument and in speculative_config, with different values."""
    for option, setting in changes.items():
        beside = getattr(base, option)
        names = setting if isinstance(beside, str) or not isinstance(setting, str) else (setting,)
        if beside not in (UNSET[option], names) and (option, beside) != ("method", AUTO):
            raise InvalidParameter(
                option, f"is {short_repr(beside)} and {short_repr(setting)} in {FIELD}; give it once"
            )


def _method(settings: Mapping[str, Any], base: SpeculationConfig) -> str:
    """Return the method that is named; a model without a method is a draft model, as in vLLM."""
    if "method" not in settings:
        return DRAFT_MODEL if "model" in settings else base.method
    name = settings["method"]
    if not isinstance(name, str):
        raise InvalidParameter(FIELD, f"method must be a name, got {short_repr(name)}")
    method = by_vllm_name(name)
    if method is None:
        known = [each.vllm for each in METHODS.values() if each.vllm]
        raise InvalidParameter(FIELD, f"method {unknown_method(name, known)}")
    return method.name


def _model_option(method: str) -> str:
    """Return the option that vLLM's `model` sets: the checkpoint that the method needs."""
    needs = METHODS[method].needs if method in METHODS else ()
    if len(needs) != 1:
        raise InvalidParameter(FIELD, f"model has no meaning for method {method}; leave it out")
    return needs[0]


def _refuse_without_meaning(key: str, option: str, method: str) -> None:
    taken = OPTIONS if method == AUTO else METHODS[method].options if method in METHODS else ()
    if option not in ("k", *taken):
        raise InvalidParameter(FIELD, f"{key} has no meaning for method {method}; leave it out")


def _parse(value: SpeculativeConfig) -> Mapping[str, Any] | list[Mapping[str, Any]]:
    parsed: Any = value
    if isinstance(value, str):
        try:
            parsed = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise InvalidParameter(FIELD, f"is not JSON: {error}") from error
    if isinstance(parsed, Mapping):
        return parsed
    if isinstance(parsed, list | tuple) and all(isinstance(each, Mapping) for each in parsed):
        return list(parsed)
    kind = "a JSON object" if isinstance(value, str) else "a dict or a JSON object"
    raise InvalidParameter(FIELD, f"must be {kind}, or a list of them, got {short_repr(value)}")


def _brackets(model: Any) -> str | None:
    return model[1:-1] if isinstance(model, str) and model.startswith("[") and model.endswith("]") else None
