"""Sampling of a chain's tokens on the device, pass by pass, and the drafts made of them.

Coins and noise are keyed by the length a row has when its draft begins. Behind a verdict that is not read yet only the
device knows this length: the tokens before that step, those it accepts, and one more. Sampling takes dozens of small
kernels, so for few rows it is captured as a CUDA graph with inputs at fixed addresses; for more rows the kernels take
longer than their launches.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as SequenceOf
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from paceline.core.device_draft import DeviceDraft
from paceline.core.draft import Draft, Proposal, packed_to
from paceline.core.sequence import Sequence
from paceline.core.verdict import UnreadVerdict
from paceline.platform.cuda_graph import CudaGraph, GraphRecorder, warn_uncaptured
from paceline.sampling_params import SamplingParams
from paceline.verify import DrawKeys, FilterSet, Nodes, SamplingMetadata, SamplingMode, propose
from paceline.verify.metadata import KIND, SamplingMetadataBuilder

log = logging.getLogger("paceline")
MOST_ROWS = 16  # rows of a graph
WARMUP_PARAMS: tuple[dict[str, float], ...] = ({}, {"top_p": 0.9}, {"top_k": 20})


@dataclass(frozen=True)
class SampledChains:
    """Chains whose tokens are on the device, all of the deepest row's length."""

    tokens: Tensor  # (R, K)
    q: Tensor | None = None  # (K * R, V), depth by depth, where some rows draw by coins
    coins: tuple[int, ...] = ()  # indices of the rows that draw by coins

    def chains(self, counts: list[int]) -> Draft:
        """Return drafts, each cut to its row's length, which must not depend on the tokens drawn."""
        width, q = max(counts), None
        if self.q is not None:
            row_of = torch.full((len(counts), width + 1), -1)
            for row in self.coins:
                row_of[row, : counts[row]] = torch.arange(counts[row]) * len(counts) + row
            q = Proposal(probs=self.q, row_of=row_of)
        return DeviceDraft.chains(self.tokens[:, :width].contiguous(), torch.tensor(counts), q)


class ChainSampler:
    """Sampler of one chain of up to `count` tokens, each row under its request's parameters; it stores q."""

    def __init__(
        self, graphs: SamplingGraphs, sequences: SequenceOf[Sequence], count: int, after: UnreadVerdict | None
    ) -> None:
        params = graphs.builder.params(sequences)
        self._metadata, self._draws = graphs.builder.build(params)
        if after is not None:
            (rows,) = packed_to(after.num_accepted.device, torch.tensor(after.rows))
            committed = self._draws.committed + after.num_accepted[rows] + 1
            self._draws = replace(self._draws, committed=committed)
        self._coins = tuple(np.flatnonzero(params.columns[KIND] == SamplingMode.COIN).tolist())
        self._seq = torch.arange(len(sequences), device=graphs.device)
        self._q = torch.empty(count if self._coins else 0, len(sequences), graphs.vocab_size, device=graphs.device)
        self._graph = None if params.edits else graphs.of(params.filter_set, len(sequences))
        if self._graph is not None:
            self._graph.begin(self._metadata, self._draws)

    def __call__(self, logits: Tensor, depth: int) -> Tensor:
        tokens, q = self._propose(logits, depth) if self._graph is None else self._graph.draw(logits)
        if q is not None and self._coins:
            self._q[depth] = q
        return tokens

    def _propose(self, logits: Tensor, depth: int) -> tuple[Tensor, Tensor | None]:
        """Sample; a logit that is not a number counts as 0, so q is finite without a check on the host."""
        depths = torch.full_like(self._seq, depth)
        nodes = Nodes(seq=self._seq, node=depths - 1, depth=depths, path=depths.new_empty(len(depths), 0))
        return propose(logits.nan_to_num(), self._metadata, self._draws, nodes)

    def drafted(self, tokens: Tensor) -> SampledChains:
        return SampledChains(tokens, self._q.flatten(0, 1), self._coins) if self._coins else SampledChains(tokens)


