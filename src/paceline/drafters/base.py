"""The contract of a drafter: one `propose` for every method.

A drafter proposes tokens that may follow a sequence; the engine verifies them. It may read hidden states of the target
(`taps`) and keep K/V of its own (`kv_layers`): these are extra layers under the target's block table, so compaction,
preemption and prefix sharing move both.

**Slots.** K/V computed from the pair (hidden state of t, token t + 1) are stored in slot t + 1 (`shifted_kv`), and K/V
computed from token t alone, or from the hidden state of t alone, in slot t. Then no slot depends on a later token,
blocks are shared whole, and after a prefix hit the engine supplies the one missing pair by recomputing the last shared
token.

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

from paceline.config import AUTO, MAX_K, SpeculationConfig
from paceline.core.draft import Draft
from paceline.core.feedback import Feedback
from paceline.core.sequence import Sequence
from paceline.core.verdict import UnreadVerdict
from paceline.drafters.hidden_states import PromptChunk, TapRing
from paceline.drafters.method_names import matches_method
from paceline.models.decoder import Model
from paceline.models.kernels import Kernels, Packed
from paceline.models.kv_cache import KVSpec, LayerCache
from paceline.models.spec import ModelConfig
from paceline.models.weights import StoredWeight
from paceline.text.tokenizer import Tokenizer

DIGEST_VALUES = 4096  # values of a tensor that enter its digest


class DraftRequest(NamedTuple):
    """A sequence that needs a draft of at most `max_nodes` nodes. Slots for them are reserved behind its tokens.

    A deterministic draft may leave out nodes that the drafter finds less likely than `min_node_probability`.
    """

    sequence: Sequence
    max_nodes: int
    min_node_probability: float = 0.0


class VerifiedDraft(NamedTuple):
    """A sequence whose draft was verified; its tokens below `computed` have their K/V in the target."""

    sequence: Sequence
    computed: int


@dataclass(frozen=True)
class DrafterContext:
    """The parts that a drafter is built from; tests may leave out those with a default."""

    config: ModelConfig  # the target's
    device: torch.device
    speculation: SpeculationConfig
    dtype: str = "auto"  # dtype of the weights that a drafter with its own model stores
    kv_dtype: str = "auto"  # dtype of the cache, which target and drafters share
    encode: Callable[[str], list[int]] | None = None  # text to the target's tokens
    token_texts: Callable[[int], str] | None = None  # text of one token, to compare vocabularies
    tokenizer: Tokenizer | None = None  # the target's, for a drafter of another vocabulary
    embedding: Tensor | None = None  # (V, H), the target's own
    head: Packed | None = None  # the target's own, in its kernels' layout
    kernels: Kernels | None = None
    extra: Mapping[str, StoredWeight] = field(default_factory=dict)  # the target's tensors that no decoder layer claims
    checkpoint: Path | None = None  # folder of the trained drafter
    target: Model | None = None  # the target itself, whose layers a drafter may run
    shared: dict[str, Any] = field(default_factory=dict)  # by method: what its drafter shares with those made later


class Drafter(Protocol):
    name: str  # the method; several drafters of one method each have a name of their own
    version: str  # changes whenever the drafter's K/V for the same tokens change: weights, taps, layers
    on_device: bool  # True: a `DeviceDrafter`, which launches and never waits
    taps: tuple[int, ...]
    kv_layers: tuple[KVSpec, ...]
    reads_kv: (
        bool  # reads the target's own K/V of committed tokens; may write slots reserved for its drafts, in any layer
    )
    shifted_kv: bool  # K/V are of (hidden state of t, token t + 1), in slot t + 1; False: of position t, in slot t
    scratch_slots: int  # slots behind a sequence's tokens that drafting writes to, whatever the number of nodes
    depth: int  # bound of every draft; a tree of many nodes fits where few tokens are left, if it is not deep
    trees: bool  # nodes come in order of probability: the first n are the best tree of n, and cost no more than one
    pass_bytes: int  # of weights that one pass of its model reads; of trees, that a whole draft reads; 0: unknown
    shared_mass: float | None  # mean probability of tokens that the target has too; None: unknown, or all of it
    passes: int  # of its model, one behind the other, in the last draft; 1 where all of it is made at once
    feedback: int  # likeliest tokens of each verified row that `on_feedback` receives; 0: none, and it is not called

    def bind(self, caches: SequenceOf[LayerCache], block_size: int) -> None:
        """Receive the cache layers of `kv_layers`; called once, before anything else."""

    def bind_target(self, caches: SequenceOf[LayerCache], block_size: int) -> None:
        """Receive the target's cache layers; called behind `bind`, for drafters with `reads_kv`."""

    def propose(self, rows: SequenceOf[DraftRequest]) -> Draft:
        """Return one draft row for each of `rows`, in order, of at most `max_nodes` nodes; any may be empty."""

    def admit(self, sequence: Sequence, start: int, end: int) -> None:
        """Begin, or resume, a sequence with `end` cached tokens; the drafter's own K/V are valid from `start` on."""

    def release(self, sequence: Sequence) -> None:
        """Forget a sequence that left (finished, cancelled or preempted)."""

    def level(self, sequence: Sequence) -> int:
        """Return how well a draft is supported by committed tokens; 0: the draft would be empty."""

    def unread_tokens(self, sequence: Sequence) -> int:
        """Return the number of tokens that the drafter reads before it can draft."""

    def on_feedback(self, feedback: Feedback) -> None:
        """Receive the likeliest tokens of all verified rows of a step that was read, whatever drafted in it. Called
        once a step, behind `on_verdict`, with at most `feedback` tokens of a row."""

    def close(self) -> None:
        """Save what later runs can use, and drop what refers to the drafter itself; the engine is closing."""


