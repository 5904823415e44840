"""Reads tokenizer_config.json: special tokens, added tokens, chat templates; a wrong type is refused by its key."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tokenizers import AddedToken

from paceline.errors import BrokenModel

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
ADDED_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
Json = dict[str, Any]


def named_tokens(config: Json) -> dict[str, str]:
    return {name: _text(config[name], name) for name in NAMED_TOKENS if config.get(name) is not None}


def declared_tokens(config: Json) -> Iterator[AddedToken]:
    """Added tokens in the order of their ids, then the named ones, then those that are special besides."""
    added = config.get("added_tokens_decoder") or {}
    if not isinstance(added, dict) or not all(key.isdecimal() for key in added):
        raise _wrong("added_tokens_decoder", "an object of tokens by id")
    for _, entry in sorted(added.items(), key=lambda item: int(item[0])):
        yield _added_token(entry)
    key = "extra_special_tokens" if config.get("extra_special_tokens") else "additional_special_tokens"
    extra = config.get(key) or []
    if not isinstance(extra, (list, dict)):
        raise _wrong(key, "a list of tokens")
    texts = [_text(token, key) for token in (extra.values() if isinstance(extra, dict) else extra)]
    for text in (*named_tokens(config).values(), *texts):
        yield AddedToken(text, special=True, normalized=False)


def chat_templates(config: Json) -> dict[str, str]:
    """By name; the only one is called default."""
    template = config.get("chat_template")
    if isinstance(template, str):
        return {"default": template}
    try:
        named = {entry["name"]: entry["template"] for entry in template or []}
    except (KeyError, TypeError) as error:
        raise _wrong("chat_template", "text or a list of named templates") from error
    if not all(isinstance(text, str) for pair in named.items() for text in pair):
        raise _wrong("chat_template", "text or a list of named templates")
    return named


def _text(token: Any, key: str) -> str:
    text = token.get("content") if isinstance(token, dict) else token
    if not isinstance(text, str):
        raise _wrong(key, "the text of a token")
    return text


def _added_token(entry: Any) -> AddedToken:
    flags = {key: entry[key] for key in ADDED_FLAGS if key in entry} if isinstance(entry, dict) else {}
    if not all(isinstance(flag, bool) for flag in flags.values()):
        raise _wrong("added_tokens_decoder", "tokens whose flags are true or false without quotation marks")
    return AddedToken(_text(entry, "added_tokens_decoder"), **flags)


def _wrong(key: str, expected: str) -> BrokenModel:
    return BrokenModel(f"tokenizer_config.json: {key} must be {expected}")
