"""The drafter's side of the bargain: one `propose / commit / release` for every method.

A drafter guesses what follows a sequence; the engine verifies. It may read hidden states of the target (`taps`) and
keep K/V of its own (`kv_layers`): these are extra layers under the target's block table, so compaction, preemption
and prefix sharing move both.

**Slots.** What a drafter computes from the pair (hidden state of t, token t + 1) it stores in slot t + 1, and what it
computes from token t alone in slot t. Then no slot depends on a later token, blocks can be shared whole, and after a
prefix hit the one missing pair is supplied by recomputing the last shared token (the engine does so when taps are
asked for).

**Lag.** A drafter need not absorb a commit at once (plain steps, a hit on blocks it never saw): pending taps wait in
a bounded ring, `propose` absorbs them first; what the ring lost is context the drafter starts without.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from paceline.config import ModelConfig, SpeculationConfig
from paceline.draft import Draft
from paceline.drafters.stopwatch import Stopwatch
from paceline.models.chain import Said
from paceline.models.kv_cache import KVSpec, LayerCache
from paceline.sequence import Sequence

LEARNED = 6  # evidence of a trained drafter: it always has an opinion, and mostly a good one


@dataclass(slots=True)
class DraftRow:
    """A sequence that asks for a draft of at most `budget` nodes. Room for them is reserved behind its tokens."""

    sequence: Sequence
    budget: int


@dataclass(slots=True)
class Commit:
    """Tokens the target computed in this pass and that now stand: a prefill chunk, or a decode's accepted path.

    `sequence.tokens` already holds what the pass committed, so for each tapped position t the token t + 1 is known.
    """

    sequence: Sequence
    first: int  # position of the first computed token
    count: int
    taps: Tensor | None  # (count, T, H)
    method: str = "none"  # whose draft was judged in this pass


@dataclass(frozen=True)
class DrafterContext:
    """What a drafter may need to know of the target when it is made."""

    config: ModelConfig  # the target's
    device: torch.device
    speculation: SpeculationConfig
    dtype: str = "auto"  # how a model of its own should store its weights
    encode: Callable[[str], list[int]] | None = None  # text to the target's tokens
    token_texts: Callable[[int], str] | None = None  # a token's own text, to compare vocabularies


class Drafter(Protocol):
    name: str  # the method, as users write it
    version: str  # changes whenever its K/V for the same tokens would: weights, taps, layers
    taps: tuple[int, ...]
    kv_layers: tuple[KVSpec, ...]

    def bind(self, caches: SequenceOf[LayerCache], block_size: int) -> None:
        """Receive the cache layers asked for; called once, before anything else."""

    def propose(self, rows: SequenceOf[DraftRow]) -> Draft:
        """One draft row for each row asked, in order; any may be empty. Never more nodes than the row's budget."""

    def commit(self, commits: SequenceOf[Commit]) -> None:
        """Every computed token passes here once, in order, prefill chunks included."""

    def admit(self, sequence: Sequence, start: int, end: int) -> None:
        """The sequence enters (again) with `end` tokens cached; the drafter's own K/V are valid from `start` on."""

    def absorbed(self, sequence: Sequence) -> tuple[int, int]:
        """The slots [start, end) of its own K/V that are valid now."""

    def release(self, sequence: Sequence) -> None:
        """The sequence left (finished, cancelled or preempted): forget it."""

    def evidence(self, sequence: Sequence) -> int:
        """How much speaks for the draft it would make now: 0 nothing, so it would be empty. Committed tokens only."""

    def lag(self, sequence: Sequence) -> int:
        """Tokens it has to read before it can draft."""

    def close(self) -> None:
        """The engine is done: keep what is worth keeping."""


@dataclass(frozen=True)
class Times:
    """When a device drafted."""

    watch: Stopwatch | None  # None: it took longer than its like will take again
    depth: int  # tokens of each row
    ahead: bool = False  # before the step that asked for it began


@runtime_checkable
class DraftsAhead(Protocol):
    """A drafter that needs no host: it may begin behind a step that is still under way."""

    def draft_ahead(self, rows: SequenceOf[DraftRow], said: Said) -> None:
        """Begin drafts for the next step, behind what the step under way says for these rows, whose drafts of that step
        were its own. Room for `budget` nodes behind all that it may say is reserved. They need not be used."""

    def times(self) -> Times | None:
        """Of the last draft that was asked for; None: the host waited for it."""


class HostDrafter:
    """What a drafter without taps and K/V of its own leaves empty."""

    version = "1"
    taps: tuple[int, ...] = ()
    kv_layers: tuple[KVSpec, ...] = ()
    covers: tuple[str, ...] = ()  # methods that look in the same texts and find less
    idle = False  # hardly anybody asks it: it follows those sequences only that it was asked about

    def bind(self, caches: SequenceOf[LayerCache], block_size: int) -> None:
        pass

    def commit(self, commits: SequenceOf[Commit]) -> None:
        pass

    def look(self, sequences: SequenceOf[Sequence]) -> list[int] | None:
        """The evidence of all, where finding it at once takes less; None: they are to be asked one by one."""
        return None

    def overlap(self) -> None:
        """Called while a pass is under way: what was left over from commits."""

    def admit(self, sequence: Sequence, start: int, end: int) -> None:
        pass

    def absorbed(self, sequence: Sequence) -> tuple[int, int]:
        return 0, 0

    def evidence(self, sequence: Sequence) -> int:
        return 1

    def lag(self, sequence: Sequence) -> int:
        return 0

    def close(self) -> None:
        pass

    def release(self, sequence: Sequence) -> None:
        pass
