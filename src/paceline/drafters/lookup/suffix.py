"""Lookup drafters: they propose what followed a text's last tokens elsewhere. Two rules share one index.

`suffix` (suffix decoding, 2411.04975) draws a tree from several places of this text, of past answers to its own domain
(`core.sequence.Owner`) and of the corpus. Each sequence has an index over its prompt and output. Together they keep
within `suffix_bytes`: the store may take three quarters, and a sequence that finds no room left forgets its oldest
tokens. Aborted and preempted sequences add nothing to the store, so nothing is learned twice.

`ngram` (prompt lookup) drafts a chain from one place of this text: the newest with the longest match. Chains of the
index begin at 5, 2 and 1 tokens and show the latest occurrences, so a longer match further back may be missed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from paceline.core.draft import Draft, HostDraft
from paceline.core.sequence import Sequence
from paceline.drafters.base import DrafterContext, DraftRequest, HostDrafter
from paceline.drafters.lookup.index import Context, LookupState, Memory, SuffixIndex
from paceline.drafters.lookup.native import NativeIndex, NativeLookup
from paceline.drafters.lookup.store import SuffixStore
from paceline.drafters.lookup.tree import (
    STORE_WEIGHT,
    Lookup,
    Place,
    Tree,
    continuation,
    grow,
    level_of,
    longest_place,
    places_of,
)
from paceline.drafters.methods import NGRAM, RECYCLING, SUFFIX
from paceline.native.library import Library, load_library

log = logging.getLogger("paceline")

S = TypeVar("S", bound=LookupState[Any])


class Rule(NamedTuple):
    """Places that a lookup takes from a text and its index, the level they support, and the draft made of them."""

    places: Callable[[LookupState[SuffixIndex]], list[Place]]
    level: Callable[[SequenceOf[Place]], int]
    tree: Callable[[list[Place], int], Tree]


def suffix_rule(store: SuffixStore) -> Rule:
    def places(state: LookupState[SuffixIndex]) -> list[Place]:
        context, index = Context(state.sequence.tokens), state.index
        lookups = [] if index is None else [Lookup(index, context)]
        lookups += [Lookup(text, context, STORE_WEIGHT) for text in (state.past, store.corpus) if text is not None]
        return places_of(lookups, index, context)

    return Rule(places, level_of, grow)


def longest_rule(shortest: int, longest: int) -> Rule:
    def places(state: LookupState[SuffixIndex]) -> list[Place]:
        context, index = Context(state.sequence.tokens), state.index
        return [] if index is None else longest_place(index, context, shortest, longest)

    return Rule(places, lambda places: places[0][0] if places else 0, continuation)


class Backend(Protocol[S]):
    """The indexes of all sequences, and their search."""

    def new(self, sequence: Sequence) -> S:
        """Return a state with no tokens indexed yet."""

    def index_up_to(self, state: S, end: int) -> None:
        """Index tokens[:end]."""

    def find(self, states: SequenceOf[S]) -> None:
        """Look up the texts as they are now."""

    def draft(self, states: SequenceOf[S], max_nodes: SequenceOf[int]) -> Draft:
        """Return drafts of what `find` found."""

    def drop(self, state: S) -> None:
        """Free the state."""


class PythonState(LookupState[SuffixIndex]):
    __slots__ = ("places",)

    def __init__(self, sequence: Sequence, index: SuffixIndex | None) -> None:
        super().__init__(sequence, index)
        self.places: list[Place] = []


class PythonLookup:
    """Lookup in Python: the definition, the reference in tests, and the backend if there is no native library."""

    def __init__(self, memory: Memory[SuffixIndex], rule: Rule) -> None:
        self._memory, self._rule = memory, rule

    def new(self, sequence: Sequence) -> PythonState:
        return PythonState(sequence, self._memory.new_index())

    def index_up_to(self, state: PythonState, end: int) -> None:
        if state.indexed < end:
            tokens = state.sequence.tokens
            if state.index is not None:
                self._memory.make_room(state.index, len(tokens) - state.indexed)  # a prompt's whole length at once
                state.index.extend(tokens[state.indexed : end])
            state.indexed = end

    def find(self, states: SequenceOf[PythonState]) -> None:
        for state in states:
            tokens = state.sequence.tokens
            self.index_up_to(state, len(tokens))
            state.places, state.at = self._rule.places(state), len(tokens)
            state.level = self._rule.level(state.places)

    def draft(self, states: SequenceOf[PythonState], max_nodes: SequenceOf[int]) -> Draft:
        trees = [self._rule.tree(state.places, most) for state, most in zip(states, max_nodes, strict=True)]
        counts = np.array([len(tree.tokens) for tree in trees], np.int64)
        nodes = np.zeros((3, len(states), int(counts.max(initial=0))), np.int64)
        nodes[1] = -1
        for row, tree in enumerate(trees):
            nodes[:, row, : counts[row]] = tree.tokens, tree.parents, tree.depths
        tokens, parents, depth = nodes
        return HostDraft.of_arrays(tokens, parents, depth, counts)

    def drop(self, state: PythonState) -> None:
        self._memory.give_back(state.index)


class LookupDrafter(HostDrafter, Generic[S]):
    """A lookup by either rule. All rows of a step are looked up at once, and each text once for each length it has:
    later calls at that length read the stored result."""

    def __init__(self, backend: Backend[S]) -> None:
        self.backend = backend
        self.states: dict[str, S] = {}

    def levels(self, sequences: SequenceOf[Sequence]) -> list[int]:
        return [state.level for state in self.looked_up(sequences)]

    def level(self, sequence: Sequence) -> int:
        """Return the level of a draft made now: a function of the committed tokens and of past answers."""
        state = self.states.get(sequence.key)
        if state is None or state.at != len(sequence.tokens) or state.sequence is not sequence:
            (state,) = self.looked_up([sequence])
        return state.level

    def propose(self, rows: SequenceOf[DraftRequest]) -> Draft:
        return self.backend.draft(self.looked_up([row.sequence for row in rows]), [row.max_nodes for row in rows])

    def admit(self, sequence: Sequence, start: int, end: int) -> None:
        self._forget(sequence)

    def release(self, sequence: Sequence) -> None:
        self._forget(sequence)

    def looked_up(self, sequences: SequenceOf[Sequence]) -> list[S]:
        known, states, due = self.states, [], []
        for sequence in sequences:
            state = known.get(sequence.key)
            if state is None or state.sequence is not sequence:
                state = self.state_of(sequence)
            states.append(state)
            if state.at != len(sequence.tokens):
                due.append(state)
        if due:
            self.backend.find(due)
        return states

    def state_of(self, sequence: Sequence) -> S:
        state = self.states.get(sequence.key)
        if state is None or state.sequence is not sequence:
            self._forget(sequence)
            state = self.states[sequence.key] = self.new_state(sequence)
        return state

    def new_state(self, sequence: Sequence) -> S:
        return self.backend.new(sequence)

    def _forget(self, sequence: Sequence) -> bool:
        """Drop the sequence's state; return whether there was one."""
        state = self.states.pop(sequence.key, None)
        if state is not None:
            self.backend.drop(state)
        return state is not None and state.sequence is sequence


