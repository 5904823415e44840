"""A store of past answers: a suffix index for each domain over the finished answers to its requests, and one over the
corpus, the text files that all domains draft from.

All indexes share one bound. The oldest answers of a domain are dropped first, and where others need the room, the whole
index of the domain that was used least recently.

The answers can be saved between runs in a file: one line of JSON (format, vocabulary, a fingerprint of the tokenizer,
domains with their lengths, checksum) and then the tokens. The corpus is not saved: every run reads its files again.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import stat
import tempfile
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from paceline.drafters.lookup.index import END, MIN_ROWS, Ints, SuffixIndex
from paceline.errors import InvalidParameter

log = logging.getLogger("paceline")

FORMAT = 2
_MAGIC = "paceline suffix store"
_HEADER_LIMIT = 1 << 20  # bytes
LARGEST = 4  # a named domain takes at most this part of the room, so that one busy domain leaves others theirs
MAX_CORPUS = 256 << 20  # bytes of one text file
_PIECE = 1 << 16  # characters of a corpus encoded at once
_PROBE = 'The 3 quick_foxes, naïve: "if (x != 0.5) {\n\treturn 你好;\n}"'  # tokenizers that differ differ on this


class SuffixStore:
    def __init__(
        self,
        max_bytes: int,
        vocab_size: int,
        encode: Callable[[str], list[int]] | None = None,
        path: str | None = None,
        make: Callable[[], SuffixIndex] = SuffixIndex,
    ) -> None:
        self._max_bytes, self._vocab_size, self._encode, self._make = max_bytes, vocab_size, encode, make
        self._path = None if path is None else Path(path)
        self._may_write = path is not None
        self.corpus: SuffixIndex | None = None
        self.known: OrderedDict[str, SuffixIndex] = OrderedDict()  # past answers by domain, least recent use first
        self._unsaved = False

    @property
    def nbytes(self) -> int:
        return sum([index.nbytes for index in self.known.values()], 0 if self.corpus is None else self.corpus.nbytes)

    def answers(self, domain: str) -> SuffixIndex | None:
        """Return the index over the past answers of a domain, which counts as a use of it."""
        index = self.known.get(domain)
        if index is not None:
            self.known.move_to_end(domain)
        return index

    def learn(self, tokens: SequenceOf[int], domain: str = "") -> None:
        """Append one answer."""
        if len(tokens) > 1:
            self._append(domain, np.array([*tokens, END], np.int32))
            self._unsaved = True

    def seed(self, files: SequenceOf[str]) -> None:
        """Index text files, in half of the room at most."""
        most = self._max_bytes // 2
        if files and SuffixIndex.bytes_for(MIN_ROWS) <= most:
            self.corpus = self._make()
        for file in files:  # read in any case: a file that cannot be read is refused
            for piece in itertools.chain(self._encoded(file), [[END]]):
                if self.corpus is not None:
                    self._extend(self.corpus, np.array(piece, np.int32), most)

    def _append(self, domain: str, tokens: Ints) -> None:
        most = self._max_bytes if not domain else self._max_bytes // LARGEST
        index = self.answers(domain) or self._new_index(domain)
        if index is not None:
            rows = index.rows
            while index.end + len(tokens) > rows >= index.end and SuffixIndex.bytes_for(2 * rows) <= most:
                rows *= 2
            self._drop_others(SuffixIndex.bytes_for(rows) - index.nbytes, domain)
            self._extend(index, tokens, min(most, self._max_bytes - self.nbytes + index.nbytes))

    def _new_index(self, domain: str) -> SuffixIndex | None:
        needed = SuffixIndex.bytes_for(MIN_ROWS)
        self._drop_others(needed, domain)
        if self.nbytes + needed > self._max_bytes:
            return None
        index = self.known[domain] = self._make()
        return index

    def _drop_others(self, needed: int, domain: str) -> None:
        """Drop domains, those of the least recent use first, until `needed` bytes are free."""
        while self.nbytes + needed > self._max_bytes and self.known and next(iter(self.known)) != domain:
            self.known.popitem(last=False)

    @staticmethod
    def _extend(index: SuffixIndex, tokens: Ints, most: int) -> None:
        index.make_room(len(tokens), most - index.nbytes)
        index.extend(tokens)

    def _encoded(self, file: str) -> Iterator[list[int]]:
        if self._encode is None:
            raise InvalidParameter("suffix_corpus", "needs a tokenizer, and this model came without one")
        try:
            status = os.stat(file)
            if not stat.S_ISREG(status.st_mode):
                raise InvalidParameter("suffix_corpus", f"{file} is not a regular file")
            if status.st_size > MAX_CORPUS:
                most = f"at most {MAX_CORPUS >> 20} MiB: more than the store holds would be forgotten at once"
                raise InvalidParameter("suffix_corpus", f"{file} has {status.st_size >> 20} MiB; give {most}")
            with open(file, encoding="utf-8", errors="replace") as lines:
                while piece := lines.read(_PIECE):
                    yield self._encode(piece + lines.readline())
        except OSError as problem:
            raise InvalidParameter("suffix_corpus", f"cannot read {file}: {problem.strerror}") from problem

    # -- saved between runs ---------------------------------------------------------------------------------------

    def load(self) -> None:
        """Start from the file if there is one. A file that cannot be used is logged, and the store starts empty."""
        if self._path is None or not self._path.exists():
            return
        try:
            answers = self._read(self._path)
        except (OSError, ValueError) as problem:
            log.warning("suffix store %s: %s; starting empty", self._path, problem)
            return
        for domain, tokens in answers:
            self._append(domain, tokens)

    def save(self) -> None:
        """Write the learned answers, all or nothing: a reader sees the old file or the new one."""
        if self._path is None or not self._may_write or not self._unsaved:
            return
        answers = {domain: index.tokens() for domain, index in self.known.items()}
        tokens = b"".join(each.astype("<i4").tobytes() for each in answers.values())
        domains = [(domain, len(each)) for domain, each in answers.items()]
        header = {**self._identity(), "domains": domains, "crc32": zlib.crc32(tokens)}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=self._path.parent, prefix=self._path.name + ".")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(json.dumps(header).encode() + b"\n" + tokens)
            os.replace(temporary, self._path)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)
            raise
        self._unsaved = False

    def _identity(self) -> dict[str, object]:
        probe = [] if self._encode is None else self._encode(_PROBE)
        return {
            "kind": _MAGIC,
            "format": FORMAT,
            "vocab_size": self._vocab_size,
            "tokenizer": zlib.crc32(json.dumps(probe).encode()),
        }

    def _read(self, path: Path) -> list[tuple[str, Ints]]:
        """Return the stored tokens of each domain, or raise ValueError with the reason. Files of another kind
        are not overwritten."""
        self._may_write = False
        if not path.is_file():
            raise ValueError("not a regular file, left as it is")
        with open(path, "rb") as file:
            line = file.readline(_HEADER_LIMIT)
            payload = file.read()
        try:
            header = json.loads(line)
        except ValueError:
            header = None
        if not isinstance(header, dict) or header.get("kind") != _MAGIC:
            raise ValueError("not a suffix store, left as it is")
        if any(header.get(name) != value for name, value in self._identity().items()):
            raise ValueError("made with another tokenizer or version, left as it is")
        self._may_write = True
        domains = header.get("domains")
        if not _are_lengths(domains) or header.get("crc32") != zlib.crc32(payload):
            raise ValueError("damaged")
        tokens = np.frombuffer(payload[: len(payload) // 4 * 4], "<i4").astype(np.int32)
        ends = np.cumsum([0, *(length for _, length in domains)])
        if 4 * int(ends[-1]) != len(payload):
            raise ValueError("damaged")
        if len(tokens) and not END <= tokens.min() <= tokens.max() < self._vocab_size:
            raise ValueError("damaged")
        return [(domain, tokens[ends[at] : ends[at + 1]]) for at, (domain, _) in enumerate(domains)]


def _are_lengths(domains: object) -> TypeGuard[list[list[Any]]]:
    """Return whether these are pairs of a domain and a number of tokens."""
    return isinstance(domains, list) and all(
        isinstance(each, list)
        and len(each) == 2
        and isinstance(each[0], str)
        and type(each[1]) is int
        and 0 <= each[1] < 1 << 31
        for each in domains
    )
