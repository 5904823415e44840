"""The contenders: every peer plain and with its prompt lookup, and paceline plain, by its own choice and with n-grams.

All draft the same number of tokens. llama-cpp-python's documentation advises fewer on CPUs, so it also runs as advised.
llama.cpp keeps keys and values in fp16 by default, and the default is used; a quantised file it multiplies
with activations rounded to 8 bits. All else is fp32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers.workers import OURS
from paceline.gguf_file import GGUFFile, import_gguf

REFERENCE, AUTO = "paceline none", "paceline auto"
ADVISED_K = 2


@dataclass(frozen=True, kw_only=True)
class Configuration:
    name: str
    peer: str
    method: str
    plain: str  # whose gain over this one is its speculation's gain
    k: int | None = None
    gguf: str | None = None
    precision: str | None = None


def configurations(k: int, float_gguf: str, own_gguf: tuple[str, str] | None = None) -> list[Configuration]:
    """`own_gguf`: a quantised file and what it is quantised to."""
    found = [
        Configuration(name=REFERENCE, peer=OURS, method="none", plain=REFERENCE),
        Configuration(name=AUTO, peer=OURS, method="auto", plain=REFERENCE),
        Configuration(name=f"paceline ngram k={k}", peer=OURS, method="ngram", k=k, plain=REFERENCE),
    ]
    for peer in ("transformers", "vllm"):
        plain = f"{peer} plain"
        found.append(Configuration(name=plain, peer=peer, method="plain", plain=plain))
        found.append(Configuration(name=f"{peer} lookup k={k}", peer=peer, method="lookup", k=k, plain=plain))
    for title, gguf, precision in (
        ("llama.cpp", float_gguf, "fp32, cache fp16"),
        *([("llama.cpp quantised", own_gguf[0], f"{own_gguf[1]}, cache fp16")] if own_gguf else []),
    ):
        plain, weights = f"{title} plain", {"gguf": gguf, "precision": precision}
        found.append(Configuration(name=plain, peer="llama_cpp", method="plain", plain=plain, **weights))
        for each in dict.fromkeys((k, ADVISED_K)):
            name = f"{title} lookup k={each}"
            found.append(Configuration(name=name, peer="llama_cpp", method="lookup", k=each, plain=plain, **weights))
    return found


def quantisation(path: Path) -> str:
    """How most of the file's matrices are stored."""
    kinds = [tensor.type_id for tensor in GGUFFile(path).tensors.values() if len(tensor.shape) > 1]
    return str(import_gguf().GGMLQuantizationType(max(kinds, key=kinds.count)).name)


def select(every: Sequence[Configuration], only: Sequence[str] | None) -> list[Configuration]:
    known = dict.fromkeys(configuration.peer for configuration in every)
    for peer in only or ():
        if peer not in known:
            raise SystemExit(f"no peer is called {peer!r}; known: {', '.join(known)}")
    return [configuration for configuration in every if not only or configuration.peer in only]
