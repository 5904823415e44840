"""Text to tokens and back, chat messages to tokens: as transformers' tokenizers, without importing transformers.

That import costs a second at every start, so tokenizer.json is read by the tokenizers library directly, with the
additions of tokenizer_config.json. Only folders without a tokenizer.json are read by transformers.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from paceline.chat_template import ChatTemplate
from paceline.detokenizer import IncrementalDecoder, StreamFactory, special_tokens, stream_factory
from paceline.errors import BrokenModel, InvalidPrompt, ModelNotFound, PacelineError, UnsupportedModel
from paceline.gguf_file import GGUFFile
from paceline.gguf_vocab import tokenizer_files

__all__ = ["IncrementalDecoder", "Tokenizer"]

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
Json = dict[str, Any]


class Tokenizer:
    """A model's tokenizer. `config` is tokenizer_config.json; `templates` holds the chat templates by name."""

    def __init__(self, backend: Backend, config: Json, templates: Mapping[str, str]) -> None:
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.named_tokens = {name: _text(config[name]) for name in NAMED_TOKENS if config.get(name) is not None}
        self._sources = dict(templates)
        self._templates: dict[str, ChatTemplate] = {}
        self._add_missing_tokens(config)
        self._specials = special_tokens(backend)
        self._streams: StreamFactory | None = None

    @classmethod
    def from_path(cls, path: Path) -> Tokenizer:
        """Of a model folder or a .gguf file."""
        if path.suffix == ".gguf":
            body, config = tokenizer_files(GGUFFile(path).metadata, str(path))
            return cls(Backend.from_str(json.dumps(body)), config, _templates_of(config))
        if not path.is_dir():
            raise ModelNotFound(f"{path} is not a model folder")
        config = _read_json(path / "tokenizer_config.json")
        if "added_tokens_decoder" not in config:  # the older layout keeps the special tokens in a file of their own
            config |= _read_json(path / "special_tokens_map.json")
        if (path / "tokenizer.json").exists():
            backend = _read_backend(path / "tokenizer.json")
        else:
            backend, defaults = _through_transformers(path)
            config = defaults | config
        return cls(backend, config, _templates_in(path, config))

    @property
    def vocab_size(self) -> int:
        return int(self.backend.get_vocab_size(with_added_tokens=True))

    def vocab(self) -> list[str]:
        """The tokens as the tokenizer spells them, by id."""
        known = self.backend.get_vocab(with_added_tokens=True)
        spelt = [""] * (max(known.values()) + 1)
        for token, number in known.items():
            spelt[number] = token
        return spelt

    def vocab_kind(self) -> str:
        """How tokens spell bytes: byte_level (GPT-2's letters), byte_fallback (<0x0A>), or raw."""
        decoder = json.dumps(json.loads(self.backend.to_str()).get("decoder") or {})
        return "byte_level" if "ByteLevel" in decoder else "byte_fallback" if "ByteFallback" in decoder else "raw"

    @property
    def eos_token_id(self) -> int | None:
        return self._id_of("eos_token")

    @property
    def bos_token_id(self) -> int | None:
        return self._id_of("bos_token")

    @property
    def has_chat_template(self) -> bool:
        return bool(self._sources)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        try:
            return list(self.backend.encode(text, add_special_tokens=add_special_tokens).ids)
        except TypeError as error:  # the library's error for half a surrogate pair
            raise InvalidPrompt("the prompt is not valid Unicode text") from error

    def encode_each(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Faster than one by one, and other Python threads can run meanwhile."""
        if len(texts) == 1:
            return [self.encode(texts[0], add_special_tokens)]
        try:
            found = self.backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        except TypeError as error:
            raise InvalidPrompt("a prompt is not valid Unicode text") from error
        return [list(encoding.ids) for encoding in found]

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        return str(self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def incremental_decoder(self, skip_special_tokens: bool = True) -> IncrementalDecoder:
        if self._streams is None:
            self._streams = stream_factory(self.backend)
        skipped = self._specials if skip_special_tokens else frozenset[str]()
        return IncrementalDecoder(self.backend.id_to_token, skipped, self._streams)

    def token_text(self, token_id: int) -> str:
        """The text of one token alone, special tokens included; part of a character shows as �."""
        return self.decode([token_id], skip_special_tokens=False)

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **kwargs: Any
    ) -> list[int]:
        return self.encode(self.render_chat(messages, add_generation_prompt, **kwargs), add_special_tokens=False)

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **kwargs: Any
    ) -> str:
        """The conversation in the model's chat format; further arguments are variables of the template."""
        if not messages:
            raise InvalidPrompt("the conversation is empty; give at least one message")
        for message in messages:
            if not isinstance(message, Mapping) or "role" not in message:
                raise InvalidPrompt(f"a chat message is an object with role and content, found {message!r}")
        variables = {"tools": None, "documents": None} | self.named_tokens | kwargs
        template = self._template("tool_use" if variables["tools"] and "tool_use" in self._sources else "default")
        return template.render(messages, add_generation_prompt=add_generation_prompt, **variables)

    def _template(self, name: str) -> ChatTemplate:
        if name not in self._sources:
            raise PacelineError("the model has no chat template; generate from a plain prompt instead (--raw)")
        if name not in self._templates:
            self._templates[name] = ChatTemplate(self._sources[name])
        return self._templates[name]

    def _id_of(self, name: str) -> int | None:
        token = self.named_tokens.get(name)
        return None if token is None else self.backend.token_to_id(token)

    def _add_missing_tokens(self, config: Json) -> None:
        """Tokens tokenizer_config.json declares and tokenizer.json lacks, in the order of their ids."""
        known = {token.content for token in self.backend.get_added_tokens_decoder().values()}
        declared = sorted((config.get("added_tokens_decoder") or {}).items(), key=lambda item: int(item[0]))
        wanted = [_added_token(entry) for _, entry in declared]
        extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
        wanted += [AddedToken(text, special=True, normalized=False) for text in self.named_tokens.values()]
        wanted += [AddedToken(_text(token), special=True, normalized=False) for token in _values(extra)]
        for token in wanted:
            if token.content not in known:
                known.add(token.content)
                (self.backend.add_special_tokens if token.special else self.backend.add_tokens)([token])


def _read_backend(path: Path) -> Backend:
    try:
        return Backend.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise BrokenModel(f"{path} cannot be read: {error}") from error


def _through_transformers(folder: Path) -> tuple[Backend, Json]:
    """The tokenizer, and the special tokens of its class."""
    try:
        from transformers import AutoTokenizer

        loaded = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # anything a foreign file can cause
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        message = f"{folder} holds no tokenizer.json, and no tokenizer that transformers can read: {reason}"
        raise BrokenModel(message) from error
    backend = getattr(loaded, "backend_tokenizer", None)
    if not isinstance(backend, Backend):
        raise UnsupportedModel(f"{folder}: the tokenizer cannot be expressed as a tokenizer.json")
    return backend, dict(loaded.special_tokens_map)


def _templates_in(folder: Path, config: Json) -> dict[str, str]:
    """Template files in the folder take precedence over tokenizer_config.json."""
    templates = _templates_of(config)
    files = {"default": folder / "chat_template.jinja"}
    files |= {file.stem: file for file in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    return templates | {name: file.read_text(encoding="utf-8") for name, file in files.items() if file.is_file()}


def _templates_of(config: Json) -> dict[str, str]:
    template = config.get("chat_template")
    if isinstance(template, str):
        return {"default": template}
    try:
        return {entry["name"]: entry["template"] for entry in template or []}
    except (KeyError, TypeError) as error:
        raise BrokenModel("tokenizer_config.json: chat_template must be text or a list of named templates") from error


def _text(token: Any) -> str:
    return str(token["content"]) if isinstance(token, dict) else str(token)


def _values(tokens: Any) -> list[Any]:
    return list(tokens.values()) if isinstance(tokens, dict) else list(tokens)


def _added_token(entry: Json) -> AddedToken:
    flags = {
        key: bool(entry[key]) for key in ("single_word", "lstrip", "rstrip", "normalized", "special") if key in entry
    }
    return AddedToken(entry["content"], **flags)


def _read_json(path: Path) -> Json:
    """{} when there is no such file: every field has a default."""
    try:
        value = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except (OSError, ValueError) as error:
        raise BrokenModel(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise BrokenModel(f"{path} must hold a JSON object")
    return value
