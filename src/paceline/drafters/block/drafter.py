"""DSpark and DFlash: a small decoder over a block of masks behind the last token, one pass for all drafted tokens.

Hidden states of several layers of the target are joined into one vector a position, whose K/V every layer of the
drafter keeps (slot t holds position t). A draft is one pass of a block: the last token and masks, which see all K/V
before them and each other. Its logits, over a draft vocabulary, and the Markov head make a tree (`tree`). Proposals are
deterministic, so any target distribution is kept. On a GPU both halves are captured and nothing waits.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from contextlib import nullcontext
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.config import MAX_K
from paceline.core.device_draft import DeviceDraft
from paceline.core.draft import Draft, HostDraft
from paceline.core.sequence import Sequence
from paceline.core.verdict import UnreadVerdict
from paceline.drafters import folder
from paceline.drafters.base import DrafterContext, DraftRequest, digest
from paceline.drafters.block.block_pass import BlockPasses, BlockRows
from paceline.drafters.block.checkpoint import read
from paceline.drafters.block.config import MASKS, W1, W2, DSparkConfig, check_target
from paceline.drafters.block.context_kv import ContextKV
from paceline.drafters.block.native import BlockRow, NativeBlocks
from paceline.drafters.block.tree import BEAM, CANDIDATES, grow, lattice
from paceline.drafters.hidden_states import TapBatch
from paceline.drafters.tapped import Floats, TappedDrafter, likely_nodes
from paceline.errors import InvalidParameter
from paceline.models.backends.cpu.kernels import NativeKernels
from paceline.models.backends.cpu.stack import NativeStack
from paceline.models.backends.torch import TorchKernels
from paceline.models.decoder import Decoder
from paceline.models.kernels import Kernels, Packed
from paceline.models.kv_cache import LayerCache
from paceline.models.quant.quantize import quantize
from paceline.models.weights import BLOCKS, Dtypes, StoredWeight, WeightKind
from paceline.platform.cuda_graph import GraphRecorder
from paceline.platform.triton import require_triton

Ints = np.ndarray[Any, np.dtype[np.int64]]
PADDING = np.array([0, -1, 0])[:, None, None]  # values of tokens, parents and depths
PART = 64  # components of hidden states; head weights are read for this many at once


class DSparkDrafter(TappedDrafter):
    shifted_kv = False

    def __init__(
        self,
        config: DSparkConfig,
        tensors: Mapping[str, Tensor],
        *,
        embedding: Tensor,
        head: Tensor,
        kernels: Kernels | None = None,
        device: torch.device | None = None,
        dtypes: Dtypes | None = None,
        beam: int = BEAM,
    ) -> None:
        """`embedding` (V, H) is the target's, `head` (draft vocabulary, H) its output weights for the draft tokens.
        `beam`: nodes of a level that have children; 1: drafts are chains."""
        super().__init__()
        self.config, self.name, self.taps = config, config.method, config.taps
        self.device = device or torch.device("cpu")
        self.version = f"{self.name}/{digest(tensors.values())}"
        self.scratch_slots, self.depth = config.block_size - 1, config.depth
        self._beam, self._embedding = beam, embedding
        dtypes = dtypes or Dtypes.of(torch.float32, self.device)
        kind = WeightKind.of(dtypes.compute) if dtypes.stored is None else dtypes.stored
        store = functools.partial(stored_matrix, kind=kind, device=self.device)
        self._decoder = self._layers(tensors, store(head), kernels or TorchKernels(), dtypes, store)
        self.kv_layers, self.pass_bytes = self._decoder.kv_specs, self._decoder.pass_bytes
        self._context_kv = ContextKV(config, tensors, self._decoder, store)
        self._passes: BlockPasses | None = None
        self._caches: SequenceOf[LayerCache] = ()
        self._native: NativeBlocks | None = None  # None: drafts are passes like any other
        if config.mask_embedding:
            masks = tensors[MASKS]
        else:
            masks = embedding[torch.tensor([config.mask_token_id], device=self.device)].expand(self.scratch_slots, -1)
        self._masks = masks.to(self.device, dtypes.compute)[None]  # (1, block - 1, H)
        self._ids = draft_ids(config, tensors).to(self.device)  # the target's ids of draft tokens
        lowest, highest = int(self._ids.min()), int(self._ids.max())
        self._bound = sys.maxsize if lowest < 0 else highest + 1
        self._markov = _markov_head(config, tensors, self._ids, dtypes.compute)
        # Nodes of the largest tree: the first level, and all children of the others.
        wide = min(beam, CANDIDATES, config.draft_vocab_size)
        self._most = min(wide + (config.depth - 1) * wide * wide, MAX_K)

    def _layers(
        self,
        tensors: Mapping[str, Tensor],
        head: StoredWeight,
        kernels: Kernels,
        dtypes: Dtypes,
        store: Callable[[Tensor], StoredWeight],
    ) -> Decoder:
        """Return the drafter's layers and head as a decoder, whose vocabulary is the drafter's."""
        weights = {
            f"model.{name}": store(tensor) if tensor.dim() == 2 else StoredWeight.of(tensor)
            for name, tensor in tensors.items()
            if name.startswith(("layers.", "norm."))
        }
        return Decoder(
            replace(self.config.body, vocab_size=self.config.draft_vocab_size),
            weights,
            kernels,
            device=self.device,
            dtypes=replace(dtypes, stored=None),
            embedding=self._embedding,
            head=kernels.pack(head),
        )

    @classmethod
    def from_context(cls, context: DrafterContext, method: str, beam: int = BEAM) -> DSparkDrafter:
        path = context.checkpoint
        if path is None or context.embedding is None or context.head is None or context.kernels is None:
            raise InvalidParameter("drafter", f"method {method} needs a drafter's folder and a target's weights")
        config, tensors = read(path)
        check_target(config, context.config, path)
        folder.refuse_other_drafter(config.method, config.target, method, context.embedding, path)
        config = replace(config, body=replace(config.body, max_positions=context.config.max_positions))
        if context.config.logit_scale != 1.0:  # of the target's head, which the drafter shares
            tensors = {**tensors, "norm.weight": tensors["norm.weight"] * context.config.logit_scale}
        ids, size = draft_ids(config, tensors), context.config.vocab_size
        folder.check_draft_ids(ids, size, path)
        ids = ids.to(context.device)
        # A CPU drafter uses int8, the fastest, because it need not match the target's bits; a GPU the target's dtype.
        stored = torch.bfloat16 if context.dtype == "auto" else getattr(torch, context.dtype)
        kernels, dtypes = context.kernels, Dtypes.of(stored, context.device)
        if context.dtype == "auto" and isinstance(kernels, NativeKernels):
            kernels, dtypes = kernels.rounding(), replace(dtypes, stored=WeightKind.Q8_0)
        if context.config.tie_embeddings:
            rows = context.embedding[ids]
        else:
            rows = head_rows(context.head, context.kernels, ids, config.body.hidden_size, dtypes.compute)
        return cls(
            config,
            tensors,
            embedding=context.embedding,
            head=rows,
            kernels=kernels,
            device=context.device,
            dtypes=dtypes,
            beam=beam,
        )

    @torch.inference_mode()
    def bind(self, caches: SequenceOf[LayerCache], block_size: int) -> None:
        super().bind(caches, block_size)
        self._caches = caches
        recorder, size = self._recorder(), self.config.block_size
        with torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():
            self._context_kv.bind(caches, recorder)
            self._passes = BlockPasses(
                self._decoder, caches, block_size, size, self._block, self._trees, self._most, recorder
            )
        if isinstance(kernels := self._decoder.kernels, NativeKernels):
            assert self._context_kv.view is not None
            self._native = NativeBlocks(
                kernels,
                self._context_kv.view,
                masks=self._masks[0].contiguous(),
                norm=self._decoder.final_norm,
                head=self._decoder.head,
                embedding=self._embedding,
                ids=self._ids,
                markov=self._markov,
                beam=self._beam,
                count=CANDIDATES,
                first_row=size - self.config.depth,
                max_positions=self.config.body.max_positions,
                block_size=block_size,
            )

    def close(self) -> None:
        self._passes = self._native = None

    def _recorder(self) -> GraphRecorder | None:
        """Return what captures drafts; None: nothing is captured."""
        graphs = self._decoder.graphs
        return GraphRecorder() if graphs is not None and graphs.capture and self.device.type == "cuda" else None

    @torch.inference_mode()
    def write_context_kv(self, batch: TapBatch) -> None:
        self._context_kv(batch)

    def propose(self, rows: SequenceOf[DraftRequest], after: UnreadVerdict | None = None) -> Draft:
        width = min(max([row.max_nodes for row in rows]), self._most)
        if self._native is None or not width:
            return super().propose(rows, after)
        sequences, block_rows = [row.sequence for row in rows], []
        for sequence, req_index, length in zip(sequences, *self._places(sequences, after), strict=True):
            pending = self._take_pending(sequence, length - len(sequence.tokens))
            block_rows.append(BlockRow(req_index, length, pending.start, pending.stop, *self._keys(sequence)))
        stack = self._decoder.stack(self._caches, max([row.end for row in block_rows]))
        assert isinstance(stack, NativeStack)
        self._native.bind(stack, self._columns, self._ring.stored)
        trees, scores = self._native.draft(block_rows, [one.blocks for one in sequences], rows, width)
        if after is None:
            self._caught_up(sequences)
        return self._on_host(rows, trees, scores)

    def _places(self, sequences: list[Sequence], after: UnreadVerdict | None) -> tuple[list[int], list[int]]:
        """Return request indices and lengths, which the host knows on a CPU."""
        if after is None:
            return [one.req_index for one in sequences], [len(one.tokens) for one in sequences]
        req_indices, lengths = self._where(sequences, after)
        return req_indices.tolist(), lengths.tolist()

    @torch.inference_mode()
    def draft(self, rows: SequenceOf[DraftRequest], req_indices: Tensor, lengths: Tensor) -> Draft:
        assert self._passes is not None, "bind comes first"
        width = min(max(row.max_nodes for row in rows), self._most)
        if not width:
            return Draft.empty(len(rows))
        return self._shaped(rows, *self._passes.run(self._rows(rows, req_indices, lengths), width))

    def _counts(self, rows: SequenceOf[DraftRequest]) -> list[int]:
        return [min(row.max_nodes, self._most) for row in rows]

    def _shaped(self, rows: SequenceOf[DraftRequest], trees: Tensor, scores: Tensor | None) -> Draft:
        """Cut trees (tokens, parents and depths, (3, B, nodes)) to what the rows asked for; nodes are in order of
        probability."""
        if scores is not None:
            return self._on_host(rows, trees.numpy(), scores.numpy())
        counts = self._counts(rows)
        tokens, parents, depth = trees[:, :, : max(counts)]
        if self._beam == 1:
            return DeviceDraft.chains(tokens, torch.tensor(counts))
        known = depth if self._tree_kernels else None
        return DeviceDraft.trees(tokens, parents, torch.tensor(counts), self.config.depth, known)

    def _on_host(self, rows: SequenceOf[DraftRequest], trees: Ints, scores: Floats) -> Draft:
        """Return the likely nodes of trees (3, B, nodes): tokens, parents and depths."""
        counts = likely_nodes(scores, rows, self._counts(rows))
        most = max(counts)
        if most < trees.shape[2]:
            trees = trees[:, :, :most]
        if min(counts) < most:
            trees = np.where(np.arange(most) < np.array(counts)[:, None], trees, PADDING)
        return HostDraft.of_trees(trees, counts, self._bound)

    def _rows(self, rows: SequenceOf[DraftRequest], req_indices: Tensor, lengths: Tensor) -> BlockRows:
        keys = [self._keys(row.sequence) for row in rows]
        starts, ends = [first * self.block_size for first, _ in keys], [end for _, end in keys]
        tables = [row.sequence.blocks[first:] for row, (first, _) in zip(rows, keys, strict=True)]
        return BlockRows(self.last_tokens(req_indices, lengths), lengths, starts, ends, tables)

    def _keys(self, sequence: Sequence) -> tuple[int, int]:
        """Return the index of the first block with the drafter's own K/V, and the number of positions that the
        sequence's blocks can hold. Earlier blocks are left out: keys are rotated to their positions already."""
        size, (start, end) = self.block_size, self.kv_range(sequence)
        known = max(end, len(sequence.tokens) - 1)
        return min(-(-start // size), known // size), min(len(sequence.blocks) * size, self.config.body.max_positions)

    def _block(self, anchors: Tensor) -> Tensor:
        """Return embeddings (B * block, H) of the last tokens, each with its masks behind it."""
        first = self._embedding[anchors].to(self._masks.dtype)[:, None]
        return torch.cat((first, self._masks.expand(len(anchors), -1, -1)), 1).flatten(0, 1)

    def _trees(self, logits: Tensor, anchors: Tensor, nodes: int) -> tuple[Tensor, Tensor | None]:
        """Return tokens, parents and depths (3, B, nodes) from the logits of all rows of the blocks; and, on a CPU, log
        probabilities (B, nodes) of the nodes' paths."""
        positions = logits.view(len(anchors), self.config.block_size, -1)
        depth = min(self.config.depth, nodes)
        positions = positions[:, self.config.block_size - self.config.depth :][:, :depth]
        anchor_rows, w1, w2 = self._markov or (None, None, None)
        if (kernels := self._tree_kernels) is not None:
            trees: Tensor = kernels.device_trees(positions, anchors, anchor_rows, w1, w2, self._ids, nodes, self._beam)
            return trees, None
        before = None if anchor_rows is None else anchor_rows[anchors]
        tree = grow(lattice(positions, before, w1, w2, CANDIDATES), nodes, self._beam)
        return torch.stack((self._ids[tree.tokens], tree.parents, tree.depth)), tree.score if logits.is_cpu else None

    @functools.cached_property
    def _tree_kernels(self) -> ModuleType | None:
        """The kernels that grow trees; None: torch does."""
        if self.device.type != "cuda":
            return None
        try:
            require_triton()
            from paceline.drafters.block import cuda_tree
        except ImportError:  # no Triton that works here
            return None
        config = self.config
        serves = cuda_tree.serves(config.depth, config.draft_vocab_size, self._beam, self._most)
        return cuda_tree if serves else None


def draft_ids(config: DSparkConfig, tensors: Mapping[str, Tensor]) -> Tensor:
    """Return the target's ids (draft vocabulary,)."""
    return folder.draft_ids(tensors["d2t"]) if "d2t" in tensors else torch.arange(config.draft_vocab_size)


def _markov_head(
    config: DSparkConfig, tensors: Mapping[str, Tensor], ids: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return W1 for the target's tokens (V, R), and W1 and W2 for draft tokens.

    With a W1 over the draft vocabulary, rows of other tokens are zero.
    """
    if not config.markov_rank:
        return None
    w1 = tensors[W1]
    if config.markov_over_draft_vocab:
        w1 = w1.new_zeros(config.body.vocab_size, w1.shape[1])
        w1[ids.cpu()] = tensors[W1].cpu()
    anchor_rows = w1.to(ids.device, dtype)
    return anchor_rows, anchor_rows[ids], tensors[W2].to(ids.device, dtype)


def stored_matrix(matrix: Tensor, kind: WeightKind, device: torch.device) -> StoredWeight:
    """Return a matrix (N, K) as it is stored: in blocks, where its rows are whole ones, or as numbers."""
    if not kind.is_blocks:
        return StoredWeight.of(matrix).to(kind, device)
    whole = matrix.shape[1] % BLOCKS[kind].weights == 0
    return quantize(matrix, kind) if whole else StoredWeight.of(matrix.float())


@torch.inference_mode()
def head_rows(head: Packed, kernels: Kernels, ids: Tensor, hidden: int, compute: torch.dtype) -> Tensor:
    """Return the output weights (N, H) of tokens, in whatever layout the kernels have: products with unit vectors."""
    unit = torch.eye(hidden, dtype=compute, device=ids.device)
    return torch.cat([kernels.logits(part, head)[:, ids] for part in torch.split(unit, PART)]).T.contiguous()
