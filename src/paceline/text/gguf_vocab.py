"""The Hugging Face tokenizer (tokenizer.json, tokenizer_config.json) of a GGUF file's tokenizer.ggml.* fields.

Two kinds are known: byte-level BPE ("gpt2") with the pre-tokenisers in PRE_TOKENIZERS, and SentencePiece BPE ("llama").
Any other is refused: an approximate tokeniser would feed the model token sequences unlike those of its training.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paceline.errors import BrokenModel, UnsupportedModel, short_repr

CONTROL, USER_DEFINED = 3, 4  # tokenizer.ggml.token_type
Json = dict[str, Any]

LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_PATTERN = LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")
GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"


def _byte_level(use_regex: bool) -> Json:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _split(pattern: str) -> Json:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


PRE_TOKENIZERS: dict[str, list[Json]] = {
    "gpt-2": [_byte_level(True)],
    "smollm": [{"type": "Digits", "individual_digits": True}, _byte_level(True)],
    "qwen2": [_split(QWEN2_PATTERN), _byte_level(False)],
    "llama-bpe": [_split(LLAMA3_PATTERN), _byte_level(False)],
    # llama.cpp's default splits by each of these in turn
    "default": [
        _split(r"[\p{P}\$\+<=>\^~\|]+"),
        _split(GPT2_PATTERN),
        _split(r"\p{N}+"),
        _split("[0-9][0-9][0-9]"),
        _byte_level(False),
    ],
}
NORMALIZERS: dict[str, Json] = {"qwen2": {"type": "NFC"}}


# Types of a tokenizer's keys, which may be absent; the lists have an entry for each token, but for the merges.
TEXTS = ("model", "pre")
FLAGS = ("add_bos_token", "add_eos_token", "add_space_prefix")
TOKEN_IDS = tuple(f"{name}_token_id" for name in ("bos", "eos", "eot", "eom", "unknown", "padding"))
LISTS: dict[str, tuple[type, ...]] = {"tokens": (str,), "merges": (str,), "scores": (float, int), "token_type": (int,)}


def check_tokenizer_fields(metadata: Json, source: str) -> None:
    """Refuse a tokenizer whose keys hold other types than their readers take."""

    def check(name: str, wanted: str, fits: Callable[[Any], bool]) -> None:
        key = f"tokenizer.ggml.{name}"
        if metadata.get(key) is not None and not fits(metadata[key]):
            raise BrokenModel(f"{source}: {key} must be {wanted}, found {short_repr(metadata[key])}")

    for name in TEXTS:
        check(name, "a text", lambda value: type(value) is str)
    for name in FLAGS:
        check(name, "true or false", lambda value: type(value) is bool)
    for name in TOKEN_IDS:
        check(name, "a token's number", lambda value: type(value) is int)
    for name, types in LISTS.items():
        words = "texts" if types == (str,) else "numbers"
        check(name, f"a list of {words}", lambda value, types=types: _is_list(value, types))  # type: ignore[misc]
    check("merges", "a list of pairs", lambda value: all(" " in merge for merge in value))
    count = len(metadata.get("tokenizer.ggml.tokens") or ())
    check("token_type", "as long as the list of tokens", lambda value: len(value) == count or not count)


def _is_list(value: object, types: tuple[type, ...]) -> bool:
    return isinstance(value, list) and set(map(type, value)) <= set(types)


def tokenizer_files(metadata: Json, source: str) -> tuple[Json, Json]:
    """Return tokenizer.json and tokenizer_config.json of a GGUF file's metadata; `source` names the file in errors."""
    check_tokenizer_fields(metadata, source)
    kind = metadata.get("tokenizer.ggml.model")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not tokens:
        raise BrokenModel(f"{source} carries no tokenizer (tokenizer.ggml.tokens is missing)")
    if kind == "gpt2":
        body = _byte_level_bpe(metadata, tokens, source)
    elif kind == "llama":
        body = _sentencepiece_bpe(metadata, tokens, source)
    else:
        raise UnsupportedModel(f"{source} has a tokenizer of kind {kind!r}; supported in GGUF files: gpt2 and llama")
    config = _tokenizer_config(metadata, tokens, add_bos_default=kind == "llama")
    body |= {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(metadata, tokens),
        "post_processor": _post_processor(config, tokens),
    }
    return body, config


