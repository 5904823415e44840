"""A store of past answers: a suffix index over finished answers of all requests; the oldest are dropped first.

It can be seeded from text files and saved between runs in a file: one line of JSON (format, vocabulary, a fingerprint
of the tokenizer, length, checksum) and then the tokens. The seed is not saved: every run reads the files again.
"""

from __future__ import annotations

import json
import logging
import os
import stat
import tempfile
import zlib
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import suppress
from pathlib import Path

import numpy as np

from paceline.drafters.lookup.index import END, MIN_ROWS, Ints, SuffixIndex
from paceline.errors import InvalidParameter

log = logging.getLogger("paceline")

FORMAT = 1
_MAGIC = "paceline suffix store"
_HEADER_LIMIT = 4096
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
        self._max_bytes, self._vocab_size, self._encode = max_bytes, vocab_size, encode
        self._path = None if path is None else Path(path)
        self._may_write = path is not None
        self.index = make() if SuffixIndex.bytes_for(MIN_ROWS) <= max_bytes else None
        self._num_learned = 0  # tokens from answers, END included; they follow the seed
        self._unsaved = False

    @property
    def nbytes(self) -> int:
        return 0 if self.index is None else self.index.nbytes

    def learn(self, tokens: SequenceOf[int]) -> None:
        """Append one answer."""
        if len(tokens) > 1:
            self._append(np.array([*tokens, END], np.int32))
            self._num_learned += len(tokens) + 1
            self._unsaved = True

    def seed(self, files: SequenceOf[str]) -> None:
        """Append text files, before anything else: they are dropped first."""
        for file in files:
            for piece in self._encoded(file):
                self._append(np.array(piece, np.int32))
            self._append(np.array([END], np.int32))

    def _append(self, tokens: Ints) -> None:
        if self.index is not None:
            self.index.make_room(len(tokens), self._max_bytes - self.index.nbytes)
            self.index.extend(tokens)

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
            tokens = self._read(self._path)
        except (OSError, ValueError) as problem:
            log.warning("suffix store %s: %s; starting empty", self._path, problem)
            return
        self._append(tokens)
        self._num_learned += len(tokens)

    def save(self) -> None:
        """Write the learned answers, all or nothing: a reader sees the old file or the new one."""
        if self._path is None or self.index is None or not self._may_write or not self._unsaved:
            return
        tokens = self.index.tokens(self._num_learned).astype("<i4").tobytes()
        header = {**self._identity(), "tokens": len(tokens) // 4, "crc32": zlib.crc32(tokens)}
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

    def _read(self, path: Path) -> Ints:
        """Return the stored tokens, or raise ValueError with the reason. Files of another kind are not overwritten."""
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
        if header.get("tokens") != len(payload) / 4 or header.get("crc32") != zlib.crc32(payload):
            raise ValueError("damaged")
        tokens = np.frombuffer(payload, "<i4").astype(np.int32)
        if len(tokens) and not END <= tokens.min() <= tokens.max() < self._vocab_size:
            raise ValueError("damaged")
        return tokens
