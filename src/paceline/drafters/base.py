"""The contract of a drafter: one `propose` for every method.

A drafter proposes tokens that may follow a sequence; the engine verifies them. It may read hidden states of the target
(`taps`) and keep K/V of its own (`kv_layers`): these are extra layers under the target's block table, so compaction,
preemption and prefix sharing move both.

**Slots.** K/V computed from the pair (hidden state of t, token t + 1) are stored in slot t + 1, and K/V computed from
token t, or from the hidden state of t, alone in slot t. Then no slot depends on a later token, blocks can be shared
whole, and after a prefix hit the engine supplies the one missing pair of a drafter of pairs by recomputing the last
shared token.

**Host and device.** A drafter on the host proposes from committed tokens. One on the device launches and never waits:
it may begin the next draft behind a step that is not read yet, from that step's verdict on the device.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from paceline.config import AUTO, MAX_K, ModelConfig, SpeculationConfig
from paceline.core.draft import Draft
from paceline.core.sequence import Sequence
from paceline.core.verdict import UnreadVerdict
from paceline.drafters.methods import matches_method
from paceline.models.kernels import Kernels, Packed
from paceline.models.kv_cache import KVSpec, LayerCache
from paceline.models.weights import StoredWeight

SAMPLED = 4096  # values of a tensor that enter its digest
TRAINED_LEVEL = 6  # evidence of a trained drafter: it always proposes, and most proposals are good


class DraftRequest(NamedTuple):
    """A sequence that needs a draft of at most `max_nodes` nodes. Slots for them are reserved behind its tokens.

    A deterministic draft may leave out nodes whose acceptance the drafter finds less likely than
    `min_node_probability`.
    """

    sequence: Sequence
    max_nodes: int
    min_node_probability: float = 0.0


class VerifiedDraft(NamedTuple):
    """A sequence whose draft by this drafter was verified: its tokens below `computed` have their K/V in the target."""

    sequence: Sequence
    computed: int


@dataclass(frozen=True)
class DrafterContext:
    """What a drafter is built from; fields with a default may be absent in tests."""

    config: ModelConfig  # the target's
    device: torch.device
    speculation: SpeculationConfig
    dtype: str = "auto"  # in which a drafter with a model of its own stores weights
    kv_dtype: str = "auto"  # of the cache, which the target's layers share with the drafter's
    encode: Callable[[str], list[int]] | None = None  # text to the target's tokens
    token_texts: Callable[[int], str] | None = None  # a token's own text, to compare vocabularies
    embedding: Tensor | None = None  # (V, H), the target's own
    head: Packed | None = None  # as the decoder holds it
    kernels: Kernels | None = None
    extra: Mapping[str, StoredWeight] = field(default_factory=dict)  # the target's tensors that no decoder layer claims
    checkpoint: Path | None = None  # the folder of the trained drafter that is made


class Drafter(Protocol):
    name: str  # of the method, as users write it; of several drafters of a method each has its own
    version: str  # changes whenever the drafter's K/V for the same tokens change: weights, taps, layers
    on_device: bool  # True: a `DeviceDrafter`, which launches and never waits
    taps: tuple[int, ...]
    kv_layers: tuple[KVSpec, ...]
    shifted_kv: (
        bool  # with taps and K/V: these are of (hidden state of t, token t + 1), not of the hidden state of t alone
    )
    scratch_slots: int  # slots behind a sequence's tokens that drafting writes to, whatever the number of nodes
    depth: int  # that no draft exceeds; a tree of many nodes fits where few tokens are left, if it is not deep
    trees: bool  # nodes come in order of their probability: the first n are the best tree of n, and no dearer than one

    def bind(self, caches: SequenceOf[LayerCache], block_size: int) -> None:
        """Receive the cache layers of `kv_layers`; called once, before anything else."""

    def propose(self, rows: SequenceOf[DraftRequest]) -> Draft:
        """One draft row for each of `rows`, in order; any may be empty. Never more nodes than the row's budget."""

    def admit(self, sequence: Sequence, start: int, end: int) -> None:
        """The sequence enters (again) with `end` tokens cached; the drafter's own K/V are valid from `start` on."""

    def release(self, sequence: Sequence) -> None:
        """The sequence left (finished, cancelled or preempted): forget it."""

    def level(self, sequence: Sequence) -> int:
        """How well a draft made now is supported; 0: it would be empty. Depends on committed tokens only."""

    def unread_tokens(self, sequence: Sequence) -> int:
        """Tokens the drafter has to read before it can draft."""

    def close(self) -> None:
        """The engine is closing: save what later runs can use, and drop what refers to the drafter itself."""