def _byte_level_bpe(metadata: Json, tokens: list[str], source: str) -> Json:
    pre = metadata.get("tokenizer.ggml.pre", "default")
    if pre not in PRE_TOKENIZERS:
        known = ", ".join(sorted(PRE_TOKENIZERS))
        raise UnsupportedModel(f"{source} splits text as {pre!r}; supported in GGUF files: {known}")
    merges = metadata.get("tokenizer.ggml.merges")
    if merges is None:
        raise BrokenModel(f"{source} carries no merges for its tokenizer (tokenizer.ggml.merges is missing)")
    return {
        "normalizer": NORMALIZERS.get(pre),
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": PRE_TOKENIZERS[pre]},
        "decoder": _byte_level(True),
        "model": _bpe(tokens, [merge.split(" ", 1) for merge in merges], ignore_merges=pre == "llama-bpe"),
    }


def _sentencepiece_bpe(metadata: Json, tokens: list[str], source: str) -> Json:
    scores = metadata.get("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(tokens):
        raise BrokenModel(f"{source} carries no scores for its tokenizer (tokenizer.ggml.scores is missing)")
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    if not 0 <= unknown < len(tokens):
        raise BrokenModel(f"{source}: tokenizer.ggml.unknown_token_id is {unknown}, and there are {len(tokens)} tokens")
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    underscore = [{"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]
    decoders: list[Json] = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        underscore.insert(0, {"type": "Prepend", "prepend": "▁"})
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "normalizer": {"type": "Sequence", "normalizers": underscore},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": _bpe(tokens, merges_from_scores(tokens, scores), unk_token=tokens[unknown], byte_fallback=True),
    }


def merges_from_scores(tokens: list[str], scores: list[float]) -> list[list[str]]:
    """Return the merge list whose greedy application is SentencePiece's: best score first."""
    ids = {token: i for i, token in enumerate(tokens)}
    merges: list[tuple[float, int, int, str, str]] = []
    for token, score in zip(tokens, scores, strict=True):
        pairs = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        known = sorted((ids[left], ids[right], left, right) for left, right in pairs if left in ids and right in ids)
        merges.extend((score, len(left), len(right), left, right) for _, _, left, right in known)
    merges.sort(key=lambda merge: merge[:3], reverse=True)
    return [[left, right] for *_, left, right in merges]


def _bpe(tokens: list[str], merges: list[list[str]], **options: Any) -> Json:
    byte_fallback = options.get("byte_fallback", False)
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": byte_fallback,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": {token: i for i, token in enumerate(tokens)},
        "merges": merges,
    } | options


def _added_tokens(metadata: Json, tokens: list[str]) -> list[Json]:
    types = metadata.get("tokenizer.ggml.token_type") or []
    return [
        {
            "id": i,
            "content": tokens[i],
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind == CONTROL,
        }
        for i, kind in enumerate(types)
        if kind in (CONTROL, USER_DEFINED)
    ]


def _tokenizer_config(metadata: Json, tokens: list[str], add_bos_default: bool) -> Json:
    config: Json = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": metadata.get("tokenizer.ggml.add_bos_token", add_bos_default),
        "add_eos_token": metadata.get("tokenizer.ggml.add_eos_token", False),
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token is not None and 0 <= token < len(tokens):
            config[f"{name}_token"] = tokens[token]
    if "tokenizer.chat_template" in metadata:
        config["chat_template"] = metadata["tokenizer.chat_template"]
    return config


def _post_processor(config: Json, tokens: list[str]) -> Json | None:
    """Put bos in front and eos behind, if the file says so."""
    pieces: list[Json] = [{"Sequence": {"id": "A", "type_id": 0}}]
    special: Json = {}
    for name, at in (("bos", 0), ("eos", 2)):
        token = config.get(f"{name}_token")
        if config[f"add_{name}_token"] and token is not None:
            pieces.insert(at, {"SpecialToken": {"id": token, "type_id": 0}})
            special[token] = {"id": token, "ids": [tokens.index(token)], "tokens": [token]}
    if not special:
        return None
    pair = [*pieces, {"Sequence": {"id": "B", "type_id": 1}}]
    return {"type": "TemplateProcessing", "single": pieces, "pair": pair, "special_tokens": special}
