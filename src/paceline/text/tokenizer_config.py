"""Special tokens, added tokens and chat templates of tokenizer_config.json; a wrong type is refused by its key."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tokenizers import AddedToken

from paceline.files.json_fields import Json, JsonFields

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
ADDED_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
FILE = "tokenizer_config.json"
MOST_DIGITS = 10  # of a token's id
TEMPLATES = "text or a list of named templates"


def named_tokens(config: Json) -> dict[str, str]:
    fields = JsonFields(config, FILE)
    return {name: _text(config[name], name, fields) for name in NAMED_TOKENS if config.get(name) is not None}


def declared_tokens(config: Json) -> Iterator[AddedToken]:
    """Yield the added tokens in the order of their ids, then the named ones, then further special tokens."""
    fields = JsonFields(config, FILE)
    added = fields.section("added_tokens_decoder")
    if not all(key.isdecimal() and len(key) <= MOST_DIGITS for key in added.values):
        raise fields.wrong("added_tokens_decoder", "an object of tokens by id")
    for number in sorted(added.values, key=int):
        yield _added_token(added.values[number], fields)
    key = "extra_special_tokens" if config.get("extra_special_tokens") else "additional_special_tokens"
    extra = config.get(key) or []
    if not isinstance(extra, (list, dict)):
        raise fields.wrong(key, "a list of tokens")
    texts = [_text(token, key, fields) for token in (extra.values() if isinstance(extra, dict) else extra)]
    for text in (*named_tokens(config).values(), *texts):
        yield AddedToken(text, special=True, normalized=False)


def chat_templates(config: Json) -> dict[str, str]:
    """Return the templates by name; the only one is called default."""
    fields, template = JsonFields(config, FILE), config.get("chat_template")
    if isinstance(template, str):
        return {"default": template}
    try:
        named = {entry["name"]: entry["template"] for entry in template or []}
    except (KeyError, TypeError) as error:
        raise fields.wrong("chat_template", TEMPLATES) from error
    if not all(isinstance(text, str) for pair in named.items() for text in pair):
        raise fields.wrong("chat_template", TEMPLATES)
    return named


def _text(token: Any, key: str, fields: JsonFields) -> str:
    text = token.get("content") if isinstance(token, dict) else token
    if not isinstance(text, str):
        raise fields.wrong(key, "the text of a token")
    return text


def _added_token(entry: Any, fields: JsonFields) -> AddedToken:
    key = "added_tokens_decoder"
    text = _text(entry, key, fields)
    flags = JsonFields(entry if isinstance(entry, dict) else {}, FILE, f"{{}} of {key}")
    return AddedToken(text, **{name: flags.flag(name) for name in ADDED_FLAGS if name in flags.values})
