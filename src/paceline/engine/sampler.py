"""Verification as the engine calls it: which row of logits is which node, and what each sequence asked for."""

from __future__ import annotations

import functools
from collections.abc import Sequence as SequenceOf

import torch
from torch import Tensor

from paceline.controls import ControlsBuilder
from paceline.draft import Draft, Verdict
from paceline.sequence import Sequence
from paceline.verify import Nodes, verify
from paceline.verify.greedy import walk_greedily


class Sampler:
    def __init__(self, vocab_size: int, eos_token_ids: frozenset[int], device: torch.device) -> None:
        self._device = device
        self.shortcut = True  # greedy steps on the host; not while `prove` puts a fault into the long way
        self._builder = ControlsBuilder(vocab_size, eos_token_ids, device)
        # Plain steps ask for the same few numbers of rows again and again.
        self._roots = functools.lru_cache(64)(lambda batch: (list(range(batch)), Nodes.roots(batch, device)))

    def verify(
        self,
        sequences: SequenceOf[Sequence],
        draft: Draft,
        logits: Tensor,
        row_of: Tensor,
        *,
        only_chains: bool = False,
    ) -> Verdict:
        """`row_of` (B, N + 1): which row of logits belongs to the last token (0) and to each node (i + 1)."""
        controls = self._builder.controls(sequences)
        deepest = int(draft.depth.max()) if draft.width else 0
        wanted = [sequence.params.logprobs for sequence in sequences]
        if controls.neutral and logits.is_cpu and self.shortcut and all(count is None for count in wanted):
            return walk_greedily(draft, logits, row_of, deepest)
        needs_path = controls.penalties is not None or controls.bad_words is not None
        owners, nodes = self._nodes(draft, row_of, deepest, needs_path)
        return verify(
            draft,
            logits,
            row_of,
            nodes,
            controls,
            self._builder.draws(sequences, owners),
            max_depth=deepest,
            num_logprobs=max((count for count in wanted if count is not None), default=None),
            only_chains=only_chains,
        )

    def _nodes(self, draft: Draft, row_of: Tensor, deepest: int, needs_path: bool) -> tuple[list[int], Nodes]:
        """Every row's sequence, on the host as well: rows lie in order of sequence and node."""
        if draft.width == 0:
            return self._roots(draft.batch)
        owner, slot = (row_of >= 0).nonzero(as_tuple=True)
        return owner.tolist(), Nodes.of(draft, owner, slot - 1, deepest, with_path=needs_path)
