"""Verification as the engine calls it: which row of logits is which node, and what each sequence asked for."""

from __future__ import annotations

import functools
from collections.abc import Sequence as SequenceOf

import torch
from torch import Tensor

from paceline.controls import ControlsBuilder
from paceline.draft import Draft, Verdict, packed_to
from paceline.sequence import Sequence
from paceline.verify import Nodes, verify
from paceline.verify.greedy import walk_greedily


class Sampler:
    def __init__(self, vocab_size: int, eos_token_ids: frozenset[int], device: torch.device) -> None:
        self._device = device
        self.shortcut = True  # greedy steps on the host; not while `prove` puts a fault into the long way
        self._builder = ControlsBuilder(vocab_size, eos_token_ids, device)
        self._roots = functools.lru_cache(64)(lambda batch: (torch.arange(batch), torch.zeros(batch).long()))
        self._empty = functools.lru_cache(64)(self._plain)

    def verify(
        self,
        sequences: SequenceOf[Sequence],
        draft: Draft,
        logits: Tensor,
        row_of: Tensor,
        *,
        only_chains: bool = False,
    ) -> Verdict:
        """`row_of` (B, N + 1): which row of logits belongs to the last token (0) and to each node (i + 1).

        Draft and `row_of` come from the host, where what depends on them alone is found without waiting for a device.
        """
        controls = self._builder.controls(sequences)
        deepest = int(draft.depth.max()) if draft.width else 0
        wanted = [sequence.params.logprobs for sequence in sequences]
        if controls.neutral and logits.is_cpu and self.shortcut and all(count is None for count in wanted):
            return walk_greedily(draft, logits, row_of, deepest)
        needs_path = controls.penalties is not None or controls.bad_words is not None
        owners, slots = self._owners(draft, row_of)
        draft, row_of, nodes = self._on_device(draft, row_of, owners, slots, deepest, needs_path)
        return verify(
            draft,
            logits,
            row_of,
            nodes,
            controls,
            self._builder.draws(sequences, owners.tolist()),
            max_depth=deepest,
            num_logprobs=max((count for count in wanted if count is not None), default=None),
            only_chains=only_chains,
        )

    def _owners(self, draft: Draft, row_of: Tensor) -> tuple[Tensor, Tensor]:
        """(sequence, slot) of every row of logits: rows lie in order of sequence and slot."""
        if draft.width == 0:
            return self._roots(draft.batch)
        owner, slot = (row_of >= 0).nonzero(as_tuple=True)
        return owner, slot

    def _on_device(
        self, draft: Draft, row_of: Tensor, owners: Tensor, slots: Tensor, deepest: int, needs_path: bool
    ) -> tuple[Draft, Tensor, Nodes]:
        if draft.width == 0:
            return self._empty(draft.batch)
        draft = draft.to(self._device)
        if self._device.type != "cpu":
            row_of, owners, slots = packed_to(self._device, row_of, owners, slots)
        return draft, row_of, Nodes.of(draft, owners, slots - 1, deepest, with_path=needs_path)

    def _plain(self, batch: int) -> tuple[Draft, Tensor, Nodes]:
        """Plain steps ask for the same few numbers of rows again and again."""
        row_of = torch.arange(batch, device=self._device)[:, None]
        return Draft.empty(batch, self._device), row_of, Nodes.roots(batch, self._device)
