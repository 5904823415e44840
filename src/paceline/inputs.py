"""What callers give as prompts, in one form: text, or a list of token ids. Anything else is refused with a sentence."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from paceline.errors import InvalidPrompt, short_repr

Prompt = str | Sequence[int] | Mapping[str, Any]
Message = Mapping[str, Any]
FORMS = "a prompt is text, a list of token ids, {'prompt': text} or {'prompt_token_ids': ids}"


def each_prompt(prompts: Any) -> list[Any]:
    """The prompts of a call that was given one or a list of them; they are read by `read_prompt`."""
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
    """Text, or token ids."""
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


def is_conversation(prompt: Any) -> bool:
    """Messages, in place of a prompt."""
    return _is_list(prompt) and len(prompt) > 0 and isinstance(prompt[0], Mapping) and "role" in prompt[0]


def each_conversation(messages: Any) -> list[Any]:
    """The conversations of a call that was given one or a list of them."""
    if isinstance(messages, str):
        raise InvalidPrompt("chat() takes a list of messages; for plain text use generate()")
    several = _is_list(messages) and len(messages) > 0 and not isinstance(messages[0], Mapping | str)
    return list(messages) if several else [messages]


def _from_mapping(prompt: Mapping[str, Any]) -> Any:
    if "role" in prompt:
        raise InvalidPrompt("a message is no prompt; for messages use chat()")
    unknown = [key for key, value in prompt.items() if key not in ("prompt", "prompt_token_ids") and value is not None]
    if unknown:
        raise InvalidPrompt(f"{FORMS}; {short_repr(unknown[0])} is not there")
    given = [value for value in (prompt.get("prompt"), prompt.get("prompt_token_ids")) if value is not None]
    if len(given) != 1:
        raise InvalidPrompt(f"{FORMS}; give one of the two keys, got {short_repr(dict(prompt))}")
    return given[0]


def _token_id(token: Any) -> int:
    try:
        if isinstance(token, bool):
            raise TypeError
        return operator.index(token)
    except TypeError:
        hint = "for messages use chat()" if isinstance(token, Mapping) else f"got {short_repr(token)}"
        raise InvalidPrompt(f"a prompt is text or a list of token ids, which are whole numbers; {hint}") from None


def _listed(value: Any) -> Any:
    """Arrays and tensors as lists."""
    is_array = hasattr(value, "tolist") and hasattr(value, "ndim") and not isinstance(value, memoryview)
    return value.tolist() if is_array else value


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray | memoryview)
