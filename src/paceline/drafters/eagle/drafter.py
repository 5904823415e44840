"""EAGLE (Li et al. 2024) and EAGLE-3 (2025): one layer over the target's hidden states, which drafts a dynamic tree.

The pair (feature of position t, token t + 1) has its K/V in slot t + 1 and is rotated at t. Slot 0 has no pair, so
passes read the context through a table of slots (blocks of one slot) that begins at the first valid one. Nodes that are
expanded have their K/V in the slots reserved behind the sequence until their draft ends; the K/V of committed tokens
are written again, from the target's own hidden states.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from paceline.core.device_draft import DeviceDraft
from paceline.core.draft import Draft, packed_to
from paceline.drafters.base import DrafterContext, DraftRequest
from paceline.drafters.eagle.checkpoint import read
from paceline.drafters.eagle.config import EagleConfig
from paceline.drafters.eagle.layer import EagleLayer
from paceline.drafters.eagle.tree import DEPTH, TOP_K, Frontier, Proposed, TreeShape, grow
from paceline.drafters.folder import refuse_other_drafter
from paceline.drafters.hidden_states import TapBatch
from paceline.drafters.tapped import TappedDrafter, likely_nodes
from paceline.errors import InvalidParameter
from paceline.models.backends.torch import TorchKernels
from paceline.models.kernels import Kernels
from paceline.models.kv_cache import LayerCache
from paceline.models.plan import PassPlan
from paceline.models.weights import Dtypes
from paceline.platform.cuda_graph import CudaGraph, GraphRecorder, warn_uncaptured

ROWS, NODES = (1, 4, 16), (8, 16, 32, 64)  # captured numbers of rows and of nodes; larger batches run kernel by kernel
MOST_KEYS = 1 << 18  # rows times context of a captured draft, for which attention has partial results


class DraftInputs(NamedTuple):
    """Inputs of a draft of B rows, all on the device."""

    taps: Tensor  # (B, T, H) from which the target picked each row's last token
    tokens: Tensor  # (B,) these tokens
    lengths: Tensor  # (B,) committed tokens
    starts: Tensor  # (B,) the first valid slot
    max_nodes: Tensor  # (B,) nodes that have a slot behind the committed tokens
    ends: Tensor  # (B,) slots of the row's blocks
    tables: Tensor  # (B, W) block ids


class EagleDrafter(TappedDrafter):
    def __init__(
        self, layer: EagleLayer, taps: tuple[int, ...], kernels: Kernels, max_positions: int, top_k: int = TOP_K
    ) -> None:
        """`top_k`: children considered of a node; 1: drafts are chains."""
        super().__init__()
        self.name, self.taps, self.kv_layers = layer.config.method, taps, (layer.kv_spec,)
        self.device, self.version, self.pass_bytes = layer.device, layer.digest, DEPTH * layer.pass_bytes
        self._layer, self._kernels, self.top_k, self._max_positions = layer, kernels, top_k, max_positions
        self._cache: LayerCache | None = None
        self._recorder = GraphRecorder()
        self._graphs: dict[tuple[int, int], tuple[DraftInputs, CudaGraph]] = {}
        self._scratch: list[Tensor] = []  # scratch of kernels, which graphs point into
        self._divisions: dict[tuple[int, int, int, int], object] = {}  # graphs point into these; few shapes occur
        self._most_blocks = 0  # most blocks of a sequence

    @classmethod
    def from_context(cls, context: DrafterContext, method: str) -> EagleDrafter:
        if context.checkpoint is None:
            raise InvalidParameter("drafter", f"method {method} needs the folder of its drafter; give --drafter")
        config, tensors = read(context.checkpoint, context.config)
        refuse_other_drafter(config.method, config.target, method, context.embedding, context.checkpoint)
        return cls.of(config, tensors, context)

    @classmethod
    def of(cls, config: EagleConfig, tensors: Mapping[str, Tensor], context: DrafterContext) -> EagleDrafter:
        kernels = context.kernels or TorchKernels()
        # A CPU reads bf16 fastest; a GPU computes in the target's own dtype.
        stored = torch.bfloat16 if context.dtype == "auto" else getattr(torch, context.dtype)
        layer = EagleLayer(
            config,
            tensors,
            context.config,
            kernels,
            device=context.device,
            dtypes=Dtypes.of(stored, context.device),
            embedding=context.embedding,
            head=context.head,
        )
        return cls(layer, config.taps(context.config.num_layers), kernels, context.config.max_positions)

    @torch.inference_mode()
    def bind(self, caches: SequenceOf[LayerCache], block_size: int) -> None:
        super().bind(caches, block_size)
        (self._cache,) = caches
        longest = min(self._max_positions, len(self._cache.k))
        self._layer.bind(longest + DEPTH)
        self._most_blocks = -(-longest // block_size)
        if self.device.type == "cuda" and self._kernels.captures:
            with torch.cuda.device(self.device):
                self._capture()

    def _capture(self) -> None:
        """Compile, run once and capture every shape, so that no draft waits for any of it."""
        from paceline.platform.triton import parallel_compile

        works = {}
        for rows in (rows for rows in reversed(ROWS) if rows * self._most_blocks * self.block_size <= MOST_KEYS):
            inputs = self._blank(rows)
            for nodes in NODES:
                works[rows, nodes] = inputs, functools.partial(self._grow, inputs, self._shape(nodes))
        try:
            with parallel_compile():
                for _, work in works.values():
                    work()
            for size, (inputs, work) in works.items():
                work()
                self._graphs[size] = inputs, self._recorder.capture(work)
                workspace: Any = getattr(self._kernels, "workspace", None)
                self._scratch += [] if workspace is None else workspace.tensors
        except RuntimeError as problem:
            self._graphs = {}
            warn_uncaptured(f"a draft of {self.name}", problem)

    def _blank(self, rows: int) -> DraftInputs:
        """Return inputs of rows that write nothing."""
        shape = rows, len(self.taps), self._layer.config.feature_size
        taps = torch.zeros(shape, dtype=self._layer.dtypes.compute, device=self.device)
        zero = torch.zeros(rows, dtype=torch.int64, device=self.device)
        tables = torch.zeros(rows, self._most_blocks, dtype=torch.int64, device=self.device)
        return DraftInputs(taps, zero, zero + 2, zero + 1, zero.clone(), zero.clone(), tables)

    @torch.inference_mode()
    def write_context_kv(self, batch: TapBatch) -> None:
        assert self._cache is not None
        nothing = torch.zeros_like(batch.slots)
        plan = self._plan(batch.positions, batch.slots, nothing, nothing, nothing, nothing[:, None][:, :0], None)
        self._layer.store(batch.tokens, self._layer.fuse(batch.taps), plan, self._cache)

    @torch.inference_mode()
    def draft(self, rows: SequenceOf[DraftRequest], req_indices: Tensor, lengths: Tensor) -> Draft:
        most = max((row.max_nodes for row in rows), default=0)
        if not most:
            return Draft.empty(len(rows))
        nodes = next((count for count in NODES if count >= most), most) if self._graphs else most
        shape = self._shape(nodes)
        counts = [shape.most(row.max_nodes) for row in rows]
        proposed = self._proposed(self._inputs(rows, req_indices, lengths), shape)
        if proposed.scores.is_cpu:  # a device's are not waited for
            counts = likely_nodes(proposed.scores.numpy(), rows, counts)
        width = max(counts)
        tokens, parents = proposed.tokens[:, :width], proposed.parents[:, :width]
        return DeviceDraft.trees(tokens, parents, torch.tensor(counts), min(shape.depth, width))

    def _shape(self, nodes: int) -> TreeShape:
        return TreeShape.of(nodes, self._layer.config.vocab, self.top_k)

    def _inputs(self, rows: SequenceOf[DraftRequest], req_indices: Tensor, lengths: Tensor) -> DraftInputs:
        taps, tokens = self._ring.load(req_indices, lengths - 2, self._columns)
        sequences = [row.sequence for row in rows]
        width = max(len(one.blocks) for one in sequences)
        if self._kernels.captures:  # few widths, so that few divisions of the work occur
            width = max(min(1 << (width - 1).bit_length(), self._most_blocks), width)
        tables = torch.tensor([[*one.blocks, *[0] * (width - len(one.blocks))] for one in sequences])
        starts = [max(self._states[one.key].start, 1) for one in sequences]
        ends = [len(one.blocks) * self.block_size for one in sequences]
        columns = torch.tensor([starts, [row.max_nodes for row in rows], ends])
        (start, max_nodes, end), tables = packed_to(self.device, columns, tables)
        return DraftInputs(taps, tokens, lengths, start, max_nodes, end, tables)

    def _proposed(self, inputs: DraftInputs, shape: TreeShape) -> Proposed:
        count = len(inputs.tokens)
        rows = next((rows for rows in ROWS if rows >= count), 0)
        if (rows, shape.nodes) not in self._graphs:
            return self._grow(inputs, shape)
        places, graph = self._graphs[rows, shape.nodes]
        for place, values in zip(places, inputs, strict=True):
            (place[:count] if place.dim() != 2 else place[:count, : values.shape[1]]).copy_(values)
        places.max_nodes[count:] = 0  # rows that are padding write nothing
        places.lengths[count:], places.starts[count:] = 2, 1
        graph.replay()
        return Proposed(*(part[:count].clone() for part in graph.result))  # the next replay writes them again

    def _grow(self, inputs: DraftInputs, shape: TreeShape) -> Proposed:
        layer, cache = self._layer, self._cache
        assert cache is not None
        batch, longest = len(inputs.tokens), inputs.tables.shape[1] * self.block_size
        keys = (inputs.lengths - inputs.starts).clamp_min(1)
        context = inputs.starts[:, None] + torch.arange(longest, device=self.device)
        table = self._slots(inputs, context).int()  # (B, L) slots of the context in order
        owner = torch.arange(batch, device=self.device)
        root = self._plan(
            inputs.lengths - 2, torch.full_like(owner, -1), owner, keys, keys, owner[:, None][:, :0], table
        )
        logits, features = layer.read(layer.run(inputs.tokens, layer.fuse(inputs.taps), root, cache))

        def expand(nodes: Frontier) -> tuple[Tensor, Tensor]:
            width = nodes.tokens.shape[1]
            numbers = torch.cat((nodes.above, nodes.number[..., None]), 2)  # (B, W, level)
            position = inputs.lengths[:, None, None] + numbers
            slots = self._slots(inputs, position.flatten(1)).view_as(position)
            alive = nodes.alive & (position[..., -1] < inputs.ends[:, None])
            reach = keys[:, None] + torch.where(alive, nodes.level, 0)
            path = slots.new_zeros(batch, width, DEPTH)
            path[..., : nodes.level] = slots

            def each(values: Tensor) -> Tensor:
                return values[:, None].expand(-1, width).flatten()

            plan = self._plan(
                each(inputs.lengths - 2 + nodes.level),
                torch.where(alive, slots[..., -1], -1).flatten(),
                each(owner),
                each(keys),
                reach.flatten(),
                path.flatten(0, 1),
                table,
            )
            outputs = layer.run(nodes.tokens.flatten(), nodes.features.flatten(0, 1), plan, cache)
            logits, features = layer.read(outputs)
            return logits.view(batch, width, -1), features.view(batch, width, -1)

        return grow(logits, features, inputs.max_nodes, shape, expand, layer.tokens)

    def _slots(self, inputs: DraftInputs, positions: Tensor) -> Tensor:
        """Return the cache slots (B, P) of positions; those beyond a row's blocks are arbitrary."""
        block = (positions // self.block_size).clamp_max(inputs.tables.shape[1] - 1)
        return inputs.tables.gather(1, block) * self.block_size + positions % self.block_size

    def _plan(
        self,
        positions: Tensor,
        slots: Tensor,
        owner: Tensor,
        prefix: Tensor,
        reach: Tensor,
        path: Tensor,
        table: Tensor | None,  # None: the pass only writes K/V
    ) -> PassPlan:
        batch, longest = (1, 1) if table is None else table.shape
        work, shape = None, (len(owner), batch, path.shape[1], longest)
        if self._kernels.captures and table is not None:
            work = self._divisions[shape] = self._divisions.get(shape) or self._divided(*shape)
        return PassPlan(
            positions=positions.clamp(0, self._layer.num_positions - 1).int(),
            slots=slots.int(),
            sequence=owner.int(),
            prefix=prefix.int(),
            reach=reach.int(),
            path=path.int(),
            block_tables=slots.int()[:1, None] if table is None else table,
            block_size=1,
            max_len=longest + DEPTH,
            work=work,
        )

    def _divided(self, rows: int, batch: int, path_width: int, longest: int) -> object:
        """Return how the kernels divide a pass of `rows`, equally many of each sequence; known before sampling."""
        from paceline.models.backends.cuda.attention.division import Division, Work, tiles_of

        body = self._layer.config.body
        tile, begin, count = tiles_of(
            np.repeat(np.arange(batch), rows // batch), body.layer.heads // body.layer.kv_heads
        )
        q_rows, reach = rows * (body.layer.heads // body.layer.kv_heads), longest + DEPTH
        division = Division.of(q_rows, len(begin), tile, path_width, body.layer.kv_heads, reach)
        dealt = division.dealt(begin, count, np.full(rows, reach, np.int32), reach)
        numbers = np.concatenate([division.header(reach, longest), dealt])
        (shares,) = packed_to(self.device, torch.from_numpy(numbers))
        return Work(division, shares.int())
