"""The drafter's side of the bargain: one `propose` for every method.

A drafter guesses what follows a sequence; the engine verifies. It may read hidden states of the target (`taps`) and
keep K/V of its own (`kv_layers`): these are extra layers under the target's block table, so compaction, preemption
and prefix sharing move both.

**Slots.** What a drafter computes from the pair (hidden state of t, token t + 1) it stores in slot t + 1, and what it
computes from token t alone in slot t. Then no slot depends on a later token, blocks can be shared whole, and after a
prefix hit the one missing pair is supplied by recomputing the last shared token (the engine does so for drafters with
taps and K/V).

**Host and device.** A drafter on the host proposes from committed tokens. One on the device launches and never waits:
it may begin the next draft behind a step that is not read yet, from the verdict where it lies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from paceline.config import AUTO, ModelConfig, SpeculationConfig
from paceline.draft import Draft, UnreadVerdict
from paceline.models.kernels import Kernels, Packed
from paceline.models.kv_cache import KVSpec, LayerCache
from paceline.models.weights import StoredWeight
from paceline.sequence import Sequence

LEARNED = 6  # evidence of a trained drafter: it always has an opinion, and mostly a good one


class DraftRow(NamedTuple):
    """A sequence that asks for a draft of at most `budget` nodes. Room for them is reserved behind its tokens."""

    sequence: Sequence
    budget: int


class Judged(NamedTuple):
    """A sequence whose draft by this drafter was verified: its tokens below `computed` have their K/V in the target."""

    sequence: Sequence
    computed: int


@dataclass(frozen=True)
class DrafterContext:
    """What the target hands over when a drafter is made; fields with a default may be absent in tests."""

    config: ModelConfig  # the target's
    device: torch.device
    speculation: SpeculationConfig
    dtype: str = "auto"  # how a model of its own should store its weights
    encode: Callable[[str], list[int]] | None = None  # text to the target's tokens
    token_texts: Callable[[int], str] | None = None  # a token's own text, to compare vocabularies
    embedding: Tensor | None = None  # (V, H), the target's own
    head: Packed | None = None  # as the decoder holds it
    kernels: Kernels | None = None
    extra: Mapping[str, StoredWeight] = field(default_factory=dict)  # the target's tensors that no decoder layer claims
    checkpoint: Path | None = None  # the drafter's folder, where `speculation.drafter` names one


class Drafter(Protocol):
    name: str  # the method, as users write it
    version: str  # changes whenever its K/V for the same tokens would: weights, taps, layers
    on_device: bool  # it launches and never waits; the methods that only such a drafter has come last
    taps: tuple[int, ...]
    kv_layers: tuple[KVSpec, ...]

    def bind(self, caches: SequenceOf[LayerCache], block_size: int) -> None:
        """Receive the cache layers asked for; called once, before anything else."""

    def propose(self, rows: SequenceOf[DraftRow]) -> Draft:
        """One draft row for each row asked, in order; any may be empty. Never more nodes than the row's budget."""

    def admit(self, sequence: Sequence, start: int, end: int) -> None:
        """The sequence enters (again) with `end` tokens cached; the drafter's own K/V are valid from `start` on."""

    def release(self, sequence: Sequence) -> None:
        """The sequence left (finished, cancelled or preempted): forget it."""

    def evidence(self, sequence: Sequence) -> int:
        """How much speaks for the draft it would make now: 0 nothing, so it would be empty. Committed tokens only."""

    def lag(self, sequence: Sequence) -> int:
        """Tokens it has to read before it can draft."""

    def close(self) -> None:
        """The engine is done: keep what is worth keeping."""


class DeviceDrafter(Drafter, Protocol):
    device: torch.device
    warm: bool  # the last draft took what its like will take again

    def propose(self, rows: SequenceOf[DraftRow], after: UnreadVerdict | None = None) -> Draft:
        """`after`: begin behind a step that is not read yet, whose drafts for these rows were this drafter's own. Room
        for `budget` nodes behind all that it may commit is reserved. Such a draft need not be used."""

    def landed(self, judged: SequenceOf[Judged], begun: SequenceOf[Sequence]) -> None:
        """A step was read. `judged`: its own drafts in it; `begun`: sequences it has begun drafts for behind it."""

    def adopt(self, rows: SequenceOf[DraftRow]) -> None:
        """Begun drafts are used, of each row so many nodes."""

    def absorbed(self, sequence: Sequence) -> tuple[int, int]:
        """The slots [start, end) of its own K/V that are valid now."""

    # Of drafters with taps:
    def bind_taps(self, ring: Any, columns: list[int]) -> None: ...
    def before_store(self, sequences: list[Sequence], most: int) -> None: ...
    def read_chunks(self, chunks: SequenceOf[Any], taps: Tensor) -> None: ...


class HostDrafter:
    """What a drafter without taps and K/V of its own leaves empty."""

    version = "1"
    on_device = False
    taps: tuple[int, ...] = ()
    kv_layers: tuple[KVSpec, ...] = ()
    covers: tuple[str, ...] = ()  # methods that look in the same texts and find less
    idle = False  # hardly asked: it follows only sequences that it was asked about

    def bind(self, caches: SequenceOf[LayerCache], block_size: int) -> None:
        pass

    def read_prompt(self, sequence: Sequence, end: int) -> None:
        """tokens[:end] of a prompt were computed."""

    def look(self, sequences: SequenceOf[Sequence]) -> list[int] | None:
        """The evidence of all, where finding it at once takes less; None: they are to be asked one by one."""
        return None

    def admit(self, sequence: Sequence, start: int, end: int) -> None:
        pass

    def evidence(self, sequence: Sequence) -> int:
        return 1

    def lag(self, sequence: Sequence) -> int:
        return 0

    def close(self) -> None:
        pass

    def release(self, sequence: Sequence) -> None:
        pass


def excluded(sequence: Sequence, method: str) -> bool:
    """The request asked for another method, or for none."""
    own = sequence.params.speculation
    wanted = own if own is None or isinstance(own, str) else own.get("method")
    return wanted not in (None, AUTO, method)
