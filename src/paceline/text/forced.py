"""The text that a grammar forces behind an answer, as the tokens that a model would write.

A grammar forces bytes; the tokens that spell them depend on the bytes around them, so the text is encoded together with
the last tokens of the answer. Where the grammar leaves nothing open but white space, as JSON does between its parts,
the white space is what stood in that place before. The tokens are a guess, which is verified like any draft.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import Any

import numpy as np

from paceline.text.spacing import SPACE, Spacing

WORD = 32  # tokens of a word of a mask
MOST_BYTES = 256  # of a forced text
TAILS = (8, 3, 1)  # tokens of the answer that are encoded with the text, the first number with which they come back
LETTER, DIGIT = b"a1"  # allowed where the grammar leaves text, or a number, open


class ForcedText:
    """Forced text in the tokens of one vocabulary."""

    def __init__(self, tokens: SequenceOf[bytes], eos: int, encode: Callable[[str], list[int]], encode_bytes: Any):
        """`encode_bytes`: from bytes to tokens that spell them, whatever stands before."""
        self._tokens, self._eos, self._encode, self._encode_bytes = tokens, eos, encode, encode_bytes
        by_byte = {token[0]: number for number, token in enumerate(tokens) if len(token) == 1}
        self._letter, self._digit = by_byte.get(LETTER), by_byte.get(DIGIT)
        self._bytes, self._numbers = (np.array(part, np.int64) for part in (list(by_byte), list(by_byte.values())))
        self._bits = np.zeros(-(-len(tokens) // WORD), np.int32)

    def bytes_of(self, tokens: SequenceOf[int]) -> bytes:
        return b"".join([self._tokens[token] for token in tokens])

    def behind(self, matcher: Any, answer: SequenceOf[int], spacing: Spacing) -> list[int]:
        """Return the tokens that follow the answer, whose state `matcher` is in; none where its next byte is open."""
        state = matcher.deep_copy()
        is_certain = bool(state.compute_ff_bytes())
        text = self._grow(state, spacing.copy())
        tokens = self._spelt(text, answer, is_certain) if text else []
        ends = not state.is_error() and state.is_stopped()
        if tokens and not ends and text[-1:].isalnum():
            tokens.pop()  # the beginning of a word whose rest is open: the model takes a longer token
        allowed: int = matcher.deep_copy().validate_tokens(tokens)
        return tokens[:allowed] + [self._eos] * (ends and allowed == len(tokens))

    def _grow(self, state: Any, spacing: Spacing) -> bytes:
        """Return the text, and bring both up to its end."""
        text = b""
        while len(text) < MOST_BYTES:
            more = state.compute_ff_bytes() or self._past_space(state, spacing)
            tokens = self._encode_bytes(more)
            if not more or state.try_consume_tokens(tokens) < len(tokens):
                break
            spacing.read(more)
            text += more
        # White space at the end is a token of its own before a number, and a part of the next one before a word.
        return text if self._allows(state, self._digit) else text.rstrip(SPACE)

    def _past_space(self, state: Any, spacing: Spacing) -> bytes:
        """Return the next byte, with white space before it, where the grammar leaves open the white space alone; before
        a number the white space."""
        if state.is_stopped() or self._letter is None or self._allows(state, self._letter):
            return b""
        state.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        allowed = self._bytes[self._bits[self._numbers // WORD] >> self._numbers % WORD & 1 > 0]
        solid = [byte for byte in allowed.tolist() if byte not in SPACE]
        if len(solid) == 1:
            return spacing.missing(solid[0]) + bytes(solid)
        return spacing.missing(DIGIT) if DIGIT in solid else b""

    @staticmethod
    def _allows(state: Any, token: int | None) -> bool:
        return token is not None and state.validate_tokens([token]) == 1

    def _spelt(self, text: bytes, answer: SequenceOf[int], is_certain: bool) -> list[int]:
        """Return the tokens of the text behind the answer. Where the answer's own last tokens do not come back, another
        text follows, unless this one is certain: then the answer is split as the grammar alone would have it."""
        for count in TAILS:
            tail = list(answer[-count:])
            try:
                tokens = self._encode((self.bytes_of(tail) + text).decode())
            except UnicodeDecodeError:  # the answer's last character, or the text's, is not whole
                continue
            if tokens[: len(tail)] == tail:
                return tokens[len(tail) :]
        return list(self._encode_bytes(text)) if is_certain else []