def automatic_lookup(method: str) -> str:
    """Return the lookup that `auto` may choose in an engine of this method: `recycling` contains `suffix`."""
    recycles = method == RECYCLING and load_library() is not None
    return RECYCLING if recycles else SUFFIX


class SuffixDrafter(LookupDrafter[Any]):
    name = SUFFIX

    def __init__(self, context: DrafterContext, native: bool = True) -> None:
        """`native`: use the native library if there is one."""
        settings = context.speculation
        for_store = settings.suffix_bytes // 4 * 3
        self.only_by_name = self.name != automatic_lookup(settings.method)
        library = load_library() if native else None
        make = SuffixIndex if library is None else NativeIndex.maker(library)
        self.keeps_answers = settings.suffix_answers
        # One store for `suffix` and `recycling`; the one that `auto` may choose fills it.
        self.store: SuffixStore = context.shared.get(SUFFIX) or SuffixStore(
            for_store, context.config.vocab_size, context.encode, settings.suffix_store, make
        )
        if SUFFIX not in context.shared:
            context.shared[SUFFIX] = self.store
            self.store.seed(settings.suffix_corpus)
            self.store.load()
        self._memory: Memory[Any] = Memory(make, settings.suffix_bytes - for_store)
        super().__init__(
            PythonLookup(self._memory, suffix_rule(self.store))
            if library is None
            else self.native_backend(library, self._memory, self.store)
        )

    def native_backend(self, library: Library, memory: Memory[Any], store: SuffixStore) -> NativeLookup:
        return NativeLookup.by_suffix(library, memory, store)

    @property
    def nbytes(self) -> int:
        return self.store.nbytes + self._memory.nbytes

    def index_prompt(self, sequence: Sequence, end: int) -> None:
        """Index the computed part of a prompt; tokens that decoding commits are indexed when a draft is needed."""
        if not self.only_by_name:
            self.backend.index_up_to(self.state_of(sequence), end)

    def new_state(self, sequence: Sequence) -> Any:
        state = super().new_state(sequence)
        state.use_past(self.store.answers(sequence.owner.domain))
        return state

    def release(self, sequence: Sequence) -> None:
        known, owner = self._forget(sequence) and not self.only_by_name, sequence.owner
        if known and self.keeps_answers and owner.lasts and sequence.finish_reason not in (None, "abort", "error"):
            self.store.learn(sequence.output_tokens, owner.domain)
            for state in self.states.values():
                past = self.store.known.get(state.sequence.owner.domain)
                if past is not state.past or state.sequence.owner.domain == owner.domain:
                    state.use_past(past)  # more may be found now; or the domain was dropped for another one

    def save(self) -> None:
        """Write the learned answers to `suffix_store`, if it is set."""
        self.store.save()

    def close(self) -> None:
        if self.only_by_name:
            return
        try:
            self.save()
        except OSError as problem:
            log.warning("the suffix store was not saved: %s", problem)


class NgramDrafter(LookupDrafter[Any]):
    """Prompt lookup. A prompt is indexed when the first draft is needed, so the drafter costs nothing until a request
    names it. The level of a draft is the number of tokens shared."""

    name = NGRAM
    only_by_name = True  # `suffix` searches the same texts, and more of them

    def __init__(self, context: DrafterContext, native: bool = True) -> None:
        """`native`: use the native library if there is one."""
        lengths = context.speculation.ngram_min, context.speculation.ngram_max
        library = load_library() if native else None
        super().__init__(
            PythonLookup(Memory(SuffixIndex), longest_rule(*lengths))
            if library is None
            else NativeLookup.by_longest(library, Memory(NativeIndex.maker(library)), lengths)
        )
