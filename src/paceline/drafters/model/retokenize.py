"""The text of a sequence in a drafter's own tokens, as it grows.

The tokens equal those of a fresh encoding of the whole text. New text changes the last tokens only: the text is encoded
again from a border at which tokenizers split (a space behind a letter, a letter behind a line's end), some tokens
back. Special tokens of the target are matched by role, those without a match are left out; text that spells a special
token stays text.
"""

from __future__ import annotations

import codecs
import itertools
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

MARGIN = 10  # tokens between the border and the end of the text
MOST_AGAIN = 256  # tokens encoded again; where no border is so near, a later token may differ from a fresh encoding's
WHITE = b" \t\r\n\v\f"


@dataclass(frozen=True)
class Retokenizer:
    """The rules by which all texts of a pair of vocabularies are read."""

    target_bytes: SequenceOf[bytes | None]
    draft_bytes: SequenceOf[bytes | None]
    specials: Mapping[int, int]  # special tokens of the target -> those of the drafter
    encode: Callable[[str], list[int]]  # text, in which nothing is a special token, to the drafter's tokens
    prefix: tuple[int, ...] = ()  # tokens that the drafter's tokenizer puts before every text
    adds_space: bool = False  # its tokenizer puts a space before every text
    encode_target: Callable[[str], list[int]] | None = None  # text to the target's tokens; None: unknown

    def encode_tail(self, text: str, begins: bool) -> list[int]:
        """Return tokens of a text; `begins`: it stands behind a special token, or behind nothing."""
        if self.adds_space and not begins and text.startswith(" "):
            text = text[1:]
        return self.encode(text)


class GrowingText:
    """One sequence's text. `ids` are the drafter's tokens of all that was followed."""

    def __init__(self, rules: Retokenizer) -> None:
        self._rules = rules
        self.ids = list(rules.prefix)
        self.num_followed = 0  # tokens of the target
        self._num_final = len(self.ids)  # ids that later text does not change
        self._begins = True  # the text behind the final ids begins
        self._tail = ""  # text behind the final ids
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    @property
    def is_whole(self) -> bool:
        """Return whether the text ends with a whole character."""
        return not self._decoder.getstate()[0]

    def follow(self, tokens: SequenceOf[int]) -> int:
        """Read the target's tokens, of which those followed are the first. Return how many of the ids are unchanged."""
        before, unchanged, rules = self.ids, self._num_final, self._rules
        pieces: list[bytes] = []
        for token in itertools.islice(tokens, self.num_followed, None):
            spelt = rules.target_bytes[token] if token < len(rules.target_bytes) else None
            if spelt is not None:
                pieces.append(spelt)
            elif token in rules.specials:
                self._extend(b"".join(pieces), ends=True)
                pieces.clear()
                self._put_special(rules.specials[token])
        self._extend(b"".join(pieces))
        self.num_followed = len(tokens)
        most = min(len(before), len(self.ids))
        while unchanged < most and before[unchanged] == self.ids[unchanged]:
            unchanged += 1
        return unchanged

    def _put_special(self, token: int) -> None:
        if tuple(self.ids) != (*self._rules.prefix[:-1], token):  # the first token is there once
            self.ids = [*self.ids, token]
        self._num_final, self._tail, self._begins = len(self.ids), "", True

    def _extend(self, more: bytes, ends: bool = False) -> None:
        new = self._decoder.decode(more, ends)
        if not new:
            return
        self._tail += new
        tail = self._rules.encode_tail(self._tail, self._begins)
        self.ids = self.ids[: self._num_final] + tail
        self._settle(tail)

    def _settle(self, tail: list[int]) -> None:
        """Move the border as far as later text cannot change what is before it."""
        text, spelt = self._tail.encode(), [self._rules.draft_bytes[token] or b"" for token in tail]
        at = len(text)
        starts = [0] * len(tail)
        for index in range(len(tail) - 1, -1, -1):  # from the end: a tokenizer may put a space before a text
            at -= len(spelt[index])
            starts[index] = at
        if at != 0 and not (at == -1 and self._begins and self._rules.adds_space):
            return  # a normalised text: its tokens do not spell it
        for index in range(len(tail) - MARGIN, 0, -1):
            forced = len(tail) - index > MOST_AGAIN
            if forced or _is_border(text, starts[index], only_spaces=self._rules.adds_space):
                try:
                    rest = text[starts[index] :].decode()
                except UnicodeDecodeError:  # inside a character
                    continue
                self._num_final += index
                self._tail, self._begins = rest, False
                return


def _is_border(text: bytes, at: int, only_spaces: bool) -> bool:
    """Return whether no tokenizer has a token, and no regular expression a match, on both sides. `only_spaces`: the
    text behind begins with a space, which stands for the one that the tokenizer adds."""
    before, behind = text[at - 1 : at], text[at : at + 1]
    if not before or not behind:
        return False
    if before in WHITE_BYTES:
        return before == b"\n" and behind not in WHITE_BYTES and not only_spaces
    return behind == b" "


WHITE_BYTES = tuple(bytes([byte]) for byte in WHITE)
