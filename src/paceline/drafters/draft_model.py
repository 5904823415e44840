"""A smaller model of the same vocabulary drafts a chain, token by token, under the request's own sampling parameters.

The K/V of token t stand in slot t of the drafter's layers and depend on tokens 0..t only. So rolling back is lowering a
length: what was drafted and committed alike stays, the next pass writes over the rest. Nothing behind the committed
tokens is ever trusted, for the engine may have lent those blocks to others between two steps.

Greedy and seeded rows draft what the drafter itself would say (law 3: with the request's own Gumbel noise); other rows
sample from q, and q goes to verification (Leviathan et al. 2023, Chen et al. 2023). Where the model offers chains,
rows are drafted without the host, unless they look back at what was said (penalties and the like): tokens and q stay on
the device, and the next draft may begin behind a step that is still under way (`draft_ahead`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from paceline.controls import ControlsBuilder
from paceline.draft import Draft, Proposal
from paceline.drafters.base import LEARNED, Commit, DrafterContext, DraftRow, Times
from paceline.drafters.booths import Booths
from paceline.drafters.stopwatch import Stopwatch
from paceline.drafters.voices import Drafted, Voices, is_plain, rehearse
from paceline.errors import InvalidParameter
from paceline.models.chain import READ, ChainRow, GreedyChain, OffersGreedyChains, PicksTokens, Said
from paceline.models.decoder import Model
from paceline.models.hub import resolve
from paceline.models.kv_cache import KVSpec, LayerCache
from paceline.models.plan import PassPlan
from paceline.models.rehearse import drafting
from paceline.models.runtime import LoadedModel, load_model
from paceline.sequence import Sequence
from paceline.verify import Nodes, propose

PREPARED = 128  # sequences drafted for at once, whose passes are compiled and recorded beforehand
CATCH_UP = 512  # tokens the drafter reads in one step before it drafts; a longer lag takes several steps
FAST_CATCH_UP = 2048  # the same where passes are prepared, as on a GPU


@dataclass
class _State:
    """What of one sequence is in the drafter's layers."""

    valid: int = 0  # slots [0, valid) hold the K/V of the sequence's tokens
    shared: tuple[int, int] = (0, 0)  # slots further on that are whole too: a prefix hit on blocks the drafter has seen
    drafted: list[int] = field(default_factory=list)  # tokens whose K/V follow in slots valid, valid + 1, ...
    unseen: int | None = None  # the same where the host has not seen them: how many; None: it has


class _Chains:
    """Drafts in the making. The longest come first, so that whoever is still drafting is a prefix of the rows."""

    def __init__(self, rows: list[int], sequences: list[Sequence], counts: list[int], device: torch.device) -> None:
        self.rows, self.sequences = rows, sequences  # rows: which of those that asked
        self.counts = counts  # nodes of each, fixed before anything is drawn
        self.lengths = [len(sequence.tokens) for sequence in sequences]
        self.index = torch.arange(len(rows), device=device)
        self.owners = torch.arange(len(rows))  # the same on the host, where passes are planned
        self.ends = torch.tensor(self.lengths)  # (S,) position of the first node
        self.tokens = self.index.new_zeros(len(rows), max(counts, default=0))  # (S, K)
        self.probs: list[Tensor] = []  # q, a tensor for every depth at which somebody sampled
        self.drawn: list[tuple[int, int]] = []  # (row, depth) of each row of q

    def active(self, depth: int) -> int:
        return sum(count > depth for count in self.counts)

    def nodes(self, active: int, depth: int) -> Nodes:
        """The nodes at this depth: parents of what is drawn next. At depth 0 the last committed tokens."""
        seq = self.index[:active]
        depths = torch.full_like(seq, depth)
        return Nodes(seq=seq, node=depths - 1, depth=depths, path=self.tokens[:active, :depth])


@dataclass
class _Ahead:
    """Drafts begun behind a step under way, for the step after it."""

    rows: dict[str, tuple[int, int]]  # by sequence: its row, and how many of the tokens are its own
    drafted: Drafted
    watch: Stopwatch | None  # None: its time says nothing
    ripe: bool = False  # the step they follow has been committed