class DeviceDrafter(Drafter, Protocol):
    device: torch.device
    time_is_typical: bool  # False: the last draft compiled or captured something, so its time is not typical

    def propose(self, rows: SequenceOf[DraftRequest], after: UnreadVerdict | None = None) -> Draft:
        """`after`: begin behind a step that is not read yet, whose drafts for these rows were this drafter's own. Slots
        for `max_nodes` nodes behind all tokens the step may commit are reserved. Such a draft need not be used."""

    def on_verdict(self, verified: SequenceOf[VerifiedDraft], early: SequenceOf[Sequence]) -> None:
        """A step was read. `verified`: this drafter's drafts in it; `early`: sequences with a draft begun behind it."""

    def use_early(self, rows: SequenceOf[DraftRequest]) -> None:
        """Drafts begun behind the step are used: the first `max_nodes` nodes of each row."""

    def kv_range(self, sequence: Sequence) -> tuple[int, int]:
        """The slots [start, end) of the drafter's own K/V that are valid now."""

    # Of drafters with taps:
    def bind_taps(self, ring: Any, columns: list[int]) -> None: ...
    def before_store(self, sequences: list[Sequence], most: int) -> None: ...
    def read_chunks(self, chunks: SequenceOf[Any], taps: Tensor) -> None: ...


class HostDrafter:
    """Defaults of a drafter without taps and K/V of its own."""

    version = "1"
    on_device = False
    taps: tuple[int, ...] = ()
    kv_layers: tuple[KVSpec, ...] = ()
    covers: tuple[str, ...] = ()  # methods that search the same texts and find less
    idle = False  # rarely used: only sequences that need a draft are indexed
    shifted_kv = False
    scratch_slots = 0
    depth = MAX_K
    trees = False

    def bind(self, caches: SequenceOf[LayerCache], block_size: int) -> None:
        pass

    def index_prompt(self, sequence: Sequence, end: int) -> None:
        """tokens[:end] of a prompt were computed."""

    def levels(self, sequences: SequenceOf[Sequence]) -> list[int] | None:
        """The evidence of all sequences, where one call is cheaper; None: call `level` for each."""
        return None

    def admit(self, sequence: Sequence, start: int, end: int) -> None:
        pass

    def level(self, sequence: Sequence) -> int:
        return 1

    def unread_tokens(self, sequence: Sequence) -> int:
        return 0

    def close(self) -> None:
        pass

    def release(self, sequence: Sequence) -> None:
        pass


def excluded(sequence: Sequence, method: str) -> bool:
    """The request chooses another drafter than the one of this name, or none."""
    own = sequence.params.speculation
    wanted = own if own is None or isinstance(own, str) else own.get("method")
    return wanted not in (None, AUTO) and not matches_method(method, wanted)


def digest(tensors: Iterable[Tensor]) -> str:
    """Digest of values spread over every tensor: training changes all of them."""
    found = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        found.update(repr((tuple(tensor.shape), tensor.dtype)).encode())
        spread = tensor.flatten()[:: -(-tensor.numel() // SAMPLED)]
        found.update(spread.float().cpu().numpy().tobytes())
    return found.hexdigest()
