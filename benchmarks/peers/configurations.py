"""The contenders: every peer plain and with its prompt lookup; paceline plain and by its own choice, both activations.

All draft the same number of tokens. llama-cpp-python's documentation advises fewer on CPUs, so it also runs as advised.
llama.cpp keeps keys and values in fp16 and OpenVINO in int8; a quantised file both multiply with activations rounded to
8 bits. Defaults are kept. transformers and vLLM load the same weights expanded to fp32.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers.workers import OURS
from paceline.files.gguf import GGUFFile, import_gguf

REFERENCE = "paceline none"
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
    activations: str = "float32"


def configurations(k: int, float_gguf: str, own_gguf: tuple[str, str] | None = None) -> list[Configuration]:
    """`own_gguf`: a quantised file and what it is quantised to, which the readers of GGUF then take."""
    found = []
    for title, activations in (("paceline", "float32"), ("paceline int8", "int8")):
        plain, given = f"{title} none", {"peer": OURS, "plain": f"{title} none", "activations": activations}
        found.append(Configuration(name=plain, method="none", **given))
        found.append(Configuration(name=f"{title} auto", method="auto", **given))
    for peer in ("transformers", "vllm"):
        plain = f"{peer} plain"
        found.append(Configuration(name=plain, peer=peer, method="plain", plain=plain))
        found.append(Configuration(name=f"{peer} lookup k={k}", peer=peer, method="lookup", k=k, plain=plain))
    gguf, weights = own_gguf or (float_gguf, "fp32")
    found += _of_a_file("llama_cpp", dict.fromkeys((k, ADVISED_K)), gguf, f"{weights}, cache fp16")
    if own_gguf:  # OpenVINO reads no file without a vocabulary, which the float one has not
        found += _of_a_file("openvino", [k], gguf, f"{weights}, cache int8")
    return found


def _of_a_file(peer: str, ks: Iterable[int], gguf: str, precision: str) -> list[Configuration]:
    title = peer.replace("_", ".")
    given = {"peer": peer, "plain": f"{title} plain", "gguf": gguf, "precision": precision}
    found = [Configuration(name=given["plain"], method="plain", **given)]
    return found + [Configuration(name=f"{title} lookup k={k}", method="lookup", k=k, **given) for k in ks]


def quantisation(path: Path) -> str:
    """Return the kind in which most of the file's matrices are stored."""
    kinds = [tensor.type_id for tensor in GGUFFile(path).tensors.values() if len(tensor.shape) > 1]
    return str(import_gguf().GGMLQuantizationType(max(kinds, key=kinds.count)).name)


def select(every: Sequence[Configuration], only: Sequence[str] | None) -> list[Configuration]:
    known = dict.fromkeys(configuration.peer for configuration in every)
    for peer in only or ():
        if peer not in known:
            raise SystemExit(f"no peer is called {peer!r}; known: {', '.join(known)}")
    return [configuration for configuration in every if not only or configuration.peer in only]
