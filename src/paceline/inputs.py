"""Prompts and arguments of `generate`, `chat` and `stream`, read into one form or refused with a sentence."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from paceline.config import truth
from paceline.errors import InvalidParameter, InvalidPrompt, short_repr
from paceline.sampling_params import SamplingParams
from paceline.text.tokenizer import Tokenizer
from paceline.vllm_compat import CALL, refuse

Prompt = str | Sequence[int] | Mapping[str, Any]
Message = Mapping[str, Any]
FORMS = "a prompt is text, a list of token ids, {'prompt': text} or {'prompt_token_ids': ids}"
Params = SamplingParams | Mapping[str, Any] | Sequence[SamplingParams | Mapping[str, Any]] | None
CHAT_OPTIONS = ("tools", "chat_template", "chat_template_kwargs", "add_generation_prompt", "continue_final_message")


def each_prompt(prompts: Any) -> list[Any]:
    """Return the prompts of a call that takes one or a list of them; `read_prompt` reads each."""
    prompts = _listed(prompts)
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not _is_list(prompts):
        hint = "; make a list of it" if isinstance(prompts, Iterable) and not isinstance(prompts, bytes) else ""
        raise InvalidPrompt(f"{FORMS}, or a list of these; got {short_repr(prompts)}{hint}")
    is_one = len(prompts) > 0 and not isinstance(prompts[0], str | Mapping) and not _is_list(_listed(prompts[0]))
    if is_one and prompts[0] is not None:
        return [prompts]
    return list(prompts)


def read_prompt(prompt: Any) -> str | list[int]:
    """Return a prompt as text or as token ids."""
    if isinstance(prompt, Mapping):
        prompt = _from_mapping(prompt)
    prompt = _listed(prompt)
    if isinstance(prompt, str):
        if not prompt:
            raise InvalidPrompt("the prompt is empty; give at least one character")
        return prompt
    if not _is_list(prompt):
        raise InvalidPrompt(f"{FORMS}; got {short_repr(prompt)}")
    if all(type(token) is int for token in prompt):
        return list(prompt)
    return [_token_id(token) for token in prompt]


def read_salt(prompt: Any) -> str | None:
    """Return a prompt's `cache_salt`, if it has one."""
    salt = prompt.get("cache_salt") if isinstance(prompt, Mapping) else None
    if salt is not None and (not isinstance(salt, str) or not salt):
        raise InvalidPrompt(f"cache_salt must be a text, and not empty; got {short_repr(salt)}")
    return salt


def is_conversation(prompt: Any) -> bool:
    """Return True if a prompt is a list of messages."""
    return _is_list(prompt) and len(prompt) > 0 and isinstance(prompt[0], Mapping) and "role" in prompt[0]


def each_conversation(messages: Any) -> list[Any]:
    """Return the conversations of a call that takes one or a list of them."""
    if isinstance(messages, str):
        raise InvalidPrompt("chat() takes a list of messages; for plain text use generate()")
    several = _is_list(messages) and len(messages) > 0 and not isinstance(messages[0], Mapping | str)
    return list(messages) if several else [messages]


def _from_mapping(prompt: Mapping[str, Any]) -> Any:
    if "role" in prompt:
        raise InvalidPrompt("a message is no prompt; for messages use chat()")
    known = ("prompt", "prompt_token_ids", "cache_salt")
    unknown = [key for key, value in prompt.items() if key not in known and value is not None]
    if unknown:
        raise InvalidPrompt(f"{FORMS}; {short_repr(unknown[0])} is not there")
    values = [value for value in (prompt.get("prompt"), prompt.get("prompt_token_ids")) if value is not None]
    if len(values) != 1:
        raise InvalidPrompt(f"{FORMS}; give one of the two keys, got {short_repr(dict(prompt))}")
    return values[0]


def _token_id(token: Any) -> int:
    try:
        if isinstance(token, bool):
            raise TypeError
        return operator.index(token)
    except TypeError:
        hint = "for messages use chat()" if isinstance(token, Mapping) else f"got {short_repr(token)}"
        raise InvalidPrompt(f"a prompt is text or a list of token ids, which are whole numbers; {hint}") from None


def _listed(value: Any) -> Any:
    """Return arrays and tensors as lists."""
    is_array = hasattr(value, "tolist") and hasattr(value, "ndim") and not isinstance(value, memoryview)
    return value.tolist() if is_array else value


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray | memoryview)


def chat_options(arguments: Mapping[str, Any], tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the options of `Tokenizer.render_chat`. Variables that the template does not read are refused: they would
    have no effect."""
    named = {name: arguments[name] for name in CHAT_OPTIONS if arguments.get(name) is not None}
    variables = _variables(named.pop("chat_template_kwargs", {}))
    continues = truth("continue_final_message", named.get("continue_final_message", False))
    if truth("add_generation_prompt", named.setdefault("add_generation_prompt", not continues)) and continues:
        raise InvalidParameter(
            "continue_final_message", "leaves no room for add_generation_prompt; give one of the two"
        )
    if not isinstance(named.get("tools", []), list | tuple):
        raise InvalidParameter("tools", f"must be a list of tools, got {short_repr(named['tools'])}")
    names = [*variables, *(["tools"] if named.get("tools") else [])]
    if names:
        template = tokenizer.chat_template(named.get("chat_template"), with_tools="tools" in names)
        for name in names:
            if name not in template.variables:
                raise InvalidParameter(name, "the model's chat template does not read it, so it would change nothing")
    return variables | named


def _variables(variables: Any) -> dict[str, Any]:
    if not isinstance(variables, Mapping) or not all(isinstance(name, str) for name in variables):
        raise InvalidParameter("chat_template_kwargs", f"must map names to values, got {short_repr(variables)}")
    for name in ("messages", *CHAT_OPTIONS):
        if name in variables:
            raise InvalidParameter("chat_template_kwargs", f"{name} is an argument of its own")
    return dict(variables)


def only_params(params: Any, arguments: Mapping[str, Any], known: Sequence[str]) -> Any:
    """Return the sampling parameters of a call, under either of their names; other arguments must be `known`."""
    others = {name: value for name, value in arguments.items() if name not in ("sampling_params", *known)}
    refuse(others, CALL, ("sampling_params", "params", "use_tqdm", *known), "this call")
    named = arguments.get("sampling_params")
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
    return [_read_params(each) for each in params]


def _read_params(params: Any) -> SamplingParams | None:
    if params is None or isinstance(params, SamplingParams):
        return params
    if not isinstance(params, Mapping) or not all(isinstance(name, str) for name in params):
        raise InvalidParameter("sampling_params", f"must be SamplingParams or a dict of them, got {short_repr(params)}")
    return SamplingParams(**params)