class DeviceDrafter(Drafter, Protocol):
    device: torch.device
    time_is_typical: bool  # False: the last draft compiled or captured something

    def propose(self, rows: SequenceOf[DraftRequest], after: UnreadVerdict | None = None) -> Draft:
        """Return drafts as `Drafter.propose` does. With `after`: behind a step that is not read, in which this drafter
        drafted for these rows. Slots are reserved behind all tokens that the step may commit; drafts may be dropped."""

    def on_verdict(self, verified: SequenceOf[VerifiedDraft], early: SequenceOf[Sequence]) -> None:
        """Receive a step's outcome. `verified`: this drafter's drafts in it; `early`: sequences with an early draft
        behind it. The verdict is on the host."""

    def use_early(self, rows: SequenceOf[DraftRequest]) -> None:
        """Count early drafts as used: the first `max_nodes` nodes of each row."""

    def kv_range(self, sequence: Sequence) -> tuple[int, int]:
        """Return the slots [start, end) of the drafter's own K/V that are valid."""

    def bind_taps(self, ring: TapRing, columns: list[int]) -> None:
        """Receive the ring; `columns` of its taps are this drafter's. Called, like the rest, for drafters with taps."""

    def before_store(self, sequences: list[Sequence], most: int) -> None:
        """Read what the ring would lose when up to `most` positions of each sequence are stored."""

    def read_chunks(self, chunks: SequenceOf[PromptChunk], taps: Tensor) -> None:
        """Read chunks of prompts, from the taps (M, T, H) of the pass that computed them."""


class DrafterDefaults:
    version = "1"
    on_device = shifted_kv = trees = reads_kv = False
    taps: tuple[int, ...] = ()
    kv_layers: tuple[KVSpec, ...] = ()
    scratch_slots = pass_bytes = feedback = 0
    depth, passes = MAX_K, 1
    shared_mass: float | None = None

    def on_feedback(self, feedback: Feedback) -> None:
        pass

    def bind_target(self, caches: SequenceOf[LayerCache], block_size: int) -> None:
        pass

    def close(self) -> None:
        pass


class HostDrafter(DrafterDefaults):
    """Defaults of a drafter without taps and K/V of its own."""

    only_by_name = False  # True: `auto` never chooses it; requests may

    def bind(self, caches: SequenceOf[LayerCache], block_size: int) -> None:
        pass

    def index_prompt(self, sequence: Sequence, end: int) -> None:
        """Index tokens[:end] of a prompt, which were computed."""

    def levels(self, sequences: SequenceOf[Sequence]) -> list[int] | None:
        """Return the levels of all sequences, where one call is cheaper; None: call `level` for each."""
        return None

    def admit(self, sequence: Sequence, start: int, end: int) -> None:
        pass

    def level(self, sequence: Sequence) -> int:
        return 1

    def unread_tokens(self, sequence: Sequence) -> int:
        return 0

    def release(self, sequence: Sequence) -> None:
        pass


def excluded(sequence: Sequence, method: str) -> bool:
    """Return whether the request chooses another drafter than the one of this name, or none."""
    own = sequence.params.speculation
    wanted = own if own is None or isinstance(own, str) else own.get("method")
    return wanted not in (None, AUTO) and not matches_method(method, wanted)


def digest(tensors: Iterable[Tensor]) -> str:
    """Return a digest of values spread over every tensor; training changes all of them."""
    state = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        state.update(repr((tuple(tensor.shape), tensor.dtype)).encode())
        spread = tensor.flatten()[:: -(-tensor.numel() // DIGEST_VALUES)]
        state.update(spread.float().cpu().numpy().tobytes())
    return state.hexdigest()
