"""Chains of a draft model by passes with the host between them, each token drawn under its request's own parameters."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from paceline.core.draft import Draft, Proposal
from paceline.core.sequence import Sequence
from paceline.drafters.base import DraftRequest
from paceline.models.decoder import Model
from paceline.models.kv_cache import LayerCache, slots_of
from paceline.models.plan import PassPlan, padded_tables
from paceline.verify import Nodes, propose
from paceline.verify.metadata import SamplingMetadataBuilder


@dataclass
class ModelKV:
    """The K/V of one sequence in the draft model's layers."""

    valid: int = 0  # slots [0, valid) hold the K/V of the sequence's tokens
    shared: tuple[int, int] = (0, 0)  # later slots that are valid too: a prefix hit on blocks the drafter filled
    drafted: list[int] = field(default_factory=list)  # tokens whose K/V follow in slots valid, valid + 1, ...
    tokens_on_device: int | None = None  # number of drafted tokens that were not copied to the host; None: all were

    def missing(self, length: int) -> list[int]:
        """Return the positions to read before drafting; the last token is one of them: its logits start the draft."""
        first = min(self.valid, length - 1)
        start, end = self.shared
        if first >= start:
            return list(range(first, length))
        return [*range(first, start), *range(end, length)]  # a hit always leaves a token to compute: end < length


class DraftChains:
    """Drafts under construction, longest first, so that the rows still drafting are a prefix."""

    def __init__(self, rows: list[int], sequences: list[Sequence], counts: list[int], device: torch.device) -> None:
        self.rows, self.sequences = rows, sequences  # rows: indices into the rows of `propose`
        self.counts = counts  # nodes of each row, fixed before any token is drawn
        self.lengths = [len(sequence.tokens) for sequence in sequences]
        self.index = torch.arange(len(rows), device=device)
        self.owners = torch.arange(len(rows))  # `index` on the host, where passes are planned
        self.ends = torch.tensor(self.lengths)  # (S,) position of the first node
        self.tokens = self.index.new_zeros(len(rows), max(counts, default=0))  # (S, K)
        self.probs: list[Tensor] = []  # q, a tensor for every depth at which a row sampled
        self.drawn: list[tuple[int, int]] = []  # (row, depth) of each row of q

    def active(self, depth: int) -> int:
        return sum(count > depth for count in self.counts)

    def nodes(self, active: int, depth: int) -> Nodes:
        """Return the parents of the tokens drawn next; at depth 0 the last committed tokens."""
        seq = self.index[:active]
        depths = torch.full_like(seq, depth)
        return Nodes(seq=seq, node=depths - 1, depth=depths, path=self.tokens[:active, :depth])


