"""Drafters made up for tests: they prove that the engine carries any draft, not that drafting is clever."""

from __future__ import annotations

import random
from dataclasses import replace

import torch
from hypothesis import strategies as st

from paceline.core.device_draft import DeviceDraft
from paceline.core.draft import Draft, Proposal
from paceline.drafters.base import HostDrafter
from paceline.drafters.hidden_states import CAPACITY
from paceline.drafters.tapped import TappedDrafter
from paceline.models.kv_cache import KVSpec
from paceline.testing import HIDDEN, context_hidden, context_logits


def requests_strategy(*more, longest=30, max_size=7):
    """Requests that arrive, share beginnings and may be cancelled; `more`: what else is drawn for each."""
    request = st.tuples(
        st.integers(0, 12),  # arrival
        st.integers(0, 2),  # which shared beginning
        st.integers(1, longest),  # prompt length
        st.integers(1, 25),  # max_tokens
        st.sampled_from([None, 5, 9]),  # seed; None is greedy
        st.integers(0, 60),  # cancelled at this step, if under 20
        *more,
    )
    return st.lists(request, min_size=1, max_size=max_size)


class FakeDrafter(HostDrafter):
    def __init__(self, name: str, vocab_size: int = 11) -> None:
        self.name, self.vocab_size = name, vocab_size


class ChainDrafter(FakeDrafter):
    """Mostly right: the greedy continuation of `HashModel`, with a wrong token now and then."""

    def propose(self, rows):
        chains = []
        for row in rows:
            context = list(row.sequence.tokens)
            noise = random.Random(len(context) * 7919 + context[-1])
            for _ in range(noise.randint(0, row.max_nodes)):
                logits = context_logits(context, self.vocab_size)
                best = max(range(self.vocab_size), key=logits.__getitem__)
                context.append(best if noise.random() < 0.7 else noise.randrange(self.vocab_size))
            chains.append(context[len(row.sequence.tokens) :])
        width = max(map(len, chains))
        tokens = torch.tensor([chain + [0] * (width - len(chain)) for chain in chains], dtype=torch.int64)
        tokens = tokens.view(len(rows), width)
        return Draft.chains(tokens, torch.tensor([len(chain) for chain in chains]))


class TreeDrafter(FakeDrafter):
    """A random tree; siblings are different tokens, drawn from a distribution that leans towards the target."""

    def shape(self, noise, count):
        return [noise.randrange(-1, node) for node in range(count)]

    def propose(self, rows):
        draft, _ = self.drawn(rows)
        return draft

    def drawn(self, rows):
        """The trees, and the distribution that each slot's children were drawn from."""
        width = max(row.max_nodes for row in rows)
        draft, by_slot = Draft.empty(len(rows), width=width), {}
        for b, row in enumerate(rows):
            noise = random.Random(len(row.sequence.tokens) * 104729 + row.sequence.tokens[-1])
            contexts = {-1: list(row.sequence.tokens)}
            for node, parent in enumerate(self.shape(noise, row.max_nodes)):
                q = by_slot.setdefault((b, parent + 1), self.q(contexts[parent]))
                siblings = draft.tokens[b, :node][draft.parents[b, :node] == parent].tolist()
                left = [token for token in range(self.vocab_size) if token not in siblings]
                token = noise.choices(left, [float(q[token]) for token in left])[0]
                contexts[node] = [*contexts[parent], token]
                draft.tokens[b, node], draft.parents[b, node] = token, parent
                draft.depth[b, node] = 1 if parent < 0 else draft.depth[b, parent] + 1
                draft.num_nodes[b] = node + 1
        return draft, by_slot

    def q(self, context):
        target = torch.tensor(context_logits(context, self.vocab_size))
        noise = torch.tensor(context_logits(context, self.vocab_size, salt="q"))
        return torch.softmax(0.8 * target + 0.5 * noise, dim=0)


class DrawnTreeDrafter(TreeDrafter):
    """A tree that carries q, which no draft may."""

    def propose(self, rows):
        draft, by_slot = self.drawn(rows)
        row_of = torch.full((len(rows), draft.width + 1), -1)
        for at, slot in enumerate(by_slot):
            row_of[slot] = at
        return replace(draft, q=Proposal(probs=torch.stack(list(by_slot.values())), row_of=row_of))


