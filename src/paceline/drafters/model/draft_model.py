"""A smaller model of the same vocabulary drafts a chain, token by token, under the request's own sampling parameters.

The K/V of token t stand in slot t of the drafter's layers and depend on tokens 0..t only. So a rollback lowers a
length: the K/V of drafted tokens that were committed stay, the next pass overwrites the rest. K/V behind the committed
tokens are never reused, for the engine may have given those blocks to other sequences between two steps.

Greedy and seeded rows propose the draft model's own choice (law 3: with the request's own Gumbel noise); other rows
sample from q, and q goes to verification (Leviathan et al. 2023, Chen et al. 2023). Where the model offers chains, rows
are drafted without the host, unless their sampling depends on earlier tokens (penalties and the like): tokens and q
stay on the device, and the next draft may begin behind a step that is still under way (`propose` with `after`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from paceline.config import MAX_K
from paceline.core.draft import Draft, Proposal
from paceline.core.sequence import Sequence
from paceline.core.verdict import UnreadVerdict
from paceline.drafters.base import TRAINED_LEVEL, DrafterContext, DraftRequest, VerifiedDraft
from paceline.drafters.methods import DRAFT_MODEL
from paceline.drafters.model.chain_sampler import ChainSampler, Drafted, SamplingGraphs, is_plain, warmup
from paceline.errors import InvalidParameter
from paceline.models.decoder import Model
from paceline.models.kv_cache import KVSpec, LayerCache
from paceline.models.load.hub import resolve
from paceline.models.load.open_model import LoadedModel, load_model
from paceline.models.pass_chain import READ, ChainRow, PassChain
from paceline.models.plan import PassPlan, padded_tables, slots_of
from paceline.models.warmup import drafting
from paceline.verify import Nodes, propose
from paceline.verify.metadata import SamplingMetadataBuilder

PREPARED = 128  # largest batch of sequences for which passes are compiled and captured beforehand
CATCH_UP = 512  # tokens the drafter reads in one step before it drafts; a longer lag takes several steps
FAST_CATCH_UP = 2048  # the same where passes are prepared, as on a GPU


@dataclass
class _State:
    """Which K/V of one sequence are in the drafter's layers."""

    valid: int = 0  # slots [0, valid) hold the K/V of the sequence's tokens
    shared: tuple[int, int] = (0, 0)  # later slots that are valid too: a prefix hit on blocks the drafter filled
    drafted: list[int] = field(default_factory=list)  # tokens whose K/V follow in slots valid, valid + 1, ...
    tokens_on_device: int | None = None  # number of such tokens where the host has not seen them; None: it has


class _Chains:
    """Drafts under construction, longest first, so that the rows still drafting are a prefix."""

    def __init__(self, rows: list[int], sequences: list[Sequence], counts: list[int], device: torch.device) -> None:
        self.rows, self.sequences = rows, sequences  # rows: indices into the rows of `propose`
        self.counts = counts  # nodes of each row, fixed before any token is drawn
        self.lengths = [len(sequence.tokens) for sequence in sequences]
        self.index = torch.arange(len(rows), device=device)
        self.owners = torch.arange(len(rows))  # the same on the host, where passes are planned
        self.ends = torch.tensor(self.lengths)  # (S,) position of the first node
        self.tokens = self.index.new_zeros(len(rows), max(counts, default=0))  # (S, K)
        self.probs: list[Tensor] = []  # q, a tensor for every depth at which a row sampled
        self.drawn: list[tuple[int, int]] = []  # (row, depth) of each row of q

    def active(self, depth: int) -> int:
        return sum(count > depth for count in self.counts)

    def nodes(self, active: int, depth: int) -> Nodes:
        """The nodes at this depth: parents of the tokens drawn next. At depth 0 the last committed tokens."""
        seq = self.index[:active]
        depths = torch.full_like(seq, depth)
        return Nodes(seq=seq, node=depths - 1, depth=depths, path=self.tokens[:active, :depth])


