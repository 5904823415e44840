"""An index of a growing text: positions where its last tokens occurred before, in flat arrays of known size.

The text is a ring: when it is full, new tokens overwrite the oldest. It is indexed by hash chains, as in LZ77: for
each n of `LEVELS` a table of heads (hash of n tokens -> where their most recent continuation begins) and, for each
position, the previous position with an equal hash. Hashes may collide; a position counts only once the tokens before it
have been compared. `END` separates texts and is never proposed.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from paceline.core.sequence import Sequence

DEPTH = 24  # tokens; a longer match counts as this long
LEVELS = (5, 2, 1)  # match lengths that have chains of their own
LIMIT = 6  # most recent occurrences examined for each level
END = -1  # separator of texts
MIN_ROWS = 64

_PRIME = 1_858_537_381  # hashes are packed tokens modulo this; below 2**31, so that products fit 64 bits
_BASE = (1 << 32) % _PRIME
_NO_TOKEN = -2  # equal to no token and not to END
_CHUNK = 16_384  # tokens indexed at once, which bounds the temporary memory
_LAST_POSITION = (1 << 31) - (1 << 27)  # positions are 32-bit; past this the ring is renumbered

Ints = npt.NDArray[np.int32]


class Context:
    """The last tokens of a text, packed and hashed for lookup."""

    def __init__(self, tokens: SequenceOf[int]) -> None:
        tail = tokens[-DEPTH:]
        self.newest_first = [*reversed(tail), _NO_TOKEN]
        value, values = 0, [0]
        for token in self.newest_first[: min(LEVELS[0], len(tail))]:
            value = (value * _BASE + token) % _PRIME
            values.append(value)
        self.hashes = [values[n] if n < len(values) else None for n in LEVELS]  # None: the text has fewer than n tokens

    def before(self) -> Context:
        """Return the context without its last token, hashed for the level of two tokens only."""
        shorter = Context.__new__(Context)
        shorter.newest_first = tail = self.newest_first[1:]
        shorter.hashes = [(tail[0] * _BASE + tail[1]) % _PRIME if n == 2 and len(tail) > 2 else None for n in LEVELS]
        return shorter


class SuffixIndex:
    end: int  # position of the next token

    def __init__(self, rows: int = MIN_ROWS) -> None:
        """`rows`: tokens it holds, a power of two of at least `MIN_ROWS`."""
        self.rows = rows
        self._clear()

    def _clear(self) -> None:
        rows = self.rows
        text: Ints = np.full(rows + DEPTH, END, np.int32)  # the first DEPTH slots are repeated after the last
        heads, links = ([np.full(rows, -1, np.int32) for _ in LEVELS] for _ in range(2))
        self.end = DEPTH  # END fills the positions before, so every token has a context
        self._recent = (1 << 32 * LEVELS[0]) - 1  # the last tokens, packed; END before the beginning
        self._use(rows, text, heads, links)

    def _use(self, rows: int, text: Ints, heads: list[Ints], links: list[Ints]) -> None:
        """Switch to all of these arrays at once: if allocating one of them failed, the old ones are still in use.

        Single elements are read and written through memoryviews, several times faster than through numpy.
        """
        self.rows, self._text, self._heads, self._links = rows, text, heads, links
        self.text = self._text.data
        self._bytes = self.text.cast("B")
        self._chains = [(heads.data, links.data) for heads, links in zip(self._heads, self._links, strict=True)]

    @staticmethod
    def bytes_for(rows: int) -> int:
        return 4 * (rows + DEPTH + 2 * len(LEVELS) * rows)

    @property
    def nbytes(self) -> int:
        return self.bytes_for(self.rows)

    def make_room(self, count: int, spare: float) -> int:
        """Double the ring until `count` more tokens fit or `spare` bytes would be exceeded; return the added bytes."""
        before = self.nbytes
        rows = self.rows
        while self.end + count > rows >= self.end and self.bytes_for(2 * rows) - before <= spare:
            rows *= 2
        if rows > self.rows:
            self._grow(rows)
        return self.nbytes - before

    def _grow(self, rows: int) -> None:
        """Grow without rehashing: each head is copied to every bucket that its bucket splits into. Chains then keep
        some positions of another hash, which the comparison of tokens rejects."""
        text: Ints = np.full(rows + DEPTH, END, np.int32)
        text[: self.rows] = self._text[: self.rows]
        text[rows:] = text[:DEPTH]
        heads = [np.tile(heads, rows // self.rows) for heads in self._heads]
        links = [np.full(rows, -1, np.int32) for _ in LEVELS]
        for longer, shorter in zip(links, self._links, strict=True):
            longer[: self.rows] = shorter
        self._use(rows, text, heads, links)

    def extend(self, tokens: SequenceOf[int] | Ints) -> None:
        """Append; each token becomes the continuation of the n-grams that end before it."""
        self.renumber()
        new: Ints = np.asarray(tokens, np.int32)
        step = min(_CHUNK, self.rows)
        for first in range(0, len(new), step):
            self._extend(new[first : first + step])

    @property
    def room(self) -> int:
        """Tokens that may be appended before the ring must grow or positions must be renumbered."""
        return (self.rows if self.end <= self.rows else _LAST_POSITION) - self.end

    def renumber(self) -> None:
        """Number positions from the start again, if they have become too large."""
        if self.end > _LAST_POSITION:
            tokens = self.tokens()
            self._clear()
            self.extend(tokens)

    def _extend(self, tokens: Ints) -> None:
        count, longest = len(tokens), LEVELS[0]
        positions = np.arange(self.end, self.end + count)
        slots = positions & (self.rows - 1)
        before = np.frombuffer(self._recent.to_bytes(4 * longest, "little"), np.uint32)
        context = np.concatenate([before, tokens.view(np.uint32)]).astype(np.int64)
        hashes = np.zeros(count, np.int64)
        for back in range(1, longest + 1):  # Horner from the newest token: the hash of every shorter n on the way
            hashes = (hashes * _BASE + context[longest - back : longest - back + count]) % _PRIME
            if back in LEVELS:
                level = LEVELS.index(back)
                self._link(self._heads[level], self._links[level], hashes & (self.rows - 1), positions, slots)
        self._text[slots] = tokens
        self._text[self.rows :] = self._text[:DEPTH]
        self._recent = int.from_bytes(context[-longest:].astype(np.uint32).tobytes(), "little")
        self.end += count

    @staticmethod
    def _link(
        heads: Ints,
        links: Ints,
        buckets: npt.NDArray[np.int64],
        positions: npt.NDArray[np.int64],
        slots: npt.NDArray[np.int64],
    ) -> None:
        order = np.argsort(buckets, kind="stable")
        bucket, position = buckets[order], positions[order]
        repeated = bucket[1:] == bucket[:-1]
        previous = heads[bucket]
        previous[1:][repeated] = position[:-1][repeated]
        links[slots[order]] = previous
        last = np.append(~repeated, True)
        heads[bucket[last]] = position[last]

    def tokens(self) -> Ints:
        """Return the text that the ring holds."""
        count = min(self.end - DEPTH, self.rows)
        tokens: Ints = self._text[np.arange(self.end - count, self.end) & (self.rows - 1)]
        return tokens

    def common_run(self, starts: SequenceOf[int], depth: int, count: int) -> list[int]:
        """Return up to `count` tokens from `depth` after every start, if they are equal; else nothing."""
        count = min(count, self.end - max(starts) - depth)
        slots = [start + depth & self.rows - 1 for start in starts]
        if count < 1 or max(slots) + count > len(self.text):
            return []
        first = self._bytes[4 * slots[0] : 4 * (slots[0] + count)]
        for slot in slots[1:]:
            if self._bytes[4 * slot : 4 * (slot + count)] != first:
                return []
        tokens: list[int] = self.text[slots[0] : slots[0] + count].tolist()
        return tokens[: tokens.index(END)] if END in tokens else tokens

    def occurrences(self, level: int, context: Context, matches: dict[int, int]) -> list[int]:
        """Return positions that followed an occurrence of the last LEVELS[level] tokens, newest first.

        `matches` caches the match length of every position. The oldest tokens of a full ring are skipped: their own
        context is partly overwritten.
        """
        value = context.hashes[level]
        if value is None:
            return []
        rows, (heads, links) = self.rows, self._chains[level]
        mask, oldest = rows - 1, max(self.end - rows, 0) + DEPTH
        position = heads[value & mask]
        if position < oldest:  # most often
            return []
        n, text, tail = LEVELS[level], self.text, context.newest_first
        positions: list[int] = []
        for _ in range(2 * LIMIT):
            if position < oldest:
                break
            match = matches.get(position, -1)
            if match < 0:
                slot = position & mask
                if slot <= DEPTH:  # the token before the longest match is read too
                    slot += rows
                match = 0
                while text[slot - 1 - match] == tail[match]:
                    match += 1
                matches[position] = match
            if match >= n:
                positions.append(position)
                if len(positions) == LIMIT:
                    break
            position = links[position & mask]
        return positions


Index = TypeVar("Index", bound=SuffixIndex)


class Memory(Generic[Index]):
    """Indexes with a common byte limit; `new_index` returns None once it is reached."""

    def __init__(self, make: Callable[[], Index], max_bytes: float = float("inf")) -> None:
        self._make, self._max_bytes = make, max_bytes
        self.nbytes = 0

    def new_index(self) -> Index | None:
        if self.nbytes + SuffixIndex.bytes_for(MIN_ROWS) > self._max_bytes:
            return None
        index = self._make()
        self.nbytes += index.nbytes
        return index

    def make_room(self, index: Index, count: int) -> None:
        self.nbytes += index.make_room(count, self._max_bytes - self.nbytes)

    def give_back(self, index: Index | None) -> None:
        self.nbytes -= 0 if index is None else index.nbytes


class LookupState(Generic[Index]):
    """The lookup state of one sequence."""

    __slots__ = ("at", "index", "indexed", "level", "past", "sequence")

    def __init__(self, sequence: Sequence, index: Index | None) -> None:
        self.sequence = sequence
        self.index = index  # None: there was no memory for one
        self.indexed = 0  # tokens
        self.at = -1  # length of the text when it was looked up
        self.level = 0  # result of that lookup
        self.past: Index | None = None  # past answers of the sequence's domain

    def use_past(self, past: Index | None) -> None:
        """Search these past answers; what was found before no longer counts."""
        self.past, self.at = past, -1