class DrawnChainDrafter(DrawnTreeDrafter):
    """A chain drawn from a q that leans towards the target."""

    def shape(self, noise, count):
        return range(-1, count - 1)


class RaisingDrafter(FakeDrafter):
    def propose(self, rows):
        raise RuntimeError("out of ideas")


class NaNDrafter(DrawnChainDrafter):
    def propose(self, rows):
        draft = super().propose(rows)
        draft.q.probs[0, 0] = float("nan")
        return draft


class TooManyNodesDrafter(ChainDrafter):
    """Ignores `max_nodes`."""

    def propose(self, rows):
        width = max(row.max_nodes for row in rows) + 3
        return Draft.chains(torch.zeros(len(rows), width, dtype=torch.int64), torch.full((len(rows),), width))


class NarrowDrafter(FakeDrafter):
    """Even chains of int32 tokens, two of which look like one int64."""

    def propose(self, rows):
        return Draft.chains(torch.zeros(len(rows), 2, dtype=torch.int32))


class TapDrafter(TappedDrafter):
    """Writes (tap of t, token t + 1) into slot t + 1, checks all it ever wrote whenever it is asked, and drafts trees
    whose tokens and shape only the device knows."""

    name, version = "tapped", "tapped/1"
    taps = (2, 0)
    kv_layers = (KVSpec(num_kv_heads=2, head_dim=HIDDEN),)

    def __init__(self, capacity=CAPACITY, vocab_size=11, malformed=False):
        super().__init__()
        self.capacity, self.vocab_size, self.malformed = capacity, vocab_size, malformed
        self.checked_slots = self.late_starts = self.prefix_slots = self.begun = 0

    def bind(self, caches, block_size):
        super().bind(caches, block_size)
        (self.cache,) = caches

    def bind_taps(self, ring, columns):
        ring.capacity = self.capacity
        super().bind_taps(ring, columns)

    def admit(self, sequence, start, end):
        super().admit(sequence, start, end)
        self.prefix_slots += end - start

    def write_context_kv(self, batch):
        for tap, token, position, slot in zip(*(part.tolist() for part in batch[:4]), strict=True):
            if slot >= 0:
                self.cache.k[slot] = torch.tensor(tap, dtype=self.cache.k.dtype)
                self.cache.v[slot] = token
            assert position >= 0

    def check(self, sequence, end):
        start, _ = self.kv_range(sequence)
        self.late_starts += start > 0
        size = self.block_size
        for position in range(max(start, 1), end):
            at = sequence.blocks[position // size] * size + position % size
            expected = [context_hidden(sequence.tokens[:position], tap) for tap in self.taps]
            assert torch.allclose(self.cache.k[at], torch.tensor(expected, dtype=self.cache.k.dtype)), position
            assert self.cache.v[at].unique().tolist() == [sequence.tokens[position]]
            self.checked_slots += 1

    def draft(self, rows, req_indices, lengths):
        """Nodes with random parents; at the root mostly the token `HashModel` picks, where the host knows the text."""
        width = max(row.max_nodes for row in rows)
        tokens, parents = (torch.zeros(len(rows), width, dtype=torch.int64) for _ in range(2))
        for at, (row, length) in enumerate(zip(rows, lengths.tolist(), strict=True)):
            sequence = row.sequence
            self.begun += length > len(sequence.tokens)
            self.check(sequence, len(sequence.tokens))
            noise = random.Random(length)
            best = context_logits(sequence.tokens, self.vocab_size)
            for node in range(row.max_nodes):
                parents[at, node] = noise.randrange(-1, node)
                tokens[at, node] = (
                    max(range(self.vocab_size), key=best.__getitem__) if node == 0 else noise.randrange(11)
                )
                if self.malformed and noise.random() < 0.5:
                    parents[at, node], tokens[at, node] = noise.randrange(-9, 9), noise.randrange(-99, 99)
        return DeviceDraft.trees(tokens, parents, torch.tensor([row.max_nodes for row in rows]), depth_bound=width)
