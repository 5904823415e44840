"""Text from tokens as they arrive. The pieces of a stream, joined, equal the decoding of all its tokens at once.

A token is often a fragment: half an emoji, a byte, a word that hides its leading space. Each decoder a tokenizer.json
can name has a stream here that holds back exactly what later tokens may still change, and does constant work per token.
"""

from __future__ import annotations

import codecs
import functools
import json
import re
from collections.abc import Callable, Iterable
from typing import Any

from tokenizers import Tokenizer as Backend

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenStream:
    def push(self, token: str) -> str:
        raise NotImplementedError

    def flush(self) -> str:
        raise NotImplementedError

    def decode(self, tokens: list[str]) -> str:
        """Decode all tokens of a text at once."""
        return "".join([*map(self.push, tokens), self.flush()])


StreamFactory = Callable[[], TokenStream]


class IncrementalDecoder:
    """A stream of token ids. `push` returns text that later tokens cannot change; `flush` returns the rest."""

    def __init__(self, token_of: Callable[[int], str | None], skipped: frozenset[str], streams: StreamFactory) -> None:
        self._token_of, self._skipped, self._new_stream = token_of, skipped, streams
        self._stream = streams()

    def push(self, token_id: int) -> str:
        token = self._token_of(token_id)
        return "" if token is None or token in self._skipped else self._stream.push(token)

    def flush(self) -> str:
        rest = self._stream.flush()
        self._stream = self._new_stream()
        return rest

    def decode(self, token_ids: Iterable[int]) -> str:
        """Return the results of `push` for each token and of `flush`, joined."""
        skipped = self._skipped
        tokens = [token for token in map(self._token_of, token_ids) if token is not None and token not in skipped]
        return self._new_stream().decode(tokens)


class ByteLevelStream(TokenStream):
    """Byte-level BPE: every character of a token stands for one byte; bytes are UTF-8."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: str) -> str:
        return self._decoder.decode(token_bytes(token))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)

    def decode(self, tokens: list[str]) -> str:
        return b"".join(map(token_bytes, tokens)).decode("utf-8", "replace")


class SentencePieceStream(TokenStream):
    """SentencePiece with byte fallback: ▁ is a space, <0xNN> a byte, the first `strip` spaces belong to the format.

    A run of byte tokens is text only if all of it is valid UTF-8, and one � per byte otherwise, so a run waits for
    its end.
    """

    def __init__(self, space_mark: str, strip: int) -> None:
        self._space_mark = space_mark
        self._left_to_strip = strip
        self._bytes = bytearray()

    def push(self, token: str) -> str:
        token = token.replace(self._space_mark, " ")
        if byte := BYTE_TOKEN.fullmatch(token):
            self._bytes.append(int(byte[1], 16))
            return ""
        return self._stripped(self._end_of_run() + token)

    def flush(self) -> str:
        return self._stripped(self._end_of_run())

    def _end_of_run(self) -> str:
        run, self._bytes = bytes(self._bytes), bytearray()
        try:
            return run.decode("utf-8")
        except UnicodeDecodeError:
            return "�" * len(run)

    def _stripped(self, text: str) -> str:
        while self._left_to_strip and text:
            if text[0] != " ":
                self._left_to_strip = 0
                break
            text = text[1:]
            self._left_to_strip -= 1
        return text


class WindowStream(TokenStream):
    """Any other decoder: the tokens since the last clean break are decoded together with those before it."""

    def __init__(self, decode: Callable[[list[str]], str]) -> None:
        self._decode = decode
        self._context: list[str] = []  # tokens of text that was returned
        self._pending: list[str] = []

    def push(self, token: str) -> str:
        self._pending.append(token)
        text = self._new_text()
        if not text or text.endswith("�"):
            return ""
        self._context, self._pending = self._pending, []
        return text

    def flush(self) -> str:
        return self._new_text() if self._pending else ""

    def _new_text(self) -> str:
        decoded = self._decode(self._context) if self._context else ""
        return self._decode(self._context + self._pending)[len(decoded) :]


def stream_factory(backend: Backend) -> StreamFactory:
    decoder = backend.decoder
    if decoder is None:
        return lambda: WindowStream(" ".join)
    layout = json.loads(decoder.__getstate__())
    if layout["type"] == "ByteLevel":
        return ByteLevelStream
    parts = layout.get("decoders", [])
    kinds = [part["type"] for part in parts]
    if kinds in (["Replace", "ByteFallback", "Fuse"], ["Replace", "ByteFallback", "Fuse", "Strip"]):
        mark, strip = parts[0], parts[-1]
        plain_mark = mark["content"] == " " and "String" in mark["pattern"]
        plain_strip = strip["type"] != "Strip" or (strip["content"] == " " and strip["stop"] == 0)
        if plain_mark and plain_strip:
            return lambda: SentencePieceStream(mark["pattern"]["String"], strip.get("start", 0))
    return lambda: WindowStream(decoder.decode)


def _byte_of_character() -> dict[str, int]:
    """Return GPT-2's table: printable Latin-1 stands for itself, the other bytes for characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(hidden)}


# Latin-1 character of the byte that a character stands for; other characters below U+0100 stand for nothing.
_LATIN_1 = dict.fromkeys(range(0x100), "\uffff") | {ord(one): chr(byte) for one, byte in _byte_of_character().items()}


@functools.lru_cache(1 << 18)  # a vocabulary
def token_bytes(token: str) -> bytes:
    try:
        return token.translate(_LATIN_1).encode("latin-1")
    except UnicodeEncodeError:  # an added token, written as it is
        return token.encode()


def special_tokens(backend: Backend) -> frozenset[str]:
    added: dict[int, Any] = backend.get_added_tokens_decoder()
    return frozenset(token.content for token in added.values() if token.special)