class DraftModelDrafter:
    name = DRAFT_MODEL
    on_device = True
    taps: tuple[int, ...] = ()
    shifted_kv, scratch_slots, depth, trees = False, 0, MAX_K, False

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
        self.version = version or f"{self.name}/{_digest(repr(config))}"
        self.kv_layers: tuple[KVSpec, ...] = tuple(model.kv_specs)
        self._model, self._catch_up = model, catch_up
        self._eos = frozenset(config.eos_token_ids if eos_token_ids is None else eos_token_ids)
        self._builder = SamplingMetadataBuilder(config.vocab_size, self._eos, model.device)
        self._graphs = SamplingGraphs(config.vocab_size, model.device)
        self._states: dict[str, _State] = {}
        self._caches: SequenceOf[LayerCache] = ()
        self._block_size = 0
        self._chain: PassChain | None = None
        self._chain_samples = False  # the chain also serves rows that sample
        self.device, self.time_is_typical = model.device, True

    @classmethod
    def from_context(cls, context: DrafterContext) -> DraftModelDrafter:
        if len(context.speculation.draft_model) != 1:
            raise InvalidParameter("draft_model", "names no model, or several; a drafter has one (--draft-model)")
        (name,) = context.speculation.draft_model
        path = resolve(name)
        loaded = load_beside(name, path, context)
        version = f"{cls.name}/{_digest(f'{path} {loaded.config} {loaded.kind.label}')}"
        return cls(loaded.decoder, eos_token_ids=context.config.eos_token_ids, version=version)

    def bind(self, caches: SequenceOf[LayerCache], block_size: int) -> None:
        kept, wanted = caches[0].k.dtype, self._model.cache_dtype
        if kept != wanted:
            raise InvalidParameter("draft_model", f"computes in {wanted} and the target in {kept}; load both alike")
        self._caches, self._block_size = caches, block_size
        if self._model.prepare(caches, block_size, (), drafting(PREPARED, FAST_CATCH_UP)):
            self._catch_up = max(self._catch_up, FAST_CATCH_UP)
        self._chain = self._model.pass_chain(caches, block_size)
        if self._chain is not None:
            self._chain_samples = self._model.device.type != "cuda" or warmup(self._graphs)

    def admit(self, sequence: Sequence, start: int, end: int) -> None:
        # Where only later blocks are valid, the ones before are filled although other sequences may share them: a
        # drafter that filled them before wrote the same values.
        self._states[sequence.key] = _State(end) if start == 0 else _State(0, (start, end))

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
        return TRAINED_LEVEL if len(sequence.tokens) < self._model.config.max_positions else 0

    def close(self) -> None:
        pass

    def unread_tokens(self, sequence: Sequence) -> int:
        """Tokens the draft model has to read before it drafts for the sequence: 1 or 2 while it drafts every step."""
        return len(self._missing(sequence))

    def propose(self, rows: SequenceOf[DraftRequest], after: UnreadVerdict | None = None) -> Draft:
        """Rows whose sampling needs only the logits are drafted without the host between tokens; the others with it."""
        self.time_is_typical = True
        if after is not None:
            return self._behind(rows, after)
        going = [index for index, row in enumerate(rows) if self._uses_chain(row.sequence)]
        if not going:
            return self._by_passes(rows)
        parts = [(going, self._by_chain([rows[i] for i in going]))]
        others = [i for i in range(len(rows)) if i not in going]
        if others:
            parts.append((others, _with_finite_q(self._by_passes([rows[i] for i in others]))))
        return Draft.merge(parts, len(rows), self._model.config.vocab_size)

    def _behind(self, rows: SequenceOf[DraftRequest], after: UnreadVerdict) -> Draft:
        """Drafts behind the tokens a step under way commits, for rows with a draft by this drafter in that step."""
        at = [index for index, row in enumerate(rows) if self._may_begin_behind(row)]
        going = [rows[index] for index in at]
        chain = self._chain_for([row.sequence for row in going])
        if chain is None or not at:
            return Draft.empty(len(rows))
        asked = [self._chain_row(row.sequence, unread_tokens=READ, count=row.max_nodes) for row in going]
        behind = replace(after, rows=[after.rows[index] for index in at])
        drafted = self._run_chain(chain, [row.sequence for row in going], asked, behind)
        draft = drafted.chains(list(range(len(going))), [row.max_nodes for row in going])
        return Draft.merge([(at, draft)], len(rows), self._model.config.vocab_size)

    def _may_begin_behind(self, row: DraftRequest) -> bool:
        """The drafter has K/V of all tokens before the step under way, and drafted for the row in it: then at most one
        of the tokens which that step commits has no K/V."""
        state = self._states.get(row.sequence.key)
        return (
            state is not None
            and state.tokens_on_device is not None
            and state.valid == len(row.sequence.tokens) >= READ
            and row.max_nodes > 0
            and self._uses_chain(row.sequence)
        )

    def use_early(self, rows: SequenceOf[DraftRequest]) -> None:
        """Drafts begun behind a step are used: the K/V of all their nodes but the last are computed."""
        for row in rows:
            self._drafted(row.sequence, row.max_nodes)

    def _by_chain(self, rows: SequenceOf[DraftRequest]) -> Draft:
        """Drafts behind committed tokens, by the chain where it takes this number of rows."""
        if any(not self._is_nearly_read(row.sequence) for row in rows):
            self._read(rows)
        counts = [self._num_nodes(row) if self._is_nearly_read(row.sequence) else 0 for row in rows]
        ready = [index for index, count in enumerate(counts) if count]
        going, counts = [rows[index] for index in ready], [counts[index] for index in ready]
        sequences = [row.sequence for row in going]
        chain = self._chain_for(sequences)
        if not ready or chain is None:
            return Draft.empty(len(rows)) if not ready else _with_finite_q(self._by_passes(rows))
        asked = [
            self._chain_row(row.sequence, self.unread_tokens(row.sequence), count)
            for row, count in zip(going, counts, strict=True)
        ]
        drafted = self._run_chain(chain, sequences, asked, None)
        for sequence, count in zip(sequences, counts, strict=True):
            self._drafted(sequence, count)
        draft = drafted.chains(list(range(len(going))), counts)
        return Draft.merge([(ready, draft)], len(rows), self._model.config.vocab_size)

    def _drafted(self, sequence: Sequence, count: int) -> None:
        """The host has not seen the chain's tokens; the K/V of all but the last are computed."""
        state = self._states[sequence.key]
        state.valid, state.drafted = len(sequence.tokens), []
        state.tokens_on_device = max(min(count - 1, self._slots_behind(sequence)), 0)

    def _run_chain(
        self, chain: PassChain, sequences: list[Sequence], rows: list[ChainRow], after: UnreadVerdict | None
    ) -> Drafted:
        try:
            if all(sequence.params.greedy for sequence in sequences):
                drafted = Drafted(chain.draft(rows, after))
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
        return ChainRow(
            sequence.tokens[-READ:], len(sequence.tokens) - READ, unread_tokens, count, self._blocks(sequence)
        )

    def _slots_behind(self, sequence: Sequence) -> int:
        """Slots behind its tokens."""
        return len(self._blocks(sequence)) * self._block_size - len(sequence.tokens)

    def _blocks(self, sequence: Sequence) -> list[int]:
        """The blocks within the draft model's context: the target's may be longer."""
        return sequence.blocks[: -(-self._model.config.max_positions // self._block_size)]

    def _is_nearly_read(self, sequence: Sequence) -> bool:
        """Whether the missing tokens are few and contiguous, so that a chain can read them itself."""
        missing = self._missing(sequence)
        return len(missing) <= READ <= len(sequence.tokens) and missing[-1] - missing[0] < len(missing)

    def _by_passes(self, rows: SequenceOf[DraftRequest]) -> Draft:
        """Token by token, each drawn under the request's own parameters."""
        chains, logits = self._read(rows)
        if not chains.rows:
            return Draft.empty(len(rows))
        metadata, draws = self._builder.build(self._builder.params(chains.sequences))
        tables, active = self._tables(chains.sequences), 0
        coins = [row for row, one in enumerate(chains.sequences) if not one.params.greedy and one.params.seed is None]
        for depth in range(chains.counts[0]):
            active = chains.active(depth)
            if depth:
                logits = self._extend(chains, active, depth, tables)
            chains.tokens[:active, depth], q = propose(logits, metadata, draws, chains.nodes(active, depth))
            if q is not None and (drawn := [row for row in coins if row < active]):
                chains.probs.append(q if len(drawn) == active else q[torch.tensor(drawn, device=q.device)])
                chains.drawn += [(row, depth) for row in drawn]
        return self._finish(chains, len(rows))

    def _read(self, rows: SequenceOf[DraftRequest]) -> tuple[_Chains, Tensor]:
        """Read missing tokens of all rows in one pass; rows that reach their last token draft from the logits."""
        counts = [self._num_nodes(row) for row in rows]
        missing = [self._missing(row.sequence) if count else [] for row, count in zip(rows, counts, strict=True)]
        now: dict[int, list[int]] = {}  # by row: the positions to read in this step
        left = self._catch_up
        for row in sorted(range(len(rows)), key=lambda row: len(missing[row])):  # short lags are read first
            now[row] = missing[row][:left]
            left -= len(now[row])
        ready = [row for row, count in enumerate(counts) if count and len(now[row]) == len(missing[row])]
        ready.sort(key=lambda row: -counts[row])
        reading = ready + [row for row, chunk in now.items() if 0 < len(chunk) < len(missing[row])]
        sequences = [rows[row].sequence for row in reading]
        chains = _Chains(ready, sequences[: len(ready)], [counts[row] for row in ready], self._model.device)
        if not reading:
            return chains, torch.empty(0)

        tokens: list[int] = []
        positions: list[int] = []
        owners: list[int] = []
        last: list[int] = []
        for owner, (row, sequence) in enumerate(zip(reading, sequences, strict=True)):
            tokens += [sequence.tokens[at] for at in now[row]]
            positions += now[row]
            owners += [owner] * len(now[row])
            last.append(len(tokens) - 1)
        logits = self._forward(
            self._ints(tokens),
            self._ints(positions),
            self._ints(owners),
            self._tables(sequences),
            self._ints(last[: len(ready)]),
            max_len=max(positions) + 1,
        )
        for row, sequence in zip(reading, sequences, strict=True):
            state, rest = self._states[sequence.key], missing[row][len(now[row]) :]
            state.valid, state.drafted, state.tokens_on_device = rest[0] if rest else len(sequence.tokens), [], None
        return chains, logits

    def _extend(self, chains: _Chains, active: int, depth: int, tables: Tensor) -> Tensor:
        """One pass over the tokens drawn last."""
        return self._forward(
            chains.tokens[:active, depth - 1],
            chains.ends[:active] + (depth - 1),
            chains.owners[:active],
            tables[:active],
            chains.owners[:active],
            max_len=max(chains.lengths[:active]) + depth,
        )

    def _finish(self, chains: _Chains, batch: int) -> Draft:
        drafted = [tokens[:count] for tokens, count in zip(chains.tokens.tolist(), chains.counts, strict=True)]
        kept = [self._cut_at_end(sequence, tokens) for sequence, tokens in zip(chains.sequences, drafted, strict=True)]
        tokens_of, num_nodes = _padded(chains.rows, kept, batch)
        if not chains.probs:
            return Draft.chains(tokens_of, num_nodes)
        row_of = [[-1] * (tokens_of.shape[1] + 1) for _ in range(batch)]
        for index, (row, depth) in enumerate(chains.drawn):
            if depth < len(kept[row]):
                row_of[chains.rows[row]][depth] = index
        probs = chains.probs[0] if len(chains.probs) == 1 else torch.cat(chains.probs)
        return Draft.chains(tokens_of, num_nodes, q=Proposal(probs=probs, row_of=self._ints(row_of)))

    def _cut_at_end(self, sequence: Sequence, tokens: list[int]) -> list[int]:
        """A token that ends the answer ends its chain: tokens behind it could never be committed."""
        self._states[sequence.key].drafted = tokens[:-1]  # the last one's K/V were never computed
        ends = {*sequence.params.stop_token_ids, *(() if sequence.params.ignore_eos else self._eos)}
        return tokens[: next((at + 1 for at, token in enumerate(tokens) if token in ends), len(tokens))]

    def _missing(self, sequence: Sequence) -> list[int]:
        """Positions to read before drafting. The last token is always among them: its logits start the draft."""
        state, length = self._states[sequence.key], len(sequence.tokens)
        first = min(state.valid, length - 1)
        start, end = state.shared
        if first >= start:
            return list(range(first, length))
        return [*range(first, start), *range(end, length)]  # a hit always leaves a token to compute: end < length

    def _num_nodes(self, row: DraftRequest) -> int:
        """The last node is drawn but never read, so it may lie one position past the draft model's own context."""
        return max(min(row.max_nodes, self._model.config.max_positions + 1 - len(row.sequence.tokens)), 0)

    def _forward(
        self, tokens: Tensor, positions: Tensor, owners: Tensor, tables: Tensor, logit_rows: Tensor, max_len: int
    ) -> Tensor:
        """(len(logit_rows), V). `owners` is each token's row of the block tables.

        All inputs are on the host, except tokens just drawn.
        """
        slots = slots_of(tables, owners, positions, self._block_size)
        plan = PassPlan.in_order(positions, slots, owners, tables, self._block_size, max_len)
        return self._model.forward(tokens, plan, self._caches, logit_rows).logits

    def _tables(self, sequences: SequenceOf[Sequence]) -> Tensor:
        return padded_tables([self._blocks(sequence) for sequence in sequences])

    def _ints(self, values: list[int] | list[list[int]]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64)


def _padded(rows: list[int], chains: list[list[int]], batch: int) -> tuple[Tensor, Tensor]:
    """(B, N) tokens and (B,) how many: chains of some rows of a batch."""
    tokens = np.zeros((batch, max(map(len, chains))), np.int64)
    counts = np.zeros(batch, np.int64)
    for row, chain in zip(rows, chains, strict=True):
        tokens[row, : len(chain)] = chain
        counts[row] = len(chain)
    return torch.from_numpy(tokens), torch.from_numpy(counts)


def _with_finite_q(draft: Draft) -> Draft:
    """The draft; raises where q is not finite. A draft that is merged with unseen ones is not checked later."""
    if draft.q is not None and not bool(torch.isfinite(draft.q.probs).all()):
        raise ValueError("q is not finite")
    return draft


def load_beside(name: str, path: Path, context: DrafterContext) -> LoadedModel:
    """A draft model in the precision of the target; one of another vocabulary is refused."""
    loaded = load_model(
        path,
        # auto has plain numbers in bf16 on a GPU, and leaves codes and blocks small.
        dtype="auto" if context.dtype == "bfloat16" else context.dtype,
        device=context.device.type,
        threads=torch.get_num_threads(),  # the target has set it; loading a second model must not change it
        kv_dtype=context.kv_dtype,
    )
    check_vocabulary(name, loaded, context)
    return loaded


def check_vocabulary(name: str, loaded: LoadedModel, context: DrafterContext) -> None:
    """Refuse a draft model whose token ids stand for other texts than the target's."""
    theirs, ours = loaded.config.vocab_size, context.config.vocab_size
    advice = "a draft model must share the target's vocabulary, as smaller models of its family do"
    if theirs != ours:
        raise InvalidParameter("draft_model", f"{name} has {theirs} tokens and the target {ours}; {advice}")
    if context.token_texts is None:
        return
    text, own = context.token_texts, loaded.tokenizer.token_text
    differs = next((token for token in range(ours) if text(token) != own(token)), None)
    if differs is not None:
        raise InvalidParameter(
            "draft_model",
            f"{name} has another vocabulary: token {differs} is {own(differs)!r} there "
            f"and {text(differs)!r} in the target; {advice}",
        )


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
