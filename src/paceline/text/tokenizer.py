"""Text to tokens and back, chat messages to tokens: transformers' tokenizers without importing transformers.

tokenizer.json is read by the tokenizers library directly, with the additions of tokenizer_config.json. A folder without
a tokenizer.json is refused with the way to make one.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import string
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, overload

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from paceline.errors import BrokenModel, InvalidParameter, InvalidPrompt, ModelNotFound, PacelineError, short_repr
from paceline.files.gguf import open_gguf
from paceline.files.json_fields import Json, read_json
from paceline.files.regular import read_bytes, read_text
from paceline.text.chat_template import ROLES, ChatTemplate, Messages, open_ended, read_messages
from paceline.text.detokenizer import IncrementalDecoder, StreamFactory, special_tokens, stream_factory
from paceline.text.gguf_vocab import tokenizer_files
from paceline.text.thoughts import tags_in
from paceline.text.tokenizer_config import chat_templates, declared_tokens, named_tokens

__all__ = ["IncrementalDecoder", "Tokenizer"]

# Arguments of transformers' apply_chat_template that would otherwise be taken for variables of the template.
TRANSFORMERS_OPTIONS = ("return_tensors", "return_dict", "padding", "truncation", "max_length")


MOST_BYTES = 256 << 20  # of a tokenizer.json; the largest known has 33 MB
MOST_ADDED = 50_000  # tokens beside the vocabulary; the most known are 6,500
# Texts on which a regular expression goes back and forth, if it ever does: many of one kind, then one of each other.
# Processor seconds for all of them.
PROBES = tuple(part * 100 + "!" + string.printable for part in ("a", "A", "1", " ", "\n", "é", "中", "!", "ab ", "_"))
PROBE_S = 1.0
LONG_TEXT = 20_000  # characters from which a text alone is encoded as several are: twice as fast


class Tokenizer:
    """A model's tokenizer. `config` is tokenizer_config.json; `templates` holds the chat templates by name."""

    def __init__(self, backend: Backend, config: Json, templates: Mapping[str, str]) -> None:
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.named_tokens = named_tokens(config)
        self._sources = dict(templates)
        self._templates: dict[str, ChatTemplate] = {}
        self._add_missing_tokens(config)
        self._probe()
        self.thought_tags = tags_in(self._sources.values())
        self._specials = frozenset(name for name in special_tokens(backend) if not self._is_tag(name))
        self._streams: StreamFactory | None = None

    @classmethod
    def from_path(cls, path: Path) -> Tokenizer:
        """Read the tokenizer of a model folder or a .gguf file."""
        if path.suffix == ".gguf":
            body, config = tokenizer_files(open_gguf(path).metadata, str(path))
            with _broken(path):
                backend = bpe_backend(body)
            return cls(backend, config, chat_templates(config))
        if not path.is_dir():
            raise ModelNotFound(f"{path} is not a model folder")
        config = read_json(path / "tokenizer_config.json", {})
        if "added_tokens_decoder" not in config:  # the older layout keeps the special tokens in a file of their own
            config |= read_json(path / "special_tokens_map.json", {})
        if not (path / "tokenizer.json").exists():
            raise _no_tokenizer(path)
        return cls(_read_backend(path / "tokenizer.json"), config, _templates_in(path, config))

    @property
    def vocab_size(self) -> int:
        return int(self.backend.get_vocab_size(with_added_tokens=True))

    def vocab(self) -> list[str]:
        """Return the tokens as the tokenizer spells them, by id."""
        known = self.backend.get_vocab(with_added_tokens=True)
        spelt = [""] * (max(known.values()) + 1)
        for token, number in known.items():
            spelt[number] = token
        return spelt

    def vocab_kind(self) -> str:
        """Return how tokens spell bytes: byte_level (GPT-2's letters), byte_fallback (<0x0A>), or raw."""
        decoder = "" if self.backend.decoder is None else str(self.backend.decoder.__getstate__())
        return "byte_level" if "ByteLevel" in decoder else "byte_fallback" if "ByteFallback" in decoder else "raw"

    def special_token_ids(self) -> list[int]:
        added = self.backend.get_added_tokens_decoder()
        return sorted(number for number, token in added.items() if token.special and not self._is_tag(token.content))

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
        with _library_errors("the prompt is not valid Unicode text"):
            return list(self.backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def encode_each(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Encode texts: several of them, or long ones, faster than one by one and while other Python threads run."""
        if len(texts) == 1 and len(texts[0]) < LONG_TEXT:
            return [self.encode(texts[0], add_special_tokens)]
        with _library_errors("a prompt is not valid Unicode text"):
            encodings = self.backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [list(encoding.ids) for encoding in encodings]

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        with _library_errors("token ids are integers from 0"):
            return str(self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def incremental_decoder(self, skip_special_tokens: bool = True) -> IncrementalDecoder:
        if self._streams is None:
            self._streams = stream_factory(self.backend)
        skipped = self._specials if skip_special_tokens else frozenset[str]()
        return IncrementalDecoder(self.backend.id_to_token, skipped, self._streams)

    def token_text(self, token_id: int) -> str:
        """Return the text of one token alone, special tokens included; part of a character shows as �."""
        return self.decode([token_id], skip_special_tokens=False)

    @overload
    def apply_chat_template(
        self, messages: Messages, add_generation_prompt: bool = ..., *, tokenize: Literal[True] = True, **options: Any
    ) -> list[int]: ...

    @overload
    def apply_chat_template(
        self, messages: Messages, add_generation_prompt: bool = ..., *, tokenize: Literal[False], **options: Any
    ) -> str: ...

    def apply_chat_template(
        self, messages: Messages, add_generation_prompt: bool = True, *, tokenize: bool = True, **options: Any
    ) -> list[int] | str:
        """Return the conversation in the model's chat format: token ids, or text with `tokenize=False`. `options` are
        those of `render_chat`."""
        for name in TRANSFORMERS_OPTIONS:
            if options.pop(name, None):
                raise InvalidParameter(name, "a list of token ids is returned, or text; leave it out")
        text = self.render_chat(messages, add_generation_prompt, **options)
        return self.encode(text, add_special_tokens=False) if tokenize else text

    def render_chat(
        self,
        messages: Messages,
        add_generation_prompt: bool = True,
        *,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        **variables: Any,
    ) -> str:
        """Return the conversation in the model's chat format; further arguments are variables of the template.

        `continue_final_message`: the last message is left open, for the model to go on with it.
        """
        conversation = read_messages(messages)
        known = {"tools": None, "documents": None} | self.named_tokens | variables
        template = self.chat_template(chat_template, with_tools=bool(known["tools"]))
        for message in conversation:
            if not template.knows_role(message["role"]):
                raise InvalidPrompt(
                    f"the role {short_repr(message['role'])} is not there; usual are {', '.join(ROLES)}"
                )
        text = template.render(conversation, add_generation_prompt=add_generation_prompt, **known)
        return open_ended(text, conversation[-1]) if continue_final_message else text

    def chat_template(self, source: str | None = None, *, with_tools: bool = False) -> ChatTemplate:
        """Return the model's own template, or the one in `source`."""
        if source is None:
            return self._template("tool_use" if with_tools and "tool_use" in self._sources else "default")
        if not isinstance(source, str):
            raise InvalidParameter("chat_template", f"must be a template as text, got {short_repr(source)}")
        return _compiled(source)

    def _template(self, name: str) -> ChatTemplate:
        if name not in self._sources:
            raise PacelineError("the model has no chat template; generate from a plain prompt instead (--raw)")
        if name not in self._templates:
            self._templates[name] = ChatTemplate(self._sources[name])
        return self._templates[name]

    def _is_tag(self, token: str) -> bool:
        """Return whether a token begins or is a tag of thoughts, which is text for those who read answers."""
        return self.thought_tags is not None and any(tag.startswith(token) for tag in self.thought_tags)

    def _id_of(self, name: str) -> int | None:
        token = self.named_tokens.get(name)
        return None if token is None else self.backend.token_to_id(token)

    def _add_missing_tokens(self, config: Json) -> None:
        """Add tokens that tokenizer_config.json declares and tokenizer.json lacks, in the order of their ids."""
        known = {token.content for token in self.backend.get_added_tokens_decoder().values()}
        declared = [token for token in declared_tokens(config) if token.content not in known]
        missing = list({token.content: token for token in reversed(declared)}.values())[::-1]  # the first of each text
        if len(known) + len(missing) > MOST_ADDED:
            raise BrokenModel(
                f"the tokenizer adds {len(known) + len(missing)} tokens to its vocabulary; "
                f"at most {MOST_ADDED} are read"
            )
        for special, tokens in itertools.groupby(missing, lambda token: bool(token.special)):
            (self.backend.add_special_tokens if special else self.backend.add_tokens)(list(tokens))

    def _probe(self) -> None:
        """Refuse a tokenizer whose regular expressions, or missing parts, fail on plain text."""
        began = time.thread_time()
        for text in PROBES:
            try:
                self.encode(text)
            except InvalidPrompt as error:
                raise BrokenModel(f"the tokenizer cannot encode {text[:4]!r}...: {error}") from error
            if time.thread_time() - began > PROBE_S:
                raise BrokenModel(
                    f"the tokenizer takes more than {PROBE_S:g} s for {len(text)} characters; "
                    "its tokenizer.json has a regular expression that goes back and forth"
                )


_compiled = functools.lru_cache(8)(ChatTemplate)  # a caller's template comes with every conversation


@contextlib.contextmanager
def _library_errors(of_type: str) -> Iterator[None]:
    """Raise InvalidPrompt for an error of the tokenizers library in the block; `of_type`: the words for a TypeError."""
    try:
        yield
    except (TypeError, OverflowError) as error:  # half a surrogate pair, or a number beyond 32 bits
        raise InvalidPrompt(of_type) from error
    except Exception as error:  # the library raises bare Exception
        raise InvalidPrompt(f"the model's tokenizer failed: {_first_line(error)}") from error
    except BaseException as error:
        if not _is_panic(error):
            raise
        raise InvalidPrompt(f"the model's tokenizer failed: {_first_line(error)}") from None


def _is_panic(error: BaseException) -> bool:
    """Return whether an error is a panic of the library, which is no Exception."""
    return type(error).__name__ == "PanicException"


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


def _read_backend(path: Path) -> Backend:
    body = read_bytes(path, MOST_BYTES)
    with _broken(path):
        return Backend.from_buffer(body)


@contextlib.contextmanager
def _broken(source: Path) -> Iterator[None]:
    """Raise BrokenModel for an error of the tokenizers library in the block."""
    try:
        yield
    except BrokenModel:
        raise
    except Exception as error:  # the library raises bare Exception
        raise BrokenModel(f"{source} cannot be read: its tokenizer is damaged ({_first_line(error)})") from error
    except BaseException as error:
        if not _is_panic(error):
            raise
        raise BrokenModel(f"{source} cannot be read: its tokenizer is damaged ({_first_line(error)})") from None


def bpe_backend(body: Json) -> Backend:
    """Build the tokenizer of a body whose model is BPE. The vocabulary is handed over as it is: as JSON the library
    takes five times as long to read it."""
    model, parts = body["model"], {"model": {**body["model"], "vocab": {}, "merges": []}, "added_tokens": []}
    backend = Backend.from_str(json.dumps(body | parts))
    options = {name: model[name] for name in ("unk_token", "fuse_unk", "byte_fallback", "ignore_merges")}
    backend.model = BPE(vocab=model["vocab"], merges=list(map(tuple, model["merges"])), **options)
    for special, run in itertools.groupby(body["added_tokens"], lambda token: token["special"]):  # each call takes 3 ms
        added = [AddedToken(**{name: value for name, value in token.items() if name != "id"}) for token in run]
        (backend.add_special_tokens if special else backend.add_tokens)(added)
    return backend


def _no_tokenizer(folder: Path) -> BrokenModel:
    other = [name for name in ("tokenizer.model", "vocab.json", "vocab.txt") if (folder / name).is_file()]
    if not other:
        return BrokenModel(
            f"{folder} holds no tokenizer: tokenizer.json is missing; copy it and tokenizer_config.json from the model "
            "that this one was made from, or give LLM(tokenizer=...) its folder"
        )
    return BrokenModel(
        f"{folder} holds {other[0]} but no tokenizer.json; make one with transformers: "
        "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
    )


def _templates_in(folder: Path, config: Json) -> dict[str, str]:
    """Return the chat templates of a folder: its template files take precedence over tokenizer_config.json."""
    templates = chat_templates(config)
    files = {"default": folder / "chat_template.jinja"}
    files |= {file.stem: file for file in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    return templates | {name: read_text(file) for name, file in files.items() if file.exists()}
