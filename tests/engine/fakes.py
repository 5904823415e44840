"""Drafters made up for tests: they prove that the engine carries any draft, not that drafting is clever."""

from __future__ import annotations

import random

import torch

from paceline.draft import Draft, Proposal
from paceline.drafters.base import HostDrafter
from paceline.drafters.tapped import TappedDrafter
from paceline.models.kv_cache import KVSpec
from paceline.testing import HIDDEN, context_hidden, context_logits


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
            for _ in range(noise.randint(0, row.budget)):
                logits = context_logits(context, self.vocab_size)
                best = max(range(self.vocab_size), key=logits.__getitem__)
                context.append(best if noise.random() < 0.7 else noise.randrange(self.vocab_size))
            chains.append(context[len(row.sequence.tokens) :])
        width = max(map(len, chains))
        tokens = torch.tensor([chain + [0] * (width - len(chain)) for chain in chains], dtype=torch.int64)
        tokens = tokens.view(len(rows), width)
        return Draft.chains(tokens, torch.tensor([len(chain) for chain in chains]))


class TreeDrafter(FakeDrafter):
    """A random tree; children are drawn without replacement from a q that leans towards the target."""

    def propose(self, rows):
        width = max(row.budget for row in rows)
        draft = Draft.empty(len(rows), width=width)
        row_of = torch.full((len(rows), width + 1), -1)
        probs: list[torch.Tensor] = []
        for b, row in enumerate(rows):
            noise = random.Random(len(row.sequence.tokens) * 104729 + row.sequence.tokens[-1])
            parents = [noise.randrange(-1, node) for node in range(row.budget)]  # the shape comes first
            contexts = {-1: list(row.sequence.tokens)}
            taken: dict[int, set[int]] = {}
            for node, parent in enumerate(parents):
                if row_of[b, parent + 1] < 0:
                    row_of[b, parent + 1] = len(probs)
                    probs.append(self.q(contexts[parent]))
                q = probs[int(row_of[b, parent + 1])].tolist()
                left = [t for t in range(self.vocab_size) if t not in taken.setdefault(parent, set())]
                if not left:  # more children than tokens: end the draft here, before anything is drawn
                    break
                token = noise.choices(left, [q[t] for t in left])[0]
                taken[parent].add(token)
                contexts[node] = [*contexts[parent], token]
                draft.tokens[b, node], draft.parents[b, node] = token, parent
                draft.depth[b, node] = 1 if parent < 0 else draft.depth[b, parent] + 1
                draft.num_nodes[b] = node + 1
        q = Proposal(probs=torch.stack(probs), row_of=row_of)
        return Draft(**{**vars(draft), "q": q})

    def q(self, context):
        target = torch.tensor(context_logits(context, self.vocab_size))
        noise = torch.tensor(context_logits(context, self.vocab_size, salt="q"))
        return torch.softmax(0.8 * target + 0.5 * noise, dim=0)


class RaisingDrafter(FakeDrafter):
    def propose(self, rows):
        raise RuntimeError("out of ideas")


class NaNDrafter(TreeDrafter):
    def q(self, context):
        return super().q(context) * float("nan") if len(context) % 2 else super().q(context)

    def propose(self, rows):
        draft = super().propose(rows)
        draft.q.probs[0, 0] = float("nan")
        return draft


class GreedyBudgetDrafter(ChainDrafter):
    """Ignores its budget."""

    def propose(self, rows):
        width = max(row.budget for row in rows) + 3
        return Draft.chains(torch.zeros(len(rows), width, dtype=torch.int64), torch.full((len(rows),), width))


class NarrowDrafter(FakeDrafter):
    """Even chains of int32 tokens, two of which look like one int64."""

    def propose(self, rows):
        return Draft.chains(torch.zeros(len(rows), 2, dtype=torch.int32))


class TapDrafter(TappedDrafter):
    """Writes (tap of t, token t + 1) into slot t + 1 and checks all it ever wrote whenever it is asked."""

    name, version = "tapped", "tapped/1"
    taps = (2, 0)
    kv_layers = (KVSpec(num_kv_heads=2, head_dim=HIDDEN),)

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.checked_slots = 0
        self.late_starts = 0
        self.prefix_slots = 0

    def bind(self, caches, block_size):
        (self.cache,), self.block_size = caches, block_size

    def admit(self, sequence, start, end):
        super().admit(sequence, start, end)
        self.prefix_slots += end - start

    def slot(self, sequence, position):
        return sequence.blocks[position // self.block_size] * self.block_size + position % self.block_size

    def absorb(self, sequence, first, taps):
        for offset in range(len(taps)):
            at = self.slot(sequence, first + offset + 1)
            self.cache.k[at] = taps[offset].to(self.cache.k.dtype)
            self.cache.v[at] = sequence.tokens[first + offset + 1]

    def check(self, sequence):
        start, end = self.absorbed(sequence)
        self.late_starts += start > 0
        for position in range(max(start, 1), end):
            at = self.slot(sequence, position)
            expected = [context_hidden(sequence.tokens[:position], tap) for tap in self.taps]
            assert torch.allclose(self.cache.k[at], torch.tensor(expected, dtype=self.cache.k.dtype)), position
            assert self.cache.v[at].unique().tolist() == [sequence.tokens[position]]
            self.checked_slots += 1
        return end

    def propose(self, rows):
        for row in rows:
            self.catch_up(row.sequence)
            assert self.check(row.sequence) == len(row.sequence.tokens)
        tokens = torch.tensor([[row.sequence.tokens[-1] % 11] for row in rows])
        return Draft.chains(tokens, torch.ones(len(rows), dtype=torch.int64))
