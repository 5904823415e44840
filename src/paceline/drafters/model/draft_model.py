"""A smaller model of the target's vocabulary drafts a chain, token by token, under the request's sampling parameters.

The K/V of token t stand in slot t of the drafter's layers and depend on tokens 0..t only. So a rollback lowers a
length: the K/V of drafted tokens that were committed stay, the next pass overwrites the rest. K/V behind the committed
tokens are never reused, for the engine may have given those blocks to other sequences between two steps.

Greedy and seeded rows propose the draft model's own choice (law 3: with the request's own Gumbel noise); other rows
sample from q, and q goes to verification (Leviathan et al. 2023, Chen et al. 2023). Where the model has a chain, rows
are drafted without the host, unless their sampling depends on earlier tokens (penalties and the like): tokens and q
stay on the device, and the next draft may begin behind a step that is not read yet (`propose` with `after`).
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import replace

import torch

from paceline.config import TRAINED_LEVEL
from paceline.core.device_draft import merge_drafts
from paceline.core.draft import Draft
from paceline.core.sequence import Sequence, digest_of
from paceline.core.verdict import UnreadVerdict
from paceline.drafters.base import DrafterDefaults, DraftRequest, VerifiedDraft
from paceline.drafters.methods import DRAFT_MODEL
from paceline.drafters.model.by_passes import ByPasses, ModelKV
from paceline.drafters.model.chain_sampler import ChainSampler, SampledChains, SamplingGraphs, is_plain, warmup
from paceline.errors import InvalidParameter
from paceline.models.decoder import Model
from paceline.models.kv_cache import LayerCache
from paceline.models.pass_chain import READ, ChainRow, PassChain
from paceline.models.warmup import drafting

PREPARED = 128  # sequences; largest batch for which passes are compiled and captured beforehand
CATCH_UP = 512  # tokens the drafter reads in one step before it drafts; a longer lag takes several steps
FAST_CATCH_UP = 2048  # tokens; in place of CATCH_UP where passes are prepared, as on a GPU


class DraftModelDrafter(DrafterDefaults):
    name, on_device = DRAFT_MODEL, True

    def __init__(
        self,
        model: Model,
        *,
        eos_token_ids: Iterable[int] | None = None,
        version: str | None = None,
        catch_up: int = CATCH_UP,
    ) -> None:
        """`eos_token_ids` are the target's: they end an answer, not those of the draft model."""
        config = model.config
        self.version = version or f"{self.name}/{digest_of(repr(config))}"
        self.kv_layers, self.pass_bytes = tuple(model.kv_specs), model.pass_bytes
        self.model, self.device, self.time_is_typical = model, model.device, True
        self._catch_up, self._block_size = catch_up, 0
        self._states: dict[str, ModelKV] = {}
        eos = frozenset(config.eos_token_ids if eos_token_ids is None else eos_token_ids)
        self._by_passes = ByPasses(model, self._states, eos)
        self._graphs = SamplingGraphs(config.vocab_size, model.device)
        self._chain: PassChain | None = None
        self._chain_samples = False  # the chain also serves rows that sample

    def bind(self, caches: SequenceOf[LayerCache], block_size: int) -> None:
        stored, computed = caches[0].k.dtype, self.model.cache_dtype
        if stored != computed:
            raise InvalidParameter("draft_model", f"computes in {computed} and the target in {stored}; load both alike")
        self._block_size = block_size
        if self.model.prepare(caches, block_size, (), drafting(PREPARED, FAST_CATCH_UP)):
            self._catch_up = max(self._catch_up, FAST_CATCH_UP)
        self._by_passes.bind(caches, block_size, self._catch_up)
        self._chain = self.model.pass_chain(caches, block_size)
        if self._chain is not None:
            self._chain_samples = self.device.type != "cuda" or warmup(self._graphs)

    def admit(self, sequence: Sequence, start: int, end: int) -> None:
        # Where only later blocks are valid, the ones before are filled although other sequences may share them: a
        # drafter that filled them before wrote equal values.
        self._states[sequence.key] = ModelKV(end) if start == 0 else ModelKV(0, (start, end))

    def on_verdict(self, verified: SequenceOf[VerifiedDraft], early: SequenceOf[Sequence]) -> None:
        """Keep the K/V of drafted tokens that were committed. Other tokens are read when a draft is next needed."""
        for sequence, computed in verified:
            state = self._states[sequence.key]
            if state.tokens_on_device is not None:  # the accepted part is in the cache
                state.valid = max(min(computed, state.valid + state.tokens_on_device), state.valid)
                state.tokens_on_device = None
            elif state.drafted:
                for drafted, committed in zip(state.drafted, sequence.tokens[state.valid :], strict=False):
                    if drafted != committed:
                        break
                    state.valid += 1
                state.drafted = []

    def kv_range(self, sequence: Sequence) -> tuple[int, int]:
        return 0, self._states[sequence.key].valid

    def release(self, sequence: Sequence) -> None:
        self._states.pop(sequence.key, None)

    def level(self, sequence: Sequence) -> int:
        return TRAINED_LEVEL if len(sequence.tokens) < self.model.config.max_positions else 0

    def unread_tokens(self, sequence: Sequence) -> int:
        """Return the tokens that the draft model reads before it drafts: 1 or 2 while it drafts every step."""
        return len(self._by_passes.missing(sequence))

    def propose(self, rows: SequenceOf[DraftRequest], after: UnreadVerdict | None = None) -> Draft:
        """Draft rows whose sampling needs only the logits without the host between tokens; the others with it."""
        self.time_is_typical, self.passes = True, max([row.max_nodes for row in rows])
        if after is not None:
            return self._begin_early(rows, after)
        chained = [index for index, row in enumerate(rows) if self._uses_chain(row.sequence)]
        if not chained:
            return self._by_passes.draft(rows)
        parts = [(chained, self._by_chain([rows[index] for index in chained]))]
        others = [index for index in range(len(rows)) if index not in chained]
        if others:
            parts.append((others, _with_finite_q(self._by_passes.draft([rows[index] for index in others]))))
        return merge_drafts(parts, len(rows), self.model.config.vocab_size)

    def _begin_early(self, rows: SequenceOf[DraftRequest], after: UnreadVerdict) -> Draft:
        """Draft behind the tokens that a step under way commits, for rows with a draft by this drafter in that step."""
        at = [index for index, row in enumerate(rows) if self._can_begin_early(row)]
        chained = [rows[index] for index in at]
        chain = self._chain_for([row.sequence for row in chained])
        if chain is None or not at:
            return Draft.empty(len(rows))
        chain_rows = [self._chain_row(row.sequence, unread_tokens=READ, count=row.max_nodes) for row in chained]
        behind = replace(after, rows=[after.rows[index] for index in at])
        drafted = self._run_chain(chain, [row.sequence for row in chained], chain_rows, behind)
        draft = drafted.chains([row.max_nodes for row in chained])
        return merge_drafts([(at, draft)], len(rows), self.model.config.vocab_size)

    def _can_begin_early(self, row: DraftRequest) -> bool:
        """Return whether the drafter has K/V of all tokens before the step under way and drafted for the row in it:
        then at most one of the tokens that the step commits has no K/V."""
        state = self._states.get(row.sequence.key)
        return (
            state is not None
            and state.tokens_on_device is not None
            and state.valid == len(row.sequence.tokens) >= READ
            and row.max_nodes > 0
            and self._uses_chain(row.sequence)
        )

    def use_early(self, rows: SequenceOf[DraftRequest]) -> None:
        """Count the K/V of all nodes but the last as computed."""
        for row in rows:
            self._count_drafted(row.sequence, row.max_nodes)

    def _by_chain(self, rows: SequenceOf[DraftRequest]) -> Draft:
        """Draft behind committed tokens, by the chain where it takes this number of rows."""
        if any(not self._is_nearly_read(row.sequence) for row in rows):
            self._by_passes.read(rows)
        counts = [self._by_passes.num_nodes(row) if self._is_nearly_read(row.sequence) else 0 for row in rows]
        ready = [index for index, count in enumerate(counts) if count]
        sequences, counts = [rows[index].sequence for index in ready], [counts[index] for index in ready]
        chain = self._chain_for(sequences)
        if not ready or chain is None:
            return Draft.empty(len(rows)) if not ready else _with_finite_q(self._by_passes.draft(rows))
        chain_rows = [
            self._chain_row(sequence, self.unread_tokens(sequence), count)
            for sequence, count in zip(sequences, counts, strict=True)
        ]
        drafted = self._run_chain(chain, sequences, chain_rows, None)
        for sequence, count in zip(sequences, counts, strict=True):
            self._count_drafted(sequence, count)
        return merge_drafts([(ready, drafted.chains(counts))], len(rows), self.model.config.vocab_size)

    def _count_drafted(self, sequence: Sequence, count: int) -> None:
        """Note a chain whose tokens are on the device; the K/V of all but the last are computed where slots are."""
        state = self._states[sequence.key]
        slots = len(self._by_passes.blocks(sequence)) * self._block_size - len(sequence.tokens)
        state.valid, state.drafted = len(sequence.tokens), []
        state.tokens_on_device = max(min(count - 1, slots), 0)

    def _run_chain(
        self, chain: PassChain, sequences: list[Sequence], rows: list[ChainRow], after: UnreadVerdict | None
    ) -> SampledChains:
        try:
            if all(sequence.params.greedy for sequence in sequences):
                drafted = SampledChains(chain.draft(rows, after))
            else:
                sampler = ChainSampler(self._graphs, sequences, max(row.count for row in rows), after)
                drafted = sampler.drafted(chain.draft(rows, after, sampler))
            self.time_is_typical = chain.time_is_typical
            return drafted
        except Exception:  # K/V that the chain wrote may be invalid
            self._chain = None
            for state in self._states.values():
                state.valid, state.shared, state.tokens_on_device = 0, (0, 0), None
            raise

    def _chain_for(self, sequences: list[Sequence]) -> PassChain | None:
        chain = self._chain
        if chain is None or len(sequences) > chain.most_rows:
            return None
        return chain if self._chain_samples or all(sequence.params.greedy for sequence in sequences) else None

    def _uses_chain(self, sequence: Sequence) -> bool:
        return self._chain is not None and (self._chain_samples or sequence.params.greedy) and is_plain(sequence)

    def _chain_row(self, sequence: Sequence, unread_tokens: int, count: int) -> ChainRow:
        blocks = self._by_passes.blocks(sequence)
        return ChainRow(sequence.tokens[-READ:], len(sequence.tokens) - READ, unread_tokens, count, blocks)

    def _is_nearly_read(self, sequence: Sequence) -> bool:
        """Return whether the missing tokens are few and contiguous, so that a chain can read them itself."""
        missing = self._by_passes.missing(sequence)
        return len(missing) <= READ <= len(sequence.tokens) and missing[-1] - missing[0] < len(missing)


def _with_finite_q(draft: Draft) -> Draft:
    """Return the draft; raise where q is not finite: a draft that is merged with unread ones is not checked later."""
    if draft.q is not None and not bool(torch.isfinite(draft.q.probs).all()):
        raise ValueError("q is not finite")
    return draft
