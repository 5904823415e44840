"""A folder of training tokens: sequences, with a mark on tokens that the target wrote. Never hidden states.

A folder holds shards, each of which appears whole or not at all, so a run that is cut short keeps what it had finished
and a later one adds to it:

    store.json            vocabulary size, names of sources, and what their shards were made from
    complete.json         the sources and shards of a training whose tokens are all there
    NAME.npz              tokens (uint16 or uint32), answer (bool), ends (int64), source (uint8)
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from paceline.errors import InvalidParameter
from paceline.files.folders import disk_errors, replace_file, replace_text

INFO, COMPLETE = "store.json", "complete.json"
Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Sequences:
    """Sequences end to end; `ends[i]` is where sequence i ends."""

    tokens: Array  # (N,)
    answer: Array  # (N,) bool: written by the target
    ends: Array  # (S,)
    source: Array  # (S,) index into the store's sources

    def __len__(self) -> int:
        return len(self.ends)

    def __iter__(self) -> Iterator[tuple[Array, Array]]:
        start = 0
        for end in self.ends.tolist():
            yield self.tokens[start:end], self.answer[start:end]
            start = end

    @property
    def lengths(self) -> Array:
        return np.diff(self.ends, prepend=0)

    @property
    def checksum(self) -> int:
        checksum = 0
        for part in (self.tokens, self.answer, self.ends, self.source):
            checksum = zlib.crc32(part.tobytes(), checksum)
        return checksum

    @staticmethod
    def of(pieces: SequenceOf[tuple[SequenceOf[int], SequenceOf[int]]], vocab_size: int, source: int = 0) -> Sequences:
        """Join (prompt, answer) pairs of token ids."""
        tokens = np.fromiter(
            (token for pair in pieces for part in pair for token in part), dtype=token_dtype(vocab_size)
        )
        sizes = np.array([[len(prompt), len(answer)] for prompt, answer in pieces], dtype=np.int64).reshape(-1, 2)
        written = np.repeat(np.tile([False, True], len(pieces)), sizes.reshape(-1))
        return Sequences(tokens, written, sizes.sum(1).cumsum(), np.full(len(pieces), source, np.uint8))

    def check(self, sources: int) -> None:
        if not (len(self.tokens) == len(self.answer) == self.lengths.sum() and len(self.ends) == len(self.source)):
            raise ValueError("its parts do not fit each other")
        if len(self) and self.source.max() >= sources:
            raise ValueError(f"{INFO} beside it does not name its source")

    def chosen(self, keep: Array) -> Sequences:
        """Return the sequences that a boolean (S,) chooses."""
        inside = np.repeat(keep, self.lengths)
        return Sequences(self.tokens[inside], self.answer[inside], self.lengths[keep].cumsum(), self.source[keep])

    def cut(self, lengths: Array) -> Sequences:
        """Return each sequence's first `lengths[i]` tokens."""
        sizes = np.minimum(self.lengths, lengths)
        place = np.arange(len(self.tokens)) - np.repeat(self.ends - self.lengths, self.lengths)
        inside = place < np.repeat(sizes, self.lengths)
        return Sequences(self.tokens[inside], self.answer[inside], sizes.cumsum(), self.source)

    @staticmethod
    def joined(parts: SequenceOf[Sequences]) -> Sequences:
        starts = np.cumsum([0, *(len(part.tokens) for part in parts)])
        return Sequences(
            np.concatenate([part.tokens for part in parts]),
            np.concatenate([part.answer for part in parts]),
            np.concatenate([part.ends + start for part, start in zip(parts, starts[:-1], strict=True)]),
            np.concatenate([part.source for part in parts]),
        )


@dataclass(frozen=True)
class Source:
    """Tokens of one origin, under one name."""

    name: str
    origin: str  # fingerprint of all that decides about the tokens
    generated: bool = False  # True: answers of the target, in numbered shards; False: a file, in one shard
    count: int = 0  # prompts that the target writes


