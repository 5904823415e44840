"""The host's side of `chain`: the models it supports, how their work is divided, and one packed copy to the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.config import MAX_K, ModelConfig
from paceline.core.draft import sent
from paceline.core.verdict import UnreadVerdict
from paceline.models.backends.cuda.advance_rows import known_of
from paceline.models.backends.cuda.chain import STATE, UNIT, chain
from paceline.models.chain import READ, ChainRow
from paceline.models.kernels import StackParams, Weights
from paceline.models.kv_cache import LayerCache
from paceline.platform.launch import INTERPRETED
from paceline.platform.staging import Staging

HEADER = 8  # ints
MOST_TAG = 1 << 30
MOST_HELD = 128 << 10  # bytes of a layer's weights that a program can hold in registers
ALIGNED = 16  # bytes
LOOK_EVERY = 16  # drafts between two copies of the failure flag; after a failure, drafts until then are arbitrary


@dataclass(frozen=True)
class Cut:
    """How a launch is divided; the best values measured on an H200."""

    rows: int = 3  # at most: beyond, ordinary passes are as fast
    warps: int = 8
    keys: int = 64  # of a block of attention
    splits: int = 8  # of a row's context, at most
    head_tile: int = 16


CUT = Cut()


class ChainFailed(RuntimeError):
    pass


def served(weights: Weights, caches: Sequence[LayerCache], config: ModelConfig, programs: int) -> bool:
    """Small Llamas without biases, head norms or windows, in one dtype throughout."""
    plain = not (config.qkv_bias or config.output_bias or config.mlp_bias or config.qk_norm or any(config.windows))
    return (
        plain
        and weights.head.weight.data.dtype == caches[0].k.dtype == weights.final_norm.dtype
        and not any(product.weight.kind.has_scales for layer in weights.layers for product in layer.products)
        and config.head_dim in (32, 64, 128)
        and config.num_heads // config.num_kv_heads + 2 <= 16
        and config.hidden_size % 16 == config.intermediate_size % 16 == 0
        and config.vocab_size < 1 << 24  # tokens travel as fp32
        and (INTERPRETED or Share.of(config, programs, CUT).held <= MOST_HELD)
    )


@dataclass(frozen=True)
class Share:
    """One program's share of a layer: rows of each weight, padded to powers of two, in chunks of their columns."""

    qkv_rows: int
    hidden_rows: int
    inter_rows: int
    hidden_chunks: int
    attended_chunks: int
    inter_chunks: int

    @staticmethod
    def of(config: ModelConfig, programs: int, cut: Cut) -> Share:
        def rows(count: int) -> int:
            return max(int(triton.next_power_of_2(-(-count // programs))), cut.warps)

        def chunks(columns: int) -> int:
            return int(triton.next_power_of_2(-(-columns // 2 // UNIT.value)))

        return Share(
            rows(config.q_size + 2 * config.kv_size),
            rows(config.hidden_size),
            rows(config.intermediate_size),
            chunks(config.hidden_size),
            chunks(config.q_size),
            chunks(config.intermediate_size),
        )

    @property
    def held(self) -> int:
        chunks = (self.qkv_rows + 2 * self.inter_rows) * self.hidden_chunks
        chunks += self.hidden_rows * (self.attended_chunks + self.inter_chunks)
        return int(chunks * UNIT.value * 4)


class TritonChain:
    """A chain bound to a model's weights and caches."""

    time_is_typical = True

    def __init__(
        self,
        weights: Weights,
        shape: StackParams,
        caches: Sequence[LayerCache],
        block_size: int,
        config: ModelConfig,
        programs: int,
        cut: Cut = CUT,
    ) -> None:
        self._weights, self._caches = weights, caches  # the table points into them
        self._config, self._shape, self._block_size = config, shape, block_size
        self._programs, self._cut, self.most_rows = programs, cut, cut.rows
        self._head: Tensor = weights.head.weight.data
        tensors = [
            [
                *(layer.input_norm, layer.qkv.weight.data, layer.output.weight.data, layer.mlp_norm),
                *(layer.gate_up.weight.data, layer.down.weight.data, cache.k, cache.v),
            ]
            for layer, cache in zip(weights.layers, caches, strict=True)
        ]
        tensors.append([weights.embedding, weights.final_norm, *[self._head] * 6])
        offsets = [[_offset(tensor, self._head) for tensor in each] for each in tensors]
        self._table = torch.tensor(offsets, dtype=torch.int64, device=self._head.device)
        longest = min(config.max_positions, caches[0].k.shape[0])
        self._buffers = _Buffers(cut, config, self._head, block_size, programs, longest)
        self._tag = 1

    def draft(self, rows: Sequence[ChainRow], after: UnreadVerdict | None = None) -> Tensor:
        if after is not None:
            rows = [replace(row, unread_tokens=READ) for row in rows]
        steps = max(row.unread_tokens + row.count - 1 for row in rows)
        tags = steps * (self._config.num_layers + 1)
        if self._tag + tags > MOST_TAG:
            self._tag = 1
            self._buffers.words.zero_()
        self._buffers.fill(rows, steps, self._tag, after)
        self._tag += tags
        self.launch()
        return self._buffers.drafted(rows)

    def check(self) -> None:
        if self._buffers.failed:
            raise ChainFailed("a program waited too long for another's result")

    def launch(self) -> None:
        """Launch with the buffers' content; before they are filled it has no steps, and the launch only compiles."""
        config, cut, programs = self._config, self._cut, self._programs
        share = Share.of(config, programs, cut)

        chain[(programs,)](
            self._buffers.state, self._table, self._head,
            self._head.view(torch.int32 if self._head.element_size() == 2 else torch.int64), self._shape.cos,
            self._shape.sin, self._buffers.words, self._shape.eps, self._shape.scale * 1.4426950408889634,
            LAYERS=config.num_layers, HIDDEN=config.hidden_size, INTER=config.intermediate_size,
            VOCAB=config.vocab_size, KV=config.num_kv_heads, GROUP=config.num_heads // config.num_kv_heads,
            DIM=config.head_dim, BLOCK_SIZE=self._block_size, KEYS=cut.keys, SPLITS=cut.splits, ROWS=cut.rows,
            MOST=MAX_K, LAG=READ, CHUNKS_H=share.hidden_chunks, CHUNKS_A=share.attended_chunks,
            CHUNKS_I=share.inter_chunks, TILE_Q=share.qkv_rows, TILE_H=share.hidden_rows, TILE_I=share.inter_rows,
            TILE_V=cut.head_tile, LANES=triton.next_power_of_2(programs), PROGRAMS=programs, WARPS=cut.warps,
            num_warps=cut.warps, **({} if INTERPRETED else {"launch_cooperative_grid": True}),
        )  # fmt: skip


class _Buffers:
    """Memory a launch reads and writes beside weights and caches."""

    def __init__(
        self, cut: Cut, config: ModelConfig, like: Tensor, block_size: int, programs: int, longest: int
    ) -> None:
        self._cut, self._programs, self._kv, self._block_size = cut, programs, config.num_kv_heads, block_size
        self._out = STATE + cut.rows * MAX_K
        self._tables = HEADER + cut.rows * (3 + READ)  # begin of the block tables in the host's input
        size = self._out + self._tables + cut.rows * -(-longest // block_size)
        self.state = torch.zeros(size, dtype=torch.int32, device=like.device)
        on_device = like.device.type == "cuda"
        self._staging = Staging(like.device)
        self._drafts = 0
        self._failed = torch.zeros(1, dtype=torch.int32, pin_memory=on_device)
        self._most_positions = longest
        words = 2 * config.q_size + 2 * config.kv_size + 2 * config.hidden_size + config.intermediate_size
        words += cut.splits * (config.q_size + config.num_heads) + 2 * programs + config.hidden_size
        self.words = torch.zeros(cut.rows * words, dtype=torch.int64, device=like.device)

    def fill(self, rows: Sequence[ChainRow], steps: int, tag: int, after: UnreadVerdict | None) -> None:
        given = self.state[self._out :]
        buffer = self._staging.buffer(len(given))
        most, host, more = self._cut.rows, buffer.ints, 0 if after is None else after.most
        ends = [min(len(row.blocks) * self._block_size, self._most_positions) for row in rows]
        lasts = [min(row.start + READ + row.count - 2, end - 1) for row, end in zip(rows, ends, strict=True)]
        width = min(max(lasts) + more, max(ends) - 1) // self._block_size + 1
        splits = self._cut.splits  # the interpreter's one program takes them one after the other
        if self._programs > 1:
            splits = max(min(splits, self._programs // (len(rows) * self._kv)), 1)
        host[:6] = len(rows), steps, min(row.unread_tokens for row in rows) - 1, splits, width, tag
        at = HEADER
        for index, row in enumerate(rows):
            host[at + index] = row.start + READ - row.unread_tokens
            host[at + most + index] = lasts[index]
            host[at + 2 * most + index] = row.unread_tokens
            place = at + 3 * most + index * READ
            host[place : place + row.unread_tokens] = row.tokens[-row.unread_tokens :]
            place = self._tables + index * width
            blocks = row.blocks[:width]
            host[place : place + len(blocks)] = blocks
        end = self._tables + len(rows) * width
        self._staging.send(buffer, given, end)
        if after is not None:
            known = known_of(
                [
                    (which, row.start + READ - 1, row.tokens[-1], stop)
                    for which, row, stop in zip(after.rows, rows, ends, strict=True)
                ]
            )
            counts = torch.tensor([[row.count for row in rows]])
            known = sent(torch.cat([known, counts]), self.state.device)
            _begin[(len(rows),)](
                after.tokens,
                after.tokens.stride(0),
                after.num_accepted,
                known,
                len(rows),
                given[at:],
                ROWS=most,
                READ=READ,
            )

    def drafted(self, rows: Sequence[ChainRow]) -> Tensor:
        if self._drafts % LOOK_EVERY == 0:  # copy the flag to the host; after a failure all launches fail
            self._failed.copy_(self.state[:1], non_blocking=True)
        self._drafts += 1
        tokens = self.state[STATE : self._out].view(self._cut.rows, MAX_K)
        return tokens[: len(rows), : max(row.count for row in rows)].to(torch.int64)

    @property
    def failed(self) -> bool:
        """As of the last copy from the device."""
        return bool(self._failed[0])


@triton.jit(do_not_specialize=["width", "rows"])
def _begin(committed, width, accepted, known, rows, state, ROWS: tl.constexpr, READ: tl.constexpr):
    """Rows that continue behind a verdict: their first position, their last, and the tokens to read."""
    row = tl.program_id(0)
    which = tl.load(known + row)
    end = tl.load(known + 3 * rows + row)
    more = tl.load(accepted + which) + 1
    first = tl.load(known + rows + row) + more + 1 - READ
    tl.store(state + row, tl.minimum(first, end - 1).to(tl.int32))
    last = tl.minimum(first + READ - 2 + tl.load(known + 4 * rows + row), end - 1)
    tl.store(state + ROWS + row, last.to(tl.int32))
    for at in tl.static_range(READ):
        behind = more + 1 - READ + at
        token = tl.load(committed + which * width + behind - 1, mask=behind > 0, other=0)
        token = tl.where(behind > 0, token, tl.load(known + 2 * rows + row))
        tl.store(state + 3 * ROWS + row * READ + at, tl.maximum(token, 0).to(tl.int32))  # verdict.INVALID is no token


def _offset(tensor: Tensor, base: Tensor) -> int:
    """Offset in elements from the base: the kernel addresses all weights and caches from one pointer."""
    apart = tensor.data_ptr() - base.data_ptr()
    if not tensor.is_contiguous() or tensor.dtype != base.dtype or apart % ALIGNED:
        raise ValueError("weights and caches must be contiguous, aligned and of one dtype")
    return apart // base.element_size()
