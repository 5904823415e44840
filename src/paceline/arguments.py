"""Arguments of `generate`, `chat` and `stream` beside the prompt: read into one form, or refused by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.config import truth
from paceline.errors import InvalidParameter, short_repr
from paceline.sampling_params import SamplingParams
from paceline.text.tokenizer import Tokenizer
from paceline.vllm_compat import CALL, refuse

Params = SamplingParams | Mapping[str, Any] | Sequence[SamplingParams | Mapping[str, Any]] | None
CHAT_OPTIONS = ("tools", "chat_template", "chat_template_kwargs", "add_generation_prompt", "continue_final_message")


def chat_options(given: Mapping[str, Any], tokenizer: Tokenizer) -> dict[str, Any]:
    """As `Tokenizer.render_chat` takes them. What the template does not read is refused: it would have no effect."""
    named = {name: given[name] for name in CHAT_OPTIONS if given.get(name) is not None}
    variables = _variables(named.pop("chat_template_kwargs", {}))
    goes_on = truth("continue_final_message", named.get("continue_final_message", False))
    if truth("add_generation_prompt", named.setdefault("add_generation_prompt", not goes_on)) and goes_on:
        raise InvalidParameter(
            "continue_final_message", "leaves no room for add_generation_prompt; give one of the two"
        )
    if not isinstance(named.get("tools", []), list | tuple):
        raise InvalidParameter("tools", f"must be a list of tools, got {short_repr(named['tools'])}")
    read = [*variables, *(["tools"] if named.get("tools") else [])]
    if read:
        template = tokenizer.chat_template(named.get("chat_template"), with_tools="tools" in read)
        for name in read:
            if name not in template.variables:
                raise InvalidParameter(name, "the model's chat template does not read it, so it would change nothing")
    return variables | named


def _variables(given: Any) -> dict[str, Any]:
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise InvalidParameter("chat_template_kwargs", f"must map names to values, got {short_repr(given)}")
    for name in ("messages", *CHAT_OPTIONS):
        if name in given:
            raise InvalidParameter("chat_template_kwargs", f"{name} is an argument of its own")
    return dict(given)


def only_params(params: Any, given: Mapping[str, Any], known: Sequence[str]) -> Any:
    """The sampling parameters of a call under either of their names; other arguments must be `known`."""
    more = {name: value for name, value in given.items() if name not in ("sampling_params", *known)}
    refuse(more, CALL, ("sampling_params", "params", "use_tqdm", *known), "this call")
    named = given.get("sampling_params")
    if named is not None and params is not None:
        raise InvalidParameter("sampling_params", "is another name of params; give one of the two")
    return params if named is None else named


def per_prompt(params: Any, count: int) -> list[SamplingParams | None]:
    if params is None or isinstance(params, SamplingParams | Mapping):
        return [_read_params(params)] * count
    if isinstance(params, str | bytes) or not isinstance(params, Sequence):
        raise InvalidParameter(
            "sampling_params", f"must be SamplingParams, or a list of them, got {short_repr(params)}"
        )
    if len(params) != count:
        raise InvalidParameter("sampling_params", f"{len(params)} of them for {count} prompts; give one or as many")
    return [_read_params(one) for one in params]


def _read_params(params: Any) -> SamplingParams | None:
    if params is None or isinstance(params, SamplingParams):
        return params
    if not isinstance(params, Mapping) or not all(isinstance(name, str) for name in params):
        raise InvalidParameter("sampling_params", f"must be SamplingParams or a dict of them, got {short_repr(params)}")
    return SamplingParams(**params)
