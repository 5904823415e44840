"""A draft model of another vocabulary: it reads the committed text in its own tokens (`retokenize`) and drafts tokens
that it shares with the target, by TLI (token-level intersection, 2502.05202): q is restricted to shared tokens and
renormalised, so the draft is a chain like any draft model's.

Greedy rows draft the likeliest shared token, rows with a seed the one that the seed's noise chooses, the others draw
from q. A chain ends behind a token where the product of the likeliest tokens' probabilities has become small, and
before one where hardly any probability is on shared tokens: its length depends on its own tokens alone, as block
verification needs it.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from paceline.config import TRAINED_LEVEL
from paceline.core.draft import Draft, Proposal
from paceline.core.sequence import Sequence
from paceline.drafters.base import DraftRequest, HostDrafter
from paceline.drafters.methods import DRAFT_MODEL
from paceline.drafters.model.chain_sampler import is_plain
from paceline.drafters.model.private_kv import BLOCK_SIZE, OwnKV, PrivateKV
from paceline.drafters.model.reencode import reencoded
from paceline.drafters.model.retokenize import GrowingText, Retokenizer
from paceline.drafters.model.vocabulary_map import VocabularyMap
from paceline.models.decoder import Model
from paceline.models.kv_cache import LayerCache, slots_of
from paceline.models.plan import PassPlan, padded_tables
from paceline.models.warmup import drafting
from paceline.verify import DrawKeys, Nodes, SamplingMetadata, propose
from paceline.verify.metadata import SamplingMetadataBuilder

PREPARED = 16  # sequences; largest batch for which passes are captured beforehand on a GPU
CATCH_UP = 512  # tokens read in one step before rows draft; a longer lag takes several steps
DEEPEST, PASSES = 6, 2  # tokens of the longest chain; passes of a draft, about, until one has been timed
CERTAIN = 0.3  # product of the likeliest tokens' probabilities below which a chain ends
REENCODE_BELOW, ENOUGH = 0.5, 64  # shared probability below which drafts are re-encoded; distributions to know it
LEAST_SHARED = 0.01  # probability of all shared tokens below which a chain ends


@dataclass(eq=False)
class _Text:
    """A sequence as the drafter sees it."""

    text: GrowingText
    kv: OwnKV = field(default_factory=OwnKV)


@dataclass(eq=False)
class _Chain:
    """A draft under construction. `row`: its index among the rows of `propose`; `seq`: among those that draft."""

    row: int
    seq: int
    of: _Text
    sequence: Sequence
    count: int  # most nodes
    tokens: list[int] = field(default_factory=list)  # the target's
    own: list[int] = field(default_factory=list)  # the drafter's
    certainty: float = 1.0
    alive: bool = True


class AnyVocabularyDrafter(HostDrafter):
    name = DRAFT_MODEL
    # A chain ends by itself, so a longer one costs no more where it is not drafted: as with trees, the policy learns
    # what a whole draft takes and which nodes there are.
    trees, depth = True, DEEPEST

    def __init__(
        self,
        model: Model,
        vocabulary: VocabularyMap,
        rules: Retokenizer,
        *,
        eos_token_ids: Iterable[int] = (),
        version: str = "1",
        kv: PrivateKV | None = None,
        certain: float = CERTAIN,
        reencode_below: float = REENCODE_BELOW,
    ) -> None:
        """`eos_token_ids` are the target's."""
        self.model, self.vocabulary, self.version = model, vocabulary, version
        self.pass_bytes = PASSES * model.pass_bytes
        self.rules, self._kv, self._certain = rules, kv or PrivateKV(model), certain
        self._reencode_below = reencode_below
        target_size = len(vocabulary.draft_of)
        self._builder = SamplingMetadataBuilder(target_size, frozenset(eos_token_ids), torch.device("cpu"))
        self._states: dict[str, _Text] = {}
        self._target_of, self._draft_of = vocabulary.target_of.numpy(), vocabulary.draft_of.tolist()
        self._unshared = vocabulary.unshared.numpy()
        self._is_shared = (self._unshared == 0).astype(np.float32)
        self._mass, self._num_masses = 0.0, 0  # probability of shared tokens, summed over distributions

    # -- bookkeeping

    def bind(self, caches: SequenceOf[LayerCache], block_size: int) -> None:
        self.model.prepare(self._kv.layers, BLOCK_SIZE, (), drafting(PREPARED, CATCH_UP))

    def admit(self, sequence: Sequence, start: int, end: int) -> None:
        self._states[sequence.key] = _Text(GrowingText(self.rules))

    def release(self, sequence: Sequence) -> None:
        state = self._states.pop(sequence.key, None)
        if state is not None:
            self._kv.free(state.kv)

    def level(self, sequence: Sequence) -> int:
        room = len(sequence.tokens) < min(self.model.config.max_positions, self._kv.most_tokens)
        return TRAINED_LEVEL if room else 0

    def unread_tokens(self, sequence: Sequence) -> int:
        """Return the tokens to read, about: committed ones are counted as the drafter's before they are followed."""
        state = self._states[sequence.key]
        new = len(sequence.tokens) - state.text.num_followed
        return max(len(state.text.ids) + new - len(state.kv.tokens), 1)

    # -- drafting

    @property
    def reencodes(self) -> bool:
        """Return whether few of its tokens are the target's, so that drafts are re-encoded as texts."""
        known = self.rules.encode_target is not None and self._num_masses >= ENOUGH
        return known and self.shared_mass is not None and self.shared_mass < self._reencode_below

    def propose(self, rows: SequenceOf[DraftRequest]) -> Draft:
        try:
            return self._propose(rows)
        except Exception:  # K/V of the pass that failed may be invalid
            for row in rows:
                self._kv.free(self._states[row.sequence.key].kv)
            raise

    def _propose(self, rows: SequenceOf[DraftRequest]) -> Draft:
        chains, logits = self._read(rows)
        if not chains:
            return Draft.empty(len(rows))
        if self.reencodes:
            return self._reencoded(chains, logits, len(rows))
        sampled = [chain.sequence for chain in chains if not _is_argmax(chain.sequence)]
        metadata_draws = self._builder.build(self._builder.params(sampled)) if sampled else None
        for seq, sequence in enumerate(sampled):
            next(chain for chain in chains if chain.sequence is sequence).seq = seq
        q = _DrawnFrom(self.vocabulary.ids, len(self._draft_of))
        depth, alive = 0, chains
        while alive:
            if depth:
                logits = self._extend(alive)
            self._draw(alive, logits, depth, metadata_draws, q)
            depth += 1
            alive = [chain for chain in alive if chain.alive and len(chain.tokens) < chain.count]
        return _draft(chains, len(rows), q)

    def _reencoded(self, chains: list[_Chain], logits: Tensor, batch: int) -> Draft:
        """Draft the drafter's likeliest tokens, whether they are shared or not, and re-encode their text."""
        encode, alive = self.rules.encode_target, chains
        assert encode is not None
        while alive:
            logits = self._extend(alive) if alive[0].own else logits
            for chain, row in zip(alive, logits.numpy(), strict=True):
                chain.own.append(self._likeliest(chain, row, shared=False))
            alive = [chain for chain in alive if self._goes_on(chain) and len(chain.own) <= chain.count]
        for chain in chains:
            drafted = b"".join(self.rules.draft_bytes[token] or b"" for token in chain.own)
            found = reencoded(chain.sequence.tokens, drafted, self.rules.target_bytes, encode)
            chain.tokens = found[: chain.count]
        return _draft(chains, batch, None)

    def _goes_on(self, chain: _Chain) -> bool:
        spelt = self.rules.draft_bytes
        return chain.certainty >= self._certain and chain.own[-1] < len(spelt) and spelt[chain.own[-1]] is not None

    def _follow(self, row: DraftRequest) -> _Text | None:
        """Bring a row's text up to date and drop K/V of tokens that changed; None where it ends inside a character."""
        state = self._states[row.sequence.key]
        text, kv = state.text, state.kv
        unchanged = text.follow(row.sequence.tokens)
        # Drafted tokens whose K/V are computed lie behind the ids that were followed before.
        while unchanged < min(len(kv.tokens), len(text.ids)) and kv.tokens[unchanged] == text.ids[unchanged]:
            unchanged += 1
        del kv.tokens[min(unchanged, max(len(text.ids) - 1, 0)) :]
        return state if text.is_whole and text.ids else None

    def _read(self, rows: SequenceOf[DraftRequest]) -> tuple[list[_Chain], Tensor]:
        """Read missing tokens of all rows in one pass; rows that reach their last token draft from the logits."""
        reading: list[tuple[int, _Text, int, int]] = []  # row, its text, tokens to read, nodes it may draft
        left, keep = CATCH_UP, list[OwnKV]()
        most = min(self.model.config.max_positions + 1, self._kv.most_tokens)
        followed = [(index, row, self._follow(row)) for index, row in enumerate(rows) if row.max_nodes]
        texts = [(index, row, of) for index, row, of in followed if of is not None]
        for index, row, of in sorted(texts, key=lambda one: len(one[2].text.ids) - len(one[2].kv.tokens)):
            count = min(row.max_nodes, DEEPEST, most - len(of.text.ids))
            now = min(len(of.text.ids) - len(of.kv.tokens), left)
            if count > 0 and now and self._kv.allocate(of.kv, len(of.text.ids) + count, keep):
                keep.append(of.kv)
                reading.append((index, of, now, count))
                left -= now
        if not reading:
            return [], torch.empty(0)
        starts = [len(of.kv.tokens) for _, of, _, _ in reading]
        for _, of, now, _ in reading:
            of.kv.tokens += of.text.ids[len(of.kv.tokens) :][:now]
        ready = [len(of.kv.tokens) == len(of.text.ids) for _, of, _, _ in reading]
        counts = [now for _, _, now, _ in reading]
        ends = np.cumsum(counts)[np.array(ready)] - 1
        logits = self._forward([of for _, of, _, _ in reading], starts, counts, ends)
        chains = [
            _Chain(index, 0, of, rows[index].sequence, count)
            for (index, of, _, count), whole in zip(reading, ready, strict=True)
            if whole
        ]
        return chains, logits

    def _extend(self, chains: list[_Chain]) -> Tensor:
        """Read the tokens drawn last."""
        starts = [len(chain.of.kv.tokens) for chain in chains]
        for chain in chains:
            chain.of.kv.tokens.append(chain.own[-1])
        return self._forward([chain.of for chain in chains], starts, [1] * len(chains), np.arange(len(chains)))

    def _forward(self, texts: list[_Text], starts: list[int], counts: list[int], logit_rows: np.ndarray) -> Tensor:
        """Compute the last `counts` tokens of each text, from these positions on; return logits on the host."""
        owners = torch.arange(len(texts)).repeat_interleave(torch.tensor(counts))
        tokens = [token for of, start in zip(texts, starts, strict=True) for token in of.kv.tokens[start:]]
        ranges = [range(start, start + count) for start, count in zip(starts, counts, strict=True)]
        positions = torch.tensor([at for one in ranges for at in one])
        tables = padded_tables([of.kv.blocks for of in texts])
        slots = slots_of(tables, owners, positions, BLOCK_SIZE)
        longest = max(start + count for start, count in zip(starts, counts, strict=True))
        plan = PassPlan.in_order(positions, slots, owners, tables, BLOCK_SIZE, longest)
        logits = self.model.forward(torch.tensor(tokens), plan, self._kv.layers, torch.from_numpy(logit_rows)).logits
        return logits.float().cpu()

    def _draw(
        self,
        chains: list[_Chain],
        logits: Tensor,
        depth: int,
        sampling: tuple[SamplingMetadata, DrawKeys] | None,
        q: _DrawnFrom,
    ) -> None:
        """Draw a token for each chain, and end chains behind it."""
        tops = [self._likeliest(chain, row) for chain, row in zip(chains, logits.numpy(), strict=True)]
        drawing = [index for index, chain in enumerate(chains) if chain.alive and not _is_argmax(chain.sequence)]
        if drawing:
            assert sampling is not None
            self._sample([chains[index] for index in drawing], logits[drawing], depth, *sampling, q)
        for chain, top in zip(chains, tops, strict=True):
            if not chain.alive:
                continue
            if _is_argmax(chain.sequence):
                chain.tokens.append(int(self._target_of[top]))
            last = chain.tokens[-1]
            chain.own.append(self._draft_of[last])
            ends = last in chain.sequence.ends or chain.own[-1] < 0
            chain.alive = chain.certainty >= self._certain and not ends

    def _likeliest(self, chain: _Chain, logits: np.ndarray, *, shared: bool = True) -> int:
        """Return the drafter's likeliest token, of shared ones or of all, and count its probability; a chain without a
        likely shared one ends here."""
        best = int((logits + self._unshared if shared else logits).argmax())
        shares = np.exp(logits - logits.max())
        total, mass = float(shares.sum()), float(shares @ self._is_shared)
        if not np.isfinite(total):
            raise ValueError("logits are not finite")
        self._mass, self._num_masses = self._mass + mass / total, self._num_masses + 1
        self.shared_mass = self._mass / self._num_masses
        chain.alive = mass >= LEAST_SHARED * total
        chain.certainty *= float(shares[best]) / total
        return best

    def _sample(
        self,
        chains: list[_Chain],
        logits: Tensor,
        depth: int,
        metadata: SamplingMetadata,
        draws: DrawKeys,
        q: _DrawnFrom,
    ) -> None:
        """Draw from q under the requests' parameters: over shared tokens alone for rows that draw by coins, since
        filters take long over a vocabulary; seeds and edits are of the target's tokens."""
        ids, shared = self.vocabulary.ids, self.vocabulary.shared(logits)
        by_coins = [is_plain(chain.sequence) and _by_coins(chain.sequence) for chain in chains]
        for some in (True, False):
            rows = [row for row, coins in enumerate(by_coins) if coins == some]
            if not rows:
                continue
            part, own = [chains[row] for row in rows], shared[rows]
            if not some:
                own = torch.full((len(rows), len(self._draft_of)), -torch.inf).index_copy_(1, ids, own)
            seq = torch.tensor([chain.seq for chain in part])
            depths = torch.full_like(seq, depth)
            path = torch.tensor([chain.tokens for chain in part]).view(len(part), depth)
            nodes = Nodes(seq=seq, node=depths - 1, depth=depths, path=path)
            coins = replace(draws, coins=any(_by_coins(chain.sequence) for chain in part))
            tokens, probs = propose(own, metadata.unedited if some else metadata, coins, nodes)
            for index, (chain, token) in enumerate(zip(part, tokens.tolist(), strict=True)):
                chain.tokens.append(int(ids[token]) if some else token)
                if probs is not None and _by_coins(chain.sequence):
                    q.add(chain.row, depth, probs[index])


