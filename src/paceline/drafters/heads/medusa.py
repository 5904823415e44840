"""Medusa (Cai et al. 2024): heads on the target's last hidden state, each of which predicts one position further ahead.

Head i reads the hidden state from which the last token was picked and ranks the tokens i + 1 positions behind it.
The tree is static: nodes are in order of the probability that paths of their ranks are accepted, so the first n are the
tree of n nodes, and its shape is known on the host. Proposals are deterministic, so any target distribution is kept.
There are no K/V: a draft reads one hidden state of each row, also behind a step that is not read yet.
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Sequence as SequenceOf
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from paceline.config import MAX_K
from paceline.core.device_draft import DeviceDraft
from paceline.core.draft import Draft
from paceline.drafters.base import DrafterContext, DraftRequest, digest
from paceline.drafters.heads.checkpoint import MedusaHead, load_heads
from paceline.drafters.methods import MEDUSA
from paceline.drafters.tapped import TappedDrafter
from paceline.errors import InvalidParameter
from paceline.models.backends.torch import TorchKernels
from paceline.models.buckets import up
from paceline.models.decoder import FINAL
from paceline.models.kernels import Kernels, Packed
from paceline.models.kv_cache import LayerCache
from paceline.platform.cuda_graph import CudaGraph, GraphRecorder, warn_uncaptured

Ints = np.ndarray[Any, np.dtype[np.int64]]
RANKS = 10  # tokens considered at each position, as in the published trees
# Probability that the r-th token (from 0) of head i is right where the tokens before it are: FIRST * LATER**i /
# (r + 1)**2. The first head has 60 % at rank 0 and 88 % within rank 4, about as published. It orders the nodes.
FIRST, LATER = 0.6, 0.8
MOST_ROWS = 128  # rows of one pass of the heads; larger batches are split, so that few shapes occur


class StaticTree(NamedTuple):
    """Nodes in order of probability, a parent before its children."""

    parents: Ints
    depth: Ints  # from 1
    rank: Ints

    @staticmethod
    def of(heads: int, ranks: int, most: int = MAX_K) -> StaticTree:
        """Return the likeliest `most` paths; a path is the ranks of its tokens, and less likely than its parent."""
        nodes: list[tuple[int, int, int]] = []
        queue = [(-FIRST, -1, 1, 0)] if heads else []  # -probability, parent, depth, rank
        while queue and len(nodes) < most:
            likely, parent, depth, rank = heapq.heappop(queue)
            if rank + 1 < ranks:
                heapq.heappush(queue, (likely * ((rank + 1) / (rank + 2)) ** 2, parent, depth, rank + 1))
            if depth < heads:
                heapq.heappush(queue, (likely * FIRST * LATER**depth, len(nodes), depth + 1, 0))
            nodes.append((parent, depth, rank))
        return StaticTree(*np.array(nodes, np.int64).reshape(-1, 3).T)


class PackedHead(NamedTuple):
    blocks: tuple[Packed, ...]
    output: Packed


class MedusaDrafter(TappedDrafter):
    name, taps = MEDUSA, (FINAL,)

    def __init__(
        self,
        heads: SequenceOf[MedusaHead],
        vocab_size: int,
        *,
        kernels: Kernels | None = None,
        output: Packed | None = None,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """`output`: the target's own head, packed for its kernels, for heads without one. `dtype`: of stored weights;
        None: unchanged."""
        super().__init__()
        self.device = device or torch.device("cpu")
        self.version = f"{self.name}/{digest(part for head in heads for part in head.tensors)}"
        self._kernels: Kernels = kernels or TorchKernels()

        def pack(weight: Tensor, bias: Tensor | None = None) -> Packed:
            placed = (None if part is None else part.to(self.device, dtype) for part in (weight, bias))
            return self._kernels.pack(*placed)  # type: ignore[arg-type]

        self._tree = StaticTree.of(len(heads), min(RANKS, vocab_size))
        self.depth, self._ranks = int(self._tree.depth.max()), int(self._tree.rank.max()) + 1
        self._heads = [
            PackedHead(
                tuple(pack(*block) for block in head.blocks), output if head.output is None else pack(head.output)
            )
            for head in heads[: self.depth]
        ]
        products = [product for head in self._heads for product in (*head.blocks, head.output)]
        self.pass_bytes = sum([product.nbytes for product in products])
        self._choice = torch.from_numpy((self._tree.depth - 1) * self._ranks + self._tree.rank).to(self.device)
        self._recorder, self._graphs = GraphRecorder(), dict[tuple[int, int], CudaGraph]()  # key: rows, depth
        self._inputs: Tensor | None = None  # (MOST_ROWS, H), input of the graphs
        if self.device.type == "cuda":
            first = next(heads[0].tensors)  # (H, H) or (V, H)
            self._inputs = torch.zeros(MOST_ROWS, first.shape[1], dtype=dtype or first.dtype, device=self.device)

    @classmethod
    def from_context(cls, context: DrafterContext) -> MedusaDrafter:
        if context.checkpoint is None:
            raise InvalidParameter("drafter", "is not given; name a folder of Medusa heads with --drafter")
        heads = load_heads(context.checkpoint, context.config)
        if context.head is None and any(head.output is None for head in heads):
            raise InvalidParameter("drafter", f"{context.checkpoint} leaves the output to the model's own head")
        return cls(
            heads,
            context.config.vocab_size,
            kernels=context.kernels,
            output=context.head,
            device=context.device,
            dtype=None if context.dtype == "auto" else getattr(torch, context.dtype),
        )

    @torch.inference_mode()
    def bind(self, caches: SequenceOf[LayerCache], block_size: int) -> None:
        """Run and capture every shape once on a GPU, so that no draft waits for compiling or capturing."""
        super().bind(caches, block_size)
        if self._inputs is None:
            return
        captures = self._kernels.captures
        with torch.cuda.device(self.device):
            for rows in sorted({up(count) for count in range(1, MOST_ROWS + 1)}, reverse=True):
                for depth in range(1, self.depth + 1):
                    work = functools.partial(self._rank, self._inputs[:rows], depth)
                    work()
                    try:
                        if captures:
                            self._graphs[rows, depth] = self._recorder.capture(work)
                    except RuntimeError as problem:
                        captures = False
                        warn_uncaptured("a pass of Medusa heads", problem)

    @torch.inference_mode()
    def draft(self, rows: SequenceOf[DraftRequest], req_indices: Tensor, lengths: Tensor) -> Draft:
        tree = self._tree
        counts = np.minimum(np.array([row.max_nodes for row in rows], np.int64), len(tree.parents))
        width = int(counts.max(initial=0))
        if not width:
            return Draft.empty(len(rows))
        used, depth, choice = np.arange(width) < counts[:, None], int(tree.depth[:width].max()), self._choice[:width]
        hidden = self.last_taps(req_indices, lengths)[:, 0]
        tokens = [self._ranked(part, depth)[:, choice] for part in torch.split(hidden, MOST_ROWS)]
        return DeviceDraft(
            tokens=tokens[0] if len(tokens) == 1 else torch.cat(tokens),
            parents=torch.from_numpy(np.where(used, tree.parents[:width], -1)),
            depth=torch.from_numpy(np.where(used, tree.depth[:width], 0)),
            num_nodes=torch.from_numpy(counts),
        )

    def _ranked(self, hidden: Tensor, depth: int) -> Tensor:
        """Return the likeliest tokens (B, depth * ranks) of each head; valid until the next call."""
        if self._inputs is None:
            return self._rank(hidden, depth)
        rows = up(len(hidden))
        self._inputs[: len(hidden)] = hidden
        graph = self._graphs.get((rows, depth))
        if graph is None:
            return self._rank(self._inputs[:rows], depth)[: len(hidden)]
        graph.replay()
        result: Tensor = graph.result[: len(hidden)]
        return result

    def _rank(self, hidden: Tensor, depth: int) -> Tensor:
        ranked = []
        for head in self._heads[:depth]:
            x = hidden
            for block in head.blocks:
                x = x + F.silu(self._kernels.linear(x, block))
            ranked.append(self._kernels.logits(x, head.output).topk(self._ranks).indices)
        return torch.cat(ranked, 1)