class SamplingGraphs:
    """A graph for each set of filters and rounded number of rows, captured on first use, normally in the warm-up."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.builder = SamplingMetadataBuilder(vocab_size, frozenset(), device)
        self.vocab_size, self.device = vocab_size, device
        self._made: dict[tuple[FilterSet, int], SamplingGraph] = {}
        self._logits = torch.empty(0)  # the input of every graph: one is replayed at a time
        self._recorder = GraphRecorder()

    def of(self, filter_set: FilterSet, rows: int) -> SamplingGraph | None:
        """Return the graph for this number of rows; None: too many rows, or nothing to draw."""
        if filter_set is FilterSet.GREEDY or rows > MOST_ROWS:
            return None
        rows = 1 << (rows - 1).bit_length()
        if (filter_set, rows) not in self._made:
            if not self._made:
                self._logits = torch.zeros(MOST_ROWS, self.vocab_size, device=self.device)
            self._made[filter_set, rows] = SamplingGraph(self._logits[:rows], filter_set, self._recorder)
        return self._made[filter_set, rows]


class SamplingGraph:
    """`propose` for up to `rows` rows. Padding rows draw too, and their tokens are ignored."""

    def __init__(self, logits: Tensor, filter_set: FilterSet, recorder: GraphRecorder) -> None:
        self._logits, rows = logits, len(logits)
        self._every = torch.arange(rows, device=logits.device)
        key, committed, kind, top_k = torch.zeros(4, rows + rows % 2, dtype=torch.int64, device=logits.device)[:, :rows]
        self._depth = torch.zeros_like(self._every)
        temperature, top_p, min_p = torch.ones(3, rows + rows % 2, dtype=torch.float64, device=logits.device)[:, :rows]
        self._metadata = SamplingMetadata.of(filter_set, temperature, top_k, top_p, min_p)
        self._draws = DrawKeys(key=key, committed=committed, kind=kind)
        self._recorder, self._captures = recorder, logits.is_cuda
        self._captured: CudaGraph | None = None

    def begin(self, metadata: SamplingMetadata, draws: DrawKeys) -> None:
        """Start drafts for these requests, at depth 0."""
        rows = len(draws.key)
        for own, requests, names in (
            (self._metadata, metadata, ("temperature", "top_k", "top_p", "min_p")),
            (self._draws, draws, ("key", "committed", "kind")),
        ):
            for name in names:
                if (column := getattr(own, name)) is not None:
                    column[:rows] = getattr(requests, name)
        self._depth.zero_()

    def draw(self, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return what `propose` would, one depth further with each call; valid until the next call."""
        rows = len(logits)
        torch.nan_to_num(logits, out=self._logits[:rows])
        if self._captured is not None:
            self._captured.replay()
            tokens, q = self._captured.result
        else:
            tokens, q = self._propose()
            if self._captures:
                self._capture()
        return tokens[:rows], None if q is None else q[:rows]

    def _propose(self) -> tuple[Tensor, Tensor | None]:
        depth = self._depth.clone()
        nodes = Nodes(seq=self._every, node=depth - 1, depth=depth, path=depth.new_empty(len(depth), 0))
        metadata = replace(self._metadata)  # a copy: metadata cache host values on first read
        drawn = propose(self._logits, metadata, self._draws, nodes)
        self._depth += 1
        return drawn

    def _capture(self) -> None:
        """Capture kernels that have run once, so they are compiled and loaded; they run one by one where it fails."""
        self._captures = False
        try:
            self._captured = self._recorder.capture(self._propose)
        except RuntimeError as problem:
            warn_uncaptured("drawing of drafts", problem)


@torch.inference_mode()
def warmup(graphs: SamplingGraphs) -> bool:
    """Sample from arbitrary logits with every common set of parameters, so that no request waits for compiling. Return
    False if it failed: rows that sample are then drafted pass by pass."""
    logits = torch.zeros(2 * MOST_ROWS, graphs.vocab_size, device=graphs.device)

    def draw(kind: dict[str, float], rows: int, graphs: SamplingGraphs) -> None:
        params = SamplingParams(**{"temperature": 0.7, **kind}).resolve({})  # type: ignore[arg-type]
        sequences = [Sequence("warm-up", [0], params, max_len=4) for _ in range(rows)]
        ChainSampler(graphs, sequences, 1, None)(logits[:rows], 0)

    @torch.inference_mode()
    def compile_for(kind: dict[str, float]) -> None:
        with torch.cuda.device(graphs.device):
            draw(kind, len(logits), SamplingGraphs(graphs.vocab_size, graphs.device))

    try:
        with ThreadPoolExecutor() as pool:  # kernels are compiled several at a time, and then captured
            list(pool.map(compile_for, WARMUP_PARAMS))
        for kind in WARMUP_PARAMS:
            for power in range(MOST_ROWS.bit_length()):
                draw(kind, 1 << power, graphs)
    except Exception as problem:  # drafting by passes with the host between them still works
        log.warning("rows that sample are drafted pass by pass: %r", problem)
        return False
    return True


def is_plain(sequence: Sequence) -> bool:
    """Return whether no parameter of the request changes single logits: every node of a draft is sampled alike."""
    params = sequence.params
    edits = params.penalised or params.logit_bias or params.allowed_token_ids or sequence.bad_words
    return not (edits or sequence.num_output < params.min_tokens)