class ByPasses:
    def __init__(self, model: Model, states: Mapping[str, ModelKV], eos_token_ids: frozenset[int]) -> None:
        self._model, self._states, self._eos = model, states, eos_token_ids
        self._builder = SamplingMetadataBuilder(model.config.vocab_size, eos_token_ids, model.device)
        self._caches: SequenceOf[LayerCache] = ()
        self._block_size = 0
        self._read_limit = 0

    def bind(self, caches: SequenceOf[LayerCache], block_size: int, read_limit: int) -> None:
        """`read_limit`: tokens that one pass reads before rows are drafted; a longer lag takes several steps."""
        self._caches, self._block_size, self._read_limit = caches, block_size, read_limit

    def draft(self, rows: SequenceOf[DraftRequest]) -> Draft:
        chains, logits = self.read(rows)
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

    def read(self, rows: SequenceOf[DraftRequest]) -> tuple[DraftChains, Tensor]:
        """Read missing tokens of all rows in one pass; rows that reach their last token draft from the logits."""
        counts = [self.num_nodes(row) for row in rows]
        missing = [self.missing(row.sequence) if count else [] for row, count in zip(rows, counts, strict=True)]
        now: dict[int, list[int]] = {}  # row -> positions to read in this step
        left = self._read_limit
        for row in sorted(range(len(rows)), key=lambda row: len(missing[row])):  # short lags are read first
            now[row] = missing[row][:left]
            left -= len(now[row])
        ready = [row for row, count in enumerate(counts) if count and len(now[row]) == len(missing[row])]
        ready.sort(key=lambda row: -counts[row])
        reading = ready + [row for row, chunk in now.items() if 0 < len(chunk) < len(missing[row])]
        sequences = [rows[row].sequence for row in reading]
        chains = DraftChains(ready, sequences[: len(ready)], [counts[row] for row in ready], self._model.device)
        if not reading:
            return chains, torch.empty(0)
        positions = [at for row in reading for at in now[row]]
        tokens = [one.tokens[at] for row, one in zip(reading, sequences, strict=True) for at in now[row]]
        owners = [owner for owner, row in enumerate(reading) for _ in now[row]]
        ends = np.cumsum([len(now[row]) for row in reading])[: len(ready)]
        last = torch.from_numpy(ends - 1)
        numbers = torch.tensor(tokens), torch.tensor(positions), torch.tensor(owners)
        logits = self._forward(*numbers, self._tables(sequences), last, max_len=max(positions) + 1)
        for row, sequence in zip(reading, sequences, strict=True):
            state, rest = self._states[sequence.key], missing[row][len(now[row]) :]
            state.valid, state.drafted, state.tokens_on_device = rest[0] if rest else len(sequence.tokens), [], None
        return chains, logits

    def missing(self, sequence: Sequence) -> list[int]:
        return self._states[sequence.key].missing(len(sequence.tokens))

    def num_nodes(self, row: DraftRequest) -> int:
        """Return the nodes of a row's chain. The last node is drawn but never read, so it may lie one position past the
        draft model's own context."""
        return max(min(row.max_nodes, self._model.config.max_positions + 1 - len(row.sequence.tokens)), 0)

    def blocks(self, sequence: Sequence) -> list[int]:
        """Return the blocks within the draft model's context: the target's may be longer."""
        return sequence.blocks[: -(-self._model.config.max_positions // self._block_size)]

    def _extend(self, chains: DraftChains, active: int, depth: int, tables: Tensor) -> Tensor:
        """Run one pass over the tokens drawn last."""
        return self._forward(
            chains.tokens[:active, depth - 1],
            chains.ends[:active] + (depth - 1),
            chains.owners[:active],
            tables[:active],
            chains.owners[:active],
            max_len=max(chains.lengths[:active]) + depth,
        )

    def _finish(self, chains: DraftChains, batch: int) -> Draft:
        drafted = [tokens[:count] for tokens, count in zip(chains.tokens.tolist(), chains.counts, strict=True)]
        cut = [self._cut_at_end(sequence, tokens) for sequence, tokens in zip(chains.sequences, drafted, strict=True)]
        tokens = np.zeros((batch, max(map(len, cut))), np.int64)
        num_nodes = np.zeros(batch, np.int64)
        for row, chain in zip(chains.rows, cut, strict=True):
            tokens[row, : len(chain)] = chain
            num_nodes[row] = len(chain)
        if not chains.probs:
            return Draft.chains(torch.from_numpy(tokens), torch.from_numpy(num_nodes))
        row_of = np.full((batch, tokens.shape[1] + 1), -1)
        for index, (row, depth) in enumerate(chains.drawn):
            if depth < len(cut[row]):
                row_of[chains.rows[row], depth] = index
        probs = chains.probs[0] if len(chains.probs) == 1 else torch.cat(chains.probs)
        q = Proposal(probs=probs, row_of=torch.from_numpy(row_of))
        return Draft.chains(torch.from_numpy(tokens), torch.from_numpy(num_nodes), q=q)

    def _cut_at_end(self, sequence: Sequence, tokens: list[int]) -> list[int]:
        """Cut a chain behind a token that ends the answer: later tokens could never be committed."""
        self._states[sequence.key].drafted = tokens[:-1]  # the last one's K/V were never computed
        ends = {*sequence.params.stop_token_ids, *(() if sequence.params.ignore_eos else self._eos)}
        return tokens[: next((at + 1 for at, token in enumerate(tokens) if token in ends), len(tokens))]

    def _forward(
        self, tokens: Tensor, positions: Tensor, owners: Tensor, tables: Tensor, logit_rows: Tensor, max_len: int
    ) -> Tensor:
        """Return logits (len(logit_rows), V); `owners` is each token's row of the block tables.

        All inputs are on the host, except tokens just drawn.
        """
        slots = slots_of(tables, owners, positions, self._block_size)
        plan = PassPlan.in_order(positions, slots, owners, tables, self._block_size, max_len)
        return self._model.forward(tokens, plan, self._caches, logit_rows).logits

    def _tables(self, sequences: SequenceOf[Sequence]) -> Tensor:
        return padded_tables([self.blocks(sequence) for sequence in sequences])