class _DrawnFrom:
    """The distributions that tokens of a draft were drawn from, over these of the target's tokens or over all."""

    def __init__(self, ids: Tensor, vocab_size: int) -> None:
        self._ids, self._vocab_size = ids, vocab_size
        self._probs: list[Tensor] = []
        self._places: list[tuple[int, int]] = []

    def add(self, row: int, depth: int, probs: Tensor) -> None:
        self._probs.append(probs)
        self._places.append((row, depth))

    def proposal(self, batch: int, width: int) -> Proposal | None:
        if not self._probs:
            return None
        row_of = torch.full((batch, width + 1), -1)
        for index, place in enumerate(self._places):
            row_of[place] = index
        if all(len(probs) == len(self._ids) for probs in self._probs):
            return Proposal(probs=torch.stack(self._probs), row_of=row_of, ids=self._ids)
        return Proposal(probs=torch.stack([self._spread(probs) for probs in self._probs]), row_of=row_of)

    def _spread(self, probs: Tensor) -> Tensor:
        if len(probs) == self._vocab_size:
            return probs
        return probs.new_zeros(self._vocab_size).index_copy_(0, self._ids, probs)


def _by_coins(sequence: Sequence) -> bool:
    return sequence.sampled and sequence.seed is None


def _is_argmax(sequence: Sequence) -> bool:
    return sequence.params.greedy and is_plain(sequence)


def _draft(chains: list[_Chain], batch: int, q: _DrawnFrom | None) -> Draft:
    width = max(len(chain.tokens) for chain in chains)
    if not width:
        return Draft.empty(batch)
    tokens, num_nodes = np.zeros((batch, width), np.int64), np.zeros(batch, np.int64)
    for chain in chains:
        tokens[chain.row, : len(chain.tokens)] = chain.tokens
        num_nodes[chain.row] = len(chain.tokens)
    proposal = None if q is None else q.proposal(batch, width)
    return Draft.chains(torch.from_numpy(tokens), torch.from_numpy(num_nodes), q=proposal)