class DraftModelDrafter:
    name = "draft-model"
    taps: tuple[int, ...] = ()

    def __init__(
        self,
        model: Model,
        *,
        eos_token_ids: Iterable[int] | None = None,
        version: str | None = None,
        catch_up: int = CATCH_UP,
    ) -> None:
        """`eos_token_ids` are the target's: they end an answer, whatever the draft model thinks ends one."""
        config = model.config
        self.version = version or f"{self.name}/{_digest(repr(config))}"
        self.kv_layers: tuple[KVSpec, ...] = tuple(model.kv_specs)
        self._model, self._catch_up = model, catch_up
        self._eos = frozenset(config.eos_token_ids if eos_token_ids is None else eos_token_ids)
        self._builder = ControlsBuilder(config.vocab_size, self._eos, model.device)
        self._booths = Booths(config.vocab_size, model.device)
        self._states: dict[str, _State] = {}
        self._caches: SequenceOf[LayerCache] = ()
        self._block_size = 0
        self._chains: list[GreedyChain] = []
        self._picking: list[PicksTokens] = []  # those of them that serve rows that sample
        self._ahead: _Ahead | None = None
        self._times: Times | None = None  # of the last draft, where the device made it

    @classmethod
    def from_context(cls, context: DrafterContext) -> DraftModelDrafter:
        name = context.speculation.draft_model
        if name is None:
            raise InvalidParameter("draft_model", "method draft-model needs a model; give one with --draft-model")
        path = resolve(name)
        # The target has set the number of threads; loading a second model must not change it.
        loaded = load_model(path, dtype=context.dtype, device=context.device.type, threads=torch.get_num_threads())
        check_vocabulary(name, loaded, context)
        version = f"{cls.name}/{_digest(f'{path} {loaded.config} {loaded.dtype}')}"
        return cls(loaded.decoder, eos_token_ids=context.config.eos_token_ids, version=version)

    def bind(self, caches: SequenceOf[LayerCache], block_size: int) -> None:
        kept, wanted = caches[0].k.dtype, self._model.cache_dtype
        if kept != wanted:
            raise InvalidParameter("draft_model", f"computes in {wanted} and the target in {kept}; load both alike")
        self._caches, self._block_size = caches, block_size
        if self._model.prepare(caches, block_size, (), drafting(PREPARED, FAST_CATCH_UP)):
            self._catch_up = max(self._catch_up, FAST_CATCH_UP)
        if isinstance(self._model, OffersGreedyChains):
            self._chains = self._model.greedy_chains(caches, block_size)
            self._picking = [chain for chain in self._chains if isinstance(chain, PicksTokens)]
            if self._picking and self._model.device.type == "cuda" and not rehearse(self._booths):
                self._picking = []

    def admit(self, sequence: Sequence, start: int, end: int) -> None:
        # Where only later blocks are known, the ones before are filled although others may share them: whoever did so
        # before us wrote the same values.
        self._states[sequence.key] = _State(end) if start == 0 else _State(0, (start, end))

    def commit(self, commits: SequenceOf[Commit]) -> None:
        """Keep the K/V of what was drafted and committed alike. Everything else is read when a draft is next asked."""
        if self._ahead is not None:
            self._ahead = None if self._ahead.ripe else replace(self._ahead, ripe=True)
        for commit in commits:
            state = self._states[commit.sequence.key]
            if commit.method != self.name:  # what was drafted here was never judged: its step was interrupted
                state.unseen = None
                if self._ahead is not None:
                    self._ahead.rows.pop(commit.sequence.key, None)
            if state.unseen is not None:  # its own draft was judged, and is in the cache as far as it was accepted
                state.valid = max(min(commit.first + commit.count, state.valid + state.unseen), state.valid)
                state.unseen = None
            elif state.drafted:
                for drafted, committed in zip(state.drafted, commit.sequence.tokens[state.valid :], strict=False):
                    if drafted != committed:
                        break
                    state.valid += 1
                state.drafted = []

    def absorbed(self, sequence: Sequence) -> tuple[int, int]:
        return 0, self._states[sequence.key].valid

    def release(self, sequence: Sequence) -> None:
        self._states.pop(sequence.key, None)
        if self._ahead is not None:
            self._ahead.rows.pop(sequence.key, None)

    def evidence(self, sequence: Sequence) -> int:
        return LEARNED if len(sequence.tokens) < self._model.config.max_positions else 0

    def close(self) -> None:
        pass

    def lag(self, sequence: Sequence) -> int:
        """Tokens it has to read before it can draft for the sequence: 1 or 2 while it drafts every step."""
        return len(self._missing(sequence))

    def propose(self, rows: SequenceOf[DraftRow]) -> Draft:
        """Rows that only look at the logits need no host between their tokens; the others do."""
        ahead, self._ahead, self._times = self._ahead, None, None
        going = [index for index, row in enumerate(rows) if self._goes_by_chain(row.sequence)]
        if not going:
            return self._by_passes(rows)
        parts: list[tuple[list[int], Draft]] = []
        ready: list[int] = []
        if ahead is not None and ahead.ripe:
            ready = [i for i in going if self._follows(rows[i].sequence, ahead)]
            if ready:
                parts.append((ready, self._begun(ahead, [rows[i] for i in ready])))
        fresh = [i for i in going if i not in ready]
        if fresh:
            parts.append((fresh, self._by_chain([rows[i] for i in fresh])))
            if ready and self._times is not None:
                self._times = replace(self._times, watch=None)  # of two drafts one was timed
        others = [i for i in range(len(rows)) if i not in going]
        if others:
            parts.append((others, _finite(self._by_passes([rows[i] for i in others]))))
            self._times = None  # the host waited
        return Draft.merge(parts, len(rows), self._model.config.vocab_size)

    def draft_ahead(self, rows: SequenceOf[DraftRow], said: Said) -> None:
        """Begin drafts behind what a step under way says, for rows whose draft is judged in it."""
        rows_of = [at for at, row in enumerate(rows) if self._may_go_on(row)]
        going = [rows[at] for at in rows_of]
        chain = self._chain_for([row.sequence for row in going])
        if chain is None or not rows_of:
            return
        asked = [self._chain_row(row.sequence, lag=READ, count=row.budget) for row in going]
        behind = replace(said, rows=[said.rows[at] for at in rows_of])
        with Stopwatch(self._model.device) as watch:
            drafted = self._ask(chain, [row.sequence for row in going], asked, behind)
        where = {row.sequence.key: (at, row.budget) for at, row in enumerate(going)}
        self._ahead = _Ahead(where, drafted, watch if chain.warm else None)

    def _may_go_on(self, row: DraftRow) -> bool:
        """Its K/V are whole up to the step under way, and its draft is this drafter's, so at most one token is missing
        behind what that step says."""
        state = self._states.get(row.sequence.key)
        return (
            state is not None
            and state.unseen is not None
            and state.valid == len(row.sequence.tokens) >= READ
            and row.budget > 0
            and self._goes_by_chain(row.sequence)
        )

    def _follows(self, sequence: Sequence, ahead: _Ahead) -> bool:
        return sequence.key in ahead.rows and self._states[sequence.key].valid >= len(sequence.tokens) - READ

    def _begun(self, ahead: _Ahead, rows: SequenceOf[DraftRow]) -> Draft:
        """What was drafted ahead, as far as it is wanted."""
        self._times = Times(ahead.watch, ahead.drafted.tokens.shape[1], ahead=True)
        begun = [ahead.rows[row.sequence.key] for row in rows]
        counts = [
            max(min(self._num_nodes(row), count, self._room(row.sequence) + 1), 0)
            for row, (_, count) in zip(rows, begun, strict=True)
        ]
        return self._unseen(rows, ahead.drafted, [at for at, _ in begun], counts)

    def _by_chain(self, rows: SequenceOf[DraftRow]) -> Draft:
        """Drafted from the beginning, by whichever chain is the fastest for so many."""
        if any(not self._is_close(row.sequence) for row in rows):
            self._read(rows)
        counts = [self._num_nodes(row) if self._is_close(row.sequence) else 0 for row in rows]
        ready = [index for index, count in enumerate(counts) if count]
        going, counts = [rows[index] for index in ready], [counts[index] for index in ready]
        sequences = [row.sequence for row in going]
        chain = self._chain_for(sequences)
        if not ready or chain is None:
            return Draft.empty(len(rows)) if not ready else _finite(self._by_passes(rows))
        asked = [
            self._chain_row(row.sequence, self.lag(row.sequence), count)
            for row, count in zip(going, counts, strict=True)
        ]
        with Stopwatch(self._model.device) as watch:
            drafted = self._ask(chain, sequences, asked, None)
        self._times = Times(watch if chain.warm else None, drafted.tokens.shape[1])
        draft = self._unseen(going, drafted, list(range(len(going))), counts)
        return Draft.merge([(ready, draft)], len(rows), self._model.config.vocab_size)

    def _unseen(self, rows: SequenceOf[DraftRow], drafted: Drafted, at: list[int], counts: list[int]) -> Draft:
        """Chains whose tokens stay where they are; the K/V of all but the last are computed."""
        for row, count in zip(rows, counts, strict=True):
            state = self._states[row.sequence.key]
            state.valid, state.drafted = len(row.sequence.tokens), []
            state.unseen = max(min(count - 1, self._room(row.sequence)), 0)
        return drafted.chains(at, counts, source=2)

    def _ask(self, chain: GreedyChain, sequences: list[Sequence], rows: list[ChainRow], said: Said | None) -> Drafted:
        try:
            chain.check()
            if all(sequence.params.greedy for sequence in sequences):
                return Drafted(chain.draft(rows, said))
            assert isinstance(chain, PicksTokens)
            voices = Voices(self._booths, sequences, max(row.count for row in rows), said)
            return voices.drafted(chain.draft_by(voices, rows, said))
        except Exception:  # whatever it wrote is not to be trusted
            self._chains.remove(chain)
            self._picking = [other for other in self._picking if other is not chain]
            for state in self._states.values():
                state.valid, state.shared, state.unseen = 0, (0, 0), None
            raise

    def _chain_for(self, sequences: list[Sequence]) -> GreedyChain | None:
        greedy = all(sequence.params.greedy for sequence in sequences)
        chains: SequenceOf[GreedyChain] = self._chains if greedy else self._picking
        return next((chain for chain in chains if len(sequences) <= chain.most_rows), None)

    def _goes_by_chain(self, sequence: Sequence) -> bool:
        return bool(self._chains if sequence.params.greedy else self._picking) and is_plain(sequence)

    def _chain_row(self, sequence: Sequence, lag: int, count: int) -> ChainRow:
        return ChainRow(sequence.tokens[-READ:], len(sequence.tokens) - READ, lag, count, self._blocks(sequence))

    def _room(self, sequence: Sequence) -> int:
        """Slots behind its tokens."""
        return len(self._blocks(sequence)) * self._block_size - len(sequence.tokens)

    def _blocks(self, sequence: Sequence) -> list[int]:
        """As many as the draft model's context needs: the target's may be longer."""
        return sequence.blocks[: -(-self._model.config.max_positions // self._block_size)]

    def _is_close(self, sequence: Sequence) -> bool:
        """Whether so little is missing, and in one piece, that a chain reads it itself."""
        missing = self._missing(sequence)
        return len(missing) <= READ <= len(sequence.tokens) and missing[-1] - missing[0] < len(missing)

    def times(self) -> Times | None:
        return self._times

    def _by_passes(self, rows: SequenceOf[DraftRow]) -> Draft:
        """Token by token, each drawn under the request's own parameters."""
        chains, logits = self._read(rows)
        if not chains.rows:
            return Draft.empty(len(rows))
        controls, tables = self._builder.controls(chains.sequences), self._tables(chains.sequences)
        active = 0
        for depth in range(chains.counts[0]):
            if active != (active := chains.active(depth)):
                draws = self._builder.draws(chains.sequences, range(active))
            if depth:
                logits = self._extend(chains, active, depth, tables)
            chains.tokens[:active, depth], q = propose(logits, controls, draws, chains.nodes(active, depth))
            if q is not None and draws.coins is not None:
                chains.probs.append(q)
                chains.drawn += [(row, depth) for row in draws.coins.tolist()]
        return self._finish(chains, len(rows))

    def _read(self, rows: SequenceOf[DraftRow]) -> tuple[_Chains, Tensor]:
        """Bring the rows up to their last tokens in one pass; those that get there draft, by the logits returned."""
        counts = [self._num_nodes(row) for row in rows]
        missing = [self._missing(row.sequence) if count else [] for row, count in zip(rows, counts, strict=True)]
        now: dict[int, list[int]] = {}  # by row: the positions to read in this step
        left = self._catch_up
        for row in sorted(range(len(rows)), key=lambda row: len(missing[row])):  # nobody waits for a longer lag
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
            state.valid, state.drafted, state.unseen = rest[0] if rest else len(sequence.tokens), [], None
        return chains, logits

    def _extend(self, chains: _Chains, active: int, depth: int, tables: Tensor) -> Tensor:
        """One pass over the tokens drawn last, which stand behind the committed ones."""
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
        kept = [self._keep(sequence, tokens) for sequence, tokens in zip(chains.sequences, drafted, strict=True)]
        tokens_of, num_nodes = _padded(chains.rows, kept, batch)
        if not chains.probs:
            return Draft.chains(tokens_of, num_nodes, source=2)
        row_of = [[-1] * (tokens_of.shape[1] + 1) for _ in range(batch)]
        for index, (row, depth) in enumerate(chains.drawn):
            if depth < len(kept[row]):
                row_of[chains.rows[row]][depth] = index
        probs = chains.probs[0] if len(chains.probs) == 1 else torch.cat(chains.probs)
        return Draft.chains(tokens_of, num_nodes, source=2, q=Proposal(probs=probs, row_of=self._ints(row_of)))

    def _keep(self, sequence: Sequence, tokens: list[int]) -> list[int]:
        """A token that ends the answer ends its chain: what follows it cannot matter."""
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

    def _num_nodes(self, row: DraftRow) -> int:
        """The last node is drawn but never read, so it may lie one position past the draft model's own context."""
        return max(min(row.budget, self._model.config.max_positions + 1 - len(row.sequence.tokens)), 0)

    def _forward(
        self, tokens: Tensor, positions: Tensor, owners: Tensor, tables: Tensor, logit_rows: Tensor, max_len: int
    ) -> Tensor:
        """(len(logit_rows), V). `owners` says whose row of the block tables each token belongs to.

        All of it comes from the host but tokens drawn a moment ago.
        """
        blocks = tables[owners, positions // self._block_size]
        slots = blocks * self._block_size + positions % self._block_size
        plan = PassPlan.in_order(positions, slots, owners, tables, self._block_size, max_len)
        return self._model.forward(tokens, plan, self._caches, logit_rows).logits

    def _tables(self, sequences: SequenceOf[Sequence]) -> Tensor:
        blocks = [self._blocks(sequence) for sequence in sequences]
        width = max(map(len, blocks))
        return torch.tensor([one + [-1] * (width - len(one)) for one in blocks], dtype=torch.int32)

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


def _finite(draft: Draft) -> Draft:
    """Beside drafts the host has not seen nobody else will look."""
    if draft.q is not None and not bool(torch.isfinite(draft.q.probs).all()):
        raise ValueError("q is not finite")
    return draft


def check_vocabulary(name: str, loaded: LoadedModel, context: DrafterContext) -> None:
    """Refuse a draft model whose token ids mean something else than the target's."""
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