class TokenStore:
    def __init__(self, folder: Path, vocab_size: int) -> None:
        self.folder, self.vocab_size = folder, vocab_size
        self._origins: dict[str, str] = {}
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidParameter("out", f"cannot write to {folder}: {error.strerror}; name another folder") from error
        self.sources: list[str] = []
        if (folder / INFO).exists():
            info = _read_info(folder / INFO)
            if info["vocab_size"] != vocab_size:
                raise InvalidParameter(
                    "data",
                    f"{folder} holds tokens of a vocabulary of {info['vocab_size']}, this model has {vocab_size}; "
                    "choose another folder",
                )
            self.sources, self._origins = list(info["sources"]), dict(info["origins"])

    def source(self, name: str) -> int:
        """Return the index of a source; a new one is added."""
        if name not in self.sources:
            if len(self.sources) == 256:
                raise InvalidParameter("data", f"{self.folder} already has 256 sources; begin another folder")
            self.sources.append(name)
            self._write_info()
        return self.sources.index(name)

    def accept(self, source: Source) -> None:
        """Refuse a source whose shards in this store are of another origin."""
        key = f"{source.name}-" if source.generated else source.name
        if self._origins.get(key) == source.origin:
            return
        if self.shards_of(source.name, generated=source.generated):
            of = (
                "another file, --length or target"
                if source.generated
                else "another file, or of this one as it was before"
            )
            raise InvalidParameter(
                "data", f"{self.folder} holds {source.name} of {of}; delete that folder, or choose another --out"
            )
        self._origins[key] = source.origin
        self._write_info()

    def _write_info(self) -> None:
        info = {"vocab_size": self.vocab_size, "sources": self.sources, "origins": self._origins}
        write_text(self.folder / INFO, json.dumps(info))

    def shards(self) -> list[Path]:
        return sorted(self.folder.glob("*.npz"))

    def shards_of(self, name: str, *, generated: bool) -> list[str]:
        """Return the names of a source's shards."""
        pattern = re.compile(re.escape(name) + (r"-\d{8}" if generated else ""))
        return [path.stem for path in self.shards() if pattern.fullmatch(path.stem)]

    def shards_by_source(self, sources: SequenceOf[Source]) -> list[list[str]]:
        """Return the names of the shards of each source; a source without one is refused."""
        names = [self.shards_of(source.name, generated=source.generated) for source in sources]
        for source, shards in zip(sources, names, strict=True):
            if not shards:
                raise InvalidParameter(
                    "data",
                    f"{self.folder} holds no tokens of {source.name}; give its --data or --synthesise again, "
                    "or a larger --length where its prompts leave no room for answers",
                )
        return names

    def is_complete(self, sources: SequenceOf[Source]) -> bool:
        """Return whether the store held all shards of these sources when it was completed, and has them still."""
        path = self.folder / COMPLETE
        return path.is_file() and path.read_bytes() == self._inventory(sources).encode()

    def complete(self, sources: SequenceOf[Source]) -> None:
        self.shards_by_source(sources)
        write_text(self.folder / COMPLETE, self._inventory(sources))

    def _inventory(self, sources: SequenceOf[Source]) -> str:
        shards = [self.shards_of(source.name, generated=source.generated) for source in sources]
        return json.dumps({"sources": [asdict(source) for source in sources], "shards": shards})

    def has(self, name: str) -> bool:
        return (self.folder / f"{name}.npz").exists()

    def add(self, name: str, sequences: Sequences) -> None:
        with unwritable(self.folder), replace_file(self.folder / f"{name}.npz") as staging, staging.open("wb") as file:
            np.savez(
                file,
                tokens=sequences.tokens.astype(token_dtype(self.vocab_size)),
                answer=sequences.answer,
                ends=sequences.ends,
                source=sequences.source,
            )

    def read(self, names: SequenceOf[str] | None = None) -> Sequences:
        paths = self.shards() if names is None else [self.folder / f"{name}.npz" for name in names]
        if not paths:
            raise InvalidParameter("data", f"{self.folder} holds no tokens; give --data FILE or --synthesise N")
        parts = []
        for path in paths:
            try:
                with path.open("rb") as file, np.load(file) as archive:
                    part = Sequences(archive["tokens"], archive["answer"], archive["ends"], archive["source"])
                part.check(len(self.sources))
                parts.append(part)
            except Exception as error:  # a damaged archive fails in many ways, EOFError among them
                raise InvalidParameter(
                    "data", f"{path} is damaged ({error}); delete it and run again, with its --data or --synthesise"
                ) from error
        return Sequences.joined(parts)


def token_dtype(vocab_size: int) -> type[np.unsignedinteger[Any]]:
    return np.uint16 if vocab_size <= 1 << 16 else np.uint32


def unwritable(folder: Path) -> AbstractContextManager[None]:
    """Raise errors of the disk in the block as errors of --out."""

    def refusal(error: OSError) -> InvalidParameter:
        reason = error.strerror or error
        return InvalidParameter("out", f"cannot write to {folder}: {reason}; free some space and run again")

    return disk_errors(refusal)


def _read_info(path: Path) -> dict[str, Any]:
    try:
        info: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        sources, origins = info["sources"], info.get("origins", {})
        if not (isinstance(sources, list) and isinstance(origins, dict)):
            raise ValueError("sources is not a list, or origins no object")
        return {"vocab_size": info["vocab_size"], "sources": sources, "origins": origins}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidParameter("data", f"{path} is damaged ({error}); delete the folder and run again") from error


def write_text(path: Path, content: str) -> None:
    with unwritable(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, content)
